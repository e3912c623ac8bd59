"""Workers that die, leave, stop or are said to have gone, and wires that are cut: the faults that a plan counts.

Law: a worker that falls or leaves comes back as another life, and every leg that was on it ends once.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from kvbaton.protocol.events import Departed, DrainStarted
from kvbaton_proof.sim.hardship.world_plan import FAULTY_S
from kvbaton_proof.sim.world.life import Character, Life
from kvbaton_proof.sim.world.touches import pair

if TYPE_CHECKING:
    from kvbaton_proof.sim.cluster import Cluster

DRAIN_S = 4.0
FLAP_LOOK_S, FLAP_LOOKS_MAX = 0.1, 25


class WorkerFaults:
    """Of one cluster."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.world = cluster.world
        plan, rng = cluster.plan, self.world.rng
        for count, act in (
            (plan.crashes, self._crash),
            (plan.pauses, self._pause),
            (plan.flaps, self.flap),
            (plan.retires, self._retire),
            (plan.partitions, self._partition),
            (plan.hardships.replaces, cluster.mishaps.replace_a_cache),
        ):
            for _ in range(count):
                self.world.after(rng.uniform(0.2, FAULTY_S * 0.9), act)

    def _crash(self) -> None:
        rng = self.world.rng
        name = rng.choice(sorted(self.cluster.lives))
        life = self.cluster.lives[name]
        if life.alive:
            self.fall(life)

    def fall(self, life: Life) -> None:
        """A worker dies, and comes back as another life."""
        rng = self.world.rng
        self.world.faults["crashed"] += 1
        self.world.tell(f"{life.peer} crashes")
        life.crash()
        for leg in [leg for leg in self.cluster.legs if leg.life is life and not leg.ends]:
            self.cluster.end_leg(leg, "error", "the worker died")
        if rng.random() < 0.5:
            self._spread_word(life)
        dead_s = rng.uniform(0.05, 3.0)
        self.world.touch("crashed", life.peer.worker, lasts_s=dead_s)
        self.world.after(dead_s, partial(self.restart, life.character))

    def _spread_word(self, life: Life) -> None:
        """The registry tells the others, each in its own time, that this life is gone. It may be wrong."""
        for other in list(self.cluster.lives.values()):
            self.world.after(self.world.rng.uniform(0.05, 1.0), partial(self._departed, other, life))

    def flap(self) -> None:
        life = self.cluster.lives[self.world.rng.choice(sorted(self.cluster.lives))]
        self.world.faults["registry_flaps"] += 1
        self.world.tell(f"{life.peer} is said to have departed")
        self._spread_word(life)
        self._flap_again(life, FLAP_LOOKS_MAX)

    def _flap_again(self, life: Life, looks: int) -> None:
        """Say it again and again to whoever it writes to just then: each has an earlier fence that may not be over."""
        for other in self.cluster.lives.values():
            if _is_written(other, life):
                self.world.faults["registry_flaps"] += 1
                self._departed(other, life)
        if looks:
            self.world.after(FLAP_LOOK_S, partial(self._flap_again, life, looks - 1))

    def _retire(self) -> None:
        """A worker drains, leaves with a goodbye, and comes back as another life (also: its cache was replaced).

        It goes soon, whatever it holds; or waits until that is nothing, as `kvbaton drain` does, but not for ever.
        """
        rng = self.world.rng
        life = self.cluster.lives[rng.choice(sorted(self.cluster.lives))]
        if life.alive and not life.paused:
            self.drain(life)

    def drain(self, life: Life) -> None:
        rng = self.world.rng
        self.world.faults["retired"] += 1
        self.world.tell(f"{life.peer} drains")
        life.node.tell(DrainStarted())
        life.wake()
        self.cluster.draining.add(life.peer.worker)
        soon_s, patience_s = rng.choice(((rng.uniform(0, 2.0), 0.0), (0.0, DRAIN_S)))
        self.world.touch("draining", life.peer.worker, lasts_s=soon_s)
        self.world.after(soon_s, partial(self._leave, life, self.world.now + patience_s))

    def _leave(self, life: Life, patient_until: float) -> None:
        if not life.alive:
            return
        if life.paused or (life.engine.busy and self.world.now < patient_until):
            self.world.touch("draining", life.peer.worker, lasts_s=0.5)
            self.world.after(0.5, partial(self._leave, life, patient_until))
            return
        self.world.tell(f"{life.peer} leaves")
        self.world.touch("retired", life.peer.worker)
        life.leave()
        for leg in [leg for leg in self.cluster.legs if leg.life is life and not leg.ends]:
            self.cluster.end_leg(leg, "error", "the worker left")
        gone_s = self.world.rng.uniform(0.05, 1.0)
        self.world.touch("retired", life.peer.worker, lasts_s=gone_s)
        self.world.after(gone_s, partial(self.restart, life.character))

    def restart(self, character: Character) -> None:
        if not self.cluster.lives[character.name].alive:  # healing may have been faster
            self.cluster.start(character)

    def _departed(self, other: Life, gone: Life) -> None:
        if other.alive and other is not gone:
            self.world.touch("said_gone", pair(other.peer.worker, gone.peer.worker))
            other.node.tell(Departed(gone.peer.worker, gone.peer.incarnation))
            other.wake()

    def _pause(self) -> None:
        rng = self.world.rng
        life = self.cluster.lives[rng.choice(sorted(self.cluster.lives))]
        if life.alive and not life.paused:
            self.stop(life)

    def stop(self, life: Life) -> None:
        rng = self.world.rng
        what = rng.choice(("process", "process", "loop", "engine"))
        self.world.tell(f"{life.peer} pauses: {what}")
        life.pause(what)
        lasts_s = rng.choice((0.3, 1.0, 5.0, 15.0))
        self.world.strike(f"paused_{what}", life.peer.worker, lasts_s=lasts_s)
        self.world.after(lasts_s, partial(self.resume, life))

    def resume(self, life: Life) -> None:
        if life.alive and life.paused:
            self.world.tell(f"{life.peer} resumes")
            life.resume()

    def _partition(self) -> None:
        rng = self.world.rng
        source, target = rng.sample(sorted(self.cluster.lives), 2)
        pairs = {(source, target)} if rng.random() < 0.5 else {(source, target), (target, source)}
        self.world.faults["partitions"] += 1
        self.world.tell(f"cut {sorted(pairs)}")
        self.cluster.network.cut |= pairs
        self.world.after(rng.uniform(0.3, 5.0), lambda: self.cluster.network.cut.difference_update(pairs))


def _is_written(target: Life, source: Life) -> bool:
    """Whether P writes to D, in the session that D knows of."""
    link = target.node.ledger.consumer.links.by_worker.get(source.peer.worker)
    outlets = source.node.ledger.producer.writer.outlets.items()
    return link is not None and any(key[0] == link.session and outlet.parts.moving for key, outlet in outlets)
