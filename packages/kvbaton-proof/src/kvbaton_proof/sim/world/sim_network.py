"""A control network that delays, loses, doubles, reorders, cuts and garbles frames between named workers.

Frames go to the process that runs under the name when they arrive, so a restarted worker gets its predecessor's frames.
"""

from __future__ import annotations

import functools
import random
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvbaton.protocol.ids import WorkerId
from kvbaton_proof.sim.world.world import InjectedFault, World

REMEMBERED, GHOSTS_S = 90, 6.0
LATE_S = 0.1
"""What comes sooner must cost nobody anything, as in a healthy world."""


def _unseen(what: str, late_s: float) -> None:
    """Nobody looks."""


@dataclass(slots=True)
class NetworkFaults:
    """How bad the network is; all zero is a good one."""

    loss: float = 0.0
    double: float = 0.0
    slow: float = 0.0  # share of frames that take `slow_s` at most
    slow_s: float = 2.0
    garble: float = 0.0
    throws: float = 0.0  # share of looks for mail that raise


Fate = Callable[[WorkerId, WorkerId, bytes, str, float], None]
"""Between whom, the frame, what befell it, and how late it comes."""


class Network:
    """All links between workers."""

    def __init__(self, world: World, faults: NetworkFaults) -> None:
        self.world = world
        self.faults = faults
        self.cut: set[tuple[WorkerId, WorkerId]] = set()
        self.said: deque[tuple[WorkerId, WorkerId, bytes]] = deque(maxlen=REMEMBERED)
        self.names: set[WorkerId] = set()
        self.deliver: Callable[[WorkerId, WorkerId, bytes], None] = lambda source, target, frame: None
        self.on_said: Callable[[WorkerId, bytes], None] = lambda who, frame: None
        self.on_fate: Fate = lambda source, target, frame, what, late_s: None

    def send(self, source: WorkerId, target: WorkerId, frame: bytes) -> None:
        world, faults, rng = self.world, self.faults, self.world.rng
        self.said.append((source, target, frame))
        if (source, target) in self.cut:
            world.faults["partitioned"] += 1
            self.on_fate(source, target, frame, "partitioned", 0.0)
            return
        if world.chance(faults.garble):
            world.faults["garbled"] += 1
            garbled = self._garbled(frame)
            world.after(rng.uniform(0.0001, 0.002), lambda: self.deliver(source, target, garbled))
        self.carry(
            lambda: self.deliver(source, target, frame),
            lambda what, late_s: self.on_fate(source, target, frame, what, late_s),
        )

    def carry(self, arrive: Callable[[], None], befalls: Callable[[str, float], None] = _unseen) -> None:
        """Let something arrive: once, twice or never, soon or late; what befalls all of it is said."""
        world, faults, rng = self.world, self.faults, self.world.rng
        if world.chance(faults.loss):
            world.faults["lost"] += 1
            befalls("lost", 0.0)
            return
        copies = 1
        if world.chance(faults.double):
            world.faults["doubled"] += 1
            copies = 2
        soonest = float("inf")
        for _ in range(copies):
            delay = rng.uniform(0.0001, 0.002)
            if world.chance(faults.slow):
                world.faults["delayed"] += 1
                delay = rng.uniform(0.002, faults.slow_s * rng.choice((0.1, 1.0)))
            soonest = min(soonest, delay)
            world.after(delay, arrive)
        if soonest > LATE_S:
            befalls("delayed", soonest)

    def haunt(self, worker: WorkerId, chance: random.Random) -> None:
        """What its last life said and was told comes again, late, in the next one."""
        for source, target, frame in self.said:
            if worker in (source, target) and chance.random() < 0.7:
                self.world.faults["ghosts"] += 1
                late_s = chance.uniform(0, GHOSTS_S)
                self.world.after(late_s, functools.partial(self.deliver, source, target, frame))

    def _garbled(self, frame: bytes) -> bytes:
        rng = self.world.rng
        kind = rng.randrange(3)
        if kind == 0:
            return frame[: rng.randrange(len(frame))]
        if kind == 1:
            return rng.randbytes(rng.randrange(64))
        return frame + rng.randbytes(1 + rng.randrange(8))


class SimControl:
    """One life's control port."""

    def __init__(self, network: Network, me: WorkerId) -> None:
        self.network = network
        self._me = me
        self.inbox: list[tuple[WorkerId, bytes]] = []
        self.alive = True

    def send(self, worker: WorkerId, frame: bytes) -> bool:
        if worker not in self.network.names:
            return False
        if self.alive:
            self.network.on_said(self._me, frame)
            self.network.send(self._me, worker, frame)
        return True

    def receive(self) -> Sequence[tuple[WorkerId, bytes]]:
        throws = self.network.faults.throws
        if throws and self.inbox and self.network.world.chance(throws):
            self.network.world.strike("receive_threw", self._me)
            raise InjectedFault("the simulated control plane threw")
        frames, self.inbox = self.inbox, []
        return frames
