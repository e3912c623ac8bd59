"""The choice of a pair, as a pure function."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from kvbaton.api.params import Mode
from kvbaton.protocol.ids import Incarnation, PeerId, WorkerId
from kvbaton.router.directory import State, Worker
from kvbaton.router.policy import choose, common_mode, explain, mismatch, pairs


def worker(name: str, role: Any = None, **more: Any) -> Worker:
    return Worker(WorkerId(name), role or {"p": "prefill", "d": "decode", "b": "both"}[name[0]], "http://x", **more)


def peer(name: str) -> PeerId:
    return PeerId(WorkerId(name), Incarnation(0))


def cluster(prefills: int, decodes: int) -> list[Worker]:
    return [*(worker(f"p{i}") for i in range(prefills)), *(worker(f"d{i}") for i in range(decodes))]


@pytest.mark.parametrize(("prefills", "decodes"), [(1, 1), (2, 2), (2, 3), (3, 3), (4, 6), (5, 1)])
def test_turns_cover_every_pair_before_one_is_repeated(prefills: int, decodes: int) -> None:
    workers, count = cluster(prefills, decodes), prefills * decodes
    used = Counter(str(choose(workers, Mode.PULL, turn)) for turn in range(3 * count))
    assert len(used) == count
    assert set(used.values()) == {3}


def test_neighbouring_turns_share_no_worker_where_that_can_be() -> None:
    chosen = [choose(cluster(3, 3), Mode.PULL, turn) for turn in range(3)]
    assert [str(pair) for pair in chosen] == ["p0/d0", "p1/d1", "p2/d2"]


@pytest.mark.parametrize(
    ("p", "d", "why"),
    [
        ({"modes": (Mode.PULL,)}, {}, "p0 does not serve mode push"),
        ({}, {"modes": (Mode.PULL,)}, "d0 does not serve mode push"),
        ({"compat": "a"}, {"compat": "b"}, "differ in their compatibility key"),
        ({"transports": ("shm",)}, {"transports": ("tcp",)}, "no transport in common"),
    ],
)
def test_workers_that_cannot_hand_over_are_not_paired_and_the_reason_is_told(p: Any, d: Any, why: str) -> None:
    workers = [worker("p0", **p), worker("d0", **d)]
    assert why in (mismatch(workers[0], workers[1], Mode.PUSH) or "")
    assert choose(workers, Mode.PUSH, 0) is None
    assert why in explain(workers, Mode.PUSH)


def test_what_is_unknown_of_a_worker_is_not_held_against_it() -> None:
    assert mismatch(worker("p0", compat="a", transports=("shm",)), worker("d0"), Mode.PULL) is None


def test_a_worker_of_both_roles_serves_either_but_not_itself() -> None:
    workers = [worker("b0"), worker("b1")]
    assert [str(pair) for pair in pairs(workers, Mode.PULL)] == ["b0/b1", "b1/b0"]
    assert "cannot hand over to itself" in explain([worker("b0")], Mode.PULL)


def test_a_suspect_is_skipped_while_there_is_anybody_else() -> None:
    workers = [worker("p0", state=State.SUSPECT), worker("p1"), worker("d0")]
    assert {str(choose(workers, Mode.PULL, turn)) for turn in range(4)} == {"p1/d0"}
    assert str(choose(workers[::2], Mode.PULL, 0)) == "p0/d0"


def test_a_draining_worker_is_never_chosen() -> None:
    workers = [worker("p0", state=State.DRAINING), worker("d0")]
    assert choose(workers, Mode.PULL, 0) is None
    assert "every prefill worker is draining" in explain(workers, Mode.PULL)


def test_who_is_to_be_avoided_is_never_chosen_and_who_is_shunned_only_last() -> None:
    workers = cluster(2, 1)
    assert str(choose(workers, Mode.PULL, 0, avoid={peer("p0")})) == "p1/d0"
    assert choose(workers, Mode.PULL, 0, avoid={peer("d0")}) is None
    assert str(choose(workers, Mode.PULL, 0, shun={peer("p0")})) == "p1/d0"
    assert choose(workers, Mode.PULL, 0, shun={peer("p0"), peer("p1"), peer("d0")}) is not None


def test_a_pair_that_was_tried_is_not_chosen_again() -> None:
    workers = cluster(2, 1)
    first = choose(workers, Mode.PULL, 0)
    assert first is not None
    second = choose(workers, Mode.PULL, 0, tried=[first])
    assert second is not None
    assert (str(first), str(second)) == ("p0/d0", "p1/d0")
    assert choose(workers, Mode.PULL, 0, tried=[first, second]) is None


def test_a_new_life_of_a_worker_is_not_held_to_its_old_ones_failures() -> None:
    workers = [worker("p0", incarnation=Incarnation(2)), worker("d0")]
    assert choose(workers, Mode.PULL, 0, avoid={PeerId(WorkerId("p0"), Incarnation(1))}) is not None


def test_the_first_mode_that_some_pair_has_in_common_is_taken() -> None:
    workers = [worker("p0", modes=(Mode.PULL, Mode.PUSH)), worker("d0", modes=(Mode.PULL, Mode.STREAM))]
    assert common_mode(workers, [Mode.PUSH, Mode.STREAM, Mode.PULL]) is Mode.PULL
    assert common_mode(workers, [Mode.PUSH]) is None


def test_what_is_missing_is_told_with_the_next_step() -> None:
    assert "no prefill worker is registered; start one with: kvbaton worker --role prefill" in explain([], Mode.PULL)
    assert "no decode worker" in explain([worker("p0")], Mode.PULL)
