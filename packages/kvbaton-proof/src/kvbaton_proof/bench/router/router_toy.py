"""A toy proxy for comparison and for tests: it stands in for vLLM's toy proxies; their shape, our code.

Laws: for each request P, then D, with a new client session (and so new connections) for each of them; bodies are
decoded and encoded again; what D sends is passed on as it comes. It retries nothing and knows one P and one D. It is a
yardstick, nobody should run it: `python -m kvbaton_proof.bench.router.router_toy PORT PREFILL_URL DECODE_URL`.
"""

from __future__ import annotations

import sys
import uuid
from collections import deque
from typing import Any

import aiohttp
from aiohttp import web

from kvbaton_proof.rig.client import TO_PREFILL

BACKLOG = 1024
BODY_BYTES_MAX = 1 << 26
HANDED_MAX = 100
TIMEOUT_S = 600.0
PATHS = ("/v1/completions", "/v1/chat/completions")


class Toy:
    """One P, one D."""

    def __init__(self, prefill: str, decode: str) -> None:
        self.handed: deque[Any] = deque(maxlen=HANDED_MAX)  # what P gave for D, of the last requests
        self._prefill = prefill
        self._decode = decode

    def app(self) -> web.Application:
        app = web.Application(client_max_size=BODY_BYTES_MAX)
        app.add_routes([web.post(path, self._answer) for path in PATHS])
        app.add_routes([web.get("/health", self._health)])
        return app

    async def _health(self, _: web.Request) -> web.Response:
        return web.json_response({"status": "ok"})

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        headers = {"X-Request-Id": uuid.uuid4().hex}
        prefill, decode = self._prefill + request.path, self._decode + request.path
        async with _session() as session, session.post(prefill, json=to_prefill(body), headers=headers) as answer:
            if answer.status != 200:
                return await passed_on(request, answer)
            self.handed.append((await answer.json(content_type=None)).get("kv_transfer_params"))
            body["kv_transfer_params"] = self.handed[-1]
        async with _session() as session, session.post(decode, json=body, headers=headers) as answer:
            return await passed_on(request, answer)


def _session() -> aiohttp.ClientSession:
    return aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=TIMEOUT_S))


def to_prefill(body: dict[str, Any]) -> dict[str, Any]:
    """The same prompt, one token, no stream, and the news that another engine will decode."""
    asked = {**body, "max_tokens": 1, "stream": False, "kv_transfer_params": dict(TO_PREFILL)}
    asked.pop("stream_options", None)
    return asked | {name: min(asked[name], 1) for name in ("max_completion_tokens", "min_tokens") if asked.get(name)}


async def passed_on(request: web.Request, answer: aiohttp.ClientResponse) -> web.StreamResponse:
    """The worker's status, type and bytes, as they come."""
    response = web.StreamResponse(status=answer.status, headers={"Content-Type": answer.headers["Content-Type"]})
    await response.prepare(request)
    async for data in answer.content.iter_any():
        await response.write(data)
    await response.write_eof()
    return response


def main() -> None:
    port, prefill, decode = sys.argv[1:]
    toy = Toy(prefill, decode)
    web.run_app(toy.app(), host="127.0.0.1", port=int(port), backlog=BACKLOG, access_log=None, print=lambda *_: None)


if __name__ == "__main__":
    main()
