"""The router as one application: what clients call, what operators call, and what it does by itself.

Law: nothing that was started here outlives the context. A router that is told to drain takes nothing new, says so on
`/health`, and lets what is under way come to its end, but not for ever.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import msgspec

from kvbaton.api import bodies
from kvbaton.api.api_errors import ApiError
from kvbaton.api.gather import cancel
from kvbaton.api.http.client_quotas import ClientQuotas, connections_max
from kvbaton.api.http.http_types import Answer, Events, Handler, Request
from kvbaton.api.http.path_site import handler_of
from kvbaton.api.request_ids import clients_request_id
from kvbaton.control.registry.roster_news import RosterNews, WorkerSeen
from kvbaton.observe.flight.collector import Gathering
from kvbaton.protocol.ids import PeerId
from kvbaton.router.flow.dialect_table import TicketMinter
from kvbaton.router.flow.hops import Hops
from kvbaton.router.flow.owned_streams import OwnedStreams
from kvbaton.router.flow.request_flow import Discard, Flow
from kvbaton.router.flow.worker_calls import Legs
from kvbaton.router.flow.worker_leg import LegError
from kvbaton.router.front_access import AUTHORIZATION, OPEN_PATHS, Cors, FrontKeys
from kvbaton.router.front_secrets import FrontSecrets
from kvbaton.router.openai_api import NOT_TO_WORKERS, OpenAiApi
from kvbaton.router.operator_access import FlightsPage, Show, guarded, why_not
from kvbaton.router.operator_api import OperatorApi
from kvbaton.router.passing import Passing
from kvbaton.router.route_table import BY_PATH, Treatment, of, refusal
from kvbaton.router.router_flights import LogBook
from kvbaton.router.router_settings import OperatorPages, RouterSettings
from kvbaton.router.router_stats import RouterStats
from kvbaton.router.turns.turn_book import TurnTable
from kvbaton.router.workers.available import AvailableWorkers
from kvbaton.router.workers.directory import ListedEngine, WorkerDirectory
from kvbaton.router.workers.health import Health
from kvbaton.router.workers.prefixes import Prefixes
from kvbaton.router.workers.worker_load import Loads

_NONE = msgspec.Raw(b"null")


class _Shape(msgspec.Struct):
    messages: msgspec.Raw = _NONE
    prompt: msgspec.Raw = _NONE
    prompt_embeds: msgspec.Raw = _NONE


class Invocations:
    """One path for several APIs."""

    def __init__(self, front: OpenAiApi, passing: Passing) -> None:
        self._front = front
        self._passing = passing

    async def answer(self, request: Request) -> Answer | Events:
        found = _shape(request.body)
        if _is_there(found.messages):
            return await self._front.chat(request)
        if _is_there(found.prompt) or _is_there(found.prompt_embeds):
            return await self._front.completions(request)
        return await self._passing.answer(BY_PATH["/invocations"], request)


def _is_there(value: msgspec.Raw) -> bool:
    return bytes(value) != b"null"


def _shape(data: bytes) -> _Shape:
    bodies.check(data)
    try:
        return msgspec.json.decode(data, type=_Shape)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return _Shape()  # whoever reads all of it says what is wrong


log = logging.getLogger(__name__)

OPERATORS_PATHS = ("/health", "/ping", "/workers", "/metrics", "/stats")
"""What every operator may see, of the router as a whole."""
LOOK_S = 0.25
"""How often the router looks whom to probe and who has left."""


class Board(msgspec.Struct, frozen=True):
    """What pages for operators are made from."""

    gathering: Gathering  # flights, journeys, what workers told; from any thread
    workers: Callable[[], list[dict[str, Any]]]  # as `/workers` shows them; on the event loop
    stats: Callable[[], Mapping[str, Any]]  # as `/stats` shows them; on the event loop
    settings: RouterSettings
    health: Handler  # as `/health` answers


Pages = Callable[[Board], Mapping[str, Handler]]
"""Makes further pages: path to handler (`talk.Handler`: `async (Request) -> Answer | Events`), for GET and HEAD.

Called once, while the router starts, on its event loop. The router guards each page by `operator_pages` itself (403 for
whoever may not see it), and lists it among its paths. `Request.query` has what follows the question mark.
"""


@dataclass(slots=True)
class RouterParts:
    """What one process of a router may share with its others; by default it has none."""

    stats: RouterStats
    health: Health
    loads: Loads
    prefixes: Prefixes
    turns: TurnTable
    operators: Handler | None = None  # answers operators in the place of this process
    probes: bool = True  # whether it is this process that probes workers
    hops: Hops = field(default_factory=Hops)

    @classmethod
    def alone(cls, settings: RouterSettings) -> RouterParts:
        return cls(
            RouterStats(room=ClientQuotas(settings.held_bytes_max)),
            Health(settings.suspect_s, settings.breaker_failures, settings.probe_min_s, settings.probe_max_s),
            Loads(),
            Prefixes(settings.prefix_pieces_max),
            TurnTable(),
        )


class RunningRouter(Protocol):
    """A router as what started it sees it: of one process, or of several."""

    @property
    def gathering(self) -> Gathering: ...
    @property
    def stats(self) -> RouterStats: ...
    def set_ticket_key(self, key: bytes) -> None: ...
    async def drained(self, timeout_s: float) -> bool: ...


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
        passing: Passing,
        keys: FrontKeys,
        operators: Handler | None = None,
        hops: Hops | None = None,
    ) -> None:
        self.gathering = gathering
        self._hops = hops or Hops()
        self._minter = minter
        self.body_bytes_max = settings.body_bytes_max
        self.body_s = settings.body_s
        self.connections_max = connections_max()
        self.room = stats.room
        self.stats = stats
        self.draining = front.draining
        self._keys = keys
        self._cors = Cors(
            settings.origins_allowed, settings.cors_methods, settings.cors_headers, settings.cors_credentials
        )
        self._routes: dict[str, dict[str, Handler]] = {
            "/v1/completions": {"POST": front.completions},
            "/v1/chat/completions": {"POST": front.chat},
            "/v1/responses": {"POST": front.responses},
            "/v1/messages": {"POST": front.messages},
            "/invocations": {"POST": Invocations(front, passing).answer},
            "/v1/models": {"GET": desk.models},
            "/health": {"GET": desk.health},
            "/ping": {"GET": desk.health, "POST": desk.health},
            "/version": {"GET": desk.version},
            "/load": {"GET": desk.load},
            "/metrics": {"GET": desk.metrics},
            "/openapi.json": {"GET": desk.openapi},
            "/workers": {"GET": desk.workers},
            "/stats": {"GET": desk.stats},
        }
        if operators is not None:
            self._routes |= {path: dict.fromkeys(self._routes[path], operators) for path in OPERATORS_PATHS}
        for route in of(Treatment.PASSED):
            self._routes[route.path] = dict.fromkeys(route.methods, passing.handler(route))
        for path, handler in pages.items():
            self._routes[path] = {"GET": guarded(handler, settings.operator_pages, keys)}
        self._pages = frozenset(pages)
        self._guarded = self._pages if settings.operator_pages is not OperatorPages.OPEN else frozenset()

    @property
    def paths(self) -> tuple[str, ...]:
        """Everything that is answered."""
        return tuple(self._routes)

    @property
    def _main_paths(self) -> list[str]:
        """Those that a person would ask for, without what pages are made of and what is passed to a worker."""
        passed = {route.path for route in of(Treatment.PASSED)}
        return [path for path in self._routes if path.rpartition("/")[0] not in self._pages and path not in passed]

    def listens(self, address: Sequence[Any]) -> None:
        self._hops.listens(address)

    def name_of(self, given: str) -> str:
        return clients_request_id(given)

    def misread(self, fault: ApiError) -> None:
        pass  # the access log has it

    def admit(self, request: Request) -> None:
        self._hops.check(request)
        if not self._keys.clients or request.method == "OPTIONS" or request.path in OPEN_PATHS:
            return
        path = request.path.rstrip("/")
        if path in self._guarded:  # a client's key opens none of them: whoever may not see one is told what does
            return
        # What operators see on the router's own machine they see without a key: a browser there has none to send
        is_page = path in self._pages or request.path in ("/workers", "/stats")
        if not (is_page and why_not(request, OperatorPages.AUTO, self._keys) == ""):
            self._keys.clients.check(request)

    def answer_headers(self, request: Request) -> Mapping[str, str]:
        return self._cors.answer_headers(request)

    def refresh(self) -> None:
        self._keys.refresh()

    def handler(self, method: str, path: str) -> Handler:
        found = self._routes.get(path)
        if found is None and path[:-1] in self._pages and path.endswith("/") and method in ("GET", "HEAD"):
            return _without_slash
        if found is None:
            said = f"{method} {path[:200]}: no such path; there are {', '.join(self._main_paths)}, more: /openapi.json"
            raise refusal(path) or ApiError(404, said, code="not_found")
        if method == "OPTIONS":
            return functools.partial(self._options, found)
        return handler_of(found, method, path)

    async def _options(self, found: Mapping[str, Handler], request: Request) -> Answer:
        return self._cors.preflight(request, [*found, *(["HEAD"] if "GET" in found else []), "OPTIONS"])

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
    parts: RouterParts | None = None,
    secrets: FrontSecrets | None = None,
) -> AsyncIterator[Router]:
    """The router while its connections live; listen with `door.serving`.

    Without a key kvbaton's own workers are served by pull only. `discard` tells P of tickets that nobody will use.
    What becomes of requests is kept in `gathering`, under `name`; `show` has workers tell it more; `pages` adds to what
    operators can see; `parts` are what this process shares with others of the same router; `secrets`: what clients must
    show, and workers want to be shown.
    """
    secrets = secrets or FrontSecrets()
    keys = secrets.front_keys()
    hides_keys = bool(secrets.worker_key) or not settings.passes_authorization
    hidden = NOT_TO_WORKERS | AUTHORIZATION if hides_keys else NOT_TO_WORKERS
    gathering = Gathering() if gathering is None else gathering
    parts = RouterParts.alone(settings) if parts is None else parts
    roster = AvailableWorkers(directory, parts.health)
    stats = parts.stats
    minter = None if ticket_key is None else TicketMinter(ticket_key, settings.ticket_ttl_s)
    draining = asyncio.Event()
    async with Legs.open(settings, parts.hops) as legs:
        if minter is not None:
            legs.token = minter.token
        if secrets.worker_key:
            legs.key = (b"Authorization", f"Bearer {secrets.worker_key}".encode())
        log_book = LogBook(gathering, name, settings.trace)
        flow = Flow(legs, roster, settings, stats, minter, discard, log_book, parts.loads, parts.prefixes, parts.turns)
        streams = OwnedStreams(flow, roster, settings, stats, can_sign=minter is not None)
        front = OpenAiApi(flow, streams, settings, stats, draining, hidden)
        passing = Passing(legs, roster, flow, settings, stats, draining, hidden)
        desk = OperatorApi(roster, legs, parts.loads, settings, stats, draining, hides_keys)
        board = Board(gathering, desk.shown, desk.numbers, settings, desk.health)
        more = {"/flights": FlightsPage(gathering, show).answer, **({} if pages is None else pages(board))}
        care = WorkerCare(roster, legs, settings, stats, streams, probes=parts.probes)
        caring = asyncio.create_task(care.run())
        try:
            yield Router(
                front, desk, settings, stats, minter, gathering, more, passing, keys, parts.operators, parts.hops
            )
        finally:
            await cancel([caring])
            await flow.close()


class WorkerCare:
    """Probes workers that broke, breaks off what is under way with those that left, and logs who comes and goes."""

    def __init__(
        self,
        roster: AvailableWorkers,
        legs: Legs,
        settings: RouterSettings,
        stats: RouterStats,
        streams: OwnedStreams | None,
        *,
        probes: bool = True,
    ) -> None:
        self._may_probe = probes  # the one process that probes also logs who comes and goes
        self._news = RosterNews()
        self._roster = roster
        self._legs = legs
        self._settings = settings
        self._stats = stats
        self._streams = streams
        self._probes: dict[PeerId, asyncio.Task[None]] = {}

    async def run(self) -> None:
        try:
            while True:
                await asyncio.sleep(LOOK_S)
                try:
                    self._look()
                except Exception:  # a directory that fails must not end probing for ever
                    log.exception("[upkeep-failed] worker health checks failed; continuing")
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
        if self._streams is not None:
            self._streams.drain()
        if not self._may_probe:
            return
        self._news.look(
            WorkerSeen(each.name, each.incarnation, each.role, each.url, each.state.value) for each in view.workers
        )
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
