"""When P's engine got a prompt that it computes for others, and when it first had a place for it: for its record.

A lease begins with the first chunk, or in mode pull when all is computed: what came before, only the engine knows.

Law: nothing is decided by these times. They are by the wall clock, and go with the request or with its lease's record.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kvbaton.observe.flight.flight_records import Moment
from kvbaton.protocol.ids import LeaseId, RequestId

ACCEPTED = "accepted"
SCHEDULED = "scheduled"
PROMPTS_MAX = 4096
UNRECORDED_MAX = 1024
"""Leases whose record has not begun: the node is a turn behind at most."""


class PromptTimes:
    """Of one engine. Any thread."""

    def __init__(self, wall: Callable[[], float]) -> None:
        self._wall = wall
        self._prompts: dict[RequestId, tuple[Moment, ...]] = {}
        self._leases: dict[LeaseId, tuple[Moment, ...]] = {}

    def accepted(self, request: RequestId, at: float | None = None) -> None:
        """A prompt came to be computed for others; `at`: earlier than now."""
        now = self._wall()
        self._prompts[request] = (Moment(ACCEPTED, now if at is None else min(at, now)),)

    def scheduled(self, request: RequestId) -> None:
        """It has a place; said again after a preemption, the first time counts."""
        known = self._prompts.get(request, ())
        if len(known) == 1:
            self._prompts[request] = (*known, Moment(SCHEDULED, self._wall()))
            _bound(self._prompts, PROMPTS_MAX)  # one that left meanwhile, in another thread, is there for good

    def leased(self, request: RequestId, lease: LeaseId) -> None:
        known = self._prompts.pop(request, ())
        if known:
            self._leases[lease] = known
            _bound(self._leases, UNRECORDED_MAX)

    def left(self, request: RequestId) -> None:
        self._prompts.pop(request, None)

    def take(self, lease: int) -> tuple[Moment, ...]:
        """For the record of a lease that has begun."""
        return self._leases.pop(LeaseId(lease), ())

    def __len__(self) -> int:
        return len(self._prompts) + len(self._leases)


def _bound(times: dict[Any, tuple[Moment, ...]], most: int) -> None:
    if len(times) > most:
        times.pop(next(iter(list(times))), None)  # a copy: any thread
