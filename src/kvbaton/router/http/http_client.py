"""HTTP/1.1 to workers: pooled connections, each carrying one exchange at a time, parsed by httptools.

Laws: an exchange ends once, as an answer that came whole or as a `WireError` that says how far it got. One that is left
early closes its connection, which is what aborts the request in the worker; only a connection whose answer was read to
its end is used again. Idle connections are few, and let go before a worker's own keep-alive (vLLM: 5 s) runs out. What
a worker says is counted by the tab of whoever asked, and free when the connection ends, without the garbage collector.

A client library of general use costs more than everything else this router does (docs/decisions/0007).
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import functools
import re
import ssl
from collections.abc import Sequence
from typing import Any, cast

import httptools
import msgspec

from kvbaton.router.client_quotas import Tab, connections_max, descriptors

IDLE_S = 4.0
IDLE_MAX = 1024
"""Idle connections to one worker; more are closed."""
HEADERS_BYTES_MAX = 64 << 10
PIECES_MAX = 1 << 16
"""Of a whole answer: each costs more than its bytes."""
UNREAD_BYTES_MAX = 256 << 10
"""A stream that is read slower than it comes is stopped here until it is read."""

BYTES_FREE = 16 << 10
"""Of an exchange: not counted."""
PIECE_BYTES = 64
"""What a piece of a body costs besides its bytes."""
HEADERS_MAX = 256
"""Of an answer."""

Header = tuple[bytes, bytes]


class WireError(Exception):
    """An exchange that did not come to its end."""


class UnreachableError(WireError):
    """There is no connection: nothing was sent."""


class StaleError(WireError):
    """A connection that had been idle was closed by the worker as the request went out: no fault of anybody."""


class BrokenError(WireError):
    """The worker closed the connection in the middle of an exchange."""


class LateError(WireError):
    """The time that was given to the exchange has passed."""


class GarbageError(WireError):
    """What came is not HTTP, or more of it than is allowed."""


class NoRoomError(WireError):
    """The router has no memory or no descriptor left for it: no fault of the worker's, unless its answer is huge."""

    def __init__(self, message: str, answered_bytes: int = 0) -> None:
        super().__init__(message)
        self.answered_bytes = answered_bytes


class Origin(msgspec.Struct, frozen=True):
    """Where a worker listens, and what stands before every path there."""

    host: str
    port: int
    tls: bool
    authority: str
    prefix: str


@functools.lru_cache(maxsize=4096)
def origin(url: str) -> Origin:
    """`http://host:port[/prefix]` as a place to connect to; ValueError names what is wrong."""
    found = _URL.fullmatch(url)
    tls = found is not None and found["scheme"].lower() == "https"
    port = int(found["port"] or (443 if tls else 80)) if found is not None else 0
    if found is None or not 0 < port < 1 << 16:
        raise ValueError(f"url: got {url[:100]!r}, expected http://host:port")
    return Origin(found["host"].strip("[]").lower(), port, tls, found["authority"], (found["path"] or "").rstrip("/"))


_URL = re.compile(
    r"(?P<scheme>https?)://"
    r"(?P<authority>(?P<host>\[[0-9a-f:.]+\]|[a-z0-9._-]+)(:(?P<port>[0-9]{1,5}))?)"
    r"(?P<path>/[!\"$->@-~]*)?",
    re.IGNORECASE | re.ASCII,
)


STALE_S = 1.0
"""The close of an idle connection that crossed a request is known within this; later it is the worker that went."""


class Exchange(asyncio.Protocol):
    """One connection, and the answer that is on its way over it. Callbacks of asyncio and of the parser are below."""

    def __init__(self, pool: Pool, place: Origin) -> None:
        self.status = 0
        self.headers: list[Header] = []
        self.idle_since = 0.0
        self._pool = pool
        self._place = place
        self._transport: asyncio.Transport = cast(asyncio.Transport, None)  # from connection_made on
        self._parser: Any = None
        self._waiter: asyncio.Future[None] | None = None
        self._served = 0  # answers that came whole over this connection
        self._sent_at = 0.0
        self._timer: asyncio.TimerHandle | None = None
        self._tab: Tab | None = None
        self._begin()

    def _begin(self) -> None:
        self.status = 0
        self.headers = []
        self._parser = httptools.HttpResponseParser(self)
        self._pieces: list[bytes] = []
        self._unread = 0
        self._taken = 0  # bytes of what was read last, which is somewhere until more is read
        self._frame_bytes = 0  # of headers, chunk lines and trailers since the last piece of a body
        self._limit: int | None = None
        self._framed = False
        self._heard = self._has_head = self._complete = self._keeps = self._paused = False
        self._error: WireError | None = None
        self._wakes_on_data = False

    # --- the router's side

    def send(self, data: bytes) -> None:
        self._sent_at = self._pool.loop.time()
        if self._served:  # what a new connection says before it is asked ("full, go away") is its answer
            self._begin()
        if not self._transport.is_closing():
            self._transport.write(data)

    def count_by(self, tab: Tab | None) -> None:
        """Have what is held here counted until it is closed."""
        self._tab = tab

    def expire_in(self, timeout_s: float) -> None:
        """Fail with `LateError` unless closed, or told otherwise, before."""
        self._timer = self._pool.loop.call_later(timeout_s, self._late)

    def take_your_time(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _late(self) -> None:
        self._timer = None
        self._fail(LateError("late"))

    async def head(self) -> None:
        """Wait until status and headers are there."""
        while not self._has_head:
            await self._news(on_data=True)

    async def whole(self, limit: int) -> bytes:
        """All of the answer's body; `GarbageError` beyond `limit` bytes."""
        self._limit = limit
        self._resume()
        while not self._complete and self._unread <= limit:
            await self._news(on_data=False)
        if self._unread > limit:
            raise GarbageError(f"answered more than {limit} bytes")
        return self._take()

    async def read(self) -> bytes:
        """The next bytes of the body; b"" at its end. What was read before is taken to be gone."""
        self._taken = 0
        while not self._pieces and not self._complete:
            await self._news(on_data=True)
        data = self._take()
        self._taken = len(data)
        return data

    def close(self) -> None:
        """Let the connection go: to the pool if its answer was read whole, else for good. Once for each exchange."""
        self.take_your_time()
        if self._tab is not None:
            self._tab.close()
            self._tab = None
        whole = self._complete and self._keeps and not self._pieces
        if whole and not self._transport.get_write_buffer_size():  # an answer may come before its request is sent
            self._served += 1
            self._pool.put_back(self._place, self)
        else:
            self.abort()
            self._pieces.clear()

    def abort(self) -> None:
        if self._error is None and not self._complete:  # else it would pass for the worker's own close
            self._error = BrokenError("broken off by the router")
        if not self._transport.is_closing():
            self._transport.abort()

    @property
    def usable(self) -> bool:
        return self._keeps and not self._transport.is_closing()

    def _take(self) -> bytes:
        data = self._pieces[0] if len(self._pieces) == 1 else b"".join(self._pieces)
        self._pieces.clear()
        self._unread = 0
        self._resume()
        return data

    def _resume(self) -> None:
        if self._paused:
            self._paused = False
            self._transport.resume_reading()

    async def _news(self, on_data: bool) -> None:
        if self._error is not None:
            raise self._error
        self._wakes_on_data = on_data
        self._waiter = self._pool.loop.create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None
        if self._error is not None and not self._complete and not self._pieces:
            raise self._error

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def _fail(self, error: WireError) -> None:
        if self._error is None and not self._complete:
            self._error = error
        self._wake()
        self.abort()

    # --- asyncio's callbacks

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._pool.connections += 1

    def data_received(self, data: bytes) -> None:
        if self._complete or self._error is not None:  # nobody asked for more
            self.abort()
            return
        self._heard = True
        self._frame_bytes += len(data)
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            cause = error.__context__  # what a callback below has raised
            what = f"answered something that is not HTTP ({error})"
            self._fail(cause if isinstance(cause, WireError) else GarbageError(what))
            return
        if self._frame_bytes > HEADERS_BYTES_MAX and not self._complete:
            self._fail(_too_many_headers())
        elif self._complete or (self._wakes_on_data and (self._pieces or self._has_head)):
            self._wake()

    def connection_lost(self, exc: Exception | None) -> None:
        self._pool.connections -= 1
        self._parser = None
        if not self._complete and self._error is None:
            if self._has_head and not self._framed and exc is None:
                self._complete = True  # an answer without a length ends with its connection
            elif not self._heard and self._served and self._pool.loop.time() - self._sent_at < STALE_S:
                self._error = StaleError("closed an idle connection")
            else:
                self._error = BrokenError(type(exc).__name__ if exc is not None else "connection closed")
        self._keeps = False
        self._wake()

    # --- the parser's callbacks; what they raise stops it

    def on_message_begin(self) -> None:
        if self._complete:
            raise GarbageError("answered twice")

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._has_head:  # a trailer
            return
        name = name.lower()
        if name == b"content-length" or (name == b"transfer-encoding" and b"chunked" in value.lower()):
            self._framed = True
        self.headers.append((name, value))
        if len(self.headers) > HEADERS_MAX:
            raise _too_many_headers()

    def on_headers_complete(self) -> None:
        self.status = self._parser.get_status_code()
        if self._frame_bytes > HEADERS_BYTES_MAX and _size(self.headers) > HEADERS_BYTES_MAX:  # the rest may be body
            raise _too_many_headers()
        if self.status < 200:
            if self.status < 100 or self.status == 101:
                raise GarbageError(f"answered with status {self.status}, which nobody asked for")
            return
        self._has_head = True
        if self.status in (204, 304):
            self._framed = True

    def on_body(self, data: bytes) -> None:
        self._pieces.append(data)
        self._unread += len(data)
        self._frame_bytes = 0
        held = self._unread + self._taken + PIECE_BYTES * len(self._pieces)
        if held > BYTES_FREE and self._tab is not None and not self._tab.hold(held):
            raise NoRoomError(f"answered {self._unread} bytes, for which the router has no room", self._unread)
        if self._limit is not None:
            if self._unread > self._limit:
                raise GarbageError(f"answered more than {self._limit} bytes")
            if len(self._pieces) > PIECES_MAX:
                raise GarbageError(f"answered in more than {PIECES_MAX} pieces")
        elif held > UNREAD_BYTES_MAX and not self._paused:
            self._paused = True
            self._transport.pause_reading()

    def on_message_complete(self) -> None:
        if self.status < 200:  # 100 Continue and the like: the answer is still to come
            self.headers.clear()
            self._framed = False
            return
        self._complete = True
        self._keeps = self._parser.should_keep_alive()


class Pool:
    """Connections to workers. One per event loop."""

    def __init__(self, connect_s: float) -> None:
        self.loop = asyncio.get_running_loop()
        self._connect_s = connect_s
        self._idle: dict[Origin, list[Exchange]] = {}
        self._tls: ssl.SSLContext | None = None
        self._sweeping: asyncio.TimerHandle | None = None
        self._closed = False
        self.connections = 0
        self._connecting = 0
        self._connections_max = descriptors() - connections_max()

    async def exchange(self, place: Origin, data: bytes) -> Exchange:
        """Send a whole request; the caller awaits its answer and closes the exchange, whatever happens."""
        found = self._reuse(place) or await self._connect(place)
        found.send(data)
        return found

    def put_back(self, place: Origin, exchange: Exchange) -> None:
        idle = self._idle.get(place, [])
        if self._closed or len(idle) >= IDLE_MAX or not exchange.usable:
            exchange.abort()
            return
        self._idle[place] = idle
        exchange.idle_since = self.loop.time()
        idle.append(exchange)
        if self._sweeping is None:
            self._sweeping = self.loop.call_later(IDLE_S, self._sweep)

    def close(self) -> None:
        self._closed = True
        if self._sweeping is not None:
            self._sweeping.cancel()
        for idle in self._idle.values():
            for exchange in idle:
                exchange.abort()
        self._idle.clear()

    @property
    def idle(self) -> int:
        return sum(map(len, self._idle.values()))

    def _reuse(self, place: Origin) -> Exchange | None:
        idle = self._idle.get(place)
        oldest = self.loop.time() - IDLE_S
        while idle:
            found = idle.pop()
            if found.usable and found.idle_since > oldest:
                found.idle_since = 0.0
                return found
            found.abort()
        return None

    def _make_room(self) -> None:
        """One idle connection goes for a new one, where there may be no more."""
        if self.connections + self._connecting < self._connections_max:
            return
        for place, idle in self._idle.items():
            idle.pop(0).abort()
            if not idle:
                del self._idle[place]
            return
        raise NoRoomError(f"the router has {self.connections} connections to workers, and no descriptor for another")

    async def _connect(self, place: Origin) -> Exchange:
        self._make_room()
        self._connecting += 1
        try:
            return await self._connected(place)
        finally:
            self._connecting -= 1

    async def _connected(self, place: Origin) -> Exchange:
        tls = self._context() if place.tls else None
        try:
            async with asyncio.timeout(self._connect_s):
                _, made = await self.loop.create_connection(
                    lambda: Exchange(self, place), place.host, place.port, ssl=tls
                )
        except TimeoutError:
            raise UnreachableError(f"no connection within {self._connect_s} s") from None
        except OSError as error:  # TLS's are among them
            if error.errno in (errno.EMFILE, errno.ENFILE):
                raise NoRoomError("the router has no descriptor left") from None
            raise UnreachableError(error.strerror or str(error) or type(error).__name__) from None
        except UnicodeError:  # a name with an empty or a long label
            raise UnreachableError(f"{place.host[:80]} is no host name") from None
        return made

    def _context(self) -> ssl.SSLContext:
        self._tls = self._tls or ssl.create_default_context()
        return self._tls

    def _sweep(self) -> None:
        self._sweeping = None
        oldest = self.loop.time() - IDLE_S
        for place, idle in list(self._idle.items()):
            kept = []
            for exchange in idle:
                if exchange.usable and exchange.idle_since > oldest:
                    kept.append(exchange)
                else:
                    exchange.abort()
            if kept:
                self._idle[place] = kept
            else:
                del self._idle[place]
        if self._idle:
            self._sweeping = self.loop.call_later(IDLE_S, self._sweep)


def _size(headers: Sequence[Header]) -> int:
    return sum(len(name) + len(value) + 4 for name, value in headers)


def _too_many_headers() -> GarbageError:
    return GarbageError(f"answered headers of more than {HEADERS_BYTES_MAX} bytes")


def request_bytes(method: str, place: Origin, path: str, headers: Sequence[Header], body: bytes | None) -> bytes:
    """A request as it goes out. The caller vouches for the headers: they came through a parser."""
    lines = [f"{method} {place.prefix}{path} HTTP/1.1\r\nHost: {place.authority}\r\n".encode()]
    lines += [b"%b: %b\r\n" % header for header in headers]
    if body is None:
        lines.append(b"\r\n")
    else:
        lines.append(b"Content-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(body))
        lines.append(body)
    return b"".join(lines)


def header(headers: Sequence[Header], name: bytes) -> str | None:
    """A header's value; `name` in lower case."""
    for known, value in headers:
        if known == name:
            with contextlib.suppress(UnicodeDecodeError):
                return value.decode().strip()
    return None
