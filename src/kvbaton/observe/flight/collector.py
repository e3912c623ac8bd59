"""All records of handoffs at the router: its own, and those that workers report; kept for a while, and joined.

Laws: memory is bounded, whatever workers report; failures are kept apart, so that successes do not evict them, and a
worker's reports evict only its own (`JourneyStore`). Records come in any order and more than once; the last record of
a side stands, also when its process is gone. A worker reports only for itself: its name and incarnation are those that
its connection proved. Safe from any thread; callbacks never block.

    note(flight)              a record of the router's own; the same attempt again replaces it
    watch(live), unwatch      an attempt in flight, asked for its record only on demand
    heard(worker, life, ...)  a worker's report
    listed(workers)           the workers registered now
    journeys(...)             joined, newest first
"""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import msgspec

from kvbaton.observe.flight import journey as j
from kvbaton.observe.flight.dumps import clean, size_of
from kvbaton.observe.flight.flight_records import Flight, FlightReport, FlightSeat
from kvbaton.observe.flight.journey import (
    Answered,
    Journey,
    answered_by,
    began,
    is_answered_retry,
    key_of,
    matches,
    side_of,
    tries_of,
)
from kvbaton.observe.flight.recorder import LEVEL_MAX, is_shared
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
    """An attempt in flight at the router."""

    def flight(self) -> Flight:
        """Its record so far; cheap, never blocks."""


class Gathering:
    """The latest handoffs, from all sides."""

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
        self.on_told: list[Callable[[Flight], None]] = []
        """Called with a worker's record when it is over, once, on the thread that heard of it. Never blocks."""
        self.counters: Counter[str] = Counter()
        self.level = 0  # one in 2**level of the successful ones is kept, the same as at the workers
        self._clock = clock
        self._bounds = (journeys_max, failures_max, bytes_max)
        self._fine = JourneyStore()
        self._failed = JourneyStore()
        self._refused = JourneyStore()  # failures for which no worker was asked: an outage makes thousands
        self._bytes = 0
        self._live: dict[Live, None] = {}  # oldest first
        self._asked_for: dict[str, None] = {}
        self._answered: dict[str, Answered] = {}  # requests of which an earlier try failed
        self._telling = WorkerReports()
        self._rate = _Rate(flights_per_s)
        self._lock = threading.Lock()

    # --- input

    def watch(self, live: Live) -> None:
        """An attempt has started."""
        self._live[live] = None  # without the lock: readers take a copy

    def unwatch(self, live: Live) -> None:
        """It has ended; `note` may follow."""
        self._live.pop(live, None)

    def wants(self, handoff: str, *, always: bool, request: str = "") -> bool:
        """Whether to make a record of an ended attempt; to be called once for each.

        Always for failed or traced ones; at high rates one in 2**level of the others. An attempt without a handoff is
        chosen by its request.
        """
        self.level = self._rate.level(self._clock())
        if always or not self.level or is_shared(handoff or request, self.level):
            return True
        self.counters["sampled_out"] += 1
        return False

    def note(self, flight: Flight) -> None:
        """One of the router's own; a record in flight is replaced by its final one."""
        if flight.is_over:
            self._tell(self.on_flight, flight)
        with self._lock:
            key = key_of(flight)
            if is_answered_retry(flight):
                self._answered[flight.request] = (flight.retries, flight.began)
                while len(self._answered) > FAILURES_MAX:
                    del self._answered[next(iter(self._answered))]
            if (
                not self.level
                or flight.failed
                or self._knows(key)
                or is_shared(flight.handoff or flight.request, self.level)
            ):
                self._put(key, flight)
            else:
                self.counters["sampled_out"] += 1

    def _tell(self, callbacks: Iterable[Callable[[Flight], None]], flight: Flight) -> None:
        for callback in callbacks:
            try:
                callback(flight)
            except Exception:
                self.counters["callback_faults"] += 1
                log.exception("[callback-failed] a listener of flights failed; continuing")

    def amend(self, flight: Flight) -> None:
        """Additional data for a recorded attempt. Listeners were already notified."""
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
            ended = [flight for flight in report.flights if self._put(key_of(flight), flight)]
        for flight in ended:
            self._tell(self.on_told, flight)

    def listed(self, workers: Mapping[str, tuple[int, str]]) -> None:
        """The workers registered now: name to incarnation and role (prefill, decode, both)."""
        with self._lock:
            self._telling.listed(workers, self._clock())

    def ask_for(self, text: str) -> None:
        """Reports about this id are kept from here on, also where only a share is."""
        with self._lock:
            self._asked_for.pop(text, None)
            self._asked_for[text] = None
            while len(self._asked_for) > ASKED_FOR_MAX:
                del self._asked_for[next(iter(self._asked_for))]

    # --- output

    def journeys(self, last: int = 20, failed: bool = False, find: str = "", handoffs: bool = False) -> list[Journey]:
        """Newest first, attempts in flight included; `find` is a request id, a handoff id, or a prefix of one.

        `handoffs`: those alone for which the router had a pair, or of which a worker told.
        """
        last = max(0, min(last, LAST_MAX))
        with self._lock:
            count = None if find or handoffs else 2 * last  # enough: what began last was mostly noted last
            kept = (self._failed,) if failed and handoffs else (self._fine, self._failed, self._refused)
            stories = [story for each in kept for story in itertools.islice(reversed(each), count)]
            groups = _with_live(stories, [each.flight() for each in list(self._live)])
            retried = dict(self._answered)
        if find:  # from here on without the lock: requests wait for it too
            groups = [group for group in groups if any(matches(flight, find) for flight in group)]
        tries = tries_of(groups)
        if failed:
            groups = [group for group in groups if any(flight.failed for flight in group)]
        if handoffs:
            groups = [group for group in groups if any(flight.is_handoff for flight in group)]
        groups.sort(key=began, reverse=True)
        return [self._joined(group, tries, answered_by(group, retried)) for group in groups[:last]]

    def under_way(self, limit: int = LAST_MAX) -> list[Flight]:
        """The router's attempts in flight, newest first."""
        return [live.flight() for live in itertools.islice(reversed(list(self._live)), max(0, limit))]

    def records(self) -> list[Flight]:
        """The router's own records, oldest first, and those in flight: what is dumped on request."""
        with self._lock:
            stories = [*self._fine, *self._failed, *self._refused]
            own = [flight for story in stories for flight in story.sides.values() if flight.seat is FlightSeat.ROUTER]
            return [*sorted(own, key=lambda flight: flight.began), *(live.flight() for live in list(self._live))]

    def workers(self, now: float | None = None) -> list[WorkerGauges]:
        """Each worker's last report, by name; also of those that are gone, for a while."""
        with self._lock:
            return self._telling.told(self._clock() if now is None else now)

    def reporters(self) -> list[tuple[str, int]]:
        """Workers (name, incarnation) that are registered and report, and so can be asked for more."""
        with self._lock:
            return self._telling.reporters()

    def reports_of(self, worker: str) -> int:
        """How many reports of this incarnation have arrived."""
        with self._lock:
            return self._telling.reports_of(worker)

    def _joined(self, flights: Sequence[Flight], tries: Mapping[str, int], later: int | None) -> Journey:
        router = next((flight for flight in flights if flight.seat is FlightSeat.ROUTER), None)
        key = flights[0].handoff
        count = 1 if router is None else max(tries[router.request], 0 if later is None else later + 1)

        def why(seat: FlightSeat, worker: str) -> str:
            if seat is FlightSeat.ROUTER:
                return j.NOT_SEEN if is_shared(key, self.level) else j.SAMPLED_OUT
            if not worker:  # not claimed
                return j.NOT_SEEN
            return self._telling.why(worker, key, max((_latest(flight) for flight in flights), default=0.0))

        return j.join(flights, why=why, gone=self._telling.is_gone, tries=count, answered_by=later)

    # --- keeping

    def _knows(self, key: str) -> bool:
        return key in self._fine or key in self._failed or key in self._refused

    def _keeps(self, flight: Flight) -> bool:
        """Whether a worker's record is among those kept here; a share of the successful ones, if there are many."""
        if not self.level or is_shared(flight.handoff, self.level) or flight.failed or self._knows(flight.handoff):
            return True
        return any(matches(flight, text) for text in list(self._asked_for))

    def _put(self, key: str, flight: Flight) -> bool:
        """Whether its end is news."""
        shelf = next((each for each in (self._failed, self._refused) if key in each), self._fine)
        teller = ROUTER if flight.seat is FlightSeat.ROUTER else flight.worker
        story = shelf.get(key)
        if story is None:
            story = Story(key, teller)
            shelf.add(story)
        side = side_of(flight)
        before = story.sides.get(side)
        if before is not None and before.is_over and not flight.is_over:
            self.counters["late_flights"] += 1
            return False
        if before is None and not _has_room(story, flight):
            self.counters["odd_flights"] += 1
            return False
        story.sides[side] = flight
        grown = size_of(flight) - (0 if before is None else size_of(before))
        shelf.grow(story, grown)
        self._bytes += grown
        if teller == ROUTER != story.teller:
            shelf.hand_over(story, ROUTER)
        if flight.failed and not story.failed:
            story.failed = True
            was_asked = flight.seat is not FlightSeat.ROUTER or flight.peers
            (self._failed if was_asked else self._refused).add(self._fine.take(key))
        self._forget()
        return flight.is_over and (before is None or not before.is_over)

    def _forget(self) -> None:
        journeys_max, failures_max, bytes_max = self._bounds
        while len(self._fine) > journeys_max:
            self._forgot(self._fine.drop())
        for each in (self._failed, self._refused):
            while len(each) > failures_max:
                self._forgot(each.drop())
        while self._bytes > bytes_max and (left := self._fine or self._refused or self._failed):
            self._forgot(left.drop(for_bytes=True))

    def _forgot(self, story: Story) -> None:
        self._bytes -= story.bytes
        self.counters["forgotten"] += 1


class _Rate:
    """The share that is kept, by the rate of the last second."""

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
    """No worker takes the places of the others; the router's own record always has one."""
    if flight.seat is FlightSeat.ROUTER:
        return True
    of_it = sum(1 for seat, worker, _, _ in story.sides if (seat, worker) == (flight.seat, flight.worker))
    return of_it < SIDES_OF_ONE_MAX and len(story.sides) < SIDES_MAX


def _latest(flight: Flight) -> float:
    return flight.moments[-1].at if flight.moments else 0.0


ROUTER = ""
"""The teller of what the router saw; no worker has this name."""


@dataclass(slots=True)
class Story:
    """The records of one handoff, or of one attempt without a handoff."""

    key: str
    teller: str
    sides: dict[tuple[FlightSeat, str, str, str], Flight] = field(default_factory=dict)
    bytes: int = 0
    failed: bool = False


@dataclass(slots=True)
class _Bill:
    stories: dict[str, None] = field(default_factory=dict)  # keys, oldest first
    bytes: int = 0


class JourneyStore:
    """Stories by key. Not thread-safe; the owner has a lock."""

    def __init__(self) -> None:
        self._stories: dict[str, Story] = {}
        self._bills: dict[str, _Bill] = {}

    def __len__(self) -> int:
        return len(self._stories)

    def __contains__(self, key: str) -> bool:
        return key in self._stories

    def __iter__(self) -> Iterator[Story]:
        return iter(self._stories.values())

    def __reversed__(self) -> Iterator[Story]:
        return reversed(self._stories.values())

    def get(self, key: str) -> Story | None:
        return self._stories.get(key)

    def add(self, story: Story) -> None:
        self._stories[story.key] = story
        bill = self._bills.setdefault(story.teller, _Bill())
        bill.stories[story.key] = None
        bill.bytes += story.bytes

    def take(self, key: str) -> Story:
        """The story, no longer here."""
        story = self._stories.pop(key)
        self._strike(story)
        return story

    def grow(self, story: Story, by_bytes: int) -> None:
        story.bytes += by_bytes
        self._bills[story.teller].bytes += by_bytes

    def hand_over(self, story: Story, teller: str) -> None:
        """Charge it to another owner from here on, as the newest there."""
        self._strike(story)
        story.teller = teller
        bill = self._bills.setdefault(teller, _Bill())
        bill.stories[story.key] = None
        bill.bytes += story.bytes

    def drop(self, *, for_bytes: bool = False) -> Story:
        """Forget the oldest story of the owner that holds the most stories, or the most bytes."""
        bills = self._bills.values()
        most = max(bills, key=lambda bill: bill.bytes if for_bytes else len(bill.stories))
        return self.take(next(iter(most.stories)))

    def _strike(self, story: Story) -> None:
        bill = self._bills[story.teller]
        del bill.stories[story.key]
        bill.bytes -= story.bytes
        if not bill.stories:
            del self._bills[story.teller]
