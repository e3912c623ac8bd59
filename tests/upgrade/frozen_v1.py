"""Version 1 of the protocol as the last release had it that spoke no other (commit eaf297c), kept as it was.

A reader of that release stands in for it where new code speaks: what it cannot read here, it could not read then. Not
to be brought up to date; layouts, ids and progress are of today, and what the recorded frames hold of them.
"""

from __future__ import annotations

import enum
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from kvbaton.protocol.geometry.layout import EngineLayout
from kvbaton.protocol.geometry.progress import Progress
from kvbaton.protocol.ids import HandoffId, Incarnation, LeaseId, ReservationId, WorkerId
from kvbaton.protocol.wire.ticket import TICKET_CHARS_MAX

PROTOCOL_VERSION = 1
GROUPS_MAX = 64
BLOCKS_MAX = 1 << 20
RANK_PAIRS_MAX = 4096
DETAIL_CHARS_MAX = 512

Number = Annotated[int, Meta(ge=0, le=(1 << 63) - 1)]
Digest = Annotated[bytes, Meta(max_length=64)]
Detail = Annotated[str, Meta(max_length=DETAIL_CHARS_MAX)]
Blocks = Annotated[bytes, Meta(max_length=4 * BLOCKS_MAX)]
"""Block ids of one group as little-endian int32."""
GroupBlocks = Annotated[tuple[Blocks, ...], Meta(max_length=GROUPS_MAX)]
Counts = Annotated[tuple[Number, ...], Meta(max_length=GROUPS_MAX)]
Name = Annotated[str, Meta(max_length=64)]
WireReason = Annotated[str, Meta(max_length=64)]
"""A `Reason`, or one that only newer versions know; read it with `reason_of`."""
Endpoints = Annotated[tuple[Annotated[bytes, Meta(max_length=1024)], ...], Meta(max_length=RANK_PAIRS_MAX)]


class Feature(enum.IntFlag):
    """What a peer can do (optional bits) or insists on (required bits)."""

    PULL = 1
    STREAM = 2
    PUSH = 4


ALL_FEATURES = Feature.PULL | Feature.STREAM | Feature.PUSH


class _Message(msgspec.Struct, frozen=True, array_like=True):
    pass


class Card(msgspec.Struct, frozen=True, array_like=True):
    """How a node introduces itself: what it needs, what it can do, what shapes its KV, where its bytes lie."""

    required: Annotated[int, Meta(ge=0, le=(1 << 63) - 1)]
    optional: Annotated[int, Meta(ge=0, le=(1 << 63) - 1)]
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
    """`link_session`: the session of the greeter's in which the sender is linked to it in turn; 0 if in none."""

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
    """The sender has no such session, or is no longer that incarnation: greet again."""

    incarnation: int


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
    ttl_s: float
    tokens: Number
    blocks: GroupBlocks
    progress: Progress
    final: bool


class ClaimRefused(_Message, frozen=True, array_like=True, tag=12):
    handoff: HandoffId
    attempt: Number
    reason: WireReason
    detail: Detail


class Renew(_Message, frozen=True, array_like=True, tag=13):
    """Still here; D knows so many block ids of each group, and has or has not heard that this is all."""

    lease: LeaseId
    attempt: Number
    have: Counts
    final: bool


class Renewed(_Message, frozen=True, array_like=True, tag=14):
    """`work` rises whenever P got something done for this reader."""

    lease: LeaseId
    attempt: Number
    ttl_s: float
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
    """It was not, or can no longer be shown; `good` leading blocks of each group are proven."""

    lease: LeaseId
    attempt: Number
    good: Counts


class Abandon(_Message, frozen=True, array_like=True, tag=20):
    """D will neither read nor commit."""

    handoff: HandoffId
    attempt: Number


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
    first_token: Number
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
    lease: LeaseId
    attempt: Number
    reservation: ReservationId


class Quiesced(_Message, frozen=True, array_like=True, tag=35):
    """Nothing of P's will land in this reservation any more; `reason` if P ended it of its own accord."""

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


class Envelope(msgspec.Struct, frozen=True, array_like=True):
    version: int
    worker: WorkerId
    incarnation: Incarnation
    to: Incarnation
    session: int
    body: msgspec.Raw


_envelopes = msgspec.msgpack.Decoder(Envelope)
_messages = msgspec.msgpack.Decoder(Message)


def heard(frame: bytes) -> tuple[str, list[Any]]:
    """What that release took the frame for: the message, and envelope and fields as plain values; ValueError if not."""
    envelope = _envelopes.decode(frame)
    if envelope.version != PROTOCOL_VERSION:
        raise ValueError(f"version: got {envelope.version}, this node speaks {PROTOCOL_VERSION}")
    message = _messages.decode(envelope.body)
    talk = [envelope.worker, envelope.incarnation, envelope.to, envelope.session]
    return type(message).__name__, [*talk, *msgspec.to_builtins(msgspec.structs.astuple(message))]
