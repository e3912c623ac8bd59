"""Worlds in which conversations go on: D keeps turns, the next turn's P takes them, under all faults of others.

They run beside a seed's own world, with chance of their own, so that what a seed has shown before it still shows.
"""

from __future__ import annotations

import msgspec

from kvbaton.protocol.geometry.layout import GroupKind
from kvbaton_proof.sim.course import run_course
from kvbaton_proof.sim.hardship.removals import with_removals
from kvbaton_proof.sim.hardship.world_plan import Plan, draw
from kvbaton_proof.sim.world.life import Character
from kvbaton_proof.sim.world.sim_cluster import Cluster
from kvbaton_proof.sim.world.world import World

EVERY = 8
"""Seeds that have such a world: one in so many."""
REMOVES = 16
"""Of these, one in two removes members; every other of those has a store in the place of turns."""
SEED_FROM = 10**9
TRIES = 64
REQUESTS = 14


def turn_world(seed: int) -> Cluster | None:
    """`Broken` if a promise was; None where the seed has no such world."""
    if seed % EVERY:
        return None
    world, plan = _drawn(seed)
    cluster = Cluster(world, plan)
    run_course(cluster, where="in the world of turns beside it, ", converses=True)
    return cluster


def _drawn(seed: int) -> tuple[World, Plan]:
    """The first plan whose KV has neither windows nor states, whose ranks are not apart and in which nobody lies."""
    for attempt in range(TRIES):
        world = World(SEED_FROM + TRIES * seed + attempt)
        plan = draw(world.rng)
        if plan.liars or not all(map(_is_plain, (*plan.prefill, *plan.decode))):
            continue
        defers = tuple(msgspec.structs.replace(each, defers=True) for each in plan.prefill)
        if seed % REMOVES == EVERY:
            return world, with_removals(world.rng, plan, apart=seed % (2 * REMOVES) == EVERY)
        both = plan.prefill == plan.decode
        plan = msgspec.structs.replace(
            plan, prefill=defers, decode=defers if both else plan.decode, requests=REQUESTS, talks=True
        )
        return world, plan
    raise AssertionError(f"seed {seed}: no plan of {TRIES} has plain KV")


def _is_plain(character: Character) -> bool:
    shape = character.shape
    return character.ranks is None and not shape.optional and set(shape.kinds) <= {GroupKind.FULL, GroupKind.LATENT}
