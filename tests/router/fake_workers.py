"""Workers that do what a test tells them, and a router in front of them."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import aiohttp
import msgspec
from aiohttp import web

from kvbaton.api.http import http_server
from kvbaton.api.params import Mode
from kvbaton.protocol.ids import WorkerId
from kvbaton.router.app import router_app
from kvbaton.router.dashboard_page import dashboard
from kvbaton.router.processes.router_parent import router_processes
from kvbaton.router.router_settings import Fallback, RouterSettings
from kvbaton.router.workers.directory import ALL_MODES, ListedEngine, StaticDirectory, WorkerListState
from tests.aiohttp_server import serving

KEY = b"k" * 32
# a busy machine may stand still; strict, since an answer of D alone hides what became of a handoff
QUICK = RouterSettings(
    connect_s=20, first_byte_s=20, deadline_s=40, suspect_s=0.01, settle_s=1, fallback=Fallback.STRICT
)
Script = Callable[["FakeWorker", web.Request, dict[str, Any]], Awaitable[web.StreamResponse]]


async def until(condition: Callable[[], Any], within_s: float = 20.0) -> None:
    """Poll `condition` until it holds."""
    async with asyncio.timeout(within_s):
        while not condition():
            await asyncio.sleep(0.002)


class FakeWorker:
    """Records what it is asked and answers by its script."""

    def __init__(self, name: str, script: Script) -> None:
        self.name = name
        self.script = script
        self.bodies: list[dict[str, Any]] = []
        self.headers: list[Any] = []
        self.paths: list[str] = []
        self.raw: list[bytes] = []
        self.aborted = 0
        self.healthy = True
        self.probes = 0
        self.pages: dict[str, Any] = {}  # by path, what it answers to GET
        self.url = ""

    @property
    def params(self) -> list[dict[str, Any]]:
        return [body["kv_transfer_params"] for body in self.bodies]

    def app(self) -> web.Application:
        app = web.Application(client_max_size=1 << 26)
        app.router.add_post("/{rest:.*}", self._handle)
        app.router.add_get("/v1/models", self._models)
        app.router.add_get("/health", self._health)
        app.router.add_get("/{rest:.*}", self._page)
        return app

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        self.raw.append(await request.read())
        body = {} if request.content_type.startswith("multipart/") else json.loads(self.raw[-1])
        self.bodies.append(body)
        self.headers.append(request.headers.copy())
        self.paths.append(request.path)
        try:
            return await self.script(self, request, body)
        except asyncio.CancelledError:
            self.aborted += 1
            raise

    async def _health(self, _: web.Request) -> web.Response:
        self.probes += 1
        return web.Response(status=200 if self.healthy else 503)

    async def _page(self, request: web.Request) -> web.Response:
        self.paths.append(request.path)
        self.headers.append(request.headers.copy())
        if request.path not in self.pages:
            return web.json_response({"detail": "Not Found"}, status=404)
        return web.json_response(self.pages[request.path])

    async def _models(self, _: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [{"id": "tiny", "object": "model"}]})


# --- scripts


async def lease(worker: FakeWorker, _: web.Request, body: dict[str, Any]) -> web.Response:
    """A prefill worker that does its part."""
    ticket = f"ticket-{worker.name}-{len(worker.bodies)}"
    params = {"do_remote_prefill": True, "do_remote_decode": False, "ticket": ticket, "remote_engine_id": worker.name}
    pulls = body["kv_transfer_params"]["mode"] == "pull"
    return web.json_response({"choices": [], **({"kv_transfer_params": {**params, "mode": "pull"}} if pulls else {})})


def text_of(body: dict[str, Any]) -> str:
    """What a fake decode worker answers: the prompt in capitals, and the seed where there is one."""
    prompt = body["prompt"] if "prompt" in body else body["messages"][-1]["content"]
    return str(prompt).upper() + (f"+{body['seed']}" if body.get("seed") is not None else "")


async def speak(worker: FakeWorker, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
    """A decode worker that does its part, two characters at a time."""
    text, chat = text_of(body), "messages" in body
    usage = {"prompt_tokens": 5, "completion_tokens": len(text), "total_tokens": 5 + len(text)}
    head = {"id": f"cmpl-{worker.name}", "created": 7, "model": "tiny"}
    if not body.get("stream"):
        choice: dict[str, Any] = {"index": 0, "finish_reason": "length", "logprobs": None}
        choice |= {"message": {"role": "assistant", "content": text}} if chat else {"text": text}
        kind = "chat.completion" if chat else "text_completion"
        answer = {**head, "object": kind, "choices": [choice], "usage": usage, "kv_transfer_params": None}
        return web.json_response(answer)
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    await response.prepare(request)
    kind = "chat.completion.chunk" if chat else "text_completion"
    for at in range(0, len(text), 2):
        piece = text[at : at + 2]
        choice = {"index": 0, "finish_reason": None, **({"delta": {"content": piece}} if chat else {"text": piece})}
        await response.write(event({**head, "object": kind, "choices": [choice]}))
    last = {"index": 0, "finish_reason": "length", **({"delta": {}} if chat else {"text": ""})}
    await response.write(event({**head, "object": kind, "choices": [last]}))
    if (body.get("stream_options") or {}).get("include_usage"):
        await response.write(event({**head, "object": kind, "choices": [], "usage": usage}))
    await response.write(b"data: [DONE]\n\n")
    return response


def event(value: Any) -> bytes:
    return b"data: " + json.dumps(value).encode() + b"\n\n"


def refuse(status: int, message: str = "no", **more: Any) -> Script:
    async def script(_: FakeWorker, __: web.Request, ___: dict[str, Any]) -> web.Response:
        fault = {"message": message, "type": "scripted_error", "code": "scripted", "param": None, **more}
        return web.json_response({"error": fault}, status=status, headers={"Retry-After": "7"})

    return script


def say(data: bytes, content_type: str = "application/json") -> Script:
    async def script(_: FakeWorker, __: web.Request, ___: dict[str, Any]) -> web.Response:
        return web.Response(body=data, content_type=content_type)

    return script


async def hang(_: FakeWorker, __: web.Request, ___: dict[str, Any]) -> web.Response:
    await asyncio.Event().wait()
    raise AssertionError


async def die(_: FakeWorker, request: web.Request, ___: dict[str, Any]) -> web.Response:
    """The connection breaks before an answer."""
    assert request.transport is not None
    request.transport.abort()
    await asyncio.Event().wait()
    raise AssertionError


def begin_then(end: Callable[[web.Request, web.StreamResponse], Awaitable[None]], first: bytes = b"") -> Script:
    """A stream that sends one event, then does something else."""

    async def script(_: FakeWorker, request: web.Request, ___: dict[str, Any]) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        await response.write(first or event({"id": "cmpl-1", "choices": [{"index": 0, "text": "one"}]}))
        await end(request, response)
        return response

    return script


def after(gate: asyncio.Event, script: Script) -> Script:
    """Wait for the gate, then follow the script."""

    async def waiting(worker: FakeWorker, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        await gate.wait()
        return await script(worker, request, body)

    return waiting


def tells(asked: asyncio.Event, script: Script) -> Script:
    """Say that it was asked, then follow the script."""

    async def telling(worker: FakeWorker, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        asked.set()
        return await script(worker, request, body)

    return telling


def only_first(script: Script, then: Script) -> Script:
    """One script for the first request, another for the rest."""

    async def both(worker: FakeWorker, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        return await (script if len(worker.bodies) == 1 else then)(worker, request, body)

    return both


# --- a cluster


class ChangingDirectory(StaticDirectory):
    """A list that a test may change."""

    def lose(self, name: str) -> None:
        self._workers = tuple(worker for worker in self._workers if worker.name != name)

    def drain(self, name: str) -> None:
        self.change(name, state=WorkerListState.DRAINING)

    def change(self, name: str, **fields: Any) -> None:
        self._workers = tuple(
            msgspec.structs.replace(each, **fields) if each.name == name else each for each in self._workers
        )


class Cluster:
    """A router, its workers, and a client of it."""

    def __init__(
        self,
        url: str,
        session: aiohttp.ClientSession,
        p: list[FakeWorker],
        d: list[FakeWorker],
        app: Any,
        directory: ChangingDirectory,
        discarded: list[tuple[str, str]],
    ) -> None:
        self.url = url
        self.session = session
        self.p = p
        self.d = d
        self.app = app
        self.directory = directory
        self.discarded = discarded

    async def stats(self) -> dict[str, Any]:
        _, numbers = await self.get("/stats")
        return dict(numbers)

    async def post(self, body: Any, path: str = "/v1/completions", **headers: str) -> tuple[int, Any, Any]:
        """Status, decoded body, headers."""
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        async with self.session.post(self.url + path, data=data, headers=named) as response:
            return response.status, await response.json(content_type=None), response.headers

    async def get(self, path: str) -> tuple[int, Any]:
        async with self.session.get(self.url + path) as response:
            return response.status, await response.json(content_type=None)

    async def events(self, body: dict[str, Any], path: str = "/v1/completions", **headers: str) -> list[Any]:
        """The decoded events of a stream; "[DONE]" stays a text."""
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        async with self.session.post(self.url + path, json={**body, "stream": True}, headers=named) as response:
            assert response.status == 200, await response.text()
            assert response.content_type == "text/event-stream"
            return payloads(await response.read())


def payloads(data: bytes) -> list[Any]:
    texts = [line[6:] for line in data.decode().split("\n\n") if line]
    return [text if text == "[DONE]" else json.loads(text) for text in texts]


@contextlib.asynccontextmanager
async def cluster(
    prefills: int | list[Script] = 1,
    decodes: int | list[Script] = 1,
    *,
    settings: RouterSettings = QUICK,
    key: bytes | None = KEY,
    modes: tuple[Mode, ...] = ALL_MODES,
    processes: int = 1,
    access: dict[str, Any] | None = None,
    **more: Any,
) -> AsyncIterator[Cluster]:
    """`prefills` and `decodes`: how many good workers, or the script of each; `more`: of each worker's entry;
    `access`: who may ask, as `router_app` takes it."""
    p_scripts = [lease] * prefills if isinstance(prefills, int) else prefills
    d_scripts = [speak] * decodes if isinstance(decodes, int) else decodes
    p = [FakeWorker(f"p{number}", script) for number, script in enumerate(p_scripts)]
    d = [FakeWorker(f"d{number}", script) for number, script in enumerate(d_scripts)]
    async with contextlib.AsyncExitStack() as stack:
        listed = []
        for worker in (*p, *d):
            worker.url = await stack.enter_async_context(serving(worker.app(), "127.0.0.1", 0))
            role = "prefill" if worker in p else "decode"
            entry = ListedEngine(WorkerId(worker.name), role, worker.url, modes=modes, **more)  # type: ignore[arg-type]
            listed.append(msgspec.structs.replace(entry, address=entry.address.format(port=6300 + len(listed))))
        directory = ChangingDirectory(listed)
        discarded: list[tuple[str, str]] = []
        given = (directory, settings, key, lambda who, ticket: discarded.append((who.name, ticket)))
        app: Any
        if processes > 1:
            parent = router_processes(processes, "127.0.0.1", 0, *given, pages=dashboard, **(access or {}))
            app = await stack.enter_async_context(parent)
            url = app.url
        else:
            app = await stack.enter_async_context(router_app(*given, **(access or {})))
            url = await stack.enter_async_context(http_server.serving(app, "127.0.0.1", 0))
        session = await stack.enter_async_context(aiohttp.ClientSession())
        yield Cluster(url, session, p, d, app, directory, discarded)
