"""All that the router knows of handoffs: its own records, and what workers told it; kept for a while, and joined.

Laws: memory is bounded, whatever workers tell; failures are kept apart, so that successes do not wash them out, and
what one worker tells washes out its own (`shelf`). Records come in any order and more than once; the last word of a
side stands, also when its process is gone. A worker speaks for itself alone: its name and life are those that its
connection proved. Safe from any thread; callbacks never block.

    note(flight)              a record of the router's own; the same try again replaces it
    watch(live), unwatch      a try under way, asked for its record only when somebody looks
    heard(worker, life, ...)  a worker's report
    listed(workers)           who is registered now
    journeys(...)             joined, newest first
"""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Protocol

import msgspec

from kvbaton.observe.flight import journey as j
from kvbaton.observe.flight.flight_records import Flight, FlightSeat
from kvbaton.observe.flight.joining import began, key_of, matches, side_of, tries_of
from kvbaton.observe.flight.journey import Journey
from kvbaton.observe.flight.journey_store import ROUTER, JourneyStore, Story
from kvbaton.observe.flight.recorder import LEVEL_MAX, is_shared
from kvbaton.observe.flight.report import FlightReport
from kvbaton.observe.flight.sanitize import clean, size_of
from kvbaton.observe.flight.worker_reports import WorkerGauges, WorkerReports

log = logging.getLogger(__name__)

JOURNEYS_MAX = 4096
FAILURES_MAX = 512
BYTES_MAX = 64 << 20
"""Of all records together, about; beyond it the oldest go."""
SIDES_MAX = 6
"""Of one handoff: router, P, D, and more readers of one lease."""
SIDES_OF_ONE_MAX = 2
"""Of one worker in one seat: a request that came again."""
ASKED_FOR_MAX = 64
LAST_MAX = 200
FLIGHTS_PER_S = 200
"""Of the router's own, beyond which a share of those that end well is kept; the rest still counts in metrics."""


class Live(Protocol):
    """A try under way at the router."""

    def flight(self) -> Flight:
        """Its record so far; cheap, never blocks."""


class Gathering:
    """What became of the last handoffs, from all sides."""

    def __init__(
        self,
        *,
        clock: Callable[[], float] = time.time,
        journeys_max: int = JOURNEYS_MAX,
        failures_max: int = FAILURES_MAX,
        bytes_max: int = BYTES_MAX,
        flights_per_s: float = FLIGHTS_PER_S,
    ) -> None:
        self.on_flight: list[Callable[[Flight], None]] = []
        """Called with each of the router's own flights when it is over, whether or not it is kept. Never blocks."""
        self.counters: Counter[str] = Counter()
        self.level = 0  # of those that ended well one in 2**level is kept, the same as at the workers
        self._clock = clock
        self._bounds = (journeys_max, failures_max, bytes_max)
        self._fine = JourneyStore()
        self._failed = JourneyStore()
        self._bytes = 0
        self._live: dict[Live, None] = {}  # oldest first
        self._asked_for: dict[str, None] = {}
        self._telling = WorkerReports()
        self._rate = _Rate(flights_per_s)
        self._lock = threading.Lock()

    # --- what comes in

    def watch(self, live: Live) -> None:
        """A try has begun."""
        self._live[live] = None  # without the lock: whoever looks takes a copy

    def unwatch(self, live: Live) -> None:
        """It has ended; `note` may follow."""
        self._live.pop(live, None)

    def wants(self, handoff: str, *, always: bool, request: str = "") -> bool:
        """Whether the record of a try that has ended is worth making; to be asked once for each.

        Those that failed or are traced always are; at high rates of the others one in 2**level. One that came to no
        handoff is chosen by its request.
        """
        self.level = self._rate.level(self._clock())
        if always or not self.level or is_shared(handoff or request, self.level):
            return True
        self.counters["sampled_out"] += 1
        return False

    def note(self, flight: Flight) -> None:
        """One of the router's own; one under way is replaced by what it becomes."""
        if flight.is_over:
            for callback in self.on_flight:
                try:
                    callback(flight)
                except Exception:
                    self.counters["callback_faults"] += 1
                    log.exception("[callback-failed] on_flight failed; going on")
        with self._lock:
            key = key_of(flight)
            if (
                not self.level
                or flight.failed
                or self._knows(key)
                or is_shared(flight.handoff or flight.request, self.level)
            ):
                self._put(key, flight)
            else:
                self.counters["sampled_out"] += 1

    def amend(self, flight: Flight) -> None:
        """More is known of a try that was noted. Whoever listens was told already."""
        with self._lock:
            key = key_of(flight)
            if self._knows(key):
                self._put(key, flight)

    def heard(self, worker: str, incarnation: int, report: FlightReport, now: float | None = None) -> None:
        """A worker's report, decoded; `now` is Unix time here."""
        now = self._clock() if now is None else now
        kept = tuple(flight for flight in report.flights if self._keeps(flight))
        told = len(report.flights)
        report, odd = clean(msgspec.structs.replace(report, flights=kept), worker, f"{incarnation:016x}")
        seats = self._telling.seats_of(worker)
        of_role = tuple(flight for flight in report.flights if flight.seat in seats)
        odd += len(report.flights) - len(of_role)
        report = msgspec.structs.replace(report, flights=of_role)
        with self._lock:  # and nothing else in it: requests wait for it too
            self._telling.heard(worker, incarnation, report, now)
            self.counters["reports"] += 1
            self.counters["odd_flights"] += odd
            self.counters["sampled_out"] += told - len(kept)
            for flight in report.flights:
                self._put(key_of(flight), flight)

    def listed(self, workers: Mapping[str, tuple[int, str]]) -> None:
        """Who is registered now: name to life and role (prefill, decode, both)."""
        with self._lock:
            self._telling.listed(workers, self._clock())

    def ask_for(self, text: str) -> None:
        """What is told of this id from here on is kept, also where only a share is."""
        with self._lock:
            self._asked_for.pop(text, None)
            self._asked_for[text] = None
            while len(self._asked_for) > ASKED_FOR_MAX:
                del self._asked_for[next(iter(self._asked_for))]

    # --- what comes out

    def journeys(self, last: int = 20, failed: bool = False, find: str = "") -> list[Journey]:
        """Newest first, tries under way included; `find` is a request id, a handoff id, or the beginning of one."""
        last = max(0, min(last, LAST_MAX))
        with self._lock:
            count = None if find else 2 * last  # enough: what began last was mostly noted last
            kept = (self._fine, self._failed)
            stories = [story for each in kept for story in itertools.islice(reversed(each), count)]
            groups = _with_live(stories, [each.flight() for each in list(self._live)])
        if find:  # from here on without the lock: requests wait for it too
            groups = [group for group in groups if any(matches(flight, find) for flight in group)]
        tries = tries_of(groups)
        if failed:
            groups = [group for group in groups if any(flight.failed for flight in group)]
        groups.sort(key=began, reverse=True)
        return [self._joined(group, tries) for group in groups[:last]]

    def under_way(self, limit: int = LAST_MAX) -> list[Flight]:
        """The router's tries that have not ended, newest first."""
        return [live.flight() for live in itertools.islice(reversed(list(self._live)), max(0, limit))]

    def records(self) -> list[Flight]:
        """The router's own that are kept, oldest first, and those under way: what is dumped on request."""
        with self._lock:
            stories = [*self._fine, *self._failed]
            own = [flight for story in stories for flight in story.sides.values() if flight.seat is FlightSeat.ROUTER]
            return [*sorted(own, key=lambda flight: flight.began), *(live.flight() for live in list(self._live))]

    def workers(self, now: float | None = None) -> list[WorkerGauges]:
        """What each worker told last, by name; also of those that are gone, for a while."""
        with self._lock:
            return self._telling.told(self._clock() if now is None else now)

    def reporters(self) -> list[tuple[str, int]]:
        """Workers (name, life) that are here and tell something, and so can be asked for more."""
        with self._lock:
            return self._telling.reporters()

    def reports_of(self, worker: str) -> int:
        """How many reports of this worker's life have come."""
        with self._lock:
            return self._telling.reports_of(worker)

    def _joined(self, flights: Sequence[Flight], tries: Mapping[str, int]) -> Journey:
        router = next((flight for flight in flights if flight.seat is FlightSeat.ROUTER), None)
        key = flights[0].handoff
        count = 1 if router is None else tries[router.request]

        def why(seat: FlightSeat, worker: str) -> str:
            if seat is FlightSeat.ROUTER:
                return j.NOT_SEEN if is_shared(key, self.level) else j.SAMPLED_OUT
            if not worker:  # nobody came for it
                return j.NOT_SEEN
            return self._telling.why(worker, key, max((_latest(flight) for flight in flights), default=0.0))

        return j.join(flights, why=why, gone=self._telling.is_gone, tries=count)

    # --- keeping

    def _knows(self, key: str) -> bool:
        return key in self._fine or key in self._failed

    def _keeps(self, flight: Flight) -> bool:
        """Whether what a worker told is among what is kept here; a share of what ended well, if there is much."""
        if not self.level or is_shared(flight.handoff, self.level) or flight.failed or self._knows(flight.handoff):
            return True
        return any(matches(flight, text) for text in list(self._asked_for))

    def _put(self, key: str, flight: Flight) -> None:
        shelf = self._failed if key in self._failed else self._fine
        teller = ROUTER if flight.seat is FlightSeat.ROUTER else flight.worker
        story = shelf.get(key)
        if story is None:
            story = Story(key, teller)
            shelf.add(story)
        side = side_of(flight)
        before = story.sides.get(side)
        if before is not None and before.is_over and not flight.is_over:
            self.counters["late_flights"] += 1
            return
        if before is None and not _has_room(story, flight):
            self.counters["odd_flights"] += 1
            return
        story.sides[side] = flight
        grown = size_of(flight) - (0 if before is None else size_of(before))
        shelf.grow(story, grown)
        self._bytes += grown
        if teller == ROUTER != story.teller:
            shelf.hand_over(story, ROUTER)
        if flight.failed and not story.failed:
            story.failed = True
            self._failed.add(self._fine.take(key))
        self._forget()

    def _forget(self) -> None:
        journeys_max, failures_max, bytes_max = self._bounds
        while len(self._fine) > journeys_max:
            self._forgot(self._fine.drop())
        while len(self._failed) > failures_max:
            self._forgot(self._failed.drop())
        while self._bytes > bytes_max and (self._fine or self._failed):
            self._forgot((self._fine or self._failed).drop(for_bytes=True))

    def _forgot(self, story: Story) -> None:
        self._bytes -= story.bytes
        self.counters["forgotten"] += 1


class _Rate:
    """Which share is kept, by how many came in the last second."""

    def __init__(self, per_s: float) -> None:
        self._per_s = per_s
        self._began = 0.0
        self._count = 0
        self._level = 0

    def level(self, now: float) -> int:
        """Count one more."""
        self._count += 1
        passed = now - self._began
        if not 0.0 <= passed < 1.0:
            came = self._count / passed if 0.0 < passed < 2.0 else 0.0
            self._level = 0
            while self._level < LEVEL_MAX and came > self._per_s * (1 << self._level):
                self._level += 1
            self._began, self._count = now, 0
        return self._level


def _with_live(stories: Iterable[Story], live: Iterable[Flight]) -> list[list[Flight]]:
    """Each story's records; those under way join the story of their handoff."""
    groups = {story.key: list(story.sides.values()) for story in stories}
    for number, flight in enumerate(live):
        groups.setdefault(flight.handoff or f"live {number}", []).append(flight)
    return list(groups.values())


def _has_room(story: Story, flight: Flight) -> bool:
    """No worker takes the places of the others; the router's own word always has one."""
    if flight.seat is FlightSeat.ROUTER:
        return True
    of_it = sum(1 for seat, worker, _, _ in story.sides if (seat, worker) == (flight.seat, flight.worker))
    return of_it < SIDES_OF_ONE_MAX and len(story.sides) < SIDES_MAX


def _latest(flight: Flight) -> float:
    return flight.moments[-1].at if flight.moments else 0.0
