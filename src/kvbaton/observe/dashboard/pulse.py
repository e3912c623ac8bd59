"""The last three minutes in buckets of two seconds: number of handoffs, their outcomes and stage times.

Law: memory does not depend on the load: a bucket keeps counts and a bounded sample of each time. Time is an argument;
everything older than the oldest bucket is forgotten when the next event is recorded.
"""

from __future__ import annotations

import itertools
import math
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from kvbaton.observe.flight.flight_records import STAGES

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
