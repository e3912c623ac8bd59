"""Harnesses for NIXL: both sides here, or the far side in a process that can be stopped and killed."""

from __future__ import annotations

from kvbaton.protocol.ids import Incarnation, PeerId, WorkerId
from kvbaton.testing import Pair, Side
from kvbaton.transports.core.shared_memory import allocate
from kvbaton.transports.nixl.nixl_transport import CAPABILITIES, UCX, NixlConfig, NixlTransport
from tests.transports.peer_process import Kind
from tests.transports.process_harness import FarTransport, PeerProcess, ProcessHarness

WAYS: dict[Kind, dict[str, str]] = {"shm": UCX, "tcp": {**UCX, "TLS": "tcp"}}


class NixlHarness(ProcessHarness):
    """`near` here, `far` in another process, joined by the way of UCX that `kind` names. Close it when done."""

    def __init__(self, kind: Kind) -> None:
        self.capabilities = CAPABILITIES
        self._kind = kind
        self._process: PeerProcess | None = None
        self._sides = []
        self._regions = []
        self._count = 0

    @property
    def process(self) -> PeerProcess:
        assert self._process is not None
        return self._process

    def pair(self, near_bytes: int, far_bytes: int, config: NixlConfig | None = None) -> Pair:
        if self._process is None or not self._process.alive():
            self._process = PeerProcess("nixl.nixl_peer_process")
        self._count += 1
        here, there = allocate(near_bytes), allocate(far_bytes)
        near_id, far_id = (PeerId(WorkerId(name), Incarnation(self._count)) for name in ("near", "far"))
        transport = NixlTransport(near_id, config or NixlConfig(ucx=WAYS[self._kind]))
        transport.register(0, here.view)
        near = Side(near_id, transport, here.view)
        far = Side(far_id, FarTransport(self._process, far_id, self._kind, there), there.view)
        near.transport.connect(far_id, far.transport.endpoint(near_id))
        far.transport.connect(near_id, near.transport.endpoint(far_id))
        self._sides += [near, far]
        self._regions += [here, there]
        return Pair(near, far)
