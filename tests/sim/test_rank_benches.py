"""Parts of the rank links on the bench: the clean ones keep to their models, and changed ones are seen at once."""

from __future__ import annotations

import random

import pytest

from kvbaton_proof.sim import run
from kvbaton_proof.sim.looking import _Endless, _limited, look
from kvbaton_proof.sim.mutants import mutating
from kvbaton_proof.sim.mutants.survey import draw
from kvbaton_proof.sim.promises import RULE, Broken
from kvbaton_proof.sim.quiet import quietly
from kvbaton_proof.sim.rank_models.rank_bench import ANYTHING, Raised, outcome, same
from kvbaton_proof.sim.rank_models.rank_benches import BENCHES, BENCHES_PER_SEED, run_benches

PARTS = {
    "ranks.rank_host": ("host",),
    "ranks.rank_link": ("link", "links"),
    "ranks.rank_messages": ("messages",),
    "ranks.rank_planes": ("plane",),
    "ranks.rank_store": ("shelf",),
    "ranks.rank_store_host": ("store_host",),
    "ranks.rank_store_link": ("store_link",),
    "ranks.rank_store_messages": ("messages",),
    "ranks.rank_stream": ("stream",),
    "ranks.rank_transport": ("port",),
    "ranks.rank_values": ("values",),
}
MUTANTS, TRIES = 12, 15


@pytest.mark.parametrize("name", BENCHES)
def test_a_part_keeps_to_its_laws(name: str) -> None:
    with quietly():
        for number in range(40):
            BENCHES[name](random.Random(number))


def test_every_part_has_a_bench() -> None:
    decide = {module for module in mutating.ranks() if mutating.places(module)}
    assert set(PARTS) == decide
    assert {name for names in PARTS.values() for name in names} == set(BENCHES)


@pytest.mark.parametrize("module", PARTS)
def test_what_nobody_thought_of_is_seen(module: str) -> None:
    """Mutants drawn by chance, of each part; nearly all of them, and not by patience."""
    places = draw([module], MUTANTS, 5)
    seen = sum(_is_seen(place.name, PARTS[module]) for place in places)
    assert seen >= 0.8 * len(places)


def _is_seen(mutant: str, benches: tuple[str, ...]) -> bool:
    with mutating.switched(mutant), quietly():
        for number in range(TRIES):
            for name in benches:
                try:
                    with _limited(1.0):
                        BENCHES[name](random.Random(number))
                except (Broken, _Endless, Exception):  # noqa: BLE001 - a mutant may raise anything, or never return
                    return True
    return False


def test_a_seed_sets_up_some_and_the_same_again(monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[tuple[str, float]] = []
    for name in BENCHES:
        monkeypatch.setitem(BENCHES, name, lambda rng, name=name: found.append((name, rng.random())))
    run_benches(3)
    first = list(found)
    run_benches(3)
    assert found == first * 2 and len({name for name, _ in first}) == BENCHES_PER_SEED
    for seed in range(30):
        run_benches(seed)
    assert {name for name, _ in found} == set(BENCHES)


def test_a_world_does_not_notice_them(monkeypatch: pytest.MonkeyPatch) -> None:
    with_benches = run.run_seed(6)
    monkeypatch.setattr(run, "run_benches", lambda seed: None)
    assert run.run_seed(6).trace_hash == with_benches.trace_hash


def test_what_a_bench_objects_to_is_a_rule_of_that_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "run_benches", lambda seed: same("a part", seed, 0))
    seen = look(1)
    assert seen is not None and seen.promise == RULE and "found 1, the laws say 0" in seen.what


def test_what_the_laws_leave_open_is_equal_to_everything() -> None:
    same("anything", ["some", 3], [ANYTHING, 3])
    assert outcome(lambda: int("x"), ValueError) == Raised("ValueError")
    with pytest.raises(Broken):
        same("numbers", 1, 2)
