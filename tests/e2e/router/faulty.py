"""Doors that misbehave: one small HTTP server before each real worker, which passes on what it gets until told not to.

Law: a door writes down every request before it does anything with it, and does what its script says at one exact step:
before the worker is asked, between the worker's answer and the router, or after some events of a stream. When the
router leaves, the door leaves the worker, so that an abort reaches it as if nobody stood between.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import dataclass
from typing import Any

import aiohttp
from aiohttp import web

from kvbaton.api.params import FIELD
from tests.aiohttp_server import serving

_PASSED_ON = ("Content-Type", "Retry-After", "X-Request-Id")
_ASKED_WITH = ("Content-Type", "Authorization", "X-Request-Id")


@dataclass(slots=True)
class Seen:
    """One request that came to a door."""

    path: str
    data: bytes
    sent: bool = False  # the worker has it
    answered: bool = False  # the worker's answer is here: whole, or its first event
    left: bool = False  # the router closed its connection

    @property
    def params(self) -> dict[str, Any]:
        return dict(json.loads(self.data).get(FIELD) or {})

    @property
    def ticket(self) -> str | None:
        return self.params.get("ticket")


Script = Callable[["Door", web.Request, Seen], Awaitable[web.StreamResponse]]
End = Callable[[web.Request, web.StreamResponse], Awaitable[None]]
"""How a stream ends that a door breaks off."""


class Door:
    """Stands before the worker that `upstream` names; `url` is what the router is told instead."""

    def __init__(self, name: str, upstream: Callable[[], str], session: aiohttp.ClientSession) -> None:
        self.name = name
        self.url = ""
        self.script: Script = passes
        self.seen: list[Seen] = []
        self.probes = 0
        self._upstream = upstream
        self._session = session

    @property
    def tickets(self) -> list[str]:
        """In the order in which they came."""
        return [ticket for seen in self.seen if (ticket := seen.ticket) is not None]

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        seen = Seen(request.path, await request.read())
        if request.method == "GET":
            self.probes += 1
            return await passes(self, request, seen)
        self.seen.append(seen)
        try:
            return await self.script(self, request, seen)
        except asyncio.CancelledError:
            seen.left = True
            raise

    @contextlib.asynccontextmanager
    async def forward(self, request: web.Request, seen: Seen) -> AsyncIterator[aiohttp.ClientResponse]:
        """The worker's answer from its headers on. If the worker breaks off, so does this door, without a word."""
        headers = {name: request.headers[name] for name in _ASKED_WITH if name in request.headers}
        url = self._upstream() + request.path
        try:
            async with self._session.request(
                request.method, url, data=seen.data, headers=headers, trace_request_ctx=seen
            ) as answer:
                yield answer
        except aiohttp.ClientError:
            await dies(self, request, seen)


@contextlib.asynccontextmanager
async def open_door(name: str, upstream: Callable[[], str]) -> AsyncIterator[Door]:
    trace = aiohttp.TraceConfig()
    trace.on_request_chunk_sent.append(_sent)
    session = aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(force_close=True),
        timeout=aiohttp.ClientTimeout(total=120),
        trace_configs=[trace],
    )
    async with session:
        door = Door(name, upstream, session)
        app = web.Application(client_max_size=1 << 24)
        app.router.add_route("*", "/{rest:.*}", door._handle)
        async with serving(app, "127.0.0.1", 0) as door.url:
            yield door


async def _sent(_: aiohttp.ClientSession, context: Any, __: aiohttp.TraceRequestChunkSentParams) -> None:
    context.trace_request_ctx.sent = True


@contextlib.contextmanager
def nobody_listens() -> Iterator[str]:
    """A URL where every connection is refused, held so that nobody else can take the port."""
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        yield f"http://127.0.0.1:{held.getsockname()[1]}"


# --- scripts that do not ask the worker


def says(status: int, data: bytes = b"", content_type: str = "application/json") -> Script:
    """An answer of our own; without data an error object as others write it."""
    fault = {"message": "scripted", "type": "scripted_error", "code": "scripted", "param": None}
    body = data or json.dumps({"error": fault}).encode()

    async def script(_: Door, __: web.Request, ___: Seen) -> web.StreamResponse:
        return web.Response(status=status, body=body, content_type=content_type, headers={"Retry-After": "7"})

    return script


async def hangs(_: Door, __: web.Request, ___: Seen) -> web.StreamResponse:
    await asyncio.Event().wait()
    raise AssertionError


async def dies(_: Door, request: web.Request, __: Seen) -> web.StreamResponse:
    """The connection breaks."""
    abort(request)
    await asyncio.Event().wait()
    raise AssertionError


async def talks_nonsense(_: Door, request: web.Request, __: Seen) -> web.StreamResponse:
    """Something that is not HTTP."""
    assert request.transport is not None
    request.transport.write(b"\x00\x01 this is no HTTP \xff\xfe\r\n\r\n")
    await asyncio.Event().wait()
    raise AssertionError


# --- scripts that do


async def passes(door: Door, request: web.Request, seen: Seen) -> web.StreamResponse:
    """What the worker says, as it says it."""
    async with door.forward(request, seen) as answer:
        if answer.content_type == "text/event-stream":
            return await _stream(request, seen, answer)
        data = await answer.read()
        seen.answered = True
        return web.Response(status=answer.status, body=data, headers=_headers(answer))
    raise AssertionError


def held(gate: asyncio.Event, then: Script = passes) -> Script:
    """The worker is asked when the gate opens."""

    async def script(door: Door, request: web.Request, seen: Seen) -> web.StreamResponse:
        await gate.wait()
        return await then(door, request, seen)

    return script


def keeps(gate: asyncio.Event) -> Script:
    """The worker answers; the router hears of it when the gate opens."""

    async def script(door: Door, request: web.Request, seen: Seen) -> web.StreamResponse:
        async with door.forward(request, seen) as answer:
            data = await answer.read()
            seen.answered = True
            await gate.wait()
            return web.Response(status=answer.status, body=data, headers=_headers(answer))
        raise AssertionError

    return script


async def loses(door: Door, request: web.Request, seen: Seen) -> web.StreamResponse:
    """The worker answers, and the answer never arrives."""
    return await answered_then(dies)(door, request, seen)


def answered_then(script: Script) -> Script:
    """The worker answers, nobody hears of it, and something else happens."""

    async def both(door: Door, request: web.Request, seen: Seen) -> web.StreamResponse:
        async with door.forward(request, seen) as answer:
            await answer.read()
            seen.answered = True
        return await script(door, request, seen)

    return both


def changed(change: Callable[[bytes], bytes]) -> Script:
    """The worker answers, and something else arrives."""

    async def script(door: Door, request: web.Request, seen: Seen) -> web.StreamResponse:
        async with door.forward(request, seen) as answer:
            data = change(await answer.read())
            seen.answered = True
            return web.Response(status=answer.status, body=data, headers=_headers(answer))
        raise AssertionError

    return script


def stops_after(events: int, end: End) -> Script:
    """Some events of the worker's stream, then something else."""

    async def script(door: Door, request: web.Request, seen: Seen) -> web.StreamResponse:
        async with door.forward(request, seen) as answer:
            return await _stream(request, seen, answer, events, end)
        raise AssertionError

    return script


def first(script: Script, then: Script = passes) -> Script:
    """One script for the first request that comes, another for the rest."""
    left = [script]

    async def both(door: Door, request: web.Request, seen: Seen) -> web.StreamResponse:
        return await (left.pop() if left else then)(door, request, seen)

    return both


# --- how a stream ends early


def abort(request: web.Request) -> None:
    if request.transport is not None:
        request.transport.abort()


async def breaks(request: web.Request, _: web.StreamResponse) -> None:
    abort(request)
    await asyncio.Event().wait()


async def breaks_in_mid_event(request: web.Request, response: web.StreamResponse) -> None:
    await response.write(b'data: {"id": "cut in mid')
    await asyncio.sleep(0)
    await breaks(request, response)


async def ends_early(_: web.Request, __: web.StreamResponse) -> None:
    """The HTTP answer ends as it should, what it tells does not."""


async def breaks_the_framing(request: web.Request, response: web.StreamResponse) -> None:
    assert request.transport is not None
    request.transport.write(b"this is no chunk of anything\r\n\xff\xfe\r\n")
    await asyncio.Event().wait()


def tells_nonsense_after(gate: asyncio.Event) -> End:
    """A whole event, of nothing that anybody could read."""

    async def end(_: web.Request, response: web.StreamResponse) -> None:
        await gate.wait()
        await response.write(b"data: <html>\n\n")
        await asyncio.Event().wait()

    return end


async def stalls(_: web.Request, __: web.StreamResponse) -> None:
    await asyncio.Event().wait()


async def _stream(
    request: web.Request,
    seen: Seen,
    answer: aiohttp.ClientResponse,
    limit: int = -1,
    end: End = ends_early,
) -> web.StreamResponse:
    response = web.StreamResponse(status=answer.status, headers=_headers(answer))
    await response.prepare(request)
    rest = b""
    async for data in answer.content.iter_any():
        *events, rest = (rest + data).split(b"\n\n")
        for event in events:
            if limit == 0:
                await end(request, response)
                return response
            limit -= 1
            await response.write(event + b"\n\n")
            seen.answered = True
    return response


def _headers(answer: aiohttp.ClientResponse) -> dict[str, str]:
    return {name: answer.headers[name] for name in _PASSED_ON if name in answer.headers}
