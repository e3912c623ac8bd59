"""Requests that one worker answers by itself: tokens of a text, embeddings, scores, speech, as vLLM's server has them.

Laws: what is passed computes and changes nothing, so another worker may be asked while no byte has gone to the client,
as often as another D would be. A body goes on as it came, but none that could say where KV comes from. Of the worker's
headers the client sees the type of the body, which no browser can take for a page, and what the API knows.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import itertools
import logging
import re
from collections.abc import AsyncGenerator

import msgspec

from kvbaton.api.api_errors import ApiError, bare, out_of_time
from kvbaton.api.bodies import json_object
from kvbaton.api.http import http_client
from kvbaton.api.http.http_types import Answer, Events, Handler, Header, Request
from kvbaton.router import policy
from kvbaton.router.flow.request_admission import (
    UnderWay,
    check_form,
    check_request,
    check_steering_anywhere,
    hold_body,
)
from kvbaton.router.flow.request_flow import STALE_MAX, Flow
from kvbaton.router.flow.worker_calls import EventStream, Legs
from kvbaton.router.flow.worker_leg import Leg, LegError, WorkerAnswer
from kvbaton.router.openai_api import NOT_TO_WORKERS, passed
from kvbaton.router.policy import NO_DOUBTS, Doubts, Weights
from kvbaton.router.route_table import ServerRoute
from kvbaton.router.router_settings import RouterSettings
from kvbaton.router.router_stats import RouterStats, count
from kvbaton.router.workers.available import AvailableWorkers
from kvbaton.router.workers.directory import ListedEngine
from kvbaton.router.workers.worker_load import WorkerLoad

log = logging.getLogger(__name__)

TYPES = frozenset(["application/json", "application/octet-stream", "text/plain", "text/vtt", "application/x-subrip"])
"""Of answers; any other is told as bytes without a type, so that no worker puts a page on the router's address."""
_BYTES = "application/octet-stream"
FORM = "multipart/form-data"
_FORM_TYPE = re.compile(
    rf'{FORM}\s*(?:;\s*charset="?utf-8"?\s*)?;\s*boundary=(?:"[^"\\]+"|[^\s;"*]+)\s*(?:;\s*charset="?utf-8"?\s*)?',
    re.IGNORECASE,
)
"""Nothing else: by another charset (`utf-7`) a worker would read names of fields that nobody sees here."""
_WITHOUT_KV = ("tokenize", "/tokenizer_info", "/count_tokens", "/render", "/derender")
"""Ends of the paths for which no engine computes: any worker answers these."""
_METADATA = b"metadata"  # vLLM's description of embeddings that are sent as bytes


class _Asked(msgspec.Struct, frozen=True):
    """One request as it goes to a worker."""

    route: ServerRoute
    headers: list[Header]
    body: bytes | None
    content_type: bytes
    name: str
    deadline: float


class Passing:
    """Sends requests on to one worker. One per router."""

    def __init__(
        self,
        legs: Legs,
        roster: AvailableWorkers,
        flow: Flow,
        settings: RouterSettings,
        stats: RouterStats,
        draining: asyncio.Event,
        hidden: frozenset[bytes] = NOT_TO_WORKERS,
    ) -> None:
        self._legs = legs
        self._roster = roster
        self._flow = flow
        self._settings = settings
        self._stats = stats
        self._draining = draining
        self._hidden = hidden
        self._turns = itertools.count()

    def handler(self, route: ServerRoute) -> Handler:
        return functools.partial(self.answer, route)

    async def answer(self, route: ServerRoute, request: Request) -> Answer | Events:
        try:
            asked = self._understood(route, request)
        except ApiError as error:
            self._stats.ended(error.code or str(error.status), error.status)
            raise
        with contextlib.ExitStack() as held:
            held.enter_context(UnderWay(self._stats, self._settings.in_flight_max))
            worker, found, load = await self._in_time(asked, request)
            held.callback(load.give)
            if isinstance(found, EventStream):
                # The generator is begun at once by whoever sends it, so what it holds is given back in every case
                return Events(self._events(worker, found, held.pop_all()), {}, asked.deadline)
            return _answer(found)

    def _understood(self, route: ServerRoute, request: Request) -> _Asked:
        check_request(request, self._settings, self._draining)
        body: bytes | None = None
        content_type = http_client.JSON
        if route.is_form:
            given = request.header(b"content-type") or ""
            if _FORM_TYPE.fullmatch(given.strip()) is None:
                said = f"Content-Type: got {given[:80]!r}, expected {FORM} with a boundary, in UTF-8"
                raise ApiError(415, said, param="Content-Type", code="wrong_type")
            check_form(request.body)
            body, content_type = request.body, given.encode("latin-1")
        elif "POST" in route.methods:
            check_steering_anywhere(request.body, json_object(request.body))
            body = request.body
        hold_body(request)
        headers = [*passed(request, self._hidden), (b"X-Request-Id", request.id.encode())]
        return _Asked(route, headers, body, content_type, request.id, _now() + self._settings.deadline_s)

    async def _in_time(
        self, asked: _Asked, request: Request
    ) -> tuple[ListedEngine, WorkerAnswer | EventStream, WorkerLoad]:
        try:
            async with asyncio.timeout_at(asked.deadline):
                return await self._asked(asked, request)
        except TimeoutError:
            raise out_of_time("the request's deadline passed before the first byte") from None

    async def _asked(
        self, asked: _Asked, request: Request
    ) -> tuple[ListedEngine, WorkerAnswer | EventStream, WorkerLoad]:
        doubts, failures, stale = NO_DOUBTS, 0, 0
        last: LegError | None = None
        refusals: list[LegError] = []
        turn = next(self._turns)
        while True:
            worker = self._worker(asked.route, turn, doubts, last)
            leg = Leg(
                "decode", worker, asked.route.path, asked.headers, asked.body, request.tab, asked.content_type
            )  # fmt: skip
            load = self._flow.charge(worker.peer, max(1, int(len(request.body) / self._settings.chars_per_token)))
            try:
                patience = min(self._settings.first_byte_s, max(0.9 * (asked.deadline - _now()), 0.001))
                found = await self._legs.either(leg, asked.deadline, patience)
            except LegError as error:
                load.give()
                bare(error)
                count(self._stats.failures, error.fault.code or "none", error.side)
                if error.final:
                    raise _explained(error, asked.route) from None
                last = error
                if error.stale and stale < STALE_MAX:
                    stale += 1
                    continue
                failures += 1
                if error.lost or error.stale:
                    self._blame(error)
                else:
                    refusals.append(error)  # it may be the request's fault, unless another can do it
                doubts = msgspec.structs.replace(doubts, avoid={*doubts.avoid, worker.peer})
                if failures > self._settings.decode_retries:
                    raise error.fault from None
                self._stats.retries[error.side] += 1
                log.info("request %s: %s; asking another", asked.name, error)
            except BaseException:
                load.give()
                raise
            else:
                for refused in refusals:
                    self._blame(refused)
                if isinstance(found, WorkerAnswer) and self._roster.health:
                    self._roster.health.ok(worker.peer)
                return worker, found, load

    def _worker(self, route: ServerRoute, turn: int, doubts: Doubts, last: LegError | None) -> ListedEngine:
        """A D; where there is none, a P, which has the same model."""
        view = self._roster.view(_now())
        able = view.able_alone or (view.workers if route.path.endswith(_WITHOUT_KV) else ())
        weights = Weights(self._settings.policy, self._settings.same_host, self._flow.loads)
        found = policy.alone(able, turn, weights, doubts)
        if found is None:
            others = [msgspec.structs.replace(each, role="both") for each in able if not each.decodes]
            found = policy.alone(others, turn, weights, doubts)
        if found is not None:
            return found
        if last is not None:
            raise last.fault
        said = "no worker could answer: none is listed or computes alone, or all drain or are broken; see /workers"
        raise ApiError(503, said, type="service_unavailable_error", code="no_worker", retry_after_s=1)

    def _blame(self, error: LegError) -> None:
        news = None if error.busy else self._roster.health.failed(error.worker.peer, _now())
        if news is not None:
            log.warning("[worker-failing] %s; it is %s now", error, news.value)

    async def _events(
        self, worker: ListedEngine, stream: EventStream, held: contextlib.ExitStack
    ) -> AsyncGenerator[bytes, None]:
        """A worker's stream, untouched."""
        with held:
            try:
                async with contextlib.aclosing(stream.events()) as events:
                    async for data in events:
                        yield data
            finally:
                if stream.ended:
                    self._roster.health.ok(worker.peer)
                elif stream.broke:
                    self._roster.health.failed(worker.peer, _now())
                stream.close()


def _answer(found: WorkerAnswer) -> Answer:
    headers: dict[str, str] = {}
    kind = http_client.header(found.headers, b"content-type") or _BYTES
    plain = kind.partition(";")[0].strip().lower()
    metadata = http_client.header(found.headers, _METADATA)
    if metadata is not None and plain == _BYTES:
        headers = {**headers, "metadata": metadata}
    if plain not in TYPES:
        plain = _BYTES
    if plain != "application/json":
        headers = {**headers, "X-Content-Type-Options": "nosniff"}
    is_text = plain.startswith("text/")
    return Answer(found.data, headers=headers, content_type=f"{plain}; charset=utf-8" if is_text else plain)


def _explained(error: LegError, route: ServerRoute) -> ApiError:
    """The worker's refusal as it is; of a path that it does not have in words, which FastAPI spares."""
    fault = error.fault
    if fault.status not in (404, 405) or fault.type != "unknown_error":
        return fault
    said = f"{route.path}: {error.side} worker {error.worker.name} does not serve this ({fault.message or 'not found'})"
    return ApiError(fault.status, said, code="not_found", recorded=fault.recorded)


def _now() -> float:
    return asyncio.get_running_loop().time()
