"""Workers that say they are full: a directory that marks them, by their own reports.

Laws: a worker speaks for itself alone, in the life that is listed, and its word is forgotten after `FULL_S`: one that
went silent is the registry's to judge. "Full" is advice: whoever is full is asked after the others, never not at all,
so that no report takes a cluster out of service.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence

import msgspec

from kvbaton.protocol.ids import Incarnation, PeerId, WorkerId
from kvbaton.router.workers.directory import ListedEngine, WorkerDirectory

FULL_S = 5.0
"""Reports come twice a second."""
GAUGE = "full"
NOTED_MAX = 4096
LOOK_S = 0.25
"""How often it is looked whether a word is to be forgotten, while there is any."""


class FullWorkers:
    """`heard` is called on the registry's thread, `snapshot` on the router's."""

    def __init__(self, inner: WorkerDirectory, clock: Callable[[], float] = time.monotonic) -> None:
        self._inner = inner
        self._clock = clock
        self._until: dict[PeerId, float] = {}
        self._listed: object = None
        self._full: frozenset[PeerId] = frozenset()
        self._changes_at = 0.0  # when the next word is forgotten, or at once
        self._workers: tuple[ListedEngine, ...] = ()

    def heard(self, worker: WorkerId, incarnation: Incarnation, gauges: Mapping[str, float]) -> None:
        peer = PeerId(worker, incarnation)
        if gauges.get(GAUGE, 0.0) > 0.0:  # false where it is no number
            if peer not in self._until and len(self._until) >= NOTED_MAX:
                return
            is_news = peer not in self._full
            self._until[peer] = self._clock() + FULL_S
        else:
            is_news = self._until.pop(peer, None) is not None
        if is_news:
            self._changes_at = 0.0

    def snapshot(self) -> Sequence[ListedEngine]:
        """The same tuple while nothing has changed."""
        listed, now = self._inner.snapshot(), self._clock()
        if listed is self._listed and now < self._changes_at:
            return self._workers
        self._changes_at = math.inf  # before the look: what is heard meanwhile is looked at again
        for peer, until in list(self._until.items()):
            if until <= now:
                self._until.pop(peer, None)
        full = frozenset(self._until)
        if full and self._changes_at:  # nothing was heard meanwhile
            self._changes_at = now + LOOK_S
        if listed is not self._listed or full != self._full:
            self._listed, self._full = listed, full
            self._workers = tuple(_marked(worker, worker.peer in full) for worker in listed)
        return self._workers


def _marked(worker: ListedEngine, full: bool) -> ListedEngine:
    return worker if worker.full is full else msgspec.structs.replace(worker, full=full)
