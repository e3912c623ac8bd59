"""What the digest of a stretch of device memory is: the kernel `kvbaton_digest` in words, and the same in NumPy.

A stretch is words of 64 bits, little-endian, the last filled up with zeros. Each is combined with a key that its place
gives (place + 1, times 0x9E3779B97F4A7C15) and put through a mixer, and all are added, with the length, modulo 2**64.

Laws: for a fixed place the mixer is one to one, so a change within one word always changes the digest. Several changes
cancel by chance alone, one time in 2**64; so do words that changed places, since a word counts differently at each.
Adding in any order gives the same, which is what lets thousands of threads share the work.

It is against what hardware and software do by accident: flipped or stuck bits, a lost, doubled, stale or misplaced
stretch. It is not against somebody who chooses the bytes: who knows the mixer finds two texts with one digest. What
comes from a peer is authentic by other means (tickets, and encryption between hosts).
"""

from __future__ import annotations

import numpy as np

DIGEST_BYTES = 8
_WEYL = np.uint64(0x9E3779B97F4A7C15)
_FIRST, _SECOND = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)
_HALF = np.uint64(32)


def digest_of(data: bytes | bytearray | memoryview) -> int:
    """The reference: bit for bit what the device says."""
    text = bytes(data)
    words = np.frombuffer(text + bytes(-len(text) % 8), "<u8").astype(np.uint64)
    mixed = words ^ np.arange(1, len(words) + 1, dtype=np.uint64) * _WEYL
    for factor in (_FIRST, _SECOND):
        mixed ^= mixed >> _HALF
        mixed *= factor
    mixed ^= mixed >> _HALF
    return (int(mixed.sum(dtype=np.uint64)) + len(text)) % (1 << 64)
