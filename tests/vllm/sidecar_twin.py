"""A stand-in for llm-d's routing sidecar (`--kv-connector=nixlv2`), written from its published behaviour.

The sidecar stands before one D. A header names the prefill servers; the first of the list is asked for one token, and
what it answers as `kv_transfer_params` goes to D with the client's own request. Without the header D is asked alone.

Laws: it knows nothing of kvbaton. Both legs get one request id, *added* behind the client's own if there is one. A
prefill server's error status is the client's answer: there is no second server and no fallback to D; 502, 503 and 504
are tried again at the same server, as often as told. Numbers pass through floating point, as in the original.
Left out: replacing D's `cached_tokens` by P's, encoders, chunked decoding, vLLM's own generate path (it is off unless
a server is started with `--enable-scale-out`), TLS and the allow list of targets.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
from aiohttp import web

from kvbaton_proof.bench.router.router_toy import BODY_BYTES_MAX, passed_on
from kvbaton_proof.rig.client import TO_PREFILL
from tests.aiohttp_server import serving

TARGETS = "x-prefiller-host-port"
REQUEST_ID = "X-Request-Id"
TRANSIENT = (502, 503, 504)
_CHAT_LIMITS = ("max_tokens", "max_completion_tokens", "min_tokens")
LIMITS: dict[str, tuple[str, ...]] = {
    "/v1/chat/completions": _CHAT_LIMITS,
    "/v1/completions": _CHAT_LIMITS,
    "/v1/messages": _CHAT_LIMITS,
    "/v1/responses": ("max_output_tokens",),
}
"""The paths that are split in two, and what is set to 1 for P."""

Params = dict[str, Any] | None
Rewrite = Callable[[Params], Params]


def unchanged(params: Params) -> Params:
    return params


def coordinator(params: Params) -> Params:
    """What llm-d's coordinator makes of P's answer, whatever it was."""
    return {**(params or {}), "do_remote_decode": False, "do_remote_prefill": True}


class SidecarTwin:
    """In front of one D; remembers what it sent, for tests to look at."""

    def __init__(self, decode: str, session: aiohttp.ClientSession) -> None:
        self.url = ""
        self.retries = 0
        self.to_prefill = TO_PREFILL
        self.rewrite: Rewrite = unchanged  # of P's answer on its way to D
        self.legs: list[tuple[str, str, dict[str, Any]]] = []  # where, request id, body
        self._decode = decode
        self._session = session

    def app(self) -> web.Application:
        app = web.Application(client_max_size=BODY_BYTES_MAX)
        for path in LIMITS:
            app.router.add_post(path, self._handle)
        app.router.add_route("*", "/{rest:.*}", self._alone)
        return app

    async def _alone(self, request: web.Request) -> web.StreamResponse:
        headers = _passed(request)
        async with self._session.request(
            request.method, self._decode + request.path_qs, data=await request.read(), headers=headers
        ) as answer:
            return await passed_on(request, answer)

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        target = request.headers.get(TARGETS, "").partition(",")[0].strip()
        if not target:
            return await self._alone(request)
        body = json.loads(await request.read(), parse_int=float)
        headers, unique = _passed(request), str(uuid.uuid1())
        headers.append((REQUEST_ID, unique))
        status, told, content_type = await self._prefill(f"http://{target}{request.path}", body, headers, unique)
        if status != 200:
            return web.Response(status=status, body=told, content_type=content_type)
        params = self.rewrite(json.loads(told, parse_int=float).get("kv_transfer_params"))
        body["kv_transfer_params"] = params
        self.legs.append(("decode", unique, body))
        async with self._session.post(self._decode + request.path, data=_encoded(body), headers=headers) as answer:
            return await passed_on(request, answer)

    async def _prefill(
        self, url: str, body: dict[str, Any], headers: list[tuple[str, str]], unique: str
    ) -> tuple[int, bytes, str]:
        asked = prefill_body(url, body, self.to_prefill)
        status, told, content_type = 502, b"", "text/plain"
        for _attempt in range(1 + self.retries):
            self.legs.append(("prefill", unique, asked))
            try:
                async with self._session.post(url, data=_encoded(asked), headers=headers) as answer:
                    status, told, content_type = answer.status, await answer.read(), answer.content_type
            except aiohttp.ClientError:
                status, told, content_type = 502, b"", "text/plain"
            if status not in TRANSIENT:
                break
        return status, told, content_type


def prefill_body(url: str, body: dict[str, Any], params: dict[str, Any]) -> dict[str, Any]:
    """The same prompt, one token whatever the client's limits were, no stream."""
    path = "/" + url.split("/", 3)[3]
    asked = {**body, "kv_transfer_params": params, "stream": False}
    asked.pop("stream_options", None)
    return asked | dict.fromkeys(LIMITS[path], 1)


def _passed(request: web.Request) -> list[tuple[str, str]]:
    """The client's headers, several of one name too, without those of this hop and of the scheduler."""
    own = {"host", "content-length", "connection", "transfer-encoding", TARGETS}
    return [(name, value) for name, value in request.headers.items() if name.lower() not in own]


def _encoded(body: dict[str, Any]) -> bytes:
    """As the original writes numbers: a whole one without a point, whatever it was before."""
    return json.dumps(_whole(body)).encode()


def _whole(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _whole(each) for key, each in value.items()}
    if isinstance(value, list):
        return [_whole(each) for each in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value


@asynccontextmanager
async def sidecar_twin(decode: str) -> AsyncIterator[SidecarTwin]:
    """A twin on a free port of this host, in front of D at this URL."""
    timeout = aiohttp.ClientTimeout(total=None, sock_connect=10)
    async with aiohttp.ClientSession(timeout=timeout, connector=aiohttp.TCPConnector(limit=0)) as session:
        twin = SidecarTwin(decode.rstrip("/"), session)
        async with serving(twin.app(), "127.0.0.1", 0) as url:
            twin.url = url
            yield twin


@asynccontextmanager
async def deaf_prefill(prefill: str) -> AsyncIterator[str]:
    """`host:port` of a relay that loses P's first answer: the client gets 503 for what P has computed."""
    async with aiohttp.ClientSession() as session:
        lost: list[bytes] = []

        async def handle(request: web.Request) -> web.StreamResponse:
            async with session.post(
                prefill + request.path, data=await request.read(), headers=_passed(request)
            ) as answer:
                if lost:
                    return await passed_on(request, answer)
                lost.append(await answer.read())
                return web.Response(status=503)

        app = web.Application(client_max_size=BODY_BYTES_MAX)
        app.router.add_post("/{rest:.*}", handle)
        async with serving(app, "127.0.0.1", 0) as url:
            yield url.removeprefix("http://")
