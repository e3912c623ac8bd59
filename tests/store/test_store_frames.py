"""Frames: a value is good only for the key it was sealed for, at its length, with every bit as it was."""

from __future__ import annotations

import hashlib
import random
import struct
import zlib

from kvbaton.store.value_header import FRAME_BYTES, holds, seal

SIZE = 300


def sealed(key: str = "key") -> memoryview:
    frame = memoryview(bytearray(FRAME_BYTES + SIZE))
    frame[FRAME_BYTES:] = random.Random(3).randbytes(SIZE)
    seal(frame, key, SIZE)
    return frame


def test_a_sealed_frame_holds_its_value() -> None:
    assert holds(sealed(), "key", SIZE)


def test_a_frame_of_another_key_or_length_does_not() -> None:
    assert not holds(sealed("other"), "key", SIZE)
    assert not holds(sealed(), "key", SIZE - 1)
    assert not holds(sealed()[:-1], "key", SIZE)
    assert not holds(memoryview(b""), "key", 0)
    assert not holds(memoryview(bytes(FRAME_BYTES + SIZE)), "key", SIZE)


def test_any_bit_that_turned_is_seen() -> None:
    frame = sealed()
    for index in range(len(frame)):
        for bit in range(8):
            frame[index] ^= 1 << bit
            assert not holds(frame, "key", SIZE), f"byte {index}, bit {bit}"
            frame[index] ^= 1 << bit
    assert holds(frame, "key", SIZE)


def test_a_frame_of_an_older_version_is_none() -> None:
    """As version 1 made them, with sums of 32 bits."""
    frame = sealed()
    named = hashlib.blake2b(b"key", digest_size=32).digest()
    head = struct.pack("<4sBxxxQ32s8xI", b"KVBS", 1, SIZE, named, zlib.crc32(frame[FRAME_BYTES:]))
    frame[:FRAME_BYTES] = head + zlib.crc32(head).to_bytes(4, "little")
    assert not holds(frame, "key", SIZE)
