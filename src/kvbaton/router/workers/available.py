"""Workers that may be chosen now: those in the directory, minus those with an open circuit breaker.

Law: a list is made anew only when the directory, a standing or a suspicion's end has changed it; whoever holds the
`View` of one request sees one moment.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence

import msgspec

from kvbaton.api.params import Mode
from kvbaton.control.keyring import engine_of
from kvbaton.protocol.ids import PeerId
from kvbaton.router import policy
from kvbaton.router.policy import Pair
from kvbaton.router.workers.directory import ListedEngine, WorkerDirectory, WorkerListState
from kvbaton.router.workers.health import Health, WorkerStanding

LEFT_S = 900.0
"""For which a worker that left is told of."""
LEFT_MAX = 64
VIEW_S = 0.25
"""A view with a suspect in it is looked at again after this long."""


class View:
    """The workers of one moment, and the pairs among them."""

    def __init__(self, workers: tuple[ListedEngine, ...]) -> None:
        self.workers = workers
        self.able_alone = tuple(worker for worker in workers if worker.computes_alone)
        self.peers = frozenset(worker.peer for worker in workers)
        self.staying = frozenset(worker.peer for worker in workers if worker.state is not WorkerListState.DRAINING)
        self.full = frozenset(worker.peer for worker in workers if worker.full)
        self._pairs: dict[Mode, list[Pair]] = {}

    def pairs(self, mode: Mode) -> list[Pair]:
        found = self._pairs.get(mode)
        if found is None:
            found = self._pairs[mode] = policy.pairs(self.workers, mode)
        return found


class AvailableWorkers:
    """A directory seen through what requests have met with: they notice a death seconds before a registry does."""

    def __init__(self, directory: WorkerDirectory, health: Health) -> None:
        self.health = health
        self._directory = directory
        self._listed: object = None
        self._revision = -1
        self._until = 0.0
        self._view = View(())
        self._gone: list[PeerId] = []
        self._left: deque[tuple[float, ListedEngine]] = deque(maxlen=LEFT_MAX)

    def view(self, now: float) -> View:
        # By identity: directories give the same tuple until something changes, so a request costs no comparison. Health
        # changes are numbered; a suspicion ends by time alone, hence the look every `VIEW_S` while there is any.
        listed = self._directory.snapshot()
        if listed is self._listed and self.health.revision == self._revision and (not self.health or now < self._until):
            return self._view
        if listed is not self._listed:
            here = {worker.peer for worker in listed}
            # One that drained has said all it had to say, though a slow client may still be reading it
            before = [worker for worker in self._view.workers if worker.state is not WorkerListState.DRAINING]
            gone = sorted((worker for worker in before if worker.peer not in here), key=lambda worker: worker.peer)
            self._gone += [worker.peer for worker in gone]
            back = {worker.name for worker in listed}  # who comes back and drains then has left well
            kept = [each for each in self._left if each[1].name not in back]
            self._left = deque([*kept, *((now, worker) for worker in gone)], self._left.maxlen)
            self.health.keep(here, _stands_for(listed))
            self._listed = listed
        self._revision = self.health.revision
        self._until = now + VIEW_S
        self._view = View(tuple(self._judged(worker, now) for worker in listed))
        return self._view

    def lists(self, peer: PeerId, now: float) -> bool:
        return peer in self.view(now).peers

    def departed(self) -> list[PeerId]:
        """Who left the list since the last time this was asked."""
        gone, self._gone = self._gone, []
        return gone

    def left(self, now: float) -> list[tuple[float, ListedEngine]]:
        """Who left lately without a drain and is not back: seconds ago, the latest last."""
        here = {worker.name for worker in self.view(now).workers}
        latest = {worker.name: (now - at, worker) for at, worker in self._left if worker.name not in here}
        return [each for each in latest.values() if each[0] <= LEFT_S]

    def _judged(self, worker: ListedEngine, now: float) -> ListedEngine:
        standing = self.health.standing(worker.peer, now)
        if standing is WorkerStanding.WELL or worker.state is WorkerListState.DRAINING:
            return worker
        state = WorkerListState.BROKEN if standing is WorkerStanding.BROKEN else WorkerListState.SUSPECT
        return msgspec.structs.replace(worker, state=state)


def _stands_for(listed: Sequence[ListedEngine]) -> Mapping[PeerId, PeerId]:
    """Of the data-parallel ranks of one engine behind one address, the first: one server answers for all of them.

    By their names, which their keys prove: no other member can say that it is one of them.
    """
    firsts: dict[tuple[str, str], PeerId] = {}
    found: dict[PeerId, PeerId] = {}
    for worker in listed:
        engine = engine_of(worker.name) if worker.dp_size > 1 else None
        if engine is not None:
            found[worker.peer] = firsts.setdefault((engine, worker.url), worker.peer)
    return found
