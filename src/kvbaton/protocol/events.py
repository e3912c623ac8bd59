"""Events, in the past tense: all inputs of the ledger besides messages and time.

Engine events are recorded on the engine's scheduler thread and queued; rank and store events come from transports.
Block lists are per KV group; `NO_BLOCK` marks a place that has no block (outside a sliding window).
"""

from __future__ import annotations

import msgspec

from kvbaton.protocol.errors import Reason
from kvbaton.protocol.geometry.progress import Progress
from kvbaton.protocol.ids import HandoffId, Incarnation, JobId, LeaseId, PeerId, PutId, RequestId, WorkerId

Groups = tuple[tuple[int, ...], ...]
NO_BLOCK = -1


class _Event(msgspec.Struct, frozen=True):
    pass


# --- P's engine


class LeaseBegun(_Event, frozen=True):
    """P has scheduled a prompt that will be read or pushed (streaming, push), or finished one (pull)."""

    lease: LeaseId
    handoff: HandoffId
    digest: bytes
    tokens: int
    groups: int
    max_readers: int = 1
    target: WorkerId = WorkerId("")
    deferred: bool = False  # D may get it much later than P (streaming, push): wait `defer_timeout` for a claim
    request: RequestId = RequestId("")  # these two for observers
    trace: str = ""
    keep_s: float = 0.0  # a turn: D keeps prompt and answer this long for the P of the next turn (rule turn)


class LeaseExtended(_Event, frozen=True):
    """These blocks were pinned, with these epochs, and are appended to the lease's lists."""

    lease: LeaseId
    blocks: Groups
    epochs: Groups


class LeaseProgressed(_Event, frozen=True):
    """A rank's device has finished writing this much (whole blocks, until the lease is complete)."""

    lease: LeaseId
    rank: int
    progress: Progress


class LeaseCompleted(_Event, frozen=True):
    """The last block is in the lists; when every rank's progress covers them, the content is final."""

    lease: LeaseId


class SourceEnded(_Event, frozen=True):
    """P's request was preempted or aborted before its prefill was complete."""

    lease: LeaseId
    reason: Reason


# --- D's engine


class Wanted(_Event, frozen=True):
    """D's engine accepted a request whose prompt KV is at `source`."""

    request: RequestId
    handoff: HandoffId
    source: WorkerId
    ticket: str
    digest: bytes
    tokens: int
    push: bool = False
    deferred: bool = False  # P may start later than D claims (streaming, push)
    trace: str = ""  # for observers


class TurnedAway(_Event, frozen=True):
    """A request came with a ticket that the doorway refused; nothing is owed to it."""

    request: RequestId
    reason: Reason
    detail: str = ""
    trace: str = ""
    handoff: HandoffId = HandoffId("")  # where the ticket could be read


class Disowned(_Event, frozen=True):
    """A ticket came to this engine, which will not use it: its source need not hold the blocks."""

    handoff: HandoffId
    source: WorkerId
    ticket: str
    digest: bytes  # the ticket's own, if it has one
    deferred: bool
    reason: Reason


class Allocated(_Event, frozen=True):
    """D's engine has blocks for the prompt from `first_token` on, and holds them for us until `DropHold`."""

    request: RequestId
    blocks: Groups
    first_token: int


class NotNeeded(_Event, frozen=True):
    """D has the whole prompt already."""

    request: RequestId


class GaveUp(_Event, frozen=True):
    """D's engine no longer wants the request (abort); if it was loading it still waits for one report."""

    request: RequestId


# --- transports


class CopyEnded(_Event, frozen=True):
    """An accepted copy is over; `reason` None means that every byte has arrived."""

    job: JobId
    reason: Reason | None = None
    at_rest: bool = True
    detail: str = ""
    unwritten: int | None = None  # of a loan for writing: bytes that were due and did not come; None: not known


class CopyRested(_Event, frozen=True):
    """A copy that had ended not at rest can no longer touch memory."""

    job: JobId


class RankFenced(_Event, frozen=True):
    """No byte of `peer` can land in this rank's memory any more."""

    rank: int
    peer: PeerId


# --- store


class PutWanted(_Event, frozen=True):
    """The engine pinned these blocks for a put under content keys."""

    put: PutId
    blocks: Groups
    keys: tuple[bytes, ...]


class StoreEnded(_Event, frozen=True):
    """A put is over and no longer reads its blocks."""

    put: PutId
    reason: Reason | None = None


# --- surroundings


class Departed(_Event, frozen=True):
    """The registry reports that this worker (in this incarnation, if given) is gone, or never existed."""

    worker: WorkerId
    incarnation: Incarnation = Incarnation(0)
    reason: Reason = Reason.PEER_GONE


class LineRefused(_Event, frozen=True):
    """Nothing listens any more where this worker was dialled: what answered there has ended."""

    worker: WorkerId


class PlaneFailed(_Event, frozen=True):
    """A transport could not be opened here, for one link or session with that peer."""

    peer: PeerId
    holder: tuple[str, int]
    detail: str = ""


class Discarded(_Event, frozen=True):
    """The router discarded this handoff's ticket: a D that has not claimed with it by now never will."""

    handoff: HandoffId


class CacheReplaced(_Event, frozen=True):
    """The engine dropped its cache, or its weights: leased blocks and blocks in transfer can no longer be trusted."""

    forgotten: bool = False  # and no request finds a block from before, nor will one under way cache what it has
    blocks: int = 0  # that could be found until then


class MembersGone(_Event, frozen=True):
    """Members were removed, or their keys no longer allow them to grant."""


class DrainStarted(_Event, frozen=True):
    """Park no more claims; granted leases can still be read, and transfers still arrive."""


Event = (
    LeaseBegun
    | PlaneFailed
    | LeaseExtended
    | LeaseProgressed
    | LeaseCompleted
    | SourceEnded
    | Wanted
    | TurnedAway
    | Disowned
    | Allocated
    | NotNeeded
    | GaveUp
    | CopyEnded
    | CopyRested
    | RankFenced
    | PutWanted
    | StoreEnded
    | Departed
    | LineRefused
    | Discarded
    | DrainStarted
    | CacheReplaced
    | MembersGone
)
