"""`ProcessHarness` for mooncake: near here, far in `mooncake_peer.py`."""

from __future__ import annotations

from kvbaton.protocol.ids import Incarnation, PeerId, WorkerId
from kvbaton.testing import Pair, Side
from kvbaton.transports.core.shared_memory import allocate
from kvbaton.transports.mooncake.mooncake_transport import CAPABILITIES, MooncakeConfig, MooncakeTransport
from tests.transports.process_harness import FarTransport, PeerProcess, ProcessHarness


class MooncakeHarness(ProcessHarness):
    """The process is kept from pair to pair; `env` is what it is started with."""

    def __init__(self, config: MooncakeConfig | None = None, **env: str) -> None:
        super().__init__("tcp")
        self.capabilities = CAPABILITIES
        self.config = config or MooncakeConfig()
        self._env = env

    def pair(self, near_bytes: int, far_bytes: int) -> Pair:
        if self._process is None or not self._process.alive():
            self._process = PeerProcess("mooncake.mooncake_peer", **self._env)
        self._count += 1
        here, there = allocate(near_bytes), allocate(far_bytes)
        self._regions += [here, there]
        near_id, far_id = (PeerId(WorkerId(name), Incarnation(self._count)) for name in ("near", "far"))
        transport = MooncakeTransport(near_id, self.config)
        transport.register(0, here.view)
        near = Side(near_id, transport, here.view)
        far = Side(far_id, FarTransport(self._process, far_id, "tcp", there), there.view)
        self._sides += [near, far]
        near.transport.connect(far_id, far.transport.endpoint(near_id))
        far.transport.connect(near_id, near.transport.endpoint(far_id))
        return Pair(near, far)
