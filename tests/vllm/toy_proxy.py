"""A proxy that does what the toy proxy of vLLM's NIXL connector does, in our own words: prefill, then decode.

Law: it knows nothing of kvbaton. P is asked for one token and told that another will decode; whatever
`kv_transfer_params` P answers with go to D untouched, beside the client's own body. No retries, no policy but turns.
"""

from __future__ import annotations

import itertools
import json
import uuid
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
from aiohttp import web

from tests.aiohttp_server import serving

BODY_BYTES_MAX = 1 << 26
TO_PREFILL: dict[str, Any] = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}


class ToyProxy:
    """Takes turns among prefill and among decode workers; remembers what P answered, for tests to look at."""

    def __init__(self, prefill: Sequence[str], decode: Sequence[str], session: aiohttp.ClientSession) -> None:
        self.url = ""
        self.handed: list[Any] = []  # the kv_transfer_params of each P answer, None where there were none
        self._prefill = itertools.cycle(prefill)
        self._decode = itertools.cycle(decode)
        self._session = session

    def app(self) -> web.Application:
        app = web.Application(client_max_size=BODY_BYTES_MAX)
        for path in ("/v1/completions", "/v1/chat/completions"):
            app.router.add_post(path, self._handle)
        return app

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        body = json.loads(await request.read())
        headers = {"X-Request-Id": str(uuid.uuid4())}
        if "Authorization" in request.headers:
            headers["Authorization"] = request.headers["Authorization"]
        async with self._session.post(
            next(self._prefill) + request.path, json=prefill_body(body), headers=headers
        ) as answer:
            if answer.status != 200:
                return await passed_on(request, answer)
            params = (await answer.json(content_type=None)).get("kv_transfer_params")
        self.handed.append(params)
        if params:
            body["kv_transfer_params"] = params
        async with self._session.post(next(self._decode) + request.path, json=body, headers=headers) as answer:
            return await passed_on(request, answer)


def prefill_body(body: dict[str, Any]) -> dict[str, Any]:
    """What P is asked for: the same prompt, one token, no stream."""
    asked = {**body, "kv_transfer_params": TO_PREFILL, "stream": False, "max_tokens": 1}
    asked.pop("stream_options", None)
    for field in ("max_completion_tokens", "min_tokens"):
        if asked.get(field) is not None:
            asked[field] = min(asked[field], 1)
    return asked


async def passed_on(request: web.Request, answer: aiohttp.ClientResponse) -> web.StreamResponse:
    """The worker's status, type and bytes, as they come."""
    response = web.StreamResponse(status=answer.status, headers={"Content-Type": answer.headers["Content-Type"]})
    await response.prepare(request)
    async for data in answer.content.iter_any():
        await response.write(data)
    await response.write_eof()
    return response


@asynccontextmanager
async def toy_proxy(prefill: str | Sequence[str], decode: str | Sequence[str]) -> AsyncIterator[ToyProxy]:
    """A proxy on a free port of this host, in front of the workers at these URLs."""
    timeout = aiohttp.ClientTimeout(total=None, sock_connect=10)
    async with aiohttp.ClientSession(timeout=timeout, connector=aiohttp.TCPConnector(limit=0)) as session:
        proxy = ToyProxy(_urls(prefill), _urls(decode), session)
        async with serving(proxy.app(), "127.0.0.1", 0) as url:
            proxy.url = url
            yield proxy


def _urls(given: str | Sequence[str]) -> list[str]:
    return [url.rstrip("/") for url in ([given] if isinstance(given, str) else given)]
