"""The registry's list in the router's form."""

from __future__ import annotations

from kvbaton.api.params import Mode
from kvbaton.control.registry import Registration, RosterEntry, WorkerState
from kvbaton.protocol.ids import Incarnation, WorkerId
from kvbaton.router.workers.directories import RegistryDirectory
from kvbaton.router.workers.directory import ListedEngine, WorkerListState


class Registry:
    def __init__(self) -> None:
        self.entries: tuple[RosterEntry, ...] = ()

    def workers(self) -> tuple[RosterEntry, ...]:
        return self.entries


def entry(modes: tuple[str, ...] = ("pull", "push", "smoke"), state: WorkerState = WorkerState.READY) -> RosterEntry:
    told = Registration(
        WorkerId("p0"), Incarnation(5), "prefill", "127.0.0.1:80", "tcp://127.0.0.1:1", modes, ("shm",), "digest"
    )
    return RosterEntry(told, "key", state)


def test_a_registered_worker_keeps_what_the_router_needs_of_it() -> None:
    registry = Registry()
    directory = RegistryDirectory(registry)
    assert directory.snapshot() == ()
    registry.entries = (entry(),)
    modes = (Mode.PULL, Mode.PUSH)
    url = "http://127.0.0.1:80"
    assert directory.snapshot() == (
        ListedEngine(
            WorkerId("p0"), "prefill", url, Incarnation(5), modes, ("shm",), "digest", WorkerListState.SERVING
        ),
    )
    assert directory.snapshot() is directory.snapshot()


def test_a_silent_worker_is_suspect_and_one_that_names_no_modes_serves_all() -> None:
    registry = Registry()
    registry.entries = (entry((), WorkerState.SUSPECT),)
    (worker,) = RegistryDirectory(registry).snapshot()
    assert (worker.state, worker.modes) == (WorkerListState.SUSPECT, tuple(Mode))
