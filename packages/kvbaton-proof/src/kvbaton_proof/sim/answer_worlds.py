"""Worlds in which answers are generated, and outlive their D: by death, stall and drain at any token, under all faults
of others.

They run beside a seed's own world, with chance of their own, so that what a seed has shown before it still shows.
"""

from __future__ import annotations

import random

import msgspec

from kvbaton.api.params import HistoryWay
from kvbaton.protocol.geometry.layout import GroupKind
from kvbaton.protocol.ids import WorkerId
from kvbaton_proof.sim.cluster import Cluster
from kvbaton_proof.sim.course import run_course
from kvbaton_proof.sim.hardship.world_plan import FAULTY_S, Plan
from kvbaton_proof.sim.liars.liar_plan import draw
from kvbaton_proof.sim.world.life import Character
from kvbaton_proof.sim.world.sim_streams import StreamPlan, open_streams
from kvbaton_proof.sim.world.world import World

EVERY, PLACE = 4, 2
"""Seeds that have such a world: one in so many, and no seed that has one of turns. In every second of them clients get
their first token from P."""
SEED_FROM = 3 * 10**9
TRIES = 64
STREAMS, REQUESTS = (6, 14), 4
WAYS = (
    (HistoryWay.OUTPUT, HistoryWay.OUTPUT, HistoryWay.OUTPUT),
    (HistoryWay.OUTPUT, HistoryWay.OUTPUT, HistoryWay.OUTPUT),
    (HistoryWay.OUTPUT, HistoryWay.OUTPUT),
    (HistoryWay.OUTPUT, HistoryWay.OUTPUT, HistoryWay.PROMPT),
    (HistoryWay.PROMPT, HistoryWay.PROMPT, HistoryWay.OUTPUT),
    (HistoryWay.OUTPUT, HistoryWay.OUTPUT, HistoryWay.NONE),
)
"""Of the D's of a world."""
ROOM = 40
"""Blocks of 2 tokens for each of the answers that a D may have under way, or, where it is short of them, fewer."""


def answer_world(seed: int) -> Cluster | None:
    """`Broken` if a promise was; None where the seed has no such world."""
    if seed % EVERY != PLACE:
        return None
    world, plan = _drawn(seed)
    cluster = Cluster(world, plan)
    streams = msgspec.structs.replace(_streams(world.rng), first_token=seed % (2 * EVERY) == PLACE + EVERY)
    cluster.streams = open_streams(cluster, streams)
    run_course(cluster, where="in the world of answers beside it, ")
    return cluster


def _drawn(seed: int) -> tuple[World, Plan]:
    """The first plan whose KV has neither windows nor states, whose ranks are not apart and in which nobody lies."""
    for attempt in range(TRIES):
        world = World(SEED_FROM + TRIES * seed + attempt)
        plan = draw(world.rng)
        if not plan.liars and all(map(_is_plain, (*plan.prefill, *plan.decode))):
            return world, _with_answers(world.rng, plan)
    raise AssertionError(f"seed {seed}: no plan of {TRIES} has plain KV")


def _is_plain(character: Character) -> bool:
    shape = character.shape
    return character.ranks is None and not shape.optional and set(shape.kinds) <= {GroupKind.FULL, GroupKind.LATENT}


def _with_answers(rng: random.Random, plan: Plan) -> Plan:
    ways, one = rng.choice(WAYS), plan.decode[0]
    names = [WorkerId(f"{one.name[0]}{n}") for n in range(len(ways))]
    decode = tuple(_generating(one, name, way) for name, way in zip(names, ways, strict=True))
    both = plan.prefill == plan.decode
    prefill = decode if both else tuple(_generating(each, each.name, HistoryWay.OUTPUT) for each in plan.prefill)
    return msgspec.structs.replace(
        plan, profile="answers", prefill=prefill, decode=decode, requests=REQUESTS, crashes=min(plan.crashes, 1),
        retires=min(plan.retires, 1), abort=0.0,
    )  # fmt: skip


def _streams(rng: random.Random) -> StreamPlan:
    tight = rng.random() < 0.2
    return StreamPlan(
        streams=rng.randint(*STREAMS), until_s=FAULTY_S * 0.7, stall_s=rng.choice((1.0, 3.0)),
        moves_max=rng.choice((1, 8, 8)) if tight else 8, history_max=rng.choice((4, 1000)) if tight else 1000,
    )  # fmt: skip


def _generating(character: Character, name: WorkerId, way: HistoryWay) -> Character:
    shape = character.shape
    blocks = max(shape.blocks, ROOM * len(shape.group_layers) * 2 // shape.block_tokens)
    return msgspec.structs.replace(
        character, name=name, continues=str(way), shape=msgspec.structs.replace(shape, blocks=blocks),
        policy="recompute", defers=True,
    )  # fmt: skip
