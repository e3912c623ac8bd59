"""The list of seeds that alarmed once: read whole or not at all, and what does not hold is named."""

from __future__ import annotations

import pytest

from kvbaton_proof.sim import kept_seeds
from kvbaton_proof.sim.kept_seeds import KeptSeed
from kvbaton_proof.sim.looking import Seen
from kvbaton_proof.sim.mutants.kept import find

LINES = [
    KeptSeed(1, "a hang"),
    KeptSeed(2, "a leak", "protocol.machines.claims:Claims.leave:early:1"),
    KeptSeed(3, "the same", "protocol.machines.producer:Producer.why_over:operand:6"),
]


def test_every_seed_is_there_once_and_every_mutant_can_be_switched_on() -> None:
    lines = kept_seeds.read()
    assert len({line.seed for line in lines}) == len(lines) >= 54
    mutants = {line.mutant for line in lines} - {""}
    assert len(mutants) >= 3
    for name in mutants:
        with find(name).switch():
            pass


@pytest.mark.parametrize("line", ["7", "7 || what", "x || what || -", "7 || what || - || more"])
def test_a_line_that_says_something_else_is_an_error(line: str) -> None:
    with pytest.raises(ValueError, match="kept_seeds"):
        kept_seeds.read(f"# a comment\n{line}\n")


def test_a_seed_that_alarms_again_is_named() -> None:
    told: list[str] = []
    seen = Seen("no hang", "it waits")
    found = kept_seeds.replay(LINES[:1], told.append, lambda seed: seen)
    assert not found.holds and found.broken == {1: "no hang: it waits"} and told == ["1 of 1 seeds"]


def test_a_mutant_that_none_of_its_seeds_catches_is_named() -> None:
    found = kept_seeds.replay(LINES, lambda line: None, lambda seed: None)
    assert (
        not found.holds
        and found.unseen
        == ["protocol.machines.claims:Claims.leave:early:1", "protocol.machines.producer:Producer.why_over:operand:6"]
        and not found.broken
    )
