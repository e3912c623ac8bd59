"""Runs one seed to its end and says whether every promise held."""

from __future__ import annotations

import contextlib
import logging
from collections import Counter
from collections.abc import Iterator

import msgspec

from kvbaton_proof.sim.answer_worlds import answer_world
from kvbaton_proof.sim.cluster import Cluster
from kvbaton_proof.sim.course import run_course
from kvbaton_proof.sim.liars.liar_plan import draw
from kvbaton_proof.sim.promises import Broken
from kvbaton_proof.sim.side_worlds import side_world
from kvbaton_proof.sim.turn_worlds import turn_world
from kvbaton_proof.sim.world.world import World


class Result(msgspec.Struct):
    """What came of one seed."""

    seed: int
    profile: str
    holds: bool
    promise: str = ""
    what: str = ""
    handoffs: int = 0
    delivered: int = 0
    events: int = 0
    sim_seconds: float = 0.0
    trace_hash: str = ""
    faults: dict[str, int] = {}
    ends: dict[str, int] = {}
    story: list[str] = []


@contextlib.contextmanager
def quietly() -> Iterator[None]:
    """Keeps what production code tells operators out of a simulation, which breaks things on purpose."""
    logger = logging.getLogger("kvbaton")
    before = logger.level
    logger.setLevel(logging.CRITICAL + 1)
    try:
        yield
    finally:
        logger.setLevel(before)


@quietly()
def run_seed(seed: int) -> Result:
    """One world, from its first event to rest, and the smaller ones beside it."""
    world = World(seed)
    plan = draw(world.rng)
    result = Result(seed, plan.profile, holds=True)
    cluster: Cluster | None = None
    beside: list[Cluster | None] = []
    try:
        cluster = Cluster(world, plan)
        run_course(cluster)
        beside += [turn_world(seed), side_world(seed), answer_world(seed)]
    except Broken as broken:
        result.holds, result.promise, result.what = False, broken.promise, broken.what
        result.story = broken.story
    result.story = result.story or list(world.story)
    ran = [each for each in (cluster, *beside) if each is not None]
    for each in ran:
        _count(each, result)
    result.events, result.sim_seconds = world.events, world.now
    result.faults = dict(sorted(world.faults.items()))
    result.trace_hash = "".join(each.world.trace_hash() for each in ran)
    return result


def _count(cluster: Cluster, result: Result) -> None:
    ends = Counter(result.ends)
    for life in cluster.every_life:
        for name, count in life.node.ledger.desk.counts.items():
            if name.startswith("ends."):
                ends[name.removeprefix("ends.")] += count
    result.ends = dict(sorted(ends.items()))
    result.handoffs, result.delivered = sum(ends.values()), ends["delivered"]
