"""Worlds beside a seed's own, each for one thing that would otherwise hardly ever happen, under all faults of others.

Laws: they have chance of their own, so a seed's own world is what it was. Each kind takes a plan as any seed would draw
it and changes it in one respect: the shape of the KV, what an engine does, or what befalls it.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import NamedTuple

import msgspec

from kvbaton.protocol.geometry.layout import GroupKind, Per
from kvbaton_proof.sim.cluster import Cluster
from kvbaton_proof.sim.course import run_course
from kvbaton_proof.sim.hardship.world_plan import HEALTHY, Plan
from kvbaton_proof.sim.liars.liar_plan import draw
from kvbaton_proof.sim.ranks.rank_links import RankTraits
from kvbaton_proof.sim.world.life import Character
from kvbaton_proof.sim.world.sim_memory import Shape
from kvbaton_proof.sim.world.sim_transport import TransportFaults
from kvbaton_proof.sim.world.world import World

EVERY = 8
"""Each kind has its own remainder of seeds by this; that of `turn_worlds` is 0."""
SEED_FROM = 2 * 10**9
APART, TRIES = 256, 4096
"""Between the first plans of two seeds, and how many a seed looks at: a plan that fits is one of 30."""
REQUESTS, REPEATED, PROMPTS = 14, 30, 5
SLOW_S = 1.0
"""How long a transfer may stand still where copies are slow."""
APART_S = 40.0
"""Between two slow handoffs: the longest, twelve chunks of four copies each, is over then, and holds up no other."""

Reshape = Callable[[Shape, int], Shape]
"""A shape of P's (0) or D's (1), changed."""


class Kind(NamedTuple):
    """One sort of world."""

    name: str
    fits: Callable[[Plan], bool]
    made: Callable[[Plan, random.Random], Plan]


def side_world(seed: int) -> Cluster | None:
    """`Broken` if a promise was; None where the seed has no such world."""
    if seed % EVERY == 0:
        return None
    kind = KINDS[seed % EVERY - 1]
    world, plan = _drawn(seed, kind)
    cluster = Cluster(world, plan)
    run_course(cluster, where=f"in the world of {kind.name} beside it, ")
    return cluster


def _drawn(seed: int, kind: Kind) -> tuple[World, Plan]:
    """The first plan that can be changed so, and in which nobody lies."""
    for attempt in range(TRIES):
        world = World(SEED_FROM + APART * seed + attempt)
        plan = draw(world.rng)
        if not plan.liars and kind.fits(plan):
            plan = msgspec.structs.replace(plan, requests=REQUESTS)
            return world, kind.made(plan, random.Random(f"{world.seed} {kind.name}"))
    raise AssertionError(f"seed {seed}: none of {TRIES} plans fits {kind.name}")


# --- what changes


def _reshaped(plan: Plan, reshape: Reshape) -> Plan:
    def changed(side: int, characters: tuple[Character, ...]) -> tuple[Character, ...]:
        return tuple(msgspec.structs.replace(each, shape=reshape(each.shape, side)) for each in characters)

    prefill = changed(0, plan.prefill)
    decode = prefill if _are_both(plan) else changed(1, plan.decode)
    return msgspec.structs.replace(plan, prefill=prefill, decode=decode)


def _each(plan: Plan, change: Callable[[Character], Character]) -> Plan:
    """Every engine changed alike."""
    return msgspec.structs.replace(
        plan, prefill=tuple(map(change, plan.prefill)), decode=tuple(map(change, plan.decode))
    )


def _front(plan: Plan, rng: random.Random) -> Plan:
    """P has one group more than D, in front of those that D has."""

    def reshape(shape: Shape, side: int) -> Shape:
        if side:
            return msgspec.structs.replace(shape, lacks=(1,))
        groups = len(shape.group_layers)
        return msgspec.structs.replace(
            shape, group_layers=(1, *shape.group_layers), optional=1, front=True,
            kinds=(GroupKind.LATENT if GroupKind.LATENT in shape.kinds else GroupKind.FULL, *shape.kinds),
            blocks=shape.blocks * (groups + 1) // groups + 1,
        )  # fmt: skip

    return _reshaped(plan, reshape)


def _context(plan: Plan, rng: random.Random) -> Plan:
    """Decode context parallelism: each block's tokens are dealt out to ranks."""
    shards, dcp = rng.choice(((2, 2), (4, 2), (2, 4), (4, 4))), 2
    block_tokens, interleave = rng.choice(((2, 1), (4, 1), (4, 2)))

    def reshape(shape: Shape, side: int) -> Shape:
        blocks = shape.blocks * shape.block_tokens // block_tokens + 4
        if _reaches_store(plan):  # which keeps blocks of one group
            shape = msgspec.structs.replace(shape, group_layers=(2,), kinds=shape.kinds[:1])
        return msgspec.structs.replace(
            shape, ranks=shape.stages * shards[side], blocks=blocks, block_tokens=block_tokens, dcp=dcp,
            interleave=interleave, per=Per.TOKEN,
        )  # fmt: skip

    return _apart(_repeating(_reshaped(plan, reshape)))


def _states(plan: Plan, rng: random.Random) -> Plan:
    """P goes on with some prompts that it has granted: their states are written to while they are pinned."""
    like = plan.prefill[0].shape

    def reshape(shape: Shape, side: int) -> Shape:
        return msgspec.structs.replace(
            shape, ranks=like.ranks, stages=like.stages, block_tokens=like.block_tokens, per=Per.TOKEN,
            kinds=(*shape.kinds[:-1], GroupKind.STATE), blocks=shape.blocks * 2,
        )  # fmt: skip

    plan = _each(_reshaped(plan, reshape), lambda each: msgspec.structs.replace(each, overwrites=0.5))
    return msgspec.structs.replace(plan, push=0.5)


def _halves(plan: Plan, rng: random.Random) -> Plan:
    """P's blocks are smaller than D's, and reused under their readers: of a block of D's a part is good."""
    sizes = 2, rng.choice((4, 6))

    def reshape(shape: Shape, side: int) -> Shape:
        return msgspec.structs.replace(
            shape, group_layers=(2,), kinds=shape.kinds[:1], block_tokens=sizes[side], per=Per.TOKEN, optional=0
        )

    return _reshaped(plan, reshape)


def _slow(plan: Plan, rng: random.Random) -> Plan:
    """Copies one after the other, none of them late: together they take longer than a transfer may stand still."""
    push = rng.random() < 0.5
    ranks = (1, 4) if push else (4, 1)  # whose one rank moves what is of four

    def reshape(shape: Shape, side: int) -> Shape:
        return msgspec.structs.replace(
            shape, ranks=ranks[side], stages=1, heads=4, group_layers=(1, 1), kinds=(GroupKind.FULL,) * 2,
            per=Per.TOKEN, optional=0,
        )  # fmt: skip

    times = msgspec.structs.replace(HEALTHY, transfer_timeout=SLOW_S)
    plan = _each(
        _reshaped(plan, reshape), lambda each: msgspec.structs.replace(each, settings=times, transports=("tcp",))
    )
    copies = TransportFaults(slow=1.0, slow_s=0.6 * SLOW_S, queue_max=1)
    return msgspec.structs.replace(plan, copies=copies, requests=2, apart_s=APART_S, push=float(push))


def _judged(plan: Plan, rng: random.Random) -> Plan:
    """D's cache is replaced while its ranks are asked whether a push is all there."""
    hardships = msgspec.structs.replace(plan.hardships, judged=0.3)
    return msgspec.structs.replace(plan, hardships=hardships, push=1.0)


def _ranks_tell(plan: Plan, rng: random.Random) -> Plan:
    """What is ready each rank says for itself, and nobody for all; where they reach a store, of one group."""

    def reshape(shape: Shape, side: int) -> Shape:
        if _shape(plan).states or _shape(plan).optional or not _reaches_store(plan):
            return shape
        return msgspec.structs.replace(shape, group_layers=(2,), kinds=shape.kinds[:1])

    def change(each: Character) -> Character:
        traits = msgspec.structs.replace(each.ranks, tells=True) if each.ranks is not None else None
        return msgspec.structs.replace(each, ranks=traits, layerwise=True)

    return _each(_repeating(_reshaped(plan, reshape)), change)


def _repeating(plan: Plan) -> Plan:
    """The same few prompts, which a store then has, and is asked for; not every rank gets what it asks for."""
    if not _reaches_store(plan):
        return plan
    fails = 0.3 if plan.profile != "healthy" else 0.0
    plan = _each(plan, lambda each: msgspec.structs.replace(each, put=1.0, get=1.0, store_fails=fails, defers=True))
    return msgspec.structs.replace(plan, requests=REPEATED, ranks=msgspec.structs.replace(plan.ranks, prompts=PROMPTS))


# --- which plans can be


def _are_both(plan: Plan) -> bool:
    return plan.prefill == plan.decode


def _apart(plan: Plan) -> Plan:
    """Ranks of more than one are never in their engine's process."""
    return _each(plan, lambda each: msgspec.structs.replace(each, ranks=_far(each)))


def _far(character: Character) -> RankTraits | None:
    return msgspec.structs.replace(character.ranks, near=False) if character.ranks is not None else None


def _shape(plan: Plan) -> Shape:
    return plan.prefill[0].shape


def _can_be_dealt_out(plan: Plan) -> bool:
    shape = _shape(plan)
    return not (shape.states or shape.optional) and (plan.bursts or _reaches_store(plan))


def _reaches_store(plan: Plan) -> bool:
    return any(each.ranks is not None and each.ranks.store for each in plan.prefill)


def _has_room_for_states(plan: Plan) -> bool:
    return plan.profile != "healthy" and len(_shape(plan).group_layers) > 1 and not _shape(plan).optional


def _is_calm(plan: Plan) -> bool:
    linked = any(each.ranks is not None for each in (*plan.prefill, *plan.decode))
    return plan.profile == "healthy" and not (plan.hardships.lossy or linked or _are_both(plan))


def _have_ranks(plan: Plan) -> bool:
    traits = [each.ranks for each in plan.prefill]
    return any(traits) and not any(each.bounded for each in traits if each is not None)


def _is_pushed(plan: Plan) -> bool:
    return plan.prefill[0].transports[0] in ("tcp", "rdma")


KINDS = (
    Kind("an optional group in front", lambda plan: not (_are_both(plan) or _shape(plan).optional), _front),
    Kind("context parallelism", _can_be_dealt_out, _context),
    Kind("states that go on", _has_room_for_states, _states),
    Kind("parts of blocks", lambda plan: plan.hardships.nibbles > 0 and not _are_both(plan), _halves),
    Kind("slow transfers", _is_calm, _slow),
    Kind("pushes that are judged", lambda plan: plan.profile != "healthy" and _is_pushed(plan), _judged),
    Kind("ranks that tell", _have_ranks, _ranks_tell),
)
