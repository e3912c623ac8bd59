"""Effects, in the imperative: everything that the ledger returns. The node carries them out.

Capabilities of a transport. The protocol decides by capabilities, never by a transport's name.

The timeline of a handoff, as the ledger records it: one mark for each step, in the order in which they happened.

Law: marks are write-only: nothing is decided by them. Each key starts once; `ENDED` comes once on D's side and `CLOSED`
once on P's, whatever the outcome; nothing is recorded after `RESTED`.
"""

from __future__ import annotations

import enum
from array import array
from typing import Protocol

import msgspec

from kvbaton.protocol.errors import Reason
from kvbaton.protocol.events import Groups
from kvbaton.protocol.geometry.spans import Area, Weave
from kvbaton.protocol.ids import HandoffId, Incarnation, JobId, LeaseId, PeerId, PutId, RequestId, WorkerId
from kvbaton.protocol.wire.messages import NEWEST, Message


class Side(enum.StrEnum):
    """The side that took the step."""

    PREFILL = "prefill"  # the key is the lease's number
    DECODE = "decode"  # the key is the attempt's number


class Step(enum.StrEnum):
    """Every step that appears on a timeline."""

    # D
    ASKED = "asked"  # the engine wants the KV; `Begun`
    CLAIMED = "claimed"  # the link is up and the first claim was sent
    GRANTED = "granted"  # P holds the blocks for us
    ALLOCATED = "allocated"  # and the engine found blocks for it, now or before
    OFFERED = "offered"  # push: P may write into them. On P: D's offer came
    FIRST_BYTE = "first_byte"  # the first copy has ended well. Also P's, in push
    COPIED = "copied"  # every byte is here; the commit was sent
    ENDED = "ended"  # delivered, or failed; `Ended`
    RESTED = "rested"  # nothing can land in D's blocks any more; or P has released its own
    # P
    BEGUN = "begun"  # the prompt is scheduled, or computed already; `Begun`
    PARKED = "parked"  # a claim came first
    SEATED = "seated"  # a reader's claim was granted; names it
    COMPLETE = "complete"  # the whole prompt is computed
    WRITTEN = "written"  # push: the last byte is visible at D
    COMMITTED = "committed"  # a reader's copy was proven right; names it
    STALE = "stale"  # a reader's copy was proven wrong
    LEFT = "left"  # a reader went without a commit; says why
    CLOSED = "closed"  # no more use for the lease; `Ended`


class Begun(msgspec.Struct, frozen=True):
    """Identity of the handoff, as this side knows it."""

    handoff: HandoffId
    request: RequestId  # this engine's own name for it
    peer: WorkerId  # its source; on P its target, "" for any
    tokens: int
    push: bool = False
    deferred: bool = False  # both got the request at once
    trace: str = ""  # a W3C traceparent


class Ended(msgspec.Struct, frozen=True):
    """How it finished on this side."""

    end: End
    bytes: int = 0  # that this side copied
    blocks: int = 0
    transport: str = ""
    retries: int = 0  # repeated messages, and hellos


class Mark(msgspec.Struct, frozen=True):
    side: Side
    key: int
    step: Step
    at: float  # on the node's clock
    what: Begun | Ended | None = None
    detail: str = ""


class Capabilities(msgspec.Struct, frozen=True):
    """Promises of one transport."""

    name: str
    one_sided: bool  # the remote engine's process takes no part in a copy
    can_write: bool  # WRITE is offered at all
    can_fence: bool  # `fence` can shut out one peer's writes
    cancels: bool  # `cancel` brings a copy to rest; otherwise it rests at an unknown time
    same_host: bool  # reaches only processes of this host
    device_kinds: tuple[str, ...] = ("cpu",)
    weaves: bool = False  # accepts spans in product form (`Copy.weave`); others get them one by one
    enforces: bool = False  # a peer reaches only blocks that are lent to it now (`effects.Loan`)
    knows_writes: bool = False  # the same for writes at least; a loan for writing ends with what of it did not come

    admits: bool = False  # a peer gets at this memory, then at all of it, only once something was lent to it to read

    @property
    def takes_pushes(self) -> bool:
        """Whether a peer may write here; otherwise the receiver copies (rules 16 and 35)."""
        return self.can_write and self.can_fence and self.knows_writes

    @property
    def lends_reads(self) -> bool:
        """Whether a peer must be lent something before it can read."""
        return self.enforces or self.admits

    @property
    def lends_writes(self) -> bool:
        return self.enforces or self.knows_writes


class End(msgspec.Struct, frozen=True):
    """How a handoff finished: delivered (no reason), or failed with one."""

    reason: Reason | None = None
    detail: str = ""
    good_tokens: int = 0  # leading tokens whose KV is proven good although the handoff failed

    @property
    def delivered(self) -> bool:
        return self.reason is None


class Direction(enum.Enum):
    """Which way bytes go, seen from the side that drives the copy."""

    READ = "read"  # remote to local
    WRITE = "write"  # local to remote


class DeviceEvent(Protocol):
    """Something the device must have finished before bytes may be read."""

    def synchronize(self) -> None: ...


class Copy(msgspec.Struct, frozen=True):
    """One request to move bytes between a rank here and one rank of a peer (`ids.rank_peer`).

    A WRITE is complete when the bytes are visible at the target (rule 15).
    """

    job: JobId
    peer: PeerId
    direction: Direction
    local_region: int
    remote_region: int
    spans: array[int]  # flattened (local offset, remote offset, bytes) triples
    after: DeviceEvent | None = None
    weave: Weave | None = None  # more of them, in product form: only for a data plane that `weaves`


class Loan(msgspec.Struct, frozen=True):
    """Lets all ranks of a peer at some blocks of one rank here, until `CancelCopy` takes it back.

    It ends like a copy, by one `CopyEnded`, when nothing moves by it any more. Only where the data plane `enforces`.
    """

    job: JobId
    peer: PeerId  # the engine
    direction: Direction  # what the peer may do: READ these blocks, or WRITE into them
    blocks: Groups
    due: tuple[Area, ...] = ()  # of WRITE: what the peer must have written when it says so


class _Effect(msgspec.Struct, frozen=True):
    pass


class Invitation(msgspec.Struct, frozen=True):
    """For whom the node mints endpoints: each of its ranks, for each of the peer's."""

    peer: PeerId
    transport: str
    ranks: int
    holder: Holder


class Send(_Effect, frozen=True):
    """Put a message on the wire; with an invitation, the node fills in the message's `endpoints` first."""

    worker: WorkerId
    to: Incarnation
    session: int
    message: Message
    invitation: Invitation | None = None
    version: int = NEWEST  # of the protocol, in which the peer is spoken to


class StartCopy(_Effect, frozen=True):
    rank: int
    transport: str
    copy: Copy


class CancelCopy(_Effect, frozen=True):
    rank: int
    transport: str
    job: JobId


class Lend(_Effect, frozen=True):
    rank: int
    transport: str
    loan: Loan


class StartFence(_Effect, frozen=True):
    rank: int
    transport: str
    peer: PeerId


Holder = tuple[str, int]
"""Which link or session a data connection is held for; the last one to let go closes it."""


class Connect(_Effect, frozen=True):
    """Our rank `r` reaches the peer's rank `s` by `endpoints[s * ours + r]`."""

    peer: PeerId
    transport: str
    ranks: int  # the peer's
    endpoints: tuple[bytes, ...]
    holder: Holder


class Disconnect(_Effect, frozen=True):
    """This holder needs the connection, and the admission that went with it, no longer."""

    peer: PeerId
    transport: str
    ranks: int
    holder: Holder


class GivenUp(_Effect, frozen=True):
    """A data plane could not be opened to a worker; the operator should know. Another one is tried."""

    worker: WorkerId
    transport: str
    detail: str


class Unpin(_Effect, frozen=True):
    """Drop P's pins of this lease: once, ever."""

    lease: LeaseId


class UnpinPut(_Effect, frozen=True):
    put: PutId


class MatchFound(_Effect, frozen=True):
    """D may allocate blocks for this request now."""

    request: RequestId


class MatchFailed(_Effect, frozen=True):
    """D's handoff ended before any block was allocated."""

    request: RequestId
    end: End


class Report(_Effect, frozen=True):
    """Tell D's engine, once per rank, how a load that holds blocks has ended."""

    request: RequestId
    end: End


class DropHold(_Effect, frozen=True):
    """Nothing can land in D's blocks of this handoff any more: give up our own hold on them."""

    request: RequestId
    handoff: HandoffId


class ForgetCache(_Effect, frozen=True):
    """The engine's prefix cache may hold KV of these members, who are gone: let no request find it any more."""

    origins: tuple[str, ...]


class StorePut(_Effect, frozen=True):
    put: PutId
    blocks: Groups
    keys: tuple[bytes, ...]
    origins: tuple[str, ...] = ()  # of this engine's cache: whose KV these blocks may be computed on


class CancelPut(_Effect, frozen=True):
    put: PutId


Effect = (
    Send
    | StartCopy
    | CancelCopy
    | Lend
    | StartFence
    | Connect
    | Disconnect
    | GivenUp
    | Unpin
    | UnpinPut
    | MatchFound
    | MatchFailed
    | Report
    | DropHold
    | ForgetCache
    | StorePut
    | CancelPut
)
