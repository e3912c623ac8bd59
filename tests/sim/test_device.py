"""Simulated devices: what was issued is done later, and whoever forgets that is seen (rules 30 to 32)."""

from __future__ import annotations

from collections import defaultdict

import pytest

from kvbaton.protocol.effects import Direction
from kvbaton.protocol.ids import Incarnation, JobId, PeerId, RequestId, WorkerId
from kvbaton.protocol.settings import Settings
from kvbaton.transports.core.transport import Loan
from kvbaton_proof.sim.checks.byte_invariants import ByteInvariants
from kvbaton_proof.sim.mutants.mutants_device import DEVICE_MUTANTS
from kvbaton_proof.sim.promises import WRONG, Broken
from kvbaton_proof.sim.world.life import Character, Life
from kvbaton_proof.sim.world.sim_device import Device, Step, Work
from kvbaton_proof.sim.world.sim_engine import SimEngine
from kvbaton_proof.sim.world.sim_memory import Shape
from kvbaton_proof.sim.world.sim_network import Network, NetworkFaults
from kvbaton_proof.sim.world.sim_request import Phase, SimRequest
from kvbaton_proof.sim.world.sim_transport import Fabric, TransportFaults
from kvbaton_proof.sim.world.world import World

SHAPE = Shape(ranks=2, group_layers=(2, 1), block_tokens=4)
READER = PeerId(WorkerId("d"), Incarnation(7))


def request(name: str = "r", content: int = 1, tokens: int = 8, role: str = "prefill") -> SimRequest:
    return SimRequest(RequestId(name), content, tokens, role, lambda how, detail: None)


class Bench:
    """One device, and what it said."""

    def __init__(self, shape: Shape = SHAPE) -> None:
        self.world = World(3)
        self.device = Device(self.world, "p", shape, [bytearray(shape.region_bytes) for _ in range(shape.ranks)])
        self.said: list[tuple[int, int, int]] = []
        self.done: list[float] = []
        self.device.on_layer = lambda step, rank, layer: self.said.append((step.number, rank, layer))
        self.device.on_done = lambda: self.done.append(self.world.now)

    def issue(self, number: int, first: int, stop: int, content: int = 1, checked: bool = False) -> Step:
        work = Work(request(content=content), ([3, 4], [5, 6]), first, stop, 0, is_checked=checked)
        return self.device.issue(number, [work])

    def holds(self, content: int, tokens: int) -> bool:
        try:
            self.device.check(content, ([3, 4], [5, 6]), tokens, (0, 1), (0, 1, 2), "this test")
        except Broken as broken:
            assert broken.promise == WRONG
            return False
        return True


def test_a_rank_goes_layer_by_layer_and_step_by_step_and_ranks_are_apart() -> None:
    bench = Bench()
    steps = [bench.issue(1, 0, 4), bench.issue(2, 4, 8)]
    assert not bench.said and not steps[0].done, "nothing is done when it is issued"
    bench.world.run(10.0)
    by_rank = defaultdict(list)
    for number, rank, layer in bench.said:
        by_rank[rank].append((number, layer))
    in_order = [(number, layer) for number in (1, 2) for layer in (0, 1, 2)]
    assert by_rank[0] == by_rank[1] == in_order
    assert bench.said != sorted(bench.said, key=lambda each: (each[0], each[2], each[1])), "they went in lockstep"
    assert all(step.done for step in steps) and len(bench.done) == 2
    assert bench.holds(1, 8)


def test_a_step_writes_where_it_was_told_to_whoever_has_the_block_by_then() -> None:
    bench = Bench()
    bench.issue(1, 0, 8, content=1)
    assert bench.device.writing[3] and not bench.device.writing[7]
    for rank in (0, 1):
        for layer in (0, 1, 2):
            bench.device.write(2, ([3, 4], [5, 6]), 0, 8, rank, layer)  # bytes that no step orders
    assert bench.holds(2, 8)
    bench.world.run(10.0)
    assert not bench.holds(2, 8) and bench.holds(1, 8)
    assert not any(bench.device.writing)


@pytest.mark.parametrize("order", ["HNP", "NHP"])
def test_a_token_is_written_without_its_neighbours(order: str) -> None:
    """Else a step would mend what was wrong before it, and nobody would see."""
    bench = Bench(Shape(ranks=2, group_layers=(2, 1), block_tokens=4, order=order))
    bench.issue(1, 6, 7)
    bench.world.run(10.0)
    assert not bench.holds(1, 7)
    bench.issue(2, 0, 6)
    bench.world.run(20.0)
    assert not bench.holds(1, 7), "a block that is begun anew has nothing of what was there"
    bench.issue(3, 6, 7)
    bench.world.run(30.0)
    assert bench.holds(1, 7) and not bench.holds(1, 8)


def test_what_a_step_reads_is_looked_at_when_the_layer_is_computed() -> None:
    bench = Bench()
    bench.issue(1, 0, 4)
    bench.issue(2, 4, 5, checked=True)
    bench.world.run(10.0)
    bench.issue(3, 4, 5, checked=True)
    bench.device.write(9, ([3, 4], [5, 6]), 0, 4, 1, 2)
    with pytest.raises(Broken, match="rank 1 layer 2 block 0 is not this prompt's"):
        bench.world.run(20.0)


def test_a_dead_device_writes_nothing() -> None:
    bench = Bench()
    bench.issue(1, 0, 8)
    bench.device.stopped = True
    bench.world.run(10.0)
    assert not bench.said and not bench.holds(1, 1)


class Lone:
    """One engine with nobody around."""

    def __init__(self, **changes: object) -> None:
        self.world = World(5)
        self.fabric = Fabric(self.world, TransportFaults())
        character = Character(WorkerId("w"), Shape(blocks=12), ("tcp",), Settings(), **changes)  # type: ignore[arg-type]
        self.life = Life(self.world, character, Network(self.world, NetworkFaults()), self.fabric)
        self.engine: SimEngine = self.life.engine
        self.free = len(self.engine.pool.free)

    def issue_one(self) -> SimRequest:
        """A request with its first chunk in flight."""
        one = request(tokens=6)
        self.engine.add(one)
        self.engine.step()
        assert one.phase is Phase.PREFILLING and one.computed and any(self.engine.device.writing)
        return one


def test_what_a_step_in_flight_writes_is_free_with_its_output() -> None:
    lone = Lone(depth=2)
    lone.engine.abort(lone.issue_one().id)
    assert len(lone.engine.pool.free) < lone.free and not lone.engine.requests
    lone.world.run(5.0)
    assert len(lone.engine.pool.free) == lone.free and not lone.engine.held_refs


def test_an_engine_that_loads_nothing_need_not_wait() -> None:
    """Its next step writes there after the one in flight: one stream orders them."""
    lone = Lone(depth=2, defers=False)
    lone.engine.abort(lone.issue_one().id)
    assert len(lone.engine.pool.free) == lone.free


def test_a_destination_that_a_step_in_flight_writes_is_seen() -> None:
    lone = Lone(depth=2, defers=False, reuses_soon=True)
    lone.engine.abort(lone.issue_one().id)
    other = request("other", content=2, tokens=6)
    lone.engine._allocate(other)
    with pytest.raises(Broken, match="is loaded into, and a step in flight writes it"):
        lone.engine.fetching.begin(other)


def test_the_output_of_an_earlier_turn_says_nothing() -> None:
    lone = Lone(depth=2)
    one = lone.issue_one()
    lone.engine._preempt(one)
    lone.engine.depth = 0  # nothing more is issued
    lone.world.run(5.0)
    assert one.phase is Phase.WAITING and not one.computed and one.id in lone.engine.requests


def test_what_a_get_fills_is_held_until_its_last_piece_when_its_request_is_gone() -> None:
    lone = Lone(get=1.0)
    one = request(tokens=6)
    lone.engine.add(one)
    lone.engine.step()
    assert one.phase is Phase.FETCHING
    lone.engine.abort(one.id)
    held = lone.engine.fetching.held_blocks
    assert held and len(lone.engine.pool.free) == lone.free - held
    lone.world.run(5.0)
    assert len(lone.engine.pool.free) == lone.free and not lone.engine.fetching.open


def test_a_loan_of_what_was_not_computed_is_seen() -> None:
    lone = Lone()
    witness = ByteInvariants(lone.fabric)
    witness.watch(lone.life)
    one = lone.issue_one()
    loan = Loan(JobId(1), READER, Direction.READ, (tuple(one.blocks[0][:1]),))
    plane = lone.life.transports[0]["tcp"]
    with pytest.raises(Broken, match="rank 0 lends blocks that it has not computed"):
        plane.lend(loan)
    lone.world.run(5.0)
    plane.lend(loan)


def test_they_break_the_rules_about_devices_and_loans() -> None:
    assert {rule for mutant in DEVICE_MUTANTS for rule in mutant.rule.split(", ")} == {"28", "30", "31", "32"}
