"""Answers that are streamed, and when each of their chunks came; against small servers in this process."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import aiohttp
from aiohttp import web

from kvbaton_proof.gpu_test.gpu_load import Watched, watching
from kvbaton_proof.rig.client import Streamed, streamed


@asynccontextmanager
async def serving(handler: web.Handler) -> AsyncIterator[tuple[aiohttp.ClientSession, str]]:
    app = web.Application()
    app.router.add_post("/v1/completions", handler)  # type: ignore[arg-type]
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    port = runner.addresses[0][1]
    try:
        async with aiohttp.ClientSession() as session:
            yield session, f"http://127.0.0.1:{port}"
    finally:
        await runner.cleanup()


async def answer_in_chunks(request: web.Request) -> web.StreamResponse:
    body = json.loads(await request.read())
    response = web.StreamResponse()
    await response.prepare(request)
    for number in range(body["max_tokens"]):
        chunk = json.dumps({"choices": [{"text": str(number)}]})
        await response.write(f"data: {chunk}\n\n".encode())
    await response.write(b'data: {"choices": []}\n\ndata: [DONE]\n\n')
    return response


class TestStreamed:
    def test_every_chunk_with_tokens_has_its_moment(self) -> None:
        async def main() -> Streamed:
            async with serving(answer_in_chunks) as (session, url):
                return await streamed(session, url, [1, 2], tokens=5)

        found = asyncio.run(main())
        assert len(found.times) == 5 and not found.error
        assert list(found.times) == sorted(found.times) and found.first_s == found.times[0]
        assert found.moments[0] == found.begun + found.times[0]

    def test_an_error_is_infinitely_slow(self) -> None:
        async def refuse(request: web.Request) -> web.Response:
            return web.Response(status=503, text="not now")

        async def main() -> Streamed:
            async with serving(refuse) as (session, url):
                return await streamed(session, url, [1], tokens=1)

        found = asyncio.run(main())
        assert found.first_s == math.inf and found.error == "status 503: not now"

    def test_an_error_within_an_answer_is_one(self) -> None:
        async def fail(request: web.Request) -> web.Response:
            return web.Response(body=b'data: {"error": {"message": "load failed"}}\n\n')

        async def main() -> Streamed:
            async with serving(fail) as (session, url):
                return await streamed(session, url, [1], tokens=1)

        assert "load failed" in asyncio.run(main()).error

    def test_an_answer_that_never_comes_is_late(self) -> None:
        async def hang(request: web.Request) -> web.Response:
            await asyncio.sleep(5)
            return web.Response()

        async def main() -> Streamed:
            async with serving(hang) as (session, url):
                return await streamed(session, url, [1], tokens=1, deadline_s=0.05)

        assert asyncio.run(main()).error == "late"

    def test_streams_are_watched_from_another_process(self) -> None:
        async def main() -> list[Streamed]:
            async with serving(answer_in_chunks) as (_, url), watching(Watched(url, [[1], [2]], 6)) as watch:
                return await watch.ended()

        assert [len(each.times) for each in asyncio.run(main())] == [6, 6]
