"""Standings of workers: what makes one suspect or broken, and what brings it back."""

from __future__ import annotations

from kvbaton.api.params import Mode
from kvbaton.protocol.ids import Incarnation, PeerId, WorkerId
from kvbaton.router.workers.available import VIEW_S, AvailableWorkers
from kvbaton.router.workers.directory import ListedEngine, StaticDirectory, WorkerListState
from kvbaton.router.workers.health import Health, WorkerStanding

P0 = ListedEngine(WorkerId("p0"), "prefill", "http://a", Incarnation(1))
D0 = ListedEngine(WorkerId("d0"), "decode", "http://b", Incarnation(2))
PEER = P0.peer


def health(failures: int = 3) -> Health:
    return Health(suspect_s=2, breaker_failures=failures, probe_min_s=1, probe_max_s=4)


def test_a_failure_makes_suspect_for_a_while_and_the_news_is_told_once() -> None:
    told = health()
    assert told.failed(PEER, 10) is WorkerStanding.SUSPECT
    assert told.failed(PEER, 11) is None
    assert told.standing(PEER, 12.9) is WorkerStanding.SUSPECT
    assert told.standing(PEER, 13) is WorkerStanding.WELL


def test_failures_in_a_row_break_and_a_success_between_them_does_not_let_it_come_so_far() -> None:
    told = health()
    told.failed(PEER, 0)
    told.failed(PEER, 0)
    told.ok(PEER)
    assert not told
    told.failed(PEER, 0)
    assert told.failed(PEER, 0) is None
    assert told.failed(PEER, 0) is WorkerStanding.BROKEN
    assert told.opened == 1


def test_time_alone_does_not_mend_what_broke() -> None:
    told = health(1)
    told.failed(PEER, 0)
    assert told.standing(PEER, 1e9) is WorkerStanding.BROKEN


def test_probes_come_ever_more_rarely_but_never_stop() -> None:
    told = health(1)
    told.failed(PEER, 0)
    due = []
    now = 0.0
    while len(due) < 6:
        now += 0.5
        if told.due(now):
            due.append(now)
            told.probed(PEER, answered=False, now=now)
    assert due == [1, 3, 7, 11, 15, 19]


def test_a_probe_that_is_answered_lets_requests_in_again_and_one_failure_breaks_anew() -> None:
    told = health()
    for _ in range(3):
        told.failed(PEER, 0)
    told.due(1)
    told.probed(PEER, answered=True, now=1)
    assert told.standing(PEER, 2.9) is WorkerStanding.SUSPECT
    assert told.standing(PEER, 3) is WorkerStanding.WELL, (
        "or, beside others that are well, it would never be asked again"
    )
    assert told.failed(PEER, 5) is WorkerStanding.BROKEN
    told.due(1e6)
    told.probed(PEER, answered=True, now=1e6)
    told.ok(PEER)
    assert told.standing(PEER, 5) is WorkerStanding.WELL


def test_a_probe_of_one_that_is_not_broken_changes_nothing() -> None:
    told = health()
    told.probed(PEER, answered=True, now=0)
    told.failed(PEER, 0)
    told.probed(PEER, answered=True, now=0)
    assert told.standing(PEER, 1) is WorkerStanding.SUSPECT
    assert told.standing(PEER, 3) is WorkerStanding.WELL


def test_a_view_is_made_anew_only_when_something_changed() -> None:
    roster = AvailableWorkers(StaticDirectory([P0, D0]), health())
    first = roster.view(0)
    assert roster.view(100) is first
    assert first.pairs(Mode.PULL) is first.pairs(Mode.PULL)
    roster.health.failed(PEER, 100)
    second = roster.view(100)
    assert second is not first
    assert [worker.state for worker in second.workers] == [WorkerListState.SUSPECT, WorkerListState.SERVING]
    assert [worker.state for worker in roster.view(102 + VIEW_S).workers] == [
        WorkerListState.SERVING,
        WorkerListState.SERVING,
    ]


def test_a_broken_worker_is_in_no_pair() -> None:
    roster = AvailableWorkers(StaticDirectory([P0, D0]), health(1))
    assert len(roster.view(0).pairs(Mode.PULL)) == 1
    roster.health.failed(PEER, 0)
    assert roster.view(0).workers[0].state is WorkerListState.BROKEN
    assert roster.view(0).pairs(Mode.PULL) == []


class Changing:
    def __init__(self) -> None:
        self.workers: tuple[ListedEngine, ...] = (P0, D0)

    def snapshot(self) -> tuple[ListedEngine, ...]:
        return self.workers


def test_a_restart_begins_anew_and_the_old_life_is_told_as_gone() -> None:
    directory = Changing()
    roster = AvailableWorkers(directory, health(1))
    roster.view(0)
    assert roster.departed() == []
    roster.health.failed(PEER, 0)
    again = ListedEngine(P0.name, "prefill", "http://a", Incarnation(9))
    directory.workers = (again, D0)
    assert [worker.state for worker in roster.view(0).workers] == [WorkerListState.SERVING, WorkerListState.SERVING]
    assert not roster.health
    assert roster.departed() == [PeerId(P0.name, Incarnation(1))]
    assert roster.departed() == []
