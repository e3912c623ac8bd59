"""The first seeds, run once for all tests that ask what is met in them."""

from __future__ import annotations

import functools
from collections import Counter

from kvbaton.protocol.machines.lease import Lease
from kvbaton_proof.sim.hardship.world_plan import Plan
from kvbaton_proof.sim.liars.liar_plan import draw
from kvbaton_proof.sim.run import Result
from kvbaton_proof.sim.world.world import World


@functools.cache
def plan_of(seed: int) -> Plan:
    """What a seed draws, drawn once for all tests."""
    return draw(World(seed).rng)


class SeenSeeds:
    """Some seeds as they went, run once for all tests, and how partly stale commits were."""

    def __init__(self) -> None:
        self.stale: Counter[str] = Counter()
        self.faults: Counter[str] = Counter()
        self.ends: Counter[str] = Counter()
        self.results: list[Result] = []

    def judge(self, lease: Lease, good: tuple[int, ...]) -> None:
        counts = [len(ids) for ids in lease.blocks]
        whole = [n == count for n, count in zip(good, counts, strict=True)]
        self.stale["with a good first block"] += all(good)
        self.stale["with one group good and one not"] += any(whole)
        self.stale["partly, in one group"] += len(counts) == 1 and 0 < good[0] < counts[0]
