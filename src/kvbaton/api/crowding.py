"""Connection limit of an aiohttp server, and which connection is closed at the limit.

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
GRACE_S = 0.5
"""What a new connection has to ask something before it counts as one that says nothing; of a quarter of the bound at
most, by which there may be more than that for so long."""

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
        self._made: dict[web.RequestHandler, float] = {}  # when, of those that may still be new
        self._leaving: set[web.RequestHandler] = set()  # aiohttp counts them for a turn of the loop or two
        self._trimming: asyncio.TimerHandle | None = None
        self._again: asyncio.TimerHandle | None = None  # when those that are new now no longer are

    @contextlib.contextmanager
    def inside(self, handler: web.RequestHandler) -> Iterator[None]:
        self._asking.add(handler)
        self._asked.add(handler)
        try:
            yield
        finally:
            self._asking.discard(handler)

    def connection(self, server: web.Server, make: Callable[[], web.RequestHandler]) -> web.RequestHandler:
        """The protocol of one more connection of that server."""
        loop = asyncio.get_running_loop()
        if self._trimming is None:
            self._trimming = loop.call_later(TRIM_S, self._trim, server)
        made = make()
        self._made[made] = loop.time()
        return made

    def _trim(self, server: web.Server) -> None:
        self._trimming = None
        here = server.connections
        for known in (self._asked, self._leaving):  # nobody tells of those that left
            known.intersection_update(here)
        here = [handler for handler in here if handler not in self._leaving]
        quiet = [handler for handler in here if handler not in self._asking]
        new = self._new([handler for handler in quiet if handler not in self._asked])
        if new and len(here) > self._max and self._again is None:
            self._again = asyncio.get_running_loop().call_later(GRACE_S, self._trim_again, server)
        quiet = sorted((handler for handler in quiet if handler not in new), key=self._asked.__contains__)
        for handler in quiet[: max(0, len(here) - self._max)]:
            self.turned_away += 1
            self._leaving.add(handler)
            handler.force_close()

    def _trim_again(self, server: web.Server) -> None:
        self._again = None
        self._trim(server)

    def _new(self, silent: list[web.RequestHandler]) -> set[web.RequestHandler]:
        """Those that may be about to ask: whoever fills the place with connections must not have them turned away."""
        since = asyncio.get_running_loop().time() - GRACE_S
        self._made = {handler: at for handler, at in self._made.items() if at > since}
        return {handler for handler in silent[-max(1, self._max // 4) :] if handler in self._made}


def counted(crowd: Crowd) -> Middleware:
    """A middleware that notes who is being answered."""

    @web.middleware
    async def note(request: web.Request, handler: Handler) -> web.StreamResponse:
        with crowd.inside(request.protocol):
            return await handler(request)

    return note
