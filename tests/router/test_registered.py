"""What of a registered worker's standing the router chooses by."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from kvbaton.control.registry import Registration, RosterEntry, WorkerState
from kvbaton.protocol.ids import Incarnation, WorkerId
from kvbaton.router.workers.directory import ListedEngine, WorkerListState
from kvbaton.router.workers.registered import RegistryDirectory


class Registry:
    def __init__(self, entry: RosterEntry) -> None:
        self._entries = (entry,)
        self.discarded: list[tuple[str, int, tuple[str, ...]]] = []

    def workers(self) -> tuple[RosterEntry, ...]:
        return self._entries

    def discard(self, worker: WorkerId, incarnation: Incarnation, tickets: Sequence[str]) -> int:
        self.discarded.append((worker, incarnation, tuple(tickets)))
        return len(tickets)


def registry(state: WorkerState = WorkerState.READY, draining: bool = False) -> Registry:
    told = Registration(
        WorkerId("p0"), Incarnation(5), "prefill", "127.0.0.1:80", "tcp://127.0.0.1:1", host="boot id", tp_size=4
    )
    return Registry(RosterEntry(told, "key", state, draining))


def seen(state: WorkerState = WorkerState.READY, draining: bool = False) -> ListedEngine:
    (worker,) = RegistryDirectory(registry(state, draining)).snapshot()
    return worker


@pytest.mark.parametrize("state", WorkerState)
def test_a_draining_worker_is_never_asked_silent_or_not(state: WorkerState) -> None:
    assert seen(state, draining=True).state is WorkerListState.DRAINING


def test_its_host_and_size_are_known() -> None:
    assert (seen().host, seen().tp_size, seen().state) == ("boot id", 4, WorkerListState.SERVING)


def test_a_ticket_that_is_given_up_goes_to_the_life_that_gave_it() -> None:
    listed = registry()
    directory = RegistryDirectory(listed)
    (worker,) = directory.snapshot()
    directory.discard(worker, "ticket")
    assert listed.discarded == [("p0", 5, ("ticket",))]
