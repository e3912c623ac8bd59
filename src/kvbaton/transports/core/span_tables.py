"""Arithmetic on span tables: dividing a copy into parts, and its wire form. Pure functions.

Law: the parts of a copy cover exactly its bytes, once, in order. Tables are `array('q')`: triples
(local offset, remote offset, bytes) at home, pairs (remote offset, bytes) on the wire.
"""

from __future__ import annotations

import itertools
import sys
from array import array
from collections import deque
from typing import TypeAlias

import numpy as np

from kvbaton.transports.core.transport import Spans

PAIR_BYTES = 16
Rows: TypeAlias = np.ndarray[tuple[int, ...], np.dtype[np.int64]]


def cut(spans: Spans, total_bytes: int, hands: int, part_bytes: range, rows_max: int) -> deque[Spans]:
    """Parts of equal size for `hands` workers, so that all finish together.

    A part has about as many bytes as `part_bytes` allows and at most `rows_max` rows. Larger spans are divided, empty
    ones dropped.
    """
    rounds = -(-total_bytes // (hands * part_bytes.stop))
    size = max(part_bytes.start, -(-total_bytes // max(1, hands * rounds)))
    if total_bytes <= size and len(spans) <= 3 * rows_max:
        return deque([spans] if total_bytes else [])
    rows: Rows = np.frombuffer(spans, np.int64).reshape(-1, 3)
    if rows[:, 2].max() > part_bytes.start or not rows[:, 2].all():
        spans = _as_spans(_divided(rows[rows[:, 2] > 0], part_bytes.start))
        rows = np.frombuffer(spans, np.int64).reshape(-1, 3)
    ends = np.cumsum(rows[:, 2])
    edges = np.searchsorted(ends, np.arange(size, total_bytes, size), side="left") + 1
    edges = np.union1d(edges, np.arange(rows_max, len(rows), rows_max))
    bounds = [0, *edges.tolist(), len(rows)]
    return deque(spans[3 * low : 3 * high] for low, high in itertools.pairwise(bounds) if low < high)


def _divided(rows: Rows, piece_bytes: int) -> Rows:
    """No row larger than `piece_bytes`."""
    pieces = -(-rows[:, 2] // piece_bytes)
    owner = np.repeat(np.arange(len(rows)), pieces)
    offset = (np.arange(len(owner)) - np.repeat(np.cumsum(pieces) - pieces, pieces)) * piece_bytes
    sizes = np.minimum(rows[owner, 2] - offset, piece_bytes)
    return np.stack((rows[owner, 0] + offset, rows[owner, 1] + offset, sizes), axis=1)


def _as_spans(rows: Rows) -> Spans:
    part = array("q")
    part.frombytes(rows.tobytes())
    return part


def size_of(spans: Spans) -> int:
    """Bytes named by triples or, since the size comes last in both, by whole rows of them."""
    return sum(spans[2::3])


def to_wire(spans: Spans) -> bytes:
    """The remote half of triples, as little-endian pairs."""
    pairs = array("q", bytes(PAIR_BYTES * (len(spans) // 3)))
    pairs[0::2] = spans[1::3]
    pairs[1::2] = spans[2::3]
    return _little(pairs).tobytes()


def from_wire(table: bytes | bytearray | memoryview) -> Spans:
    """Pairs as received; range-checked by the code that knows the memory."""
    pairs = array("q")
    pairs.frombytes(table)
    return _little(pairs)


def _little(table: Spans) -> Spans:
    if sys.byteorder == "big":
        table.byteswap()
    return table
