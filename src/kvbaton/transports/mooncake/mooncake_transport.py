"""mooncake: READ between any two hosts by Mooncake's transfer engine, over TCP, without a metadata server.

One engine serves this rank's memory; one more per peer reads from that peer, so that closing it stops those reads and
nothing else. The library cannot cancel: a read that it has reported as timed out overwrote reused blocks when the peer
went on (reference/transports.md 3.1). Closing the engine that reads is a cancel, and the only one.

Law: nothing is written, so nothing needs to be fenced by us. But Mooncake has no access control: any peer that can
reach its ports can read and write all registered memory, before and after `disconnect`. Use it only on a network of
trusted peers. Whether a peer's bytes are valid is decided by its commit, as everywhere.
"""

from __future__ import annotations

import ipaddress
import secrets
import time
from collections import deque
from functools import partial

import msgspec

from kvbaton.protocol.errors import Reason
from kvbaton.protocol.ids import PeerId
from kvbaton.transports.core.jobs import CopyJob, cut
from kvbaton.transports.core.shared_memory import RegisteredMemory
from kvbaton.transports.core.shell import PlaneShell, at_least_one
from kvbaton.transports.core.transport import Capabilities, Copy, Spans
from kvbaton.transports.mooncake.mooncake_engine import (
    MARK_BYTES,
    MooncakeEndpoint,
    MooncakeEngine,
    MooncakePlace,
    address_of,
    load,
    parse,
)
from kvbaton.transports.mooncake.mooncake_link import PART_SLICES_MAX, MooncakeLink, Patience
from kvbaton.transports.net.socket_loop import SocketLoop

CLOSE_S = 3.0
LANES = 4
"""Connections that the engine keeps to one peer; each carries one slice at a time."""

PART_BYTES = range(512 << 10, 8 << 20)
"""The first is also the largest slice: a single span is then carried by several connections."""

CAPABILITIES = Capabilities(
    name="mooncake", one_sided=False, can_write=False, can_fence=False, cancels=True, same_host=False
)


class MooncakeConfig(msgspec.Struct, frozen=True):
    """`host` is what peers connect to: numeric, so that nothing waits for a resolver. The engine listens on every
    address."""

    host: str = "127.0.0.1"
    copies_max: int = 1024
    dial_deadline_s: float = 5.0
    stall_s: float = 10.0  # a peer that sent nothing for this long has failed
    cancel_s: float = 0.25  # likewise, when a cancelled copy waits for it
    pure_python: bool = False

    def __post_init__(self) -> None:
        if ipaddress.IPv4Address(self.host).is_unspecified:
            raise ValueError(f"peers cannot connect to {self.host}: set host to this host's own address")
        if self.copies_max < 1 or min(self.dial_deadline_s, self.stall_s, self.cancel_s) <= 0:
            raise ValueError(f"copies_max, dial_deadline_s, stall_s and cancel_s must be positive: {self}")


class MooncakeTransport(PlaneShell[MooncakeLink]):
    """See `base.Transport`. A thread per peer besides the engines' own two each, one for deadlines, one for devices."""

    capabilities = CAPABILITIES
    _memory: RegisteredMemory

    def __init__(self, me: PeerId, config: MooncakeConfig | None = None) -> None:
        """MooncakeMissing when the library is not installed."""
        load()
        self._config = config = config or MooncakeConfig()
        super().__init__(me, config.copies_max, config.pure_python)
        self._memory = RegisteredMemory()
        self._places: dict[int, MooncakePlace] = {}
        self._mark = memoryview(bytearray(secrets.token_bytes(MARK_BYTES)))
        self._server: MooncakeEngine | None = None
        self._leaving: list[MooncakeLink] = []
        self._timers = SocketLoop(f"kvbaton-mooncake-timers-{me}")

    def register(self, region: int, memory: memoryview) -> None:
        """From now on any peer that can reach the engine can read and write it."""
        if not memory.nbytes:
            raise ValueError(f"region {region} is empty")
        self._memory.add(region, memory)
        self._serving().register(memory)
        self._places[region] = MooncakePlace(address_of(memory), memory.nbytes)

    def endpoint(self, peer: PeerId) -> bytes:
        """The same for every peer: the engine cannot tell them apart."""
        there = MooncakeEndpoint(
            self._me, self._config.host, self._serving().port, address_of(self._mark), bytes(self._mark), self._places
        )
        return msgspec.msgpack.encode(there)

    def connect(self, peer: PeerId, endpoint: bytes) -> None:
        """A new endpoint of a known peer replaces the old one, and ends what was in flight on it."""
        there = parse(peer, endpoint)
        config = self._config
        patience = Patience(config.dial_deadline_s, config.stall_s, config.cancel_s)
        name, here = f"kvbaton-mooncake-{self._me}-{peer}", config.host
        make = partial(MooncakeLink, name, here, there, self._jobs, self._address, patience, self._timers)
        self._link(peer, there, make)

    def _serving(self) -> MooncakeEngine:
        """The engine that peers read from; listens from the first call on."""
        if self._server is None:
            self._server = MooncakeEngine(self._config.host)
            self._server.register(self._mark)
        return self._server

    def _address(self, region: int) -> int:
        return self._places[region].address

    def _cut(self, copy: Copy, link: MooncakeLink) -> deque[Spans]:
        remote = link.there.regions.get(copy.remote_region)
        total = self._total(copy, None if remote is None else remote.size_bytes)
        return at_least_one(cut(copy.spans, total, LANES, PART_BYTES, PART_SLICES_MAX))

    def _start(self, job: CopyJob, link: MooncakeLink) -> None:
        link.add(job)

    def _stop(self, job: CopyJob, link: MooncakeLink | None, reason: Reason, detail: str) -> None:
        """It ends when its reads in flight have arrived or, with an unresponsive peer, after `cancel_s`."""
        if link is None:
            super()._stop(job, link, reason, detail)
        else:
            link.stop(job, reason, detail)

    def _retire(self, link: MooncakeLink, detail: str) -> None:
        """Our reads end. The peer's own access to our memory cannot be closed: Mooncake has no means."""
        link.shut()
        self._leaving = [left for left in self._leaving if not left.join(0)] + [link]

    def _halt(self) -> bool:
        deadline = time.monotonic() + CLOSE_S
        gone = [link.join(max(0.0, deadline - time.monotonic())) for link in self._leaving]
        self._timers.stop(CLOSE_S)
        if self._server is not None:
            self._server.close()
            self._server = None
        return all(gone)  # else an engine may still write there: the memory stays mapped
