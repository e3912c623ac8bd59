"""The digest of device memory: what it must notice, and numbers by which another implementation is known as the same.

That the kernel says the same as the reference is seen on a GPU: `python -m tests.transports.device.cuda_check`.
"""

from __future__ import annotations

import random
import struct

from hypothesis import given
from hypothesis import strategies as st

from kvbaton.transports.checksum.checksum_device import digest_of

WORD = (1 << 64) - 1


def plain(data: bytes) -> int:
    """The words of the docstring, one by one."""
    total = len(data)
    for place, (word,) in enumerate(struct.iter_unpack("<Q", data + bytes(-len(data) % 8))):
        mixed = word ^ (place + 1) * 0x9E3779B97F4A7C15 & WORD
        for factor in (0xBF58476D1CE4E5B9, 0x94D049BB133111EB):
            mixed = (mixed ^ mixed >> 32) * factor & WORD
        total += mixed ^ mixed >> 32
    return total & WORD


@given(st.binary(max_size=200))
def test_it_is_what_the_words_say(data: bytes) -> None:
    assert digest_of(data) == plain(data)


def test_its_numbers_never_change() -> None:
    """Two versions of this package compare their digests with each other."""
    assert [digest_of(text) for text in (b"", b"\0", b"kvbaton", bytes(range(200)))] == [
        0,
        0x5C76A454C81BDD85,
        0xA789C08EB0F69689,
        0x5F3F61C92BC96A7D,
    ]


@given(st.binary(min_size=1, max_size=300), st.data())
def test_a_change_within_one_word_is_always_seen(data: bytes, draw: st.DataObject) -> None:
    at, flip = draw.draw(st.integers(0, len(data) - 1)), draw.draw(st.integers(1, 255))
    changed = bytearray(data)
    changed[at] ^= flip
    assert digest_of(changed) != digest_of(data)


def test_place_counts() -> None:
    """Fails for a sum that ignores where a word is: swapped words, a shifted row, the same bytes elsewhere."""
    rng = random.Random(1)
    words = [rng.randbytes(8) for _ in range(64)]
    row = b"".join(words)
    for low, high in ((0, 1), (0, 63), (7, 8), (1, 33)):
        swapped = [*words]
        swapped[low], swapped[high] = swapped[high], swapped[low]
        assert digest_of(b"".join(swapped)) != digest_of(row)
    assert digest_of(row[8:] + row[:8]) != digest_of(row)
    alone = {digest_of(bytes(8 * at) + b"\1" + bytes(511 - 8 * at)) for at in range(64)}
    assert len(alone) == 64
    assert len({digest_of(bytes(size)) for size in range(64)}) == 64


def test_the_same_bit_gone_wrong_in_two_words_does_not_cancel() -> None:
    """As a stuck line of a bus does it. The highest bit is where sums of products are blind."""
    rng = random.Random(2)
    row = rng.randbytes(512)
    for bit in range(64):
        for low, high in ((0, 1), (3, 40), (0, 63)):
            changed = bytearray(row)
            for word in (low, high):
                changed[8 * word + bit // 8] ^= 1 << bit % 8
            assert digest_of(changed) != digest_of(row)
