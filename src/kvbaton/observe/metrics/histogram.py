"""Counts by size, in fixed buckets, with the last example of each.

Law: as many numbers as buckets, however much is observed.
"""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec


class Exemplar(msgspec.Struct, frozen=True):
    """One counted value: it leads from a number to a handoff."""

    transfer: str
    value: float
    at: float  # Unix time


@dataclass(slots=True)
class Histogram:
    bounds: Sequence[float]  # rising; above the last there is one bucket more
    counts: list[int] = field(init=False)
    exemplars: list[Exemplar | None] = field(init=False)
    sum: float = 0.0

    def __post_init__(self) -> None:
        self.counts = [0] * (len(self.bounds) + 1)
        self.exemplars = [None] * (len(self.bounds) + 1)

    @property
    def count(self) -> int:
        return sum(self.counts)

    def observe(self, value: float, transfer: str = "", at: float = 0.0) -> None:
        index = bisect.bisect_left(self.bounds, value)
        self.counts[index] += 1
        self.sum += value
        if transfer:
            self.exemplars[index] = Exemplar(transfer, value, at)

    def add(self, other: Histogram) -> None:
        """Count what another has counted too; of two examples the later one stays."""
        for index, (count, example) in enumerate(zip(other.counts, other.exemplars, strict=True)):
            mine = self.exemplars[index]
            self.counts[index] += count
            self.exemplars[index] = example if mine is None or (example and example.at > mine.at) else mine
        self.sum += other.sum

    def copy(self) -> Histogram:
        other = Histogram(self.bounds)
        other.counts, other.exemplars, other.sum = list(self.counts), list(self.exemplars), self.sum
        return other
