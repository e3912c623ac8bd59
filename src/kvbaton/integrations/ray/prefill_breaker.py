"""Which prefill replicas D leaves alone for a while, because they failed it.

Laws: a replica that failed is not asked until its rest is over, and then by one request, whose success ends the rest
and whose failure begins another. `ANY` stands for all of them: no replica took a request in time. What is remembered
is bounded by the replicas that failed within one rest.
"""

from __future__ import annotations

import time
from collections.abc import Callable

ANY = ""


class PrefillBreaker:
    """One D's experience with the prefill deployment."""

    def __init__(self, rest_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._rest_s = rest_s
        self._clock = clock
        self._until: dict[str, float] = {}

    def allows(self, replica: str) -> bool:
        """Whether to ask it now; whoever is told so after a rest is the one that tries it."""
        until = self._until.get(replica)
        if until is None:
            return True
        if self._clock() < until:
            return False
        self._until[replica] = self._clock() + self._rest_s
        return True

    def failed(self, replica: str) -> None:
        now = self._clock()
        # Of a replica that Ray has replaced nothing more is heard: its entry goes once nobody can be trying it.
        self._until = {each: until for each, until in self._until.items() if until + self._rest_s > now}
        self._until[replica] = now + self._rest_s

    def worked(self, replica: str) -> None:
        self._until.pop(replica, None)
        self._until.pop(ANY, None)

    def __len__(self) -> int:
        return len(self._until)
