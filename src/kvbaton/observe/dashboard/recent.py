"""The last moments of a cluster, as the page needs them: what ended, who waited, what workers counted, what failed.

Law: each part is bounded, however many handoffs there are, and knows nothing of the others but the pulse it feeds.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from kvbaton.observe.dashboard import state
from kvbaton.observe.dashboard.pulse import Pulse
from kvbaton.observe.dashboard.scene import Failure, MovingHandoff
from kvbaton.observe.dashboard.sights import failure_of, key_of
from kvbaton.observe.flight.flight_records import WHOLE, Flight, FlightSeat
from kvbaton.observe.flight.journey import Journey
from kvbaton.observe.flight.worker_reports import WorkerGauges

ENDED_S = 2.5
"""A handoff that ended is told of for this long."""
PAIRS_S = 10
PAIRS_MAX = 1024
"""Of each second."""
WAITING_KEPT = 1024
"""Requests of which a try failed, and of which another may answer."""
JOINED_S = 1.0
"""Joined journeys, for stages and failures, are looked at this often."""
STAGED = 48
"""Journeys that are looked through for stage times."""
STAGED_S = 60.0
STAGED_KEPT = 1024
"""Handoffs whose stage times are known not to count twice."""

Pairs = dict[tuple[str, str], tuple[int, int]]


@dataclass(slots=True)
class _Second:
    number: int
    pairs: Pairs = field(default_factory=dict)


class RecentHandoffs:
    """Handoffs that have just ended, and who handed to whom in the last seconds."""

    def __init__(self) -> None:
        self._moving: deque[tuple[float, MovingHandoff]] = deque(maxlen=state.DOTS_MAX)
        self._count = 0
        self._seconds: deque[_Second] = deque(maxlen=PAIRS_S + 1)

    def note(self, now: float, flight: Flight, pair: tuple[str, str], weight: int) -> None:
        self._count += 1
        end, failed, tokens = flight.end, flight.failed, flight.tokens
        moving = MovingHandoff(self._count, *pair, end=end, failed=failed, tokens=tokens, key=key_of(flight))
        self._moving.append((now, moving))
        if not self._seconds or self._seconds[-1].number != int(now):
            self._seconds.append(_Second(int(now)))
        pairs = self._seconds[-1].pairs
        if pair in pairs or len(pairs) < PAIRS_MAX:
            count, sum_tokens = pairs.get(pair, (0, 0))
            pairs[pair] = (count + weight, sum_tokens + weight * max(tokens, 1))

    def moving(self, now: float) -> list[MovingHandoff]:
        return [moving for at, moving in self._moving if now - at < ENDED_S]

    def pairs(self, now: float) -> Pairs:
        found: Pairs = {}
        for second in self._seconds:
            if not int(now) - PAIRS_S < second.number <= int(now):
                continue
            for pair, (count, tokens) in second.pairs.items():
                before = found.get(pair, (0, 0))
                found[pair] = (before[0] + count, before[1] + tokens)
        return found


class FirstByteWaits:
    """How long clients waited: from the request on, through all tries that failed before the one that answers."""

    def __init__(self, pulse: Pulse) -> None:
        self._pulse = pulse
        self._waiting: dict[str, float] = {}  # requests whose tries failed so far: since when

    def note(self, now: float, flight: Flight) -> None:
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


@dataclass(slots=True)
class _Counts:
    incarnation: str
    handoffs: float
    delivered: float
    bytes: float


class WorkerCounts:
    """What each worker had counted when it was last looked at."""

    def __init__(self, pulse: Pulse) -> None:
        self._pulse = pulse
        self._before: dict[str, _Counts] = {}

    def __contains__(self, worker: str) -> bool:
        return worker in self._before

    def note(self, workers: Iterable[WorkerGauges], now: float) -> None:
        """What workers have counted since."""
        found: dict[str, _Counts] = {}
        for told in workers:
            gauges = told.gauges
            if state.HANDOFFS not in gauges:
                continue
            fresh = _Counts(
                told.incarnation, gauges[state.HANDOFFS], gauges.get(state.DELIVERED, 0.0), gauges.get(state.BYTES, 0.0)
            )
            found[told.name] = fresh
            before = self._before.get(told.name)
            if before is None or before.incarnation != fresh.incarnation:
                continue  # what it did before anybody listened is not of this moment
            handoffs = int(fresh.handoffs - before.handoffs)
            delivered = int(fresh.delivered - before.delivered)
            self._pulse.ended(now, handoffs, handoffs - delivered)
            self._pulse.moved(now, fresh.bytes - before.bytes)
        self._before = found


class RecentJourneys:
    """What takes joining, which costs more than all the rest: times of stages, and failures."""

    def __init__(self, pulse: Pulse, journeys: Callable[[int, bool], list[Journey]]) -> None:
        self.failures: list[Failure] = []
        self._pulse = pulse
        self._journeys = journeys  # how many at most, and whether only those that failed
        self._staged: dict[str, None] = {}
        self._at = float("-inf")

    def look(self, now: float) -> None:
        if 0.0 <= now - self._at < JOINED_S:
            return
        self._at = now
        self._stage(now)
        self.failures = [failure_of(journey) for journey in self._journeys(state.FAILURES_MAX, True)]

    def _stage(self, now: float) -> None:
        for journey in self._journeys(STAGED, False):
            lane = journey.lane(FlightSeat.DECODE)
            if lane is None or not lane.end or journey.handoff in self._staged or now - journey.began > STAGED_S:
                continue
            times = {stage.name: stage.seconds for stage in journey.stages if stage.seat is FlightSeat.DECODE}
            self._pulse.staged(min(journey.began + journey.seconds, now), times)
            self._staged[journey.handoff] = None
        while len(self._staged) > STAGED_KEPT:
            del self._staged[next(iter(self._staged))]
