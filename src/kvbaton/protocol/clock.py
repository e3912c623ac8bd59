"""Deadlines. Time is an argument everywhere: nothing in this package reads a clock.

Laws: a key has at most one due time; setting it again replaces it, and a popped key is gone. A key set after a time has
been popped is due after that time, so everything due at one time is popped in as many steps as there were keys: a key
that is set again for now waits for the next reading of the clock.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Hashable
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)

_SLACK = 64


class Timers(Generic[K]):
    """A set of keys with due times; cheap to move forward, which is what renewals do."""

    __slots__ = ("_at", "_heap", "_order", "_soonest")

    def __init__(self) -> None:
        self._at: dict[K, float] = {}
        self._heap: list[tuple[float, int, K]] = []
        self._order = itertools.count()
        self._soonest = -math.inf  # just after the latest popped time

    def set(self, key: K, at: float) -> None:
        at = max(self._soonest, at)  # in this order: a NaN, which the heap would lose, is due next
        self._at[key] = at
        heapq.heappush(self._heap, (at, next(self._order), key))
        if len(self._heap) > 2 * len(self._at) + _SLACK:
            self._heap = [(due, next(self._order), k) for k, due in self._at.items()]
            heapq.heapify(self._heap)

    def hasten(self, key: K, at: float) -> None:
        """Due at `at`, unless it is due sooner."""
        self.set(key, min(at, self._at.get(key, math.inf)))

    def clear(self, key: K) -> None:
        self._at.pop(key, None)

    def pop_due(self, now: float) -> K | None:
        """The next key due at or before `now`, removed; None when there is none."""
        self._soonest = max(self._soonest, math.nextafter(now, math.inf))
        due = self.next_at()
        if due is None or due > now:
            return None
        key = heapq.heappop(self._heap)[2]
        del self._at[key]
        return key

    def next_at(self) -> float | None:
        """When the earliest key is due; None when nothing waits."""
        while self._heap:
            at, _, key = self._heap[0]
            if self._at.get(key) == at:
                return at
            heapq.heappop(self._heap)
        return None

    def __len__(self) -> int:
        return len(self._at)
