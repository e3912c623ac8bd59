"""Bytes land only in the sink that is wanted now, and a wire ends exactly once, saying by whose hand."""

from __future__ import annotations

import select
import socket
import threading
from array import array
from collections.abc import Callable, Iterator

import pytest

from kvbaton.protocol.errors import ProtocolError, Reason
from kvbaton.testing.transport_harness import poll
from kvbaton.transports.core.mover import choose_mover
from kvbaton.transports.net.socket_loop import SocketLoop
from kvbaton.transports.net.stream_socket import Bytes, ByteStrip, Script, Skip, Wire, take
from tests.transports.tcp.blocking import is_closed, tcp_pair


class Rig:
    """One wire on a loop; the test holds the other end."""

    def __init__(self) -> None:
        self.loop = SocketLoop("wire-test")
        near, self.far = socket.socketpair()
        near.setblocking(False)
        self.far.settimeout(20)
        self.closed: list[tuple[str, bool]] = []
        self.wire = Wire(self.loop, near, lambda detail, by_peer: self.closed.append((detail, by_peer)))

    def on_loop(self, action: Callable[[], None]) -> None:
        done = threading.Event()
        self.loop.call(action)
        self.loop.call(done.set)
        assert done.wait(20)


@pytest.fixture
def rig() -> Iterator[Rig]:
    rig = Rig()
    yield rig
    rig.loop.stop(5)
    rig.far.close()


def strip(memory: bytearray, *pairs: int) -> ByteStrip:
    return ByteStrip(choose_mover(), memoryview(memory), array("q", pairs), 2, sum(pairs[1::2]))


def test_a_script_reads_like_blocking_code(rig: Rig) -> None:
    memory, said = bytearray(8), []

    def script() -> Script:
        said.append((yield from take(5)))
        yield strip(memory, 4, 2, 0, 2)
        yield Skip(3)
        said.append((yield from take(0)))
        said.append((yield from take(2)))
        rig.wire.out.append(Bytes(b"thanks"))
        yield from take(1)

    rig.loop.call(lambda: rig.wire.open(script()))
    for piece in (b"he", b"lloab", b"cd---", b"o", b"k"):
        rig.far.sendall(piece)
    assert rig.far.recv(100) == b"thanks"
    assert said == [b"hello", b"", b"ok"] and memory == b"cd\0\0ab\0\0"


def test_much_is_sent_in_order_while_the_other_end_is_slow(rig: Rig) -> None:
    memory = bytearray(b"0123456789abcdef" * (1 << 16))
    rig.wire.out.extend((Bytes(b"head"), strip(memory, 0, 1 << 20), Bytes(b"tail")))
    rig.loop.call(lambda: rig.wire.open(take_forever()))
    got = b""
    while len(got) < 8 + len(memory):
        got += rig.far.recv(10_000)
    assert got == b"head" + memory + b"tail"
    assert poll(lambda: not rig.wire.out, 20)


def take_forever() -> Script:
    while True:
        yield from take(1)


def test_what_was_diverted_lands_nowhere_and_the_script_goes_on(rig: Rig) -> None:
    memory, said = bytearray(8), []
    sink = strip(memory, 0, 8)

    def script() -> Script:
        yield sink
        said.append((yield from take(2)))
        yield from take(1)

    rig.loop.call(lambda: rig.wire.open(script()))
    rig.far.sendall(b"abc")
    rig.on_loop(lambda: None)
    assert poll(lambda: sink.left == 5, 20)
    rig.on_loop(lambda: rig.wire.divert(sink))
    rig.far.sendall(b"defghok")
    assert poll(lambda: bool(said), 20)
    assert memory == b"abc\0\0\0\0\0" and said == [b"ok"]
    rig.on_loop(lambda: rig.wire.divert(sink))  # not wanted any more: nothing to divert
    assert not rig.closed


def test_a_peer_that_closes_is_named_as_the_one(rig: Rig) -> None:
    rig.loop.call(lambda: rig.wire.open(take_forever()))
    rig.far.close()
    assert poll(lambda: bool(rig.closed), 20)
    assert rig.closed == [("the peer closed the connection", True)]
    rig.on_loop(lambda: rig.wire.close("again"))
    assert len(rig.closed) == 1


def test_closing_here_is_not_the_peers_doing(rig: Rig) -> None:
    rig.loop.call(lambda: rig.wire.open(take_forever()))
    rig.on_loop(lambda: rig.wire.close("enough"))
    assert rig.closed == [("enough", False)] and is_closed(rig.far)


@pytest.mark.parametrize("error", [ProtocolError(Reason.BAD_MESSAGE, "bad words"), RuntimeError("bad words")])
def test_a_script_that_fails_costs_its_connection_only(rig: Rig, error: Exception) -> None:
    def script() -> Script:
        yield from take(1)
        raise error

    rig.loop.call(lambda: rig.wire.open(script()))
    rig.far.sendall(b"x")
    assert is_closed(rig.far)
    assert poll(lambda: bool(rig.closed), 20)
    assert "bad words" in rig.closed[0][0] and not rig.closed[0][1]
    rig.on_loop(lambda: None)


def test_a_script_that_is_done_closes_and_cleans_up(rig: Rig) -> None:
    cleaned: list[int] = []

    def script() -> Script:
        try:
            yield from take(1)
        finally:
            cleaned.append(1)

    rig.loop.call(lambda: rig.wire.open(script()))
    rig.on_loop(lambda: rig.wire.close("enough"))
    assert cleaned == [1]


def test_a_lingering_wire_sends_and_lands_nothing_and_waits_for_the_end(rig: Rig) -> None:
    memory = bytearray(8)

    def script() -> Script:
        yield strip(memory, 0, 8)

    rig.loop.call(lambda: rig.wire.open(script()))
    rig.on_loop(rig.wire.linger)
    assert rig.far.recv(10) == b""  # half closed
    rig.far.sendall(b"x" * 100)
    rig.on_loop(lambda: None)
    assert not rig.closed
    rig.far.close()
    assert poll(lambda: bool(rig.closed), 20)
    assert rig.closed[0][1] and memory == bytes(8)


def test_a_wire_that_was_reset_before_it_lingers_was_closed_by_the_peer() -> None:
    near, far = tcp_pair()
    near.setblocking(False)
    loop, done = SocketLoop("wire-test"), threading.Event()
    closed: list[bool] = []
    wire = Wire(loop, near, lambda _detail, by_peer: closed.append(by_peer))

    def reset_and_linger() -> None:  # in one turn, so that nobody reads the error first
        far.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
        far.close()
        dead = select.poll()
        dead.register(near, 0)
        assert dead.poll(20_000)
        wire.linger()
        done.set()

    loop.call(lambda: wire.open(take_forever()))
    loop.call(reset_and_linger)
    assert done.wait(20)
    loop.stop(5)
    assert closed == [True]


def test_a_detached_socket_lives_on(rig: Rig) -> None:
    given: list[socket.socket] = []

    def script() -> Script:
        yield from take(1)
        given.append(rig.wire.detach())

    rig.loop.call(lambda: rig.wire.open(script()))
    rig.far.sendall(b"x")
    assert poll(lambda: bool(given), 20)
    given[0].send(b"still here")
    assert rig.far.recv(100) == b"still here"
    given[0].close()
