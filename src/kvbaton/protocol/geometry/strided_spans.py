"""Spans in product form: every row of a column, at every shift. A compact form for caches of many layers.

A handoff of 1,000 scattered blocks in 64 layers is 64,000 spans, or 1,000 rows and 64 shifts. A transport that accepts
it neither waits for the long form to be written, nor checks it, nor carries it.

Law: `flat()` defines its meaning: for each shift, in order, each row of the column with the shift added to its offsets.
"""

from __future__ import annotations

import sys
from array import array
from dataclasses import dataclass

import msgspec


@dataclass(frozen=True, slots=True)
class Weave:
    """`column`: (local offset, remote offset, bytes) triples; `shifts`: (local offset, remote offset) pairs."""

    column: array[int]
    shifts: array[int]

    @property
    def rows(self) -> int:
        return len(self.column) // 3 * (len(self.shifts) // 2)

    @property
    def bytes(self) -> int:
        sizes = self.column[2::3]
        alike = sizes[:1] * len(sizes) == sizes  # the usual case, and told sooner than added up
        return (sizes[0] * len(sizes) if alike and sizes else sum(sizes)) * (len(self.shifts) // 2)

    def flat(self) -> array[int]:
        """The long form. Offsets are added as two long integers of 64-bit lanes, of which none carries into the next:
        all sums are offsets into memory."""
        count = len(self.column) // 3
        base = int.from_bytes(self.column.tobytes(), sys.byteorder)
        spans = array("q")
        for index in range(0, len(self.shifts), 2):
            shift = array("q", (self.shifts[index], self.shifts[index + 1], 0)).tobytes()
            moved = base + int.from_bytes(shift * count, sys.byteorder)
            spans.frombytes(moved.to_bytes(24 * count, sys.byteorder))
        return spans


class Area(msgspec.Struct, frozen=True):
    """Bytes of one region, in product form: every row, at every shift."""

    region: int
    rows: array[int]  # (offset, bytes) pairs
    shifts: array[int]  # offsets
