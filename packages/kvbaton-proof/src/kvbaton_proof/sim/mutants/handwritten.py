"""The history of this field as one-place changes of the core: what the proof is worth is what it catches.

Each mutant replaces one function, property or table entry of the production code while it is switched on. `rule` is the
rule of docs/protocol.md that it breaks, `story` where it comes from. `kvbaton sim --mutants` runs them all.
"""

from __future__ import annotations

from kvbaton_proof.sim.mutants.mutants_answers import ANSWER_MUTANTS
from kvbaton_proof.sim.mutants.mutants_device import DEVICE_MUTANTS
from kvbaton_proof.sim.mutants.mutants_door import DOOR_MUTANTS, VERSION_MUTANTS
from kvbaton_proof.sim.mutants.mutants_liars import LIAR_MUTANTS
from kvbaton_proof.sim.mutants.mutants_ranks import RANK_MUTANTS
from kvbaton_proof.sim.mutants.mutants_source import (
    DISCARD_MUTANTS,
    PIN_MUTANTS,
    PUSH_MUTANTS,
    SOURCE_MUTANTS,
    TURN_MUTANTS,
)
from kvbaton_proof.sim.mutants.mutants_successes import SUCCESS_MUTANTS
from kvbaton_proof.sim.mutants.mutants_target import DIALOGUE_MUTANTS, ORIGIN_MUTANTS, TARGET_MUTANTS
from kvbaton_proof.sim.mutants.mutants_worlds import SHAPE_MUTANTS, WORLD_MUTANTS
from kvbaton_proof.sim.mutants.mutation import Mutant

MUTANTS: tuple[Mutant, ...] = (
    *SOURCE_MUTANTS,
    *PUSH_MUTANTS,
    *TARGET_MUTANTS,
    *DOOR_MUTANTS,
    *DISCARD_MUTANTS,
    *DEVICE_MUTANTS,
    *PIN_MUTANTS,
    *RANK_MUTANTS,
    *VERSION_MUTANTS,
    *SUCCESS_MUTANTS,
    *WORLD_MUTANTS,
    *LIAR_MUTANTS,
    *DIALOGUE_MUTANTS,
    *TURN_MUTANTS,
    *ORIGIN_MUTANTS,
    *SHAPE_MUTANTS,
    *ANSWER_MUTANTS,
)
"""Every mutant must be caught, by a world or by a unit test; the clean tree by none of the same seeds."""
