"""How many connections an aiohttp server holds, and who goes when there are too many.

Law: beyond the bound the oldest connection that has never asked anything goes, then the oldest that asks nothing now;
one that is being answered never does. So strangers that connect and say nothing take no client's place, nor all
descriptors of the process.
"""

from __future__ import annotations

import asyncio
import contextlib
import resource
from collections.abc import Awaitable, Callable, Iterator

from aiohttp import web
from aiohttp.typedefs import Middleware

CONNECTIONS_MAX = 4096
TRIM_S = 0.01
"""How long there may be more: connections that come in one burst are counted together."""

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def connections_max() -> int:
    """As many as are good for anything, and never more than half of the descriptors that this process may have."""
    return min(CONNECTIONS_MAX, max(16, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 2))


class Crowd:
    """Of one server. `inside` is entered while a request of a connection is answered."""

    def __init__(self, bound: int) -> None:
        self.turned_away = 0
        self._max = bound
        self._asking: set[web.RequestHandler] = set()
        self._asked: set[web.RequestHandler] = set()
        self._leaving: set[web.RequestHandler] = set()  # aiohttp counts them for a turn of the loop or two
        self._trimming: asyncio.TimerHandle | None = None

    @contextlib.contextmanager
    def inside(self, handler: web.RequestHandler) -> Iterator[None]:
        self._asking.add(handler)
        self._asked.add(handler)
        try:
            yield
        finally:
            self._asking.discard(handler)

    def connection(self, server: web.Server) -> web.RequestHandler:
        """The protocol of one more connection."""
        if self._trimming is None:
            self._trimming = asyncio.get_running_loop().call_later(TRIM_S, self._trim, server)
        return server()

    def _trim(self, server: web.Server) -> None:
        self._trimming = None
        here = server.connections
        for known in (self._asked, self._leaving):  # nobody tells of those that left
            known.intersection_update(here)
        here = [handler for handler in here if handler not in self._leaving]
        quiet = [handler for handler in here if handler not in self._asking]
        quiet.sort(key=self._asked.__contains__)
        for handler in quiet[: max(0, len(here) - self._max)]:
            self.turned_away += 1
            self._leaving.add(handler)
            handler.force_close()


def counted(crowd: Crowd) -> Middleware:
    """A middleware that notes who is being answered."""

    @web.middleware
    async def note(request: web.Request, handler: Handler) -> web.StreamResponse:
        with crowd.inside(request.protocol):
            return await handler(request)

    return note
