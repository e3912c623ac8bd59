"""All messages between two nodes.

D sends P a `Hello`, and all later messages of that pair belong to the session that P then opens. D starts every
exchange and repeats until answered; P answers every repetition the same way. Fields are added at the end of a message
with a default, in a new version, and `codec` says what older ones had; a change of meaning needs a `Feature` bit. Hello
and HelloRefused keep their shape in every version.

The protocol versions that a node supports, and the version that a pair uses.

Law: a Hello is sent in the oldest version that its sender supports and names the newer ones by bits of its card, which
every version ignores; the Welcome's envelope settles the version: the newest that both support. A Hello and its refusal
keep their shape forever and are read in every version, so a peer with none in common is told so by name.
"""

from __future__ import annotations

import enum
from typing import Annotated

import msgspec
from msgspec import Meta

from kvbaton.protocol import ids
from kvbaton.protocol.errors import ProtocolError, Reason
from kvbaton.protocol.geometry.layout import EngineLayout
from kvbaton.protocol.geometry.progress import Progress
from kvbaton.protocol.ids import HandoffId
from kvbaton.protocol.numbers import GROUPS_MAX, ID, LISTED_MAX, Listed, Number, Term, Tokens
from kvbaton.protocol.wire.ticket import TICKET_CHARS_MAX

OLDEST, NEWEST = 1, 2
NUMBER_MAX = 16
"""The newest version that a card has a bit for."""
_BIT_OF_0 = 45


class Versions(msgspec.Struct, frozen=True):
    """A range of versions, both ends included."""

    oldest: int = OLDEST
    newest: int = NEWEST

    def __contains__(self, version: object) -> bool:
        return isinstance(version, int) and self.oldest <= version <= self.newest

    def __str__(self) -> str:
        return named(range(self.oldest, self.newest + 1))

    @property
    def bits(self) -> int:
        """The bits of a card that name them. Version 1 has no bit: nodes with only that version did not know of any."""
        return sum(version_bit(number) for number in range(max(2, self.oldest), self.newest + 1))


SPOKEN = Versions()
"""The versions that this code speaks."""


def version_bit(number: int) -> int:
    return 1 << (_BIT_OF_0 + number)


def versions_in(bits: int) -> list[int]:
    """The versions that a card's bits name."""
    return [number for number in range(1, NUMBER_MAX + 1) if bits & version_bit(number)]


def settle(ours: Versions, greeted_in: int, bits: int) -> int:
    """The newest version that both we and the peer support, which said hello in `greeted_in` and names more by
    `bits`."""
    theirs = sorted({greeted_in, *versions_in(bits)})
    common = [number for number in theirs if number in ours]
    if not common:
        detail = f"version: the source speaks {ours}, the target {named(theirs)}; upgrade the older of the two first"
        raise ProtocolError(Reason.WRONG_VERSION, detail)
    return common[-1]


def named(numbers: range | list[int]) -> str:
    """`1`, or `1 to 2`."""
    return str(numbers[0]) if len(numbers) == 1 else f"{numbers[0]} to {numbers[-1]}"


RANK_PAIRS_MAX = 4096
DETAIL_CHARS_MAX = 512
ORIGINS_MAX = 256
"""Members that one message names: as many as KV came from, or one name that stands for all."""
ORIGIN_CHARS_MAX = 128

LeaseId = Annotated[ids.LeaseId, ID]
ReservationId = Annotated[ids.ReservationId, ID]
Digest = Annotated[bytes, Meta(max_length=64)]
Detail = Annotated[str, Meta(max_length=DETAIL_CHARS_MAX)]
Blocks = Annotated[bytes, Meta(max_length=4 * LISTED_MAX)]
"""Block ids of one group as little-endian int32."""
GroupBlocks = Annotated[tuple[Blocks, ...], Meta(max_length=GROUPS_MAX)]
Counts = Annotated[tuple[Listed, ...], Meta(max_length=GROUPS_MAX)]
Name = Annotated[str, Meta(max_length=64)]
WireReason = Annotated[str, Meta(max_length=64)]
"""A `Reason`, or one that only newer versions know; read it with `reason_of`."""
Unsaid = Annotated[str, Meta(max_length=64)]
"""A `WireReason`, or nothing: version 1 did not say it."""
Origins = Annotated[tuple[Annotated[str, Meta(max_length=ORIGIN_CHARS_MAX)], ...], Meta(max_length=ORIGINS_MAX)]
"""Members from whom the KV in the sender's cache came, each with its key (`machines.origins`)."""
Endpoints = Annotated[tuple[Annotated[bytes, Meta(max_length=1024)], ...], Meta(max_length=RANK_PAIRS_MAX)]


class Feature(enum.IntFlag):
    """Features that a peer has (optional bits) or requires (required bits)."""

    PULL = 1
    STREAM = 2
    PUSH = 4
    ORIGINS = 8  # is told from whom a source's KV came


ALL_FEATURES = Feature.PULL | Feature.STREAM | Feature.PUSH | Feature.ORIGINS


def feature_names(bits: int) -> str:
    """The bits by name; a bit this version does not know is named by its number."""
    known = [feature.name or "" for feature in Feature if bits & feature]
    versions = versions_in(bits)
    left = bits & ~int(ALL_FEATURES) & ~sum(map(version_bit, versions))
    unknown = [f"bit {n}" for n in range(64) if left & (1 << n)]
    return ", ".join([*known, *(f"version {n}" for n in versions), *unknown]).lower()


class _Message(msgspec.Struct, frozen=True, array_like=True):
    pass


class Card(msgspec.Struct, frozen=True, array_like=True):
    """A node's introduction: what it requires and supports, what its KV depends on, and where its bytes are."""

    required: Number
    optional: Number
    host: Annotated[str, Meta(max_length=128)]
    compat: Annotated[
        dict[Annotated[str, Meta(max_length=64)], Annotated[str, Meta(max_length=256)]], Meta(max_length=64)
    ]
    layout: EngineLayout
    transports: Annotated[tuple[Name, ...], Meta(max_length=16)]


# --- sessions


class Hello(_Message, frozen=True, array_like=True, tag=1):
    nonce: Number
    card: Card


class Welcome(_Message, frozen=True, array_like=True, tag=2):
    """`link_session`: the session in which the sender is linked to the receiver in turn; 0 if in none."""

    nonce: Number
    card: Card
    transport: Name
    endpoints: Endpoints
    link_session: Number = 0


class HelloRefused(_Message, frozen=True, array_like=True, tag=3):
    nonce: Number
    reason: WireReason
    detail: Detail


class Joined(_Message, frozen=True, array_like=True, tag=4):
    """D confirms the session (a delayed Hello of a dead D never gets here) and says how P can reach it."""

    endpoints: Endpoints


class Linked(_Message, frozen=True, array_like=True, tag=5):
    pass


class Reset(_Message, frozen=True, array_like=True, tag=6):
    """The sender has no such session, or is no longer that incarnation: say hello again."""

    incarnation: Number


class Goodbye(_Message, frozen=True, array_like=True, tag=7):
    pass


# --- pull and streaming


class Claim(_Message, frozen=True, array_like=True, tag=10):
    handoff: HandoffId
    attempt: Number
    ticket: Annotated[str, Meta(max_length=TICKET_CHARS_MAX)]
    digest: Digest
    deferred: bool


class Granted(_Message, frozen=True, array_like=True, tag=11):
    handoff: HandoffId
    attempt: Number
    lease: LeaseId
    ttl_s: Term
    tokens: Tokens
    blocks: GroupBlocks
    progress: Progress
    final: bool


class GrantedFrom(Granted, frozen=True, array_like=True, tag=22):
    """A grant of a source whose cache holds KV of others: it may be in these blocks. Only to peers with `ORIGINS`."""

    origins: Origins


class ClaimRefused(_Message, frozen=True, array_like=True, tag=12):
    handoff: HandoffId
    attempt: Number
    reason: WireReason
    detail: Detail


class Renew(_Message, frozen=True, array_like=True, tag=13):
    """Still here; D knows so many block ids of each group, and whether that is all."""

    lease: LeaseId
    attempt: Number
    have: Counts
    final: bool


class Renewed(_Message, frozen=True, array_like=True, tag=14):
    """`work` rises whenever P got something done for this reader."""

    lease: LeaseId
    attempt: Number
    ttl_s: Term
    work: Number


class RenewRefused(_Message, frozen=True, array_like=True, tag=15):
    lease: LeaseId
    attempt: Number
    reason: WireReason


class Ready(_Message, frozen=True, array_like=True, tag=16):
    """Blocks from `start` on, and how much of all is ready to be read; `final` when it is all."""

    lease: LeaseId
    attempt: Number
    start: Counts
    blocks: GroupBlocks
    progress: Progress
    final: bool


class Commit(_Message, frozen=True, array_like=True, tag=17):
    """The copy is complete on D's device: was it this prompt's KV all along?"""

    lease: LeaseId
    attempt: Number


class Committed(_Message, frozen=True, array_like=True, tag=18):
    lease: LeaseId
    attempt: Number


class Stale(_Message, frozen=True, array_like=True, tag=19):
    """The copy is not valid, or that can no longer be shown, and why; `good` leading blocks of each group are
    proven."""

    lease: LeaseId
    attempt: Number
    good: Counts
    reason: Unsaid = ""


class Abandon(_Message, frozen=True, array_like=True, tag=20):
    """D will neither read nor commit, and why."""

    handoff: HandoffId
    attempt: Number
    reason: Unsaid = ""


class SourceLost(_Message, frozen=True, array_like=True, tag=21):
    """P's request ended early; nothing more will be ready."""

    lease: LeaseId
    attempt: Number
    reason: WireReason


# --- push


class Offer(_Message, frozen=True, array_like=True, tag=30):
    """Write the prompt from `first_token` on into these blocks of mine."""

    lease: LeaseId
    attempt: Number
    reservation: ReservationId
    first_token: Tokens
    blocks: GroupBlocks
    digest: Digest


class Accepted(_Message, frozen=True, array_like=True, tag=31):
    reservation: ReservationId


class Written(_Message, frozen=True, array_like=True, tag=32):
    """Every rank's bytes are visible in D's memory, and P will not touch them again."""

    lease: LeaseId
    attempt: Number
    reservation: ReservationId
    digest: Digest


class Ack(_Message, frozen=True, array_like=True, tag=33):
    lease: LeaseId
    attempt: Number
    reservation: ReservationId


class Revoke(_Message, frozen=True, array_like=True, tag=34):
    """D wants its blocks back, and why: stop, and report when nothing can land any more."""

    lease: LeaseId
    attempt: Number
    reservation: ReservationId
    reason: Unsaid = ""


class Quiesced(_Message, frozen=True, array_like=True, tag=35):
    """No byte of P will land in this reservation any more; `reason` if P ended it by itself."""

    reservation: ReservationId
    reason: WireReason | None


Message = (
    Hello
    | Welcome
    | HelloRefused
    | Joined
    | Linked
    | Reset
    | Goodbye
    | Claim
    | Granted
    | GrantedFrom
    | ClaimRefused
    | Renew
    | Renewed
    | RenewRefused
    | Ready
    | Commit
    | Committed
    | Stale
    | Abandon
    | SourceLost
    | Offer
    | Accepted
    | Written
    | Ack
    | Revoke
    | Quiesced
)
