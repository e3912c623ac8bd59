"""D's answer from its first byte on, and what must end with it.

Laws: closing a reply ends all that its request still holds: its load, both legs, its record. P's leg alone may outlast
it, for a bounded time; closing `Replies` ends that too.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, NamedTuple

from kvbaton.api.gather import cancel
from kvbaton.api.http.http_types import Header
from kvbaton.router.flow.attempt import ChosenRoute, Tries
from kvbaton.router.flow.continuing import StreamLife
from kvbaton.router.flow.worker_calls import EventStream
from kvbaton.router.flow.worker_leg import LegError, WorkerAnswer
from kvbaton.router.router_flights import FIRST_TOKEN, MOVED, OK, PREFILL_ANSWERED, Trip
from kvbaton.router.router_stats import RouterStats, count
from kvbaton.router.workers.directory import ListedEngine
from kvbaton.router.workers.health import Health
from kvbaton.router.workers.worker_load import WorkerLoad

log = logging.getLogger(__name__)


First = Callable[[Sequence[float], WorkerAnswer], bool]
"""`Replies.says_all` of one try."""


class BegunAnswer:
    """Who answers, as far as is known when the first byte goes to the client."""

    __slots__ = ("_prefilled", "handoff", "headers", "prompt_tokens", "route")

    def __init__(
        self, route: ChosenRoute, trip: Trip, headers: Sequence[Header], prefilled: Sequence[float] = ()
    ) -> None:
        self.route = route
        self.handoff = trip.handoff
        self.prompt_tokens = trip.tokens  # as estimated
        self.headers = headers
        self._prefilled = prefilled  # when P was asked, and when it had answered

    @property
    def mode(self) -> str:
        return "alone" if self.route.prefill is None else str(self.route.mode)

    def prefill_since(self, begun: float) -> tuple[float, float] | None:
        """How long after `begun` P was asked and had answered, infinite if it has not yet; None without P."""
        times = [at - begun for at in self._prefilled] + [math.inf]
        return (times[0], times[1]) if self._prefilled else None


class FirstReply(NamedTuple):
    """P's first token, on its way to the client; D's reply comes later."""

    served: BegunAnswer
    events: bytes
    is_last: bool  # nothing is asked of D


class Replies:
    """What the ends of replies teach about workers, and the P legs that outlast them. One per router."""

    def __init__(self, health: Health, stats: RouterStats, settle_s: float) -> None:
        self._health = health
        self._stats = stats
        self._settle_s = settle_s
        self._settling: set[asyncio.Task[None]] = set()

    def says_all(
        self, life: StreamLife, tries: Tries, route: ChosenRoute, times: Sequence[float], computed: WorkerAnswer
    ) -> bool:
        """Have the client told of the first token in P's answer, if it may be; whether that is all of the answer.

        `times`: when P was asked, and when it had answered.
        """
        assert life.first is not None
        assert route.prefill is not None
        found = life.first.told(computed.data, route.prefill, route.decode)
        if found is None or not life.may_say(found):
            return False
        if found.is_last:
            tries.names = ()  # D never gets this prompt
        tries.behind = life
        tries.trip.mark(FIRST_TOKEN)
        self._stats.waits.first_tokens[str(route.mode)] += 1
        served = BegunAnswer(route, tries.trip, computed.headers, tuple(times))
        life.on_first(FirstReply(served, life.say_first(found), is_last=found.is_last))
        return found.is_last

    def streamed(self, worker: ListedEngine, stream: EventStream) -> None:
        """A stream is over: by its own end, by D's fault, or because the client stopped reading."""
        # A client that leaves, or the deadline, says nothing about D: neither `ended` nor `broke` is set then, and D's
        # standing stays as it was. An `ok` here would close the breaker of a D that clients flee from.
        if stream.ended:
            self._health.ok(worker.peer)
        elif stream.broke and self._health.failed(worker.peer, asyncio.get_running_loop().time()) is not None:
            log.warning("[stream-broken] decode worker %s broke off a stream; it is chosen last for now", worker.name)

    def settle(self, source: asyncio.Task[Any], unused: Callable[[], None]) -> None:
        """D has all it needs: let P finish in its own time, within a bound, after which its ticket is given back."""
        # P's own answer carries nothing that is read, but closing its leg aborts the request in P.
        if source.done():
            self._settled(source)
            return
        task = asyncio.create_task(self._settle(source, unused))
        self._settling.add(task)
        task.add_done_callback(self._settling.discard)

    async def _settle(self, source: asyncio.Task[Any], unused: Callable[[], None]) -> None:
        try:
            await asyncio.wait([source], timeout=self._settle_s)
        finally:
            # Nested, because the wait for the leg's end can itself be cancelled: the ticket goes back in every case.
            try:
                if not source.done():
                    await cancel([source])
            finally:
                unused()
        self._settled(source)

    def _settled(self, source: asyncio.Task[Any]) -> None:
        # Reading `exception()` also keeps asyncio from logging an exception that was never retrieved.
        if not source.cancelled() and (error := source.exception()) is not None:
            code = error.fault.code if isinstance(error, LegError) else type(error).__name__
            count(self._stats.failures, f"late:{code}", "prefill")

    async def close(self) -> None:
        await cancel(list(self._settling))


class Reply(BegunAnswer):
    """D's answer from its first byte on. Its holder calls `aclose`."""

    __slots__ = ("_decoding", "_is_closed", "_load", "_replies", "_source", "_trip", "_unused", "chunks")

    def __init__(
        self,
        replies: Replies,
        route: ChosenRoute,
        decoding: WorkerAnswer | EventStream,
        load: WorkerLoad,
        trip: Trip,
        source: asyncio.Task[Any] | None = None,
        unused: Callable[[], None] = lambda: None,
        prefilled: Sequence[float] = (),
    ) -> None:
        super().__init__(route, trip, decoding.headers, prefilled)
        self._is_closed = False
        self.chunks = 0  # of a stream, those that bear a token: counted by whoever sends them on
        self._replies = replies
        self._decoding = decoding
        self._load = load
        self._trip = trip
        self._source = source  # P's leg, where it may outlast D's first byte
        self._unused = unused  # gives its ticket back

    def tell_tokens(self, count: int) -> None:
        """Of the answer, which has come to its end."""
        self._trip.call.output_tokens = count

    @property
    def body(self) -> bytes:
        """A whole answer."""
        assert isinstance(self._decoding, WorkerAnswer), "a stream has no body"
        return self._decoding.data

    @property
    def events(self) -> EventStream:
        assert isinstance(self._decoding, EventStream), "a whole answer has no events"
        return self._decoding

    async def aleave(self, why: str) -> None:
        """Another D goes on with the answer. `why`: as `owned_streams` has it."""
        if not self.events.broke:
            self.events.fault = None
            self._trip.over(MOVED, why)
        await self.aclose()

    async def aclose(self) -> None:
        """Idempotent."""
        if self._is_closed:
            return
        self._is_closed = True
        # The load first: nothing below may keep a worker looking busy. The record's end is told before P's leg settles,
        # since the client has its answer; what P says later is noted as late.
        self._load.give()
        ended = True
        self._trip.call.chunks = self.chunks
        if isinstance(self._decoding, EventStream):
            ended = self._decoding.ended
            if not ended:
                self._trip.broke(self._decoding.fault or asyncio.CancelledError())
            self._replies.streamed(self.route.decode, self._decoding)
            self._decoding.close()
        self._trip.over(OK)
        if self._source is None:
            return
        # D's answer came whole, so D has read all of P's KV: P may finish. If not, the client left or D failed, and P
        # computes for nothing: closing its leg aborts it, and its ticket goes back.
        if ended or self._source.done():
            self._replies.settle(self._source, self._unused)
        else:
            try:
                await cancel([self._source])
            finally:
                self._unused()


async def keep_while(
    wanted: Callable[[], bool], ask: Callable[[], Awaitable[WorkerAnswer]], into: list[WorkerAnswer]
) -> None:
    """P's answer, which may bear the ids of a long prompt; nobody holds it where it comes too late."""
    answer = await ask()
    if wanted():
        into.append(answer)


def answered(trip: Trip, source: asyncio.Task[Any]) -> None:
    """P's leg is over."""
    if not source.cancelled() and source.exception() is None:
        trip.late(PREFILL_ANSWERED) if trip.end else trip.mark(PREFILL_ANSWERED)
