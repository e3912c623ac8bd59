"""Tickets: what entitles D to ask P for a prompt's KV. Signed, opaque, expiring, bound to content and P's incarnation.

Law: a ticket contains no address and no block ids. Without a signing key nothing of P's can be named. Expiry is judged
on wall clocks, so it only ever *refuses* (liveness); nothing is trusted because a ticket is young.
"""

from __future__ import annotations

import array
import base64
import binascii
import hashlib
import hmac
from collections.abc import Sequence
from typing import Annotated

import msgspec

from kvbaton.protocol.errors import ProtocolError, Reason
from kvbaton.protocol.ids import HandoffId, Incarnation, LeaseId, WorkerId, is_handoff_id, is_worker_id
from kvbaton.protocol.numbers import ID, Readers, UnixSeconds, Version

TICKET_CHARS_MAX = 1024
TICKET_LIFE_S_MAX = 3600.0
"""A ticket that claims to be good for longer is refused by P, however it is signed."""
_MAC_BYTES = 16
_VERSION = 1
_TICKET, _HISTORY = b"kvbaton-ticket\0", b"kvbaton-history\0"
"""What a signature is of: no text of one kind can be shown as one of the other."""


class Ticket(msgspec.Struct, frozen=True, array_like=True):
    """The signed content. `lease` 0: minted by the router, before P started; `incarnation` 0: P's is unknown."""

    handoff: HandoffId
    source: WorkerId
    expires_unix_s: UnixSeconds
    incarnation: Annotated[Incarnation, ID] = Incarnation(0)
    lease: Annotated[LeaseId, ID] = LeaseId(0)
    target: WorkerId = WorkerId("")  # "" = any authenticated D
    digest: bytes = b""  # b"" = router-minted without a tokenizer: P and D compare theirs in the claim
    max_readers: Readers = 1


class HistoryProof(msgspec.Struct, frozen=True, array_like=True):
    """What is signed of tokens that were generated elsewhere."""

    target: WorkerId
    expires_unix_s: UnixSeconds
    digest: bytes


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(tuple[Version, Ticket]).decode
_decode_proof = msgspec.msgpack.Decoder(tuple[Version, HistoryProof]).decode


def seal(ticket: Ticket, key: bytes) -> str:
    """The ticket as URL-safe text."""
    body = _encode((_VERSION, ticket))
    return _text(_mac(body, key) + body)


def unseal(text: str, keys: Sequence[bytes], wall_now_s: float) -> Ticket:
    """The ticket inside `text` if one of `keys` signed it and it has not expired; ProtocolError otherwise."""
    body = _verified_body(text, keys)
    try:
        _, ticket = _decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ProtocolError(Reason.TICKET_FORGED, f"ticket: signed but unreadable ({error})") from None
    if not is_handoff_id(ticket.handoff) or not is_worker_id(ticket.source):
        raise ProtocolError(Reason.TICKET_FORGED, "ticket: signed but with malformed ids")
    if ticket.expires_unix_s < wall_now_s:
        late_s = wall_now_s - ticket.expires_unix_s
        raise ProtocolError(Reason.TICKET_EXPIRED, f"ticket: expired {late_s:.1f} s ago; ask the prefiller again")
    return ticket


def seal_history(tokens: Sequence[int], target: WorkerId, expires_unix_s: float, key: bytes) -> str:
    """The router's word that an answer of `target`'s begins with these tokens."""
    body = _encode((_VERSION, HistoryProof(target, expires_unix_s, _tokens_digest(tokens))))
    return _text(_mac(body, key, _HISTORY) + body)


def check_history(text: str, tokens: Sequence[int], me: WorkerId, keys: Sequence[bytes], wall_now_s: float) -> None:
    """`ProtocolError` unless one of `keys` signed, for this worker and in time, that these are the tokens."""
    body = _verified_body(text, keys, _HISTORY)
    try:
        _, proof = _decode_proof(body)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ProtocolError(Reason.TICKET_FORGED, f"history: signed but unreadable ({error})") from None
    if proof.expires_unix_s < wall_now_s:
        late_s = wall_now_s - proof.expires_unix_s
        raise ProtocolError(
            Reason.TICKET_EXPIRED, f"history: its proof expired {late_s:.1f} s ago; ask the router again"
        )
    if proof.target != me or not hmac.compare_digest(proof.digest, _tokens_digest(tokens)):
        raise ProtocolError(Reason.TICKET_FORGED, "history: signed for another worker, or for other tokens")


def _tokens_digest(tokens: Sequence[int]) -> bytes:
    return hashlib.blake2b(array.array("q", tokens).tobytes(), digest_size=16).digest()


def _verified_body(text: str, keys: Sequence[bytes], kind: bytes = _TICKET) -> bytes:
    if len(text) > TICKET_CHARS_MAX:
        raise ProtocolError(Reason.TICKET_FORGED, f"ticket: {len(text)} characters, at most {TICKET_CHARS_MAX}")
    try:
        raw = base64.b64decode(text.encode("ascii") + b"=" * (-len(text) % 4), altchars=b"-_", validate=True)
    except (binascii.Error, ValueError):
        raise ProtocolError(Reason.TICKET_FORGED, "ticket: not base64url text") from None
    if _text(raw) != text:  # the last character has bits that no byte comes of
        raise ProtocolError(Reason.TICKET_FORGED, "ticket: not as it was written; pass it on unchanged")
    mac, body = raw[:_MAC_BYTES], raw[_MAC_BYTES:]
    if not any(hmac.compare_digest(mac, _mac(body, key, kind)) for key in keys):
        raise ProtocolError(Reason.TICKET_FORGED, "ticket: the signature does not verify with this cluster's keys")
    return body


def _text(raw: bytes) -> str:
    return base64.urlsafe_b64encode(raw).decode().rstrip("=")


def _mac(body: bytes, key: bytes, kind: bytes = _TICKET) -> bytes:
    return hmac.digest(key, kind + body, "sha256")[:_MAC_BYTES]
