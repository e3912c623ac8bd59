"""The router as one application: what clients call, what operators call, and what it does by itself.

Law: nothing that was started here outlives the context. A router that is told to drain takes nothing new, says so on
`/health`, and lets what is under way come to its end, but not for ever.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any

import msgspec

from kvbaton.api.api_errors import ApiError
from kvbaton.api.bodies import BodyKind
from kvbaton.api.gather import cancel
from kvbaton.observe.flight.collector import Gathering
from kvbaton.protocol.ids import PeerId
from kvbaton.router.client_quotas import ClientQuotas
from kvbaton.router.dialect_table import TicketMinter
from kvbaton.router.http.http_types import Answer, Handler, Request
from kvbaton.router.openai_api import OpenAiApi
from kvbaton.router.operator_access import FlightsPage, Show, guarded
from kvbaton.router.operator_api import OperatorApi
from kvbaton.router.request_flow import Discard, Flow
from kvbaton.router.router_flights import LogBook
from kvbaton.router.router_settings import RouterSettings
from kvbaton.router.router_stats import RouterStats
from kvbaton.router.worker_calls import LegError, Legs
from kvbaton.router.workers.available import AvailableWorkers
from kvbaton.router.workers.directory import ListedEngine, WorkerDirectory
from kvbaton.router.workers.health import Health

log = logging.getLogger(__name__)

LOOK_S = 0.25
"""How often the router looks whom to probe and who has left."""


class Board(msgspec.Struct, frozen=True):
    """What pages for operators are made from."""

    gathering: Gathering  # flights, journeys, what workers told; from any thread
    workers: Callable[[], list[dict[str, Any]]]  # as `/workers` shows them; on the event loop
    stats: Callable[[], Mapping[str, Any]]  # as `/stats` shows them; on the event loop
    settings: RouterSettings


Pages = Callable[[Board], Mapping[str, Handler]]
"""Makes further pages: path to handler (`talk.Handler`: `async (Request) -> Answer | Events`), for GET and HEAD.

Called once, while the router starts, on its event loop. The router guards each page by `operator_pages` itself (403 for
whoever may not see it), and lists it among its paths. `Request.query` has what follows the question mark.
"""


class Router:
    """What the door leads to: paths, and who answers there."""

    def __init__(
        self,
        front: OpenAiApi,
        desk: OperatorApi,
        settings: RouterSettings,
        stats: RouterStats,
        minter: TicketMinter | None,
        gathering: Gathering,
        pages: Mapping[str, Handler],
    ) -> None:
        self.gathering = gathering
        self._minter = minter
        self.body_bytes_max = settings.body_bytes_max
        self.body_s = settings.body_s
        self.room = stats.room
        self.stats = stats
        self.draining = front.draining
        self._routes: dict[str, dict[str, Handler]] = {
            BodyKind.COMPLETION.value: {"POST": front.completions},
            BodyKind.CHAT.value: {"POST": front.chat},
            BodyKind.RESPONSES.value: {"POST": front.responses},
            "/v1/models": {"GET": desk.models},
            "/health": {"GET": desk.health},
            "/workers": {"GET": desk.workers},
            "/metrics": {"GET": desk.metrics},
            "/stats": {"GET": desk.stats},
        }
        for path, handler in pages.items():
            self._routes[path] = {"GET": guarded(handler, settings.operator_pages)}
        self._pages = frozenset(pages)

    @property
    def paths(self) -> tuple[str, ...]:
        """Everything that is answered."""
        return tuple(self._routes)

    @property
    def _main_paths(self) -> list[str]:
        """Those that a person would ask for, without what pages are made of."""
        return [path for path in self._routes if path.rpartition("/")[0] not in self._routes]

    def handler(self, method: str, path: str) -> Handler:
        found = self._routes.get(path)
        if found is None and path[:-1] in self._pages and path.endswith("/") and method in ("GET", "HEAD"):
            return _without_slash
        if found is None:
            said = f"{method} {path[:200]}: no such path; there are {', '.join(self._main_paths)}"
            raise ApiError(404, said, code="not_found")
        handler = found.get("GET" if method == "HEAD" else method)
        if handler is None:
            raise ApiError(405, f"{method} {path}: use {', '.join(found)}", code="method_not_allowed")
        return handler

    def set_ticket_key(self, key: bytes) -> None:
        """Sign with another key from now on. From any thread."""
        if self._minter is not None:
            self._minter.key = key

    async def drained(self, timeout_s: float) -> bool:
        """Take nothing new and wait for what is under way; False if some of it was still there in the end."""
        self.draining.set()
        loop = asyncio.get_running_loop()
        until = loop.time() + timeout_s
        while self.stats.in_flight and loop.time() < until:
            await asyncio.sleep(0.02)
        return not self.stats.in_flight


async def _without_slash(request: Request) -> Answer:
    """Where the page is: what it is made of is named beside it, also behind a proxy that puts paths under another."""
    return Answer(b"", 308, {"Location": f"../{request.path[:-1].rpartition('/')[2]}"}, "text/plain")


@contextlib.asynccontextmanager
async def router_app(
    directory: WorkerDirectory,
    settings: RouterSettings,
    ticket_key: bytes | None = None,
    discard: Discard | None = None,
    *,
    name: str = "router",
    gathering: Gathering | None = None,
    show: Show | None = None,
    pages: Pages | None = None,
) -> AsyncIterator[Router]:
    """The router while its connections live; listen with `door.serving`.

    Without a key kvbaton's own workers are served by pull only. `discard` tells P of tickets that nobody will use.
    What becomes of requests is kept in `gathering`, under `name`; `show` has workers tell it more; `pages` adds to what
    operators can see.
    """
    gathering = Gathering() if gathering is None else gathering
    health = Health(settings.suspect_s, settings.breaker_failures, settings.probe_min_s, settings.probe_max_s)
    roster = AvailableWorkers(directory, health)
    stats = RouterStats(room=ClientQuotas(settings.held_bytes_max))
    minter = None if ticket_key is None else TicketMinter(ticket_key, settings.ticket_ttl_s)
    draining = asyncio.Event()
    async with Legs.open(settings) as legs:
        if minter is not None:
            legs.token = minter.token
        flow = Flow(legs, roster, settings, stats, minter, discard, LogBook(gathering, name, settings.trace))
        front = OpenAiApi(flow, settings, stats, draining)
        desk = OperatorApi(roster, legs, flow, settings, stats, draining)
        board = Board(gathering, desk.shown, desk.numbers, settings)
        more = {"/flights": FlightsPage(gathering, show).answer, **({} if pages is None else pages(board))}
        caring = asyncio.create_task(_Care(roster, legs, settings, stats).run())
        try:
            yield Router(front, desk, settings, stats, minter, gathering, more)
        finally:
            await cancel([caring])
            await flow.close()


class _Care:
    """Probes workers that broke, and breaks off what is under way with those that left."""

    def __init__(self, roster: AvailableWorkers, legs: Legs, settings: RouterSettings, stats: RouterStats) -> None:
        self._roster = roster
        self._legs = legs
        self._settings = settings
        self._stats = stats
        self._probes: dict[PeerId, asyncio.Task[None]] = {}

    async def run(self) -> None:
        try:
            while True:
                await asyncio.sleep(LOOK_S)
                try:
                    self._look()
                except Exception:  # a directory that fails must not end probing for ever
                    log.exception("[upkeep-failed] looking after the workers failed; going on")
        finally:
            await cancel(list(self._probes.values()))

    def _look(self) -> None:
        now = asyncio.get_running_loop().time()
        view = self._roster.view(now)
        for peer in self._roster.departed():
            count = self._legs.drop(peer)
            self._stats.dropped += count
            if count:
                log.warning("[worker-gone] %s left the list: %d requests to it are broken off", peer, count)
        if not self._roster.health:
            return
        due = set(self._roster.health.due(now))
        for worker in view.workers:
            if worker.peer in due and worker.peer not in self._probes:
                task = asyncio.create_task(self._probe(worker))
                self._probes[worker.peer] = task
                task.add_done_callback(functools.partial(self._probed, worker.peer))

    def _probed(self, peer: PeerId, _: asyncio.Task[None]) -> None:
        self._probes.pop(peer, None)

    async def _probe(self, worker: ListedEngine) -> None:
        try:
            await self._legs.get(worker, "/health")
            answered = True
        except LegError:
            answered = False
        self._stats.probes["answered" if answered else "silent"] += 1
        self._roster.health.probed(worker.peer, answered, asyncio.get_running_loop().time())
        if answered:
            log.info("%s answers again; it is asked last for a while", worker.name)
