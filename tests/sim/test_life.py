"""One simulated worker is driven as production drives one."""

from __future__ import annotations

import pytest

from kvbaton.protocol.ids import WorkerId
from kvbaton.protocol.settings import Settings
from kvbaton_proof.sim.world.life import Character, Life
from kvbaton_proof.sim.world.sim_memory import Shape
from kvbaton_proof.sim.world.sim_network import Network, NetworkFaults
from kvbaton_proof.sim.world.sim_transport import Fabric, TransportFaults
from kvbaton_proof.sim.world.world import World


@pytest.mark.parametrize("drift", [-0.05, 0.05])
def test_tickets_are_judged_by_the_wall_clock_however_long_a_loop_has_drifted(drift):
    """Seed 22957 of an earlier plan: 84 s of drift made a ticket of 5 s look expired when it was half a second old."""
    world = World(1)
    character = Character(WorkerId("w"), Shape(blocks=12), ("tcp",), Settings(), drift=drift, wall_skew_s=0.3)
    life = Life(world, character, Network(world, NetworkFaults()), Fabric(world, TransportFaults()))
    world.run(84.0)
    life.wake()
    world.run(85.0)
    node_s = life.clock() + life.node.ledger.desk.identity.wall_offset_s
    assert node_s == pytest.approx(world.now + 0.3, abs=0.1)
