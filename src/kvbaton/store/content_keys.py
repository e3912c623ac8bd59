"""The keys of KV blocks in a store: a chain of hashes over the tokens, in a space of compatible engines.

Law: equal content gives equal keys in every process; any difference in the tokens up to the block's end, in other
inputs of the KV (adapter, salt, images, embeddings), in the compatibility key or in how the KV is divided into parts
gives different ones. A key is text of bounded length: lower-case letters, digits, '.', '-' and '_'.
"""

from __future__ import annotations

import hashlib
import re
import sys
from array import array
from collections.abc import Iterator, Sequence

import msgspec

from kvbaton.protocol.content import Content

HASH_BYTES = 32  # keys are shared between tenants: collisions must be infeasible
KEY_CHARS_MAX = 192
RANKS_MAX = 4096
LAYERS_MAX = 65_536
VALUE_BYTES_MAX = 1 << 32

_COMPAT = re.compile(r"[0-9a-f]{32}")
_KEY = re.compile(r"[a-z0-9][a-z0-9._-]{0,191}")
_PERSON = b"kvbaton-store-1"


class Space(msgspec.Struct, frozen=True, kw_only=True):
    """The values of one part of the KV, of all engines for which they are interchangeable, byte by byte."""

    compat: str  # protocol.content.compat_digest of the engines' compatibility key
    block_tokens: int
    value_bytes: int
    ranks: int = 1
    rank: int = 0
    group: str = ""  # of the layout: its name
    layer_start: int = 0
    layer_stop: int
    part: int = 0
    layout: str = ""  # what else determines a byte's place in a value, as text (dtype, order of the planes)


def prefix(space: Space) -> str:
    """The prefix of every key of a space; ValueError names the invalid field."""
    _check(space)
    facts = msgspec.msgpack.encode((space.block_tokens, space.value_bytes, space.group, space.layout))
    shape = hashlib.blake2b(facts, digest_size=8, person=_PERSON).hexdigest()
    return (
        f"kv1-{space.compat}-{shape}-r{space.rank}.{space.ranks}-l{space.layer_start}.{space.layer_stop}-p{space.part}-"
    )


def chain(content: Content, block_tokens: int) -> Iterator[bytes]:
    """The hash of each whole block among the content's first `position` tokens; each covers all before it too."""
    stop = min(content.position, len(content.tokens))
    whole = stop - stop % block_tokens if block_tokens > 0 else 0
    return extend(root(content, block_tokens), content.tokens[:whole], block_tokens)


def root(content: Content, block_tokens: int) -> bytes:
    """What a chain begins with: all that shapes the KV but the tokens."""
    if block_tokens < 1:
        raise ValueError(f"block_tokens: {block_tokens}; a block has at least one token")
    told = (content.lora, content.multimodal, content.salt, content.embeddings, block_tokens)
    return hashlib.blake2b(msgspec.msgpack.encode(told), digest_size=HASH_BYTES, person=_PERSON).digest()


def extend(last: bytes, tokens: Sequence[int], block_tokens: int) -> Iterator[bytes]:
    """The hashes of a chain's next blocks, behind the one whose hash is `last`, or behind its root."""
    for start in range(0, len(tokens) - block_tokens + 1, block_tokens):
        ids = array("q", tokens[start : start + block_tokens])
        if sys.byteorder == "big":  # pragma: no cover
            ids.byteswap()
        last = hashlib.blake2b(last + ids.tobytes(), digest_size=HASH_BYTES, person=_PERSON).digest()
        yield last


def keys(front: str, hashes: Sequence[bytes]) -> tuple[str, ...]:
    """The keys of a chain, or of a part of it, in a space whose `prefix` is `front`."""
    return tuple(front + each.hex() for each in hashes)


def is_key(text: str) -> bool:
    """Whether an external string may be used as a key."""
    return _KEY.fullmatch(text) is not None


def _check(space: Space) -> None:
    if _COMPAT.fullmatch(space.compat) is None:
        raise ValueError(f"compat: {space.compat[:40]!r}; give protocol.content.compat_digest of the compatibility key")
    for field, value, low, high in (
        ("block_tokens", space.block_tokens, 1, 1 << 20),
        ("value_bytes", space.value_bytes, 1, VALUE_BYTES_MAX),
        ("ranks", space.ranks, 1, RANKS_MAX),
        ("rank", space.rank, 0, space.ranks - 1),
        ("layer_start", space.layer_start, 0, LAYERS_MAX),
        ("layer_stop", space.layer_stop, space.layer_start + 1, LAYERS_MAX),
        ("part", space.part, 0, RANKS_MAX),
    ):
        if not low <= value <= high:
            raise ValueError(f"{field}: {value} is outside {low}..{high}")
