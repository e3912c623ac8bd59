"""The digest of a range of device memory: the kernel `kvbaton_digest` in words, and the same in NumPy.

A range is 64-bit words, little-endian, the last padded with zeros. Each is combined with a key derived from its
position (position + 1, times 0x9E3779B97F4A7C15) and put through a mixer, and all are added, with the length, modulo
2**64.

Laws: for a fixed position the mixer is one to one, so a change within one word always changes the digest. Several
changes cancel only by chance, one time in 2**64; so do words that swapped positions, since a word counts differently at
each. Addition in any order gives the same result, which lets thousands of threads share the work.

It detects accidents of hardware and software: flipped or stuck bits, a lost, duplicated, stale or misplaced range. It
does not protect against an attacker who chooses the bytes: knowing the mixer, one can find two inputs with one digest.
Data from a peer is authenticated by other means (tickets, and encryption between hosts).
"""

from __future__ import annotations

import numpy as np

DIGEST_BYTES = 8
_WEYL = np.uint64(0x9E3779B97F4A7C15)
_FIRST, _SECOND = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)
_HALF = np.uint64(32)


def digest_of(data: bytes | bytearray | memoryview) -> int:
    """The reference: bit for bit the device's result."""
    text = bytes(data)
    words = np.frombuffer(text + bytes(-len(text) % 8), "<u8").astype(np.uint64)
    mixed = words ^ np.arange(1, len(words) + 1, dtype=np.uint64) * _WEYL
    for factor in (_FIRST, _SECOND):
        mixed ^= mixed >> _HALF
        mixed *= factor
    mixed ^= mixed >> _HALF
    return (int(mixed.sum(dtype=np.uint64)) + len(text)) % (1 << 64)
