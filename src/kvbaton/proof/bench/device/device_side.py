"""One end of the device benchmark's handoffs: a node with device memory and a door, and nobody who computes."""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Callable, Sequence

import msgspec

from kvbaton.control import keyring as keys
from kvbaton.control.zmq import ZmqControl
from kvbaton.node.doorway import Doorway, DoorwayConfig, DropBlocks, LoadReport, MatchState
from kvbaton.node.epochs import EpochTable
from kvbaton.node.node import Node
from kvbaton.node.node_loop import NodeLoop
from kvbaton.proof.bench.device.device_world import BLOCK_TOKENS, BLOCKS, layout
from kvbaton.protocol.ids import Incarnation, PeerId, RequestId, TransferId, WorkerId, rank_peer
from kvbaton.protocol.machines.context import Identity
from kvbaton.protocol.machines.ledger import Ledger
from kvbaton.protocol.settings import Settings
from kvbaton.transports.core.device_memory import DeviceMemory
from kvbaton.transports.core.transport import DeviceTransport
from kvbaton.transports.cuda.cuda_driver import Gpu
from kvbaton.transports.cuda.cuda_transport import CudaConfig, CudaTransport

DEADLINE_S = 20.0


class Address(msgspec.Struct, frozen=True):
    endpoint: str
    public_key: str


class DeviceSide:
    """A node over the cuda plane, or over the one that `make` makes."""

    def __init__(
        self,
        name: str,
        key_directory: str,
        memory: DeviceMemory,
        gpu: Gpu,
        make: Callable[[PeerId], DeviceTransport] | None = None,
    ) -> None:
        keyring = keys.load(key_directory, name)
        me = PeerId(WorkerId(name), Incarnation(secrets.randbits(63)))
        self.news = threading.Event()
        config = DoorwayConfig(
            me=me, ranks=1, groups=1, ticket_keys=keyring.ticket_keys, ticket_ttl_s=600.0,
            mint=lambda: TransferId(secrets.token_hex(16)), wall=time.time,
        )  # fmt: skip
        self.door = Doorway(config, EpochTable(BLOCKS))
        self.door.wake_engine = self.news.set
        rank, config_of = rank_peer(me, 0), CudaConfig(device=memory.device)
        plane: DeviceTransport = make(rank) if make is not None else CudaTransport(rank, config_of, gpu)
        plane.register(0, memory)
        self._control = ZmqControl(keyring)
        self.address = Address(self._control.endpoint, keyring.public)
        identity = Identity(
            me, "bench", {"model": "none"}, layout(), (plane.capabilities,), keyring.ticket_keys,
            time.time() - time.monotonic(),
        )  # fmt: skip
        ledger = Ledger(identity, Settings(lease_s=60.0), self.door.epochs.all_of)
        self._loop = NodeLoop(Node(ledger, self._control, [{plane.capabilities.name: plane}], self.door), self._control)
        self._loop.start()

    def knows(self, name: str, address: Address) -> None:
        self._control.set_directory({WorkerId(name): (address.endpoint, address.public_key)})

    def grant(self, blocks: Sequence[int]) -> str:
        """P: a ticket for a prompt that fills these blocks."""
        self.door.duties()
        return self.door.grant(digest_of(blocks), BLOCK_TOKENS * len(blocks), (tuple(blocks),))[0]

    def fetch(self, ticket: str, source: Sequence[int], target: Sequence[int]) -> float:
        """D: the whole handoff, from wanting it to the engine's report; seconds. RuntimeError if it failed."""
        request, found, seconds = RequestId(secrets.token_hex(8)), False, 0.0
        begun = time.perf_counter()
        self.door.want(request, ticket, digest_of(source), BLOCK_TOKENS * len(source))
        self.news.set()  # a ticket that is no ticket is known at once
        while True:
            if not self.news.wait(DEADLINE_S):
                raise RuntimeError(f"a handoff did not end within {DEADLINE_S:.0f} s")
            self.news.clear()
            for duty in self.door.duties():
                if isinstance(duty, LoadReport):
                    seconds = time.perf_counter() - begun
                    if not duty.end.delivered:
                        raise RuntimeError(f"a handoff failed: {duty.end}")
                elif isinstance(duty, DropBlocks) and seconds:
                    return seconds
            if found:
                continue
            match = self.door.match(request)
            if match.state is MatchState.FOUND or (match.state is MatchState.NOT_YET and match.computed):
                found = True  # as vLLM's connector does: blocks before P's answer, where that is one message away
                self.door.allocated(request, (tuple(target),), 0)
            elif match.state is MatchState.FAILED:
                raise RuntimeError(f"a handoff failed before it began: {match}")

    def close(self) -> None:
        self._loop.stop()


def digest_of(blocks: Sequence[int]) -> bytes:
    return len(blocks).to_bytes(8, "little") + blocks[0].to_bytes(8, "little")
