"""A client that leaves a stream at any of its steps costs that stream, and not a line in a log."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator

import aiohttp
import pytest
from aiohttp import web

from kvbaton.api.http import new_app, send_events, serving


async def _events(closed: list[bool]) -> AsyncGenerator[bytes, None]:
    try:
        yield b"data: 1\n\n"
        yield b"data: 2\n\n"
    finally:
        closed.append(True)


@pytest.mark.parametrize("step", ["prepare", "write", "write_eof"])
def test_who_leaves_at_any_step_of_a_stream_leaves_no_trace(
    step: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    closed: list[bool] = []

    async def gone(*_: object, **__: object) -> None:
        raise aiohttp.ClientConnectionResetError("Cannot write to closing transport")

    async def handle(request: web.Request) -> web.StreamResponse:
        return await send_events(request, _events(closed))

    async def main() -> None:
        app = new_app(1 << 20)
        app.router.add_get("/", handle)
        async with serving(app, "127.0.0.1", 0) as url, aiohttp.ClientSession() as session:
            with contextlib.suppress(aiohttp.ClientError):
                async with session.get(url, timeout=aiohttp.ClientTimeout(total=20)) as answer:
                    await answer.read()

    monkeypatch.setattr(web.StreamResponse, step, gone)
    with caplog.at_level(logging.WARNING):
        asyncio.run(main())
    assert closed and all(closed), "its events are not waited for any more"
    assert not [record for record in caplog.records if record.exc_info]
