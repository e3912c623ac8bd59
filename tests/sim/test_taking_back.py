"""Tickets that the simulated router takes back: when it says so, how the word travels, and what the checkers see."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from kvbaton.protocol.effects import Unpin
from kvbaton.protocol.ids import LeaseId, TransferId, WorkerId, handoff_id
from kvbaton.protocol.settings import Settings
from kvbaton.protocol.wire.ticket import Ticket, seal
from kvbaton_proof.sim.mutants.hunting import hunt
from kvbaton_proof.sim.mutants.kept import find
from kvbaton_proof.sim.promises import LEAK, Broken
from kvbaton_proof.sim.world.life import TICKET_KEY, Character, Life
from kvbaton_proof.sim.world.sim_memory import Shape
from kvbaton_proof.sim.world.sim_network import Network, NetworkFaults
from kvbaton_proof.sim.world.sim_router import STRAYS, Errand, Router
from kvbaton_proof.sim.world.sim_transport import Fabric, TransportFaults
from kvbaton_proof.sim.world.world import World

from .seen_seeds import SeenSeeds

P, Q = WorkerId("p"), WorkerId("q")
HANDOFF = handoff_id(TransferId("0" * 32))


class Town:
    """Two workers and a router."""

    def __init__(self, faults: NetworkFaults | None = None) -> None:
        self.world = World(1)
        self.network = Network(self.world, faults or NetworkFaults())
        self.fabric = Fabric(self.world, TransportFaults())
        self.lives: dict[WorkerId, Life] = {}
        for name in (P, Q):
            self.start(name)
        self.router = Router(self.world, self.network, self.lives)

    def start(self, name: WorkerId) -> Life:
        character = Character(name, Shape(), ("tcp",), Settings())
        self.lives[name] = Life(self.world, character, self.network, self.fabric)
        return self.lives[name]

    def ticket(self) -> str:
        """As a router mints it."""
        return seal(Ticket(HANDOFF, P, self.world.now + 60.0), TICKET_KEY)

    def known(self, name: WorkerId) -> bool:
        """Whether the word has come to that worker's ledger."""
        self.world.run(self.world.now + 20.0)
        return HANDOFF in self.lives[name].node.ledger.producer.ended


def left(router: Router, errand: Errand) -> None:
    router.on_target(errand, "left")


def failed(router: Router, errand: Errand) -> None:
    router.on_target(errand, "failed")


def source_died(router: Router, errand: Errand) -> None:
    router.on_source(errand, "error")


@pytest.mark.parametrize("happens", [left, failed, source_died, Router.leave])
def test_p_hears_of_a_ticket_that_nobody_will_use(happens: Callable[[Router, Errand], None]) -> None:
    town = Town()
    happens(town.router, Errand(P, town.ticket()))
    assert town.known(P) and not town.known(Q)


def test_a_ticket_that_was_used_is_kept() -> None:
    town = Town()
    errand = Errand(P, town.ticket())
    town.router.on_source(errand, "prefilled")
    town.router.on_target(errand, "answered")
    assert not town.known(P) and not errand.given_back


def test_a_ticket_for_two_is_given_back_when_the_last_is_over() -> None:
    town = Town()
    errand = Errand(P, town.ticket(), targets=2)
    left(town.router, errand)
    failed(town.router, errand)
    assert not town.known(P), "the other D may still come"
    town.router.on_target(errand, "answered")
    assert town.known(P)


def test_a_ticket_is_given_back_once_and_its_legs_are_closed() -> None:
    town, closed = Town(), []
    for number in range(40):
        errand = Errand(P, town.ticket(), cancels=[lambda number=number: closed.append(number)])
        left(town.router, errand)
        failed(town.router, errand)
    town.world.run(5.0)
    assert town.world.faults["discards"] == 40
    assert 0 < len(closed) < 40, "a worker may not notice that its connection was closed"


def test_the_word_can_be_lost_and_can_come_twice() -> None:
    lost = Town(NetworkFaults(loss=1.0))
    left(lost.router, Errand(P, lost.ticket()))
    assert not lost.known(P)
    doubled = Town(NetworkFaults(double=1.0))
    left(doubled.router, Errand(P, doubled.ticket()))
    assert doubled.known(P)
    assert sum("taken back" in line for line in doubled.world.story) == 2


def test_what_comes_to_another_worker_or_another_life_says_nothing() -> None:
    town = Town()
    ticket, _ = town.lives[P].doorway.grant(b"d" * 16, 4, ((1, 2),))
    town.lives[P].crash()
    town.start(P)
    for name in (P, Q):
        town.lives[name].take_back(ticket)
    town.world.run(20.0)
    assert not any(len(life.node.ledger.producer.ended) for life in town.lives.values())


def test_a_second_release_of_a_lease_is_seen() -> None:
    door = Town().lives[P].doorway
    door.hand_in(Unpin(LeaseId(1)))
    door.hand_in(Unpin(LeaseId(2)))
    with pytest.raises(Broken, match="lease 1 was released twice") as seen:
        door.hand_in(Unpin(LeaseId(1)))
    assert seen.value.promise == LEAK


def test_every_kind_of_word_is_drawn_and_some_come_too_soon_for_a_reader(seen: SeenSeeds) -> None:
    assert {f"discard_{kind}" for kind in STRAYS} | {"client_left", "discards", "retired"} <= set(seen.faults)
    assert seen.ends["discarded"] > 0


QUICK = {
    "discard_unpins_while_read": "no leak, no wrong answer",  # whichever is seen first
    "protocol.machines.producer:Producer.on_discarded:drop:1": "no leak, no hang",  # whichever is seen first
    "discard_releases_twice": "no leak",
    "protocol.machines.producer:Producer.on_discarded:drop:2": "no hang",
    "protocol.machines.producer:Producer.on_discarded:never:2": "no needless failure",
}
"""That a second place is kept for a reader who will not come takes some seventy seeds: `make mutants` runs it."""


@pytest.mark.usefixtures("worlds_alone")
@pytest.mark.parametrize("name", QUICK)
def test_wrong_ideas_about_discards_are_seen(name: str) -> None:
    catch = hunt(name, 40)
    assert catch.caught and catch.promise in QUICK[name].split(", "), catch.what


def test_they_all_break_the_same_rule() -> None:
    slow = "protocol.machines.producer:Producer.on_discarded:forget:1"
    assert {find(name).rule for name in (*QUICK, slow)} == {"22"}
