"""With checksums a wrong byte is a failed copy, with its own reason; and whatever happens meanwhile ends it once."""

from __future__ import annotations

import contextlib
import random
import threading
from array import array
from collections.abc import Callable, Iterator, Sequence

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvbaton.protocol.errors import Reason
from kvbaton.protocol.ids import Incarnation, JobId, PeerId, WorkerId
from kvbaton.testing import Log, Side
from kvbaton.testing.transport_case import READ, WRITE, copy, fill
from kvbaton.testing.transport_harness import CorruptingTransport, InProcessHarness, Strike, poll, some_byte
from kvbaton.transports.checksum import checksum_transport
from kvbaton.transports.checksum.checksum_memory import Checksum, HostSums, portions
from kvbaton.transports.checksum.checksum_transport import (
    BYTES_MAX,
    VERSION,
    SumConfig,
    SumEndpoint,
    SummedTransport,
    is_summed,
    parse,
)
from kvbaton.transports.core.loans import lend_everything
from kvbaton.transports.core.shared_memory import Region, allocate
from kvbaton.transports.core.transport import (
    Copy,
    CopyEnded,
    CopyRested,
    Direction,
    FenceEnded,
    HostTransport,
    TransportEvent,
)
from kvbaton.transports.shm.shm_transport import ShmTransport
from kvbaton.transports.tcp import tcp_transport
from kvbaton.transports.tcp.tcp_transport import TcpTransport
from tests.transports.checksum.held_digesters import HeldDigesters

SEGMENT_BYTES = 4096
SEGMENTS = 64
SIZE = SEGMENT_BYTES * SEGMENTS
SPANS = [(at, SIZE - SEGMENT_BYTES - at, SEGMENT_BYTES) for at in range(0, SIZE, SEGMENT_BYTES)]
PLANES: dict[str, Callable[[PeerId], HostTransport]] = {"shm": ShmTransport, "tcp": TcpTransport}
WAYS = [("shm", READ), ("tcp", READ), ("tcp", WRITE)]
D, P = PeerId(WorkerId("d#0"), Incarnation(2)), PeerId(WorkerId("p#0"), Incarnation(1))
WAIT_S = 20.0


class Rig:
    """D drives copies with P; D's plane can be made to lie."""

    def __init__(self) -> None:
        self.regions: list[Region] = []
        self.transports: list[SummedTransport] = []
        self.lying: CorruptingTransport | None = None

    def pair(
        self, plane: str = "tcp", strike: Strike | None = None, far_mode: Checksum = Checksum.OFF, **config: object
    ) -> tuple[Side, Side, Log]:
        self.lying = CorruptingTransport(PLANES[plane](D), strike or (lambda _copy: None))
        near = self.side(SummedTransport(self.lying, D, SumConfig(**config)), D)  # type: ignore[arg-type]
        far = self.side(SummedTransport(PLANES[plane](P), P, SumConfig(far_mode)), P)
        near.transport.connect(P, far.transport.endpoint(D))
        far.transport.connect(D, near.transport.endpoint(P))
        fill(near.memory, 1)
        fill(far.memory, 2)
        harness = InProcessHarness(TcpTransport, lambda size: memoryview(bytearray(size)), tcp_transport.CAPABILITIES)
        return near, far, Log(harness, near)

    def side(self, transport: SummedTransport, me: PeerId) -> Side:
        self.regions.append(allocate(SIZE))
        self.transports.append(transport)
        transport.register(0, self.regions[-1].view)
        if transport.capabilities.lends_reads:
            lend_everything(transport, D, P)
        return Side(me, transport, self.regions[-1].view)

    def hold(self, index: int) -> HeldDigesters:
        """Let nobody digest at one side: 0 is the near one, 1 the far one."""
        held = HeldDigesters()
        host_sums(self.transports[index]).digesters = held
        return held


def host_sums(transport: object) -> HostSums:
    assert isinstance(transport, SummedTransport) and isinstance(transport._sums, HostSums)
    return transport._sums


@pytest.fixture
def rig() -> Iterator[Rig]:
    rig = Rig()
    yield rig
    for transport in rig.transports:
        transport.close()
    for region in rig.regions:
        region.close()


def arrived(near: Side, far: Side, direction: Direction) -> int:
    """How many bytes of the receiver differ from the sender's."""
    target, source = (near, far) if direction is READ else (far, near)
    ends = (0, 1) if direction is READ else (1, 0)
    got, sent = (
        b"".join(side.memory[span[end] :][:SEGMENT_BYTES] for span in SPANS)
        for side, end in zip((target, source), ends, strict=True)
    )
    return int(np.count_nonzero(np.frombuffer(got, np.uint8) != np.frombuffer(sent, np.uint8)))


class TestWrongBytes:
    @pytest.mark.parametrize(("plane", "direction"), WAYS)
    def test_full_catches_every_one(self, rig: Rig, plane: str, direction: Direction) -> None:
        near, far, log = rig.pair(plane, some_byte(3), mode=Checksum.FULL)
        for job in range(12):
            assert near.transport.submit(copy(job, far, direction, SPANS))
            end = log.end(job)
            assert (end.reason, end.at_rest) == (Reason.CHECKSUM_MISMATCH, True), end
            assert arrived(near, far, direction) == 1
        assert rig.lying is not None and rig.lying.struck == list(range(12))
        assert [len(log.ends(job)) for job in range(12)] == [1] * 12 and len(log.events) == 12

    @pytest.mark.parametrize(("plane", "direction"), WAYS)
    def test_sample_catches_those_in_the_segments_it_looks_at(self, rig: Rig, plane: str, direction: Direction) -> None:
        near, far, log = rig.pair(plane, lambda copy: copy.job * SEGMENT_BYTES + 17, mode=Checksum.SAMPLE)
        caught = []
        for job in range(SEGMENTS):
            assert near.transport.submit(copy(job, far, direction, SPANS))
            if log.end(job).reason is Reason.CHECKSUM_MISMATCH:
                caught.append(job)
                assert f"job {job}: segment {job} of {SEGMENTS} differs" in log.end(job).detail
            assert arrived(near, far, direction) == 1
        looked_at = [job for job in range(SEGMENTS) if _is_looked_at(copy(job, far, direction, SPANS), job)]
        assert caught == looked_at and {0, SEGMENTS - 1} <= set(caught) and 4 <= len(caught) <= 12

    @pytest.mark.parametrize(("plane", "direction"), WAYS)
    def test_off_does_not_look(self, rig: Rig, plane: str, direction: Direction) -> None:
        near, far, log = rig.pair(plane, some_byte(3), mode=Checksum.OFF, far_mode=Checksum.FULL)
        held = rig.hold(0), rig.hold(1)
        assert near.transport.submit(copy(1, far, direction, SPANS))
        assert log.end(1).reason is None and arrived(near, far, direction) == 1
        assert not held[0].held and not held[1].held

    @pytest.mark.parametrize(("plane", "direction"), WAYS)
    @pytest.mark.parametrize("mode", Checksum)
    def test_right_bytes_pass_and_the_driving_side_decides(
        self, rig: Rig, plane: str, direction: Direction, mode: Checksum
    ) -> None:
        near, far, log = rig.pair(plane, mode=mode, far_mode=Checksum.OFF)
        for job in range(3):
            assert near.transport.submit(copy(job, far, direction, SPANS))
            assert log.end(job) == CopyEnded(JobId(job)) and not arrived(near, far, direction)

    def test_a_mismatch_leaves_the_memory_at_rest(self, rig: Rig) -> None:
        near, far, log = rig.pair(strike=some_byte(5), mode=Checksum.FULL)
        assert near.transport.submit(copy(1, far, READ, SPANS))
        assert log.end(1).at_rest
        marks = fill(near.memory, 9)
        assert near.transport.submit(copy(2, far, READ, []))
        assert log.end(2).reason is None, "nothing of it can be wrong"
        assert bytes(near.memory) == marks and len(log.events) == 2

    def test_one_of_many_copies_at_once_is_told_from_the_others(self, rig: Rig) -> None:
        near, far, log = rig.pair(strike=lambda copy: 5 if copy.job % 5 == 3 else None, mode=Checksum.FULL)
        for job, span in enumerate(SPANS):
            assert near.transport.submit(copy(job, far, READ, [span]))
        wrong = {job for job in range(SEGMENTS) if log.end(job).reason is Reason.CHECKSUM_MISMATCH}
        assert wrong == {job for job in range(SEGMENTS) if job % 5 == 3}

    def test_a_source_that_changes_between_copy_and_comparison_is_a_mismatch(self, rig: Rig) -> None:
        """As with blocks reused under an expired lease: never a good end for bytes that the source no longer has."""
        near, far, log = rig.pair(mode=Checksum.FULL)
        held = rig.hold(1)
        assert near.transport.submit(copy(1, far, READ, SPANS))
        assert poll(lambda: bool(held.held), WAIT_S)
        far.memory[SIZE // 2] ^= 4
        held.go_on()
        assert log.end(1).reason is Reason.CHECKSUM_MISMATCH


def _is_looked_at(sampled: Copy, segment: int) -> bool:
    return any(segment * SEGMENT_BYTES in part[0::3] for part in portions(sampled, Checksum.SAMPLE))


def comparing(rig: Rig, near: Side, far: Side, jobs: Sequence[int] = (1,)) -> HeldDigesters:
    """Copies that have landed, whose sums do not come."""
    held = rig.hold(1)
    for job in jobs:
        assert near.transport.submit(copy(job, far, READ, SPANS))
    assert poll(lambda: len(held.held) == len(jobs), WAIT_S)
    return held


class TestWhileItIsCompared:
    def test_cancel_ends_it_at_once_and_others_go_on(self, rig: Rig) -> None:
        near, far, log = rig.pair()
        held = comparing(rig, near, far, (1, 2))
        near.transport.cancel(JobId(1))
        assert log.end(1) == CopyEnded(JobId(1), Reason.CANCELLED)
        assert not log.ends(2)
        held.go_on()
        assert log.end(2).reason is None
        near.transport.cancel(JobId(1))
        assert near.transport.submit(copy(1, far, READ, SPANS)), "the number can be used again"
        assert log.wait(lambda: len(log.ends(1)) == 2) and log.ends(1)[1].reason is None

    def test_a_line_that_owes_only_what_nobody_wants_is_given_up(self, rig: Rig) -> None:
        near, far, log = rig.pair()
        held = comparing(rig, near, far)
        near.transport.cancel(JobId(1))
        log.end(1)
        assert poll(lambda: not rig.transports[1]._service._guests, WAIT_S)
        held.holds = False
        assert near.transport.submit(copy(2, far, READ, SPANS))
        assert log.end(2).reason is None

    def test_disconnect_ends_it(self, rig: Rig) -> None:
        near, far, log = rig.pair()
        held = comparing(rig, near, far)
        near.transport.disconnect(P)
        assert log.end(1) == CopyEnded(JobId(1), Reason.PEER_GONE, detail="disconnected")
        held.go_on()
        assert near.transport.submit(copy(2, far, READ, SPANS))
        assert log.end(2).reason is Reason.PEER_UNKNOWN and len(log.ends(1)) == 1

    def test_a_fence_ends_it(self, rig: Rig) -> None:
        near, far, log = rig.pair()
        comparing(rig, near, far)
        near.transport.fence(P)
        assert log.end(1) == CopyEnded(JobId(1), Reason.TRANSFER_FAILED, detail="the peer was fenced")
        assert log.wait(lambda: FenceEnded(P) in log.events) and len(log.ends(1)) == 1

    def test_close_ends_it(self, rig: Rig) -> None:
        near, far, log = rig.pair()
        comparing(rig, near, far)
        near.transport.close()
        assert log.end(1) == CopyEnded(JobId(1), Reason.CANCELLED, detail="the transport was closed")
        assert not near.transport.submit(copy(2, far, READ, SPANS)) and len(log.ends(1)) == 1

    def test_a_new_endpoint_ends_it(self, rig: Rig) -> None:
        near, far, log = rig.pair("shm")
        held = comparing(rig, near, far)
        far.transport.disconnect(D)
        near.transport.connect(P, far.transport.endpoint(D))
        end = log.end(1)
        assert end.reason is Reason.TRANSFER_FAILED and end.at_rest
        held.holds = False
        assert near.transport.submit(copy(2, far, READ, SPANS))
        assert log.end(2).reason is None and len(log.ends(1)) == 1

    def test_a_peer_that_goes_away_fails_it(self, rig: Rig) -> None:
        near, far, log = rig.pair()
        comparing(rig, near, far)
        far.transport.close()
        end = log.end(1)
        assert (end.reason, end.at_rest) == (Reason.TRANSFER_FAILED, True) and "sum service" in end.detail

    def test_a_service_that_does_not_answer_fails_it_by_its_deadline(self, rig: Rig) -> None:
        near, far, log = rig.pair(answer_s=0.2)
        held = comparing(rig, near, far)
        end = log.end(1)
        assert (end.reason, end.at_rest) == (Reason.TRANSFER_FAILED, True)
        assert f"the checksum service of {P}: no answer for 0.2 s" in end.detail
        held.go_on()
        rig.transports[0]._links[P]._answer_s = WAIT_S
        assert near.transport.submit(copy(2, far, READ, SPANS))
        assert log.end(2).reason is None and len(log.events) == 2, "the answer that came late was heard"

    def test_every_answer_extends_the_deadline_of_those_that_wait(self, rig: Rig) -> None:
        near, far, log = rig.pair(answer_s=WAIT_S)
        held = comparing(rig, near, far, range(4))
        link = rig.transports[0]._links[P]
        for count, task in enumerate(held.held, 1):
            asked_at = link._heard_at
            task()
            assert log.wait(lambda count=count: len(log.events) == count)  # type: ignore[misc]
            assert link._heard_at > asked_at
        assert all(log.end(job).reason is None for job in range(4))


class TestWithoutASumService:
    def test_an_endpoint_without_one_is_refused_by_name(self, rig: Rig) -> None:
        near, far, log = rig.pair()
        plain = TcpTransport(P)
        plain.register(0, memoryview(bytearray(64)))
        near.transport.disconnect(P)
        with pytest.raises(ValueError, match=r"checksum: p#0.* offers no checksums.*off on both"):
            near.transport.connect(P, plain.endpoint(D))
        assert near.transport.submit(copy(1, far, READ, [(0, 0, 8)]))
        assert log.end(1).reason is Reason.PEER_UNKNOWN
        plain.close()

    @pytest.mark.parametrize("plane", PLANES)
    def test_a_plane_without_checksums_takes_no_endpoint_with_them(self, rig: Rig, plane: str) -> None:
        _, far, _ = rig.pair(plane)
        endpoint = far.transport.endpoint(D)
        plain = PLANES[plane](D)
        with pytest.raises(ValueError, match="not an endpoint"):
            plain.connect(P, endpoint)
        assert is_summed(endpoint) and not is_summed(plain.endpoint(P))
        plain.close()

    def test_nobody_listening_is_unreachable(self, rig: Rig) -> None:
        near, far, log = rig.pair("shm")
        there = parse(P, far.transport.endpoint(D))
        rig.transports[1]._loop.stop(WAIT_S)
        near.transport.disconnect(P)
        near.transport.connect(P, VERSION + msgspec.msgpack.encode(there))
        for job, spans in enumerate((SPANS, [])):
            assert near.transport.submit(copy(job, far, READ, spans)), "a copy of nothing finds it out as well"
            end = log.end(job)
            assert end.reason is Reason.UNREACHABLE and end.at_rest, end

    @pytest.mark.parametrize(
        "bad",
        [
            VERSION,
            VERSION + b"\xc1",
            VERSION + msgspec.msgpack.encode(SumEndpoint("localhost", 80, bytes(32), b"")),
            VERSION + msgspec.msgpack.encode(SumEndpoint("127.0.0.1", 0, bytes(32), b"")),
            VERSION + msgspec.msgpack.encode(SumEndpoint("127.0.0.1", 80, bytes(31), b"")),
            VERSION + msgspec.msgpack.encode(SumEndpoint("127.0.0.1", 80, bytes(32), b"nothing")),
        ],
    )
    def test_half_an_endpoint_is_refused_whole(self, rig: Rig, bad: bytes) -> None:
        near, far, log = rig.pair()
        near.transport.disconnect(P)
        with pytest.raises(ValueError):
            near.transport.connect(P, bad)
        assert near.transport.submit(copy(1, far, READ, [(0, 0, 8)]))
        assert log.end(1).reason is Reason.PEER_UNKNOWN

    @settings(deadline=None)  # a busy machine is not a failure
    @given(st.binary(max_size=200), st.booleans())
    def test_noise_is_refused_as_a_value_and_nothing_else(self, noise: bytes, begins_well: bool) -> None:
        with contextlib.suppress(ValueError):
            parse(P, VERSION + noise if begins_well else noise)

    def test_an_endpoint_is_small_enough_to_be_told(self, rig: Rig) -> None:
        name = PeerId(WorkerId("w" * 80 + "#63"), Incarnation((1 << 63) - 1))
        transport = SummedTransport(TcpTransport(name), name)
        for region in range(64):
            transport.register(region, memoryview(bytearray(1 << 16)))
        assert len(transport.endpoint(D)) <= BYTES_MAX
        transport.close()


class Manual:
    """An inner plane whose copies end when and how the test says."""

    capabilities = msgspec.structs.replace(tcp_transport.CAPABILITIES, enforces=False)

    def __init__(self) -> None:
        self.copies: dict[JobId, Copy] = {}
        self.cancelled: list[JobId] = []
        self.full = False
        self._news: list[TransportEvent] = []
        self._lock = threading.Lock()  # told here, drained on a loop's thread
        self._waker: Callable[[], None] = lambda: None

    def tell(self, *events: TransportEvent) -> None:
        with self._lock:
            self._news.extend(events)
        self._waker()

    def register(self, region: int, memory: memoryview) -> None: ...
    def connect(self, peer: PeerId, endpoint: bytes) -> None: ...
    def disconnect(self, peer: PeerId) -> None: ...
    def fence(self, peer: PeerId) -> None: ...
    def close(self) -> None: ...

    def endpoint(self, peer: PeerId) -> bytes:
        return b"manual"

    def submit(self, copy: Copy) -> bool:
        if not self.full:
            self.copies[copy.job] = copy
        return not self.full

    def cancel(self, job: JobId) -> None:
        self.cancelled.append(job)

    def drain(self) -> Sequence[TransportEvent]:
        with self._lock:
            news, self._news = self._news, []
        return news

    def set_waker(self, waker: Callable[[], None]) -> None:
        self._waker = waker


class TestAroundAnyPlane:
    @pytest.fixture
    def manual(self, rig: Rig) -> tuple[Manual, Side, Side, Log]:
        """Both memories hold zeros, so what was never moved compares well."""
        inner = Manual()
        near = rig.side(SummedTransport(inner, D, SumConfig(copies_max=4)), D)
        far = rig.side(SummedTransport(Manual(), P), P)
        near.transport.connect(P, far.transport.endpoint(D))
        harness = InProcessHarness(TcpTransport, lambda size: memoryview(bytearray(size)), tcp_transport.CAPABILITIES)
        return inner, near, far, Log(harness, near)

    def test_what_is_cancelled_before_its_good_end_is_heard_is_not_compared(
        self, manual: tuple[Manual, Side, Side, Log]
    ) -> None:
        inner, near, far, log = manual
        assert near.transport.submit(copy(1, far, READ, SPANS))
        near.transport.cancel(JobId(1))
        assert inner.cancelled == [1] and not log.wait(lambda: bool(log.events), 0.02)
        inner.tell(CopyEnded(JobId(1)))
        assert log.end(1) == CopyEnded(JobId(1), Reason.CANCELLED)

    def test_a_failure_below_keeps_its_own_reason(self, manual: tuple[Manual, Side, Side, Log]) -> None:
        inner, near, far, log = manual
        assert near.transport.submit(copy(1, far, READ, SPANS))
        near.transport.cancel(JobId(1))
        inner.tell(CopyEnded(JobId(1), Reason.BAD_SPAN, detail="so it was"))
        assert log.end(1) == CopyEnded(JobId(1), Reason.BAD_SPAN, detail="so it was")

    def test_what_is_not_at_rest_is_said_not_to_be_and_rests_later(
        self, manual: tuple[Manual, Side, Side, Log]
    ) -> None:
        inner, near, far, log = manual
        assert near.transport.submit(copy(1, far, WRITE, SPANS))
        inner.tell(CopyEnded(JobId(1), Reason.CANCELLED, at_rest=False))
        assert log.end(1) == CopyEnded(JobId(1), Reason.CANCELLED, at_rest=False) and not log.rested(1)
        inner.tell(CopyRested(JobId(1)))
        assert log.wait(lambda: log.rested(1)) and len(log.events) == 2

    def test_a_full_plane_says_so_and_nothing_is_kept(self, manual: tuple[Manual, Side, Side, Log]) -> None:
        inner, near, far, log = manual
        inner.full = True
        for _ in range(10):
            assert not near.transport.submit(copy(1, far, READ, SPANS))
        inner.full = False
        for job in range(4):
            assert near.transport.submit(copy(job, far, READ, SPANS))
        assert not near.transport.submit(copy(4, far, READ, SPANS)), "beyond copies_max"
        assert 4 not in inner.copies
        inner.tell(*(CopyEnded(JobId(job)) for job in range(4)))
        assert [log.end(job).reason for job in range(4)] == [None] * 4
        assert near.transport.submit(copy(4, far, READ, SPANS))

    def test_a_number_that_is_under_way_is_refused(self, manual: tuple[Manual, Side, Side, Log]) -> None:
        _, near, far, _ = manual
        assert near.transport.submit(copy(1, far, READ, SPANS))
        with pytest.raises(ValueError, match="job 1 is already in flight"):
            near.transport.submit(copy(1, far, READ, SPANS))

    def test_close_ends_what_the_plane_never_ended_and_claims_no_rest_for_it(
        self, manual: tuple[Manual, Side, Side, Log]
    ) -> None:
        inner, near, far, log = manual
        assert near.transport.submit(copy(1, far, READ, SPANS)) and near.transport.submit(copy(2, far, READ, SPANS))
        inner._news.append(CopyEnded(JobId(2)))
        near.transport.close()
        assert (log.end(1).reason, log.end(1).at_rest) == (Reason.CANCELLED, False)
        assert (log.end(2).reason, log.end(2).at_rest) == (Reason.CANCELLED, True), "it was never compared"

    @pytest.mark.parametrize("breaks", ["portions", "digests"])
    def test_what_cannot_be_compared_has_an_end_all_the_same(
        self, manual: tuple[Manual, Side, Side, Log], monkeypatch: pytest.MonkeyPatch, breaks: str
    ) -> None:
        inner, near, far, log = manual

        def broken(*_: object) -> bytes:
            raise MemoryError("on purpose")

        where: object = checksum_transport if breaks == "portions" else host_sums(near.transport)
        monkeypatch.setattr(where, breaks, broken)
        assert near.transport.submit(copy(1, far, READ, SPANS))
        inner.tell(CopyEnded(JobId(1)))
        end = log.end(1)
        assert (end.reason, end.at_rest) == (Reason.TRANSFER_FAILED, True) and "on purpose" in end.detail

    def test_a_service_that_cannot_digest_hangs_up(
        self, manual: tuple[Manual, Side, Side, Log], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        inner, near, far, log = manual

        def broken(*_: object) -> bytes:
            raise MemoryError("on purpose")

        monkeypatch.setattr(host_sums(far.transport), "digests", broken)
        assert near.transport.submit(copy(1, far, READ, SPANS))
        inner.tell(CopyEnded(JobId(1)))
        end = log.end(1)
        assert (end.reason, end.at_rest) == (Reason.TRANSFER_FAILED, True) and "closed the connection" in end.detail

    def test_a_region_that_the_peer_does_not_have_is_its_refusal(self, manual: tuple[Manual, Side, Side, Log]) -> None:
        inner, near, far, log = manual
        assert near.transport.submit(copy(1, far, READ, [(0, 0, 8)], region=9))
        inner.tell(CopyEnded(JobId(1)))
        end = log.end(1)
        assert end.reason is Reason.BAD_SPAN and "refused to digest" in end.detail


def test_capabilities_are_those_of_the_plane_but_the_other_side_takes_part() -> None:
    transport = SummedTransport(ShmTransport(D), D)
    able, plain = transport.capabilities, ShmTransport.capabilities
    assert plain.one_sided and not able.one_sided
    assert msgspec.structs.replace(able, one_sided=True, name="shm") == plain and able.name == "shm+sums"
    transport.close()


@pytest.mark.parametrize("bad", [{"host": "0.0.0.0"}, {"threads": 0}, {"answer_s": 0.0}, {"host": "example.org"}])
def test_nonsense_is_refused_by_the_config(bad: dict[str, object]) -> None:
    with pytest.raises(ValueError):
        SumConfig(**bad)  # type: ignore[arg-type]


class TestCorrupting:
    def test_some_byte_strikes_as_often_as_it_is_told(self) -> None:
        spans = array("q", (0, 0, 100, 200, 300, 1))
        of = [Copy(JobId(job), P, READ, 0, 0, spans) for job in range(400)]
        struck = [byte for each in of if (byte := some_byte(each.job, 4)(each)) is not None]
        assert 60 < len(struck) < 140 and all(0 <= byte <= 100 for byte in struck)
        assert some_byte(1)(Copy(JobId(1), P, READ, 0, 0, array("q"))) is None

    def test_a_refused_or_failed_copy_leaves_its_source_as_it_was(self) -> None:
        inner, memory = Manual(), memoryview(bytearray(random.Random(1).randbytes(4096)))
        before = bytes(memory)
        lying = CorruptingTransport(inner, lambda _copy: 5)
        lying.register(0, memory)
        inner.full = True
        assert not lying.submit(Copy(JobId(1), P, WRITE, 0, 0, array("q", (0, 0, 4096))))
        assert bytes(memory) == before
        inner.full = False
        for job, direction in ((1, WRITE), (2, READ)):
            assert lying.submit(Copy(JobId(job), P, direction, 0, 0, array("q", (0, 0, 4096))))
        assert bytes(memory) != before
        inner.tell(CopyEnded(JobId(1), Reason.CANCELLED), CopyEnded(JobId(2), Reason.CANCELLED))
        assert len(lying.drain()) == 2 and bytes(memory) == before and not lying.struck
