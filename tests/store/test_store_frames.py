"""Frames: a value is good only for the key it was sealed for, at its length, with every bit as it was."""

from __future__ import annotations

import random

from kvbaton.store.frames import FRAME_BYTES, holds, seal

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
