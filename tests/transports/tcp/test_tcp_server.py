"""Promise 4 and 5 at the serving end of tcp: a bad request costs that copy, a malformed one that connection, only."""

from __future__ import annotations

import contextlib
import random
import socket
from collections.abc import Iterator

import pytest

from kvbaton.protocol.ids import JobId
from kvbaton.testing.transport_harness import poll
from kvbaton.transports.core.loans import EVERYTHING, lend_everything
from kvbaton.transports.core.transport import FenceEnded
from kvbaton.transports.net.stream_socket import WINDOW_MAX, Frame, FrameKind, FrameStatus
from kvbaton.transports.tcp.tcp_server import STREAMS_PER_PEER_MAX
from kvbaton.transports.tcp.tcp_transport import TcpConfig, TcpTransport
from tests.transports.tcp.blocking import D, P, answer, is_closed, request, tcp_dial

SIZE = 1 << 20
DATA = random.Random(1).randbytes(SIZE)


class Rig:
    """A serving transport, and a client that says whatever the test wants."""

    def __init__(self) -> None:
        self.memory = bytearray(DATA)
        self.server = TcpTransport(P, TcpConfig())
        self.server.register(0, memoryview(self.memory))
        lend_everything(self.server, D)
        self.socks: list[socket.socket] = []

    def dial(self, stream: int = 0, endpoint: bytes | None = None) -> socket.socket:
        self.socks.append(tcp_dial(endpoint or self.server.endpoint(D), D, stream))
        return self.socks[-1]

    def serves(self, sock: socket.socket) -> bool:
        sock.sendall(request(FrameKind.READ, [100, 50], tag=99))
        frame, data = answer(sock)
        return (frame.tag, frame.status, data) == (99, FrameStatus.OK, bytes(self.memory[100:150]))


@pytest.fixture
def rig() -> Iterator[Rig]:
    rig = Rig()
    yield rig
    rig.server.close()
    for sock in rig.socks:
        sock.close()


def test_reads_are_answered_in_order_with_the_bytes_asked_for(rig: Rig) -> None:
    sock = rig.dial()
    sock.sendall(request(FrameKind.READ, [0, 10, SIZE - 5, 5], tag=1) + request(FrameKind.READ, [7, 3], tag=2))
    assert answer(sock) == (Frame(FrameKind.DATA, 1, 15), DATA[:10] + DATA[-5:])
    assert answer(sock) == (Frame(FrameKind.DATA, 2, 3), DATA[7:10])


def test_a_write_is_answered_when_it_is_visible(rig: Rig) -> None:
    sock = rig.dial()
    sock.sendall(request(FrameKind.WRITE, [4, 2, 0, 1], b"abc"))
    assert answer(sock) == (Frame(FrameKind.DONE, 7), b"")
    assert rig.memory[:6] == b"c" + DATA[1:4] + b"ab"


def test_what_is_not_lent_is_neither_read_nor_written(rig: Rig) -> None:
    """The attack: one valid key, a bare greeting, and then the whole memory, both ways."""
    for job in (EVERYTHING, EVERYTHING + 1):
        rig.server.cancel(JobId(job))
    sock = rig.dial()
    for spans in ([0, SIZE], [0, 1], [SIZE - 1, 1], [100, 50, 4096, 64]):
        sock.sendall(request(FrameKind.READ, spans))
        assert answer(sock) == (Frame(FrameKind.DATA, 7, status=FrameStatus.NOT_LENT), b"")
        sock.sendall(request(FrameKind.WRITE, spans, bytes(sum(spans[1::2]))))
        assert answer(sock) == (Frame(FrameKind.DONE, 7, status=FrameStatus.NOT_LENT), b"")
    assert bytes(rig.memory) == DATA and rig.server.refusals["not_lent"] == 8


def test_a_write_under_way_when_it_is_taken_back_ends_the_loan_only_once_it_has_landed(rig: Rig) -> None:
    sock = rig.dial()
    whole = request(FrameKind.WRITE, [0, 8], b"abcdefgh")
    sock.sendall(whole[:-4])
    assert poll(lambda: rig.memory[:4] == b"abcd", 20)
    rig.server.cancel(JobId(EVERYTHING + 1))
    assert rig.server.drain() == []
    sock.sendall(whole[-4:])
    assert answer(sock) == (Frame(FrameKind.DONE, 7), b"")
    assert poll(lambda: [event.job for event in rig.server.drain()] == [EVERYTHING + 1], 20)  # type: ignore[union-attr]
    sock.sendall(request(FrameKind.WRITE, [0, 1], b"x"))
    assert answer(sock)[0].status is FrameStatus.NOT_LENT and rig.memory[:8] == b"abcdefgh"


def test_who_never_finishes_its_write_is_cut_off_and_holds_no_loan(rig: Rig) -> None:
    sock = rig.dial()
    sock.sendall(request(FrameKind.WRITE, [0, 8], b"abcdefgh")[:-4])
    assert poll(lambda: rig.memory[:4] == b"abcd", 20)
    rig.server.cancel(JobId(EVERYTHING + 1))
    assert poll(lambda: [event.job for event in rig.server.drain()] == [EVERYTHING + 1], 20)  # type: ignore[union-attr]
    assert is_closed(sock) and rig.memory[4:8] == DATA[4:8]


BAD = [[-1, 8], [SIZE - 7, 8], [SIZE, 1], [0, SIZE + 1], [2**63 - 1, 8], [8, 2**63 - 1], [0, -8], [-(2**63), 8]]


@pytest.mark.parametrize("spans", BAD)
def test_a_read_outside_memory_costs_that_copy_only(rig: Rig, spans: list[int]) -> None:
    sock = rig.dial()
    head = request(FrameKind.READ, [0, 8, *spans])
    sock.sendall(Frame(FrameKind.READ, 7, 16, table_bytes=32).pack() + head[-32:])
    assert answer(sock) == (Frame(FrameKind.DATA, 7, status=FrameStatus.BAD_SPAN), b"")
    assert rig.serves(sock)


@pytest.mark.parametrize("spans", BAD)
def test_a_write_outside_memory_lands_nothing_and_costs_that_copy_only(rig: Rig, spans: list[int]) -> None:
    sock = rig.dial()
    sock.sendall(request(FrameKind.WRITE, [0, 8, *spans], b"x" * 300_000))
    assert answer(sock) == (Frame(FrameKind.DONE, 7, status=FrameStatus.BAD_SPAN), b"")
    assert rig.memory == DATA
    assert rig.serves(sock)


def test_an_unknown_region_costs_that_copy_only(rig: Rig) -> None:
    sock = rig.dial()
    for kind, payload in ((FrameKind.READ, b""), (FrameKind.WRITE, b"xxxxxxxx")):
        sock.sendall(request(kind, [0, 8], payload, region=5))
        assert answer(sock)[0].status is FrameStatus.BAD_SPAN
    assert rig.serves(sock) and rig.memory == DATA


def test_an_empty_request_is_answered(rig: Rig) -> None:
    sock = rig.dial()
    sock.sendall(request(FrameKind.READ, []) + request(FrameKind.WRITE, []))
    assert [answer(sock)[0].status for _ in range(2)] == [FrameStatus.OK, FrameStatus.OK]


@pytest.mark.parametrize(
    "bad",
    [
        bytes(28),
        b"\xff" * 1000,
        Frame(FrameKind.DATA, 1).pack(),
        Frame(FrameKind.READ, 1, 9, table_bytes=16).pack() + bytes(8) + (8).to_bytes(8, "little"),
        request(FrameKind.WRITE, [0, 8], b"123456789"),
        Frame(FrameKind.READ, 1, 8, table_bytes=8).pack(),
    ],
    ids=["zeros", "ones", "an answer", "wrong sum", "too much payload", "odd table"],
)
def test_a_malformed_stream_costs_that_connection_only(rig: Rig, bad: bytes) -> None:
    good, sock = rig.dial(stream=1), rig.dial(stream=0)
    sock.sendall(bad)
    assert is_closed(sock)
    assert rig.serves(good) and rig.serves(rig.dial()) and rig.memory == DATA


def test_requests_without_end_and_without_listening_cost_that_connection_only(rig: Rig) -> None:
    good, sock = rig.dial(stream=1), rig.dial(stream=0)
    with pytest.raises(ConnectionError):
        for _ in range(100 * WINDOW_MAX):
            sock.sendall(request(FrameKind.READ, [0, SIZE]))
    assert rig.serves(good)


def test_a_connection_that_dies_in_the_middle_costs_nobody_else(rig: Rig) -> None:
    good = rig.dial(stream=1)
    for cut in (10, 30, 60, 1000):
        sock = rig.dial()
        sock.sendall(request(FrameKind.WRITE, [0, 10_000], b"x" * 10_000)[:cut])
        sock.close()
    assert rig.serves(good)


def test_a_second_connection_of_a_stream_replaces_the_first(rig: Rig) -> None:
    first, second = rig.dial(), rig.dial()
    assert is_closed(first) and rig.serves(second)


def test_a_stream_beyond_the_bound_is_closed(rig: Rig) -> None:
    assert is_closed(rig.dial(stream=STREAMS_PER_PEER_MAX))
    assert rig.serves(rig.dial(stream=STREAMS_PER_PEER_MAX - 1))


def fence(rig: Rig) -> None:
    events: list[object] = []
    rig.server.fence(D)
    assert poll(lambda: events.extend(rig.server.drain()) or FenceEnded(D) in events, 20)


def test_a_fence_stops_a_write_in_the_middle_of_its_payload(rig: Rig) -> None:
    socks = [rig.dial(stream) for stream in range(3)]
    for index, sock in enumerate(socks):
        sock.sendall(request(FrameKind.WRITE, [index * 1000, 1000], b"x" * 1000)[:500])
    assert poll(lambda: rig.memory != DATA, 20)
    fence(rig)
    rig.memory[:] = DATA
    for sock in socks:
        with contextlib.suppress(ConnectionError):
            sock.sendall(b"x" * 600)
        assert is_closed(sock)
    assert rig.memory == DATA


def test_an_old_endpoint_is_worth_nothing_after_a_fence(rig: Rig) -> None:
    old = rig.server.endpoint(D)
    assert rig.server.endpoint(D) == old
    fence(rig)
    with pytest.raises(Exception, match="pair with it again"):
        rig.dial(endpoint=old)
    new = rig.server.endpoint(D)
    assert new != old and rig.serves(rig.dial(endpoint=new))


def test_a_disconnected_peer_cannot_read_any_more(rig: Rig) -> None:
    old, sock = rig.server.endpoint(D), rig.dial()
    assert rig.serves(sock)
    rig.server.disconnect(D)
    assert is_closed(sock)
    with pytest.raises(Exception, match="pair with it again"):
        rig.dial(endpoint=old)
