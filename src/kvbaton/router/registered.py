"""Workers as the registry lists them, in the form that the router chooses from."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from kvbaton.api.params import Mode
from kvbaton.control.registry import Entry, WorkerState
from kvbaton.router.directory import ALL_MODES, State, Worker


class _Registry(Protocol):
    def workers(self) -> tuple[Entry, ...]: ...


class RegistryDirectory:
    """A directory over `RegistryServer`, whose list is a new tuple whenever it changes."""

    def __init__(self, registry: _Registry) -> None:
        self._registry = registry
        self._entries: tuple[Entry, ...] = ()
        self._workers: tuple[Worker, ...] = ()

    def snapshot(self) -> Sequence[Worker]:
        entries = self._registry.workers()
        if entries is not self._entries:
            self._entries, self._workers = entries, tuple(map(_worker, entries))
        return self._workers


def _worker(entry: Entry) -> Worker:
    told = entry.registration
    modes = tuple(mode for mode in Mode if mode in told.modes)
    return Worker(
        told.worker,
        told.role,
        f"http://{told.http_address}",
        told.incarnation,
        modes if told.modes else ALL_MODES,
        told.transports,
        told.compat_digest,
        State.SERVING if entry.state is WorkerState.READY else State.SUSPECT,
    )
