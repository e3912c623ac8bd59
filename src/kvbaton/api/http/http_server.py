"""The HTTP/1.1 server of routers and workers: connections, parsed by httptools, each answered one request at a time.

Laws: every request gets one answer, whatever its handler does: an `Answer`, a stream that ends explicitly, or OpenAI's
error object. A client that goes away cancels its handler. Nothing that a client sends grows without bound (headers,
body, requests sent ahead, connections, and the sum of it all) and nothing it fails to send is waited for without end.
What a connection held is free when it ends, without the garbage collector: a parser and its owner know each other.

A server of general use costs a third of what this router may spend on a request (docs/decisions/0007).
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
from collections.abc import AsyncIterator, Mapping
from typing import cast

from kvbaton.api import access_log
from kvbaton.api.api_errors import ApiError, bare, internal
from kvbaton.api.gather import cancel
from kvbaton.api.http.client_quotas import ClientCrowd, caller
from kvbaton.api.http.http_types import (
    Events,
    Request,
    Site,
    address_of,
    chunk,
    error_answer,
    last_words,
    stream_head,
    url_of,
    whole_bytes,
)
from kvbaton.api.http.request_reader import Backlog, RequestReader
from kvbaton.api.http.server_loop import BACKLOG, port_error
from kvbaton.api.http.tls_server import TlsFiles, TlsLayer
from kvbaton.processes.process_logs import request_of_task

log = logging.getLogger(__name__)

KEEPALIVE_S = 75.0
"""Longer than any client of ours keeps an idle connection (15 s), so that no request meets a closing one."""
SHUTDOWN_S = 2.0
REQUEST_ID = "X-Request-Id"

HEAD_S = 30.0
"""From the first byte of a request to the last of its headers."""
UNREAD_BYTES_MAX = 64 << 10
BYTES_FREE = 4 << 10
"""Of each connection, and of an answer: not counted, so that probes are answered whatever is held."""
LINGER_S = 5.0
"""A client that was refused may go on sending for this long before it is cut off."""
UNREAD_S = 60.0
"""A client that has not read a whole answer after this long is cut off."""
SWEEP_S = 1.0

_CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"


class _CutOffError(Exception):
    """The client is gone, or did not read in time: nothing more is sent."""


class _Connection(asyncio.Protocol):
    """One client's connection. Callbacks of asyncio are below."""

    def __init__(self, door: HttpServer) -> None:
        self.active_at = door.loop.time()
        self._door = door
        self._site = door.site
        self._loop = door.loop
        self._transport: asyncio.Transport = cast(asyncio.Transport, None)  # from connection_made on
        self._backlog = Backlog(door.site.room.tab())
        self._reader = RequestReader(self._backlog, door.site)
        self._task: asyncio.Task[None] | None = None
        self._writable: asyncio.Future[None] | None = None
        self._is_full = False
        self._lingering: asyncio.TimerHandle | None = None  # from a refusal on
        self._closing = False

    @property
    def is_busy(self) -> bool:
        return self._task is not None or bool(self._backlog.ready)

    def overdue(self, now: float) -> bool:
        """Whether it is not worth keeping: silent for too long, or slow to say what it wants, or to read its last."""
        if self._task is not None:
            return False
        if self._transport.is_closing():  # whatever else it has sent is not read any more
            return now - self.active_at > KEEPALIVE_S
        reader = self._reader
        if self.is_busy or reader.fault is not None:
            return False
        self._count()
        if reader.reading_since is None:
            return now - self.active_at > KEEPALIVE_S
        return now - reader.reading_since > (self._site.body_s if reader.has_head else HEAD_S)

    def give_up(self) -> None:
        """Close a connection that is overdue, with a word if a request had begun."""
        reader = self._reader
        if self._transport.is_closing() or (reader.reading_since is None and self._transport.get_write_buffer_size()):
            self._transport.abort()  # closing waits for a client that does not read its last answer
            return
        if reader.reading_since is None:
            self._transport.close()
            return
        what = "body" if reader.has_head else "headers"
        said = f"{what}: not complete within {self._site.body_s if reader.has_head else HEAD_S} s"
        self._refuse(ApiError(408, said, type="timeout_error", code=f"{what}_timeout", param=what))

    def make_room(self) -> None:
        """Go, for another to come: as one that is idle may, whose client will ask over a new connection."""
        is_reading = self._reader.reading_since is not None
        if self._task is not None or is_reading or self._transport.get_write_buffer_size():
            self._transport.abort()
        else:
            self._transport.close()

    def close_when_idle(self) -> None:
        self._closing = True
        if not self.is_busy:
            self._transport.close()

    def abort(self) -> None:
        self._transport.abort()

    # --- answering

    def _next(self) -> None:
        """Answer the next request, or read on."""
        # One request at a time: the next is parsed only when the answer before it is out, so that a client that sends
        # ahead pays with its own socket buffer. A fault waits its turn too: what came before it gets its answers first.
        backlog, reader = self._backlog, self._reader
        if backlog.ready:
            request, keeps, is_new, _ = backlog.pop()
            self._door.crowd.busy(self)
            self._task = self._loop.create_task(self._serve(request, keeps and not self._closing, is_new))
            return
        self.active_at = self._loop.time()
        if reader.fault is not None:
            self._refuse(reader.fault)
        elif backlog.unparsed:
            if backlog.unparsed_bytes > UNREAD_BYTES_MAX:
                self._transport.resume_reading()
            self.data_received(backlog.take_unparsed())
        elif reader.owes_continue:
            self._continue()

    async def _serve(self, request: Request, keeps: bool, is_new: bool) -> None:
        request_of_task.set(request.id)  # a task serves one request
        try:
            keeps = await self._answer(request, keeps, is_new)
            if self._is_full:  # one who sends on without reading fills no memory
                self._door.crowd.idle(self)  # nor takes another's place
                await self._room(self._loop.time() + UNREAD_S)
        except (asyncio.CancelledError, _CutOffError):
            keeps = False
            request.status = access_log.CLIENT_GONE
            self._transport.abort()
        except Exception:
            request.status = 500
            log.exception("[answer-unsendable] %s %s: the answer cannot be sent", request.method, request.path[:200])
            keeps = False
            self._transport.abort()
        finally:
            self._task = None
            self._backlog.answering_bytes = 0
            request.tab.close()
            self._door.crowd.idle(self)
            access_log.answered(
                request.method, request.path, request.status, request.served.took_s,
                request=request.id, client=request.peer, error=request.error, served=request.served,
            )  # fmt: skip
        if keeps and not self._closing and not self._transport.is_closing():
            self._next()
        else:
            self.active_at = self._loop.time()
            self._backlog.drop()
            self._transport.close()
        self._count()

    async def _answer(self, request: Request, keeps: bool, is_new: bool) -> bool:
        """Whether the connection can be used again."""
        first = b""
        try:
            self._site.admit(request)
            found = await self._site.handler(request.method, request.path)(request)
            if isinstance(found, Events):
                first = await anext(found.source, b"")
                request.served.ttft_s = request.served.took_s
        except ApiError as error:
            found = error_answer(error.told_to(request.path, request.id))
            bare(error)
        except (Exception, asyncio.CancelledError) as error:
            # A handler may raise CancelledError because a task of its own was cancelled. Only if this
            # task was asked to cancel has the client gone; else the client is still there and is owed an answer.
            if isinstance(error, asyncio.CancelledError) and (self._task is None or self._task.cancelling()):
                raise
            log.exception("[request-crashed] %s %s", request.method, request.path[:200])
            found = error_answer(internal().told_to(request.path, request.id))
        keeps = keeps and not self._closing
        more = {REQUEST_ID: request.id, **self._site.answer_headers(request)}
        if isinstance(found, Events):
            return await self._stream(request, found, first, keeps, is_new, more)
        size = len(found.body)
        if size > BYTES_FREE and size > request.tab.bytes and not request.tab.hold(size):
            found = error_answer(self._site.room.full("answer").told_to(request.path, request.id))
        request.status = found.status
        self._send(whole_bytes(found, keeps, is_new, request.method == "HEAD", more))
        return keeps

    async def _stream(
        self, request: Request, events: Events, first: bytes, keeps: bool, is_new: bool, more: Mapping[str, str]
    ) -> bool:
        """Send events as they come. From here on there is no other answer to this request."""
        request.status = 200
        async with contextlib.aclosing(events.source) as source:
            keeps = keeps and is_new
            head = stream_head(events.headers, keeps, is_new, more)
            self._send(head + (chunk(first) if is_new else first))
            try:
                if self._is_full:
                    await self._room(events.unread_by(self._loop.time()))
                async for data in source:
                    self._send(chunk(data) if is_new else data)
                    if self._is_full:
                        await self._room(events.unread_by(self._loop.time()))
                data = b""
            except ApiError as error:
                error.request_id = request.id
                request.error = error.code or str(error.status)
                data = events.tell(error)
                bare(error)
            except _CutOffError:
                raise
            except Exception:
                log.exception("[stream-crashed] in mid-stream")
                request.error = "internal"
                data = events.tell(internal().told_to("", request.id))
            self._send((chunk(data) if data else b"") + b"0\r\n\r\n" if is_new else data)
        return keeps

    def _send(self, data: bytes) -> None:
        if self._transport.is_closing():
            raise _CutOffError
        self._transport.write(data)

    async def _room(self, deadline: float) -> None:
        """Wait until the client has read some of what was sent."""
        self._writable = self._loop.create_future()
        try:
            async with asyncio.timeout_at(deadline):
                await self._writable
        except TimeoutError:
            raise _CutOffError from None
        finally:
            self._writable = None

    def _refuse(self, fault: ApiError) -> None:
        """The last answer on this connection: what follows on it cannot be told apart."""
        self._reader.fault = fault
        if self._transport.is_closing():
            return
        self._transport.write(last_words(fault))
        self._site.misread(fault)
        access_log.answered("-", "-", fault.status, 0.0, request=fault.request_id, client=self._backlog.peer)
        # Closing now, with bytes unread, would reset the connection and lose the answer on its way
        with contextlib.suppress(OSError):  # the client has reset it
            self._transport.write_eof()
        self._lingering = self._loop.call_later(LINGER_S, self._transport.abort)

    def _continue(self) -> None:
        self._reader.owes_continue = False
        if self._reader.fault is None and not self._transport.is_closing():
            self._transport.write(_CONTINUE)

    # --- asyncio's callbacks

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._backlog.peer = address_of(transport.get_extra_info("peername"))
        self._backlog.near = address_of(transport.get_extra_info("sockname"))
        who = caller(self._backlog.peer)
        self._backlog.tab = self._site.room.tab(who)
        if not self._door.admit(self, who):
            self._transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        self._door.forget(self)
        self._reader.close()
        self._backlog.drop()
        self._backlog.tab.close()
        self.resume_writing()
        if self._lingering is not None:
            self._lingering.cancel()
        if self._task is not None:
            self._door.await_end(self._task)
            self._task.cancel()

    def eof_received(self) -> None:
        """One that will send no more is taken as gone; closing alone would first wait for it to read."""
        if self._task is not None:
            self._transport.abort()

    def _count(self) -> bool:
        """Take note of what is here because this client sent it, or does not read it; False if that is too much."""
        reader, backlog = self._reader, self._backlog
        if reader.is_over:
            return True
        held = reader.held_bytes + backlog.bytes + backlog.answering_bytes + backlog.unparsed_bytes
        if self._task is None:  # else the request's tab has it
            held += self._transport.get_write_buffer_size()
        held = held - BYTES_FREE if held > BYTES_FREE else 0
        return held == backlog.tab.bytes or backlog.tab.hold(held)

    def data_received(self, data: bytes) -> None:
        reader = self._reader
        if reader.fault is not None:
            return
        if self.is_busy:
            self._sent_ahead(data)
            return
        reader.feed(data, self._loop.time())
        if reader.fault is None and not self._count():
            reader.fault = self._site.room.full("request")
            self._backlog.drop()  # not one of them is being answered yet
        if reader.fault is not None:
            reader.reset()
            self._count()
        if self._backlog.ready:
            self._next()
        elif reader.fault is not None:
            self._refuse(reader.fault)
        elif reader.owes_continue:
            self._continue()

    def _sent_ahead(self, data: bytes) -> None:
        """Kept for later, within a bound."""
        backlog = self._backlog
        backlog.keep(data)
        if backlog.unparsed_bytes > UNREAD_BYTES_MAX:
            self._transport.pause_reading()
        if not self._count():
            self._reader.fault = self._site.room.full("request")
            backlog.take_unparsed()

    def pause_writing(self) -> None:
        self._is_full = True

    def resume_writing(self) -> None:
        self._is_full = False
        if self._writable is not None and not self._writable.done():
            self._writable.set_result(None)


class HttpServer:
    """A listening port, while `serving` lasts."""

    def __init__(self, site: Site, tls: TlsFiles | None = None) -> None:
        self.site = site
        self.loop = asyncio.get_running_loop()
        self.crowd: ClientCrowd[_Connection | TlsLayer] = ClientCrowd(site.connections_max)
        self._tls = tls
        self._ending: set[asyncio.Task[None]] = set()  # handlers of clients that are gone
        self._closing = False

    def admit(self, connection: _Connection | TlsLayer, who: str) -> bool:
        """Let one more in, in the place of one that is idle if need be."""
        if not self._closing and len(self.crowd) + len(self._ending) >= self.crowd.bound:
            oldest = self.crowd.next_to_go(who)
            self.site.room.turned_away["new" if oldest is None else "idle"] += 1
            if oldest is None:
                return False
            self.crowd.leave(oldest)
            oldest.make_room()
        if not self._closing:
            self.crowd.enter(connection, who)
        return not self._closing

    def forget(self, connection: _Connection | TlsLayer) -> None:
        self.crowd.leave(connection)

    def await_end(self, task: asyncio.Task[None]) -> None:
        """Of a handler that is being cancelled: what it holds is released in its own time, but before this ends."""
        self._ending.add(task)
        task.add_done_callback(self._ending.discard)

    def connection(self) -> _Connection | TlsLayer:
        if self._tls is None:
            return _Connection(self)
        return TlsLayer(self._tls, self, functools.partial(_Connection, self), caller, self.loop.time())

    async def sweep(self) -> None:
        while True:
            await asyncio.sleep(min(SWEEP_S, self.site.body_s / 4))
            self.site.refresh()
            if self._tls is not None:
                self._tls.refresh()
            now = self.loop.time()
            for connection in self.crowd:
                if connection.overdue(now):
                    connection.give_up()

    async def close(self) -> None:
        """Let what is under way end, but not for long."""
        self._closing = True
        for connection in self.crowd:
            connection.close_when_idle()
        await self._emptied()
        for connection in self.crowd:
            connection.abort()
        if not await self._emptied():
            log.warning("[handlers-stuck] %d handlers have not finished although cancelled", len(self._ending))

    async def _emptied(self) -> bool:
        until = self.loop.time() + SHUTDOWN_S
        while (self.crowd or self._ending) and self.loop.time() < until:
            await asyncio.sleep(0.01)
        return not (self.crowd or self._ending)


@contextlib.asynccontextmanager
async def attended(site: Site, tls: TlsFiles | None = None) -> AsyncIterator[HttpServer]:
    """Connections made by `HttpServer.connection` are answered while the context lasts."""
    door = HttpServer(site, tls)
    sweeping = asyncio.create_task(door.sweep())
    try:
        yield door
    finally:
        await cancel([sweeping])
        await door.close()


@contextlib.asynccontextmanager
async def serving(site: Site, host: str, port: int, tls: TlsFiles | None = None) -> AsyncIterator[str]:
    """Listen while the context lasts; gives the URL (port 0 takes a free one). `PortInUseError` if it is taken."""
    async with attended(site, tls) as door:
        try:
            server = await door.loop.create_server(door.connection, host, port, backlog=BACKLOG)
        except OSError as error:
            raise port_error(host, port, error) from None
        for each in server.sockets:
            site.listens(each.getsockname())
        try:
            yield url_of(server.sockets[0].getsockname(), is_tls=tls is not None)
        finally:
            server.close()
