"""Makes the page's state from the router's records.

Laws: a state is made at most once in `FRESH_S`, for any number of viewers, and encoded once for all of them; where
making one takes long, less often, so that the page takes only a small share of the router's time. Recording the end of
a handoff costs a few additions; everything else happens when the page is viewed, or once a second. One thread calls.

The recent state of a cluster, as the page needs it: handoffs, waiting clients, workers' counters, failures.

Law: each part is bounded, however many handoffs there are, and knows only the pulse that it feeds. What the client did
wrong is no handoff.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import msgspec

from kvbaton.observe.dashboard import state
from kvbaton.observe.dashboard.pulse import (
    BUCKET_S,
    MINUTE,
    RATE_S,
    Failure,
    Figures,
    ListedWorker,
    MovingHandoff,
    Pulse,
    Scene,
    Trouble,
    failure_of,
    key_of,
    moving_of,
    seen,
    shares,
    window,
)
from kvbaton.observe.flight.flight_records import WHOLE, Flight, FlightSeat, stages
from kvbaton.observe.flight.journey import Journey
from kvbaton.observe.flight.journey import key_of as story_of
from kvbaton.observe.flight.worker_reports import WorkerGauges

ENDED_S = 2.5
"""A handoff that ended is told of for this long."""
PAIRS_MAX = 1024
"""Of each bucket."""
WAITING_KEPT = 1024
"""Requests of which a try failed, and of which another may answer."""
JOINED_S = 1.0
"""Joined journeys, for failures, are looked at this often."""
COUNTED_KEPT = 4096
"""Handoffs that failed, of which another side may tell too."""
TOLD_KEPT = 4096
"""Records of workers that wait to be counted: at once where the page is looked at, or handoffs end, else never."""

Pairs = dict[tuple[str, str], tuple[int, int]]


@dataclass(slots=True)
class _PairBucket:
    number: int
    pairs: Pairs = field(default_factory=dict)


class RecentHandoffs:
    """Handoffs that have just ended, and the pairs of the last seconds."""

    def __init__(self) -> None:
        self._moving: deque[tuple[float, MovingHandoff]] = deque(maxlen=state.DOTS_MAX)
        self._count = 0
        self._buckets: deque[_PairBucket] = deque(maxlen=int(RATE_S // BUCKET_S) + 1)

    def note(self, now: float, flight: Flight, pair: tuple[str, str], weight: int) -> None:
        self._count += 1
        end, failed, tokens = flight.end, flight.failed, flight.tokens
        moving = MovingHandoff(self._count, *pair, end=end, failed=failed, tokens=tokens, key=key_of(flight))
        self._moving.append((now, moving))
        number = int(now // BUCKET_S)
        if not self._buckets or self._buckets[-1].number != number:
            self._buckets.append(_PairBucket(number))
        pairs = self._buckets[-1].pairs
        if pair in pairs or len(pairs) < PAIRS_MAX:
            count, sum_tokens = pairs.get(pair, (0, 0))
            pairs[pair] = (count + weight, sum_tokens + weight * max(tokens, 1))

    def moving(self, now: float) -> list[MovingHandoff]:
        return [moving for at, moving in self._moving if now - at < ENDED_S]

    def pairs(self, now: float) -> Pairs:
        """Of the window of all rates."""
        found: Pairs = {}
        numbers = window(now)
        for bucket in self._buckets:
            for pair, (count, tokens) in bucket.pairs.items() if bucket.number in numbers else ():
                before = found.get(pair, (0, 0))
                found[pair] = (before[0] + count, before[1] + tokens)
        return found


class FirstByteWaits:
    """Client waiting times: from the request on, through all failed attempts before the successful one."""

    def __init__(self, pulse: Pulse) -> None:
        self._pulse = pulse
        self._waiting: dict[str, float] = {}  # requests whose tries failed so far: since when

    def note(self, now: float, flight: Flight) -> None:
        received = flight.at("received")
        if received is None:
            return
        answered = next((moment for moment in flight.moments if moment.step in ("first_token", "first_byte")), None)
        since = self._waiting.pop(flight.request, received) if flight.retries else received
        if answered is not None and answered.detail != WHOLE:  # streamed ones alone, as in the router's metrics
            self._pulse.first_byte(now, answered.at - since)
            if flight.itl_s is not None:
                self._pulse.between_tokens(now, flight.itl_s)
        elif answered is None and flight.peers:
            self._waiting[flight.request] = since
            if len(self._waiting) > WAITING_KEPT:
                del self._waiting[next(iter(self._waiting))]


COUNTED = (state.HANDOFFS, state.FAILED, state.BYTES, state.PROMPTS, state.ALONE)
"""Of each worker, in this order: handoffs are those that were delivered or failed."""


@dataclass(slots=True)
class _Counts:
    incarnation: str
    totals: tuple[float, ...]
    recent: deque[tuple[int, list[float]]]  # of the last minute, by bucket
    told_at: float


class WorkerCounts:
    """Each worker's counters at the last look, and what was counted in the last minute."""

    def __init__(self, pulse: Pulse) -> None:
        self._pulse = pulse
        self._known: dict[str, _Counts] = {}

    def __contains__(self, worker: str) -> bool:
        return worker in self._known

    def note(self, workers: Iterable[WorkerGauges], now: float, late: tuple[float, float] | None = None) -> None:
        """The workers' counts since, of the time between two reports; of `late`, where nobody looked for long."""
        found: dict[str, _Counts] = {}
        for told in workers:
            if state.HANDOFFS not in told.gauges:
                continue
            totals, before, told_at = _totals(told.gauges), self._known.get(told.name), now - (told.age_s or 0.0)
            if before is None or before.incarnation != told.incarnation:  # what it counted before is not recent
                found[told.name] = _Counts(told.incarnation, totals, deque(maxlen=MINUTE + 1), told_at)
                continue
            fresh = [max(new - old, 0.0) for new, old in zip(totals, before.totals, strict=True)]
            found[told.name] = _Counts(told.incarnation, totals, before.recent, told_at)
            for at, share in shares(*(late or (before.told_at, told_at))) if any(fresh) else ():
                part = [share * value for value in fresh]
                _add(before.recent, int(at // BUCKET_S), part)
                self._pulse.ended(at, part[0], part[1])
                self._pulse.moved(at, part[2])
        self._known = found

    def rates(self, now: float) -> dict[str, Mapping[str, float]]:
        """Of each worker, per second, over the same window as the rates of all together."""
        numbers, known_s = window(now), self._pulse.known_s(now)
        return {
            worker: {name: total / known_s for name, total in zip(COUNTED, _sums(each.recent, numbers), strict=True)}
            for worker, each in self._known.items()
        }

    def alone(self, now: float) -> dict[str, tuple[float, float]]:
        """Of workers that tell of it: tokens of prompts in the last minute, and those computed for want of a P."""
        last = int(now // BUCKET_S)
        sums = {worker: _sums(each.recent, range(last - MINUTE + 1, last + 1)) for worker, each in self._known.items()}
        return {worker: (found[3], found[4]) for worker, found in sums.items() if found[3]}


def _totals(gauges: Mapping[str, float]) -> tuple[float, ...]:
    delivered = gauges.get(state.DELIVERED, 0.0)
    failed = gauges.get(state.FAILED, gauges[state.HANDOFFS] - delivered)  # workers of before do not tell it
    return (delivered + failed, failed, *(gauges.get(name, 0.0) for name in COUNTED[2:]))


def _add(recent: deque[tuple[int, list[float]]], number: int, fresh: list[float]) -> None:
    if recent and recent[-1][0] == number:
        for place, value in enumerate(fresh):
            recent[-1][1][place] += value
    else:
        recent.append((number, fresh))


def _sums(recent: Iterable[tuple[int, list[float]]], numbers: range) -> list[float]:
    rows = [values for number, values in recent if number in numbers]
    return [sum(column) for column in zip(*rows, strict=True)] if rows else [0.0] * len(COUNTED)


class ToldFlights:
    """What workers tell of handoffs: stage times at D, and which ones failed. `note` may be called on any thread."""

    def __init__(self, pulse: Pulse, failures: RecentFailures, clock: Callable[[], float]) -> None:
        self._pulse = pulse
        self._failures = failures
        self._clock = clock
        self._told: deque[tuple[float, Flight]] = deque(maxlen=TOLD_KEPT)

    def note(self, flight: Flight) -> None:
        if flight.seat is FlightSeat.DECODE or flight.failed:
            self._told.append((self._clock(), flight))

    def count(self) -> None:
        while self._told:
            at, flight = self._told.popleft()
            if flight.seat is FlightSeat.DECODE:
                self._pulse.staged(at, stages(flight))
            if flight.failed:
                self._failures.note(at, flight)


class RecentFailures:
    """Handoffs that failed: each counts once, whoever tells of it. Joining the last ones is what costs most."""

    def __init__(self, pulse: Pulse, journeys: Callable[[int], list[Journey]]) -> None:
        self.found: list[Failure] = []
        self._pulse = pulse
        self._counted: dict[str, None] = {}
        self._journeys = journeys  # those that failed, how many at most
        self._at = float("-inf")

    def note(self, now: float, flight: Flight) -> None:
        """A record of a handoff that failed; others of the same handoff may follow."""
        key = story_of(flight)
        if key not in self._counted:
            self._counted[key] = None
            self._pulse.lost(now)
            if len(self._counted) > COUNTED_KEPT:
                del self._counted[next(iter(self._counted))]

    def look(self, now: float) -> None:
        if not 0.0 <= now - self._at < JOINED_S:
            self._at = now
            self.found = [failure_of(journey) for journey in self._journeys(state.FAILURES_MAX)]


FRESH_S = 0.5
FRESH_S_MAX = 5.0
SHARE = 0.05
"""Of the router's time that the page may take."""
TICK_S = 1.0
"""While handoffs end, what workers have counted is looked at this often, though nobody looks at the page."""
LATE_S = 5.0


class Gathered(Protocol):
    """The part of `flight.collector.Collector` that is used here."""

    on_flight: list[Callable[[Flight], None]]
    on_told: list[Callable[[Flight], None]]
    level: int  # of those that ended well, one in 2**level is told

    def journeys(
        self, last: int = 20, failed: bool = False, find: str = "", handoffs: bool = False
    ) -> list[Journey]: ...
    def under_way(self, limit: int = 200) -> list[Flight]: ...
    def workers(self, now: float | None = None) -> list[WorkerGauges]: ...


class ClusterWatch:
    """One router's page."""

    def __init__(
        self,
        gathered: Gathered,
        listed: Callable[[], Sequence[ListedWorker]],
        figures: Callable[[], Figures],
        *,
        about: Scene | None = None,
        clock: Callable[[], float] = time.time,
        cost: Callable[[], float] = time.thread_time,
    ) -> None:
        self._gathered = gathered
        self._listed = listed
        self._figures = figures
        self._clock = clock
        self._cost = cost
        self._begun = msgspec.structs.replace(about or Scene(at=0.0), at=clock())
        self._pulse = Pulse()
        self._ended = RecentHandoffs()
        self._first_bytes = FirstByteWaits(self._pulse)
        self._counted = WorkerCounts(self._pulse)
        self._failures = RecentFailures(self._pulse, lambda last: gathered.journeys(last, failed=True, handoffs=True))
        self._told = ToldFlights(self._pulse, self._failures, clock)
        self._own = figures()
        self._ticked_at = float("-inf")
        self._made: tuple[float, bytes] = (float("-inf"), b"")  # when, and what
        self._fresh_s = FRESH_S
        gathered.on_flight.append(self._over)
        gathered.on_told.append(self._told.note)

    def state(self, trouble: Trouble | None = None) -> bytes:
        """The JSON of this moment, or of a little while ago, though not from before this trouble."""
        now = self._clock()
        if not 0.0 <= now - self._made[0] < self._fresh_s or trouble != self._begun.trouble:
            begun = self._cost()
            self._begun = msgspec.structs.replace(self._begun, trouble=trouble)
            workers = self._tick(now)
            self._failures.look(now)
            self._made = (now, state.encode(state.build(self._scene(now, workers), self._pulse)))
            self._fresh_s = min(max((self._cost() - begun) / SHARE, FRESH_S), FRESH_S_MAX)
        return self._made[1]

    # --- what happens

    def _over(self, flight: Flight) -> None:
        """One of the router's attempts has ended."""
        now = self._clock()
        if not 0.0 <= now - self._ticked_at < TICK_S:
            self._tick(now)
        self._first_bytes.note(now, flight)
        pair = flight.pair
        if pair is None or flight.mistake:
            return
        weight = 1 if flight.failed else 1 << self._gathered.level  # at high rates a share is told
        if flight.failed:
            self._failures.note(now, flight)
        elif pair[1] not in self._counted:  # else it counts by itself
            self._pulse.ended(now, weight, 0)
        self._ended.note(now, flight, pair, weight)

    def _tick(self, now: float) -> list[WorkerGauges]:
        # what was counted since then is of then, where nobody looked for long: reports come within a second
        since = self._ticked_at if 0.0 <= now - self._ticked_at < math.inf else now
        late = (since, since + TICK_S) if now - since > LATE_S else None
        self._ticked_at = now
        workers = self._gathered.workers(now)
        self._counted.note(workers, now, late)
        self._told.count()
        before, self._own = self._own.counts, self._figures()
        fresh = {name: count - before.get(name, 0) for name, count in self._own.counts.items()}
        self._pulse.counted(*(late or (since, now)), fresh)
        self._pulse.in_flight(now, self._own.in_flight)
        return workers

    # --- what is seen

    def _scene(self, now: float, workers: Sequence[WorkerGauges]) -> Scene:
        return msgspec.structs.replace(
            self._begun,
            at=now,
            uptime_s=now - self._begun.at,
            own=self._own,
            workers=seen(self._listed(), workers, self._counted.rates(now), self._counted.alone(now)),
            under_way=[moving_of(each) for each in self._gathered.under_way(2 * state.DOTS_MAX) if each.pair],
            ended=self._ended.moving(now),
            failures=self._failures.found,
            pairs=self._ended.pairs(now),
        )
