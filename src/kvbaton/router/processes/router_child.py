"""One of the processes that serve a router's clients: `python -m kvbaton.router.processes.router_child LINK …`.

Laws: it knows of workers what the parent tells it, and asks them itself. What operators ask goes to the parent, which
knows of all processes. What becomes of requests is told in batches, so that a request never waits for the parent. It
ends when the parent does, at once; on SIGTERM it first finishes what it has, on SIGINT it does not.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import itertools
import os
import runpy
import signal
import socket
import sys
from collections.abc import Callable, Sequence

from kvbaton.api.api_errors import unavailable
from kvbaton.api.gather import cancel
from kvbaton.api.http.http_server import attended
from kvbaton.api.http.http_types import REQUEST_ID, Answer, Request
from kvbaton.api.http.server_loop import run as run_loop
from kvbaton.observe.flight.collector import FLIGHTS_PER_S, Gathering
from kvbaton.observe.flight.flight_records import Flight
from kvbaton.processes import process_logs
from kvbaton.protocol.ids import PeerId
from kvbaton.router.app import Router, RouterParts, router_app
from kvbaton.router.flow.hops import Hops
from kvbaton.router.processes import shared_counts
from kvbaton.router.processes.process_link import (
    ChildReady,
    ChildSetup,
    DrainChild,
    FiguresTold,
    FromParent,
    NewTicketKey,
    PageAnswer,
    PageAsked,
    ProcessLink,
    RecordsTold,
    StandingsTold,
    TellFigures,
    TicketUnused,
    WorkerOutcome,
    WorkersListed,
    read_from_parent,
)
from kvbaton.router.processes.shared_counts import (
    SharedCounts,
    SharedLoads,
    SharedPrefixes,
    SharedQuotas,
    SharedStats,
)
from kvbaton.router.processes.shared_port import SharedPort
from kvbaton.router.processes.shared_turns import SharedTurns, turns_bytes
from kvbaton.router.workers.directory import ListedEngine
from kvbaton.router.workers.health import Health, HealthRecord, WorkerStanding

TELL_S = 0.25
"""How often figures and records are told unasked."""
RECORDS_MAX = 1024
"""That wait to be told."""
PAGES_MAX = 64
"""Questions that the parent has not answered yet, of clients that have gone too: it works on them all the same."""
PAGE_S = 10.0
LIVE_MAX = 200
ORPHANED = 3
"""The exit status of a child whose parent is gone."""


class ChildDirectory:
    """The workers as the parent told last."""

    def __init__(self) -> None:
        self.workers: tuple[ListedEngine, ...] = ()

    def snapshot(self) -> Sequence[ListedEngine]:
        return self.workers


class ChildHealth(Health):
    """Takes the parent's word, and acts on what it sees itself until that comes."""

    def __init__(self, told: Callable[[WorkerOutcome], object], *bounds: float) -> None:
        suspect_s, breaker_failures, probe_min_s, probe_max_s = bounds
        super().__init__(suspect_s, int(breaker_failures), probe_min_s, probe_max_s)
        self._told = told

    def failed(self, peer: PeerId, now: float) -> WorkerStanding | None:
        self._told(WorkerOutcome(peer, True))
        return super().failed(peer, now)

    def ok(self, peer: PeerId) -> None:
        before = self.revision
        super().ok(peer)
        if self.revision != before:  # something was held against it, or against the rank that stands for it
            self._told(WorkerOutcome(peer, False))


class ChildGathering(Gathering):
    """Passes records on instead of keeping them."""

    def __init__(self, flights_per_s: float) -> None:
        super().__init__(flights_per_s=flights_per_s)
        self._noted: list[Flight] = []
        self._amended: list[Flight] = []

    def note(self, flight: Flight) -> None:
        if len(self._noted) < RECORDS_MAX:
            self._noted.append(flight)

    def amend(self, flight: Flight) -> None:
        if len(self._amended) < RECORDS_MAX:
            self._amended.append(flight)

    def taken(self) -> RecordsTold | None:
        """What has not been told yet; None if nothing."""
        if not self._noted and not self._amended:
            return None
        found = RecordsTold(self.level, tuple(self._noted), tuple(self._amended))
        self._noted, self._amended = [], []
        return found


class _Signals:
    """SIGTERM: finish and end. SIGINT, the parent's: end. SIGUSR2 is for the parent, which keeps the records."""

    def __init__(self) -> None:
        self.any = asyncio.Event()
        self.end = asyncio.Event()
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGTERM, self.any.set)
        loop.add_signal_handler(signal.SIGINT, self._end)
        signal.signal(signal.SIGUSR2, signal.SIG_IGN)

    def _end(self) -> None:
        self.end.set()
        self.any.set()


class RouterChild:
    """A child's life, from `ChildSetup` on."""

    def __init__(self) -> None:
        self._link: ProcessLink = ProcessLink(self._heard, self._orphaned)  # until the real one is there
        self._setup: asyncio.Future[ChildSetup] = asyncio.get_running_loop().create_future()
        self._directory = ChildDirectory()
        self._parts: RouterParts | None = None
        self._gathering = ChildGathering(FLIGHTS_PER_S)
        self._app: Router | None = None
        self._pages: dict[int, asyncio.Future[PageAnswer]] = {}
        self._page_numbers = itertools.count(1)
        self._waiting: list[FromParent] = []  # what came before there was a router

    async def run(self, link: int) -> int:
        self._link = await ProcessLink.over(socket.socket(fileno=link), self._heard, self._orphaned)
        setup = await self._setup
        settings = setup.settings
        process_logs.configure(setup.logs)
        told = _Signals()
        counts = SharedCounts(setup.counts, setup.processes, settings.prefix_pieces_max, turns_bytes(settings.turn_s))
        row = counts.row(setup.index)
        room = SharedQuotas(counts, row, setup.quota_key, settings.held_bytes_max)
        bounds = (settings.suspect_s, settings.breaker_failures, settings.probe_min_s, settings.probe_max_s)
        self._gathering = ChildGathering(FLIGHTS_PER_S / setup.processes)
        self._parts = RouterParts(
            SharedStats(counts, row, room),
            ChildHealth(self._link.send, *bounds),
            SharedLoads(counts, row),
            SharedPrefixes(counts),
            SharedTurns(counts.turns, setup.quota_key),
            operators=self._relayed,
            probes=False,
            hops=Hops(setup.quota_key),
        )
        listeners = [socket.socket(fileno=each) for each in setup.listeners]
        async with router_app(
            self._directory,
            settings,
            setup.ticket_key,
            self._discarded,
            name=setup.name,
            gathering=self._gathering,
            pages=lambda _: dict.fromkeys(setup.pages, self._relayed),
            parts=self._parts,
            secrets=setup.secrets,
        ) as app:
            self._app = app
            for each in listeners:
                app.listens(each.getsockname())
            for message in self._waiting:
                self._obey(message)
            async with attended(app, setup.secrets.tls_files()) as door:
                port = SharedPort(door, listeners, counts, setup.index)
                try:
                    self._link.send(ChildReady())
                    await self._until(told, port)
                finally:
                    port.close()
            self._tell(0)
        return 0

    async def _until(self, told: _Signals, port: SharedPort) -> None:
        """Tell figures now and then until a signal comes; then finish what is under way, unless another comes."""
        assert self._app is not None
        while not told.any.is_set():
            self._tell(0)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(TELL_S):
                    await told.any.wait()
        if not told.end.is_set():
            if not self._app.draining.is_set():
                port.close()  # it ends alone: the others take what comes
            draining = asyncio.create_task(self._app.drained(self._setup.result().settings.drain_s))
            ending = asyncio.create_task(told.end.wait())
            await asyncio.wait((draining, ending), return_when=asyncio.FIRST_COMPLETED)
            await cancel([draining, ending])

    def _tell(self, number: int) -> None:
        parts = self._parts
        if parts is None:
            return
        ended = self._gathering.taken()
        live = tuple(self._gathering.under_way(LIVE_MAX)) if number else ()
        figures = FiguresTold(number, shared_counts.counted(parts.stats), live)
        # An answer comes last, when all is told. Else records do: who counts when one comes finds the figures there
        for message in (ended, figures) if number else (figures, ended):
            if message is not None:
                self._link.send(message, spare=message is ended or not number)

    def _discarded(self, worker: ListedEngine, ticket: str) -> None:
        """Where it cannot be told, its lease runs out."""
        self._link.send(TicketUnused(worker, ticket), spare=True)

    async def _relayed(self, request: Request) -> Answer:
        """What the parent answers."""
        if len(self._pages) >= PAGES_MAX:
            raise unavailable(f"{PAGES_MAX} questions of operators wait for an answer", "no_room")
        number = next(self._page_numbers)
        waiting = self._pages[number] = asyncio.get_running_loop().create_future()
        headers = [*(each for each in request.headers if each[0] != REQUEST_ID), (REQUEST_ID, request.id.encode())]
        try:
            self._link.send(PageAsked(number, request.method, request.path, request.query, headers, request.peer))
            async with asyncio.timeout(PAGE_S):
                told = await waiting
        except TimeoutError:
            raise unavailable(f"no answer of the router's first process within {PAGE_S} s", "no_room") from None
        return Answer(told.body, told.status, told.headers, told.content_type)

    # --- the parent's messages

    def _heard(self, data: bytes) -> None:
        message = read_from_parent(data)
        if isinstance(message, ChildSetup):
            self._setup.set_result(message)
        elif self._app is None:
            self._waiting.append(message)
        else:
            self._obey(message)

    def _obey(self, message: FromParent) -> None:
        app, parts = self._app, self._parts
        assert app is not None and parts is not None
        match message:
            case WorkersListed():
                numbers = {each.peer: number for each, number in zip(message.workers, message.numbers, strict=True)}
                for each in (parts.loads, parts.prefixes, parts.turns):
                    assert isinstance(each, SharedLoads | SharedPrefixes | SharedTurns)
                    each.know(numbers)
                self._directory.workers = message.workers
            case StandingsTold():
                parts.health.replace(
                    {
                        each.peer: HealthRecord(each.failures, each.suspect_until, 0.0 if each.is_broken else None)
                        for each in message.standings
                    }
                )
            case NewTicketKey():
                app.set_ticket_key(message.key)
            case DrainChild():
                app.draining.set()
            case TellFigures():
                self._tell(message.number)
            case PageAnswer():
                waiting = self._pages.pop(message.number, None)
                if waiting is not None and not waiting.done():
                    waiting.set_result(message)

    def _orphaned(self) -> None:
        """Nothing is left to finish: a router that was killed breaks off what it had."""
        os._exit(ORPHANED)


def main() -> None:
    process_logs.configure(process_logs.LogSettings())
    for script in sys.argv[2:]:
        runpy.run_path(script, run_name="kvbaton_router_child")  # not as the main module: it does not start anything
    gc.freeze()  # as the command does
    gc.set_threshold(50_000, 20, 50)

    async def live() -> int:
        return await RouterChild().run(int(sys.argv[1]))

    sys.exit(run_loop(live()))


if __name__ == "__main__":
    main()
