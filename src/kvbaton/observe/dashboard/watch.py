"""Makes the page's state from the router's records.

Laws: a state is made at most once in `FRESH_S`, for any number of viewers, and encoded once for all of them; where
making one takes long, less often, so that the page takes only a small share of the router's time. Recording the end of
a handoff costs a few additions; everything else happens when the page is viewed, or once a second. One thread calls.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from typing import Protocol

import msgspec

from kvbaton.observe.dashboard import state
from kvbaton.observe.dashboard.pulse import Pulse
from kvbaton.observe.dashboard.recent import FirstByteWaits, RecentFailures, RecentHandoffs, ToldFlights, WorkerCounts
from kvbaton.observe.dashboard.scene import Figures, ListedWorker, Scene, Trouble, moving_of, seen
from kvbaton.observe.flight.flight_records import Flight
from kvbaton.observe.flight.journey import Journey
from kvbaton.observe.flight.worker_reports import WorkerGauges

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
