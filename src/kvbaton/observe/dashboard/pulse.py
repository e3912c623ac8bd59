"""The last three minutes in buckets of two seconds: how many handoffs, how they ended, how long their stages took.

Law: what is held does not depend on the load: a bucket keeps counts and a bounded sample of each time. Time is an
argument; what is older than the oldest bucket is forgotten when the next thing is noted.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from kvbaton.observe.flight.flight_records import STAGES

BUCKET_S = 2.0
BUCKETS = 90
MINUTE = 30
"""Buckets of the last minute."""
SAMPLES_MAX = 48
"""Kept of each time in each bucket."""


@dataclass(slots=True)
class Sample:
    """Some of many numbers, spread over all of them."""

    count: int = 0
    kept: list[float] = field(default_factory=list)

    def add(self, value: float) -> None:
        if not math.isfinite(value) or value < 0:
            return
        if len(self.kept) < SAMPLES_MAX:
            self.kept.append(value)
        else:
            self.kept[self.count * 29 % SAMPLES_MAX] = value  # 29 and 48 share no factor: every place has its turn
        self.count += 1


@dataclass(slots=True)
class Bucket:
    """What happened in two seconds."""

    number: int  # of the bucket, from the epoch on
    ended: int = 0
    failed: int = 0
    lost: int = 0  # tries that the router saw fail at workers that count for themselves; one that died tells nothing
    bytes: float = 0.0
    in_flight: int | None = None  # the most that were seen; None: nobody looked
    ttft: Sample = field(default_factory=Sample)
    stages: dict[str, Sample] = field(default_factory=lambda: {name: Sample() for name in STAGES})


class Pulse:
    """Buckets, the newest last. What is noted late counts for its own time, as far as there is a bucket for it."""

    def __init__(self) -> None:
        self._buckets: deque[Bucket] = deque(maxlen=BUCKETS)
        self._since: float | None = None

    def ended(self, now: float, count: int, failed: int) -> None:
        bucket = self._bucket(now)
        bucket.ended += max(count, 0)
        bucket.failed += max(failed, 0)

    def lost(self, now: float) -> None:
        """A try failed at the router, of which D may tell as well, or may not."""
        self._bucket(now).lost += 1

    def moved(self, now: float, count: float) -> None:
        self._bucket(now).bytes += max(count, 0.0)

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

    def rates(self, now: float, seconds: float) -> tuple[float, float]:
        """Handoffs and bytes per second, over whole buckets that are past, or over what there is of them."""
        last = int(now // BUCKET_S)
        count = max(int(seconds // BUCKET_S), 1)
        past = [each for each in self._buckets if last - count <= each.number < last]
        known = count * BUCKET_S if self._since is None else min(count * BUCKET_S, max(now - self._since, BUCKET_S))
        return sum(each.ended for each in past) / known, sum(each.bytes for each in past) / known

    def minute(self, now: float) -> list[Bucket]:
        first = int(now // BUCKET_S) - MINUTE
        return [each for each in self._buckets if each.number > first]

    def history(self, now: float) -> dict[str, list[float | None]]:
        """Per bucket, the oldest first, up to the last that is past; None before anything was seen."""
        last = int(now // BUCKET_S)
        by_number = {each.number: each for each in self._buckets}
        since = None if self._since is None else int(self._since // BUCKET_S)
        names = ("handoffs", "failed", "ttft_ms", "in_flight", "bytes")
        found: dict[str, list[float | None]] = {name: [] for name in names}
        before: int | None = None  # in flight when somebody last looked
        for number in range(last - BUCKETS + 1, last):
            bucket = by_number.get(number)
            if bucket is not None and bucket.in_flight is not None:
                before = bucket.in_flight
            if since is None or number < since:
                row: Sequence[float | None] = (None,) * len(names)
            else:
                row = _row(bucket, before)
            for name, value in zip(names, row, strict=True):
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


def _row(bucket: Bucket | None, in_flight: int | None) -> Sequence[float | None]:
    if bucket is None:
        return (0.0, 0.0, None, in_flight, 0.0)
    middle = percentile(bucket.ttft.kept, 0.5)
    return (
        round(bucket.ended / BUCKET_S, 1),
        round(max(bucket.failed, bucket.lost) / BUCKET_S, 1),
        None if middle is None else round(middle * 1e3, 2),
        in_flight,
        round(bucket.bytes / BUCKET_S),
    )


def percentile(values: Iterable[float], share: float) -> float | None:
    """The smallest of them that at least that share does not exceed; None of nothing."""
    ordered = sorted(values)
    if not ordered:
        return None
    return ordered[min(max(math.ceil(share * len(ordered)) - 1, 0), len(ordered) - 1)]
