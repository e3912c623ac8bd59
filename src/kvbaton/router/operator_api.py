"""What the router answers by itself: models, version, health, workers and their state.

Law: nothing here changes anything; what changes a cluster is authenticated and goes through the registry.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import msgspec

from kvbaton import __version__
from kvbaton.api import bodies
from kvbaton.api.api_errors import ApiError, unavailable
from kvbaton.api.http.http_types import Answer, Request, json_answer, metrics_answer
from kvbaton.observe.metrics import exposition
from kvbaton.router import policy
from kvbaton.router.flow import hops
from kvbaton.router.flow.worker_calls import Legs
from kvbaton.router.flow.worker_leg import LegError
from kvbaton.router.route_table import BY_PATH, ServerRoute, Treatment
from kvbaton.router.router_settings import Fallback, RouterSettings
from kvbaton.router.router_stats import RouterStats
from kvbaton.router.workers.available import AvailableWorkers, View
from kvbaton.router.workers.directory import ListedEngine, WorkerListState
from kvbaton.router.workers.worker_load import Loads

_AUTH = b"authorization"
MODELS_ASKED_MAX = 3
"""Workers that are asked, one after the other, for what one says for all."""


VERSION_CHARS_MAX = 200
DESCRIBE_S = 20.0
"""For a worker's description of its API."""


class _Version(msgspec.Struct):
    version: str


class OperatorApi:
    """What operators call."""

    def __init__(
        self,
        roster: AvailableWorkers,
        legs: Legs,
        loads: Loads,
        settings: RouterSettings,
        stats: RouterStats,
        draining: asyncio.Event,
        hides_keys: bool = False,
    ) -> None:
        self._roster = roster
        self._legs = legs
        self._loads = loads
        self._settings = settings
        self._stats = stats
        self._draining = draining
        self._hides_keys = hides_keys  # of clients, from workers

    async def models(self, request: Request) -> Answer:
        return Answer(await self._told("/v1/models", request))

    async def version(self, request: Request) -> Answer:
        """The workers' version under the name that vLLM gives it, and this router's."""
        try:
            found = msgspec.json.decode(await self._told("/version", request), type=_Version)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            found = _Version("unknown")
        return json_answer({"version": found.version[:VERSION_CHARS_MAX], "kvbaton": __version__})

    async def load(self, _: Request) -> Answer:
        return json_answer({"server_load": self._stats.under_way})

    async def openapi(self, request: Request) -> Answer:
        try:
            told = await self._told("/openapi.json", request, DESCRIBE_S)  # FastAPI makes it when it is first asked
        except ApiError:  # a description without schemas is better than none
            told = b""
        found = await asyncio.to_thread(document, told, ("/workers", "/stats", "/flights", "/dashboard"))
        return json_answer(found)

    async def _told(self, path: str, request: Request, timeout_s: float | None = None) -> bytes:
        """What a worker says; the first that answers speaks for all, since pairs are made of equals."""
        passed = {hops.NAME} if self._hides_keys else {hops.NAME, _AUTH}
        headers = [header for header in request.headers if header[0] in passed]
        refused: LegError | None = None
        known = sorted(self._view().workers, key=lambda worker: worker.state is not WorkerListState.SERVING)
        for worker in [each for each in known if each.url][:MODELS_ASKED_MAX]:
            try:
                return await self._legs.get(worker, path, headers, request.tab, timeout_s)
            except LegError as error:
                refused = error if error.final else refused
        if refused is not None:
            raise refused.fault
        raise unavailable(f"no worker that could answer {path}", "no_worker")

    async def health(self, _: Request) -> Answer:
        """200 if a pair can serve the default mode or one that stands in for it, or if D may do without P."""
        view = self._view()
        pairs = {str(mode): len(view.pairs(mode)) for mode in self._settings.modes_allowed}
        status = "ok" if any(pairs.values()) else self._without_pairs(view)
        if self._draining.is_set():
            status = "draining"
        body: dict[str, Any] = {"status": status, "workers": _states(view), "pairs": pairs}
        if not any(pairs.values()):
            body["reason"] = policy.explain(view.workers, self._settings.mode)
        if status == "degraded":
            body["reason"] += "; until then decode workers compute prompts themselves (--fallback local)"
        ready = status in ("ok", "degraded")
        return json_answer(body, 200 if ready else 503, None if ready else {"Retry-After": "1"})

    def _without_pairs(self, view: View) -> str:
        if self._settings.fallback is Fallback.LOCAL and policy.alone(view.able_alone, 0) is not None:
            return "degraded"
        return "unavailable"

    async def workers(self, _: Request) -> Answer:
        left = self._roster.left(asyncio.get_running_loop().time())
        told = [{"name": w.name, "role": w.role, "url": w.url, "ago_s": round(ago_s, 1)} for ago_s, w in left]
        return json_answer({"workers": self.shown(), "left": told})

    async def metrics(self, request: Request) -> Answer:
        families = self._stats.families(self.numbers())
        return metrics_answer(request, lambda openmetrics: exposition.render(families, openmetrics=openmetrics))

    async def stats(self, _: Request) -> Answer:
        return json_answer(self.numbers())

    def shown(self) -> list[dict[str, Any]]:
        """Each worker as `/workers` tells of it."""
        self._loads.look(asyncio.get_running_loop().time())
        view = self._view()
        pairs = (pair for mode in self._settings.modes_allowed for pair in view.pairs(mode))
        paired = {peer for pair in pairs for peer in (pair.prefill.peer, pair.decode.peer)}
        return [self._shown(worker, view, worker.peer in paired) for worker in view.workers]

    def numbers(self) -> Mapping[str, Any]:
        """Counters and gauges, as `/stats` tells them."""
        states: dict[str, int] = {}
        view = self._view()
        for worker in view.workers:
            key = f"{worker.role}:{worker.state}"
            states[key] = states.get(key, 0) + 1
        pairs = {str(mode): len(view.pairs(mode)) for mode in self._settings.modes_allowed}
        numbers = {**self._stats.as_numbers(), **self._stats.elsewhere()}
        opened = self._roster.health.opened
        draining = self._draining.is_set()
        self._loads.look(asyncio.get_running_loop().time())
        tokens = {f"{each.role}:{each.name}": self._loads.tokens.get(each.peer, 0) for each in view.workers}
        more = {"workers": states, "worker_tokens": tokens, "pairs": pairs, "draining": draining}
        return {**numbers, "breakers_opened_total": opened, **more}

    def _shown(self, worker: ListedEngine, view: View, is_paired: bool) -> dict[str, Any]:
        shown: dict[str, Any] = msgspec.to_builtins(worker)
        shown |= {
            "incarnation": f"{worker.incarnation:016x}",
            "tokens_under_way": self._loads.tokens.get(worker.peer, 0),
        }
        if not is_paired:
            shown["unpaired"] = next(self._why_unpaired(worker, view))
        return shown

    def _why_unpaired(self, worker: ListedEngine, view: View) -> Iterator[str]:
        """Reasons why a worker serves nobody, the likeliest first."""
        if worker.state in (WorkerListState.BROKEN, WorkerListState.DRAINING):
            yield f"{worker.name} is {worker.state}"
        if worker.state is WorkerListState.NO_HTTP:
            yield f"{worker.name} has no HTTP address: it is inside another server, which asks it"
        others = [other for other in view.workers if other.peer != worker.peer]
        for other in others:
            for p, d in ((worker, other), (other, worker)):
                if p.prefills and d.decodes and (reason := policy.mismatch(p, d, self._settings.mode)) is not None:
                    yield reason
        yield policy.explain(view.workers, self._settings.mode)

    def _view(self) -> View:
        return self._roster.view(asyncio.get_running_loop().time())


def _states(view: View) -> dict[str, dict[str, int]]:
    states: dict[str, dict[str, int]] = {}
    for worker in view.workers:
        count = states.setdefault(worker.role, {})
        count[worker.state] = count.get(worker.state, 0) + 1
    return states


_NESTING_MAX = 64


class _Document(msgspec.Struct):
    openapi: str = "3.1.0"
    paths: dict[str, dict[str, msgspec.Raw]] = {}
    components: msgspec.Raw = msgspec.Raw(b"{}")


def document(worker: bytes, more: Iterable[str] = ()) -> dict[str, Any]:
    """`worker`: what one says, b"" if none does. `more`: paths that the router has besides those of a vLLM server."""
    told = _read(worker)
    paths = {
        route.path: _methods(route, told.paths.get(route.path, {})) for route in BY_PATH.values() if _is_here(route)
    }
    own = ServerRoute("", ("GET",), Treatment.ANSWERED, "the router's own, for operators")
    paths |= {path: _methods(own, {}) for path in more if path not in paths}
    info = {
        "title": "kvbaton router",
        "version": __version__,
        "description": "A vLLM server's API, answered by a cluster of prefill and decode workers.",
    }
    return {"openapi": told.openapi[:20], "info": info, "paths": paths, "components": told.components}


def _read(worker: bytes) -> _Document:
    if not worker or bodies.too_costly(worker, _NESTING_MAX):
        return _Document()
    try:
        worker.decode()  # fields that nobody reads go on as they came
        found = msgspec.json.decode(worker, type=_Document)
        msgspec.json.decode(bytes(found.components))  # it goes on as it came, so it must be JSON
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return _Document()
    return found


def _is_here(route: ServerRoute) -> bool:
    return route.treatment is not Treatment.REFUSED


def _methods(route: ServerRoute, told: Mapping[str, msgspec.Raw]) -> dict[str, Any]:
    plain = {"summary": route.note, "responses": {"200": {"description": "OK"}}}
    return {name: told.get(name, plain) for name in map(str.lower, route.methods)}
