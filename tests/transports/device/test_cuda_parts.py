"""The parts of the device planes that need no device: tables, ranges, endpoints, handles, slots, errors."""

from __future__ import annotations

import ast
import ctypes
import hashlib
import random
import threading
from array import array
from collections.abc import Iterator
from pathlib import Path

import msgspec
import numpy as np
import pytest

from kvbaton.protocol.errors import Reason
from kvbaton.protocol.geometry.spans import Weave
from kvbaton.protocol.ids import Incarnation, JobId, PeerId, WorkerId
from kvbaton.testing.transport_harness import poll
from kvbaton.transports.core.loans import lend_everything
from kvbaton.transports.core.shared_memory import DeviceMemory, RegisteredDevice
from kvbaton.transports.core.transport import Copy, CopyEnded, DeviceEvent, Direction, Loan, Spans
from kvbaton.transports.cuda import cuda_client, cuda_driver, cuda_transport
from kvbaton.transports.cuda.cuda_client import CudaRemote
from kvbaton.transports.cuda.cuda_driver import CudaError, CudaGpu, quiet_event
from kvbaton.transports.cuda.cuda_listener import SAMPLE_BYTES, Allocation, CudaEndpoint, CudaPlace, Exported, Shared
from kvbaton.transports.cuda.cuda_runner import (
    GROUP_NUMBERS,
    PIECE_BYTES,
    ROW_BYTES_MAX,
    ROWS_MAX,
    SMALL_NUMBERS,
    TABLE_NUMBERS_MAX,
    LaunchGroup,
    Tables,
    check_weave,
    divided,
    parts_of,
    write_table,
)
from kvbaton.transports.cuda.cuda_transport import CudaConfig, CudaTransport
from kvbaton.transports.staged import staged_server
from kvbaton.transports.staged.staged_listener import StagedEndpoint, StagedHello
from kvbaton.transports.staged.staged_slots import allocate_slots, gather_rows, map_slots, scatter_rows
from kvbaton.transports.staged.staged_transport import StagedConfig, StagedTransport
from tests.transports.device.fake_gpu import FakeGpu
from tests.transports.tcp.blocking import D, P

SIZE = 1 << 20
REFUSED = CudaError("cuFake", 2, "CUDA_ERROR_OUT_OF_MEMORY")
STICKY = CudaError("cuFake", 700, "CUDA_ERROR_ILLEGAL_ADDRESS")


def triples(*rows: tuple[int, int, int]) -> Spans:
    return array("q", [number for row in rows for number in row])


# --- the kernel


def test_the_ptx_is_the_source_compiled() -> None:
    source = Path(cuda_driver.__file__).with_name("cuda_move.cu").read_bytes()
    kernels = cuda_driver.kernels()
    assert hashlib.sha256(source).hexdigest() in kernels.partition("\n")[0], "run tools/cuda_ptx.py"
    for entry in (cuda_driver.MOVE, cuda_driver.DIGEST):
        assert f".visible .entry {entry.decode()}(" in kernels
    assert f"THREADS = {cuda_driver.THREADS}," in source.decode()


# --- tables


def test_rows_that_one_launch_can_take_go_as_they_came() -> None:
    spans = triples((0, 8, 100), (200, 300, ROW_BYTES_MAX))
    assert list(parts_of(spans, 100 + ROW_BYTES_MAX)) == [spans]
    assert not parts_of(triples((0, 0, 0)), 0)


@pytest.mark.parametrize("woven", [False, True])
def test_long_rows_are_divided_and_name_the_same_bytes(woven: bool) -> None:
    spans = triples((5, 100, ROW_BYTES_MAX + 7), (10 << 20, 9 << 20, 3))
    parts = parts_of(Weave(spans, array("q", (0, 0))) if woven else spans, ROW_BYTES_MAX + 10)
    rows = np.concatenate([np.frombuffer(part, np.int64).reshape(-1, 3) for part in parts])
    assert rows[:, 2].max() <= PIECE_BYTES
    assert _bytes_of(rows) == _bytes_of(np.frombuffer(spans, np.int64).reshape(-1, 3))


def test_more_rows_than_a_launch_takes_are_several_launches() -> None:
    spans = array("q", bytes(24 * (ROWS_MAX + 1)))
    spans[2::3] = array("q", [1]) * (ROWS_MAX + 1)
    parts = parts_of(spans, ROWS_MAX + 1)
    assert [len(part) // 3 for part in parts] == [ROWS_MAX, 1]  # type: ignore[arg-type]


def test_divided_rows_name_the_same_bytes() -> None:
    rng = random.Random(1)
    rows = np.array([(i << 22, i << 23, rng.choice((0, 1, PIECE_BYTES, ROW_BYTES_MAX, 1 << 21))) for i in range(40)])
    pieces = divided(rows)
    assert pieces[:, 2].max() <= PIECE_BYTES and _bytes_of(pieces) == _bytes_of(rows)
    assert divided(rows[:0]) is not None and divided(rows[:1] * 0 + 1).tolist() == [[1, 1, 1]]


def _bytes_of(rows: np.ndarray[tuple[int, ...], np.dtype[np.int64]]) -> list[tuple[int, int, int]]:
    """Rows, joined where they are neighbours on both sides."""
    joined: list[list[int]] = []
    for to, at, size in sorted(rows[rows[:, 2] > 0].tolist()):
        if joined and joined[-1][0] + joined[-1][2] == to and joined[-1][1] + joined[-1][2] == at:
            joined[-1][2] += size
        else:
            joined.append([to, at, size])
    return [(to, at, size) for to, at, size in joined]


def test_one_table_holds_flat_and_woven_groups() -> None:
    gpu = FakeGpu()
    a, b = gpu.allocate(SIZE), gpu.allocate(SIZE)
    gpu.regions[a].view[:] = random.Random(1).randbytes(SIZE)
    flat, woven = (
        triples((0, 10, 5), (8, 100, 1)),
        Weave(triples((0, 0, 3), (50, 70, 4)), array("q", (1000, 0, 2000, 9))),
    )
    tables = Tables(gpu, 1)
    tables.launch([LaunchGroup(b, a, flat), LaunchGroup(b + 4096, a, woven)], 0, 1)
    wanted = bytearray(SIZE)
    for base, spans in ((0, flat), (4096, woven.flat())):
        for to, at, size in zip(spans[0::3], spans[1::3], spans[2::3], strict=True):
            wanted[base + to : base + to + size] = gpu.regions[a].view[at : at + size]
    assert bytes(gpu.regions[b].view) == bytes(wanted)
    tables.clear()


def test_a_table_says_where_its_parts_are() -> None:
    table = np.zeros(100, np.int64)
    weave = Weave(triples((1, 2, 3), (4, 5, 6)), array("q", (7, 8, 9, 10)))
    write_table(table, [LaunchGroup(100, 200, triples((11, 12, 13))), LaunchGroup(300, 400, weave)])
    assert table[: 2 * GROUP_NUMBERS].tolist() == [0, 100, 200, 12, 1, 15, 1, 300, 400, 17, 2, 23]
    assert table[12:27].tolist() == [11, 12, 13, 0, 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10]


def test_small_tables_are_uploaded_and_large_ones_read_where_they_are() -> None:
    gpu = FakeGpu()
    memory = gpu.allocate(SIZE)
    tables = Tables(gpu, 1)
    for count, uploads in ((1, 1), (SMALL_NUMBERS // 3 + 1, 0), (1, 1)):
        gpu.calls.clear()
        tables.launch([LaunchGroup(memory, memory + SIZE // 2, triples(*[(0, 0, 1)] * count))], 0, 1)
        assert gpu.calls.count("copy") == uploads and gpu.calls.count("move_rows") == 1
    with pytest.raises(ValueError, match="more than one launch takes"):
        tables.launch([LaunchGroup(memory, memory, array("q", bytes(8 * TABLE_NUMBERS_MAX)))], 0, 1)
    tables.clear()
    assert list(gpu.regions) == [memory]


# --- weaves


def test_a_weave_is_checked_as_its_long_form_would_be() -> None:
    rng = random.Random(5)
    seen = set()
    for _ in range(300):
        sizes = rng.choice(([rng.randint(-1, 20)] * 3, [rng.randint(-1, 20) for _ in range(3)]))
        column = triples(*[(rng.randint(-1, 60), rng.randint(-1, 60), size) for size in sizes])
        shifts = array("q", [rng.randint(-1, 40) for _ in range(4)])
        inside = True
        for index in (0, 2):
            for to, at, size in zip(column[0::3], column[1::3], column[2::3], strict=True):
                to, at = to + shifts[index], at + shifts[index + 1]
                inside &= size >= 0 and 0 <= to <= 100 - size and 0 <= at <= 90 - size
        try:
            check_weave(Weave(column, shifts), 100, 90)
        except ValueError:
            assert not inside
        else:
            assert inside
        seen.add(inside)
    assert seen == {True, False}


@pytest.mark.parametrize("number", [2**63 - 1, -(2**63)])
@pytest.mark.parametrize("place", range(5))
def test_numbers_that_would_overflow_are_outside(number: int, place: int) -> None:
    numbers = [8, 8, 8, 0, 0]
    numbers[place] = number
    with pytest.raises(ValueError, match="outside"):
        check_weave(Weave(array("q", numbers[:3]), array("q", numbers[3:])), 64, 64)


def test_a_weave_of_broken_rows_is_refused() -> None:
    with pytest.raises(ValueError, match="triples and pairs"):
        check_weave(Weave(array("q", (1, 2)), array("q", (0, 0))), 64, 64)
    assert check_weave(Weave(array("q"), array("q", (0, 0))), 64, 64) == 0


# --- memory


@pytest.mark.parametrize("change", [{"address": 0}, {"nbytes": 0}, {"device": -1}, {"address": (1 << 63) - 1}])
def test_memory_that_cannot_be_is_refused(change: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="expected an address"):
        DeviceMemory(**{"address": 4096, "nbytes": 8, "device": 0, **change})


def test_only_memory_of_the_transports_own_device_is_registered_and_once() -> None:
    known = RegisteredDevice(0)
    known.add(3, DeviceMemory(4096, 8))
    for region, memory in ((3, DeviceMemory(4096, 8)), (256, DeviceMemory(4096, 8)), (1, DeviceMemory(4096, 8, 1))):
        with pytest.raises(ValueError, match=f"region {region}"):
            known.add(region, memory)
    with pytest.raises(ValueError, match="expected a DeviceMemory"):
        known.add(1, memoryview(b""))  # type: ignore[arg-type]


# --- who gets handles, and what is made of them


class Rig:
    """Two cuda transports of one process, which pretend to be in two."""

    def __init__(self) -> None:
        self.gpu = FakeGpu()
        self.made: list[CudaTransport] = []
        self.memory: dict[PeerId, int] = {}

    def make(self, me: PeerId, lends: bool = True, **options: object) -> CudaTransport:
        transport = CudaTransport(me, CudaConfig(**options), self.gpu)  # type: ignore[arg-type]
        self.memory[me] = self.gpu.allocate(SIZE)
        transport.register(0, DeviceMemory(self.memory[me] + 4096, SIZE - 4096))
        if lends:
            lend_everything(transport, D, P)
        self.made.append(transport)
        return transport

    def pair(self) -> CudaTransport:
        d = self.make(D)
        d.connect(P, self.make(P).endpoint(D))
        return d


@pytest.fixture
def rig(monkeypatch: pytest.MonkeyPatch) -> Iterator[Rig]:
    monkeypatch.setattr(cuda_client, "EXPORTED", Exported())  # what this process knows of its own: nothing
    rig = Rig()
    yield rig
    for transport in rig.made:
        transport.close()


def read(job: int = 1, size: int = 64, after: DeviceEvent | None = None, weave: Weave | None = None) -> Copy:
    spans = triples((0, 0, size)) if weave is None else array("q")
    return Copy(JobId(job), P, Direction.READ, 0, 0, spans, after, weave)


def end(transport: CudaTransport | StagedTransport) -> CopyEnded:
    seen: list[CopyEnded] = []
    assert poll(lambda: bool(seen.extend(transport.drain()) or seen), 20)  # type: ignore[arg-type]
    return seen[0]


def test_an_endpoint_is_small_and_belongs_to_its_owner(rig: Rig) -> None:
    d, p = rig.make(D), rig.make(P)
    blob = p.endpoint(D)
    assert len(blob) <= 1024 and p.endpoint(D) == blob
    there = msgspec.msgpack.decode(blob, type=CudaEndpoint)
    changes = (
        {"owner": D},
        {"owner": PeerId(P.worker, Incarnation(9))},
        {"host": "x/1"},
        {"name": ""},
        {"secret": b"s"},
        {"device": "x"},
    )
    for change in changes:
        with pytest.raises(ValueError):
            d.connect(P, msgspec.msgpack.encode(msgspec.structs.replace(there, **change)))  # type: ignore[arg-type]


def handles(rig: Rig) -> set[int]:
    """Addresses at which somebody has opened registered memory, or a sample: by size."""
    return {len(mapped) for mapped in rig.gpu.opened.values()}


def nothing(job: int) -> Copy:
    return Copy(JobId(job), P, Direction.READ, 0, 0, array("q"))


def test_who_has_only_greeted_gets_no_handle(rig: Rig) -> None:
    """Before, any member that had said Hello could read and write all KV of a rank, without a ticket."""
    p, d = rig.make(P, lends=False), rig.make(D, lends=False)
    d.connect(P, p.endpoint(D))
    assert d.submit(nothing(1)) and end(d).reason is None
    assert handles(rig) == {SAMPLE_BYTES}, "a pair finds out that memory can be opened, by a sample of it"
    assert d.submit(read(2))
    p.lend(Loan(JobId(7), PeerId(WorkerId("other"), D.incarnation), Direction.READ, ((0,),)))
    p.lend(Loan(JobId(9), D, Direction.WRITE, ((0,),)))
    assert not poll(lambda: bool(d.drain()), 0.3) and handles(rig) == {SAMPLE_BYTES}
    p.lend(Loan(JobId(8), D, Direction.READ, ((0,),)))
    assert end(d).reason is None
    assert poll(lambda: handles(rig) == {SIZE}, 10), "the sample is closed"
    p.disconnect(D)
    p.cancel(JobId(8))
    d.disconnect(P)
    d.connect(P, p.endpoint(D))
    assert d.submit(read(3)) and not poll(lambda: bool(d.drain()), 0.3), "a new pairing needs a new loan"


def test_a_sample_that_cannot_be_opened_makes_the_plane_unreachable(rig: Rig) -> None:
    d = rig.make(D)
    d.connect(P, rig.make(P, lends=False).endpoint(D))
    rig.gpu.refusals["open"] = CudaError("cuIpcOpenMemHandle_v2", 1, "CUDA_ERROR_INVALID_VALUE")
    assert d.submit(nothing(1)) and end(d).reason is Reason.UNREACHABLE


@pytest.mark.parametrize("call", ["allocate", "clear", "export"])
def test_without_room_for_a_sample_the_first_copy_finds_out(rig: Rig, call: str) -> None:
    p, d = rig.make(P, lends=False), rig.make(D)
    rig.gpu.refusals[call] = CudaError(call, 2, "CUDA_ERROR_OUT_OF_MEMORY")
    d.connect(P, p.endpoint(D))
    assert d.submit(nothing(1)) and end(d).reason is None and not handles(rig)
    rig.gpu.refusals.clear()
    p.lend(Loan(JobId(8), D, Direction.READ, ((0,),)))
    assert d.submit(read(2)) and end(d).reason is None


def test_an_owner_that_goes_takes_its_sample_along(rig: Rig) -> None:
    p, d = rig.make(P, lends=False), rig.make(D)
    d.connect(P, p.endpoint(D))
    assert d.submit(nothing(1)) and end(d).reason is None and handles(rig) == {SAMPLE_BYTES}
    p.close()
    assert poll(lambda: not handles(rig) and d.mapped_bytes == 0, 10)
    assert not any(len(region.view) == SAMPLE_BYTES for region in rig.gpu.regions.values())


def test_an_idle_sample_is_closed_and_opened_again_at_need(rig: Rig) -> None:
    d = rig.make(D, idle_s=0.1)
    d.connect(P, rig.make(P, lends=False).endpoint(D))
    for job in (1, 2):
        assert d.submit(nothing(job)) and end(d).reason is None
        assert poll(lambda: not handles(rig), 10)


def test_without_the_secret_there_is_no_handle(rig: Rig) -> None:
    d, p = rig.make(D), rig.make(P)
    there = msgspec.msgpack.decode(p.endpoint(D), type=CudaEndpoint)
    d.connect(P, msgspec.msgpack.encode(msgspec.structs.replace(there, secret=bytes(32))))
    assert d.submit(read())
    ended = end(d)
    assert ended.reason is Reason.UNREACHABLE and "pair with it again" in ended.detail
    assert "open" not in rig.gpu.calls


def test_a_region_inside_an_allocation_is_opened_at_its_offset_once_and_closed_when_forgotten(rig: Rig) -> None:
    d = rig.pair()
    source = rig.gpu.regions[rig.memory[P]].view
    source[4096:4160] = random.Random(3).randbytes(64)
    for job in (1, 2):
        assert d.submit(read(job)) and end(d).reason is None
    assert rig.gpu.regions[rig.memory[D]].view[4096:4160] == source[4096:4160]
    assert rig.gpu.calls.count("open") == 1 and len(rig.gpu.opened) == 1
    d.disconnect(P)
    assert poll(lambda: not rig.gpu.opened, 10)


def test_woven_spans_are_moved_and_checked(rig: Rig) -> None:
    d = rig.pair()
    source = rig.gpu.regions[rig.memory[P]].view
    source[4096:] = random.Random(3).randbytes(SIZE - 4096)
    good = Weave(triples((0, 64, 16), (100, 0, 3)), array("q", (0, 0, 1000, 2000)))
    assert d.submit(read(1, weave=good)) and end(d).reason is None
    target = rig.gpu.regions[rig.memory[D]].view[4096:]
    assert target[1100:1103] == source[4096 + 2000 : 4096 + 2003] and target[0:16] == source[4096 + 64 : 4096 + 80]
    bad = Weave(triples((0, 64, 16)), array("q", (0, 0, 0, SIZE)))
    assert d.submit(read(2, weave=bad)) and end(d).reason is Reason.BAD_SPAN


def test_a_handle_that_cannot_be_opened_fails_the_copy_only(rig: Rig) -> None:
    d = rig.pair()
    rig.gpu.refusals["open"] = CudaError("cuIpcOpenMemHandle_v2", 201, "CUDA_ERROR_INVALID_CONTEXT")
    nothing = msgspec.structs.replace(read(2), spans=array("q"))  # by which a pair tries whether a plane can be opened
    for copy in (read(1), nothing):
        assert d.submit(copy)
        ended = end(d)
        assert (ended.reason, ended.at_rest) == (Reason.UNREACHABLE, True) and "INVALID_CONTEXT" in ended.detail
    rig.gpu.refusals.clear()
    assert d.submit(read(3)) and end(d).reason is None


def test_memory_without_a_handle_is_refused_with_the_reason(rig: Rig) -> None:
    p = rig.make(P)
    rig.gpu.refusals["export"] = CudaError("cuIpcGetMemHandle", 1, "CUDA_ERROR_INVALID_VALUE")
    other = rig.gpu.allocate(SIZE)
    with pytest.raises(ValueError, match="expandable_segments"):
        p.register(1, DeviceMemory(other, SIZE))
    del rig.gpu.refusals["export"]
    with pytest.raises(ValueError, match="not inside the"):
        p.register(2, DeviceMemory(other + 1, SIZE))


@pytest.mark.parametrize(
    "place",
    [
        CudaPlace(0, 1, 0, 8),
        CudaPlace(0, 0, 90, 11),
        CudaPlace(0, 0, -1, 8),
        CudaPlace(0, 0, 0, 0),
        CudaPlace(0, -1, 0, 8),
    ],
)
def test_a_place_outside_its_allocation_is_refused(place: CudaPlace) -> None:
    with pytest.raises(ValueError, match="region 0"):
        CudaRemote(Shared(b"", [Allocation(bytes(64), 1, 100)], [place]))
    with pytest.raises(ValueError, match="64 bytes"):
        CudaRemote(Shared(b"", [Allocation(bytes(63), 1, 100)], []))


# --- errors of the device


@pytest.mark.parametrize("call", ["move_rows", "record", "allocate_pinned"])
def test_a_refused_call_fails_its_copy_and_the_next_one_works(rig: Rig, call: str) -> None:
    d = rig.pair()
    rig.gpu.refusals[call] = REFUSED
    assert d.submit(read())
    ended = end(d)
    assert (ended.reason, ended.at_rest) == (Reason.TRANSFER_FAILED, True) and "OUT_OF_MEMORY" in ended.detail
    rig.gpu.refusals.clear()
    assert not d.broken and d.submit(read(2)) and end(d).reason is None


@pytest.mark.parametrize("call", ["move_rows", "wait"])
def test_an_error_that_stays_ends_every_copy_as_failed_and_is_not_raised(rig: Rig, call: str) -> None:
    d = rig.pair()
    rig.gpu.refusals[call] = STICKY
    assert d.submit(read()) and end(d).reason is Reason.TRANSFER_FAILED
    rig.gpu.refusals.clear()
    assert "ILLEGAL_ADDRESS" in d.broken
    assert d.submit(read(2))
    ended = end(d)
    assert ended.reason is Reason.TRANSFER_FAILED and "cannot be used any more" in ended.detail


def test_a_device_that_cannot_be_entered_fails_copies(rig: Rig) -> None:
    d = rig.pair()
    rig.gpu.refusals["stream"] = REFUSED
    assert d.submit(read()) and end(d).reason is Reason.TRANSFER_FAILED
    assert d.broken


def test_copies_that_are_due_together_share_a_launch(rig: Rig) -> None:
    d = rig.pair()
    assert d.submit(read(1)) and end(d).reason is None
    held, entered, here = threading.Event(), threading.Event(), threading.current_thread()
    original, wait = rig.gpu.move_rows, rig.gpu.wait

    def slow(*arguments: int) -> None:
        if threading.current_thread() is not here:
            entered.set()
            assert held.wait(10)
        original(*arguments)  # type: ignore[arg-type]

    def busy(event: int) -> None:
        assert held.wait(10)
        wait(event)

    rig.gpu.move_rows, rig.gpu.wait = slow, busy  # type: ignore[method-assign, assignment]
    rig.gpu.calls.clear()
    assert d.submit(read(2)) and d.submit(read(3)) and entered.wait(10)  # at once, and behind it by the other thread
    for job in range(4, 30):
        assert d.submit(read(job))
    held.set()
    seen: list[object] = []
    assert poll(lambda: len(seen.extend(d.drain()) or seen) == 28, 10)  # type: ignore[arg-type]
    assert rig.gpu.calls.count("move_rows") == 3


# --- events


class Event:
    """As a device library has them; `cuda_event` where it is one of CUDA."""

    def __init__(self, handle: int | None) -> None:
        if handle is not None:
            self.cuda_event = handle
        self.synchronized = False

    def synchronize(self) -> None:
        self.synchronized = True


def test_an_event_of_cuda_is_waited_for_on_a_stream_and_never_spun_on() -> None:
    gpu, event = FakeGpu(), Event(77)
    quiet_event(event, gpu).synchronize()
    assert gpu.calls == ["stream", "event", "stream_wait", "record", "wait"] and not gpu.live and not event.synchronized


def test_an_event_that_was_never_recorded_is_not_waited_for_and_another_kind_waits_itself() -> None:
    gpu, fresh, other = FakeGpu(), Event(0), Event(None)
    quiet_event(fresh, gpu).synchronize()
    quiet_event(other, gpu).synchronize()
    assert not gpu.calls and other.synchronized and not fresh.synchronized


def test_a_copy_that_waits_for_an_event_that_failed_fails(rig: Rig) -> None:
    d = rig.pair()
    rig.gpu.refusals["stream_wait"] = REFUSED
    assert d.submit(read(after=Event(5)))
    ended = end(d)
    assert ended.reason is Reason.TRANSFER_FAILED and "device event failed" in ended.detail


# --- without a driver


def test_without_a_driver_one_error_says_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_driver, "LIBRARY", "libcuda-that-is-not-there.so.1")
    for make in (lambda: CudaTransport(P), lambda: StagedTransport(P), lambda: CudaGpu(0)):
        with pytest.raises(ImportError, match=r"NVIDIA driver with libcuda-that-is-not-there\.so\.1"):
            make()


def test_a_driver_without_a_device_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    class Driver:
        def cuInit(self, _flags: int) -> int:
            return 100

        def cuGetErrorName(self, _status: int, name: object) -> int:
            ctypes.cast(name, ctypes.POINTER(ctypes.c_char_p))[0] = b"CUDA_ERROR_NO_DEVICE"  # type: ignore[arg-type]
            return 0

    monkeypatch.setattr(cuda_driver, "load", Driver)
    with pytest.raises(CudaError, match="cuInit: CUDA_ERROR_NO_DEVICE") as raised:
        CudaTransport(P)
    assert raised.value.sticky


def test_the_device_planes_need_no_device_library_to_be_imported() -> None:
    """No module of them names PyTorch, Triton or CuPy."""
    transports = Path(cuda_transport.__file__).parents[1]
    device = transports / "core" / "shared_memory.py"
    for path in [*transports.glob("cuda/*.py"), *transports.glob("staged/*.py"), device]:
        for node in ast.walk(ast.parse(path.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            assert not {name.split(".")[0] for name in names} & {"torch", "triton", "cupy"}, path


# --- staging


def test_packed_rows_lie_one_behind_the_other() -> None:
    assert gather_rows(array("q", (100, 5, 50, 0, 7, 9)), 2) == triples((0, 100, 5), (5, 50, 0), (5, 7, 9))
    assert scatter_rows(triples((1, 100, 5), (9, 7, 9)), 3) == triples((1, 0, 5), (9, 5, 9))


def test_slots_are_pinned_and_shadowed_and_let_go() -> None:
    gpu = FakeGpu()
    slots, region = allocate_slots(1 << 20, 2)
    slots.open(gpu)
    slots.open(gpu)
    assert gpu.calls.count("pin") == 1 and slots.on_device(1) - slots.on_device(0) == 1 << 20
    slots.view(1, 4)[:] = b"abcd"
    twin = map_slots(region.fd, 1 << 20, 2)
    assert bytes(twin.view(1, 4)) == b"abcd"
    slots.close(gpu)
    slots.close(gpu)
    assert not gpu.pinned and not gpu.regions
    for count, size in ((3, 1 << 20), (1, 1 << 20), (2, 1 << 19)):
        with pytest.raises(ValueError):
            map_slots(region.fd, size, count)
    del twin, slots
    region.close()


def test_shadows_that_cannot_be_had_leave_nothing_pinned() -> None:
    gpu = FakeGpu()
    slots, region = allocate_slots(1 << 20, 2)
    gpu.refusals["allocate"] = REFUSED
    with pytest.raises(CudaError):
        slots.open(gpu)
    assert not gpu.pinned
    del slots
    region.close()


@pytest.mark.parametrize("change", [{"slots": 1}, {"slot_bytes": 1000}, {"host": "0.0.0.0"}])
def test_a_configuration_out_of_bounds_is_refused(change: dict[str, object]) -> None:
    with pytest.raises(ValueError):
        StagedConfig(**change)  # type: ignore[arg-type]


@pytest.fixture
def stages() -> Iterator[tuple[StagedTransport, StagedTransport, FakeGpu]]:
    gpu = FakeGpu()
    made = [StagedTransport(me, StagedConfig(slot_bytes=1 << 20, slots=2), gpu) for me in (P, D)]
    for transport in made:
        transport.register(0, DeviceMemory(gpu.allocate(SIZE), SIZE))
        lend_everything(transport, D)
    yield made[0], made[1], gpu
    for transport in made:
        transport.close()


def test_an_endpoint_of_the_other_carrier_or_host_is_refused(
    stages: tuple[StagedTransport, StagedTransport, FakeGpu],
) -> None:
    p, d, _gpu = stages
    blob = p.endpoint(D)
    assert len(blob) <= 1024
    there = msgspec.msgpack.decode(blob, type=StagedEndpoint)
    for change in ({"carrier": "tcp"}, {"host": "x/1"}, {"owner": D}, {"place": ""}, {"secret": b"s"}):
        with pytest.raises(ValueError):
            d.connect(P, msgspec.msgpack.encode(msgspec.structs.replace(there, **change)))  # type: ignore[arg-type]


def test_a_peer_beyond_the_bound_is_turned_away(
    stages: tuple[StagedTransport, StagedTransport, FakeGpu], monkeypatch: pytest.MonkeyPatch
) -> None:
    p, d, _gpu = stages
    monkeypatch.setattr(staged_server, "SESSIONS_MAX", 0)
    d.connect(P, p.endpoint(D))
    assert d.submit(read())
    assert end(d).reason is Reason.UNREACHABLE


def test_a_gather_that_fails_ends_the_readers_copy_and_a_new_line_works(
    stages: tuple[StagedTransport, StagedTransport, FakeGpu],
) -> None:
    p, d, gpu = stages
    d.connect(P, p.endpoint(D))
    assert d.submit(read()) and end(d).reason is None
    gpu.refusals["move_rows"] = REFUSED
    assert d.submit(read(2)) and end(d).reason is Reason.TRANSFER_FAILED
    gpu.refusals.clear()
    assert d.submit(read(3)) and end(d).reason is None


@pytest.mark.parametrize("pinned_before", [0, 1], ids=["P cannot pin", "D cannot pin"])
def test_slots_that_cannot_be_pinned_make_the_plane_unreachable(
    stages: tuple[StagedTransport, StagedTransport, FakeGpu], pinned_before: int
) -> None:
    p, d, gpu = stages
    d.connect(P, p.endpoint(D))
    original, calls = gpu.pin, []

    def pin(address: int, nbytes: int) -> None:
        calls.append(address)
        if len(calls) > pinned_before:
            raise REFUSED
        original(address, nbytes)

    gpu.pin = pin  # type: ignore[method-assign]
    assert d.submit(msgspec.structs.replace(read(), spans=array("q")))
    assert end(d).reason is Reason.UNREACHABLE
    gpu.pin = original  # type: ignore[method-assign]
    assert d.submit(read(2)) and end(d).reason is None


def test_a_disconnected_peer_is_served_no_more(stages: tuple[StagedTransport, StagedTransport, FakeGpu]) -> None:
    p, d, gpu = stages
    d.connect(P, p.endpoint(D))
    assert d.submit(read()) and end(d).reason is None
    p.disconnect(D)
    assert poll(lambda: len(gpu.pinned) < 2, 10)  # its slots are let go
    assert d.submit(read(2)) and end(d).reason in {Reason.UNREACHABLE, Reason.TRANSFER_FAILED}


def test_what_a_peer_says_of_its_slots_is_typed() -> None:
    with pytest.raises(msgspec.ValidationError):
        msgspec.msgpack.decode(msgspec.msgpack.encode(["x", 2, {}]), type=StagedHello)
