"""Bytes to typed messages and back, at the door and once. Past this module nothing is unchecked.

Law: `decode` raises `ProtocolError` and nothing else, whatever the bytes; sizes are checked before contents. What is
written in a version is what nodes of that version write; what is read is always one of today's messages.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Sequence

import msgspec

from kvbaton.protocol import v1
from kvbaton.protocol.errors import ProtocolError, Reason
from kvbaton.protocol.ids import Incarnation, PeerId, WorkerId, is_worker_id
from kvbaton.protocol.messages import Hello, HelloRefused, Message
from kvbaton.protocol.versions import NEWEST, SPOKEN, Versions

FRAME_BYTES_MAX = 8 << 20


class Envelope(msgspec.Struct, frozen=True, array_like=True):
    """Who speaks, to which life of the receiver, in which session."""

    version: int
    worker: WorkerId
    incarnation: Incarnation
    to: Incarnation
    session: int
    body: msgspec.Raw

    @property
    def sender(self) -> PeerId:
        return PeerId(self.worker, self.incarnation)


_encoder = msgspec.msgpack.Encoder()
_envelopes = msgspec.msgpack.Decoder(Envelope)
_messages = msgspec.msgpack.Decoder(Message)
_messages_1 = msgspec.msgpack.Decoder(v1.MESSAGES)
_greetings = msgspec.msgpack.Decoder(Hello | HelloRefused)


def encode(sender: PeerId, to: Incarnation, session: int, message: Message, version: int = NEWEST) -> bytes:
    body = msgspec.Raw(_encoder.encode(v1.older(message) if version == 1 else message))
    return _encoder.encode(Envelope(version, sender.worker, sender.incarnation, to, session, body))


def decode(frame: bytes, versions: Versions = SPOKEN) -> tuple[Envelope, Message]:
    """The envelope and its message; ProtocolError with the field at fault for anything else.

    A greeting and its refusal are read in versions too that we do not speak: they deserve an answer, and to be heard.
    """
    if len(frame) > FRAME_BYTES_MAX:
        raise ProtocolError(Reason.BAD_MESSAGE, f"frame: {len(frame)} bytes, at most {FRAME_BYTES_MAX}")
    try:
        envelope = _envelopes.decode(frame)
        message = _body(envelope, versions)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, OverflowError) as error:
        raise ProtocolError(Reason.BAD_MESSAGE, f"message: {error}") from None
    if not is_worker_id(envelope.worker):
        raise ProtocolError(Reason.BAD_MESSAGE, "worker: letters, digits, '.', '_' and '-' only, at most 64")
    return envelope, message


def _body(envelope: Envelope, versions: Versions) -> Message:
    if envelope.version in versions:
        return v1.newer(_messages_1.decode(envelope.body)) if envelope.version == 1 else _messages.decode(envelope.body)
    try:
        greeting: Hello | HelloRefused = _greetings.decode(envelope.body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        detail = f"version: got {envelope.version}, this node speaks {versions}"
        raise ProtocolError(Reason.WRONG_VERSION, detail) from None
    return greeting


def pack_blocks(blocks: Sequence[int]) -> bytes:
    """Block ids as little-endian int32, the compact form on the wire."""
    ids = array("i", blocks)
    if sys.byteorder == "big":  # pragma: no cover
        ids.byteswap()
    return ids.tobytes()


def unpack_blocks(packed: bytes) -> tuple[int, ...]:
    """The ids again; ProtocolError when the bytes are not whole numbers or name a block below `NO_BLOCK`."""
    if len(packed) % 4:
        raise ProtocolError(Reason.BAD_MESSAGE, f"blocks: {len(packed)} bytes are not whole int32 ids")
    ids = array("i")
    ids.frombytes(packed)
    if sys.byteorder == "big":  # pragma: no cover
        ids.byteswap()
    if ids and min(ids) < -1:
        raise ProtocolError(Reason.BAD_MESSAGE, f"blocks: id {min(ids)} is negative")
    return tuple(ids)
