"""Workers that say that they are full are asked after the others; nobody's word takes anybody else out."""

from __future__ import annotations

import itertools

import msgspec

from kvbaton.api.params import Mode
from kvbaton.protocol.ids import Incarnation, WorkerId
from kvbaton.router import policy
from kvbaton.router.workers.directories import FULL_S, LOOK_S, NOTED_MAX, FullWorkers
from kvbaton.router.workers.directory import ListedEngine, StaticDirectory, WorkerListState


def engine(name: str, role: str, incarnation: int = 1, **more: object) -> ListedEngine:
    return ListedEngine(WorkerId(name), role, f"http://{name}", Incarnation(incarnation), **more)  # type: ignore[arg-type]


P0, D0, D1 = engine("p0", "prefill"), engine("d0", "decode"), engine("d1", "decode")


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def subject(clock: Clock, *workers: ListedEngine) -> FullWorkers:
    return FullWorkers(StaticDirectory(workers), clock)


def full(directory: FullWorkers) -> list[str]:
    return [worker.name for worker in directory.snapshot() if worker.full]


def test_a_worker_is_marked_by_its_own_report_and_until_it_says_otherwise() -> None:
    directory = subject(Clock(), P0, D0, D1)
    assert full(directory) == []
    directory.heard(WorkerId("d0"), Incarnation(1), {"full": 1.0})
    assert full(directory) == ["d0"]
    directory.heard(WorkerId("d1"), Incarnation(1), {"full": 0.0})
    directory.heard(WorkerId("p0"), Incarnation(1), {"waiting": 7.0})
    assert full(directory) == ["d0"]
    directory.heard(WorkerId("d0"), Incarnation(1), {"full": 0.0})
    assert full(directory) == []


def test_the_list_is_the_same_object_while_nothing_changes() -> None:
    clock = Clock()
    directory = subject(clock, P0, D0)
    assert directory.snapshot() is directory.snapshot()
    directory.heard(WorkerId("d0"), Incarnation(1), {"full": 1.0})
    marked = directory.snapshot()
    for _ in range(8):
        clock.now += LOOK_S
        directory.heard(WorkerId("d0"), Incarnation(1), {"full": 1.0})
        assert directory.snapshot() is marked


def test_a_word_is_forgotten_when_it_is_not_repeated() -> None:
    clock = Clock()
    directory = subject(clock, D0)
    directory.heard(WorkerId("d0"), Incarnation(1), {"full": 1.0})
    assert full(directory) == ["d0"]
    clock.now += FULL_S - 0.01
    assert full(directory) == ["d0"]
    clock.now += LOOK_S
    assert full(directory) == []


def test_a_word_is_of_one_life() -> None:
    directory = subject(Clock(), engine("d0", "decode", 2))
    directory.heard(WorkerId("d0"), Incarnation(1), {"full": 1.0})
    assert full(directory) == []


def test_what_is_no_number_says_nothing_and_words_are_bounded() -> None:
    directory = subject(Clock(), D0)
    directory.heard(WorkerId("d0"), Incarnation(1), {"full": float("nan")})
    assert full(directory) == []
    for number in range(NOTED_MAX + 10):
        directory.heard(WorkerId("x"), Incarnation(number), {"full": 1.0})
    assert len(directory._until) == NOTED_MAX


def marked(*workers: ListedEngine) -> list[ListedEngine]:
    return [msgspec.structs.replace(worker, full=True) for worker in workers]


def chosen(workers: list[ListedEngine]) -> set[str]:
    able = policy.pairs(workers, Mode.PULL)
    found = [policy.choose(able, turn) for turn in range(8)]
    return {str(pair) for pair in found}


def test_a_decode_worker_that_is_full_is_passed_over_for_another() -> None:
    assert chosen([P0, D0, D1]) == {"p0/d0", "p0/d1"}
    assert chosen([P0, *marked(D0), D1]) == {"p0/d1"}
    alone = [policy.alone([*marked(D0), D1], turn) for turn in range(4)]
    assert {worker.name for worker in alone if worker is not None} == {"d1"}


def test_where_all_say_that_they_are_full_all_are_asked_as_before() -> None:
    """Whoever lies about itself, or all of them: nobody is left without an answer."""
    assert chosen(marked(P0, D0, D1)) == {"p0/d0", "p0/d1"}
    found = {policy.alone(marked(D0, D1), turn) for turn in range(4)}
    assert {worker.name for worker in found if worker is not None} == {"d0", "d1"}


def test_a_full_worker_is_asked_before_one_that_may_be_dead() -> None:
    suspect = msgspec.structs.replace(D1, state=WorkerListState.SUSPECT)
    assert chosen([P0, *marked(D0), suspect]) == {"p0/d0"}


def test_with_no_policy_is_a_full_worker_preferred() -> None:
    workers = [P0, *marked(D0), D1]
    loads = {D1.peer: 1_000_000}
    for name, turn in itertools.product(policy.POLICIES, range(4)):
        pair = policy.choose(policy.pairs(workers, Mode.PULL), turn, policy.Weights(name, loads=loads))
        assert pair is not None and pair.decode.name == "d1"
