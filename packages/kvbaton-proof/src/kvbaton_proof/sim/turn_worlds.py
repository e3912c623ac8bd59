"""Worlds in which conversations go on: D keeps turns, the next turn's P takes them, under all faults of others.

They run beside a seed's own world, with chance of their own, so that what a seed has shown before it still shows.
"""

from __future__ import annotations

import random

import msgspec

from kvbaton.protocol.geometry.layout import GroupKind
from kvbaton.protocol.wire.messages import ALL_FEATURES
from kvbaton_proof.sim.cluster import Cluster
from kvbaton_proof.sim.course import run_course
from kvbaton_proof.sim.hardship.hardships import Hardships
from kvbaton_proof.sim.hardship.rank_faults import GET, PUT, RankFaults
from kvbaton_proof.sim.hardship.world_plan import Plan
from kvbaton_proof.sim.liars.liar_plan import alike, draw
from kvbaton_proof.sim.ranks.rank_links import RankTraits
from kvbaton_proof.sim.world.life import Character
from kvbaton_proof.sim.world.sim_network import NetworkFaults
from kvbaton_proof.sim.world.sim_transport import TransportFaults
from kvbaton_proof.sim.world.world import World

EVERY = 8
"""Seeds that have such a world: one in so many."""
REMOVES = 16
"""Of these, one in two removes members; every other of those has a store in the place of turns."""
SEED_FROM = 10**9
TRIES = 64
REQUESTS = 14

NAMES = "m0", "m1", "m2"
PROMPTS = 4
REMOVALS = 3
REMOVAL_REQUESTS = 24
RETIRES = 2


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
        defers = tuple(msgspec.structs.replace(each, defers=True, policy="recompute") for each in plan.prefill)
        if seed % REMOVES == EVERY:
            return world, _with_removals(world.rng, plan, apart=seed % (2 * REMOVES) == EVERY)
        both = plan.prefill == plan.decode
        plan = msgspec.structs.replace(
            plan, prefill=defers, decode=defers if both else plan.decode, requests=REQUESTS, talks=True
        )
        return world, plan
    raise AssertionError(f"seed {seed}: no plan of {TRIES} has plain KV")


def _is_plain(character: Character) -> bool:
    shape = character.shape
    return character.ranks is None and not shape.optional and set(shape.kinds) <= {GroupKind.FULL, GroupKind.LATENT}


def _with_removals(rng: random.Random, plan: Plan, apart: bool) -> Plan:
    """The plan's engines as three members; `apart`: with a store, which their ranks reach, and without turns."""
    first = plan.decode[0]
    members = alike(first, NAMES, first.transports, first.shape.group_layers[:1] if apart else first.shape.group_layers)
    able = {
        "features": int(ALL_FEATURES), "defers": True, "reuses_soon": False, "pins": 1.0, "policy": "recompute",
    }  # fmt: skip
    if apart:
        traits = RankTraits(store=True)
        members = tuple(msgspec.structs.replace(each, ranks=traits, put=PUT, get=GET, **able) for each in members)
    else:  # a store without ranks knows nobody
        members = tuple(msgspec.structs.replace(each, put=0.0, get=0.0, **able) for each in members)
    return msgspec.structs.replace(
        plan,
        profile="removals",
        prefill=members,
        decode=members,
        requests=REMOVAL_REQUESTS,
        removals=REMOVALS,
        talks=not apart,
        network=NetworkFaults(double=0.1, slow=0.1, slow_s=0.1),
        copies=TransportFaults(slow=rng.choice((0.0, 0.3)), slow_s=0.5),
        crashes=0,
        pauses=0,
        partitions=0,
        flaps=0,
        retires=0 if apart else RETIRES,
        abort=0.0,
        bad_ticket=0.0,
        late_ticket=0.0,
        stray=0.0,
        hardships=Hardships(),
        ranks=RankFaults(prompts=PROMPTS),
    )
