"""`/health` and `/metrics` of a process that serves no HTTP otherwise, such as a store or a registry.

Law: read only. It tells sizes and counts, no names of prompts and no contents; who may reach the address is up to the
operator.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import Any

from kvbaton.api.http.http_server import serving
from kvbaton.api.http.http_types import Answer, Request, json_answer, metrics_answer
from kvbaton.api.http.path_site import PathSite, reads
from kvbaton.observe.metrics import exposition
from kvbaton.observe.metrics.exposition import Family

BODY_BYTES_MAX = 1024


@contextlib.asynccontextmanager
async def status_page(
    address: str, health: Callable[[], Mapping[str, Any]], families: Callable[[], Sequence[Family]]
) -> AsyncIterator[str]:
    """Answers at `host:port` while the context lasts; gives the URL (port 0 takes a free one)."""

    async def tell_health(_: Request) -> Answer:
        return json_answer(health())

    async def tell_metrics(request: Request) -> Answer:
        return metrics_answer(request, lambda openmetrics: exposition.render(families(), openmetrics=openmetrics))

    site = PathSite({"/health": reads(tell_health), "/metrics": reads(tell_metrics)}, BODY_BYTES_MAX)
    host, _, number = address.rpartition(":")
    async with serving(site, host.strip("[]"), int(number)) as url:
        yield url
