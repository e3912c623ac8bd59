"""The router as one application: what clients call, what operators call, and what it does by itself.

Law: nothing that was started here outlives the context. A router that is told to drain takes nothing new, says so on
`/health`, and lets what is under way come to its end, but not for ever.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
from collections.abc import AsyncIterator

from kvbaton.api.bodies import Kind
from kvbaton.api.errors import ApiError
from kvbaton.api.gather import cancel
from kvbaton.protocol.ids import PeerId
from kvbaton.router.desk import Desk
from kvbaton.router.dialects import TicketMinter
from kvbaton.router.directory import Worker, WorkerDirectory
from kvbaton.router.flow import Discard, Flow
from kvbaton.router.front import Front
from kvbaton.router.health import Health
from kvbaton.router.legs import LegError, Legs
from kvbaton.router.roster import Roster
from kvbaton.router.settings import RouterSettings
from kvbaton.router.stats import RouterStats
from kvbaton.router.talk import Handler

log = logging.getLogger(__name__)

LOOK_S = 0.25
"""How often the router looks whom to probe and who has left."""


class Router:
    """What the door leads to: paths, and who answers there."""

    def __init__(
        self, front: Front, desk: Desk, settings: RouterSettings, stats: RouterStats, minter: TicketMinter | None
    ) -> None:
        self._minter = minter
        self.body_bytes_max = settings.body_bytes_max
        self.body_s = settings.body_s
        self.stats = stats
        self.draining = front.draining
        self._routes: dict[str, dict[str, Handler]] = {
            Kind.COMPLETION.value: {"POST": front.completions},
            Kind.CHAT.value: {"POST": front.chat},
            Kind.RESPONSES.value: {"POST": front.responses},
            "/v1/models": {"GET": desk.models},
            "/health": {"GET": desk.health},
            "/workers": {"GET": desk.workers},
            "/metrics": {"GET": desk.metrics},
            "/stats": {"GET": desk.stats},
        }

    def handler(self, method: str, path: str) -> Handler:
        found = self._routes.get(path)
        if found is None:
            said = f"{method} {path[:200]}: no such path; there are {', '.join(self._routes)}"
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


@contextlib.asynccontextmanager
async def router_app(
    directory: WorkerDirectory,
    settings: RouterSettings,
    ticket_key: bytes | None = None,
    discard: Discard | None = None,
) -> AsyncIterator[Router]:
    """The router while its connections live; listen with `door.serving`.

    Without a key kvbaton's own workers are served by pull only. `discard` tells P of tickets that nobody will use.
    """
    health = Health(settings.suspect_s, settings.breaker_failures, settings.probe_min_s, settings.probe_max_s)
    roster = Roster(directory, health)
    stats = RouterStats()
    minter = None if ticket_key is None else TicketMinter(ticket_key, settings.ticket_ttl_s)
    draining = asyncio.Event()
    async with Legs.open(settings) as legs:
        if minter is not None:
            legs.token = minter.token
        flow = Flow(legs, roster, settings, stats, minter, discard)
        front = Front(flow, settings, stats, draining)
        desk = Desk(roster, legs, flow, settings, stats, draining)
        caring = asyncio.create_task(_Care(roster, legs, settings, stats).run())
        try:
            yield Router(front, desk, settings, stats, minter)
        finally:
            await cancel([caring])
            await flow.close()


class _Care:
    """Probes workers that broke, and breaks off what is under way with those that left."""

    def __init__(self, roster: Roster, legs: Legs, settings: RouterSettings, stats: RouterStats) -> None:
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
                    log.exception("looking after the workers failed; going on")
        finally:
            await cancel(list(self._probes.values()))

    def _look(self) -> None:
        now = asyncio.get_running_loop().time()
        view = self._roster.view(now)
        for peer in self._roster.departed():
            count = self._legs.drop(peer)
            self._stats.dropped += count
            if count:
                log.warning("%s left the list: %d requests to it are broken off", peer, count)
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

    async def _probe(self, worker: Worker) -> None:
        try:
            await self._legs.get(worker, "/health")
            answered = True
        except LegError:
            answered = False
        self._stats.probes["answered" if answered else "silent"] += 1
        self._roster.health.probed(worker.peer, answered, asyncio.get_running_loop().time())
        if answered:
            log.info("%s answers again; it is asked last for a while", worker.name)
