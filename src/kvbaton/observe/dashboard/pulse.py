"""The last three minutes in buckets of two seconds: number of handoffs, their outcomes and stage times.

Law: memory does not depend on the load: a bucket keeps counts and a bounded sample of each time. Time is an argument;
everything older than the oldest bucket is forgotten when the next event is recorded.

The dashboard's state as values: workers, links, handoffs in flight, failures.

Law: nothing here is bounded yet; `state` selects what a browser gets.

Views of one worker, one attempt, one failure: from the router's records to values of `scene`.

Law: pure. The side that failed is named, even if the client got its answer; a worker that left is shown with its last
report, and a restarted one is not shown its former incarnation's.
"""

from __future__ import annotations

import itertools
import math
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import msgspec

from kvbaton.observe.flight.flight_records import STAGES, Flight, FlightSeat
from kvbaton.observe.flight.journey import Journey
from kvbaton.observe.flight.worker_reports import WorkerGauges


class SeenHandoff(msgspec.Struct, frozen=True):
    """A worker: its registry entry and its own reports."""

    name: str
    role: str  # prefill, decode, both
    state: str  # ready, draining, suspect, broken, gone
    incarnation: str = ""
    heard_s: float | None = None  # since its last report; None: it sends none
    gauges: Mapping[str, float] = {}
    rates: Mapping[str, float] = {}  # per second, in the window of all rates
    links: Mapping[str, str] = {}  # source worker: data plane
    note: str = ""  # why it is not used, where that is known
    address: str = ""  # where it is asked
    host: str = ""
    version: str = ""
    alone: tuple[float, float] | None = None  # prompt tokens of the last minute, and those computed for want of a P


class MovingHandoff(msgspec.Struct, frozen=True):
    """A handoff in flight, or one that has just ended."""

    number: int  # rises; of one that is under way 0
    source: str
    target: str
    stage: str = ""  # of one under way
    end: str = ""
    failed: bool = False
    tokens: int = 0
    key: str = ""  # of one under way: the same for as long as it is


class Failure(msgspec.Struct, frozen=True):
    """A handoff that did not arrive, or an attempt that failed."""

    at: float
    reason: str
    find: str  # what opens its timeline: an id that `/flights` knows
    handoff: str = ""
    request: str = ""
    source: str = ""
    target: str = ""
    seen_by: str = ""
    mode: str = ""
    transport: str = ""
    detail: str = ""
    answered: bool = False  # all the same: by a later try, or since D computed the prompt itself


class Figures(msgspec.Struct, frozen=True):
    """The router's own figures: those of now, and counts since it started, by the names of `pulse`."""

    in_flight: int = 0
    waiting: int = 0  # of those, for a first byte
    draining: bool = False
    counts: Mapping[str, int] = {}


class Trouble(msgspec.Struct, frozen=True):
    """What the router cannot serve, or only otherwise than it should, and why."""

    text: str
    is_down: bool  # requests are refused


class Scene(msgspec.Struct, frozen=True, kw_only=True):
    """A snapshot of a cluster."""

    at: float
    version: str = ""
    host: str = ""
    mode: str = ""
    drain: str = ""  # the command that drains a worker, but for its name; "" where there is none
    uptime_s: float = 0.0
    own: Figures = Figures()
    trouble: Trouble | None = None
    workers: Sequence[SeenHandoff] = ()
    under_way: Sequence[MovingHandoff] = ()
    ended: Sequence[MovingHandoff] = ()
    failures: Sequence[Failure] = ()
    pairs: Mapping[tuple[str, str], tuple[int, int]] = {}  # P and D: handoffs and tokens in the window of rates


_STEPS = {"prefill_sent": "prefill", "chosen": "prefill", "prefill_answered": "handoff", "decode_sent": "handoff"}
_ORDER = {FlightSeat.DECODE: 0, FlightSeat.PREFILL: 1, FlightSeat.ROUTER: 2}


class ListedWorker(msgspec.Struct, frozen=True):
    """A worker as the router lists it."""

    name: str
    role: str
    state: str  # ready, draining, suspect, broken
    incarnation: str = ""
    note: str = ""
    address: str = ""


def failure_of(journey: Journey) -> Failure:
    """The part of a journey that failed: D's report has precedence over P's, and both over the router's."""
    failed = sorted((lane for lane in journey.lanes if lane.failed), key=lambda lane: _ORDER[lane.seat])
    lane = failed[0] if failed else None
    prefill, decode = journey.lane(FlightSeat.PREFILL), journey.lane(FlightSeat.DECODE)
    names = {missing.seat: missing.worker for missing in journey.missing}
    last = max((moment.at for moment in lane.moments), default=journey.seconds) if lane else journey.seconds
    return Failure(
        at=journey.began + last,
        reason=lane.end if lane else journey.end,
        find=journey.handoff or journey.request,
        handoff=journey.handoff,
        request=journey.request,
        source=prefill.worker if prefill else names.get(FlightSeat.PREFILL, ""),
        target=decode.worker if decode else names.get(FlightSeat.DECODE, ""),
        seen_by=lane.worker if lane else "",
        mode=journey.mode,
        transport=journey.transport,
        detail=(lane.detail if lane else "") or journey.detail,
        answered=journey.answered_by is not None or journey.end == "ok",
    )


def seen(
    listed: Sequence[ListedWorker],
    workers: Sequence[WorkerGauges],
    rates: Mapping[str, Mapping[str, float]],
    alone: Mapping[str, tuple[float, float]],
) -> list[SeenHandoff]:
    """Registered workers with their reports; and workers that reported and are no longer registered."""
    told = {each.name: each for each in workers}
    found = [_joined(each, told.get(each.name), rates.get(each.name, {}), alone.get(each.name)) for each in listed]
    here = {each.name for each in listed}
    for each in workers:
        if each.name not in here and each.seat and each.age_s is not None:
            found.append(SeenHandoff(each.name, each.seat, "gone", each.incarnation, each.age_s))
    return found


def _joined(
    listed: ListedWorker, told: WorkerGauges | None, rates: Mapping[str, float], alone: tuple[float, float] | None
) -> SeenHandoff:
    found = SeenHandoff(
        listed.name, listed.role, listed.state, listed.incarnation, note=listed.note, address=listed.address
    )
    if told is None or (listed.incarnation and told.incarnation != listed.incarnation):
        return found
    return msgspec.structs.replace(
        found,
        heard_s=told.age_s,
        gauges=told.gauges,
        rates=rates,
        links=told.links,
        host=told.host,
        version=told.version,
        alone=alone,
    )


def key_of(flight: Flight) -> str:
    return f"{flight.request[:40]}#{flight.retries}@{flight.began:.6f}"


def moving_of(flight: Flight) -> MovingHandoff:
    stage = "prefill"
    for moment in flight.moments:
        stage = "decode" if moment.step == "first_byte" else _STEPS.get(moment.step, stage)
    return MovingHandoff(0, flight.peers[0], flight.peers[1], stage=stage, tokens=flight.tokens, key=key_of(flight))


BUCKET_S = 2.0
BUCKETS = 90
RATE_S = 10.0
"""The window of everything that is told per second."""
MINUTE = 30
"""Buckets of the last minute."""
SAMPLES_MAX = 256
"""Kept of each time in each bucket."""


_SERIES = ("handoffs", "delivered", "ttft_ms", "in_flight", "bytes", "tokens", "retries", "requests", "errors")
CHUNKS, RETRIES = "chunks", "retries"
"""Of the router's own counts: chunks of streamed answers that bear a token, and tries after the first."""
CLASSES: Mapping[str, tuple[str, ...]] = {"2xx": ("2xx",), "4xx": ("4xx", "429"), "5xx": ("5xx",), "gone": ("gone",)}
"""How requests end, and which counts of the router those are; `gone`: the client left."""


@dataclass(slots=True)
class Sample:
    """A bounded sample of many numbers, spread over all of them."""

    count: int = 0
    kept: list[float] = field(default_factory=list)

    def add(self, value: float) -> None:
        if not math.isfinite(value) or value < 0:
            return
        if len(self.kept) < SAMPLES_MAX:
            self.kept.append(value)
        else:
            self.kept[self.count * 29 % SAMPLES_MAX] = value  # they share no factor: every place has its turn
        self.count += 1


@dataclass(slots=True)
class Bucket:
    """The events of two seconds; of what was counted between two looks, its share."""

    number: int  # of the bucket, from the epoch on
    ended: float = 0.0
    failed: float = 0.0
    lost: int = 0  # handoffs of which any side told that they failed; a worker that died counts nothing any more
    bytes: float = 0.0
    counts: dict[str, float] = field(default_factory=dict)  # the router's own
    in_flight: int | None = None  # the maximum seen; None: not sampled
    ttft: Sample = field(default_factory=Sample)
    itl: Sample = field(default_factory=Sample)
    stages: dict[str, Sample] = field(default_factory=lambda: {name: Sample() for name in STAGES})


class Pulse:
    """Buckets, the newest last. Late events count for their own time, if there is a bucket for it."""

    def __init__(self) -> None:
        self._buckets: deque[Bucket] = deque(maxlen=BUCKETS)
        self._since: float | None = None

    def ended(self, now: float, count: float, failed: float) -> None:
        bucket = self._bucket(now)
        bucket.ended += max(count, 0)
        bucket.failed += max(failed, 0)

    def lost(self, now: float) -> None:
        """A handoff failed; D may or may not count it as well. Once for each."""
        self._bucket(now).lost += 1

    def moved(self, now: float, count: float) -> None:
        self._bucket(now).bytes += max(count, 0.0)

    def counted(self, since: float, until: float, counts: Mapping[str, float]) -> None:
        """What the router counted between two looks."""
        for at, share in shares(since, until):
            kept = self._bucket(at).counts
            for name, count in counts.items():
                kept[name] = kept.get(name, 0.0) + max(count, 0.0) * share

    def between_tokens(self, now: float, seconds: float) -> None:
        self._bucket(now).itl.add(seconds)

    def first_byte(self, now: float, seconds: float) -> None:
        self._bucket(now).ttft.add(seconds)

    def staged(self, now: float, times: dict[str, float]) -> None:
        bucket = self._bucket(now)
        for name, seconds in times.items():
            if name in bucket.stages:
                bucket.stages[name].add(seconds)

    def in_flight(self, now: float, count: int) -> None:
        bucket = self._bucket(now)
        bucket.in_flight = max(bucket.in_flight or 0, count)

    def rates(self, now: float) -> tuple[float, float, float]:
        """Handoffs, bytes and tokens per second, of the window of all rates."""
        numbers, known_s = window(now), self.known_s(now)
        past = [each for each in self._buckets if each.number in numbers]
        sums = (outcome(past)[0], sum(each.bytes for each in past), counts_of(past)[CHUNKS])
        return sums[0] / known_s, sums[1] / known_s, sums[2] / known_s

    def answers(self, now: float) -> dict[str, float]:
        """Requests that ended per second, by how: of the window of all rates."""
        numbers, known_s = window(now), self.known_s(now)
        counts = counts_of(each for each in self._buckets if each.number in numbers)
        return {name: sum(counts[key] for key in keys) / known_s for name, keys in CLASSES.items()}

    def known_s(self, now: float) -> float:
        """How much of the window of all rates there is: little, soon after the first event."""
        return RATE_S if self._since is None else min(RATE_S, max(now - self._since, BUCKET_S))

    def minute(self, now: float) -> list[Bucket]:
        first = int(now // BUCKET_S) - MINUTE
        return [each for each in self._buckets if each.number > first]

    def history(self, now: float) -> dict[str, list[float | None]]:
        """Per bucket, the oldest first, up to the last that is past; None where nothing was seen."""
        last = int(now // BUCKET_S)
        by_number = {each.number: each for each in self._buckets}
        since = None if self._since is None else int(self._since // BUCKET_S)
        found: dict[str, list[float | None]] = {name: [] for name in _SERIES}
        for number in range(last - BUCKETS + 1, last):
            is_known = since is not None and number >= since
            row = _row(by_number.get(number) or Bucket(number)) if is_known else (None,) * len(_SERIES)
            for name, value in zip(_SERIES, row, strict=True):
                found[name].append(value)
        return found

    def _bucket(self, now: float) -> Bucket:
        if self._since is None:
            self._since = now
        number = int(now // BUCKET_S)
        if not self._buckets or self._buckets[-1].number < number:
            self._buckets.append(Bucket(number))
        newest = self._buckets[-1]
        if newest.number == number:
            return newest
        return next((each for each in reversed(self._buckets) if each.number <= number), self._buckets[0])


def window(now: float) -> range:
    """The numbers of the buckets of all rates: whole ones that are past."""
    last = int(now // BUCKET_S)
    return range(last - int(RATE_S // BUCKET_S), last)


def counts_of(buckets: Iterable[Bucket]) -> dict[str, float]:
    """The router's own counts; every one that the page tells is there."""
    found = dict.fromkeys((CHUNKS, RETRIES, *itertools.chain(*CLASSES.values())), 0.0)
    for each in buckets:
        for name, count in each.counts.items():
            found[name] = found.get(name, 0.0) + count
    return found


def shares(since: float, until: float) -> Iterator[tuple[float, float]]:
    """The buckets between two looks: a time in each, and its share of what was counted.

    Looks and buckets do not keep step: without shares one bucket has two looks and the next one, and the line is a saw.
    """
    since, last = min(since, until), int(until // BUCKET_S)
    for number in range(max(int(since // BUCKET_S), last - BUCKETS), last + 1):
        begin = max(since, number * BUCKET_S)
        yield begin, (min(until, (number + 1) * BUCKET_S) - begin) / (until - since) if since < until else 1.0


def outcome(buckets: Iterable[Bucket]) -> tuple[float, float]:
    """Handoffs that ended, and those of them that failed."""
    past = list(buckets)
    told, lost = sum(each.failed for each in past), sum(each.lost for each in past)
    failed = max(told, lost)  # a D counts its own, and tells of most; of one that died only the router tells
    return sum(each.ended for each in past) + failed - told, failed


def _row(bucket: Bucket) -> Sequence[float | None]:
    """In the order of `_SERIES`."""
    middle = percentile(bucket.ttft.kept, 0.5)
    ended, failed = outcome([bucket])
    counts = counts_of([bucket])
    return (
        round(ended / BUCKET_S, 1),
        None if not ended else round((ended - failed) / ended, 5),
        None if middle is None else round(middle * 1e3, 2),
        bucket.in_flight,
        round(bucket.bytes / BUCKET_S),
        round(counts[CHUNKS] / BUCKET_S, 1),
        round(counts[RETRIES], 2),
        round(sum(counts[key] for keys in CLASSES.values() for key in keys) / BUCKET_S, 2),
        round(counts["5xx"] / BUCKET_S, 2),
    )


def percentile(values: Iterable[float], share: float) -> float | None:
    """The smallest of them that at least that share does not exceed; None for an empty list."""
    ordered = sorted(values)
    if not ordered:
        return None
    return ordered[min(max(math.ceil(share * len(ordered)) - 1, 0), len(ordered) - 1)]
