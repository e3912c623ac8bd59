"""Harnesses for data planes with checksums: both sides here, or the far side in a process of its own."""

from __future__ import annotations

from collections.abc import Callable

from kvbaton.protocol.effects import Capabilities
from kvbaton.protocol.ids import Incarnation, PeerId, WorkerId
from kvbaton.testing import Pair, Side
from kvbaton.transports.checksum.checksum_memory import Digesters
from kvbaton.transports.checksum.checksum_transport import SummedTransport
from kvbaton.transports.core.loans import lend_everything
from kvbaton.transports.core.shared_memory import allocate
from tests.transports.checksum.checksum_peer_process import PLANE, plane
from tests.transports.process_harness import FarTransport, PeerProcess, ProcessHarness


class SummedHarness(ProcessHarness):
    """`near` here, `far` in another process, all bytes compared. Close it when done."""

    def __init__(self, name: str, capabilities: Capabilities) -> None:
        super().__init__("tcp")
        self.capabilities = capabilities
        self._name = name

    def pair(self, near_bytes: int, far_bytes: int) -> Pair:
        if self._process is None or not self._process.alive():
            self._process = PeerProcess("checksum.checksum_peer_process", **{PLANE: self._name})
        self._count += 1
        here, there = allocate(near_bytes), allocate(far_bytes)
        self._regions += [here, there]
        near_id, far_id = (PeerId(WorkerId(name), Incarnation(self._count)) for name in ("near", "far"))
        transport = SummedTransport(plane(self._name, near_id), near_id)
        transport.register(0, here.view)
        near = Side(near_id, transport, here.view)
        far = Side(far_id, FarTransport(self._process, far_id, "tcp", there), there.view)
        self._sides += [near, far]
        if self.capabilities.lends_reads:
            lend_everything(near.transport, far_id)
            lend_everything(far.transport, near_id)
        near.transport.connect(far_id, far.transport.endpoint(near_id))
        far.transport.connect(near_id, near.transport.endpoint(far_id))
        return Pair(near, far)


class HeldDigesters(Digesters):
    """Keeps what it is given, until it is told to go on."""

    def __init__(self) -> None:
        super().__init__("held", 1)
        self.held: list[Callable[[], None]] = []
        self.holds = True

    def add(self, task: Callable[[], None]) -> None:
        if self.holds:
            self.held.append(task)
        else:
            super().add(task)

    def go_on(self) -> None:
        self.holds = False
        for task in self.held:
            super().add(task)
