"""A value as backends hold it: a header of 64 bytes, then the value. The same in memory and on disk.

Law: `holds` is True only for a frame that `seal` made for that very key, with that very length, and unaltered since. So
any reader can tell a damaged, torn, foreign or misplaced value from a good one, wherever it was stored. A frame of
another version is invalid: leftovers of an older program are misses.
"""

from __future__ import annotations

import hashlib
import struct

import xxhash

FRAME_BYTES = 64
"""Before each value; a cache line, so that values stay aligned."""

_HEAD = struct.Struct("<4sBxxxQ32sQ4xI")  # magic, version, value bytes, hash of the key, sum of the value, of the head
_MAGIC = b"KVBS"
_VERSION = 2  # 1 had 32-bit sums (CRC)
_SUMMED = _HEAD.size - 4


def seal(frame: memoryview, key: str, value_bytes: int) -> None:
    """Write the header for the value that already follows it."""
    total = xxhash.xxh3_64_intdigest(frame[FRAME_BYTES : FRAME_BYTES + value_bytes])
    head = bytearray(_HEAD.pack(_MAGIC, _VERSION, value_bytes, _named(key), total, 0))
    head[_SUMMED:] = xxhash.xxh32_intdigest(head[:_SUMMED]).to_bytes(4, "little")
    frame[:FRAME_BYTES] = head


def holds(frame: memoryview, key: str, value_bytes: int) -> bool:
    """Whether `frame` starts with an intact value of that length for that key."""
    if len(frame) < FRAME_BYTES + value_bytes:
        return False
    magic, version, size, named, total, head_sum = _HEAD.unpack(frame[:FRAME_BYTES])
    if (magic, version, size, named) != (_MAGIC, _VERSION, value_bytes, _named(key)):
        return False
    if head_sum != xxhash.xxh32_intdigest(frame[:_SUMMED]):
        return False
    return bool(total == xxhash.xxh3_64_intdigest(frame[FRAME_BYTES : FRAME_BYTES + value_bytes]))


def _named(key: str) -> bytes:
    return hashlib.blake2b(key.encode(), digest_size=32).digest()
