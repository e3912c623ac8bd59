"""Who could serve: the memory of failures, and the registry's list in the router's form."""

from __future__ import annotations

from kvbaton.api.params import Mode
from kvbaton.control.registry import Entry, Registration, WorkerState
from kvbaton.protocol.ids import Incarnation, WorkerId
from kvbaton.router.directory import Roster, State, StaticDirectory, Worker
from kvbaton.router.registered import RegistryDirectory

P0 = Worker(WorkerId("p0"), "prefill", "http://a", Incarnation(1))
D0 = Worker(WorkerId("d0"), "decode", "http://b", Incarnation(2))


def test_who_failed_is_suspect_for_a_while_and_the_news_is_told_once() -> None:
    roster = Roster(StaticDirectory([P0, D0]), suspect_s=2)
    assert roster.failed(P0, 10)
    assert not roster.failed(P0, 11)
    assert [worker.state for worker in roster.workers(12)] == [State.SUSPECT, State.SERVING]
    assert [worker.state for worker in roster.workers(13)] == [State.SERVING, State.SERVING]


def test_a_new_life_is_not_suspect_for_its_old_ones_failures() -> None:
    roster = Roster(StaticDirectory([Worker(P0.name, "prefill", "http://a", Incarnation(9)), D0]), suspect_s=2)
    roster.failed(P0, 10)
    assert [worker.state for worker in roster.workers(10)] == [State.SERVING, State.SERVING]


class Registry:
    def __init__(self) -> None:
        self.entries: tuple[Entry, ...] = ()

    def workers(self) -> tuple[Entry, ...]:
        return self.entries


def entry(modes: tuple[str, ...] = ("pull", "push", "smoke"), state: WorkerState = WorkerState.READY) -> Entry:
    told = Registration(
        WorkerId("p0"), Incarnation(5), "prefill", "127.0.0.1:80", "tcp://127.0.0.1:1", modes, ("shm",), "digest"
    )
    return Entry(told, "key", state)


def test_a_registered_worker_keeps_what_the_router_needs_of_it() -> None:
    registry = Registry()
    directory = RegistryDirectory(registry)
    assert directory.snapshot() == ()
    registry.entries = (entry(),)
    modes = (Mode.PULL, Mode.PUSH)
    url = "http://127.0.0.1:80"
    assert directory.snapshot() == (
        Worker(WorkerId("p0"), "prefill", url, Incarnation(5), modes, ("shm",), "digest", State.SERVING),
    )
    assert directory.snapshot() is directory.snapshot()


def test_a_silent_worker_is_suspect_and_one_that_names_no_modes_serves_all() -> None:
    registry = Registry()
    registry.entries = (entry((), WorkerState.SUSPECT),)
    (worker,) = RegistryDirectory(registry).snapshot()
    assert (worker.state, worker.modes) == (State.SUSPECT, tuple(Mode))
