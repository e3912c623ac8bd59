"""One thread that waits for sockets, deadlines and calls from other threads, and what moves bytes on them.

Law: watched descriptors are touched by this thread only, and no callback blocks (`wait` is the one exception: a few
milliseconds, ended as soon as anything else is due). So once a call made here has run, whatever it closed is closed:
nothing else could have been using it. When idle the thread sleeps in the kernel.

Sinks and sources of bytes on a socket: a small buffer, spans of memory, or nothing. Law: a piece takes or gives exactly
its `left` bytes, straight to or from a socket (`pull`, `push`) or by way of a record (`land`, `fill`), and touches
nothing else.
"""

from __future__ import annotations

import contextlib
import heapq
import itertools
import logging
import os
import select
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Generator
from functools import partial
from typing import Protocol, TypeAlias

from kvbaton.transports.core.mover import Mover, Wait
from kvbaton.transports.core.transport import Spans

log = logging.getLogger(__name__)

EVENTS_MAX = 64
WAIT_MS = 5
"""A large copy that may wait for more bytes in C takes a quarter of the turns, each of which costs 50 us of Python."""

IN, OUT = select.EPOLLIN, select.EPOLLOUT


class Watcher(Protocol):
    """The owner of a watched descriptor."""

    def ready(self, events: int) -> None:
        """The descriptor can be read, written, or has failed. Called on the loop's thread; never blocks."""

    def close(self, detail: str) -> None:
        """The loop is ending: unwatch and close the descriptor."""


class Timer:
    """A deadline on a loop; `cancel` it from the loop's own thread."""

    __slots__ = ("action", "at")

    def __init__(self, at: float, action: Callable[[], None]) -> None:
        self.at = at
        self.action: Callable[[], None] | None = action

    def cancel(self) -> None:
        self.action = None


class SocketLoop:
    """Runs callbacks one at a time on its own daemon thread, which the first call starts."""

    def __init__(self, name: str) -> None:
        self._epoll = select.epoll()
        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._epoll.register(self._wake_fd, IN)
        self._watched: dict[int, Watcher] = {}
        self._calls: deque[Callable[[], None]] = deque()
        self._timers: list[tuple[float, int, Timer]] = []
        self._order = itertools.count()
        self._stopping = False
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def call(self, action: Callable[[], None]) -> bool:
        """Run `action` on the loop's thread, soon. From any thread; False after `stop`, and then it never runs."""
        with self._lock:  # otherwise the descriptor could be closed and reused between check and write
            if self._stopping:
                return False
            self._calls.append(action)
            os.eventfd_write(self._wake_fd, 1)
            if self._thread.ident is None:
                self._thread.start()
            return True

    @property
    def wait(self) -> Wait:
        """How long a callback may wait for its own socket, unless this descriptor says that others are due."""
        return (self._epoll.fileno(), 0 if self._calls or self._stopping else WAIT_MS)

    def later(self, delay_s: float, action: Callable[[], None]) -> Timer:
        """Run `action` after `delay_s`. From the loop's own thread."""
        timer = Timer(time.monotonic() + delay_s, action)
        heapq.heappush(self._timers, (timer.at, next(self._order), timer))
        return timer

    def call_later(self, delay_s: float, action: Callable[[], None]) -> None:
        """The same from any thread; it cannot be cancelled, and after `stop` it never runs."""
        self.call(partial(self._start_timer, delay_s, action))

    def watch(self, fd: int, events: int, watcher: Watcher) -> None:
        self._watched[fd] = watcher
        self._epoll.register(fd, events)

    def change(self, fd: int, events: int) -> None:
        self._epoll.modify(fd, events)

    def unwatch(self, fd: int) -> None:
        if self._watched.pop(fd, None) is not None:
            with contextlib.suppress(OSError):
                self._epoll.unregister(fd)

    def stop(self, join_s: float) -> bool:
        """Close everything that is watched and end the thread; False if that is not done after `join_s`. Idempotent."""
        with self._lock:
            first, self._stopping = not self._stopping, True
            if first:
                os.eventfd_write(self._wake_fd, 1)
        if self._thread.ident is None:
            if first:
                self._release()
            return True
        if threading.current_thread() is self._thread:
            return False  # not before the caller returns
        self._thread.join(join_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        while not self._stopping:
            for fd, events in self._epoll.poll(self._timeout(), EVENTS_MAX):
                self._tell(fd, events)
            self._run_timers()
            self._run_calls()
        self._run_calls()
        for watcher in list(self._watched.values()):
            self._guard(watcher.close, "closing")
        self._release()

    def _tell(self, fd: int, events: int) -> None:
        """A separate method: a sleeping loop must not keep references to its last owner, and the memory behind it."""
        if fd == self._wake_fd:
            os.eventfd_read(fd)
        elif (watcher := self._watched.get(fd)) is not None:
            self._guard(watcher.ready, events)

    def _run_timers(self) -> None:
        while self._timers and self._timers[0][0] <= time.monotonic():
            action = heapq.heappop(self._timers)[2].action
            if action is not None:
                self._guard(action)

    def _run_calls(self) -> None:
        for _ in range(len(self._calls)):  # only those queued now: further ones wait for the sockets
            self._guard(self._calls.popleft())

    def _start_timer(self, delay_s: float, action: Callable[[], None]) -> None:
        self.later(delay_s, action)

    def _timeout(self) -> float | None:
        if self._calls:
            return 0
        while self._timers and self._timers[0][2].action is None:
            heapq.heappop(self._timers)
        return max(0.0, self._timers[0][0] - time.monotonic()) if self._timers else None

    def _guard(self, callback: Callable[..., None], *args: object) -> None:
        try:
            callback(*args)
        except Exception:
            log.exception("[mover-fault] a callback failed on %s", self._thread.name)

    def _release(self) -> None:
        with self._lock:  # a concurrent waker has finished, or sees that we are stopping
            self._epoll.close()
            os.close(self._wake_fd)


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
