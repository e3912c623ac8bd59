"""Which bytes of a copy are compared with the other side's, and in what portions. Pure functions.

Law: `full` covers every byte of a copy once; `sample` about one in sixteen, always with the first and the last piece.
The choice depends only on the copy and its job number, so a repetition selects the same bytes. Segments are compared
one by one, in pieces of bounded size: a difference can then be located, and no query is large.
"""

from __future__ import annotations

import enum

import numpy as np

from kvbaton.transports.core.jobs import Rows, as_spans, pieces_of
from kvbaton.transports.core.transport import Copy, Spans
from kvbaton.transports.net.transfer_frames import ROWS_MAX

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


def portions(copy: Copy, mode: Checksum, piece_bytes: int = PIECE_BYTES, part_bytes: int = PART_BYTES) -> list[Spans]:
    """The bytes to compare: triples of at most `piece_bytes`, in portions of bounded rows and bytes."""
    if mode is Checksum.OFF:
        return []
    rows = pieces_of(rows_of(copy), piece_bytes)
    if mode is Checksum.SAMPLE and len(rows):
        rows = rows[_sampled(len(rows), copy.job)]
    if not len(rows):
        return []
    before = np.cumsum(rows[:, 2]) - rows[:, 2]
    edges = np.flatnonzero(np.diff(before // part_bytes) | np.diff(np.arange(len(rows)) // ROWS_MAX)) + 1
    return [as_spans(portion) for portion in np.split(rows, edges)]


def rows_of(copy: Copy) -> Rows:
    """Everything that a copy moves, span by span."""
    flat: Rows = np.frombuffer(copy.spans, np.int64).reshape(-1, 3) if copy.spans else np.empty((0, 3), np.int64)
    if copy.weave is None or not copy.weave.rows:
        return flat
    column = np.frombuffer(copy.weave.column, np.int64).reshape(1, -1, 3)
    shifts = np.frombuffer(copy.weave.shifts, np.int64).reshape(-1, 1, 2)
    woven = np.repeat(column, len(shifts), axis=0)
    woven[:, :, :2] += shifts
    return np.concatenate((flat, woven.reshape(-1, 3)))


def difference(ours: bytes, theirs: bytes) -> int | None:
    """The first row whose digests differ; None when none does."""
    if ours == theirs:
        return None
    rows = max(len(ours), len(theirs)) // DIGEST_BYTES
    at = (slice(row * DIGEST_BYTES, (row + 1) * DIGEST_BYTES) for row in range(rows))
    return next((row for row, place in enumerate(at) if ours[place] != theirs[place]), 0)


def described(copy: Copy, portion: Spans, row: int) -> str:
    """A piece that differs, in the terms of its copy."""
    local, remote, size = portion[3 * row : 3 * row + 3]
    rows = rows_of(copy)
    into = local - rows[:, 0]
    found = np.flatnonzero((into >= 0) & (into < rows[:, 2]) & (remote - rows[:, 1] == into))
    segment = f"segment {found[0]} of {len(rows)}" if len(found) else "a segment"
    return (
        f"job {copy.job}: {segment} differs: {size} bytes at {local} of region {copy.local_region} here, "
        f"{remote} of region {copy.remote_region} at {copy.peer}"
    )


def _sampled(count: int, job: int) -> list[int]:
    """One row of every sixteen, at a position in each that hardly ever repeats, and the first and the last.

    A fixed stride would hit the same layers of every block: segments come in powers of two.
    """
    chosen = {0, count - 1}
    for low in range(0, count, SAMPLE_EVERY):
        mixed = (low * 0x9E3779B97F4A7C15 ^ job * 0xD1B54A32D192ED03) & _WORD
        mixed = (mixed ^ mixed >> 29) * 0xBF58476D1CE4E5B9 & _WORD
        chosen.add(min(low + (mixed >> 60), count - 1))
    return sorted(chosen)
