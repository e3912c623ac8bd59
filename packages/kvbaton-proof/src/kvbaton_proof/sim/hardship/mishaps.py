"""Mishaps of a cluster besides deaths, stops and losses: blocks reused under their readers, caches replaced under their
nodes, transports that open late."""

from __future__ import annotations

import functools
import random
from typing import TYPE_CHECKING

from kvbaton.protocol.events import NO_BLOCK
from kvbaton.protocol.ids import LeaseId
from kvbaton.protocol.machines.inbound import IntakeState
from kvbaton.protocol.machines.lease import ReaderState
from kvbaton_proof.sim.world.life import Life
from kvbaton_proof.sim.world.sim_engine import SimEngine

if TYPE_CHECKING:
    from kvbaton_proof.sim.cluster import Cluster

REPLACE_LOOK_S = 0.05
NIBBLES_FROM, NIBBLE_S = 700_000, 0.05


class Mishaps:
    """Of one cluster."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.world = cluster.world
        self.hardships = cluster.plan.hardships
        self._chance = random.Random(f"{cluster.world.seed} mishaps")

    def watch(self, life: Life) -> None:
        """After every step of its node."""
        if not self.hardships.judged:
            return
        consumer = life.node.ledger.consumer

        def after_step() -> None:
            judged = any(each.state is IntakeState.JUDGING for each in consumer.by_reservation.values())
            if judged and not self.cluster.healed and self._chance.random() < self.hardships.judged:
                self.world.after(0.0, functools.partial(self._replace_of, life))

        life.after_node.append(after_step)

    def nibble(self, life: Life, lease: LeaseId) -> None:
        """Blocks of an expired lease are free while somebody reads them: a short prompt takes the end of one group, or
        what is before it, and leaves the others."""
        found = life.node.ledger.producer.tombstones.get(lease)
        if found is None or all(seat.state is not ReaderState.GONE for seat in found.seats.values()):
            return
        if self.world.chance(self.hardships.nibbles):
            self.world.strike("nibbled", found.handoff)
            rng, index = self.world.rng, NIBBLES_FROM + len(self.cluster.legs)
            ids = rng.choice(found.blocks)
            last = rng.choice((len(ids), len(ids), rng.randint(0, len(ids))))
            prefers = tuple(block for block in ids[max(0, last - len(found.blocks)) : last] if block != NO_BLOCK)
            tiny = functools.partial(self.cluster.add, index, life, index, 1, "both", _ignore, prefers=prefers)
            self.world.after(rng.uniform(0, NIBBLE_S), tiny)

    def replace_a_cache(self) -> None:
        lives = self.cluster.lives
        self._replace_of(lives[self.world.rng.choice(sorted(lives))])

    def _replace_of(self, life: Life) -> None:
        if not life.engine.replacing:
            self.world.faults["cache_replaced"] += 1
            self.world.tell(f"{life.peer} replaces its cache")
            self._replace(life)

    def _replace(self, life: Life) -> None:
        self.world.touch("cache_replaced", life.peer.worker, lasts_s=REPLACE_LOOK_S)
        done = life.alive and not life.paused and replace_cache(life.engine)
        life.wake_engine()
        if life.alive and not done:
            self.world.after(REPLACE_LOOK_S, functools.partial(self._replace, life))

    def open_planes(self) -> None:
        self.cluster.fabric.faults.shut = frozenset()


def replace_cache(engine: SimEngine) -> bool:
    """Let go of everything, and of the prefix cache; once nothing is held, what is in memory is nobody's.

    False while there is something: asked again until it is done, as vLLM is.
    """
    engine.replacing = True
    engine.preempt_all()
    engine.doorway.cache_replaced()
    engine.prefixes.forget()
    if engine.doorway.holding or not engine.at_rest:
        return False
    engine.device.scrub()
    engine.replacing = False
    return True


def _ignore(how: str, detail: str) -> None:
    """Nobody waits for this prompt."""
