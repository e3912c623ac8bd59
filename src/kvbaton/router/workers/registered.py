"""Workers as registries list them, in the form that the router chooses from.

Law: one that has no HTTP address is listed and never asked.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from kvbaton.api.params import Mode
from kvbaton.control.registry import RosterEntry, WorkerState
from kvbaton.protocol.ids import Incarnation, WorkerId
from kvbaton.router.workers.directory import ALL_MODES, ListedEngine, WorkerListState


class _Registry(Protocol):
    def workers(self) -> tuple[RosterEntry, ...]: ...
    def discard(self, worker: WorkerId, incarnation: Incarnation, tickets: Sequence[str]) -> int: ...
    def show(self, worker: WorkerId, incarnation: Incarnation, ids: Sequence[str]) -> bool: ...


class RegistryDirectory:
    """A directory over `RegistryServer` or `RegistryReaders`: a new tuple whenever it changes. Never blocks."""

    def __init__(self, registry: _Registry) -> None:
        self._registry = registry
        self._entries: tuple[RosterEntry, ...] = ()
        self._workers: tuple[ListedEngine, ...] = ()

    def snapshot(self) -> Sequence[ListedEngine]:
        entries = self._registry.workers()
        if entries is not self._entries:
            self._entries, self._workers = entries, tuple(map(_worker, entries))
        return self._workers

    def discard(self, worker: ListedEngine, ticket: str) -> None:
        """Have P told that nobody will use this ticket. What cannot be told is released when its lease runs out."""
        self._registry.discard(worker.name, worker.incarnation, (ticket,))

    def show(self, worker: str, incarnation: int, ids: Sequence[str]) -> bool:
        """Have a worker tell of these ids at once; False if it cannot be asked."""
        return self._registry.show(WorkerId(worker), Incarnation(incarnation), ids)


def _worker(entry: RosterEntry) -> ListedEngine:
    told = entry.registration
    modes = tuple(mode for mode in Mode if mode in told.modes)
    return ListedEngine(
        told.worker,
        told.role,
        f"http://{told.http_address}" if told.http_address else "",
        told.incarnation,
        modes if told.modes else ALL_MODES,
        told.transports,
        told.compat_digest,
        _state(entry),
        told.host,
        tp_size=told.tp_size,
        dp_rank=told.dp_rank,
        dp_size=told.dp_size,
    )


def _state(entry: RosterEntry) -> WorkerListState:
    if entry.draining:
        return WorkerListState.DRAINING  # also if it is silent: it will not come back
    if not entry.registration.http_address:
        return WorkerListState.NO_HTTP
    return WorkerListState.SERVING if entry.state is WorkerState.READY else WorkerListState.SUSPECT
