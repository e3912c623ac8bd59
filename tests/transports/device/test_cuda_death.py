"""The cuda plane when a peer dies, leaves, stands still or misbehaves: what it had mapped is let go of, and no sooner.

On a real GPU, where memory is counted by the driver: `python -m tests.transports.device.cuda_check`.
"""

from __future__ import annotations

import random
import threading
from array import array
from collections.abc import Iterator

import pytest

from kvbaton.protocol.errors import Reason
from kvbaton.protocol.ids import Incarnation, JobId, PeerId, WorkerId
from kvbaton.testing import Case, Log, Pair
from kvbaton.testing.transport_case import READ, SMALL_BYTES, copy, fill
from kvbaton.testing.transport_harness import poll
from kvbaton.transports.core.loans import lend_everything
from kvbaton.transports.core.shared_memory import DeviceMemory
from kvbaton.transports.core.transport import Cause, Copy, CopyEnded
from kvbaton.transports.cuda import cuda_client, cuda_listener, cuda_runner
from kvbaton.transports.cuda.cuda_driver import CudaError
from kvbaton.transports.cuda.cuda_listener import EXPORTED, Allocation, CudaPlace, Exported, Shared
from kvbaton.transports.cuda.cuda_runner import UNDER_WAY_MAX
from kvbaton.transports.cuda.cuda_transport import CudaConfig, CudaTransport
from tests.transports.device import device_death
from tests.transports.device.device_harness import DeviceHarness
from tests.transports.device.fake_gpu import FakeGpu

P, D, E = (PeerId(WorkerId(name), Incarnation(1)) for name in "pde")
SIZE = 1 << 16


@pytest.fixture
def apart() -> Iterator[DeviceHarness]:
    harness = DeviceHarness("cuda")
    yield harness
    harness.close()


def opened_pair(harness: DeviceHarness) -> tuple[Pair, Log, CudaTransport]:
    """A pair whose near side has the far side's memory open."""
    pair = harness.pair(SMALL_BYTES, SMALL_BYTES)
    fill(pair.far.memory, 2)
    log = Log(harness, pair.near)
    near = pair.near.transport
    assert isinstance(near, CudaTransport) and not near.mapped_bytes
    assert near.submit(copy(1, pair.far, READ, [(0, 0, 64)]))
    assert log.end(1).reason is None
    assert near.mapped_bytes == SMALL_BYTES
    return pair, log, near


@pytest.mark.parametrize("plane", ["cuda", "staged-shm", "staged-tcp"])
@pytest.mark.parametrize("case", list(device_death.CASES), ids=str)
def test_between_two_processes(plane: str, case: Case) -> None:
    harness = DeviceHarness(plane)
    try:
        case(harness)
    finally:
        harness.close()


def test_a_process_that_stands_still_stays_mapped_and_is_read_from(apart: DeviceHarness) -> None:
    pair, log, near = opened_pair(apart)
    apart.pause(pair.far)
    assert near.submit(copy(2, pair.far, READ, [(0, 0, SMALL_BYTES)]))
    assert log.end(2).reason is None and bytes(pair.near.memory) == bytes(pair.far.memory)
    assert near.mapped_bytes == SMALL_BYTES
    apart.resume(pair.far)
    assert near.submit(copy(3, pair.far, READ, [(0, 0, 64)])) and log.end(3).reason is None


# --- within one process, which pretends to be two


class SlowGpu(FakeGpu):
    """The device is at work until it is let on."""

    def __init__(self) -> None:
        super().__init__()
        self.go_on = threading.Event()
        self.go_on.set()

    def wait(self, event: int) -> None:
        super().wait(event)
        assert self.go_on.wait(20)


class Rig:
    def __init__(self) -> None:
        self.gpu = SlowGpu()
        self.made: list[CudaTransport] = []

    def make(self, me: PeerId, idle_s: float = 60.0) -> CudaTransport:
        transport = CudaTransport(me, CudaConfig(idle_s=idle_s), self.gpu)
        transport.register(0, DeviceMemory(self.gpu.allocate(SIZE), SIZE))
        lend_everything(transport, D, P)
        self.made.append(transport)
        return transport

    def pair(self, idle_s: float = 60.0) -> tuple[CudaTransport, CudaTransport]:
        p, d = self.make(P), self.make(D, idle_s)
        d.connect(P, p.endpoint(D))
        return p, d


@pytest.fixture
def rig(monkeypatch: pytest.MonkeyPatch) -> Iterator[Rig]:
    monkeypatch.setattr(cuda_client, "EXPORTED", Exported())  # what this process knows of its own: nothing
    rig = Rig()
    yield rig
    rig.gpu.go_on.set()
    for transport in rig.made:
        transport.close()
    assert not rig.gpu.opened


def read(job: int, *rows: tuple[int, int, int]) -> Copy:
    return Copy(JobId(job), P, READ, 0, 0, array("q", [number for row in rows or ((0, 0, 64),) for number in row]))


def end(transport: CudaTransport) -> CopyEnded:
    seen: list[CopyEnded] = []
    assert poll(lambda: bool(seen.extend(transport.drain()) or seen), 20)  # type: ignore[arg-type]
    return seen[0]


@pytest.mark.parametrize("leave", ["close", "disconnect"])
def test_an_owner_that_leaves_is_let_go_of(rig: Rig, leave: str) -> None:
    p, d = rig.pair()
    assert d.submit(read(1)) and end(d).reason is None
    p.close() if leave == "close" else p.disconnect(D)
    assert poll(lambda: not rig.gpu.opened and not d.mapped_bytes, 10)
    assert d.submit(read(2)) and end(d).reason is Reason.PEER_UNKNOWN


def test_after_a_hang_up_the_pair_is_made_anew(rig: Rig) -> None:
    p, d = rig.pair()
    assert d.submit(read(1)) and end(d).reason is None
    p.disconnect(D)
    assert poll(lambda: not rig.gpu.opened, 10)
    d.connect(P, p.endpoint(D))
    assert d.submit(read(2)) and end(d).reason is None and len(rig.gpu.opened) == 1


def test_what_the_device_reads_is_not_let_go_of_before_it_is_done(rig: Rig) -> None:
    p, d = rig.pair()
    assert d.submit(read(1)) and end(d).reason is None
    rig.gpu.go_on.clear()
    assert d.submit(read(2))
    assert poll(lambda: rig.gpu.calls.count("move_rows") == 2, 10)
    p.close()
    assert poll(lambda: P not in d._links, 10), "the line has ended; a copy before that would wait behind the launch"
    assert d.submit(read(9)) and end(d).reason is Reason.PEER_UNKNOWN
    assert rig.gpu.opened and "close" not in rig.gpu.calls, "a launch is still at it"
    rig.gpu.go_on.set()
    ended = end(d)
    assert (ended.job, ended.reason, ended.at_rest) == (2, Reason.TRANSFER_FAILED, True)
    assert "has exited" in ended.detail
    assert poll(lambda: not rig.gpu.opened, 10)


def test_what_nobody_reads_from_is_closed_and_opened_again_at_need(rig: Rig) -> None:
    p, d = rig.pair(idle_s=0.05)
    for job in (1, 2):
        assert d.submit(read(job)) and end(d).reason is None
        assert poll(lambda: not rig.gpu.opened and not d.mapped_bytes, 10)
    assert rig.gpu.calls.count("open") == 2
    assert len(p._door._lines) == 1, "the line outlives the mapping"


def test_what_is_read_from_is_not_idle_however_long_that_takes(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """A copy of many launches: more of them are to come when somebody looks."""
    monkeypatch.setattr(cuda_runner, "ROWS_MAX", 1)
    p, d = rig.pair()
    source = rig.gpu.regions[p._memory.items()[0][1].address].view
    source[:] = random.Random(3).randbytes(SIZE)
    rig.gpu.go_on.clear()
    assert d.submit(read(1, *((64 * row, 64 * row, 64) for row in range(12))))
    assert poll(lambda: rig.gpu.calls.count("move_rows") == UNDER_WAY_MAX, 10)
    attachment, looked = d._links[P], threading.Event()
    remote = attachment.remote

    def look() -> None:
        attachment._used_at = -1e9
        attachment._look()
        looked.set()

    d._loop.call(look)
    assert looked.wait(10)
    assert attachment.remote is remote, "it is in use"
    rig.gpu.go_on.set()
    assert end(d).reason is None
    assert rig.gpu.regions[d._memory.items()[0][1].address].view[: 12 * 64] == source[: 12 * 64]
    looked.clear()
    d._loop.call(look)
    assert looked.wait(10) and poll(lambda: not rig.gpu.opened, 10), "now it is not"


def test_memory_that_is_opened_while_its_owner_dies_is_closed_again(rig: Rig) -> None:
    """The driver takes its time; what it gives then is for nobody."""
    mapped = cuda_client.Mapped()
    remote = cuda_client.CudaRemote(told(rig.gpu.export(rig.gpu.allocate(SIZE)), SIZE), mapped)
    plain = rig.gpu.open

    def slow(handle: bytes) -> int:
        found = plain(handle)
        assert not remote.shut(), "nothing is there to be closed yet"
        return found

    rig.gpu.open = slow  # type: ignore[method-assign]
    with pytest.raises(CudaError) as raised:
        remote.address_of(0, rig.gpu)
    assert not raised.value.sticky and not rig.gpu.opened and not mapped.nbytes


def test_a_handle_of_a_dead_process_does_not_break_the_plane_whatever_the_driver_says(rig: Rig) -> None:
    _, d = rig.pair()
    for job, status in enumerate((1, 201, 400, 711, 999)):
        rig.gpu.refusals["open"] = CudaError("cuIpcOpenMemHandle_v2", status, "?")
        assert d.submit(read(job)) and end(d).reason is Reason.UNREACHABLE
    del rig.gpu.refusals["open"]
    assert not d.broken and d.submit(read(9)) and end(d).reason is None


# --- owners that lie


def told(handle: bytes, size: int, base: int = 1) -> Shared:
    return Shared(b"x", [Allocation(handle, base, size)], [CudaPlace(0, 0, 0, size)])


def test_memory_is_as_large_as_the_driver_says(rig: Rig) -> None:
    """A launch beyond it would cost the reader its device, and its engine."""
    handle, mapped = rig.gpu.export(rig.gpu.allocate(SIZE)), cuda_client.Mapped()
    remote = cuda_client.CudaRemote(told(handle, SIZE + 1), mapped)
    with pytest.raises(CudaError, match=f"it has {SIZE} bytes, and the peer announced {SIZE + 1}") as raised:
        remote.address_of(0, rig.gpu)
    assert not raised.value.sticky and not rig.gpu.opened and not mapped.nbytes


def test_our_own_memory_is_known_by_our_own_books() -> None:
    """A reader was told our handle, and says it back with another address and size."""
    gpu = FakeGpu()
    transport = CudaTransport(P, CudaConfig(), gpu)
    address = gpu.allocate(SIZE)
    transport.register(0, DeviceMemory(address, SIZE))
    handle = gpu.export(address)
    assert cuda_client.CudaRemote(told(handle, SIZE, base=4096)).address_of(0, gpu) == address
    with pytest.raises(CudaError, match="and the peer announced"):
        cuda_client.CudaRemote(told(handle, SIZE + 1, base=4096)).address_of(0, gpu)
    assert "open" not in gpu.calls and EXPORTED.find(handle) == (address, SIZE)
    other = CudaTransport(D, CudaConfig(), gpu)
    other.register(0, DeviceMemory(address, SIZE))
    transport.close()
    assert EXPORTED.find(handle) == (address, SIZE), "another plane still tells it"
    other.close()
    assert EXPORTED.find(handle) is None


# --- several devices


@pytest.mark.parametrize(("visible", "reason"), [(True, None), (None, None), (False, Reason.UNREACHABLE)])
def test_a_device_that_cannot_be_read_is_given_up_with_the_reason(
    rig: Rig, visible: bool | None, reason: Reason | None
) -> None:
    p = rig.make(P)
    rig.gpu.uuid = "00ff"
    if visible is not None:
        rig.gpu.peers["00ff"] = visible
    d = rig.make(D)
    d.connect(P, p.endpoint(D))
    assert d.submit(Copy(JobId(1), P, READ, 0, 0, array("q")))
    ended = end(d)
    assert ended.reason is reason
    assert not reason or ("peer access" in ended.detail and "00ff" in ended.detail)
    assert ("open" in rig.gpu.calls) is (reason is None)


def test_a_driver_that_cannot_tell_is_not_fatal(rig: Rig) -> None:
    p, d = rig.make(P), rig.make(D)
    rig.gpu.refusals["reaches"] = CudaError("cuDeviceCanAccessPeer", 101, "CUDA_ERROR_INVALID_DEVICE")
    d.connect(P, p.endpoint(D))
    assert d.submit(read(1)) and end(d).reason is Reason.UNREACHABLE and not d.broken
    d.disconnect(P)
    del rig.gpu.refusals["reaches"]
    d.connect(P, p.endpoint(D))
    assert d.submit(read(2)) and end(d).reason is None


# --- P's side of the lines


def test_a_reader_that_goes_leaves_no_line(rig: Rig) -> None:
    p, d = rig.pair()
    for _ in range(3):
        assert poll(lambda: len(p._door._lines) == 1, 10)
        d.disconnect(P)
        assert poll(lambda: not p._door._lines, 10)
        d.connect(P, p.endpoint(D))
    d.close()
    assert poll(lambda: not p._door._lines, 10)


def test_a_peer_that_dials_again_has_one_line(rig: Rig) -> None:
    p, d = rig.pair()
    other = CudaTransport(D, CudaConfig(), rig.gpu)
    rig.made.append(other)
    assert d.submit(read(1)) and end(d).reason is None
    other.connect(P, p.endpoint(D))
    assert poll(lambda: not d.mapped_bytes, 10)
    assert len(p._door._lines) == 1


def test_a_reader_that_speaks_on_its_line_loses_it(rig: Rig) -> None:
    p, d = rig.pair()
    assert d.submit(read(1)) and end(d).reason is None
    line = d._links[P]._line
    assert line is not None and line.sock.send(b"?") == 1
    assert poll(lambda: p.refusals[Cause.BAD_MESSAGE] == 1 and not p._door._lines, 10)
    assert poll(lambda: not d.mapped_bytes, 10)


def test_an_owner_that_speaks_on_its_line_is_forgotten(rig: Rig) -> None:
    p, d = rig.pair()
    assert d.submit(read(1)) and end(d).reason is None
    assert p._door._lines[D].sock.send(b"?") == 1
    assert poll(lambda: not d.mapped_bytes, 10)
    assert d.submit(read(2)) and end(d).reason is Reason.PEER_UNKNOWN


def test_more_readers_than_lines_are_turned_away(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_listener, "LINES_MAX", 1)
    p, d = rig.pair()
    assert d.submit(read(1)) and end(d).reason is None
    e = rig.make(E)
    e.connect(P, p.endpoint(E))
    assert e.submit(read(1)) and end(e).reason is Reason.UNREACHABLE
    assert p.refusals[Cause.FULL] >= 1
    assert d.submit(read(2)) and end(d).reason is None
