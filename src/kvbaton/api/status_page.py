"""`/health` and `/metrics` of a process that serves no HTTP otherwise, such as a store or a registry.

Law: read only. It tells sizes and counts, no names of prompts and no contents; who may reach the address is up to the
operator.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import Any

from aiohttp import web

from kvbaton.api.http import json_response, new_app, serving
from kvbaton.observe.metrics import exposition
from kvbaton.observe.metrics.exposition import Family

BODY_BYTES_MAX = 1024


@contextlib.asynccontextmanager
async def status_page(
    address: str, health: Callable[[], Mapping[str, Any]], families: Callable[[], Sequence[Family]]
) -> AsyncIterator[str]:
    """Answers at `host:port` while the context lasts; gives the URL (port 0 takes a free one)."""

    async def tell_health(_: web.Request) -> web.Response:
        return json_response(health())

    async def tell_metrics(request: web.Request) -> web.Response:
        openmetrics = exposition.wants_openmetrics(request.headers.get("Accept"))
        text = exposition.render(families(), openmetrics=openmetrics)
        return web.Response(body=text.encode(), headers={"Content-Type": exposition.content_type(openmetrics)})

    app = new_app(BODY_BYTES_MAX)
    app.router.add_get("/health", tell_health)
    app.router.add_get("/metrics", tell_metrics)
    host, _, number = address.rpartition(":")
    async with serving(app, host.strip("[]"), int(number)) as url:
        yield url
