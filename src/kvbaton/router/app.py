"""The router's HTTP front: OpenAI's endpoints for clients; `/health`, `/workers`, `/metrics`, `/stats` for operators.

Law: a stream goes on as the bytes that came; only a body that stands for several requests is taken apart and joined.
Whatever ends a client's request (answer, error, deadline, the client itself) ends both of its legs.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Mapping, Sequence
from typing import Any

import msgspec
from aiohttp import web

from kvbaton.api import prometheus, sse
from kvbaton.api.bodies import Body, Kind, parse
from kvbaton.api.errors import ApiError, bad_field, full, read_error, unavailable
from kvbaton.api.gather import all_of, interleave
from kvbaton.api.http import REQUEST_ID, json_response, new_app, request_id, send_events
from kvbaton.api.merge import Joiner, Part, join, split
from kvbaton.api.params import FIELD, Mode
from kvbaton.router import policy
from kvbaton.router.asking import TicketMinter
from kvbaton.router.directory import Roster, Worker, WorkerDirectory
from kvbaton.router.flow import Call, Flow
from kvbaton.router.legs import LegError, Legs
from kvbaton.router.settings import RouterSettings
from kvbaton.router.stats import RouterStats

MODE_HEADER = "x-kvbaton-mode"
PAIR_HEADER = "x-kvbaton-pair"
PASSED_HEADERS = ("Authorization", "traceparent", "tracestate", "baggage")


@contextlib.asynccontextmanager
async def router_app(
    directory: WorkerDirectory, settings: RouterSettings, ticket_key: bytes | None = None
) -> AsyncIterator[web.Application]:
    """The application while its connections live; listen with `api.http.serving`. Without a key only pull is served."""
    roster = Roster(directory, settings.suspect_s)
    stats = RouterStats()
    minter = None if ticket_key is None else TicketMinter(ticket_key, settings.ticket_ttl_s)
    async with Legs.open(settings) as legs:
        flow = Flow(legs, roster, settings, stats, minter)
        front = _Front(flow, settings, stats)
        desk = _Desk(roster, legs, settings, stats)
        app = new_app(settings.body_bytes_max)
        app.add_routes(
            [
                web.post(Kind.COMPLETION.value, front.completions),
                web.post(Kind.CHAT.value, front.chat),
                web.get("/v1/models", desk.models),
                web.get("/health", desk.health),
                web.get("/workers", desk.workers),
                web.get("/metrics", desk.metrics),
                web.get("/stats", desk.stats),
            ]
        )
        try:
            yield app
        finally:
            await flow.close()


class _Front:
    """What clients call."""

    def __init__(self, flow: Flow, settings: RouterSettings, stats: RouterStats) -> None:
        self._flow = flow
        self._settings = settings
        self._stats = stats

    async def completions(self, request: web.Request) -> web.StreamResponse:
        return await self._answer(request, Kind.COMPLETION)

    async def chat(self, request: web.Request) -> web.StreamResponse:
        return await self._answer(request, Kind.CHAT)

    async def _answer(self, request: web.Request, kind: Kind) -> web.StreamResponse:
        with self._counted():
            body = parse(kind, await self._read(request))
            if body.fields.get(FIELD) is not None:
                raise bad_field(FIELD, "the router sets this; leave it out")
            name = request_id(request)
            parts = split(body)
            calls = self._calls(request, body, parts, name)
            headers = {REQUEST_ID: name}
            with self._let_in(len(calls)):
                if not body.stream:
                    data = await self._whole(parts, calls, headers)
                    return web.Response(body=data, headers=headers, content_type="application/json")
                events = self._events(calls, headers) if len(calls) == 1 else self._joined(body, parts, calls, headers)
                return await send_events(request, events, headers, calls[0].deadline)

    async def _read(self, request: web.Request) -> bytes:
        try:
            async with asyncio.timeout(self._settings.body_s):
                return await request.read()
        except TimeoutError:
            said = f"body: not complete within {self._settings.body_s} s"
            raise ApiError(408, said, type="timeout_error", code="body_timeout", param="body") from None

    def _calls(self, request: web.Request, body: Body, parts: Sequence[Part], name: str) -> list[Call]:
        modes = self._modes(request.headers.get(MODE_HEADER))
        passed = {header: value for header in PASSED_HEADERS if (value := request.headers.get(header)) is not None}
        passed["Content-Type"] = "application/json"
        deadline = asyncio.get_running_loop().time() + self._settings.deadline_s
        calls = []
        for part in parts:
            own = name if len(parts) == 1 else f"{name}-{part.index}"
            headers = {**passed, REQUEST_ID: own}
            calls.append(Call(body.kind, part.fields, headers, modes, body.stream, deadline, own))
        return calls

    def _modes(self, wanted: str | None) -> tuple[Mode, ...]:
        allowed = self._settings.modes_allowed
        if wanted is None:
            return (self._settings.mode, *(mode for mode in allowed if mode is not self._settings.mode))
        if wanted not in [str(mode) for mode in allowed]:
            raise bad_field(MODE_HEADER, f"got {wanted[:40]!r}, expected one of {', '.join(allowed)}")
        return (Mode(wanted),)

    async def _whole(self, parts: Sequence[Part], calls: Sequence[Call], headers: dict[str, str]) -> bytes:
        bodies = await all_of([self._body(call, headers) for call in calls])
        if len(bodies) == 1:
            return bodies[0]
        return msgspec.json.encode(join(parts, [msgspec.json.decode(body) for body in bodies]))

    async def _body(self, call: Call, headers: dict[str, str]) -> bytes:
        async with contextlib.aclosing(await self._flow.serve(call)) as reply:
            self._note_pair(headers, str(reply.pair))
            return reply.body

    async def _events(self, calls: Sequence[Call], headers: dict[str, str]) -> AsyncGenerator[bytes, None]:
        """One call's stream, untouched."""
        begun = calls[0].deadline - self._settings.deadline_s
        async with contextlib.aclosing(await self._flow.serve(calls[0])) as reply:
            self._note_pair(headers, str(reply.pair))
            self._stats.first_byte_s += asyncio.get_running_loop().time() - begun
            self._stats.first_bytes += 1
            try:
                async with contextlib.aclosing(reply.events()) as events:
                    async for data in events:
                        yield data
            except ApiError as error:
                self._stats.failures[f"mid_stream:{error.code}"] += 1
                raise

    async def _joined(
        self, body: Body, parts: Sequence[Part], calls: Sequence[Call], headers: dict[str, str]
    ) -> AsyncGenerator[bytes, None]:
        """Several calls' streams as one."""
        joiner = Joiner()
        streams = [self._events([call], headers) for call in calls]
        async with contextlib.aclosing(interleave(streams)) as merged:
            async for number, data in merged:
                events = b"".join(self._rejoined(joiner, parts[number], data))
                if events:
                    yield events
        if body.include_usage:
            yield sse.event(joiner.usage_chunk())
        yield sse.DONE

    def _rejoined(self, joiner: Joiner, part: Part, data: bytes) -> Iterator[bytes]:
        for payload in sse.payloads(data):
            if payload == b"[DONE]":
                continue
            try:
                chunk = msgspec.json.decode(payload, type=dict[str, Any])
            except msgspec.DecodeError:
                raise ApiError(502, "a worker sent an event that is not JSON", type="worker_error") from None
            if "error" in chunk:
                raise read_error(502, payload)
            merged = joiner.chunk(part, chunk)
            if merged is not None:
                yield sse.event(merged)

    def _note_pair(self, headers: dict[str, str], pair: str) -> None:
        if self._settings.show_pair:
            known = headers.get(PAIR_HEADER)
            headers[PAIR_HEADER] = pair if known is None else f"{known},{pair}"

    @contextlib.contextmanager
    def _let_in(self, count: int) -> Iterator[None]:
        if self._stats.in_flight + count > self._settings.in_flight_max:
            raise full(f"{self._stats.in_flight} requests are under way, at most {self._settings.in_flight_max}")
        self._stats.in_flight += count
        try:
            yield
        finally:
            self._stats.in_flight -= count

    @contextlib.contextmanager
    def _counted(self) -> Iterator[None]:
        outcome = "broken"
        try:
            yield
            outcome = "ok"
        except ApiError as error:
            outcome = error.code or str(error.status)
            raise
        except (asyncio.CancelledError, ConnectionError):
            outcome = "client_gone"
            raise
        finally:
            self._stats.ends[outcome] += 1


class _Desk:
    """What operators call."""

    def __init__(self, roster: Roster, legs: Legs, settings: RouterSettings, stats: RouterStats) -> None:
        self._roster = roster
        self._legs = legs
        self._settings = settings
        self._stats = stats

    async def models(self, _: web.Request) -> web.Response:
        """What a worker serves; the first that answers speaks for all, since pairs are made of equals."""
        for worker in self._workers():
            with contextlib.suppress(LegError):
                data = await self._legs.get(worker, "/v1/models")
                return web.Response(body=data, content_type="application/json")
        raise unavailable("no worker that could say which models there are", "no_worker")

    async def health(self, _: web.Request) -> web.Response:
        """200 if a pair can serve the default mode (or one that stands in for it)."""
        workers = self._workers()
        pairs = {str(mode): len(policy.pairs(workers, mode)) for mode in self._settings.modes_allowed}
        states: dict[str, dict[str, int]] = {}
        for worker in workers:
            count = states.setdefault(worker.role, {})
            count[worker.state] = count.get(worker.state, 0) + 1
        ready = any(pairs.values())
        body: dict[str, Any] = {"status": "ok" if ready else "unavailable", "workers": states, "pairs": pairs}
        if not ready:
            body["reason"] = policy.explain(workers, self._settings.mode)
        return json_response(body, 200 if ready else 503)

    async def workers(self, _: web.Request) -> web.Response:
        return json_response({"workers": [_shown(worker) for worker in self._workers()]})

    async def metrics(self, _: web.Request) -> web.Response:
        text = prometheus.render(self._numbers(), "kvbaton_router")
        return web.Response(body=text.encode(), headers={"Content-Type": prometheus.CONTENT_TYPE})

    async def stats(self, _: web.Request) -> web.Response:
        return json_response(self._numbers())

    def _numbers(self) -> Mapping[str, Any]:
        states: dict[str, int] = {}
        for worker in self._workers():
            key = f"{worker.role}:{worker.state}"
            states[key] = states.get(key, 0) + 1
        return {**self._stats.as_numbers(), "workers": states}

    def _workers(self) -> list[Worker]:
        return self._roster.workers(asyncio.get_running_loop().time())


def _shown(worker: Worker) -> dict[str, Any]:
    shown: dict[str, Any] = msgspec.to_builtins(worker)
    return {**shown, "incarnation": f"{worker.incarnation:016x}"}
