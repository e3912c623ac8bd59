"""The parent of a router's processes: starts them, tells them who the workers are, and answers operators for all.

Laws: the port is taken before anything is started, and no child is left when the context ends. A child that ends is
started again, after a while that grows from one early death to the next; one that says nothing for `SILENT_S` hangs,
with every connection that the kernel gives it, and is killed. Children hear of a change among the workers within
`LOOK_S`. One process, this one, probes workers, and all go by its judgement. A child that does not answer delays an
operator's page by `ASK_S` at most, and is shown as it was last heard of.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping, Sequence
from secrets import token_bytes
from typing import Any

import msgspec

from kvbaton.api.api_errors import ApiError, internal
from kvbaton.api.gather import cancel
from kvbaton.api.http.http_types import Answer, Handler, Request, error_answer, url_of
from kvbaton.observe.flight.collector import Gathering
from kvbaton.observe.metrics import process_metrics
from kvbaton.processes import process_logs
from kvbaton.processes.child_process import ChildError
from kvbaton.router.app import OPERATORS_PATHS, Board, Pages, RouterParts, WorkerCare
from kvbaton.router.flow.hops import Hops
from kvbaton.router.flow.request_flow import Discard
from kvbaton.router.flow.worker_calls import Legs
from kvbaton.router.front_secrets import FrontSecrets
from kvbaton.router.operator_access import FlightsPage, Show
from kvbaton.router.operator_api import OperatorApi
from kvbaton.router.processes import shared_counts, shared_port
from kvbaton.router.processes.process_link import (
    ChildReady,
    ChildSetup,
    DrainChild,
    FromChild,
    FromParent,
    NewTicketKey,
    PageAnswer,
    PageAsked,
    RecordsTold,
    StandingsTold,
    StandingTold,
    TicketUnused,
    WorkerOutcome,
    WorkersListed,
)
from kvbaton.router.processes.router_process import RouterProcess
from kvbaton.router.processes.shared_counts import IN_FLIGHT, SharedCounts, SharedLoads, WorkerNumbers
from kvbaton.router.processes.shared_turns import turns_bytes
from kvbaton.router.router_settings import RouterSettings
from kvbaton.router.workers.available import AvailableWorkers
from kvbaton.router.workers.directory import WorkerDirectory

log = logging.getLogger(__name__)

PROCESSES_MAX = 64
LOOK_S = 0.01
ASK_S = 1.0
START_S = 60.0
AGAIN_S, AGAIN_S_MAX = 0.1, 5.0
SILENT_S = 30
"""Counted in looks of a second each, so that a machine that stood still counts as one."""
EARLY_S = 10.0
"""A child that ended sooner than this after its start ended early."""
_AT_ONCE = frozenset({"/health", "/ping", "/workers"})
"""Pages that are made of what the parent knows itself."""


class WorkerNews:
    """What children are told of workers, when it changes."""

    def __init__(self, directory: WorkerDirectory, parts: RouterParts) -> None:
        self._directory = directory
        self._parts = parts
        self._numbers = WorkerNumbers()
        self._seen: object = None
        self._revision = -1
        self._listed = WorkersListed((), ())
        self._standings = StandingsTold(())

    @property
    def all(self) -> list[FromParent]:
        """What one that has just started needs to know."""
        return [self._listed, self._standings]

    def fresh(self) -> list[FromParent]:
        """What has changed since the last time."""
        found: list[FromParent] = []
        workers = self._directory.snapshot()
        if workers is not self._seen:
            self._seen = workers
            numbers = self._numbers.of(worker.peer for worker in workers)
            self._listed = WorkersListed(tuple(workers), tuple(numbers[worker.peer] for worker in workers))
            found.append(self._listed)
            loads = self._parts.loads
            if isinstance(loads, SharedLoads):
                loads.know(numbers)
        health = self._parts.health
        if health.revision != self._revision:
            self._revision = health.revision
            self._standings = StandingsTold(
                tuple(
                    StandingTold(peer, record.failures, record.suspect_until, record.probe_at is not None)
                    for peer, record in health.records.items()
                )
            )
            found.append(self._standings)
        return found


class RouterParent:
    """A router of several processes, as what started it sees it."""

    def __init__(
        self,
        setup: ChildSetup,
        listeners: Sequence[socket.socket],
        gathering: Gathering,
        parts: RouterParts,
        news: WorkerNews,
        counts: SharedCounts,
        discard: Discard | None,
    ) -> None:
        self.gathering = gathering
        self.stats = shared_counts.MergedStats(self._merge)
        self.draining = asyncio.Event()
        self.pages: dict[str, Handler] = {}
        self.processes = [RouterProcess(index, gathering, self._heard) for index in range(setup.processes)]
        self._setup = setup
        self._listeners = listeners
        self._parts = parts
        self._news = news
        self._counts = counts
        self._discard = discard
        self._loop = asyncio.get_running_loop()
        self._tasks: set[asyncio.Task[None]] = set()
        self._looking = _Turns()

    @property
    def url(self) -> str:
        return url_of(self._listeners[0].getsockname(), is_tls=self._setup.secrets.tls is not None)

    def show(self, desk: OperatorApi, pages: Mapping[str, Handler]) -> None:
        """What operators are answered, whichever child they ask; before the start."""
        own = (desk.health, desk.health, desk.workers, desk.metrics, desk.stats)
        self.pages = {**dict(zip(OPERATORS_PATHS, own, strict=True)), **pages}
        self._setup = msgspec.structs.replace(self._setup, pages=tuple(pages))

    def set_ticket_key(self, key: bytes) -> None:
        """Sign with another key from now on. From any thread."""
        self._loop.call_soon_threadsafe(self._set_ticket_key, key)

    def _set_ticket_key(self, key: bytes) -> None:
        self._setup = msgspec.structs.replace(self._setup, ticket_key=key)
        self._to_all(NewTicketKey(key))

    async def drained(self, timeout_s: float) -> bool:
        """Take nothing new and wait for what is under way; False if some of it was still there in the end."""
        self.draining.set()
        self._to_all(DrainChild())
        until = self._loop.time() + timeout_s
        while (left := self._counts.total(IN_FLIGHT)) and self._loop.time() < until:
            await asyncio.sleep(0.02)
        return not left

    # --- processes

    async def start(self) -> None:
        """All of them, serving; `ChildError` if one does not come to that."""
        self._news.fresh()
        await asyncio.gather(*(self._start(each) for each in self.processes))
        for each in self.processes:
            self._begin(self._keep(each))
        self._begin(self._tell_news())
        self._begin(self._end_the_hung())

    async def close(self) -> None:
        await cancel(list(self._tasks))
        await asyncio.gather(*(each.stop() for each in self.processes))
        for listener in self._listeners:
            listener.close()

    async def _start(self, process: RouterProcess) -> None:
        setup = self._setup
        env = {"PYTHONHASHSEED": str(int.from_bytes(setup.quota_key[:4], "little"))}
        await process.start([*setup.listeners, setup.counts], env, lambda: self._told_first(process.index))
        child = process.child
        assert child is not None
        serving, gone = asyncio.create_task(process.ready.wait()), asyncio.create_task(child.process.wait())
        try:
            await asyncio.wait((serving, gone), timeout=START_S, return_when=asyncio.FIRST_COMPLETED)
            if not process.ready.is_set():
                what = "did not serve in time" if child.is_alive else child.how_it_ended()
                raise ChildError(f"{child.name} {what}; what it said is above")
        finally:
            await cancel([serving, gone])

    def _told_first(self, index: int) -> list[FromParent]:
        drain = [DrainChild()] if self.draining.is_set() else []
        return [msgspec.structs.replace(self._setup, index=index), *self._news.all, *drain]

    async def _keep(self, process: RouterProcess) -> None:
        """Start it again whenever it has ended, until the router drains."""
        again_s, begun = AGAIN_S, self._loop.time()
        while True:
            await process.ended()
            self._counts.clear(process.index)
            if self.draining.is_set():
                return
            child = process.child
            assert child is not None
            again_s = min(2 * again_s, AGAIN_S_MAX) if self._loop.time() - begun < EARLY_S else AGAIN_S
            log.warning("[router-process] %s %s; another starts in %.1f s", child.name, child.how_it_ended(), again_s)
            await asyncio.sleep(again_s)
            if self.draining.is_set():
                return
            self.stats.restarts += 1
            begun = self._loop.time()
            try:
                await self._start(process)
            except (ChildError, OSError) as error:
                log.error("[router-process] %s", error)
                await process.stop()

    async def _end_the_hung(self) -> None:
        """A child tells its figures four times a second; `_keep` starts one that was killed again."""
        while True:
            await asyncio.sleep(1.0)
            for each in self.processes:
                if each.is_silent(SILENT_S) and each.child is not None:
                    log.error("[router-process] %s has said nothing for %d s; killing it", each.child.name, SILENT_S)
                    each.child.signal(signal.SIGKILL)

    async def _tell_news(self) -> None:
        while True:
            await asyncio.sleep(LOOK_S)
            try:
                for message in self._news.fresh():
                    self._to_all(message)
            except Exception:  # a directory that fails must not end it for ever
                log.exception("[upkeep-failed] telling processes of workers failed; going on")

    def _to_all(self, message: FromParent) -> None:
        for each in self.processes:
            each.send(message)

    def _begin(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    # --- what children say

    def _heard(self, process: RouterProcess, message: FromChild) -> None:
        match message:
            case ChildReady():
                process.ready.set()
            case PageAsked():
                self._begin(self._answer(process, process.life, message))
            case RecordsTold():
                process.level = message.level
                self.gathering.level = max(each.level for each in self.processes)
                for flight in message.noted:
                    self.gathering.note(flight)
                for flight in message.amended:
                    self.gathering.amend(flight)
            case WorkerOutcome():
                if message.failed:
                    self._parts.health.failed(message.peer, self._loop.time())
                else:
                    self._parts.health.ok(message.peer)
            case TicketUnused():
                if self._discard is not None:
                    self._discard(message.worker, message.ticket)

    async def _answer(self, process: RouterProcess, life: int, asked: PageAsked) -> None:
        request = Request(asked.method, asked.path, asked.headers, b"", asked.query, asked.peer)
        try:
            if asked.path not in _AT_ONCE:
                await self._looking.take(self._look)
            found = await self.pages[asked.path](request)
            assert isinstance(found, Answer), "operators' pages are no streams"
        except ApiError as error:
            found = error_answer(error.told_to(request.path, request.id))
        except Exception:
            log.exception("[request-crashed] %s %s", asked.method, asked.path[:200])
            found = error_answer(internal().told_to(request.path, request.id))
        if process.life == life:  # the next one counts its own questions, from 1 on
            process.send(PageAnswer(asked.number, found.status, dict(found.headers), found.content_type, found.body))

    async def _look(self) -> None:
        """Have all tell their figures."""
        await asyncio.gather(*(each.ask(ASK_S) for each in self.processes))

    def _merge(self) -> None:
        """Sum up what all told last; what is under way is in memory that they share."""
        figures = [
            shared_counts.counted(self._parts.stats),
            *(part for each in self.processes for part in each.figures),
        ]
        shared_counts.merge(self.stats, figures)
        self.stats.used = process_metrics.together(each.process for each in figures)
        self.stats.in_flight = self._counts.total(IN_FLIGHT)
        self.stats.processes = sum(each.ready.is_set() for each in self.processes)


class _Turns:
    """One look at a time, for all who asked before it began."""

    def __init__(self) -> None:
        self._lock = asyncio.Lock()
        self._asked = self._served = 0

    async def take(self, look: Callable[[], Awaitable[None]]) -> None:
        self._asked += 1
        mine = self._asked
        async with self._lock:
            if self._served < mine:
                self._served = self._asked
                await look()


@contextlib.asynccontextmanager
async def router_processes(
    processes: int,
    host: str,
    port: int,
    directory: WorkerDirectory,
    settings: RouterSettings,
    ticket_key: bytes | None = None,
    discard: Discard | None = None,
    *,
    name: str = "router",
    gathering: Gathering | None = None,
    show: Show | None = None,
    pages: Pages | None = None,
    secrets: FrontSecrets | None = None,
) -> AsyncIterator[RouterParent]:
    """A router of several processes, serving on one port while the context lasts. The rest as of `app.router_app`."""
    gathering = Gathering() if gathering is None else gathering
    async with contextlib.AsyncExitStack() as stack:
        listeners = await shared_port.bound(host, port)
        for each in listeners:
            stack.callback(each.close)
        counts = SharedCounts.made(processes, settings.prefix_pieces_max, turns_bytes(settings.turn_s))
        stack.callback(counts.close)
        parts = RouterParts.alone(settings)
        parts.loads = SharedLoads(counts, None)
        roster = AvailableWorkers(directory, parts.health)
        setup = ChildSetup(
            0, processes, settings, name, ticket_key, (), tuple(each.fileno() for each in listeners), counts.file,
            token_bytes(16), process_logs.current(), secrets or FrontSecrets(),
        )  # fmt: skip
        parts.hops = Hops(setup.quota_key)
        for each in listeners:
            parts.hops.listens(each.getsockname())
        legs = await stack.enter_async_context(Legs.open(settings, parts.hops))
        if setup.secrets.worker_key:
            legs.key = (b"Authorization", f"Bearer {setup.secrets.worker_key}".encode())
        parent = RouterParent(setup, listeners, gathering, parts, WorkerNews(directory, parts), counts, discard)
        desk = OperatorApi(roster, legs, parts.loads, settings, parent.stats, parent.draining)
        board = Board(gathering, desk.shown, desk.numbers, settings, desk.health)
        parent.show(desk, {"/flights": FlightsPage(gathering, show).answer, **({} if pages is None else pages(board))})
        caring = asyncio.create_task(WorkerCare(roster, legs, settings, parts.stats, None).run())
        stack.push_async_callback(cancel, [caring])
        stack.push_async_callback(parent.close)
        await parent.start()
        yield parent
