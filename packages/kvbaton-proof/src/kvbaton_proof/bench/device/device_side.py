"""One end of the device benchmark's handoffs: a node with device memory and a door, and no engine."""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Callable, Sequence

from kvbaton.control import keyring as keys
from kvbaton.node.cluster_node import ClusterNode, ClusterSettings, EngineFacts, make_doorway, new_life
from kvbaton.node.doorway import DropBlocks, LoadReport, MatchState
from kvbaton.protocol.ids import PeerId, RequestId, WorkerId, rank_peer
from kvbaton.protocol.settings import Settings
from kvbaton.transports.core.device_memory import DeviceMemory
from kvbaton.transports.core.transport import DeviceTransport
from kvbaton.transports.cuda.cuda_driver import Gpu
from kvbaton.transports.cuda.cuda_transport import CudaConfig, CudaTransport
from kvbaton_proof.bench.device.device_world import BLOCK_TOKENS, BLOCKS, layout

DEADLINE_S = 20.0


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
        facts = EngineFacts(me=new_life(name), role="both", blocks=BLOCKS, layout=layout(), compat={"model": "none"})
        self.news = threading.Event()
        self.door = make_doorway(facts, keyring, ticket_ttl_s=600.0)
        self.door.wake_engine = self.news.set
        rank, config = rank_peer(facts.me, 0), CudaConfig(device=memory.device)
        plane: DeviceTransport = make(rank) if make is not None else CudaTransport(rank, config, gpu)
        plane.register(0, memory)
        settings = ClusterSettings(protocol=Settings(lease_s=60.0), records=False)
        self._node = ClusterNode(facts, keyring, [{plane.capabilities.name: plane}], self.door, settings)
        self.address = self._node.address
        self._node.start()

    def knows(self, name: str, address: tuple[str, str]) -> None:
        self._node.know({WorkerId(name): address})

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
        self._node.stop()


def digest_of(blocks: Sequence[int]) -> bytes:
    return len(blocks).to_bytes(8, "little") + blocks[0].to_bytes(8, "little")
