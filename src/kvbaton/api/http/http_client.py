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
import math
import re
import ssl
from collections.abc import Callable, Sequence
from typing import Any, cast

import msgspec

from kvbaton.api.http.answer_reader import AnswerReader
from kvbaton.api.http.client_quotas import Tab, connections_max, descriptors
from kvbaton.api.http.http_types import (
    BrokenError,
    GarbageError,
    Header,
    LateError,
    NoRoomError,
    StaleError,
    UnreachableError,
    WireError,
)

IDLE_S = 4.0
IDLE_MAX = 1024
"""Idle connections to one worker; more are closed."""


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


PutOff = Callable[[], float]
NEVER_DUE: tuple[float, PutOff | None] = (math.inf, None)


class Exchange(asyncio.Protocol):
    """One connection, and the answer that is on its way over it. Callbacks of asyncio are below."""

    def __init__(self, pool: Pool, place: Origin) -> None:
        self.idle_since = 0.0
        self._pool = pool
        self._place = place
        self._transport: asyncio.Transport = cast(asyncio.Transport, None)  # from connection_made on
        self._answer = AnswerReader()
        self._error: WireError | None = None
        self._paused = False
        self._waiter: asyncio.Future[None] | None = None
        self._wakes_on_data = False
        self._served = 0  # answers that came whole over this connection
        self._sent_at = 0.0
        self._due: tuple[float, PutOff | None] = NEVER_DUE  # when the answer is late
        self._timer: asyncio.TimerHandle | None = None
        self._looks_at = math.inf  # when the timer runs out; uvloop's may not say

    # --- the router's side

    @property
    def status(self) -> int:
        return self._answer.status

    @property
    def headers(self) -> list[Header]:
        return self._answer.headers

    def send(self, data: bytes) -> None:
        self._sent_at = self._pool.loop.time()
        if self._served:  # what a new connection says before it is asked ("full, go away") is its answer
            self._answer.begin()
            self._error = None
            self._paused = self._wakes_on_data = False
        if not self._transport.is_closing():
            self._transport.write(data)

    def count_by(self, tab: Tab | None) -> None:
        """Have what is held here counted until it is closed."""
        self._answer.body.tab = tab

    def expire_in(self, timeout_s: float) -> None:
        """Fail with `LateError` unless closed, or told another time, before."""
        # A timer is left running when its exchange has ended, and looks again: under load an exchange costs none.
        self.wait_until(self._pool.loop.time() + timeout_s)

    def wait_until(self, when: float, put_off: PutOff | None = None) -> None:
        """The same by a time. `put_off` is asked when it has come: until when to wait on, 0.0 for no longer."""
        self._due = when, put_off
        if self._looks_at > when:
            self._look_when_due()

    def _look_when_due(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._looks_at = self._due[0]
        self._timer = self._pool.loop.call_at(self._looks_at, self._look)

    def _look(self) -> None:
        self._timer, self._looks_at = None, math.inf
        (due, put_off), now = self._due, self._pool.loop.time()
        if due <= now and put_off is not None:
            due = put_off() or due
            self._due = due, put_off
        if due <= now:
            self._fail(LateError("late"))
        elif due < math.inf:
            self._look_when_due()

    async def head(self) -> None:
        """Wait until status and headers are there."""
        while not self._answer.has_head:
            await self._news(on_data=True)

    async def whole(self, limit: int) -> bytes:
        """All of the answer's body; `GarbageError` beyond `limit` bytes."""
        answer, body = self._answer, self._answer.body
        body.want_whole(limit)
        self._resume()
        while not answer.complete and body.unread <= limit:
            await self._news(on_data=False)
        if body.unread > limit:
            raise GarbageError(f"answered more than {limit} bytes")
        return body.take()

    async def read(self) -> bytes:
        """The next bytes of the body, a bounded number; b"" at its end. What was read before is taken to be gone."""
        answer, body = self._answer, self._answer.body
        body.taken = 0
        if body.pieces:  # a worker that sends faster than it is read keeps the loop from nobody
            await asyncio.sleep(0)
        while not body.pieces and not answer.complete:
            await self._news(on_data=True)
        data = body.take_some()
        body.taken = len(data)
        if self._paused and not body.is_full:
            self._resume()
        return data

    def close(self) -> None:
        """Let the connection go: to the pool if its answer was read whole, else for good. Once for each exchange."""
        self._due = NEVER_DUE
        answer = self._answer
        answer.body.uncount()
        whole = answer.complete and answer.keeps and not answer.body.pieces
        # An answer may come before its request has left; what is still unsent would then begin the next request.
        if whole and not self._transport.get_write_buffer_size():
            self._served += 1
            self._pool.put_back(self._place, self)
        else:
            self.abort()
            answer.body.pieces.clear()

    def check_far(self) -> None:
        """Before anything is sent: a router asks itself nothing."""
        near, far = (self._transport.get_extra_info(name) for name in ("sockname", "peername"))
        if near and far and self._pool.is_own(near, far):
            self.abort()
            raise UnreachableError("its address is this router's own")

    def abort(self) -> None:
        if self._error is None and not self._answer.complete:  # else it would pass for the worker's own close
            self._error = BrokenError("aborted by the router")
        if not self._transport.is_closing():
            self._transport.abort()

    @property
    def usable(self) -> bool:
        return self._answer.keeps and not self._transport.is_closing()

    def _resume(self) -> None:
        if self._paused:
            self._paused = False
            self._transport.resume_reading()

    def _news(self, on_data: bool) -> asyncio.Future[None]:
        """To be awaited where nothing is left to be read; raises why no more will come."""
        # Only then: what came before the connection broke is read first.
        if self._error is not None:
            raise self._error
        self._wakes_on_data = on_data
        self._waiter = waiter = self._pool.loop.create_future()
        return waiter

    def _wake(self) -> None:
        waiter, self._waiter = self._waiter, None
        if waiter is not None and not waiter.done():
            waiter.set_result(None)

    def _fail(self, error: WireError) -> None:
        if self._error is None and not self._answer.complete:
            self._error = error
        self._wake()
        self.abort()

    # --- asyncio's callbacks

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._pool.connections += 1

    def data_received(self, data: bytes) -> None:
        answer = self._answer
        if answer.complete or self._error is not None:  # nobody asked for more
            self.abort()
            return
        fault = answer.feed(data)
        if fault is not None:
            self._fail(fault)
            return
        if answer.body.is_full and not self._paused:
            self._paused = True
            self._transport.pause_reading()
        if answer.complete or (self._wakes_on_data and (answer.body.pieces or answer.has_head)):
            self._wake()

    def connection_lost(self, exc: Exception | None) -> None:
        self._pool.connections -= 1
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        answer = self._answer
        if not answer.complete and self._error is None:
            answer.closed(exc is None)
            if not answer.complete:
                self._error = self._why_lost(exc)
        else:
            answer.closed(False)
        self._wake()

    def _why_lost(self, exc: Exception | None) -> WireError:
        # A worker may close an idle connection just as a request goes out on it: the request was never read, so another
        # connection may carry it, and the worker is not to blame. It looks like that only if nothing at all was heard,
        # on a connection that has served before, right after sending; a worker that dies later has had the request.
        if not self._answer.heard and self._served and self._pool.loop.time() - self._sent_at < STALE_S:
            return StaleError("closed an idle connection")
        return BrokenError(type(exc).__name__ if exc is not None else "connection closed")


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
        self.is_own: Callable[[Sequence[Any], Sequence[Any]], bool] = lambda near, far: False  # leads back here

    async def exchange(self, place: Origin, data: bytes) -> Exchange:
        """Send a whole request; the caller awaits its answer and closes the exchange, whatever happens."""
        found = self._reuse(place) or await self._connect(place)
        found.send(data)
        return found

    def put_back(self, place: Origin, exchange: Exchange) -> None:
        idle = self._idle.get(place)
        if self._closed or (idle is not None and len(idle) >= IDLE_MAX) or not exchange.usable:
            exchange.abort()
            return
        if idle is None:
            idle = self._idle[place] = []
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
        if not idle:
            return None
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
        idle = next((each for each in self._idle.values() if each), None)
        if idle is not None:
            idle.pop(0).abort()
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
            raise UnreachableError(f"{place.host[:80]} is not a host name") from None
        made.check_far()
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


JSON = b"application/json"


def request_bytes(
    method: str, place: Origin, path: str, headers: Sequence[Header], body: bytes | None, content_type: bytes = JSON
) -> bytes:
    """A request as it goes out. The caller vouches for the headers: they came through a parser."""
    lines = [f"{method} {place.prefix}{path} HTTP/1.1\r\nHost: {place.authority}\r\n".encode()]
    lines += [b"%b: %b\r\n" % header for header in headers]
    if body is None:
        lines.append(b"\r\n")
    else:
        lines.append(b"Content-Type: %b\r\nContent-Length: %d\r\n\r\n" % (content_type, len(body)))
        lines.append(body)
    return b"".join(lines)


def header(headers: Sequence[Header], name: bytes) -> str | None:
    """A header's value; `name` in lower case."""
    for known, value in headers:
        if known == name:
            with contextlib.suppress(UnicodeDecodeError):
                return value.decode().strip()
    return None
