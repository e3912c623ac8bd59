"""Identity of KV: the digest of a prompt's content, and the compatibility key of what computes it.

The digest binds tickets, claims, offers and deliveries to one prompt. Laws: two requests have the same digest if and
only if their KV is the same, given one compatibility key. Every process uses this function; a difference is
`CONTENT_MISMATCH`, never a guess.

The key is named facts that must be equal for an engine's KV to mean the same elsewhere: `difference` is None exactly
when the digests are equal. What may differ (versions, host facts) goes under "info." and is for people to read;
everything that the KV depends on (model, weights, dtype, scales, rope, tokenizer, backend and isa for opaque pages)
never does. A field that only one side states differs: absence is no proof.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Mapping, Sequence

import msgspec

from kvbaton.protocol.errors import ProtocolError, Reason

DIGEST_BYTES = 16


class Content(msgspec.Struct, frozen=True):
    """Everything about a request that the KV of its prompt depends on."""

    tokens: Sequence[int]
    position: int  # how many of the tokens are handed over (Mamba needs one fewer than all)
    lora: str = ""
    multimodal: tuple[str, ...] = ()
    salt: str = ""
    embeddings: bytes = b""  # digest of prompt embeddings, where there are no token ids


def digest(content: Content) -> bytes:
    """16 bytes naming the content; stable across processes, machines and Python versions."""
    ids = array("q", content.tokens)
    head = msgspec.msgpack.encode(
        (
            len(ids),
            content.position,
            content.lora,
            content.multimodal,
            content.salt,
            content.embeddings,
            ids.itemsize,
        )
    )
    state = hashlib.blake2b(head, digest_size=DIGEST_BYTES, person=b"kvbaton-content1"[:16])
    state.update(_little_endian(ids))
    return state.digest()


def _little_endian(ids: array[int]) -> bytes:
    if memoryview(b"\1\0").cast("H")[0] != 1:  # pragma: no cover - big-endian machines
        ids = array("q", ids)
        ids.byteswap()
    return ids.tobytes()


FIELDS_MAX = 64
FIELD_CHARS_MAX = 256
INFO_PREFIX = "info."


def validate_key(key: Mapping[str, str]) -> Mapping[str, str]:
    """The key itself, or `BAD_MESSAGE` naming the field that exceeds a bound: keys come from peers."""
    if len(key) > FIELDS_MAX:
        raise ProtocolError(Reason.BAD_MESSAGE, f"compat: {len(key)} fields, at most {FIELDS_MAX}")
    for name, value in key.items():
        if not (0 < len(name) <= FIELD_CHARS_MAX and name.isprintable()):
            raise ProtocolError(
                Reason.BAD_MESSAGE,
                f"compat: name {name[:32]!r} is not 1..{FIELD_CHARS_MAX} printable characters",
            )
        if not (len(value) <= FIELD_CHARS_MAX and value.isprintable()):
            raise ProtocolError(
                Reason.BAD_MESSAGE, f"compat.{name}: not at most {FIELD_CHARS_MAX} printable characters"
            )
    return key


def difference(ours: Mapping[str, str], theirs: Mapping[str, str]) -> str | None:
    """The first differing field with both values, in our order and then theirs; None when the two agree."""
    for name in [*ours, *(name for name in theirs if name not in ours)]:
        if not name.startswith(INFO_PREFIX) and ours.get(name) != theirs.get(name):
            return f"{name}: ours is {_told(ours.get(name))}, theirs is {_told(theirs.get(name))}"
    return None


def compat_digest(key: Mapping[str, str]) -> str:
    """32 hex digits that identify the key, whatever the order of its fields."""
    binding = sorted(item for item in key.items() if not item[0].startswith(INFO_PREFIX))
    return hashlib.blake2b(msgspec.msgpack.encode(binding), digest_size=DIGEST_BYTES).hexdigest()


def _told(value: str | None) -> str:
    return "not stated" if value is None else repr(value)
