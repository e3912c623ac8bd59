"""Which engines drive their ranks over rank links, and the faults of those: ranks that stall, hang, die, are replaced,
report twice or late, and links that break.

Laws: everything is drawn from streams of its own, so a seed's world is otherwise what it was. In a healthy world a rank
may stall for a moment and a frame may come twice: nothing is lost by that. A rank that died or hangs for good is the
end of its engine a while later, at the latest when all else heals.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

import msgspec

from kvbaton_proof.sim.ranks.rank_links import LinkedRanks, RankTraits

if TYPE_CHECKING:
    from kvbaton_proof.sim.cluster import Cluster
    from kvbaton_proof.sim.world.life import Character, Life

LINKED, LINKED_ENGINE, NEAR, STORE = 0.33, 0.7, 0.4, 0.6
FAULTY_S = 12.0
LOOK_S, LOOKS_MAX = 0.02, 200
PUT, GET, PROMPTS = 0.6, 0.8, 7
STALLS_S = (0.2, 0.8, 2.0, 6.0)
HEALTHY_STALL_S = 0.5
HEALTHY_CALM_S = 2.0
"""From one stall to the next: two in a row are no moment any more, but as long as a lease of a healthy world."""
CUTS_S = (0.02, 0.3, 1.5, 5.0)
FALLS_S = (0.1, 3.0, 12.0)


class RankFaults(msgspec.Struct, frozen=True):
    """How often what befalls the ranks of one world."""

    stalls: int = 0
    cuts: int = 0
    deaths: int = 0
    hangs: int = 0  # never heard of again, and not dead
    flaps: int = 0  # a living worker is said to have departed: fences, one upon the other
    stall_s: tuple[float, ...] = STALLS_S
    prompts: int = 0  # as many different ones; 0: as the world has it


class RankLot:
    """Draws beside the world's own chance who is linked, and how badly."""

    def __init__(self, rng: random.Random, profile: str) -> None:
        chance = random.Random()
        chance.setstate(rng.getstate())
        chance = random.Random(f"{chance.getrandbits(64)} ranks")
        self._seed = chance.getrandbits(64)
        self._healthy = profile == "healthy"
        self._linked = chance.random() < LINKED
        self._bad = not self._healthy and chance.random() < 0.7
        ping_s, lost_s = chance.choice(((0.4, 1.5), (1.0, 3.0), (1.0, 4.0)))
        self._base = RankTraits(
            ping_s=ping_s,
            lost_s=lost_s,
            tight=chance.random() < 0.5,
            double=0.05,
            garble=0.003 if self._bad and chance.random() < 0.3 else 0.0,
            stray=0.3 * self._bad,
            bounded=self._bad and chance.random() < 0.5,
            throws=0.02 * self._bad,
            slow=0.2 * self._bad,
            strange=0.02 * self._bad,
            twice=0.1 * self._bad,
            late=0.05 * self._bad,
        )
        prompts = PROMPTS if chance.random() < 0.5 else 0
        drawn = self._draw(chance) if self._linked else RankFaults()
        self.faults = msgspec.structs.replace(drawn, prompts=prompts if self._linked else 0)

    def _draw(self, chance: random.Random) -> RankFaults:
        if self._healthy:
            return RankFaults(stalls=chance.randint(0, 3), stall_s=(HEALTHY_STALL_S,))
        if not self._bad:
            return RankFaults()
        gone = chance.random() < 0.4
        return RankFaults(
            stalls=chance.randint(0, 4),
            cuts=chance.randint(0, 4),
            deaths=chance.randint(0, 2) * gone,
            hangs=chance.randint(0, 1) * gone,
            flaps=4,
        )

    def deal(self, characters: tuple[Character, ...]) -> tuple[Character, ...]:
        return tuple(self._dealt(each, self._traits(each)) for each in characters)

    def _dealt(self, character: Character, traits: RankTraits | None) -> Character:
        if traits is None or not traits.store:
            return msgspec.structs.replace(character, ranks=traits)
        often = {"put": PUT, "get": GET, "defers": True}
        return msgspec.structs.replace(character, ranks=traits, **often)

    def _traits(self, character: Character) -> RankTraits | None:
        chance = random.Random(f"{self._seed} {character.name}")
        if not self._linked or chance.random() >= LINKED_ENGINE:
            return None
        near = character.shape.ranks == 1 and chance.random() < NEAR
        return msgspec.structs.replace(self._base, near=near, store=chance.random() < STORE)


class RankTroubles:
    """The faults of one world's ranks, come alive."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.world = cluster.world
        self.faults: RankFaults = cluster.plan.ranks
        self._calm_until = 0.0
        self._rng = random.Random(f"kvbaton-sim-{self.world.seed}-rank-faults")
        for count, act in (
            (self.faults.flaps, cluster.worker_faults.flap),
            (self.faults.stalls, self._stall),
            (self.faults.cuts, self._cut),
            (self.faults.deaths, partial(self._lose, dies=True)),
            (self.faults.hangs, partial(self._lose, dies=False)),
        ):
            for _ in range(count):
                self.world.after(self._rng.uniform(0.2, FAULTY_S * 0.9), act)

    def heal(self) -> None:
        """Who has lost a rank for good falls now; all others have theirs back."""
        for life in list(self.cluster.lives.values()):
            if life.ranks is not None and life.alive:
                if life.ranks.is_crippled:
                    self.cluster.worker_faults.fall(life)
                else:
                    life.ranks.heal()

    def _stall(self, looks: int = LOOKS_MAX) -> None:
        found = self._any_rank(busy=looks > 0) if self.world.now >= self._calm_until else None
        if found is None:
            self._look_again(self._stall, looks)
            return
        life, ranks, number = found
        stall_s = self._rng.uniform(0.5, 1.0) * self._rng.choice(self.faults.stall_s)
        if self.faults.stall_s == (HEALTHY_STALL_S,):
            self._calm_until = self.world.now + HEALTHY_CALM_S
        self.world.strike("rank_stalls", life.peer.worker, lasts_s=stall_s)
        self.world.tell(f"{life.peer.worker} rank {number} stalls")
        ranks.stall(number, stall_s)

    def _cut(self) -> None:
        found = self._any_rank()
        if found is not None:
            life, ranks, number = found
            self.world.tell(f"{life.peer.worker} rank {number} is cut off")
            down_s = self._rng.uniform(0.5, 1.0) * self._rng.choice(CUTS_S)
            ranks.carrier.channels[number].cut_under(self._rng.choice((1, 1, 2, 5, 12)), down_s)

    def _lose(self, looks: int = LOOKS_MAX, dies: bool = True) -> None:
        found = self._any_rank(busy=looks > 0)
        if found is None:
            self._look_again(partial(self._lose, dies=dies), looks)
            return
        life, ranks, number = found
        self.world.faults["rank_dies" if dies else "rank_hangs"] += 1
        self.world.tell(f"{life.peer.worker} rank {number} {'dies' if dies else 'hangs'}")
        life.engine.device.stopped = True
        if dies:
            ranks.kill(number)
            if self._rng.random() < 0.5:
                self.world.after(self._rng.uniform(0, 2.0), partial(ranks.replace, number))
        else:
            ranks.hang(number)
        falls_s = self._rng.uniform(0.2, 1.0) * self._rng.choice(FALLS_S)
        self.world.touch("rank_lost", life.peer.worker, lasts_s=FAULTY_S)  # who is stopped then falls when all heals
        self.world.after(falls_s, partial(self._fall, life))

    def _fall(self, life: Life) -> None:
        if life.alive and not life.paused:
            self.cluster.worker_faults.fall(life)

    def _look_again(self, act: Callable[[int], None], looks: int) -> None:
        """Most faults strike a rank that has something to do."""
        if looks and not self.cluster.healed:
            self.world.after(LOOK_S, partial(act, looks - 1))

    def _any_rank(self, busy: bool = False) -> tuple[Life, LinkedRanks, int] | None:
        """A rank of its own process, of an engine that lives and has lost none."""
        able = [
            (life, life.ranks, rank.number)
            for _, life in sorted(self.cluster.lives.items())
            if life.alive and life.ranks is not None and not life.ranks.traits.near and not life.ranks.is_crippled
            for rank in life.ranks.ranks
            if rank.process.runs and (not busy or life.ranks.is_busy(rank.number))
        ]
        return self._rng.choice(able) if able else None
