"""Sinks and sources of bytes on a socket: a small buffer, spans of memory, or nothing.

Law: a piece takes or gives exactly its `left` bytes, straight to or from a socket (`pull`, `push`) or by way of a
record (`land`, `fill`), and touches nothing else.
"""

from __future__ import annotations

import socket
from collections.abc import Generator
from typing import Protocol, TypeAlias

from kvbaton.transports.core.mover import Mover, Wait
from kvbaton.transports.core.transport import Spans

SCRATCH_BYTES = 256 << 10


class Sink(Protocol):
    """A sink of received bytes; `left` counts those still to come."""

    left: int

    def pull(self, sock: socket.socket, room: int, wait: Wait) -> int:
        """Receive at most `room` bytes; 0 at end of stream, BlockingIOError when there are none now."""

    def land(self, data: memoryview) -> int:
        """Take as many of these bytes as are still to come."""


class ByteSource(Protocol):
    """A source of bytes to send."""

    left: int

    def push(self, sock: socket.socket, room: int, wait: Wait) -> int:
        """Send at most `room` bytes; BlockingIOError when none can go now."""

    def fill(self, into: memoryview) -> int:
        """Copy as many of the next bytes as there are or there is room for."""


Script: TypeAlias = Generator[Sink, None, None]


class Take:
    """A small buffer."""

    __slots__ = ("data", "left")

    def __init__(self, size: int) -> None:
        self.data = bytearray(size)
        self.left = size

    def pull(self, sock: socket.socket, room: int, wait: Wait) -> int:
        moved = sock.recv_into(memoryview(self.data)[-self.left :])
        self.left -= moved
        return moved

    def land(self, data: memoryview) -> int:
        moved = min(self.left, len(data))
        at = len(self.data) - self.left
        self.data[at : at + moved] = data[:moved]
        self.left -= moved
        return moved


def take(size: int) -> Generator[Sink, None, bytes]:
    """The next `size` bytes, within a script."""
    sink = Take(size)
    if size:
        yield sink
    return bytes(sink.data)


class Skip:
    """Bytes that are no longer wanted."""

    __slots__ = ("_scratch", "left")

    def __init__(self, size: int) -> None:
        self.left = size
        self._scratch = memoryview(bytearray(min(size, SCRATCH_BYTES)))

    def pull(self, sock: socket.socket, room: int, wait: Wait) -> int:
        moved = sock.recv_into(self._scratch[: min(self.left, room)])
        self.left -= moved
        return moved

    def land(self, data: memoryview) -> int:
        moved = min(self.left, len(data))
        self.left -= moved
        return moved


class Bytes:
    """A message. `more`: something follows at once, so the kernel may wait for it."""

    __slots__ = ("_data", "_flags", "left")

    def __init__(self, data: bytes, more: bool = False) -> None:
        self._data = memoryview(data)
        self._flags = socket.MSG_MORE if more else 0
        self.left = len(data)

    def push(self, sock: socket.socket, room: int, wait: Wait) -> int:
        moved = sock.send(self._data[-self.left :], self._flags | socket.MSG_NOSIGNAL)
        self.left -= moved
        return moved

    def fill(self, into: memoryview) -> int:
        moved = min(self.left, len(into))
        at = len(self._data) - self.left
        into[:moved] = self._data[at : at + moved]
        self.left -= moved
        return moved


class ByteStrip:
    """Spans of one memory, as sink or as source."""

    __slots__ = ("_at", "_memory", "_mover", "_skip", "_spans", "_width", "left")

    def __init__(self, mover: Mover, memory: memoryview, spans: Spans, width: int, size: int) -> None:
        self._mover = mover
        self._memory = memory
        self._spans = spans
        self._width = width
        self._at = self._skip = 0
        self.left = size

    def pull(self, sock: socket.socket, room: int, wait: Wait) -> int:
        return self._stream(sock, room, False, wait)

    def push(self, sock: socket.socket, room: int, wait: Wait) -> int:
        return self._stream(sock, room, True, wait)

    def land(self, data: memoryview) -> int:
        return self._exchange(data, True)

    def fill(self, into: memoryview) -> int:
        return self._exchange(into, False)

    def _exchange(self, data: memoryview, landing: bool) -> int:
        """Between the spans and `data`, as far as both reach. The spans were range-checked, and slices cannot leave
        them."""
        room, moved, width = min(self.left, len(data)), 0, self._width
        while moved < room:
            start, size = self._spans[self._at * width], self._spans[self._at * width + width - 1]
            step = min(size - self._skip, room - moved)
            near = self._memory[start + self._skip : start + self._skip + step]
            if landing:
                near[:] = data[moved : moved + step]
            else:
                data[moved : moved + step] = near
            moved += step
            self._skip += step
            if self._skip == size:
                self._at, self._skip = self._at + 1, 0
        self.left -= moved
        return moved

    def _stream(self, sock: socket.socket, room: int, sending: bool, wait: Wait) -> int:
        self._at, self._skip, moved = self._mover.stream_spans(
            sock, self._memory, self._spans, self._width, self._at, self._skip, min(room, self.left), sending, wait
        )
        self.left -= moved
        return moved
