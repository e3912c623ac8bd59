"""A site of fixed paths: what a worker's HTTP server, or a status page, leads to.

Laws: nothing that a client sent is in the log but its path and its id of the request: whoever reaches the port could
fill a disk with it, or have a proxy's credentials written down there. A body is taken as the bytes that came.

`/health` and `/metrics` of a process that serves no HTTP otherwise, such as a store or a registry.

Law: read only. It tells sizes and counts, no names of prompts and no contents; who may reach the address is up to the
operator.
"""

from __future__ import annotations

import contextlib
import logging
import resource
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import Any

from kvbaton.api import screening
from kvbaton.api.api_errors import ApiError
from kvbaton.api.http.client_quotas import ClientQuotas
from kvbaton.api.http.http_server import serving
from kvbaton.api.http.http_types import Answer, Handler, Request, json_answer, metrics_answer
from kvbaton.api.request_ids import checked_request_id
from kvbaton.observe.codes.entry import worth_saying
from kvbaton.observe.metrics import exposition
from kvbaton.observe.metrics.exposition import Family

log = logging.getLogger(__name__)

BODY_S = 60.0
"""From the headers of a request to the last byte of its body."""
CONNECTIONS_MAX = 4096
HELD_BYTES_MAX = 8 << 30
"""Of requests and answers together; a client, such as the only router, may hold half of it."""

_MISREAD = (400, 405, 431)
"""Statuses of what could not be read as a request; others say that it was too large, or too slow."""

Guard = Callable[[Request], None]
"""`ApiError` for whoever may not ask this."""
Routes = Mapping[str, Mapping[str, Handler]]
"""Handlers by path, then by method."""


class PathSite:
    """Answers at its routes. Whoever listens may append to `guards` before."""

    def __init__(
        self,
        routes: Routes,
        body_bytes_max: int,
        *,
        body_s: float = BODY_S,
        connections_max: int | None = None,
    ) -> None:
        self.body_bytes_max = body_bytes_max
        self.body_s = body_s
        self.connections_max = connections_max or _connections_max()
        self.room = ClientQuotas(HELD_BYTES_MAX, holder="this server", setting="")
        self.guards: list[Guard] = []
        self.malformed = 0
        self.routes = routes

    def name_of(self, given: str) -> str:
        return checked_request_id(given)

    def admit(self, request: Request) -> None:
        for guard in self.guards:
            guard(request)
        if any(value.lower() != "100-continue" for value in request.values("expect")):
            said = "Expect: only 100-continue is understood; leave the header out"
            raise ApiError(417, said, param="Expect")

    def handler(self, method: str, path: str) -> Handler:
        methods = self.routes.get(path)
        if methods is None:
            said = f"{method} {path[:200]}: no such path; there are {', '.join(self.routes)}"
            raise ApiError(404, said, code="not_found")
        return handler_of(methods, method, path)

    def answer_headers(self, request: Request) -> Mapping[str, str]:
        return {}

    def listens(self, address: Sequence[Any]) -> None:
        pass

    def refresh(self) -> None:
        pass

    def misread(self, fault: ApiError) -> None:
        if fault.status not in _MISREAD:
            return
        self.malformed += 1
        if worth_saying(self.malformed):
            said = "[http-malformed] a request was not HTTP/1.1 or exceeded a limit: %s (%d so far)"
            log.warning(said, fault.code, self.malformed)


def handler_of(methods: Mapping[str, Handler], method: str, path: str) -> Handler:
    """Who answers this method at one path, by its handlers; a HEAD is answered like a GET. `ApiError` (405) if none."""
    handler = methods.get("GET" if method == "HEAD" else method)
    if handler is None:
        raise ApiError(405, f"{method} {path}: use {', '.join(methods)}", code="method_not_allowed")
    return handler


def screened(handler: Handler) -> Handler:
    """The same for a path that takes a body: none that is encoded, and none from a web page of another site."""

    async def screen(request: Request) -> Any:
        screening.check(request.values)
        return await handler(request)

    return screen


def reads(handler: Handler) -> Mapping[str, Handler]:
    return {"GET": handler}


def takes_body(handler: Handler) -> Mapping[str, Handler]:
    return {"POST": screened(handler)}


def _connections_max() -> int:
    """As many as are good for anything, and never more than half of the descriptors that this process may have."""
    return min(CONNECTIONS_MAX, max(16, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 2))


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
