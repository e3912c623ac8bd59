"""Makes the page's state of what the router gathers.

Laws: a state is made at most once in `FRESH_S`, however many look, and encoded once for all of them; where making one
takes long, less often, so that the page takes no more than a small share of the router's time. What is noted of a
handoff when it ends is a few additions; all else happens when somebody looks, or once a second. One thread calls.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import msgspec

from kvbaton.observe.dashboard import state
from kvbaton.observe.dashboard.pulse import Pulse
from kvbaton.observe.dashboard.scene import Failure, Moving, Scene
from kvbaton.observe.dashboard.sights import Listed, failure_of, key_of, moving_of, pair_of, seen
from kvbaton.observe.flight.flight_records import WHOLE, Flight, Seat
from kvbaton.observe.flight.journey import Journey
from kvbaton.observe.flight.worker_reports import Told

FRESH_S = 0.5
FRESH_S_MAX = 5.0
SHARE = 0.05
"""Of the router's time that the page may take."""
JOINED_S = 1.0
"""Joined journeys, for stages and failures, are looked at this often."""
TICK_S = 1.0
"""While handoffs end, what workers have counted is looked at this often, though nobody looks at the page."""
ENDED_S = 2.5
"""A handoff that ended is told of for this long."""
PAIRS_S = 10
PAIRS_MAX = 1024
"""Of each second."""
STAGED = 48
"""Journeys that are looked through for stage times."""
STAGED_S = 60.0
WAITING_KEPT = 1024
"""Requests of which a try failed, and of which another may answer."""
LATE_S = 5.0
STAGED_KEPT = 1024
"""Handoffs whose stage times are known not to count twice."""


class Gathered(Protocol):
    """What is asked of `flight.gathering.Gathering`."""

    on_flight: list[Callable[[Flight], None]]
    level: int  # of those that ended well, one in 2**level is told

    def journeys(self, last: int = 20, failed: bool = False, find: str = "") -> list[Journey]: ...
    def under_way(self, limit: int = 200) -> list[Flight]: ...
    def workers(self, now: float | None = None) -> list[Told]: ...


class Figures(msgspec.Struct, frozen=True):
    """What the router says of itself."""

    in_flight: int = 0
    draining: bool = False


@dataclass(slots=True)
class _Counted:
    """What a worker had counted when it was last looked at."""

    incarnation: str
    handoffs: float
    delivered: float
    bytes: float


@dataclass(slots=True)
class _Second:
    number: int
    pairs: dict[tuple[str, str], tuple[int, int]] = field(default_factory=dict)


class Watch:
    """One router's page."""

    def __init__(
        self,
        gathered: Gathered,
        listed: Callable[[], Sequence[Listed]],
        figures: Callable[[], Figures],
        *,
        version: str = "",
        mode: str = "",
        clock: Callable[[], float] = time.time,
        cost: Callable[[], float] = time.thread_time,
    ) -> None:
        self._gathered = gathered
        self._listed = listed
        self._figures = figures
        self._version = version
        self._mode = mode
        self._clock = clock
        self._cost = cost
        self._begun = clock()
        self._pulse = Pulse()
        self._ended: deque[tuple[float, Moving]] = deque(maxlen=state.DOTS_MAX)
        self._numbers = 0
        self._seconds: deque[_Second] = deque(maxlen=PAIRS_S + 1)
        self._counted: dict[str, _Counted] = {}
        self._staged: dict[str, None] = {}
        self._waiting: dict[str, float] = {}  # requests whose tries failed so far: since when
        self._ticked_at = float("-inf")
        self._made: bytes = b""
        self._made_at = float("-inf")
        self._fresh_s = FRESH_S
        self._failures: list[Failure] = []
        self._joined_at = float("-inf")
        gathered.on_flight.append(self._over)

    def state(self) -> bytes:
        """The JSON of this moment, or of one a little while ago."""
        now = self._clock()
        if not 0.0 <= now - self._made_at < self._fresh_s:
            begun = self._cost()
            workers = self._tick(now)
            self._join(now)
            self._made = state.encode(state.build(self._scene(now, workers), self._pulse))
            self._made_at = now
            self._fresh_s = min(max((self._cost() - begun) / SHARE, FRESH_S), FRESH_S_MAX)
        return self._made

    # --- what happens

    def _over(self, flight: Flight) -> None:
        """One of the router's tries has ended."""
        now = self._clock()
        if not 0.0 <= now - self._ticked_at < TICK_S:
            self._tick(now)
        self._first_byte(flight, now)
        pair = pair_of(flight)
        if pair is None:
            return
        weight = 1 if flight.failed else 1 << self._gathered.level  # at high rates a share is told
        if pair[1] not in self._counted:  # else it counts by itself, unless it died
            self._pulse.ended(now, weight, int(flight.failed))
        elif flight.failed:
            self._pulse.lost(now)
        self._numbers += 1
        key = key_of(flight)
        moving = Moving(self._numbers, *pair, end=flight.end, failed=flight.failed, tokens=flight.tokens, key=key)
        self._ended.append((now, moving))
        if not self._seconds or self._seconds[-1].number != int(now):
            self._seconds.append(_Second(int(now)))
        pairs = self._seconds[-1].pairs
        if pair in pairs or len(pairs) < PAIRS_MAX:
            count, tokens = pairs.get(pair, (0, 0))
            pairs[pair] = (count + weight, tokens + weight * max(flight.tokens, 1))

    def _first_byte(self, flight: Flight, now: float) -> None:
        """A client waits from its request on, through all tries that failed before the one that answers."""
        received = flight.at("received")
        if received is None:
            return
        answered = next((moment for moment in flight.moments if moment.step == "first_byte"), None)
        since = self._waiting.pop(flight.request, received) if flight.retries else received
        if answered is not None and answered.detail != WHOLE:  # streamed ones alone, as in the router's metrics
            self._pulse.first_byte(now, answered.at - since)
        elif answered is None and flight.peers:
            self._waiting[flight.request] = since
            if len(self._waiting) > WAITING_KEPT:
                del self._waiting[next(iter(self._waiting))]

    def _tick(self, now: float) -> list[Told]:
        # what was counted since then is of then, where nobody looked for long: reports come within a second
        at = now if now - self._ticked_at <= LATE_S else self._ticked_at + TICK_S
        self._ticked_at = now
        workers = self._gathered.workers(now)
        self._count(workers, at)
        return workers

    def _count(self, workers: Iterable[Told], now: float) -> None:
        """What workers have counted since they were last looked at."""
        found: dict[str, _Counted] = {}
        for told in workers:
            gauges = told.gauges
            if state.HANDOFFS not in gauges:
                continue
            fresh = _Counted(
                told.incarnation, gauges[state.HANDOFFS], gauges.get(state.DELIVERED, 0.0), gauges.get(state.BYTES, 0.0)
            )
            found[told.name] = fresh
            before = self._counted.get(told.name)
            if before is None or before.incarnation != fresh.incarnation:
                continue  # what it did before anybody listened is not of this moment
            handoffs = int(fresh.handoffs - before.handoffs)
            delivered = int(fresh.delivered - before.delivered)
            self._pulse.ended(now, handoffs, handoffs - delivered)
            self._pulse.moved(now, fresh.bytes - before.bytes)
        self._counted = found

    def _join(self, now: float) -> None:
        """What takes joining: it costs more than all the rest."""
        if 0.0 <= now - self._joined_at < JOINED_S:
            return
        self._joined_at = now
        self._stage(now)
        failed = self._gathered.journeys(last=state.FAILURES_MAX, failed=True)
        self._failures = [failure_of(journey) for journey in failed]

    def _stage(self, now: float) -> None:
        for journey in self._gathered.journeys(last=STAGED):
            lane = journey.lane(Seat.DECODE)
            if lane is None or not lane.end or journey.handoff in self._staged or now - journey.began > STAGED_S:
                continue
            times = {stage.name: stage.seconds for stage in journey.stages if stage.seat is Seat.DECODE}
            self._pulse.staged(min(journey.began + journey.seconds, now), times)
            self._staged[journey.handoff] = None
        while len(self._staged) > STAGED_KEPT:
            del self._staged[next(iter(self._staged))]

    # --- what is seen

    def _scene(self, now: float, workers: Sequence[Told]) -> Scene:
        figures = self._figures()
        self._pulse.in_flight(now, figures.in_flight)
        return Scene(
            at=now,
            version=self._version,
            mode=self._mode,
            uptime_s=now - self._begun,
            draining=figures.draining,
            in_flight=figures.in_flight,
            workers=seen(self._listed(), workers),
            under_way=[moving_of(each) for each in self._gathered.under_way(2 * state.DOTS_MAX) if pair_of(each)],
            ended=[moving for at, moving in self._ended if now - at < ENDED_S],
            failures=self._failures,
            pairs=self._pairs(now),
            pairs_s=max(min(float(PAIRS_S), now - self._begun), 1.0),
        )

    def _pairs(self, now: float) -> dict[tuple[str, str], tuple[int, int]]:
        found: dict[tuple[str, str], tuple[int, int]] = {}
        for second in self._seconds:
            if not int(now) - PAIRS_S < second.number <= int(now):
                continue
            for pair, (count, tokens) in second.pairs.items():
                before = found.get(pair, (0, 0))
                found[pair] = (before[0] + count, before[1] + tokens)
        return found
