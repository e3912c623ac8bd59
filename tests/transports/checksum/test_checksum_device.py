"""With checksums around a plane of device memory, a wrong byte is a failed copy, whichever side has it."""

from __future__ import annotations

import random
import socket
from array import array
from collections.abc import Callable, Iterator

import pytest

from kvbaton.protocol.errors import Reason
from kvbaton.protocol.geometry.spans import Weave
from kvbaton.protocol.ids import JobId, PeerId
from kvbaton.testing.transport_harness import poll
from kvbaton.transports.checksum.checksum_device import PART_BYTES, PIECE_BYTES, DeviceSums
from kvbaton.transports.checksum.checksum_memory import Checksum, Tell, portions
from kvbaton.transports.checksum.checksum_transport import SumConfig, SummedTransport, parse
from kvbaton.transports.core.loans import EVERYTHING, lend_everything
from kvbaton.transports.core.shared_memory import DeviceMemory, allocate
from kvbaton.transports.core.transport import Copy, CopyEnded, Direction
from kvbaton.transports.cuda.cuda_driver import CudaError
from kvbaton.transports.net.connection_handshake import greet
from kvbaton.transports.net.stream_socket import PAYLOAD_BYTES_MAX, Frame, FrameKind, FrameStatus
from kvbaton.transports.shm.shm_transport import ShmTransport
from tests.transports.checksum.test_checksum_service import answer, question
from tests.transports.device.device_peer import make_plane
from tests.transports.device.fake_gpu import FakeGpu
from tests.transports.tcp.blocking import DEADLINE_S, D, P, is_closed, play

PLANES = ("cuda", "staged-shm", "staged-tcp")
SEGMENT_BYTES = 4096
SEGMENTS = 32
SIZE = SEGMENT_BYTES * SEGMENTS
SPANS = array("q", [n for at in range(0, SIZE, SEGMENT_BYTES) for n in (at, SIZE - SEGMENT_BYTES - at, SEGMENT_BYTES)])
REFUSED = CudaError("cuFake", 2, "CUDA_ERROR_OUT_OF_MEMORY")
WAIT_S = 20.0


class Rig:
    """P and D, each with a device of its own; either can go wrong just before it digests."""

    def __init__(self, plane: str = "cuda", mode: Checksum = Checksum.FULL) -> None:
        self.transports: dict[PeerId, SummedTransport] = {}
        self.gpus = {P: FakeGpu(), D: FakeGpu()}
        self.memory: dict[PeerId, int] = {}
        for me, gpu in self.gpus.items():
            inner, sums = make_plane(plane, me, gpu, 5.0), DeviceSums(f"sums-{me}", 0, gpu=gpu)
            self.transports[me] = SummedTransport(inner, me, SumConfig(mode), sums)
            self.memory[me] = gpu.allocate(SIZE)
            self.transports[me].register(0, DeviceMemory(self.memory[me], SIZE))
            self.view(me)[:] = random.Random(str(me)).randbytes(SIZE)
            if inner.capabilities.lends_reads:
                lend_everything(self.transports[me], D, P)
        self.d.connect(P, self.transports[P].endpoint(D))

    @property
    def d(self) -> SummedTransport:
        return self.transports[D]

    def view(self, me: PeerId) -> memoryview:
        return self.gpus[me].regions[self.memory[me]].view

    def before_digest(self, me: PeerId, harm: Callable[[memoryview], None]) -> None:
        """The next digest at `me` finds memory that was harmed after the copy."""
        gpu, original = self.gpus[me], self.gpus[me].digest_rows

        def digest_rows(table: int, groups: int, rows: range, stream: int) -> None:
            gpu.digest_rows = original  # type: ignore[method-assign]
            harm(self.view(me))
            original(table, groups, rows, stream)

        gpu.digest_rows = digest_rows  # type: ignore[method-assign]

    def end(self, job: int = 1, weave: Weave | None = None) -> CopyEnded:
        spans = SPANS if weave is None else array("q")
        assert self.d.submit(Copy(JobId(job), P, Direction.READ, 0, 0, spans, weave=weave))
        seen: list[CopyEnded] = []
        assert poll(lambda: bool(seen.extend(self.d.drain()) or seen), WAIT_S)  # type: ignore[arg-type]
        assert seen[0].job == job and len(seen) == 1
        return seen[0]

    def close(self) -> None:
        for transport in self.transports.values():
            transport.close()
        for me, gpu in self.gpus.items():
            gpu.free(self.memory[me])


@pytest.fixture
def make() -> Iterator[Callable[..., Rig]]:
    made: list[Rig] = []

    def make(plane: str = "cuda", mode: Checksum = Checksum.FULL) -> Rig:
        made.append(Rig(plane, mode))
        return made[-1]

    yield make
    for rig in made:
        rig.close()
        for gpu in rig.gpus.values():
            assert not gpu.live and not gpu.regions and not gpu.pinned and not gpu._hosts


def flip(at: int) -> Callable[[memoryview], None]:
    def harm(view: memoryview) -> None:
        view[at] ^= 0x10

    return harm


def swap_words(view: memoryview) -> None:
    view[0:8], view[8:16] = bytes(view[8:16]), bytes(view[0:8])


@pytest.mark.parametrize("plane", PLANES)
def test_right_bytes_pass_and_both_devices_have_digested(make: Callable[..., Rig], plane: str) -> None:
    rig = make(plane)
    for job in range(3):
        assert rig.end(job) == CopyEnded(JobId(job))
    assert all(gpu.calls.count("digest_rows") == 3 for gpu in rig.gpus.values())


@pytest.mark.parametrize("plane", PLANES)
@pytest.mark.parametrize("at", [0, SEGMENT_BYTES * 5 + 777, SIZE - 1])
@pytest.mark.parametrize("side", [P, D], ids=["at P", "at D"])
def test_one_wrong_byte_is_a_mismatch(make: Callable[..., Rig], plane: str, side: PeerId, at: int) -> None:
    rig = make(plane)
    assert rig.end(1).reason is None
    rig.before_digest(side, flip(at))
    end = rig.end(2)
    assert (end.reason, end.at_rest) == (Reason.CHECKSUM_MISMATCH, True)
    segment = at // SEGMENT_BYTES if side is D else SEGMENTS - 1 - at // SEGMENT_BYTES
    assert f"segment {segment} of {SEGMENTS} differs" in end.detail
    assert rig.end(3).reason is None, "the next copy brings the right bytes"


@pytest.mark.parametrize("side", [P, D], ids=["at P", "at D"])
def test_the_right_words_in_the_wrong_order_are_a_mismatch(make: Callable[..., Rig], side: PeerId) -> None:
    rig = make()
    rig.before_digest(side, swap_words)
    assert rig.end().reason is Reason.CHECKSUM_MISMATCH


def test_a_sample_sees_what_it_looks_at(make: Callable[..., Rig]) -> None:
    rig, caught = make("cuda", Checksum.SAMPLE), []
    for job in range(SEGMENTS):
        rig.before_digest(D, flip(job * SEGMENT_BYTES + 17))
        if rig.end(job).reason is Reason.CHECKSUM_MISMATCH:
            caught.append(job)
    sampled = [
        job
        for job in range(SEGMENTS)
        for part in portions(Copy(JobId(job), P, Direction.READ, 0, 0, SPANS), Checksum.SAMPLE)
        if job * SEGMENT_BYTES in part[0::3]
    ]
    assert caught == sampled and 0 < len(caught) < SEGMENTS


def test_with_off_nobody_looks(make: Callable[..., Rig]) -> None:
    rig = make("cuda", Checksum.OFF)
    assert rig.end().reason is None
    assert not any("digest_rows" in gpu.calls for gpu in rig.gpus.values())


@pytest.mark.parametrize("harmed", [False, True])
def test_woven_spans_are_compared_too(make: Callable[..., Rig], harmed: bool) -> None:
    rig = make()
    weave = Weave(array("q", (0, 64, 16, 100, 0, 3)), array("q", (0, 0, 5000, 9000)))
    if harmed:
        rig.before_digest(D, flip(5101))
    end = rig.end(weave=weave)
    assert (end.reason is Reason.CHECKSUM_MISMATCH) is harmed, end
    if harmed:
        assert "segment 3 of 4 differs" in end.detail


def test_long_rows_are_asked_for_in_pieces_that_one_warp_reads(make: Callable[..., Rig]) -> None:
    rig = make()
    asked: list[list[int]] = []
    original = rig.transports[P]._sums.digest

    def digest(region: int, spans: array[int], width: int, halt: bytearray, tell: Tell) -> None:
        asked.append(spans[1::2].tolist())
        original(region, spans, width, halt, tell)

    rig.transports[P]._sums.digest = digest  # type: ignore[method-assign]
    assert rig.end(weave=Weave(array("q", (0, 0, SIZE)), array("q", (0, 0)))).reason is None
    assert asked == [[PIECE_BYTES] * (SIZE // PIECE_BYTES)] and PART_BYTES + PIECE_BYTES <= PAYLOAD_BYTES_MAX


# --- sums that lie, are torn or cannot be had


@pytest.mark.parametrize(
    ("lie", "reason"),
    [
        (lambda found: bytes(len(found)), Reason.CHECKSUM_MISMATCH),
        (lambda found: found[8:] + found[:8], Reason.CHECKSUM_MISMATCH),
        (lambda found: found[:-8], Reason.TRANSFER_FAILED),
        (lambda found: found + bytes(8), Reason.TRANSFER_FAILED),
        (lambda found: b"", Reason.TRANSFER_FAILED),
    ],
    ids=["zeros", "of other rows", "one missing", "one more", "none"],
)
def test_a_peer_that_lies_about_its_sums_gets_no_good_end(
    make: Callable[..., Rig], lie: Callable[[bytes], bytes], reason: Reason
) -> None:
    rig = make()
    sums, original = rig.transports[P]._sums, rig.transports[P]._sums.digest

    def digest(region: int, spans: array[int], width: int, halt: bytearray, tell: Tell) -> None:
        original(region, spans, width, halt, lambda found, problem: tell(lie(found), problem))

    sums.digest = digest  # type: ignore[method-assign]
    end = rig.end(1)
    assert (end.reason, end.at_rest) == (reason, True), end
    sums.digest = original  # type: ignore[method-assign]
    assert rig.end(2).reason is None


@pytest.mark.parametrize("side", [P, D], ids=["at P", "at D"])
def test_a_device_that_cannot_digest_fails_the_copy_and_the_next_one_works(
    make: Callable[..., Rig], side: PeerId
) -> None:
    rig = make("staged-shm")
    rig.gpus[side].refusals["digest_rows"] = REFUSED
    end = rig.end(1)
    assert (end.reason, end.at_rest) == (Reason.TRANSFER_FAILED, True), end
    assert ("cannot be digested here" if side is D else "closed the connection") in end.detail
    rig.gpus[side].refusals.clear()
    assert rig.end(2).reason is None


# --- who meets whom


def test_digests_of_two_kinds_of_memory_never_meet(make: Callable[..., Rig]) -> None:
    rig, region = make(), allocate(SIZE)
    host = SummedTransport(ShmTransport(P), P)
    host.register(0, region.view)
    with pytest.raises(ValueError, match=r"checksum: .* another kind of memory than ours, device memory"):
        rig.d.connect(P, host.endpoint(D))
    with pytest.raises(ValueError, match="another kind of memory than ours, host memory"):
        host.connect(D, rig.d.endpoint(P))
    host.close()
    region.close()


def test_capabilities_are_the_planes_and_weaves_stay_woven(make: Callable[..., Rig]) -> None:
    able = make("cuda").d.capabilities
    assert (able.name, able.weaves, able.one_sided, able.device_kinds) == ("cuda+sums", True, False, ("cuda",))


# --- what a peer may ask


def test_a_question_is_bounded_and_only_about_what_is_lent(make: Callable[..., Rig]) -> None:
    rig = make("staged-tcp")
    server = rig.transports[P]
    there = parse(P, server.endpoint(D), "device")

    def dial() -> socket.socket:
        sock = socket.create_connection((there.host, there.port), timeout=DEADLINE_S)
        play(sock, lambda wire: greet(wire, there.secret, D, P, 0))
        return sock

    with dial() as sock:
        sock.sendall(question([0, PIECE_BYTES, SIZE, 1]))
        assert answer(sock)[0].status is FrameStatus.BAD_SPAN
        sock.sendall(question([0, PIECE_BYTES, 3, 0]))
        frame, found = answer(sock)
        assert frame == Frame(FrameKind.SUMS, 7, 16) and found[8:] == bytes(8)
        sock.sendall(question([0, PIECE_BYTES + 1]))
        assert is_closed(sock)
    server.cancel(JobId(EVERYTHING))  # what D may read
    server.cancel(JobId(EVERYTHING + 1))
    with dial() as sock:
        sock.sendall(question([0, 64]))
        assert answer(sock)[0].status is FrameStatus.NOT_LENT
