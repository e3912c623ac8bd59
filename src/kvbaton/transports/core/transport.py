"""The interface of a transport: moves byte spans between registered memory of two processes.

Laws, checked on every implementation by `kvbaton.testing.check_transport`:
 1. `submit`, `cancel`, `fence`, `drain` never block and never raise because of a peer.
 2. Every accepted copy ends exactly once (`CopyEnded`). If that says `at_rest=False`, bytes may still land, and
    at most one `CopyRested` follows when they no longer can. Rest is a fact, never a guess by a timer.
 3. A peer can name only memory registered here; every access is range-checked where the memory lives.
 4. After `FenceEnded(peer)` no byte of that peer lands in local memory, whatever the peer does.
 5. Nothing busy-waits: an idle transport costs no CPU; `waker` is called (from any thread) when `drain` has news.
 6. Where `enforces`: an authenticated peer reaches only blocks that are lent to it, in the direction in which they are
    lent. A revoked loan (`cancel`) serves no new request at once, and ends when the requests in flight under it have
    come to rest, within a bounded time.
 7. Where `knows_writes`: law 6 holds of writes at least, and the end of a loan with something `due` says how much of
    that was not written under this loan (`CopyEnded.unwritten`). Without it no peer writes here: the receiver copies.

Refusals at a data port: unauthenticated connections and bad requests of authenticated peers, counted by cause.

Laws: a closed list of causes, so that no peer can make this grow. Each unauthenticated connection, and each bad
request, is counted once. Counted on the loops' threads, read from any. A count is not a log line: unauthenticated peers
cannot fill a disk.
"""

from __future__ import annotations

import enum
import threading
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Protocol, TypeAlias

import msgspec

from kvbaton.protocol.effects import Capabilities, Copy, DeviceEvent, Direction, Loan
from kvbaton.protocol.errors import ProtocolError, Reason
from kvbaton.protocol.events import CopyEnded, CopyRested
from kvbaton.protocol.geometry.layout import PageTable
from kvbaton.protocol.ids import JobId, PeerId
from kvbaton.transports.core.shared_memory import DeviceMemory

__all__ = [
    "Capabilities",
    "Copy",
    "CopyEnded",
    "CopyRested",
    "DeviceEvent",
    "DeviceTransport",
    "Direction",
    "FenceEnded",
    "HostTransport",
    "LendingTransport",
    "Loan",
    "OpenFailed",
    "PageTable",
    "Spans",
    "Transport",
    "TransportEvent",
]

Spans: TypeAlias = "array[int]"
"""`array('q')` of flattened (local offset, remote offset, bytes) triples, relative to the two regions."""


class FenceEnded(msgspec.Struct, frozen=True):
    peer: PeerId


class OpenFailed(msgspec.Struct, frozen=True):
    """A `connect` that failed only after it returned; until it is connected again, no copy reaches `peer`."""

    peer: PeerId
    detail: str = ""


TransportEvent = CopyEnded | CopyRested | FenceEnded | OpenFailed


class Transport(Protocol):
    """A transport of one rank. Construct, register memory, then exchange endpoints with peers.

    Memory differs: `HostTransport` and `DeviceTransport` say how it is registered. One that listens may also have
    `refusals: Mapping[str, int]`, which any thread may read: refused peers (`refusals.Cause`). One that maps memory of
    other processes may have `mapped_bytes: int` (`device_memory.mapped_bytes_of`).
    """

    @property
    def capabilities(self) -> Capabilities: ...

    def endpoint(self, peer: PeerId) -> bytes:
        """What `peer` needs to reach this rank (opaque, small, may carry a secret minted for that peer)."""

    def connect(self, peer: PeerId, endpoint: bytes) -> None:
        """Remember how to reach `peer`; connects lazily, on the mover's thread. Raises ValueError if invalid."""

    def disconnect(self, peer: PeerId) -> None:
        """Forget `peer`: its outstanding copies fail, its access to local memory is closed."""

    def submit(self, copy: Copy) -> bool:
        """Start a copy; False when the bounded queue is full (try again after the next event)."""

    def cancel(self, job: JobId) -> None:
        """Ask a copy to stop; it still ends by one `CopyEnded`. Unknown jobs are ignored."""

    def fence(self, peer: PeerId) -> None:
        """Shut out `peer`'s writes; `FenceEnded` follows, unless this raised. Only where `can_fence`."""

    def drain(self) -> Sequence[TransportEvent]:
        """Everything that happened since the last call."""

    def set_waker(self, waker: Callable[[], None]) -> None: ...

    def close(self) -> None:
        """Stop threads, close sockets, release memory. Idempotent; bounded in time."""


class LendingTransport(Transport, Protocol):
    """A transport that enforces which memory a peer may touch."""

    def lay_out(self, tables: Sequence[PageTable]) -> None:
        """The memory layout of blocks. Without it each region is one block, number 0 of group 0."""

    def lend(self, loan: Loan) -> None:
        """Give a peer access to some blocks until `cancel`; ends by one `CopyEnded`. Never blocks, never refuses."""


class HostTransport(Transport, Protocol):
    """A transport for host memory."""

    def register(self, region: int, memory: memoryview) -> None:
        """Make `memory` reachable for peers as `region`. Called before any peer is connected."""


class DeviceTransport(Transport, Protocol):
    """A transport for device memory."""

    def register(self, region: int, memory: DeviceMemory) -> None:
        """Make `memory` reachable for peers as `region`. Called before any peer is connected."""


class Cause(enum.StrEnum):
    """Unauthenticated peers first, then authenticated ones. Their meaning for operators: docs/metrics.md."""

    LEFT = "left"  # closed without sending anything: a probe, a scanner, a peer that died. Harmless
    NO_PROOF = "no_proof"  # no proof by the deadline, or closed midway, as with old secrets
    BAD_GREETING = "bad_greeting"
    BAD_PROOF = "bad_proof"  # never by mistake: our side sends none to a server without proof
    CROWDED_OUT = "crowded_out"  # by newer unauthenticated peers
    OTHER_USER = "other_user"  # of this host, at a UNIX socket
    PLAIN = "plain"  # did not encrypt where that is required
    FULL = "full"  # the limit of connections is reached
    BAD_SPAN = "bad_span"  # named memory that is not registered
    NOT_LENT = "not_lent"  # named blocks not lent to it: a late reader, or a malicious one
    BAD_MESSAGE = "bad_message"  # an undecodable request, or an altered record
    OTHER = "other"  # a transport's cause that is not on this list


class Refused(ProtocolError):
    """A connection that is refused, with the cause to count it under."""

    def __init__(self, cause: Cause, detail: str) -> None:
        super().__init__(Reason.BAD_MESSAGE, detail)
        self.cause = cause


class Refusals(Mapping[str, int]):
    """The counts of one transport: every cause, from zero on."""

    def __init__(self) -> None:
        self._counts = {cause.value: 0 for cause in Cause if cause is not Cause.OTHER}
        self._lock = threading.Lock()  # tcp serves on several loops

    def add(self, cause: Cause) -> None:
        with self._lock:
            self._counts[cause] += 1

    def __getitem__(self, cause: str) -> int:
        return self._counts[cause]

    def __iter__(self) -> Iterator[str]:
        return iter(self._counts)

    def __len__(self) -> int:
        return len(self._counts)


def cause_of(error: Exception) -> Cause:
    """By the exception that ended a connection."""
    if isinstance(error, Refused):
        return error.cause
    return Cause.BAD_MESSAGE if isinstance(error, ProtocolError) else Cause.LEFT


def refusals_of(*transports: object) -> dict[str, int]:
    """The counts of these transports together. One that counts nothing (it is optional) adds nothing."""
    found: dict[str, int] = {}
    for transport in transports:
        told = getattr(transport, "refusals", None)
        for key, count in told.items() if isinstance(told, Mapping) else ():
            cause = key if key in _CAUSES else Cause.OTHER.value
            found[cause] = found.get(cause, 0) + max(int(count), 0)
    return found


_CAUSES = frozenset(cause.value for cause in Cause)
