"""Which bytes of a copy are compared with the other side's, and in what portions. Pure functions.

Law: `full` covers every byte of a copy once; `sample` about one in sixteen, always with the first and the last piece.
The choice follows from the copy and its job number alone, so whoever repeats it looks at the same bytes. Segments are
compared one by one, in pieces of bounded size: what differs can then be named, and no question is large.
"""

from __future__ import annotations

import enum
import itertools
from array import array

import numpy as np

from kvbaton.transports.base import Copy, Spans
from kvbaton.transports.spans import Rows
from kvbaton.transports.tcp_frames import ROWS_MAX

PIECE_BYTES = 256 << 10
"""Larger segments are compared in pieces of this: 8 bytes of digest for each, and a cancel waits for one at most."""

PART_BYTES = 8 << 20
"""Bytes in one question: about a millisecond of digesting."""

SAMPLE_EVERY = 16
DIGEST_BYTES = 8
_WORD = (1 << 64) - 1


class Checksum(enum.StrEnum):
    """How much of each copy is compared, sender's bytes with receiver's bytes."""

    OFF = "off"
    SAMPLE = "sample"
    FULL = "full"


def portions(copy: Copy, mode: Checksum) -> list[Spans]:
    """What is to be compared: triples of at most `PIECE_BYTES`, in portions of bounded rows and bytes."""
    if mode is Checksum.OFF or not any(copy.spans[2::3]):
        return []
    spans = _pieces(copy.spans)
    if mode is Checksum.SAMPLE:
        chosen = _sampled(len(spans) // 3, copy.job)
        spans = array("q", itertools.chain.from_iterable(spans[3 * row : 3 * row + 3] for row in chosen))
    if len(spans) <= 3 * ROWS_MAX and sum(spans[2::3]) <= PART_BYTES:
        return [spans]
    rows: Rows = np.frombuffer(spans, np.int64).reshape(-1, 3)
    before = np.cumsum(rows[:, 2]) - rows[:, 2]
    edges = np.flatnonzero(np.diff(before // PART_BYTES) | np.diff(np.arange(len(rows)) // ROWS_MAX)) + 1
    return [_as_spans(portion) for portion in np.split(rows, edges)]


def difference(ours: bytes, theirs: bytes) -> int | None:
    """The first row whose digests differ; None when none does."""
    if ours == theirs:
        return None
    rows = max(len(ours), len(theirs)) // DIGEST_BYTES
    at = (slice(row * DIGEST_BYTES, (row + 1) * DIGEST_BYTES) for row in range(rows))
    return next((row for row, place in enumerate(at) if ours[place] != theirs[place]), 0)


def described(copy: Copy, portion: Spans, row: int) -> str:
    """A piece that differs, in the words of the copy it belongs to."""
    local, remote, size = portion[3 * row : 3 * row + 3]
    rows: Rows = np.frombuffer(copy.spans, np.int64).reshape(-1, 3)
    into = local - rows[:, 0]
    found = np.flatnonzero((into >= 0) & (into < rows[:, 2]) & (remote - rows[:, 1] == into))
    segment = f"segment {found[0]} of {len(rows)}" if len(found) else "a segment"
    return (
        f"job {copy.job}: {segment} differs: {size} bytes at {local} of region {copy.local_region} here, "
        f"{remote} of region {copy.remote_region} at {copy.peer}"
    )


def _pieces(spans: Spans) -> Spans:
    """No row larger than `PIECE_BYTES`, and none empty."""
    sizes = spans[2::3]
    if max(sizes) <= PIECE_BYTES and min(sizes) > 0:
        return spans
    rows: Rows = np.frombuffer(spans, np.int64).reshape(-1, 3)
    counts = -(-rows[:, 2] // PIECE_BYTES)
    owner = np.repeat(np.arange(len(rows)), counts)
    into = (np.arange(len(owner)) - np.repeat(np.cumsum(counts) - counts, counts)) * PIECE_BYTES
    part_bytes = np.minimum(rows[owner, 2] - into, PIECE_BYTES)
    return _as_spans(np.stack((rows[owner, 0] + into, rows[owner, 1] + into, part_bytes), axis=1))


def _sampled(count: int, job: int) -> list[int]:
    """One row of every sixteen, at a place in each that hardly ever repeats, and the first and the last.

    A fixed stride would meet the same layers of every block: segments come in powers of two.
    """
    chosen = {0, count - 1}
    for low in range(0, count, SAMPLE_EVERY):
        mixed = (low * 0x9E3779B97F4A7C15 ^ job * 0xD1B54A32D192ED03) & _WORD
        mixed = (mixed ^ mixed >> 29) * 0xBF58476D1CE4E5B9 & _WORD
        chosen.add(min(low + (mixed >> 60), count - 1))
    return sorted(chosen)


def _as_spans(rows: Rows) -> Spans:
    part = array("q")
    part.frombytes(rows.tobytes())
    return part
