"""nixl: READ and WRITE by NIXL (UCX: RDMA, TCP, and on one host process_vm_readv), under kvbaton's own life cycle.

One transport moves memory of the host, or of one device (`NixlConfig.device`); the two sides of a copy may differ in
kind. Device memory is named to NIXL as such (VRAM, with its device), and its laws are the same.

NIXL moves the bytes; this module gives that its meaning. It cannot cancel and cannot fence: an abandoned copy ends as
not at rest, its memory stays out of use, and `CopyRested` follows when NIXL itself says that it is over. Nothing is
sent in band; the control plane tells the other side what was read.

Law: only the mover's thread transfers. Every range is checked here, against the memory that this side has registered
and that the peer announced, before NIXL sees it.

Trust: NIXL is one-sided, so remote memory is checked by the initiator, and again by NIXL against the peer's metadata.
The owner of the memory checks nothing: a registration lets the holder of an endpoint both read and write all of it,
cannot be read-only, is the same for every peer, and outlives `disconnect` (deregistering fences nothing either).
Endpoints therefore go to authenticated peers only, which are trusted with all registered memory, and nothing else may
be registered. Registered memory must stay mapped until `close`: over TCP a read of unmapped memory ends the process
that owned it.

Hazard, which cannot be fixed here (UCX 1.23, over TCP): when a reader dies, or ends NIXL, while the process it reads
from is stopped, UCX aborts that process when it continues: "unexpected error: Endpoint timeout", 5 of 5 times. It was
not seen with process_vm_readv on one host, nor between running processes. Prefer `tcp` where there is no RDMA. And with
device memory on one host (cuda_ipc) UCX keeps what it has opened of a peer, so a dead peer's memory may stay allocated:
there `cuda` comes first.
"""

from __future__ import annotations

import contextlib
from collections import deque

import msgspec
import numpy as np

from kvbaton.protocol.ids import PeerId
from kvbaton.transports.core.jobs import cut
from kvbaton.transports.core.shared_memory import DeviceMemory, RegisteredDevice, RegisteredMemory
from kvbaton.transports.core.shell import DrivenShell, at_least_one
from kvbaton.transports.core.transport import Capabilities, Copy, DeviceEvent, Spans
from kvbaton.transports.cuda.cuda_driver import CudaGpu, Gpu, quiet_event
from kvbaton.transports.nixl.nixl_agent import (
    Agent,
    NixlEndpoint,
    NixlError,
    NixlPlace,
    merged,
    name_agent,
    pack,
    parse,
    this_life,
    without_empty,
)
from kvbaton.transports.nixl.nixl_mover import NixlLink, NixlMover

CLOSE_S = 5.0
PART_BYTES = range(4 << 20, 128 << 20)
"""What is under way cannot be stopped, so it is bounded: 128 MiB are 27 to 46 ms on one host. A part costs 0.2 ms."""

DEVICE_PART_BYTES = range(32 << 20, 512 << 20)
"""Of device memory: 2.6 to 10 ms at 50 GB/s, and a span is cut in no more pieces than that asks for."""

ROWS_MAX = 8192
UCX = {"TCP_TX_SEG_SIZE": "256K", "TCP_RX_SEG_SIZE": "256K"}
"""UCX moves 8 KiB at a time over TCP by default, at a third of the speed (reference/transports.md 2.3)."""

DEVICE_UCX = {**UCX, "CUDA_IPC_ENABLE_GET_ZCOPY": "on"}
DEVICE_PARAMETERS = {"num_workers": "8", "num_threads": "8", "split_batch_size": "256"}
"""The two that matter on one host (docs/lab/2026-11-15-cuda.md): without them reads are 4 and another 4 times as slow.
Idle, these threads sleep."""

CAPABILITIES = Capabilities(
    name="nixl", one_sided=False, can_write=True, can_fence=False, cancels=False, same_host=False,
    device_kinds=("cpu", "cuda"),
)  # fmt: skip


class NixlConfig(msgspec.Struct, frozen=True):
    copies_max: int = 1024
    window: int = 8  # parts under way with one peer
    ucx: dict[str, str] = msgspec.field(default_factory=UCX.copy)  # without UCX_; what the environment sets comes first
    device: int | None = None  # of the memory; None: the host
    parameters: dict[str, str] = msgspec.field(default_factory=dict)  # of NIXL's back end

    def __post_init__(self) -> None:
        if self.copies_max < 1 or self.window < 1 or (self.device or 0) < 0:
            raise ValueError(f"copies_max and window are at least 1, a device is counted from 0: {self}")
        for key, value in self.ucx.items():
            if set("=,") & set(key + value):
                raise ValueError(f"ucx: {key}={value}: NIXL cannot pass values with a comma; set UCX_{key} instead")


def device_config(device: int) -> NixlConfig:
    """For the memory of one device."""
    return NixlConfig(ucx=DEVICE_UCX.copy(), device=device, parameters=DEVICE_PARAMETERS.copy())


class NixlTransport(DrivenShell[NixlLink]):
    """See `base.HostTransport` and, with a device, `base.DeviceTransport`. Threads: one that drives NIXL, NIXL's own,
    one more to wait for devices."""

    capabilities = CAPABILITIES
    _memory: RegisteredMemory | RegisteredDevice
    _close_s = CLOSE_S

    def __init__(self, me: PeerId, config: NixlConfig | None = None, gpu: Gpu | None = None) -> None:
        """ImportError where nixl, or a driver for the device, is not installed; `gpu` is for tests."""
        self._config = config = config or NixlConfig()
        super().__init__(me, config.copies_max)
        device = config.device
        self._gpu = None if device is None else gpu or CudaGpu(device)
        self._memory = RegisteredMemory() if device is None else RegisteredDevice(device)
        self._places: dict[int, NixlPlace] = {}
        self._metadata = b""
        with self._gpu or contextlib.nullcontext():  # NIXL's threads inherit nothing; the agent looks at devices here
            self._agent = Agent(name_agent(me), config.ucx, config.parameters)
        self._driver = NixlMover(f"kvbaton-nixl-{me}", self._agent, self._jobs, self._places, config.window, self._gpu)

    @property
    def handles(self) -> int:
        """Handles of NIXL that are open: requests under way, and prepared lists."""
        return self._agent.handles

    def register(self, region: int, memory: memoryview | DeviceMemory) -> None:
        """For reading and writing, by every peer: NIXL has no narrower registration."""
        place = self._place(region, memory)
        try:
            with self._gpu or contextlib.nullcontext():
                self._agent.register(place.address, place.size, place.device)
        except NixlError as error:
            raise ValueError(f"region {region}: {error}") from None
        self._places[region] = place
        self._metadata = b""

    def endpoint(self, peer: PeerId) -> bytes:
        """The same for every peer: NIXL has no per-peer secrets."""
        if not self._metadata:
            self._metadata = self._agent.metadata()
        return pack(NixlEndpoint(self._me, self._agent.name, this_life(), self._places, self._metadata))

    def connect(self, peer: PeerId, endpoint: bytes) -> None:
        """A new endpoint of a known peer replaces the old one, and ends what was in flight on it."""
        there = parse(peer, endpoint)
        self._link(peer, there, lambda: NixlLink(there))

    def _place(self, region: int, memory: memoryview | DeviceMemory) -> NixlPlace:
        """Its place. ValueError for memory of another kind than this transport's."""
        if isinstance(self._memory, RegisteredDevice):
            self._memory.add(region, memory)  # type: ignore[arg-type]  # it looks
            assert isinstance(memory, DeviceMemory)
            return NixlPlace(memory.address, memory.nbytes, memory.device)
        if not isinstance(memory, memoryview) or not memory.nbytes:
            raise ValueError(
                f"region {region}: NIXL registers no empty memory, nor memory of a device where none is set"
            )
        self._memory.add(region, memory)
        return NixlPlace(np.frombuffer(memory, np.uint8).ctypes.data, memory.nbytes)

    def _cut(self, copy: Copy, link: NixlLink) -> deque[Spans]:
        remote = link.there.places.get(copy.remote_region)
        total = self._total(copy, None if remote is None else remote.size)
        spans, part_bytes = without_empty(copy.spans), PART_BYTES
        if self._gpu is not None:
            spans, part_bytes = merged(spans), DEVICE_PART_BYTES
        return at_least_one(cut(spans, total, 1, part_bytes, ROWS_MAX))

    def _event(self, event: DeviceEvent) -> DeviceEvent:
        return event if self._gpu is None else quiet_event(event, self._gpu)
