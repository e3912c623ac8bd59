"""mori: READ by AMD's mori.io (RDMA; ROCm only), under kvbaton's own life cycle. Never run on hardware: see the docs.

mori moves the bytes and this module says what that means. It cannot cancel: a copy that is given up ends as not at
rest, its memory stays out of use, and `CopyRested` follows when mori's status for it is over. Nothing is sent in band.

Law: only the mover's thread transfers. Every range is checked here, against what this side has registered and what the
peer says it has, before mori sees it (mori checks again).

No WRITE: its completion says that the target's network card has the bytes, not that they are visible in the target's
memory (mori can register memory with relaxed ordering, and keeps no later read behind it on the same queue pair); one
that failed cannot be proven to be at rest at all; and without a fence no writer is let near anybody's blocks anyway.
Where a push is asked for, P announces and D reads.

No fence: `deregister_remote_engine` closes no queue pair, and a registration is the same for every peer.

Trust: as with every one-sided plane, whoever holds an endpoint can read and write all registered memory. mori's own
control port asks nobody who he is: whoever reaches it can get the keys. Use it on a network of peers that you trust.
"""

from __future__ import annotations

import ipaddress
from array import array
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import msgspec
import numpy as np

from kvbaton.protocol.errors import Reason
from kvbaton.protocol.ids import JobId, PeerId
from kvbaton.transports.core.device_event_wait import Gate
from kvbaton.transports.core.device_memory import DeviceMemory
from kvbaton.transports.core.jobs import Job, Jobs
from kvbaton.transports.core.mover import choose_mover
from kvbaton.transports.core.shared_memory import REGIONS_MAX, Registered
from kvbaton.transports.core.span_tables import cut
from kvbaton.transports.core.transport import Capabilities, Copy, Direction, TransportEvent
from kvbaton.transports.mori.mori_endpoint import MoriEndpoint, name_engine, pack, parse
from kvbaton.transports.mori.mori_engine import Engine, MoriError, Place, Plot
from kvbaton.transports.mori.mori_links import Link
from kvbaton.transports.mori.mori_mover import Limits, MoriMover

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
    """`host` is what peers dial to exchange queue pairs: numeric, IPv4 (mori knows no other)."""

    host: str = "127.0.0.1"
    copies_max: int = 1024
    window: int = 8  # parts under way with one peer
    rows_max: int = 4096  # rows of these; mori's send queue holds 8,192 by default (MORI_IO_QP_MAX_SEND_WR)
    queues: int = 1  # queue pairs to one peer; with more, a read that failed stays in quarantine until the end
    dial_s: float = 2.0  # how long mori may wait for a peer that does not answer; every thread of the process waits
    redial_s: float = 5.0  # how long a peer that could not be reached is left alone
    full_s: float = 30.0  # how long a full send queue is put up with

    def __post_init__(self) -> None:
        if ipaddress.IPv4Address(self.host).is_unspecified:
            raise ValueError(f"peers cannot dial {self.host}: set host to this host's own address")
        if min(self.copies_max, self.window, self.queues) < 1 or self.rows_max < ROWS_MAX:
            raise ValueError(f"copies_max, window and queues are at least 1, rows_max at least {ROWS_MAX}: {self}")
        if min(self.dial_s, self.full_s) <= 0 or self.redial_s < 0:
            raise ValueError(f"dial_s and full_s are positive, redial_s is not negative: {self}")


class MoriTransport:
    """See `base.Transport`. Threads: one that drives mori, mori's own two, one more to wait for devices."""

    capabilities = CAPABILITIES

    def __init__(self, me: PeerId, config: MoriConfig | None = None, library: Any = None) -> None:
        """MoriMissing where there is no mori. `library` stands for `mori.io` in tests, and nowhere else."""
        self._me = me
        self._config = config = config or MoriConfig()
        self._checker = choose_mover()
        self._jobs = Jobs(config.copies_max)
        self._memory = Registered()
        self._plots: dict[int, Plot] = {}
        self._links: dict[PeerId, tuple[MoriEndpoint, Link]] = {}
        self._engine = Engine(name_engine(me), config.host, config.queues, config.dial_s, library)
        self._description = self._engine.describe()
        self._gate = Gate(f"kvbaton-mori-gate-{me}")
        limits = Limits(config.window, config.rows_max, config.full_s, config.redial_s)
        self._mover = MoriMover(f"kvbaton-mori-{me}", self._engine, self._jobs, self._plots, limits)

    def register(self, region: int, memory: memoryview | DeviceMemory) -> None:
        """For reading and writing, by every peer: mori knows no narrower registration."""
        if not memory.nbytes:
            raise ValueError(f"region {region}: mori registers no empty memory")
        if region in self._plots or not 0 <= region < REGIONS_MAX:
            raise ValueError(f"region {region} is taken, or not one of 0..{REGIONS_MAX - 1}")
        if isinstance(memory, DeviceMemory):
            self._place(region, Place(memory.address, memory.nbytes, memory.device))
        else:
            self._memory.add(region, memory)  # keeps it mapped
            self._place(region, Place(np.frombuffer(memory, np.uint8).ctypes.data, memory.nbytes))

    def endpoint(self, peer: PeerId) -> bytes:
        """The same for every peer: mori has nothing like a secret for each."""
        regions = {region: plot.desc.pack() for region, plot in self._plots.items()}
        return pack(MoriEndpoint(self._me, self._description, regions))

    def connect(self, peer: PeerId, endpoint: bytes) -> None:
        """A new endpoint of a known peer replaces the old one, and ends what was under way on it."""
        there = parse(endpoint)
        far = self._engine.understand(peer, there)
        with self._jobs:
            old = self._links.get(peer)
            if old is not None and old[0] == there:
                return
            self._end_copies(peer, Reason.TRANSFER_FAILED, "the peer has a new endpoint")
            self._links[peer] = there, Link(far)
        if old is not None:
            self._mover.retire(old[1])

    def disconnect(self, peer: PeerId) -> None:
        """Ends our copies with `peer`. Its access to our memory it keeps: see Trust."""
        with self._jobs:
            self._end_copies(peer, Reason.PEER_GONE, "disconnected")
            found = self._links.pop(peer, None)
        if found is not None:
            self._mover.retire(found[1])

    def fence(self, peer: PeerId) -> None:
        raise NotImplementedError("mori cannot shut one peer's writes out: see capabilities.can_fence")

    def submit(self, copy: Copy) -> bool:
        with self._jobs:
            if self._mover.is_full:
                return False
            job = self._jobs.accept(copy)
            if job is None:
                return False
            found = self._links.get(copy.peer)
            if found is None:
                self._jobs.fail(job, Reason.PEER_UNKNOWN, f"{copy.peer} is not connected")
                return True
            if copy.direction is Direction.WRITE:
                self._jobs.fail(job, Reason.NO_TRANSPORT, "mori offers no WRITE here: the receiver reads")
                return True
            link = found[1]
            try:
                self._cut(job, link)
            except ValueError as error:
                self._jobs.fail(job, Reason.BAD_SPAN, str(error))
                return True
            if copy.after is not None:
                self._gate.wait(copy.after, partial(self._released, job, link))
            else:
                self._mover.add(link, job)
        return True

    def cancel(self, job: JobId) -> None:
        """It ends now. What was under way lands; `CopyRested` says when it has."""
        with self._jobs:
            found = self._jobs.find(job)
            if found is None:
                return
            self._jobs.abandon(found, Reason.CANCELLED)
            link = self._links.get(found.copy.peer)
        if link is not None:
            self._mover.sweep(link[1])

    def drain(self) -> Sequence[TransportEvent]:
        return self._jobs.drain()

    def set_waker(self, waker: Callable[[], None]) -> None:
        self._jobs.set_waker(waker)

    def close(self) -> None:
        """Ends mori's engine, unless it is stuck: then its memory stays registered, and referenced."""
        if not self._jobs.close():
            return
        for job in self._jobs.of_peer():
            self._jobs.fail(job, Reason.CANCELLED, "the transport was closed")
        self._gate.close(0)
        stopped = self._mover.stop(CLOSE_S)
        for job in self._jobs.of_peer():
            self._jobs.abandon(job, Reason.CANCELLED, "the transport was closed")
        self._links.clear()
        if stopped:
            self._memory.clear()

    def _place(self, region: int, place: Place) -> None:
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

    def _cut(self, job: Job, link: Link) -> None:
        """The parts of a copy that lies wholly inside both memories; else ValueError.

        A copy of nothing has one as well, which ends when the peer was reached: the protocol probes with it.
        """
        copy = job.copy
        local, remote = self._plots.get(copy.local_region), link.far.regions.get(copy.remote_region)
        if local is None or remote is None:
            raise ValueError(f"region {copy.local_region} here or {copy.remote_region} there is not registered")
        total = self._checker.check_spans(copy.spans, 3, local.size, remote.size)
        job.parts = cut(copy.spans, total, 1, PART_BYTES, ROWS_MAX) or deque([array("q")])

    def _released(self, job: Job, link: Link, problem: str) -> None:
        """The device is done with what `job` waited for."""
        if problem:
            self._jobs.fail(job, Reason.TRANSFER_FAILED, problem)
        else:
            self._mover.add(link, job)

    def _end_copies(self, peer: PeerId, reason: Reason, detail: str) -> None:
        for job in self._jobs.of_peer(peer):
            self._jobs.abandon(job, reason, detail)
