"""A value as backends hold it: a header of 1,024 bytes, then the value. The same in memory and on disk.

    magic 4 | version 1 | digest's kind 1 | origins 1 | depth 1 | value bytes 8 | hash of the key 32 | writer 8
    | digest of the value 32 | place in its batch 2 | signature 64 | way to the root 6 * 32 | origins 84 * 8

Laws: `held` is not None only for a frame that `seal_all` made for that very key, with that very length, unaltered
since, signed by a writer that is trusted now, and computed on no KV of a member that was removed. So any reader can
tell a damaged, torn, foreign or misplaced value, or one of a member that is gone, from a good one, wherever it was
stored. What is signed is the root of a tree of hashes over a batch of values: one signature for all of them, and each
can be checked alone. A frame of another version is invalid: leftovers of an older program are misses.

Whose values count: who this engine writes as, and whose signatures it believes.

Laws: a value counts only if a member of now that may grant has signed it, by a key of now, and if nobody was removed on
whose KV it may be computed (its origins; `origins.mark_of`). Names are 8 bytes of a hash. A store that was given no
trust believes this process alone.
"""

from __future__ import annotations

import functools
import hashlib
import hmac
import importlib
import secrets
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

WRITER_BYTES = 8
SIGNATURE_BYTES = 64
SIGNED_MAX = 4096


def writer_id(origin: str) -> bytes:
    """A member as values name their writer: by its name and key."""
    return hashlib.blake2b(origin.encode(), digest_size=WRITER_BYTES, person=b"kvbaton-writer").digest()


@dataclass(frozen=True, slots=True)
class StoreTrust:
    """One engine's, until its keys change."""

    me: bytes
    sign: Callable[[bytes], bytes] | None  # None: this engine may not grant, so its values are worth nothing
    writers: Mapping[bytes, tuple[bytes, ...]]  # members that may grant, with the keys by which they sign now
    check: Callable[[bytes, bytes, bytes], bool]  # (key, payload, signature)
    gone: frozenset[bytes] = frozenset()  # origins that were removed

    def believes(self, names: Sequence[bytes]) -> bool:
        """Whether a value may be used, if its writer has signed it; `names`: its writer, then its origins."""
        return bool(names) and names[0] in self.writers and self.gone.isdisjoint(names[1:])

    def has_signed(self, writer: bytes, payload: bytes, signature: bytes) -> bool:
        return any(_remembered(self.check, key, payload, signature) for key in self.writers.get(writer, ()))


@functools.lru_cache(maxsize=SIGNED_MAX)
def _remembered(check: Callable[[bytes, bytes, bytes], bool], key: bytes, payload: bytes, signature: bytes) -> bool:
    """One signature is of a whole batch of values."""
    return check(key, payload, signature)


def _alone() -> StoreTrust:
    key, me = secrets.token_bytes(32), secrets.token_bytes(WRITER_BYTES)

    def sign(payload: bytes) -> bytes:
        return hashlib.blake2b(payload, key=key, digest_size=SIGNATURE_BYTES).digest()

    return StoreTrust(me, sign, {me: (b"",)}, lambda _, payload, told: hmac.compare_digest(sign(payload), told))


ALONE = _alone()


FRAME_BYTES = 1024
"""Before each value; whole cache lines, so that values stay aligned."""
DEPTH_MAX = 6
BATCH_MAX = 1 << DEPTH_MAX
ORIGINS_MAX = 84

_HEAD = struct.Struct("<4s4BQ32s8s")
_MAGIC = b"KVBS"
_VERSION = 3  # 1 and 2 named no writer
_HASH_BYTES = 32
_DIGEST = _HEAD.size
_PLACE = _DIGEST + _HASH_BYTES
_SIGNATURE = _PLACE + 2
_WAY = _SIGNATURE + SIGNATURE_BYTES
_ORIGINS = _WAY + DEPTH_MAX * _HASH_BYTES
_UNUSED = bytes(FRAME_BYTES)

Digest = Callable[[memoryview], bytes]


def _blake2b(value: memoryview) -> bytes:
    return hashlib.blake2b(value, digest_size=_HASH_BYTES).digest()


def _digests() -> dict[int, Digest]:
    """Collision-resistant, by kind. BLAKE3 is eight times as fast; where it is not installed, its values are misses."""
    try:
        blake3: Any = importlib.import_module("blake3").blake3
    except ImportError:
        return {1: _blake2b}
    return {1: _blake2b, 2: lambda value: bytes(blake3(value).digest())}


DIGESTS = _digests()
_KIND = max(DIGESTS)


def seal_all(
    frames: Sequence[memoryview], keys: Sequence[str], origins: Sequence[bytes], trust: StoreTrust, kind: int = _KIND
) -> None:
    """Write the headers for values that already follow them. PermissionError if nobody would believe them."""
    if trust.sign is None:
        raise PermissionError("this engine's key does not allow it to grant: nobody would take its values")
    if len(origins) > ORIGINS_MAX:
        raise PermissionError(f"origins: {len(origins)} members, at most {ORIGINS_MAX}")
    depth = (len(frames) - 1).bit_length()
    told = b"".join(origins)
    heads = []
    for frame, key in zip(frames, keys, strict=True):
        value = frame[FRAME_BYTES:]
        head = _HEAD.pack(_MAGIC, _VERSION, kind, len(origins), depth, value.nbytes, _named(key), trust.me)
        heads.append(head + DIGESTS[kind](value))
    levels = _tree([_leaf(head, told) for head in heads], depth)
    signature = trust.sign(levels[-1][0])
    for index, (frame, head) in enumerate(zip(frames, heads, strict=True)):
        way = b"".join(levels[each][(index >> each) ^ 1] for each in range(depth))
        front = head + index.to_bytes(2, "little") + signature + way
        frame[:FRAME_BYTES] = (front.ljust(_ORIGINS, b"\0") + told).ljust(FRAME_BYTES, b"\0")


def held(frame: memoryview, key: str, trust: StoreTrust) -> tuple[bytes, ...] | None:
    """From whom an intact value of that length for that key is, its writer first; None if it is not one to believe."""
    claim = claimed(frame, key, trust, set())
    return claim.names if claim is not None and claim.fits(frame) else None


class HeaderClaim(NamedTuple):
    """What a header says that is believed, if the value is the one it was written for."""

    names: tuple[bytes, ...]  # from whom it is, its writer first
    digest: Digest
    expected: bytes

    def fits(self, frame: memoryview) -> bool:
        return self.digest(frame[FRAME_BYTES:]) == self.expected


def claimed(frame: memoryview, key: str, trust: StoreTrust, proven: set[bytes]) -> HeaderClaim | None:
    """What is said of a value of that length for that key; None if it is not to be believed.

    `proven`: writers and nodes of their trees, known to be signed, by the same trust; what is proven here is added. So
    the values of one batch cost one signature and a node or two each.
    """
    value_bytes = frame.nbytes - FRAME_BYTES
    if value_bytes <= 0:
        return None
    head = bytes(frame[:FRAME_BYTES])
    magic, version, kind, count, depth, size, named, writer = _HEAD.unpack(head[:_DIGEST])
    if (magic, version, size, named) != (_MAGIC, _VERSION, value_bytes, _named(key)):
        return None
    names, digest = writers_of(head) if count else (writer,), DIGESTS.get(kind)
    if digest is None or depth > DEPTH_MAX or not trust.believes(names):
        return None
    way_end, names_end = _WAY + depth * _HASH_BYTES, _ORIGINS + count * WRITER_BYTES
    if head[way_end:_ORIGINS] != _UNUSED[way_end:_ORIGINS] or head[names_end:] != _UNUSED[names_end:]:
        return None
    leaf = _leaf(head[:_PLACE], head[_ORIGINS:names_end])
    is_signed = _is_signed(head, leaf, depth, writer, trust, proven)
    return HeaderClaim(names, digest, head[_DIGEST:_PLACE]) if is_signed else None


def _is_signed(head: bytes, node: bytes, depth: int, writer: bytes, trust: StoreTrust, proven: set[bytes]) -> bool:
    """Climb from a leaf until a node is proven. What lies beside a proven way is proven with it, since no other node
    would have led to that root."""
    index = int.from_bytes(head[_PLACE:_SIGNATURE], "little")
    if index >> depth:
        return False
    named, seen = writer + node, []
    for at in range(_WAY, _WAY + depth * _HASH_BYTES, _HASH_BYTES):
        if named in proven:
            break
        other = head[at : at + _HASH_BYTES]
        seen += [named, writer + other]
        node = _node(other, node) if index & 1 else _node(node, other)
        named = writer + node
        index >>= 1
    if named not in proven:
        if not trust.has_signed(writer, node, head[_SIGNATURE:_WAY]):
            return False
        proven.add(named)
    proven.update(seen)
    return True


def writers_of(head: bytes | memoryview) -> tuple[bytes, ...]:
    """Whom a header names: its writer, then from whom that had taken; () if it is not one of this version."""
    if len(head) < FRAME_BYTES:
        return ()
    magic, version, _, count, _, _, _, writer = _HEAD.unpack(head[:_DIGEST])
    if (magic, version) != (_MAGIC, _VERSION) or count > ORIGINS_MAX:
        return ()
    at = range(_ORIGINS, _ORIGINS + count * WRITER_BYTES, WRITER_BYTES)
    return (writer, *(bytes(head[each : each + WRITER_BYTES]) for each in at))


def _tree(leaves: list[bytes], depth: int) -> list[list[bytes]]:
    """All levels, the leaves first; a batch is filled up with nothing."""
    levels = [leaves + [bytes(_HASH_BYTES)] * ((1 << depth) - len(leaves))]
    for _ in range(depth):
        below = levels[-1]
        levels.append([_node(below[at], below[at + 1]) for at in range(0, len(below), 2)])
    return levels


_LEAF = hashlib.blake2b(digest_size=_HASH_BYTES, person=b"kvbaton-leaf")
_NODE = hashlib.blake2b(digest_size=_HASH_BYTES, person=b"kvbaton-node")
_NAME = hashlib.blake2b(digest_size=_HASH_BYTES)
"""To be copied: making one with a person takes twice the time."""


def _leaf(head: bytes, origins: bytes) -> bytes:
    return _hashed(_LEAF, head + origins)


def _node(left: bytes, right: bytes) -> bytes:
    return _hashed(_NODE, left + right)


def _named(key: str) -> bytes:
    return _hashed(_NAME, key.encode())


def _hashed(empty: hashlib.blake2b, data: bytes) -> bytes:
    made = empty.copy()
    made.update(data)
    return made.digest()
