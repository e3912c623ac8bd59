"""The simulated data planes keep the same contract as the real ones."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from kvbaton.protocol.effects import Capabilities
from kvbaton.protocol.ids import Incarnation, PeerId, WorkerId
from kvbaton.testing import Case, Pair, Side, check_transport
from kvbaton.testing.transport_case import offered
from kvbaton.transports.core.loans import lend_everything
from kvbaton_proof.sim.world.sim_transport import CMA, LENT_TCP, RDMA, SHM, TCP, Fabric, SimTransport, TransportFaults
from kvbaton_proof.sim.world.world import World

STEP_S = 0.01


class SimHarness:
    """Two simulated transports in a world of their own; waiting lets virtual time pass."""

    offers = frozenset({"kill", "pause"})

    def __init__(self, kind: Capabilities) -> None:
        self.capabilities = kind
        self.world = World(1)
        self.fabric = Fabric(self.world, TransportFaults())

    def pair(self, near_bytes: int, far_bytes: int) -> Pair:
        sides = []
        for name, size in (("near", near_bytes), ("far", far_bytes)):
            peer = PeerId(WorkerId(name), Incarnation(len(self.fabric.by_address) + 1))
            transport = SimTransport(self.fabric, peer, self.capabilities)
            memory = memoryview(bytearray(size))
            transport.register(0, memory)
            sides.append(Side(peer, transport, memory))
        near, far = sides
        lend_everything(near.transport, far.peer, able=self.capabilities)
        lend_everything(far.transport, near.peer, able=self.capabilities)
        near.transport.connect(far.peer, far.transport.endpoint(near.peer))
        far.transport.connect(near.peer, near.transport.endpoint(far.peer))
        return Pair(near, far)

    def wait(self, predicate: Callable[[], bool], deadline_s: float) -> bool:
        until = self.world.now + deadline_s
        while not predicate():
            if self.world.now >= until:
                return False
            self.world.run(self.world.now + STEP_S)
        return True

    def kill(self, side: Side) -> None:
        side.transport.alive = False

    def pause(self, side: Side) -> None:
        side.transport.paused = True

    def resume(self, side: Side) -> None:
        side.transport.paused = False

    def reset(self) -> None:
        for transport in self.fabric.by_address.values():
            transport.close()


RUNS = [
    pytest.param(kind, case, id=f"{kind.name}-{case.name}")
    for kind in (SHM, TCP, LENT_TCP, RDMA, CMA)
    for case in check_transport.cases
    if case.needs <= offered(SimHarness(kind))
]


def test_most_of_the_contract_can_be_run_here():
    assert len(RUNS) > 2 * len(check_transport.cases)


@pytest.mark.parametrize(("kind", "case"), RUNS)
def test_the_simulated_planes_keep_the_contract(kind: Capabilities, case: Case) -> None:
    case(SimHarness(kind))
