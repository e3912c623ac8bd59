"""The choice of a pair, as a pure function."""

from __future__ import annotations

import argparse
import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from kvbaton.api.params import Mode
from kvbaton.cli import router as router_command
from kvbaton.protocol.ids import Incarnation, PeerId, WorkerId
from kvbaton.router.policy import (
    FAR_TOKENS,
    POLICIES,
    WEIGHED_MAX,
    Doubts,
    Pair,
    Weights,
    alone,
    explain,
    home,
    mismatch,
    pairs,
)
from kvbaton.router.policy import choose as choose_of
from kvbaton.router.router_settings import RouterSettings
from kvbaton.router.workers.directory import ListedEngine, WorkerListState


def worker(name: str, role: Any = None, **more: Any) -> ListedEngine:
    return ListedEngine(
        WorkerId(name), role or {"p": "prefill", "d": "decode", "b": "both"}[name[0]], "http://x", **more
    )


def peer(name: str) -> PeerId:
    return PeerId(WorkerId(name), Incarnation(0))


def cluster(prefills: int, decodes: int) -> list[ListedEngine]:
    return [*(worker(f"p{i}") for i in range(prefills)), *(worker(f"d{i}") for i in range(decodes))]


def choose(
    workers: Sequence[ListedEngine], mode: Mode, turn: int, weights: Weights | None = None, **doubts: Any
) -> Pair | None:
    return choose_of(pairs(workers, mode), turn, weights or Weights(), Doubts(**doubts))


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
    workers = [worker("p0", state=WorkerListState.SUSPECT), worker("p1"), worker("d0")]
    assert {str(choose(workers, Mode.PULL, turn)) for turn in range(4)} == {"p1/d0"}
    assert str(choose(workers[::2], Mode.PULL, 0)) == "p0/d0"


def test_a_draining_worker_is_never_chosen() -> None:
    workers = [worker("p0", state=WorkerListState.DRAINING), worker("d0")]
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
    second = choose(workers, Mode.PULL, 0, tried={(first.prefill.peer, first.decode.peer)})
    assert second is not None
    assert (str(first), str(second)) == ("p0/d0", "p1/d0")
    both = {(pair.prefill.peer, pair.decode.peer) for pair in (first, second)}
    assert choose(workers, Mode.PULL, 0, tried=both) is None


def test_a_new_life_of_a_worker_is_not_held_to_its_old_ones_failures() -> None:
    workers = [worker("p0", incarnation=Incarnation(2)), worker("d0")]
    assert choose(workers, Mode.PULL, 0, avoid={PeerId(WorkerId("p0"), Incarnation(1))}) is not None


def test_what_is_missing_is_told_with_the_next_step() -> None:
    assert "no prefill worker is registered; start one with: kvbaton worker --role prefill" in explain([], Mode.PULL)
    assert "no decode worker" in explain([worker("p0")], Mode.PULL)


def test_workers_that_speak_otherwise_are_not_paired() -> None:
    assert "speaks moriio" in (mismatch(worker("p0", dialect="moriio"), worker("d0"), Mode.PULL) or "")


def test_a_broken_worker_is_never_chosen_and_that_is_said() -> None:
    workers = [worker("p0", state=WorkerListState.BROKEN), worker("d0")]
    assert choose(workers, Mode.PULL, 0) is None
    assert "no prefill worker responds" in explain(workers, Mode.PULL)


# --- by load


def loaded(policy: str = "least-loaded", **more: Any) -> Weights:
    """Tokens under way, by name: `loaded(p0=5)`."""
    return Weights(policy, loads={peer(name): tokens for name, tokens in more.items()})


def test_the_pair_with_the_fewest_tokens_under_way_goes_first() -> None:
    workers = cluster(2, 2)
    weights = loaded(p0=100, d1=7)
    assert {str(choose(workers, Mode.PULL, turn, weights)) for turn in range(8)} == {"p1/d0"}


def test_without_load_the_least_loaded_are_all_pairs_in_turn() -> None:
    used = Counter(str(choose(cluster(2, 3), Mode.PULL, turn, loaded())) for turn in range(12))
    assert len(used) == 6
    assert set(used.values()) == {2}


def test_a_suspect_goes_last_however_little_it_has_to_do() -> None:
    workers = [worker("p0", state=WorkerListState.SUSPECT), worker("p1"), worker("d0")]
    assert str(choose(workers, Mode.PULL, 0, loaded(p1=1 << 40))) == "p1/d0"


def test_round_robin_does_not_look_at_the_load() -> None:
    weights = loaded("round-robin", p0=1 << 40)
    assert {str(choose(cluster(2, 1), Mode.PULL, turn, weights)) for turn in range(2)} == {"p0/d0", "p1/d0"}


def test_of_a_thousand_pairs_only_some_are_weighed_and_the_least_loaded_is_among_them() -> None:
    workers = cluster(40, 40)
    assert len(pairs(workers, Mode.PULL)) > WEIGHED_MAX
    busy = {each.name: 10 for each in workers if each.name not in ("p17", "d23")}
    assert str(choose(workers, Mode.PULL, 3, loaded(**busy))) == "p17/d23"


# --- by host


def hosts() -> list[ListedEngine]:
    return [worker("p0", host="a"), worker("p1", host="b"), worker("d0", host="b"), worker("d1", host="a")]


@pytest.mark.parametrize("policy", list(POLICIES))
def test_pairs_on_one_host_go_first_and_all_of_them_in_turn(policy: str) -> None:
    used = Counter(str(choose(hosts(), Mode.PULL, turn, Weights(policy))) for turn in range(10))
    assert used == {"p0/d1": 5, "p1/d0": 5}


def test_round_robin_leaves_nobody_out_who_has_no_partner_on_its_host() -> None:
    workers = [worker("p0", host="a"), worker("d0", host="a"), worker("p1", host="b")]
    used = Counter(str(choose(workers, Mode.PULL, turn)) for turn in range(10))
    assert used == {"p0/d0": 5, "p1/d0": 5}


def test_the_network_is_taken_once_the_near_workers_are_much_busier() -> None:
    assert str(choose(hosts()[::2], Mode.PULL, 0, loaded())) == "p0/d0"  # the only pair, far as it is
    near_is_busy = loaded(d1=FAR_TOKENS + 1, p1=FAR_TOKENS + 1)
    assert str(choose(hosts(), Mode.PULL, 0, near_is_busy)) == "p0/d0"


def test_who_tells_no_host_is_not_held_to_be_far() -> None:
    workers = [worker("p0"), worker("p1", host="b"), worker("d0", host="b")]
    used = {str(choose(workers, Mode.PULL, turn)) for turn in range(2)}
    assert used == {"p0/d0", "p1/d0"}


def test_the_preference_can_be_switched_off() -> None:
    used = {str(choose(hosts(), Mode.PULL, turn, Weights(same_host=False))) for turn in range(4)}
    assert len(used) == 4


# --- by prefix


def test_who_has_seen_the_prompt_goes_first_until_it_is_too_busy() -> None:
    workers = cluster(3, 1)
    seen = {peer("p2"): 500.0}
    warm = Weights("prefix", seen=seen)
    assert {str(choose(workers, Mode.PULL, turn, warm)) for turn in range(3)} == {"p2/d0"}
    busy = Weights("prefix", loads={peer("p2"): 501}, seen=seen)
    assert str(choose(workers, Mode.PULL, 0, busy)) != "p2/d0"


# --- alone


def test_where_nothing_is_known_every_router_finds_the_same_home_and_most_keep_theirs() -> None:
    peers = [PeerId(WorkerId(f"p{number}"), Incarnation(1)) for number in range(8)]
    beginnings = [number.to_bytes(16, "big") for number in range(400)]
    homes = [home(peers, each) for each in beginnings]
    assert homes == [home(peers[::-1], each) for each in beginnings]
    assert min(homes.count(peer) for peer in peers) > 20
    moved = [home(peers[1:], each) != before for each, before in zip(beginnings, homes, strict=True)]
    assert sum(moved) == homes.count(peers[0])


def test_d_alone_is_chosen_by_turn_load_and_doubt() -> None:
    workers = [*cluster(1, 3), worker("b0")]
    assert [alone(workers, turn).name for turn in range(4)] == ["d0", "d1", "d2", "b0"]  # type: ignore[union-attr]
    busy = loaded(d0=5, d1=5, b0=1)
    assert alone(workers, 0, busy).name == "d2"  # type: ignore[union-attr]
    assert alone(workers, 0, busy, Doubts(avoid={peer("d2")})).name == "b0"  # type: ignore[union-attr]
    assert alone(cluster(2, 0), 0) is None
    assert alone([worker("d0", state=WorkerListState.DRAINING), worker("d1", state=WorkerListState.BROKEN)], 0) is None


# --- another policy


def test_a_policy_is_written_as_the_page_says(monkeypatch: pytest.MonkeyPatch) -> None:
    page = (Path(__file__).parents[2] / "docs" / "router.md").read_text()
    section = page.partition("### Write a routing policy")[2]
    code = re.search(r"```python\n(.*?)```", section, re.DOTALL)
    name = re.search(r"--policy ([a-z-]+)", section)
    assert code is not None
    assert name is not None
    with monkeypatch.context() as patch:
        patch.setitem(POLICIES, name[1], POLICIES["prefix"])  # taken out again afterwards
        exec(compile(code[1], "my_policies.py", "exec"), {"__name__": "my_policies"})
        weights = loaded(name[1], p0=1 << 40, d1=1)
        used = {str(choose(cluster(2, 2), Mode.PULL, turn, weights)) for turn in range(4)}
        assert used == {"p0/d0", "p1/d0"}
        parser = argparse.ArgumentParser()
        router_command.add_arguments(parser)
        assert router_command.settings_of(parser.parse_args(["--policy", name[1]])).policy == name[1]
    with pytest.raises(
        ValueError, match="policy: got 'idlest-decode', expected one of round-robin, least-loaded, prefix"
    ):
        RouterSettings(policy="idlest-decode")
