"""Bytes to typed messages and back, at the door and once. Past this module nothing is unchecked.

Law: `decode` raises `ProtocolError` and nothing else, whatever the bytes; sizes are checked before contents.
"""

from __future__ import annotations

import contextlib
import sys
from array import array
from collections.abc import Sequence

import msgspec

from kvbaton.protocol.errors import ProtocolError, Reason
from kvbaton.protocol.ids import Incarnation, PeerId, WorkerId, is_worker_id
from kvbaton.protocol.messages import PROTOCOL_VERSION, Hello, Message

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


def encode(sender: PeerId, to: Incarnation, session: int, message: Message) -> bytes:
    body = msgspec.Raw(_encoder.encode(message))
    return _encoder.encode(Envelope(PROTOCOL_VERSION, sender.worker, sender.incarnation, to, session, body))


def decode(frame: bytes) -> tuple[Envelope, Message]:
    """The envelope and its message; ProtocolError with the field at fault for anything else."""
    if len(frame) > FRAME_BYTES_MAX:
        raise ProtocolError(Reason.BAD_MESSAGE, f"frame: {len(frame)} bytes, at most {FRAME_BYTES_MAX}")
    try:
        envelope = _envelopes.decode(frame)
        if envelope.version != PROTOCOL_VERSION:
            detail = f"version: got {envelope.version}, this node speaks {PROTOCOL_VERSION}"
            raise ProtocolError(Reason.WRONG_VERSION, detail)
        message = _messages.decode(envelope.body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, OverflowError) as error:
        raise ProtocolError(Reason.BAD_MESSAGE, f"message: {error}") from None
    if not is_worker_id(envelope.worker):
        raise ProtocolError(Reason.BAD_MESSAGE, "worker: letters, digits, '.', '_' and '-' only, at most 64")
    return envelope, message


def greeting_of_another_version(frame: bytes) -> tuple[Envelope, Hello] | None:
    """The Hello in a frame of a version that we do not speak, if that much of it can be read: it deserves an answer."""
    with contextlib.suppress(msgspec.DecodeError, UnicodeDecodeError, RecursionError, OverflowError):
        envelope = _envelopes.decode(frame)
        message = _messages.decode(envelope.body)
        if isinstance(message, Hello) and is_worker_id(envelope.worker):
            return envelope, message
    return None


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
