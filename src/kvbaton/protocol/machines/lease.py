"""P's promise to hold a prompt's blocks for readers known by identity, and its judgement of their commits.

Laws: blocks are unpinned on entering RELEASED and nowhere else. A commit is judged by epochs, at the time of the
first commit of that reader, never by the lease's state. A reader's verdict is final, and repeated commits get the same
answer, which is sound because a reader that has sent its commit never copies again.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

from kvbaton.protocol.effects import Capabilities
from kvbaton.protocol.errors import Reason
from kvbaton.protocol.events import NO_BLOCK, LeaseBegun
from kvbaton.protocol.geometry.progress import Progress, complete, nothing, slowest
from kvbaton.protocol.ids import HandoffId, LeaseId, Reader, WorkerId
from kvbaton.protocol.legality import Table, pairs
from kvbaton.protocol.machines.context import EpochsOf, Parts
from kvbaton.protocol.wire.messages import NEWEST


class LeaseState(enum.Enum):
    GROWING = "growing"  # P still computes; whole blocks become ready
    COMPLETE = "complete"  # every block is in the lists
    CLOSING = "closing"  # over, but P's own writes from these blocks are not at rest
    RELEASED = "released"  # unpinned; remembered to judge late commits


class LeaseEvent(enum.Enum):
    EXTENDED = "extended"
    COMPLETED = "completed"
    CLOSED = "closed"
    RESTED = "rested"


_S, _E = LeaseState, LeaseEvent
LEASE = Table(
    "lease",
    LeaseState,
    LeaseEvent,
    next={
        (_S.GROWING, _E.EXTENDED): _S.GROWING,
        (_S.GROWING, _E.COMPLETED): _S.COMPLETE,
        (_S.GROWING, _E.CLOSED): _S.CLOSING,
        (_S.COMPLETE, _E.CLOSED): _S.CLOSING,
        (_S.CLOSING, _E.RESTED): _S.RELEASED,
    },
    late=pairs({_S.CLOSING, _S.RELEASED}, {_E.EXTENDED, _E.COMPLETED, _E.CLOSED})
    | {(_S.RELEASED, _E.RESTED), (_S.GROWING, _E.RESTED), (_S.COMPLETE, _E.RESTED)},
    illegal={(_S.COMPLETE, _E.EXTENDED), (_S.COMPLETE, _E.COMPLETED)},
)


class ReaderState(enum.Enum):
    LIVE = "live"
    COMMITTED = "committed"
    STALE = "stale"
    GONE = "gone"


class ReaderEvent(enum.Enum):
    PROVEN = "proven"
    DISPROVEN = "disproven"
    LEFT = "left"


_RS, _RE = ReaderState, ReaderEvent
READER = Table(
    "reader",
    ReaderState,
    ReaderEvent,
    next={
        (_RS.LIVE, _RE.PROVEN): _RS.COMMITTED,
        (_RS.LIVE, _RE.DISPROVEN): _RS.STALE,
        (_RS.LIVE, _RE.LEFT): _RS.GONE,
        # An expired lease forgets its readers; their late commits are still judged by the epochs.
        (_RS.GONE, _RE.PROVEN): _RS.COMMITTED,
        (_RS.GONE, _RE.DISPROVEN): _RS.STALE,
    },
    late=pairs({_RS.COMMITTED, _RS.STALE}, ReaderEvent) | {(_RS.GONE, _RE.LEFT)},
)


@dataclass(slots=True)
class Seat:
    """One reader's seat in a lease."""

    session: int
    state: ReaderState = ReaderState.LIVE
    good: tuple[int, ...] = ()  # of a stale commit
    told: tuple[int, ...] = ()  # block ids sent so far, per group
    why: str = ""  # why it left, in its own words
    work: int = 0  # rises whenever something got done for this reader
    version: int = NEWEST  # protocol version of its session
    plane: Capabilities | None = None  # over which it reads
    lent: tuple[int, ...] = ()  # leading blocks, per group
    loans: Parts = field(default_factory=lambda: Parts(None))  # the blocks as lent to it there


@dataclass(slots=True)
class Term:
    """How long P holds the blocks at most (rule 9)."""

    hold_until: float  # however many read, and however often it is renewed
    claimable_until: float  # by a first reader
    is_turn: bool = False  # kept for the next turn of a conversation: nobody was promised it (rule turn)


@dataclass(slots=True)
class Traffic:
    """For the record when the lease ends; nothing is decided by it."""

    transport: str = ""  # the last reader's data plane
    moved: int = 0  # bytes that P itself wrote
    why_over: Reason | None = None


@dataclass(slots=True)
class Lease:
    """Blocks of one prompt with the epochs they had when they were pinned."""

    id: LeaseId
    handoff: HandoffId
    digest: bytes
    tokens: int
    max_readers: int
    target: WorkerId  # "" = any
    term: Term
    blocks: tuple[list[int], ...]
    epochs: tuple[list[int], ...]
    ranks: list[Progress]
    state: LeaseState = LeaseState.GROWING
    completed: bool = False  # every block is in the lists (stays true in hindsight, after release)
    seats: dict[Reader, Seat] = field(default_factory=dict)
    traffic: Traffic = field(default_factory=Traffic)

    @property
    def progress(self) -> Progress:
        """Ready on every rank."""
        return slowest(self.ranks)

    @property
    def final(self) -> bool:
        """Every block is listed and ready on every rank."""
        return self.completed and complete(self.progress, [len(ids) for ids in self.blocks])

    @property
    def used_up(self) -> bool:
        """Every seat was taken, and no reader sits any more."""
        over = all(seat.state is not ReaderState.LIVE for seat in self.seats.values())
        return over and len(self.seats) >= self.max_readers

    def has_room(self) -> bool:
        return len(self.seats) < self.max_readers


def new_lease(begun: LeaseBegun, ranks: int, term: Term) -> Lease:
    return Lease(
        begun.lease,
        begun.handoff,
        begun.digest,
        begun.tokens,
        begun.max_readers,
        begun.target,
        term,
        tuple([] for _ in range(begun.groups)),
        tuple([] for _ in range(begun.groups)),
        [nothing(begun.groups) for _ in range(ranks)],
    )


def proven_blocks(lease: Lease, epochs_of: EpochsOf) -> tuple[int, ...]:
    """How many leading blocks of each group have never been reused since they were pinned."""
    return tuple(_proven(ids, noted, epochs_of(ids)) for ids, noted in zip(lease.blocks, lease.epochs, strict=True))


def _proven(ids: list[int], noted: list[int], now: list[int]) -> int:
    if now == noted:
        return len(ids)
    return next((at for at, block in enumerate(ids) if block != NO_BLOCK and now[at] != noted[at]), len(ids))


def judge(lease: Lease, epochs_of: EpochsOf) -> tuple[bool, tuple[int, ...]]:
    """Whether a copy that ended before now read this prompt's KV in every block, and the good prefix if not."""
    if not lease.final:
        return False, tuple(0 for _ in lease.blocks)
    good = proven_blocks(lease, epochs_of)
    return all(n == len(ids) for n, ids in zip(good, lease.blocks, strict=True)), good
