"""Whole handoffs of device memory over staging: pull and push, with real ledgers, planes and loans, on a device made of
host memory. What is pushed is written by P, and lands by D's own launches."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Iterator
from itertools import count
from typing import Any

import pytest

from kvbaton.node.doorway import Doorway, DoorwayConfig, LoadReport, MatchState, UnpinBlocks
from kvbaton.node.epochs import EpochTable
from kvbaton.node.node import Node
from kvbaton.protocol.geometry.progress import whole
from kvbaton.protocol.ids import HandoffId, Incarnation, PeerId, RequestId, TransferId, WorkerId, rank_peer
from kvbaton.protocol.machines.context import Identity
from kvbaton.protocol.machines.ledger import Ledger
from kvbaton.protocol.settings import Settings
from kvbaton.protocol.wire.ticket import Ticket, seal
from kvbaton.testing.transport_harness import poll
from kvbaton.transports.core.shared_memory import DeviceMemory
from kvbaton.transports.staged.staged_listener import Carrier
from kvbaton.transports.staged.staged_transport import StagedConfig, StagedTransport
from kvbaton_proof.sim.world.sim_memory import Shape
from tests.node.test_node import FakeControl
from tests.transports.device.fake_gpu import FakeGpu

KEY, DIGEST, TOKENS = b"key of the cluster", b"digest", 5
R = RequestId("r")
SHAPE = Shape(heads=2)
SOURCE, TARGET = (1, 2, 3), (4, 5, 6)
DEADLINE_S = 20.0


class Engine:
    """A node over one staged plane, and the memory behind it."""

    def __init__(self, name: str, carrier: Carrier, network: dict[WorkerId, FakeControl], gpu: FakeGpu) -> None:
        me, numbers = PeerId(WorkerId(name), Incarnation(ord(name))), count(1)
        config = DoorwayConfig(
            me=me, ranks=1, groups=1, ticket_keys=(KEY,), ticket_ttl_s=600.0,
            mint=lambda: TransferId(f"{next(numbers):032x}"), wall=time.monotonic,
        )  # fmt: skip
        self.door = Doorway(config, EpochTable(SHAPE.blocks))
        self.plane = StagedTransport(
            rank_peer(me, 0), StagedConfig(carrier=carrier, slot_bytes=1 << 20, sockets=2, slots=4), gpu
        )
        self.address = gpu.allocate(SHAPE.region_bytes)
        self.plane.register(0, DeviceMemory(self.address, SHAPE.region_bytes))
        network[me.worker] = control = FakeControl(me.worker, network)
        able = (self.plane.capabilities,)
        identity = Identity(me, "host", {"model": "m"}, SHAPE.layout(), able, (KEY,))
        ledger = Ledger(identity, Settings(), self.door.epochs.all_of)
        self.node = Node(ledger, control, [{self.plane.capabilities.name: self.plane}], self.door)
        self.duties: list[Any] = []

    def step(self) -> None:
        self.node.step(time.monotonic())
        self.duties += self.door.duties()

    def fill(self, seed: int) -> None:
        ctypes.memmove(
            self.address, bytes((seed + 3 * at) & 255 for at in range(SHAPE.region_bytes)), SHAPE.region_bytes
        )

    def block(self, block: int) -> bytes:
        pages = (SHAPE.page(layer, block) for layer in range(SHAPE.layers))
        return b"".join(ctypes.string_at(self.address + page, SHAPE.page_bytes) for page in pages)

    @property
    def reports(self) -> list[LoadReport]:
        return [duty for duty in self.duties if isinstance(duty, LoadReport)]


class Net:
    def __init__(self, carrier: Carrier) -> None:
        network: dict[WorkerId, FakeControl] = {}
        gpu = FakeGpu()
        self.p, self.d = (Engine(name, carrier, network, gpu) for name in "pd")
        self.p.fill(1)
        self.d.fill(2)

    def until(self, what: Any) -> None:
        def stepped() -> bool:
            self.p.step()
            self.d.step()
            return bool(what())

        assert poll(stepped, DEADLINE_S)

    def find(self) -> None:
        self.until(lambda: self.d.door.match(R).state is MatchState.FOUND)
        self.d.door.allocated(R, (TARGET,), 0)

    def push(self) -> None:
        handoff = HandoffId("f" * 32 + ".0")
        lease = self.p.door.begin(handoff, DIGEST, TOKENS)
        self.p.door.pin(lease, (SOURCE,))
        self.d.door.want(
            R, seal(Ticket(handoff, WorkerId("p"), time.monotonic() + 60.0), KEY), DIGEST, TOKENS, push=True
        )
        self.find()
        self.p.door.progressed(lease, whole([3]))
        self.p.door.completed(lease)

    def close(self) -> None:
        self.p.plane.close()
        self.d.plane.close()


@pytest.fixture(params=["shm", "tcp"])
def net(request: pytest.FixtureRequest) -> Iterator[Net]:
    made = Net(request.param)
    yield made
    made.close()


def _arrived(net: Net) -> None:
    net.until(lambda: net.d.reports)
    assert net.d.reports[0].end.reason is None, net.d.reports
    assert [net.d.block(block) for block in TARGET] == [net.p.block(block) for block in SOURCE]
    net.until(lambda: any(isinstance(duty, UnpinBlocks) for duty in net.p.duties))


def test_what_is_pulled_arrives(net: Net) -> None:
    ticket, _ = net.p.door.grant(DIGEST, TOKENS, (SOURCE,))
    net.d.door.want(R, ticket, DIGEST, TOKENS)
    net.find()
    _arrived(net)


def test_what_is_pushed_is_written_by_the_sender(net: Net, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(net.d.plane, "submit", lambda copy: pytest.fail("the receiver copied"))
    beside = [block for block in range(SHAPE.blocks) if block not in TARGET]
    before = [net.d.block(block) for block in beside]
    net.push()
    _arrived(net)
    assert [net.d.block(block) for block in beside] == before, "what was not offered is as it was"
