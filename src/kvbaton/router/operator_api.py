"""Endpoints for operators: models, health, workers and their state.

Law: nothing here changes anything; what changes a cluster is authenticated and goes through the registry.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

from kvbaton.api.api_errors import unavailable
from kvbaton.observe.metrics import exposition
from kvbaton.router import policy
from kvbaton.router.http.http_types import Answer, Request, json_answer
from kvbaton.router.request_flow import Flow
from kvbaton.router.router_settings import Fallback, RouterSettings
from kvbaton.router.router_stats import RouterStats
from kvbaton.router.worker_calls import LegError, Legs
from kvbaton.router.workers.available import AvailableWorkers, View
from kvbaton.router.workers.directory import ListedEngine, WorkerListState

_AUTH = b"authorization"
MODELS_ASKED_MAX = 3
"""Workers that are asked, one after the other, which models there are."""


class OperatorApi:
    """What operators call."""

    def __init__(
        self,
        roster: AvailableWorkers,
        legs: Legs,
        flow: Flow,
        settings: RouterSettings,
        stats: RouterStats,
        draining: asyncio.Event,
    ) -> None:
        self._roster = roster
        self._legs = legs
        self._flow = flow
        self._settings = settings
        self._stats = stats
        self._draining = draining

    async def models(self, request: Request) -> Answer:
        """What a worker serves; the first that answers speaks for all, since pairs are made of equals."""
        headers = [header for header in request.headers if header[0] == _AUTH]
        refused: LegError | None = None
        known = sorted(self._view().workers, key=lambda worker: worker.state is not WorkerListState.SERVING)
        for worker in known[:MODELS_ASKED_MAX]:
            try:
                data = await self._legs.get(worker, "/v1/models", headers, request.tab)
            except LegError as error:
                refused = error if error.final else refused
                continue
            return Answer(data)
        if refused is not None:
            raise refused.fault
        raise unavailable("no worker that could say which models there are", "no_worker")

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
        ready = status in ("ok", "degraded")
        return json_answer(body, 200 if ready else 503, None if ready else {"Retry-After": "1"})

    def _without_pairs(self, view: View) -> str:
        if self._settings.fallback is Fallback.LOCAL and policy.alone(view.workers, 0) is not None:
            return "degraded"
        return "unavailable"

    async def workers(self, _: Request) -> Answer:
        return json_answer({"workers": self.shown()})

    async def metrics(self, request: Request) -> Answer:
        openmetrics = exposition.wants_openmetrics(request.header(b"accept"))
        text = exposition.render(self._stats.families(self.numbers()), openmetrics=openmetrics)
        return Answer(text.encode(), content_type=exposition.content_type(openmetrics))

    async def stats(self, _: Request) -> Answer:
        return json_answer(self.numbers())

    def shown(self) -> list[dict[str, Any]]:
        """Each worker as `/workers` tells of it."""
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
        return {**numbers, "breakers_opened_total": opened, "workers": states, "pairs": pairs, "draining": draining}

    def _shown(self, worker: ListedEngine, view: View, is_paired: bool) -> dict[str, Any]:
        shown: dict[str, Any] = msgspec.to_builtins(worker)
        shown |= {"incarnation": f"{worker.incarnation:016x}", "tokens_under_way": self._flow.loads.get(worker.peer, 0)}
        if not is_paired:
            shown["unpaired"] = next(self._why_unpaired(worker, view))
        return shown

    def _why_unpaired(self, worker: ListedEngine, view: View) -> Iterator[str]:
        """Reasons why a worker serves nobody, the likeliest first."""
        if worker.state in (WorkerListState.BROKEN, WorkerListState.DRAINING):
            yield f"{worker.name} is {worker.state}"
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
