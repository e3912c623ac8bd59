"""The list of workers as log lines: who joined, left, drains, and whose circuit breaker opened or closed.

Law: each change is one INFO line; a member that comes and goes without end costs a bounded number of them.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable

import msgspec

log = logging.getLogger(__name__)

BROKEN = "broken"
DRAINING = "draining"
LINES_MAX = 64
"""At once; `LINES_PER_S` more every second."""
LINES_PER_S = 1.0


class WorkerSeen(msgspec.Struct, frozen=True):
    """A worker at one look; `state` is a word of the router's or the registry's."""

    name: str
    incarnation: int
    role: str
    address: str
    state: str

    def __str__(self) -> str:
        return f"{self.role} worker {self.name}" + (f" ({self.address})" if self.address else "")


class RosterNews:
    """Says what has changed from one look to the next. Of one thread."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._known: dict[str, WorkerSeen] = {}
        self._left = float(LINES_MAX)
        self._looked_at = clock()
        self._untold = 0

    def look(self, workers: Iterable[WorkerSeen]) -> None:
        here = {worker.name: worker for worker in workers}
        known, self._known = self._known, here
        if here == known:
            return
        now = self._clock()
        self._left = min(LINES_MAX, self._left + (now - self._looked_at) * LINES_PER_S)
        self._looked_at = now
        for name in known.keys() - here.keys():
            self._gone(known[name])
        for name, worker in here.items():
            before = known.get(name)
            if before is None or before.incarnation != worker.incarnation:
                self._came(worker, is_new=before is None)
            elif before.state != worker.state:
                self._changed(worker, before.state)
        if self._untold and self._left >= 1:
            self._left -= 1
            log.info("%d further changes of the list of workers were not logged", self._untold)
            self._untold = 0

    def _came(self, worker: WorkerSeen, is_new: bool) -> None:
        if self._may_say():
            how = "joined" if is_new else "joined again: it was restarted"
            state = "" if worker.state in ("serving", "ready") else f", {worker.state}"
            log.info("[worker-joined] %s %s%s; %d are listed", worker, how, state, len(self._known))

    def _gone(self, worker: WorkerSeen) -> None:
        if self._may_say():
            how = ", drained" if worker.state == DRAINING else ""
            log.info("[worker-left] %s left the list%s; %d are listed", worker, how, len(self._known))

    def _changed(self, worker: WorkerSeen, before: str) -> None:
        if not self._may_say():
            return
        if worker.state == DRAINING:
            log.info("[worker-draining] %s drains: it finishes its requests and gets no new ones", worker)
        elif worker.state == BROKEN:
            log.info("[breaker-opened] %s: circuit breaker opened; no requests until it answers a probe", worker)
        elif before == BROKEN:
            log.info("[breaker-closed] %s: circuit breaker closed; it is %s", worker, worker.state)
        else:
            log.info("[worker-state] %s is %s, it was %s", worker, worker.state, before)

    def _may_say(self) -> bool:
        if self._left < 1:
            self._untold += 1
            return False
        self._left -= 1
        return True
