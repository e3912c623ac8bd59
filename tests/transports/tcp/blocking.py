"""Speaks the protocols of these transports over a blocking socket, rightly or wrongly, to test the other end."""

from __future__ import annotations

import socket
from array import array
from collections import deque
from collections.abc import Callable, Generator
from typing import TypeVar, cast

import msgspec

from kvbaton.protocol.ids import Incarnation, PeerId, WorkerId
from kvbaton.transports.core.jobs import to_wire
from kvbaton.transports.core.mover import NO_WAIT
from kvbaton.transports.net.connection_handshake import greet
from kvbaton.transports.net.stream_socket import FRAME_BYTES, ByteSource, Frame, FrameKind, Sink, Wire, parse
from kvbaton.transports.tcp.tcp_transport import TcpEndpoint

DEADLINE_S = 20.0
P, D = PeerId(WorkerId("p"), Incarnation(1)), PeerId(WorkerId("d"), Incarnation(2))
Result = TypeVar("Result")


class Outbox:
    """As much of a `Wire` as a script needs."""

    def __init__(self) -> None:
        self.out: deque[ByteSource] = deque()


def tcp_pair() -> tuple[socket.socket, socket.socket]:
    """Two ends of a connection over loopback, which can be reset."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        near = socket.create_connection(listener.getsockname(), DEADLINE_S)
        return near, listener.accept()[0]


def play(sock: socket.socket, script: Callable[[Wire], Generator[Sink, None, Result]]) -> Result:
    """Run a script to its end; ConnectionError when the other end closes."""
    box = Outbox()
    steps = script(cast(Wire, box))
    try:
        while True:
            want = next(steps)
            flush(sock, box)
            while want.left:
                if not want.pull(sock, want.left, NO_WAIT):
                    raise ConnectionResetError("closed by the other end")
    except StopIteration as stop:
        flush(sock, box)
        return cast(Result, stop.value)


def flush(sock: socket.socket, box: Outbox) -> None:
    while box.out:
        box.out[0].push(sock, 1 << 30, NO_WAIT)
        if not box.out[0].left:
            box.out.popleft()


def tcp_dial(endpoint: bytes, me: PeerId, stream: int = 0, secret: bytes | None = None) -> socket.socket:
    """A connection that has proven itself (if the secret is right) and has asked for nothing."""
    there = msgspec.msgpack.decode(endpoint, type=TcpEndpoint)
    sock = socket.create_connection((there.host, there.port), timeout=DEADLINE_S)
    play(sock, lambda wire: greet(wire, secret or there.secret, me, there.owner, stream))
    return sock


def request(kind: FrameKind, spans: list[int], payload: bytes = b"", region: int = 0, tag: int = 7) -> bytes:
    """A request of (remote offset, bytes) pairs; a READ declares the payload it expects, a WRITE carries it."""
    triples = array("q", [number for at in range(0, len(spans), 2) for number in (0, spans[at], spans[at + 1])])
    table = to_wire(triples)
    size = len(payload) if kind is FrameKind.WRITE else sum(spans[1::2])
    head = Frame(kind, tag, max(0, size) % (1 << 63), region=region, table_bytes=len(table)).pack()
    return head + table + payload


def answer(sock: socket.socket) -> tuple[Frame, bytes]:
    frame = parse(exactly(sock, FRAME_BYTES), FrameKind.DATA, FrameKind.DONE)
    return frame, exactly(sock, frame.payload_bytes)


def exactly(sock: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        more = sock.recv(size - len(data))
        if not more:
            raise ConnectionResetError("closed by the other end")
        data += more
    return data


def is_closed(sock: socket.socket) -> bool:
    """Whether the other end closes it within the deadline."""
    sock.settimeout(DEADLINE_S)
    try:
        while sock.recv(1 << 16):
            pass
    except ConnectionError:
        pass
    except TimeoutError:
        return False
    return True
