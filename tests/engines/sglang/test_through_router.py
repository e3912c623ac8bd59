"""From a client through kvbaton's router to the plug-in: what the router says of a room is what P and D hand over by.

The router and everything of kvbaton is real; SGLang's server and its queues are fakes.
"""

from __future__ import annotations

import asyncio
import contextlib
from array import array
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from kvbaton.api.params import SGLANG, Mode
from tests.engines.sglang.fake_sglang import Req
from tests.engines.sglang.test_manager import Pair
from tests.router.fake_workers import Cluster, FakeWorker, Script, cluster, speak

BODY = {"prompt": "a prompt of several chunks, and a bit more of it", "max_tokens": 4}


class FakeServers:
    """The HTTP servers of P and D, and the loops of their schedulers."""

    def __init__(self, pair: Pair) -> None:
        self.pair = pair
        self.reqs: list[Req] = []
        self.prefill: Script = self._prefill
        self.decode: Script = self._decode

    async def run(self) -> None:
        while True:
            for memory in self.pair.memories:
                memory.scribble()
            self.pair.prefill.step()
            self.pair.decode.step()
            await asyncio.sleep(0.001)

    async def _prefill(self, worker: FakeWorker, _: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        req = self._req("p", body)
        self.pair.prefill.add(req)
        return await self._ended(req) or web.json_response({"choices": []})

    async def _decode(self, worker: FakeWorker, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        req = self._req("d", body)
        self.pair.decode.add(req, address=f"{body['bootstrap_host']}:{body['bootstrap_port']}")
        return await self._ended(req) or await speak(worker, request, body)

    def _req(self, side: str, body: dict[str, Any]) -> Req:
        room = body["bootstrap_room"]
        req = Req(f"{side}-{room}", array("q", list(body["prompt"].encode())), room)
        self.reqs.append(req)
        return req

    async def _ended(self, req: Req) -> web.Response | None:
        """SGLang's error, where its KV did not come."""
        while not req.finished:
            await asyncio.sleep(0.001)
        is_bad = req.finished != "length" or req.answer == "WRONG"
        return web.json_response({"error": {"message": req.finished}}, status=500) if is_bad else None


@contextlib.asynccontextmanager
async def served(pair: Pair, port: int) -> AsyncIterator[tuple[Cluster, FakeServers]]:
    servers = FakeServers(pair)
    more = {"dialect": SGLANG, "address": f"127.0.0.1:{port}"}
    async with cluster([servers.prefill], [servers.decode], modes=(Mode.STREAM,), key=None, **more) as c:
        loop = asyncio.create_task(servers.run())
        try:
            yield c, servers
        finally:
            loop.cancel()


async def test_a_clients_prompt_is_computed_by_p_and_answered_by_d(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair = Pair(tmp_path, monkeypatch)
    try:
        async with served(pair, pair.port) as (c, servers):
            answers = await asyncio.gather(*(c.post({**BODY, "prompt": f"{n} {BODY['prompt']}"}) for n in range(3)))
            assert [status for status, _, _ in answers] == [200] * 3
            assert len({req.bootstrap_room for req in servers.reqs}) == 3
            assert [req.answer for req in servers.reqs if req.rid.startswith("d")] == ["right"] * 3
    finally:
        pair.close()


async def test_an_address_that_is_no_members_is_an_error_for_the_client(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """D asks nobody whom discovery has not named."""
    pair = Pair(tmp_path, monkeypatch)
    try:
        async with served(pair, 9) as (c, servers):
            status, answer, _ = await c.post(BODY)
            assert status >= 500 and "127.0.0.1:9" in str([req.finished for req in servers.reqs])
            assert "answer" not in answer and not any(req.answer for req in servers.reqs)
    finally:
        pair.close()
