"""Bytes to typed messages and back, once, on receipt. Past this module nothing is unchecked.

Laws: `read`, `unfolded` and `decode` raise `ProtocolError` and nothing else, whatever the bytes; sizes are checked
before contents. A message is written exactly as nodes of its version write it; what is read is always one of today's
messages. Decoding a card takes time, so a hello comes `Folded` first: a node that has no use for it, or has decoded
enough cards of that peer, spends only a few microseconds.

Version 1 of the protocol is here too, where it differs: the shapes on the wire, and conversion in both directions.

Law: a message sent in version 1 has, byte for byte, the shape that version-1 nodes use; theirs are read as they meant
them. To be deleted when `messages.OLDEST` is 2.
"""

from __future__ import annotations

import struct
import typing
from collections.abc import Sequence
from typing import Annotated, Any

import msgspec

from kvbaton.protocol.errors import ProtocolError, Reason
from kvbaton.protocol.ids import HandoffId, Incarnation, PeerId, WorkerId, is_worker_id
from kvbaton.protocol.numbers import ID, Number, Version
from kvbaton.protocol.wire import messages as m
from kvbaton.protocol.wire.messages import (
    NEWEST,
    SPOKEN,
    Card,
    Counts,
    Endpoints,
    Hello,
    HelloRefused,
    LeaseId,
    Message,
    Name,
    ReservationId,
    Versions,
    Welcome,
)


class Stale1(msgspec.Struct, frozen=True, array_like=True, tag=19):
    """Without `reason`."""

    lease: LeaseId
    attempt: Number
    good: Counts


class Abandon1(msgspec.Struct, frozen=True, array_like=True, tag=20):
    """Without `reason`."""

    handoff: HandoffId
    attempt: Number


class Revoke1(msgspec.Struct, frozen=True, array_like=True, tag=34):
    """Without `reason`."""

    lease: LeaseId
    attempt: Number
    reservation: ReservationId


_OLDER: dict[type, type[msgspec.Struct]] = {m.Stale: Stale1, m.Abandon: Abandon1, m.Revoke: Revoke1}
_NEWER = {older: newer for newer, older in _OLDER.items()}
MESSAGES: typing.Any = typing.Union[tuple(_OLDER.get(kind, kind) for kind in typing.get_args(Message))]  # noqa: UP007


def in_v1(message: Message) -> msgspec.Struct:
    """The message as version 1 says it."""
    kind = _OLDER.get(type(message))
    return message if kind is None else kind(*(getattr(message, name) for name in kind.__struct_fields__))


def from_v1(message: msgspec.Struct) -> Message:
    """A message of version 1, as one of today's."""
    kind = _NEWER.get(type(message))
    found: Message = message if kind is None else kind(*msgspec.structs.astuple(message))  # type: ignore[assignment]
    return found


FRAME_BYTES_MAX = 8 << 20
CARD_BYTES_MAX = 512 << 10
"""Of which a layout of `layout.PLACES_MAX` places, none of them below 4 GiB, takes about 300 KiB."""


class Envelope(msgspec.Struct, frozen=True, array_like=True):
    """The sender, the receiver's incarnation, and the session."""

    version: Version
    worker: WorkerId
    incarnation: Annotated[Incarnation, ID]
    to: Annotated[Incarnation, ID]
    session: Number
    body: msgspec.Raw

    @property
    def sender(self) -> PeerId:
        return PeerId(self.worker, self.incarnation)


class FoldedHello(msgspec.Struct, frozen=True, array_like=True, tag=1):
    """A Hello with its card as it came."""

    nonce: Number
    card: msgspec.Raw


class FoldedWelcome(msgspec.Struct, frozen=True, array_like=True, tag=2):
    """A Welcome with its card as it came."""

    nonce: Number
    card: msgspec.Raw
    transport: Name
    endpoints: Endpoints
    link_session: Number = 0


Folded = FoldedHello | FoldedWelcome
_FOLDED: dict[type, type] = {Hello: FoldedHello, Welcome: FoldedWelcome}
_UNREADABLE = (msgspec.DecodeError, UnicodeDecodeError, RecursionError, OverflowError)


def _decoder(messages: Any) -> msgspec.msgpack.Decoder[Any]:
    kinds = tuple(_FOLDED.get(kind, kind) for kind in typing.get_args(messages))
    return msgspec.msgpack.Decoder(typing.Union[kinds])  # noqa: UP007


_NOT_NEGATIVE = bytes(range(128))  # the highest byte of such a number

_encoder = msgspec.msgpack.Encoder()
_envelopes = msgspec.msgpack.Decoder(Envelope)
_messages = _decoder(Message)
_messages_1 = _decoder(MESSAGES)
_greetings = _decoder(Hello | HelloRefused)
_cards = msgspec.msgpack.Decoder(Card)


def encode(sender: PeerId, to: Incarnation, session: int, message: Message, version: int = NEWEST) -> bytes:
    body = msgspec.Raw(_encoder.encode(in_v1(message) if version == 1 else message))
    return _encoder.encode(Envelope(version, sender.worker, sender.incarnation, to, session, body))


def read(frame: bytes, versions: Versions = SPOKEN) -> tuple[Envelope, Message | Folded]:
    """The envelope and its message, a hello folded; ProtocolError with the field at fault for anything else.

    A hello and its refusal are also read in versions that we do not support: they deserve an answer.
    """
    if len(frame) > FRAME_BYTES_MAX:
        raise ProtocolError(Reason.BAD_MESSAGE, f"frame: {len(frame)} bytes, at most {FRAME_BYTES_MAX}")
    try:
        envelope = _envelopes.decode(frame)
        message = _body(envelope, versions)
    except _UNREADABLE as error:
        raise ProtocolError(Reason.BAD_MESSAGE, f"message: {error}") from None
    if not is_worker_id(envelope.worker):
        raise ProtocolError(Reason.BAD_MESSAGE, "worker: letters, digits, '.', '_' and '-' only, at most 64")
    return envelope, message


def unfolded(greeting: Folded) -> Hello | Welcome:
    """The hello with its card; ProtocolError when that is invalid, or too large."""
    if len(greeting.card) > CARD_BYTES_MAX:
        raise ProtocolError(Reason.BAD_MESSAGE, f"card: {len(greeting.card)} bytes, at most {CARD_BYTES_MAX}")
    try:
        card = _cards.decode(greeting.card)
    except _UNREADABLE as error:
        raise ProtocolError(Reason.BAD_MESSAGE, f"card: {error}") from None
    if isinstance(greeting, FoldedHello):
        return Hello(greeting.nonce, card)
    return Welcome(greeting.nonce, card, greeting.transport, greeting.endpoints, greeting.link_session)


def decode(frame: bytes, versions: Versions = SPOKEN) -> tuple[Envelope, Message]:
    """Both at once, for callers that trust the sender or have time."""
    envelope, message = read(frame, versions)
    return envelope, unfolded(message) if isinstance(message, Folded) else message


def _body(envelope: Envelope, versions: Versions) -> Message | Folded:
    if envelope.version in versions:
        found = (_messages_1 if envelope.version == 1 else _messages).decode(envelope.body)
        return from_v1(found) if envelope.version == 1 else found
    try:
        greeting: FoldedHello | HelloRefused = _greetings.decode(envelope.body)
    except _UNREADABLE:
        detail = f"version: got {envelope.version}, this node speaks {versions}"
        raise ProtocolError(Reason.WRONG_VERSION, detail) from None
    return greeting


def pack_blocks(blocks: Sequence[int]) -> bytes:
    """Block ids as little-endian int32, the compact form on the wire."""
    return struct.pack(f"<{len(blocks)}i", *blocks)


def unpack_blocks(packed: bytes) -> tuple[int, ...]:
    """The ids again; ProtocolError when the bytes are not whole numbers or name a block below `NO_BLOCK`."""
    if len(packed) % 4:
        raise ProtocolError(Reason.BAD_MESSAGE, f"blocks: {len(packed)} bytes are not whole int32 ids")
    found = struct.unpack(f"<{len(packed) // 4}i", packed)
    if packed[3::4].translate(None, _NOT_NEGATIVE) and min(found) < -1:
        raise ProtocolError(Reason.BAD_MESSAGE, f"blocks: id {min(found)} is negative")
    return found
