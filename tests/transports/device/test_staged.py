"""Staging over several sockets, and its writes: what the contract does not ask of every plane."""

from __future__ import annotations

import contextlib
import ctypes
import socket
import threading
from array import array
from collections.abc import Iterator

import msgspec
import pytest

from kvbaton.protocol.errors import ProtocolError, Reason
from kvbaton.protocol.ids import JobId, PeerId
from kvbaton.testing.transport_harness import poll
from kvbaton.transports.core.loans import lend_everything
from kvbaton.transports.core.shared_memory import DeviceMemory
from kvbaton.transports.core.transport import (
    Copy,
    CopyEnded,
    CopyRested,
    Direction,
    FenceEnded,
    TransportEvent,
    refusals_of,
)
from kvbaton.transports.local.region_listener import LENGTH
from kvbaton.transports.net import connection_handshake
from kvbaton.transports.net.stream_socket import FRAME_BYTES, Frame, FrameKind, FrameStatus, parse
from kvbaton.transports.staged import staged_connection, staged_server
from kvbaton.transports.staged.staged_listener import SOCKETS_MAX, Carrier, StagedEndpoint, StagedHello, dial
from kvbaton.transports.staged.staged_transport import StagedConfig, StagedTransport
from tests.transports.device.fake_gpu import FakeGpu
from tests.transports.tcp.blocking import D, P, exactly, is_closed, play, request

SIZE = 6 << 20
SOCKETS = 3
DEADLINE_S = 20.0


class Pair:
    """P and D in this process over one device; `d` drives."""

    def __init__(self, carrier: Carrier = "tcp", sockets: int = SOCKETS, d_sockets: int | None = None) -> None:
        self.gpu = FakeGpu()
        self.p = self._side(P, carrier, sockets)
        self.d = self._side(D, carrier, d_sockets or sockets)
        self.memory = {me: self.gpu.allocate(SIZE) for me in (P, D)}
        self.events: list[TransportEvent] = []
        for me, transport, other in ((P, self.p, D), (D, self.d, P)):
            transport.register(0, DeviceMemory(self.memory[me], SIZE))
            lend_everything(transport, other)

    def _side(self, me: PeerId, carrier: Carrier, sockets: int) -> StagedTransport:
        config = StagedConfig(carrier=carrier, slot_bytes=1 << 20, slots=2, sockets=sockets)
        return StagedTransport(me, config, self.gpu)

    def connect(self) -> None:
        self.d.connect(P, self.p.endpoint(D))

    def copy(self, job: int, way: Direction = Direction.READ, size: int = SIZE) -> None:
        assert self.d.submit(Copy(JobId(job), P, way, 0, 0, array("q", (0, 0, size))))

    def end(self, job: int) -> CopyEnded:
        ends: list[CopyEnded] = []

        def found() -> bool:
            self.events += self.d.drain()
            ends.extend(each for each in self.events if isinstance(each, CopyEnded) and each.job == job)
            return bool(ends)

        assert poll(found, DEADLINE_S), self.events
        return ends[0]

    def told(self, event: TransportEvent, side: StagedTransport) -> bool:
        def found() -> bool:
            self.events += side.drain()
            return event in self.events

        return poll(found, DEADLINE_S)

    def write_at(self, who: PeerId, data: bytes) -> None:
        ctypes.memmove(self.memory[who], data, len(data))

    def read_at(self, who: PeerId) -> bytes:
        return ctypes.string_at(self.memory[who], SIZE)

    def lines(self) -> list[staged_connection.StagedConnection]:
        crew = self.d._links[P]._crew
        return [] if crew is None else crew.lines

    def close(self) -> None:
        self.d.close()
        self.p.close()


@pytest.fixture
def pair() -> Iterator[Pair]:
    made = Pair()
    made.connect()
    yield made
    made.close()


def noise(seed: int) -> bytes:
    return bytes((seed * 7 + index * 31 + (index >> 8)) & 255 for index in range(1 << 16)) * (SIZE >> 16)


# --- sockets


@pytest.mark.parametrize(("p", "d", "lines"), [(3, 3, 3), (2, 4, 2), (4, 2, 2), (1, 4, 1)])
def test_a_pair_has_as_many_sockets_as_both_sides_have(p: int, d: int, lines: int) -> None:
    pair = Pair(sockets=p, d_sockets=d)
    pair.connect()
    data = noise(1)
    pair.write_at(P, data)
    pair.copy(1)
    assert pair.end(1).reason is None and pair.read_at(D) == data
    assert poll(lambda: len(pair.lines()) == lines, DEADLINE_S)
    pair.close()
    assert not pair.gpu.pinned


def test_an_endpoint_of_a_version_with_one_socket_is_dialled_once(pair: Pair) -> None:
    there = msgspec.msgpack.decode(pair.p.endpoint(D))
    old = msgspec.msgpack.encode(there[:-1])
    assert msgspec.msgpack.decode(old, type=StagedEndpoint).sockets == 1
    pair.d.connect(P, old)
    pair.copy(1)
    assert pair.end(1).reason is None and len(pair.lines()) == 1


@pytest.mark.parametrize("sockets", [0, SOCKETS_MAX + 1])
def test_a_number_of_sockets_out_of_bounds_is_refused(pair: Pair, sockets: int) -> None:
    there = msgspec.msgpack.decode(pair.p.endpoint(D), type=StagedEndpoint)
    with pytest.raises(ValueError, match="connections, expected 1"):
        pair.d.connect(P, msgspec.msgpack.encode(msgspec.structs.replace(there, sockets=sockets)))
    with pytest.raises(ValueError, match=f"sockets: got {sockets}, expected 1"):
        StagedConfig(sockets=sockets)


@pytest.mark.parametrize("way", list(Direction))
def test_when_one_connection_falls_all_fall_and_what_was_under_way_fails_once(pair: Pair, way: Direction) -> None:
    pair.copy(1)
    assert pair.end(1).reason is None
    assert poll(lambda: len(pair.lines()) == SOCKETS, DEADLINE_S)
    lines = list(pair.lines())
    for job in range(2, 6):
        pair.copy(job, way)
    broken = lines[-1]
    assert broken.loop.call(lambda: broken.wire.close("cut"))
    reasons = {pair.end(job).reason for job in range(2, 6)}
    assert reasons <= {None, Reason.TRANSFER_FAILED}
    assert poll(lambda: all(line.wire.closed for line in lines), DEADLINE_S)
    pair.copy(9)
    assert pair.end(9).reason is None, "the next copy dials anew"
    assert not set(lines) & set(pair.lines())
    ended = [each.job for each in pair.events if isinstance(each, CopyEnded)]
    assert len(ended) == len(set(ended))


def test_a_connection_that_cannot_be_had_makes_the_plane_unreachable(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    turns = iter(range(100))

    def refused(there: StagedEndpoint) -> socket.socket:
        if next(turns) == SOCKETS - 1:
            raise OSError("no more sockets")
        return dial(there)

    monkeypatch.setattr(staged_connection, "dial", refused)
    pair.copy(1)
    end = pair.end(1)
    assert end.reason in {Reason.UNREACHABLE, Reason.TRANSFER_FAILED} and "no more sockets" in end.detail
    monkeypatch.undo()
    pair.copy(2)
    assert pair.end(2).reason is None


def test_what_one_connection_is_told_must_be_told_on_all(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    counts = iter((2, 3, 4))

    def unlike(slot_bytes: int, slots: int, regions: dict[int, int]) -> StagedHello:
        return StagedHello(slot_bytes, slots, {**regions, 7: next(counts)})

    monkeypatch.setattr(staged_server, "StagedHello", unlike)
    pair.copy(1)
    end = pair.end(1)
    assert end.reason is Reason.TRANSFER_FAILED and "other slots or regions" in end.detail


def test_a_peer_makes_nobody_pin_more_than_the_bound(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(staged_connection, "PINNED_BYTES_MAX", SOCKETS * (2 << 20) - 1)
    pair.copy(1)
    end = pair.end(1)
    assert end.reason is Reason.UNREACHABLE and "would be pinned for one peer" in end.detail


# --- who may have one


def enter(pair: Pair, stream: int, secret: bytes | None = None) -> socket.socket:
    there = msgspec.msgpack.decode(pair.p.endpoint(D), type=StagedEndpoint)
    sock = socket.create_connection((there.place, there.port), DEADLINE_S)
    play(sock, lambda wire: connection_handshake.greet(wire, secret or there.secret, D, P, stream))
    return sock


def hello(sock: socket.socket) -> StagedHello:
    size = LENGTH.unpack(exactly(sock, LENGTH.size))[0]
    return msgspec.msgpack.decode(exactly(sock, size), type=StagedHello)


def test_nobody_joins_without_the_secret_and_nobody_has_one_more_than_allowed(pair: Pair) -> None:
    with pytest.raises(ProtocolError, match="does not hold our secret"):
        enter(pair, 1, bytes(32))
    with enter(pair, SOCKETS) as sock:
        assert is_closed(sock)
    assert poll(lambda: refusals_of(pair.p)["bad_message"] == 1, DEADLINE_S)


def test_a_connection_of_the_same_number_replaces_the_older_and_a_peer_cannot_take_all_room(pair: Pair) -> None:
    with contextlib.ExitStack() as stack:
        first = stack.enter_context(enter(pair, 1))
        hello(first)
        second = stack.enter_context(enter(pair, 1))
        hello(second)
        assert is_closed(first)
        assert sum(pair.p._server._seated.values()) <= 2 * SOCKETS
        pins = threading.Event()
        original = pair.gpu.pin

        def pin(address: int, nbytes: int) -> None:
            assert pins.wait(DEADLINE_S)
            original(address, nbytes)

        pair.gpu.pin = pin  # type: ignore[method-assign]
        for _ in range(2 * SOCKETS + 2):
            stack.enter_context(enter(pair, 0))
        assert poll(lambda: refusals_of(pair.p)["full"] >= 2, DEADLINE_S)
        pins.set()


def test_slots_that_cannot_be_had_keep_no_seat(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    def nothing(slot_bytes: int, count: int) -> None:
        raise OSError("no memory")

    monkeypatch.setattr(staged_server, "allocate_slots", nothing)
    pair.copy(1)
    assert pair.end(1).reason is Reason.UNREACHABLE
    monkeypatch.undo()
    assert poll(lambda: not pair.p._server._seated.total(), DEADLINE_S)
    pair.copy(2)
    assert pair.end(2).reason is None


def test_who_asks_on_and_on_and_takes_nothing_is_cut_off(pair: Pair) -> None:
    with enter(pair, 0) as sock:
        hello(sock)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        bad = request(FrameKind.READ, [SIZE, 8], tag=2) * 1000
        with contextlib.suppress(ConnectionError, TimeoutError):
            for _ in range(2000):
                sock.sendall(bad)
        assert poll(lambda: refusals_of(pair.p)["bad_message"] == 1, DEADLINE_S)


# --- writes


@pytest.mark.parametrize("carrier", ["shm", "tcp"])
def test_a_write_lands_by_the_receivers_launch_and_only_where_it_is_lent(carrier: Carrier) -> None:
    pair = Pair(carrier)
    pair.connect()
    data, marks = noise(1), noise(2)
    pair.write_at(D, data)
    pair.write_at(P, marks)
    for job in (1 << 40, (1 << 40) + 1):
        pair.p.cancel(JobId(job))
    pair.copy(1, Direction.WRITE)
    assert pair.end(1).reason is Reason.LEASE_EXPIRED and pair.read_at(P) == marks
    lend_everything(pair.p, D)
    pair.copy(2, Direction.WRITE)
    assert pair.end(2).reason is None and pair.read_at(P) == data
    pair.close()
    assert not pair.gpu.pinned and not pair.gpu.live


def test_what_is_written_outside_lands_nowhere_and_costs_that_request_only(pair: Pair) -> None:
    marks = noise(2)
    pair.write_at(P, marks)
    with enter(pair, 0) as sock:
        hello(sock)
        sock.sendall(request(FrameKind.WRITE, [SIZE - 4, 8], b"x" * 8, tag=2))
        assert parse(exactly(sock, FRAME_BYTES), FrameKind.DONE) == Frame(
            FrameKind.DONE, 2, status=FrameStatus.BAD_SPAN
        )
        sock.sendall(request(FrameKind.WRITE, [SIZE - 8, 8], b"y" * 8, tag=4))
        assert parse(exactly(sock, FRAME_BYTES), FrameKind.DONE) == Frame(FrameKind.DONE, 4)
        sock.sendall(request(FrameKind.WRITE, [0, 8], b"z" * 7, tag=6))
        assert is_closed(sock), "a payload of another size than its spans"
    assert pair.read_at(P) == marks[:-8] + b"y" * 8


class Held:
    """A device on which nothing ends until it is told to."""

    def __init__(self, pair: Pair) -> None:
        self.begun, self.go = threading.Event(), threading.Event()
        wait = pair.gpu.wait

        def held(event: int) -> None:
            self.begun.set()
            assert self.go.wait(DEADLINE_S)
            wait(event)

        pair.gpu.wait = held  # type: ignore[method-assign]


def test_a_fence_ends_when_what_was_launched_has_ended_and_not_before(pair: Pair) -> None:
    with enter(pair, 0) as sock:
        hello(sock)
        held = Held(pair)
        sock.sendall(request(FrameKind.WRITE, [0, 8], b"x" * 8, tag=2))
        assert held.begun.wait(DEADLINE_S)
        pair.p.fence(D)
        assert is_closed(sock)
        for loop in pair.p._loops:  # all has been said that is said before the launch ends
            turn = threading.Event()
            assert loop.call(turn.set) and turn.wait(DEADLINE_S)
        assert FenceEnded(D) not in pair.p.drain()
        held.go.set()
        assert pair.told(FenceEnded(D), pair.p)


def test_a_loan_that_is_taken_back_ends_when_the_launch_by_it_has_ended(pair: Pair) -> None:
    loan = JobId((1 << 40) + 1)
    with enter(pair, 0) as sock:
        hello(sock)
        held = Held(pair)
        sock.sendall(request(FrameKind.WRITE, [0, 8], b"x" * 8, tag=2))
        assert held.begun.wait(DEADLINE_S)
        pair.p.cancel(loan)
        assert not pair.p.drain()
        held.go.set()
        assert pair.told(CopyEnded(loan, Reason.CANCELLED), pair.p)
        assert parse(exactly(sock, FRAME_BYTES), FrameKind.DONE).status is FrameStatus.OK
        sock.sendall(request(FrameKind.WRITE, [0, 8], b"x" * 8, tag=2))
        assert parse(exactly(sock, FRAME_BYTES), FrameKind.DONE).status is FrameStatus.NOT_LENT


def test_a_payload_that_is_still_coming_holds_no_loan_up(pair: Pair) -> None:
    loan = JobId((1 << 40) + 1)
    with enter(pair, 0) as sock:
        hello(sock)
        sock.sendall(request(FrameKind.WRITE, [0, 8], b"x" * 8, tag=2)[:-1])
        pair.p.cancel(loan)
        assert pair.told(CopyEnded(loan, Reason.CANCELLED), pair.p)
        sock.sendall(b"x")
        assert parse(exactly(sock, FRAME_BYTES), FrameKind.DONE).status is FrameStatus.NOT_LENT


def test_a_write_whose_connection_fell_rests_when_the_peer_is_forgotten(pair: Pair) -> None:
    pair.copy(1, Direction.WRITE, 8)
    assert pair.end(1).reason is None
    assert poll(lambda: all(pair.p._server._served), DEADLINE_S)
    served = [session for served in pair.p._server._served for session in served.values()]
    held, added = threading.Event(), pair.p._stager.add
    pair.p._stager.add = lambda chunk: held.set()  # type: ignore[method-assign]
    pair.copy(2, Direction.WRITE, 8)
    assert held.wait(DEADLINE_S)  # P has all of it, and its launch may begin at any time
    for session in served:
        pair.p._loops[session.index].call(lambda session=session: session.wire.close("cut"))  # type: ignore[misc]
    end = pair.end(2)
    assert (end.reason, end.at_rest) == (Reason.TRANSFER_FAILED, False)
    pair.p._stager.add = added  # type: ignore[method-assign]
    assert CopyRested(JobId(2)) not in pair.d.drain()
    pair.d.disconnect(P)
    assert pair.told(CopyRested(JobId(2)), pair.d)


def test_a_write_that_was_given_up_while_it_was_gathered_is_not_sent(pair: Pair) -> None:
    pair.copy(1, Direction.WRITE, 8)
    assert pair.end(1).reason is None
    marks = noise(3)
    pair.write_at(P, marks)
    held = Held(pair)
    pair.copy(2, Direction.WRITE)
    assert held.begun.wait(DEADLINE_S)
    pair.d.cancel(JobId(2))
    assert not pair.end(2).at_rest
    held.go.set()
    assert pair.told(CopyRested(JobId(2)), pair.d)
    assert pair.read_at(P) == marks
