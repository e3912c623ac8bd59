"""The simulated router's discards of unused tickets: when they are sent, and how they travel.

Laws: a ticket is given back as the real router does it (`router/flow/request_flow.py`): when the client leaves, or D's
answer fails,
or, where both engines were asked at once, when either does. The registry may lose the word, double it, hold it up, and
bring it to another life of P. Strays are words that no router gives by design and that a cluster must still survive:
before P's lease, while D claims or reads, after the commit, twice, and to a worker that the ticket is not of.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from kvbaton.protocol.errors import ProtocolError
from kvbaton.protocol.ids import WorkerId
from kvbaton.protocol.machines.lease import ReaderState
from kvbaton_proof.sim.world.life import Life
from kvbaton_proof.sim.world.sim_network import Network
from kvbaton_proof.sim.world.touches import opened
from kvbaton_proof.sim.world.world import World

STRAYS = ("early", "claiming", "reading", "reading", "twice", "astray")
HARMLESS = ("reading", "reading", "astray")
"""What must cost nobody anything: in a healthy world every handoff is delivered all the same."""

LOOK_S = 0.002
LOOKS_MAX = 60


@dataclass(slots=True)
class Errand:
    """One ticket in the router's hands."""

    source: WorkerId
    ticket: str
    targets: int = 1  # D's whose answer is still to come
    failed: bool = False
    given_back: bool = False
    cancels: list[Callable[[], None]] = field(default_factory=list)  # each closes one leg, which aborts it there


class Router:
    """What the router says of tickets."""

    def __init__(self, world: World, network: Network, lives: Mapping[WorkerId, Life]) -> None:
        self.world = world
        self.network = network
        self.lives = lives
        self.late = 0.0  # share of answered requests whose ticket is given back all the same

    # --- as the real one does it

    def on_source(self, errand: Errand, how: str) -> None:
        """News of P's leg, where D was asked at the same time."""
        if how != "prefilled":
            self._give_back(errand)

    def on_target(self, errand: Errand, how: str) -> None:
        """News of a D's leg. `left` is the client's leaving, which D may hear of much later."""
        if how == "left":
            if errand.targets == 1:
                self._give_back(errand)
            return
        errand.targets -= 1
        errand.failed |= how != "answered"
        if not errand.targets and (errand.failed or self.world.chance(self.late)):
            self._give_back(errand)

    def leave(self, errand: Errand) -> None:
        """The client leaves when P has answered and D has not been asked."""
        self.world.faults["client_left"] += 1
        self._give_back(errand)

    def drop(self, errand: Errand) -> None:
        """P's own token was all of the answer."""
        self._give_back(errand)

    def _give_back(self, errand: Errand) -> None:
        if errand.given_back:
            return
        errand.given_back = True
        for cancel in errand.cancels:
            if self.world.chance(0.5):
                self.world.after(self.world.rng.uniform(0, 0.1), cancel)
        self._say(errand.source, errand.ticket)

    def _say(self, target: WorkerId, ticket: str) -> None:
        self.world.faults["discards"] += 1
        self.network.carry(lambda: self._arrive(target, ticket))

    def _arrive(self, target: WorkerId, ticket: str) -> None:
        life = self.lives[target]
        found = opened(ticket)
        if life.alive:
            if found is not None and found.source == target:
                self.world.touch("discarded", found.handoff)
            life.take_back(ticket)

    # --- as no router does it

    def stray(self, source: WorkerId, ticket: str, harmless: bool) -> None:
        rng = self.world.rng
        kind = rng.choice(HARMLESS if harmless else STRAYS)
        self.world.faults[f"discard_{kind}"] += 1
        if kind == "early":
            self._arrive(source, ticket)
        elif kind == "astray":
            self._say(rng.choice([name for name in sorted(self.lives) if name != source]), ticket)
        elif kind == "reading":
            self._once_read(source, ticket, harmless, LOOKS_MAX)
        else:
            for _ in range(2 if kind == "twice" else 1):
                self.world.after(rng.choice((0.02, 0.3)) * rng.random(), lambda: self._say(source, ticket))

    def _once_read(self, source: WorkerId, ticket: str, harmless: bool, looks: int) -> None:
        """Say it while somebody reads. If nobody else is to come, as in a healthy world, it must change nothing."""
        if _is_read(self.lives[source], ticket, or_by_more=not harmless):
            self._arrive(source, ticket)
        elif looks:
            again_s = LOOK_S + looks % 2 * 0.02
            self.world.after(again_s, lambda: self._once_read(source, ticket, harmless, looks - 1))


def _is_read(life: Life, ticket: str, or_by_more: bool) -> bool:
    """Whether somebody reads by this ticket, and nobody else may still come; unless they may."""
    try:
        handoff = life.doorway.open_ticket(ticket).handoff
    except ProtocolError:
        return False
    lease = life.node.ledger.producer.by_handoff.get(handoff)
    if lease is None or (lease.has_room() and not or_by_more):
        return False
    return any(seat.state is ReaderState.LIVE for seat in lease.seats.values())
