"""Content identity of KV: the digest that binds tickets, claims, offers and deliveries to one prompt.

Law: two requests have the same digest if and only if their KV is the same, given one compatibility key.
Every process uses this function; a difference is `CONTENT_MISMATCH`, never a guess.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence

import msgspec

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
