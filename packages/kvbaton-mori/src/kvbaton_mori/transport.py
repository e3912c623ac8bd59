"""mori: READ by AMD's mori.io (RDMA; ROCm only), under kvbaton's own life cycle. Never run on hardware: see the docs.

mori moves the bytes; this module gives that its meaning. It cannot cancel: an abandoned copy ends as not at rest, its
memory stays out of use, and `CopyRested` follows when mori's status for it is over. Nothing is sent in band.

Law: only the mover's thread transfers. Every range is checked here, against the memory that this side has registered
and that the peer announced, before mori sees it (mori checks again).

No WRITE: its completion means that the target's network card has the bytes, not that they are visible in the target's
memory (mori can register memory with relaxed ordering, and orders no later read behind it on the same queue pair); a
failed one cannot be proven to be at rest at all; and without a fence no writer is allowed near other engines' blocks
anyway. Where a push is requested, P announces and D reads.

No fence: `deregister_remote_engine` closes no queue pair, and a registration is the same for every peer.

Trust: as with every one-sided transport, the holder of an endpoint can read and write all registered memory. mori's own
control port has no authentication: any peer that reaches it can get the keys. Use it on a network of trusted peers.
"""

from __future__ import annotations

import ipaddress
from collections import deque
from typing import Any

import msgspec
import numpy as np

from kvbaton.protocol.ids import PeerId
from kvbaton.transports.catalogue_entry import CatalogueEntry, PlaneSettings, loads
from kvbaton.transports.core.jobs import cut
from kvbaton.transports.core.shared_memory import REGIONS_MAX, DeviceMemory, RegisteredMemory
from kvbaton.transports.core.shell import DrivenShell, at_least_one
from kvbaton.transports.core.transport import Capabilities, Copy, Spans
from kvbaton_mori.endpoint import MoriEndpoint, name_engine, pack, parse
from kvbaton_mori.engine import MoriEngine, MoriError, MoriPlace, Plot, load
from kvbaton_mori.links import MoriLink
from kvbaton_mori.mover import MoriLimits, MoriMover

CLOSE_S = 7.0
"""mori may wait for room in its queue for 5 s, and cannot be interrupted."""

PART_BYTES = range(4 << 20, 32 << 20)
"""What is under way cannot be stopped, so it is not much. Not measured: taken over from nixl."""

ROWS_MAX = 1024
"""Of a part. Far below the depth of a send queue, so that one `ibv_post_send` takes all of it or nothing."""

CAPABILITIES = Capabilities(
    name="mori",
    one_sided=True,
    can_write=False,
    can_fence=False,
    cancels=False,
    same_host=False,
    device_kinds=("cpu", "cuda"),
)


class MoriConfig(msgspec.Struct, frozen=True):
    """`host` is what peers connect to, to exchange queue pairs: numeric, IPv4 (mori supports no other)."""

    host: str = "127.0.0.1"
    copies_max: int = 1024
    window: int = 8  # parts under way with one peer
    rows_max: int = 4096  # rows of these; mori's send queue holds 8,192 by default (MORI_IO_QP_MAX_SEND_WR)
    queues: int = 1  # queue pairs to one peer; with more, a read that failed stays in quarantine until the end
    dial_s: float = 2.0  # longest wait in mori for an unresponsive peer; all threads wait
    redial_s: float = 5.0  # pause before an unreachable peer is tried again
    full_s: float = 30.0  # how long a full send queue is tolerated

    def __post_init__(self) -> None:
        if ipaddress.IPv4Address(self.host).is_unspecified:
            raise ValueError(f"peers cannot connect to {self.host}: set host to this host's own address")
        if min(self.copies_max, self.window, self.queues) < 1 or self.rows_max < ROWS_MAX:
            raise ValueError(f"copies_max, window and queues are at least 1, rows_max at least {ROWS_MAX}: {self}")
        if min(self.dial_s, self.full_s) <= 0 or self.redial_s < 0:
            raise ValueError(f"dial_s and full_s are positive, redial_s is not negative: {self}")


class MoriTransport(DrivenShell[MoriLink]):
    """A `Transport`. Threads: one that drives mori, mori's own two, one more to wait for devices."""

    capabilities = CAPABILITIES
    _memory: RegisteredMemory
    _close_s = CLOSE_S

    def __init__(self, me: PeerId, config: MoriConfig | None = None, library: Any = None) -> None:
        """MoriMissing where there is no mori. `library` stands for `mori.io` in tests, and nowhere else."""
        config = config or MoriConfig()
        super().__init__(me, config.copies_max)
        self._memory = RegisteredMemory()
        self._plots: dict[int, Plot] = {}
        self._engine = MoriEngine(name_engine(me), config.host, config.queues, config.dial_s, library)
        self._description = self._engine.describe()
        limits = MoriLimits(config.window, config.rows_max, config.full_s, config.redial_s)
        self._driver = MoriMover(f"kvbaton-mori-{me}", self._engine, self._jobs, self._plots, limits)

    def register(self, region: int, memory: memoryview | DeviceMemory) -> None:
        """For reading and writing, by every peer: mori has no narrower registration."""
        if not memory.nbytes:
            raise ValueError(f"region {region}: mori registers no empty memory")
        if region in self._plots or not 0 <= region < REGIONS_MAX:
            raise ValueError(f"region {region} is taken, or not one of 0..{REGIONS_MAX - 1}")
        if isinstance(memory, DeviceMemory):
            self._place(region, MoriPlace(memory.address, memory.nbytes, memory.device))
        else:
            self._memory.add(region, memory)  # keeps it mapped
            self._place(region, MoriPlace(np.frombuffer(memory, np.uint8).ctypes.data, memory.nbytes))

    def endpoint(self, peer: PeerId) -> bytes:
        """The same for every peer: mori has no per-peer secrets."""
        regions = {region: plot.desc.pack() for region, plot in self._plots.items()}
        return pack(MoriEndpoint(self._me, self._description, regions))

    def connect(self, peer: PeerId, endpoint: bytes) -> None:
        """A new endpoint of a known peer replaces the old one, and ends what was in flight on it."""
        there = parse(endpoint)
        far = self._engine.understand(peer, there)
        self._link(peer, there, lambda: MoriLink(far, there))

    def _place(self, region: int, place: MoriPlace) -> None:
        try:
            desc = self._engine.register(place)
        except MoriError as error:
            raise ValueError(f"region {region}: {error}") from None
        self._plots[region] = Plot(place.size, desc)
        try:
            self.endpoint(self._me)
        except ValueError:
            del self._plots[region]
            self._engine.deregister(desc)
            raise

    def _local_bytes(self, region: int) -> int | None:
        plot = self._plots.get(region)
        return None if plot is None else plot.size

    def _cut(self, copy: Copy, link: MoriLink) -> deque[Spans]:
        remote = link.far.regions.get(copy.remote_region)
        total = self._total(copy, None if remote is None else remote.size)
        return at_least_one(cut(copy.spans, total, 1, PART_BYTES, ROWS_MAX))


def _make(me: PeerId, settings: PlaneSettings, _device: int = 0) -> MoriTransport:
    return MoriTransport(me, MoriConfig(host=settings.host))


ENTRY = CatalogueEntry(
    name="mori",
    what="RDMA by MoRI (ROCm)",
    needs="amd_mori",
    usable=loads(load),
    numeric_host=True,
    capabilities=lambda: CAPABILITIES,
    make=_make,
    make_device=_make,
)
