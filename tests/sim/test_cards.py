"""What of a layout cannot be: said of none that a world draws, and of each that was spoilt in one respect."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from kvbaton.protocol.geometry.layout import EngineLayout, GroupKind
from kvbaton_proof.sim.checks.cards import absurdity
from kvbaton_proof.sim.mutants.kept import find
from kvbaton_proof.sim.run import run_seed
from kvbaton_proof.sim.world.sim_memory import Shape

from .seen_seeds import plan_of


def test_no_engine_of_a_world_is_absurd() -> None:
    shapes = [each.shape for seed in range(120) for each in (*plan_of(seed).prefill, *plan_of(seed).decode)]
    assert {absurdity(shape.layout()) for shape in shapes} == {""}


SPOILT: dict[str, dict[str, Any]] = {
    "of nothing": {"groups.0.heads": 0},
    "a layer twice": {"groups.0.layers": ["a", "a"]},
    "has a window": {"groups.0.window": 3},
    "dealt out to nobody": {"dcp_interleave": 0},
    "or no memory": {"ranks.0.region_bytes": []},
    "heads or blocks": {"ranks.0.shares.0.head_start": 1},
    "two places": {"ranks.0.shares.0.places.1.0": 0},
    "in region": {"ranks.0.shares.0.places.0.3": 7},
    "beyond its region": {"ranks.0.shares.0.places.0.1": 1 << 30},
    "lie in one place": {"ranks.0.shares.0.places.0.2": 1},
    "planes of": {"ranks.0.shares.0.planes": []},
}


@pytest.mark.parametrize("what", SPOILT)
def test_what_cannot_be_is_said(what: str) -> None:
    tree = msgspec.to_builtins(Shape(kinds=(GroupKind.FULL,), group_layers=(2,)).layout())
    for path, value in SPOILT[what].items():
        *way, last = [int(step) if step.isdigit() else step for step in path.split(".")]
        at = tree
        for step in way:
            at = at[step]
        at[last] = value
    assert what in absurdity(msgspec.convert(tree, EngineLayout))


@pytest.mark.usefixtures("worlds_alone")
def test_a_world_sees_that_it_is_believed() -> None:
    with find("protocol.geometry.layout:_validate_rank:early:1").switch():
        result = run_seed(23)
    assert not result.holds and "believes" in result.what
