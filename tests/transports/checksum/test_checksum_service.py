"""Promises 4 and 5 at the sum service: strangers learn nothing, a bad question costs itself, a malformed one a line."""

from __future__ import annotations

import contextlib
import random
import socket
from array import array
from collections.abc import Iterator
from functools import partial

import msgspec
import pytest
import xxhash

from kvbaton.protocol.ids import Incarnation, JobId, PeerId, WorkerId
from kvbaton.testing.transport_harness import poll
from kvbaton.transports.checksum.checksum_memory import HostSums
from kvbaton.transports.checksum.checksum_transport import SumConfig, SumEndpoint, SummedTransport, parse
from kvbaton.transports.core.jobs import to_wire
from kvbaton.transports.core.loans import EVERYTHING, lend_everything
from kvbaton.transports.net.connection_handshake import greet
from kvbaton.transports.net.stream_socket import (
    FRAME_BYTES,
    PAYLOAD_BYTES_MAX,
    ROWS_MAX,
    WINDOW_MAX,
    Frame,
    FrameKind,
    FrameStatus,
)
from kvbaton.transports.net.stream_socket import parse as parse_frame
from kvbaton.transports.tcp.tcp_transport import TcpEndpoint, TcpTransport
from tests.transports.checksum.held_digesters import HeldDigesters
from tests.transports.tcp.blocking import DEADLINE_S, D, P, exactly, is_closed, play, tcp_dial

SIZE = 1 << 20
DATA = random.Random(1).randbytes(SIZE)


def question(places: list[int], tag: int = 7, region: int = 0, size: int | None = None) -> bytes:
    triples = array("q", [number for at in range(0, len(places), 2) for number in (0, places[at], places[at + 1])])
    table = to_wire(triples)
    said = sum(places[1::2]) if size is None else size
    return Frame(FrameKind.SUM, tag, said, region=region, table_bytes=len(table)).pack() + table


def answer(sock: socket.socket) -> tuple[Frame, bytes]:
    frame = parse_frame(exactly(sock, FRAME_BYTES), FrameKind.SUMS)
    return frame, exactly(sock, frame.payload_bytes)


def sums(*places: int) -> bytes:
    pairs = [(places[at], places[at + 1]) for at in range(0, len(places), 2)]
    return b"".join(xxhash.xxh3_64_intdigest(DATA[at : at + size]).to_bytes(8, "little") for at, size in pairs)


class Rig:
    """A transport with a sum service, and a client that says whatever the test wants."""

    def __init__(self, handshake_s: float = DEADLINE_S) -> None:
        self.server = SummedTransport(TcpTransport(P), P, SumConfig(dial_deadline_s=handshake_s, strangers_max=4))
        self.server.register(0, memoryview(bytearray(DATA)))
        lend_everything(self.server, D)
        self.socks: list[socket.socket] = []

    @property
    def there(self) -> SumEndpoint:
        return parse(P, self.server.endpoint(D))

    def knock(self) -> socket.socket:
        self.socks.append(socket.create_connection((self.there.host, self.there.port), timeout=DEADLINE_S))
        return self.socks[-1]

    def dial(self, secret: bytes | None = None, me: PeerId = D) -> socket.socket:
        sock, proof = self.knock(), secret or self.there.secret
        play(sock, lambda wire: greet(wire, proof, me, P, 0))
        return sock

    def answers(self, sock: socket.socket) -> bool:
        sock.sendall(question([100, 50], tag=99))
        return answer(sock) == (Frame(FrameKind.SUMS, 99, 8), sums(100, 50))


@pytest.fixture
def rig(request: pytest.FixtureRequest) -> Iterator[Rig]:
    rig = Rig(getattr(request, "param", DEADLINE_S))
    yield rig
    rig.server.close()
    for sock in rig.socks:
        sock.close()


def test_every_pair_of_a_question_gets_its_digest(rig: Rig) -> None:
    sock = rig.dial()
    sock.sendall(question([0, 10, SIZE - 5, 5, 0, SIZE, 3, 0], tag=1))
    assert answer(sock) == (Frame(FrameKind.SUMS, 1, 32), sums(0, 10, SIZE - 5, 5, 0, SIZE, 3, 0))
    sock.sendall(question([], tag=2))
    assert answer(sock) == (Frame(FrameKind.SUMS, 2, 0), b"")


@pytest.mark.parametrize(
    "places",
    [[SIZE - 4, 8], [-8, 8], [SIZE, 1], [0, SIZE + 1], [2**63 - 1, 8], [8, -1]],
    ids=str,
)
def test_memory_outside_is_not_digested_and_costs_that_question_only(rig: Rig, places: list[int]) -> None:
    sock = rig.dial()
    sock.sendall(question([0, 8, *places], size=16))
    assert answer(sock) == (Frame(FrameKind.SUMS, 7, status=FrameStatus.BAD_SPAN), b"")
    sock.sendall(question([0, 8], region=5))
    assert answer(sock) == (Frame(FrameKind.SUMS, 7, status=FrameStatus.BAD_SPAN), b"")
    assert rig.answers(sock)


@pytest.mark.parametrize(
    "said",
    [
        question([0, 8], size=9),
        Frame(FrameKind.SUM, 1, PAYLOAD_BYTES_MAX + 1).pack(),
        Frame(FrameKind.SUM, 1, table_bytes=15).pack(),
        Frame(FrameKind.SUM, 1, table_bytes=16 * (ROWS_MAX + 1)).pack(),
        Frame(FrameKind.READ, 1).pack(),
        Frame(FrameKind.WRITE, 1, 4).pack() + b"abcd",
        Frame(FrameKind.SUMS, 1).pack(),
        b"\xff" * FRAME_BYTES,
    ],
    ids=["wrong_size", "too_large", "torn_table", "too_many_rows", "a_read", "a_write", "an_answer", "noise"],
)
def test_what_is_malformed_costs_its_connection_and_nothing_else(rig: Rig, said: bytes) -> None:
    sock = rig.dial()
    with contextlib.suppress(ConnectionError):
        sock.sendall(said)
    assert is_closed(sock)
    assert rig.answers(rig.dial())


def test_data_and_sums_have_doors_of_their_own(rig: Rig) -> None:
    """The secret of one is worth nothing at the other, nor are its frames."""
    data = msgspec.msgpack.decode(rig.there.inner, type=TcpEndpoint)
    with pytest.raises(Exception, match="hold our secret"):
        rig.dial(data.secret)
    stream = tcp_dial(rig.there.inner, D)
    rig.socks.append(stream)
    stream.sendall(question([0, 8]))
    assert is_closed(stream)


@pytest.mark.parametrize("rig", [4.0], indirect=True, ids=["handshake_of_4_s"])
def test_strangers_learn_nothing_and_do_not_stay(rig: Rig) -> None:
    stranger = PeerId(WorkerId("stranger"), Incarnation(9))
    with pytest.raises(Exception, match="hold our secret"):
        rig.dial(me=stranger)
    silent = rig.knock()
    eager = rig.knock()
    eager.sendall(question([0, 8]))
    assert is_closed(silent) and is_closed(eager)
    crowd = [rig.knock() for _ in range(12)]
    assert rig.answers(rig.dial()), "a crowd of strangers keeps a peer out"
    assert all(is_closed(sock) for sock in crowd)


def test_a_newer_connection_of_a_peer_replaces_the_older(rig: Rig) -> None:
    first, second = rig.dial(), rig.dial()
    assert is_closed(first) and rig.answers(second)


def test_who_is_shut_out_is_heard_no_more_until_it_has_a_new_secret(rig: Rig) -> None:
    sock, old = rig.dial(), rig.there.secret
    assert rig.answers(sock)
    rig.server.disconnect(D)
    assert is_closed(sock)
    with pytest.raises(Exception, match="hold our secret"):
        rig.dial(old)
    assert rig.there.secret != old and rig.answers(rig.dial())


def test_a_peer_can_make_only_a_window_of_work_wait(rig: Rig) -> None:
    held = HeldDigesters()
    assert isinstance(rig.server._sums, HostSums)
    rig.server._sums.digesters = held
    sock = rig.dial()
    sock.sendall(b"".join(question([0, 8], tag) for tag in range(WINDOW_MAX)))
    assert poll(lambda: len(held.held) == WINDOW_MAX, DEADLINE_S)
    with contextlib.suppress(ConnectionError):
        sock.sendall(question([0, 8], WINDOW_MAX))
    assert is_closed(sock) and len(held.held) == WINDOW_MAX
    again = rig.dial()
    held.go_on()
    assert rig.answers(again), "answers to a line that is closed disturb the next one"
    held.close(5)


def test_a_peer_that_reads_no_answers_is_let_go(rig: Rig) -> None:
    """Answers that nobody takes would pile up: they count like questions that wait."""
    sock = rig.dial()
    rows = [0, 1] * ROWS_MAX
    with contextlib.suppress(ConnectionError, TimeoutError):
        sock.settimeout(2)
        for tag in range(4096):
            sock.sendall(question(rows, tag))
    assert poll(partial(_is_gone, rig), DEADLINE_S)
    assert rig.answers(rig.dial())


def _is_gone(rig: Rig) -> bool:
    return not rig.server._service._guests


def test_who_may_only_write_learns_nothing_of_what_was_there() -> None:
    rig = Rig()
    try:
        rig.server.cancel(JobId(EVERYTHING))  # to read; what it may write stays
        sock = rig.dial()
        for spans, status in (
            ([0, 1], FrameStatus.NOT_LENT),
            ([0, 64, 64, 15], FrameStatus.NOT_LENT),
            ([0, 16], FrameStatus.OK),
        ):
            sock.sendall(question(spans))
            assert answer(sock)[0].status is status
    finally:
        rig.server.close()
