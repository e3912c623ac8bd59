"""mooncake: READ between any two hosts by Mooncake's transfer engine, over TCP, without a metadata server.

One engine serves this rank's memory; one more per peer reads from that peer, so that closing it stops those reads and
nothing else. The library cannot cancel: a read that it has reported as timed out overwrote reused blocks when the peer
went on (reference/transports.md 3.1). Closing the engine that reads is a cancel, and the only one.

Law: nothing is written, and so nobody needs to be fenced by us. But Mooncake has no notion of who may connect: whoever
can reach its ports can read and write all registered memory, before and after `disconnect`. Use it on a network of
peers that you trust, and nowhere else. What a peer's bytes are worth is decided by its commit, as everywhere.
"""

from __future__ import annotations

import ipaddress
import secrets
import time
from array import array
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial

import msgspec

from kvbaton.protocol.errors import Reason
from kvbaton.protocol.ids import JobId, PeerId
from kvbaton.transports.core.device_event_wait import Gate
from kvbaton.transports.core.jobs import Job, Jobs
from kvbaton.transports.core.mover import choose_mover
from kvbaton.transports.core.shared_memory import Registered
from kvbaton.transports.core.span_tables import cut
from kvbaton.transports.core.transport import Capabilities, Copy, Direction, Spans, TransportEvent
from kvbaton.transports.mooncake.mooncake_endpoint import MARK_BYTES, MooncakeEndpoint, Place, parse
from kvbaton.transports.mooncake.mooncake_engine import Engine, address_of, load
from kvbaton.transports.mooncake.mooncake_link import PART_SLICES_MAX, Link, Patience
from kvbaton.transports.net.socket_loop import Loop

CLOSE_S = 3.0
LANES = 4
"""Connections that the engine keeps to one peer; each carries one slice at a time."""

PART_BYTES = range(512 << 10, 8 << 20)
"""The first is also the largest slice: a single span is then carried by several connections."""

CAPABILITIES = Capabilities(
    name="mooncake", one_sided=False, can_write=False, can_fence=False, cancels=True, same_host=False
)


class MooncakeConfig(msgspec.Struct, frozen=True):
    """`host` is what peers dial: numeric, so that nothing waits for a resolver. The engine listens on every address."""

    host: str = "127.0.0.1"
    copies_max: int = 1024
    dial_deadline_s: float = 5.0
    stall_s: float = 10.0  # a peer from which nothing came for so long has failed
    cancel_s: float = 0.25  # likewise, when a cancelled copy waits for it
    pure_python: bool = False

    def __post_init__(self) -> None:
        if ipaddress.IPv4Address(self.host).is_unspecified:
            raise ValueError(f"peers cannot dial {self.host}: set host to this host's own address")
        if self.copies_max < 1 or min(self.dial_deadline_s, self.stall_s, self.cancel_s) <= 0:
            raise ValueError(f"copies_max, dial_deadline_s, stall_s and cancel_s must be positive: {self}")


class MooncakeTransport:
    """See `base.Transport`. A thread per peer besides the engines' own two each, one for deadlines, one for devices."""

    capabilities = CAPABILITIES

    def __init__(self, me: PeerId, config: MooncakeConfig | None = None) -> None:
        """MooncakeMissing when the library is not there."""
        load()
        self._me = me
        self._config = config or MooncakeConfig()
        self._mover = choose_mover(self._config.pure_python)
        self._jobs = Jobs(self._config.copies_max)
        self._memory = Registered()
        self._places: dict[int, Place] = {}
        self._mark = memoryview(bytearray(secrets.token_bytes(MARK_BYTES)))
        self._server: Engine | None = None
        self._links: dict[PeerId, Link] = {}
        self._leaving: list[Link] = []
        self._gate = Gate(f"kvbaton-mooncake-gate-{me}")
        self._timers = Loop(f"kvbaton-mooncake-timers-{me}")

    def register(self, region: int, memory: memoryview) -> None:
        """From now on anyone who can reach the engine can read and write it."""
        if not memory.nbytes:
            raise ValueError(f"region {region} is empty")
        self._memory.add(region, memory)
        self._serving().register(memory)
        self._places[region] = Place(address_of(memory), memory.nbytes)

    def endpoint(self, peer: PeerId) -> bytes:
        """The same for every peer: the engine does not know one from another."""
        there = MooncakeEndpoint(
            self._me, self._config.host, self._serving().port, address_of(self._mark), bytes(self._mark), self._places
        )
        return msgspec.msgpack.encode(there)

    def connect(self, peer: PeerId, endpoint: bytes) -> None:
        """A new endpoint of a known peer replaces the old one, and ends what was under way on it."""
        there = parse(peer, endpoint)
        config = self._config
        patience = Patience(config.dial_deadline_s, config.stall_s, config.cancel_s)
        with self._jobs:
            old = self._links.get(peer)
            if old is not None and old.there == there:
                return
            self._shut(peer, Reason.TRANSFER_FAILED, "the peer has a new endpoint")
            name = f"kvbaton-mooncake-{self._me}-{peer}"
            address = self._address
            self._links[peer] = Link(name, config.host, there, self._jobs, address, patience, self._timers)

    def disconnect(self, peer: PeerId) -> None:
        """Our reads from `peer` end. Its own access to our memory cannot be closed: Mooncake has no means."""
        with self._jobs:
            self._shut(peer, Reason.PEER_GONE, "disconnected")

    def fence(self, peer: PeerId) -> None:
        raise NotImplementedError("mooncake cannot fence: see capabilities.can_fence")

    def submit(self, copy: Copy) -> bool:
        with self._jobs:
            job = self._jobs.accept(copy)
            if job is None:
                return False
            link = self._links.get(copy.peer)
            if link is None:
                self._jobs.fail(job, Reason.PEER_UNKNOWN, f"{copy.peer} is not connected")
                return True
            if copy.direction is Direction.WRITE:
                self._jobs.fail(job, Reason.NO_TRANSPORT, "mooncake offers no WRITE here: the receiver reads")
                return True
            try:
                job.parts = self._cut(copy, link)
            except ValueError as error:
                self._jobs.fail(job, Reason.BAD_SPAN, str(error))
                return True
            self._jobs.settle(job)
            if copy.after is None:
                link.add(job)
            elif not job.ended:
                self._gate.wait(copy.after, partial(self._released, job, link))
        return True

    def cancel(self, job: JobId) -> None:
        """It ends when what is under way of it has arrived or, with a peer that does nothing, after `cancel_s`."""
        with self._jobs:
            found = self._jobs.find(job)
            if found is not None:
                self._stop(found, Reason.CANCELLED, "")

    def drain(self) -> Sequence[TransportEvent]:
        return self._jobs.drain()

    def set_waker(self, waker: Callable[[], None]) -> None:
        self._jobs.set_waker(waker)

    def close(self) -> None:
        if not self._jobs.close():
            return
        with self._jobs:
            for peer in list(self._links):
                self._shut(peer, Reason.CANCELLED, "the transport was closed")
        self._gate.close(0)
        deadline = time.monotonic() + CLOSE_S
        gone = [link.join(max(0.0, deadline - time.monotonic())) for link in self._leaving]
        self._timers.stop(CLOSE_S)
        for job in self._jobs.of_peer():
            self._jobs.abandon(job, Reason.CANCELLED, "the transport was closed")
        if self._server is not None:
            self._server.close()
            self._server = None
        if all(gone):  # else an engine may still write there: the memory stays mapped
            self._memory.clear()

    def _serving(self) -> Engine:
        """The engine that peers read from; listens from the first call on."""
        if self._server is None:
            self._server = Engine(self._config.host)
            self._server.register(self._mark)
        return self._server

    def _address(self, region: int) -> int:
        return self._places[region].address

    def _cut(self, copy: Copy, link: Link) -> deque[Spans]:
        """The parts of a copy that lies wholly inside both memories; else ValueError."""
        local, remote = self._memory.get(copy.local_region), link.there.regions.get(copy.remote_region)
        if local is None or remote is None:
            raise ValueError(f"region {copy.local_region} here or {copy.remote_region} there is not registered")
        total = self._mover.check_spans(copy.spans, 3, local.nbytes, remote.size_bytes)
        return cut(copy.spans, total, LANES, PART_BYTES, PART_SLICES_MAX) or deque([array("q")])

    def _released(self, job: Job, link: Link, problem: str) -> None:
        """The device is done with what `job` waited for."""
        if problem:
            self._jobs.fail(job, Reason.TRANSFER_FAILED, problem)
        else:
            link.add(job)

    def _stop(self, job: Job, reason: Reason, detail: str) -> None:
        """End a copy as soon as it can be ended truthfully. The lock is held."""
        link = self._links.get(job.copy.peer)
        if link is None:
            self._jobs.fail(job, reason, detail)
        else:
            link.stop(job, reason, detail)

    def _shut(self, peer: PeerId, reason: Reason, detail: str) -> None:
        """Forget how to reach `peer`, and end what was under way. The lock is held."""
        for job in self._jobs.of_peer(peer):
            self._stop(job, reason, detail)
        link = self._links.pop(peer, None)
        if link is not None:
            link.shut()
            self._leaving = [left for left in self._leaving if not left.join(0)] + [link]
