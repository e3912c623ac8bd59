"""One non-blocking stream socket on one loop: sends things in order, receives what its script asks for next.

A script is a generator that yields sinks: `frame = yield from take(28)` reads like blocking code and blocks nobody.
Law: bytes land only in the sink that is wanted now, and only on the loop's thread. So a sink that was replaced
(`divert`) or a wire that was closed, on that thread, receives nothing any more: that is what "at rest" means here.
"""

from __future__ import annotations

import contextlib
import errno
import inspect
import logging
import socket
from collections import deque
from collections.abc import Callable, Generator
from typing import Protocol, TypeAlias

from kvbaton.protocol.errors import ProtocolError
from kvbaton.transports.base import Spans
from kvbaton.transports.loop import IN, OUT, Loop
from kvbaton.transports.mover import Mover, Wait

log = logging.getLogger(__name__)

TURN_BYTES = 16 << 20
"""What one socket may move before others, and calls such as a cancel, get their turn: a few milliseconds."""

DOZE_BYTES = 256 << 10
"""A receiver is not woken for less, unless less is left: halves the wake-ups of a large copy."""

SCRATCH_BYTES = 256 << 10
_CLOSED_BY_PEER = {errno.ECONNRESET, errno.EPIPE}


class Sink(Protocol):
    """Where received bytes go; `left` counts those still to come."""

    left: int

    def pull(self, sock: socket.socket, room: int, wait: Wait) -> int:
        """Receive at most `room` bytes; 0 at end of stream, BlockingIOError when there are none now."""


class Source(Protocol):
    """Where sent bytes come from."""

    left: int

    def push(self, sock: socket.socket, room: int, wait: Wait) -> int:
        """Send at most `room` bytes; BlockingIOError when none can go now."""


Script: TypeAlias = Generator[Sink, None, None]


class Take:
    """A few bytes to look at."""

    __slots__ = ("data", "left")

    def __init__(self, size: int) -> None:
        self.data = bytearray(size)
        self.left = size

    def pull(self, sock: socket.socket, room: int, wait: Wait) -> int:
        moved = sock.recv_into(memoryview(self.data)[-self.left :])
        self.left -= moved
        return moved


def take(size: int) -> Generator[Sink, None, bytes]:
    """The next `size` bytes, within a script."""
    sink = Take(size)
    if size:
        yield sink
    return bytes(sink.data)


class Skip:
    """Bytes that nobody wants any more."""

    __slots__ = ("_scratch", "left")

    def __init__(self, size: int) -> None:
        self.left = size
        self._scratch = memoryview(bytearray(min(size, SCRATCH_BYTES)))

    def pull(self, sock: socket.socket, room: int, wait: Wait) -> int:
        moved = sock.recv_into(self._scratch[: min(self.left, room)])
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


class Strip:
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

    def _stream(self, sock: socket.socket, room: int, sending: bool, wait: Wait) -> int:
        self._at, self._skip, moved = self._mover.stream_spans(
            sock, self._memory, self._spans, self._width, self._at, self._skip, min(room, self.left), sending, wait
        )
        self.left -= moved
        return moved


class Wire:
    """A socket, its script, and what waits to be sent. All methods run on the loop's thread."""

    def __init__(self, loop: Loop, sock: socket.socket, on_close: Callable[[str, bool], None]) -> None:
        self.sock = sock
        self.out: deque[Source] = deque()
        self.closed = False
        self._loop = loop
        self._script = _to_the_end()
        self._want: Sink = Take(0)
        self._events = IN
        self._enough = 0  # bytes that wake us; not known yet, the socket may come from another wire
        self._on_close = on_close

    def open(self, script: Script) -> None:
        """Begin the script. The socket may still be connecting."""
        self._script = script
        self._loop.watch(self.sock.fileno(), self._events, self)
        self.ready(0)

    def divert(self, unwanted: Sink) -> None:
        """If `unwanted` is being received now, let the rest of it go nowhere."""
        if self._want is unwanted:
            self._want = Skip(unwanted.left)

    def flush(self) -> None:
        """Send what can be sent now, and watch for room if something is left."""
        room = TURN_BYTES
        try:
            while self.out and room > 0:
                room -= self.out[0].push(self.sock, room, self._loop.wait)
                if not self.out[0].left:
                    self.out.popleft()
                elif room > 0:
                    break
        except BlockingIOError:
            pass
        except OSError as error:
            self._broke(error)
        events = IN | OUT if self.out else IN
        if not self.closed and events != self._events:
            self._events = events
            self._loop.change(self.sock.fileno(), events)

    def detach(self) -> socket.socket:
        """Give the socket away, open; this wire is over."""
        self._over("passed on", False)
        return self.sock

    def close(self, detail: str, by_peer: bool = False) -> None:
        """Idempotent. `by_peer`: the other end closed it, so nothing that was sent can still be landing there."""
        if not self.closed:
            self._over(detail, by_peer)
            self.sock.close()

    def linger(self) -> None:
        """Send nothing more, take nothing in, and wait for the other end to close."""
        self.out.clear()
        self._script = _to_the_end()
        self._want = next(self._script)
        try:
            self.sock.shutdown(socket.SHUT_WR)
        except OSError as error:
            self._broke(error)
        self.flush()

    def ready(self, events: int) -> None:
        try:
            self._advance()
            if events & ~OUT:  # readable, or an error or hang-up that reading will name
                self._read()
            if not self.closed:
                self._doze()
                self.flush()
        except Exception as error:
            log.exception("a connection's script failed")
            self.close(f"internal error: {error!r}")

    def _read(self) -> None:
        room = TURN_BYTES
        try:
            while room > 0 and not self.closed:
                moved = self._want.pull(self.sock, room, self._loop.wait)
                if not moved:
                    self.close("the peer closed the connection", by_peer=True)
                    return
                room -= moved
                if self._want.left:
                    break  # all that had come is read, or our turn is over; epoll will say if there is more
                self._advance()
        except BlockingIOError:
            pass
        except OSError as error:
            self._broke(error)

    def _doze(self) -> None:
        enough = min(self._want.left, DOZE_BYTES)
        if enough != self._enough:
            self._enough = enough
            with contextlib.suppress(OSError):  # a hint
                self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, enough)

    def _advance(self) -> None:
        while not self._want.left and not self.closed:
            try:
                self._want = next(self._script)
            except StopIteration:
                self.close("done")
            except ProtocolError as error:
                self.close(error.detail)

    def _broke(self, error: OSError) -> None:
        number = error.errno
        if number == errno.ENOTCONN:  # by `shutdown`, of what the other end has reset; the cause has not been told yet
            number = self.sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        self.close(f"the connection broke: {error}", by_peer=number in _CLOSED_BY_PEER)

    def _over(self, detail: str, by_peer: bool) -> None:
        self.closed = True
        self._loop.unwatch(self.sock.fileno())
        self.out.clear()
        if inspect.getgeneratorstate(self._script) != inspect.GEN_RUNNING:  # else the script itself ends this
            self._script.close()
        self._on_close(detail, by_peer)


def _to_the_end() -> Script:
    while True:
        yield Skip(1 << 62)
