"""From span tables to the input of one launch: groups, then columns and shifts. Pure arithmetic, and a launch's limits.

Law: the rows of a launch name exactly the bytes of the spans that were checked, once. A few threads of the grid copy a
row, so none is longer than `ROW_BYTES_MAX`; a launch has at most `GROUPS_MAX` groups and a table of bounded size.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Sequence

import msgspec
import numpy as np

from kvbaton.protocol.geometry.spans import Weave
from kvbaton.transports.core.jobs import Rows, as_spans, pieces_of
from kvbaton.transports.core.transport import Spans

ROW_BYTES_MAX = 256 << 10
PIECE_BYTES = 64 << 10
"""Longer rows are divided into these: a team of threads moves a few GB/s, and hundreds of them run at once."""

GROUPS_MAX = 256
GROUP_NUMBERS = 6
ROWS_MAX = 1 << 17
TABLE_NUMBERS_MAX = 3 * ROWS_MAX + (GROUP_NUMBERS + 2) * GROUPS_MAX
"""3 MiB, pinned: enough for 4 GB of 32 KiB segments, each named."""

NO_SHIFT = array("q", (0, 0))


class LaunchGroup(msgspec.Struct, frozen=True):
    """Spans between one pair of memories, by the addresses that their offsets count from."""

    target: int
    source: int
    spans: Spans | Weave

    @property
    def rows(self) -> int:
        return self.spans.rows if isinstance(self.spans, Weave) else len(self.spans) // 3

    @property
    def bytes(self) -> int:
        return bytes_of(self.spans)

    @property
    def numbers(self) -> int:
        """How much of the table it takes."""
        return GROUP_NUMBERS + numbers_of(self.spans)


def numbers_of(spans: Spans | Weave) -> int:
    if isinstance(spans, Weave):
        return len(spans.column) + len(spans.shifts)
    return len(spans) + len(NO_SHIFT)


def bytes_of(spans: Spans | Weave) -> int:
    return spans.bytes if isinstance(spans, Weave) else int(np.frombuffer(spans, np.int64)[2::3].sum())


def check_weave(weave: Weave, local_bytes: int, remote_bytes: int) -> int:
    """Bytes of all rows together. ValueError when one leaves its memory: exact, as every row occurs at every shift."""
    if len(weave.column) % 3 or len(weave.shifts) % 2:
        raise ValueError(f"{len(weave.column)} and {len(weave.shifts)} numbers are not triples and pairs")
    if not weave.rows:
        return 0
    rows = np.frombuffer(weave.column, np.int64).reshape(-1, 3).T.copy()  # each column by itself
    shifts = np.frombuffer(weave.shifts, np.int64).reshape(-1, 2).T.copy()
    least, most = rows.min(axis=1).tolist(), rows.max(axis=1).tolist()
    nearest, farthest = shifts.min(axis=1).tolist(), shifts.max(axis=1).tolist()
    largest = max(local_bytes, remote_bytes)
    if max(*most, *farthest) > largest or min(*least, *nearest) < -largest or least[2] < 0:
        raise ValueError("a woven span is outside its memory")  # and sums of the others cannot overflow
    alike = least[2] == most[2]
    for which, limit in ((0, local_bytes), (1, remote_bytes)):
        end = most[which] + most[2] if alike else int((rows[which] + rows[2]).max())
        if least[which] + nearest[which] < 0 or end + farthest[which] > limit:
            raise ValueError("a woven span is outside its memory")
    return int(rows[2].sum()) * shifts.shape[1]


def parts_of(spans: Spans | Weave, total_bytes: int) -> deque[Spans | Weave]:
    """The parts for each launch: nearly always one, the table as it is."""
    if not total_bytes:
        return deque()
    rows = spans.column if isinstance(spans, Weave) else spans
    sizes = np.frombuffer(rows, np.int64)[2::3]
    if len(sizes) <= ROWS_MAX and sizes.max() <= ROW_BYTES_MAX:
        return deque([spans])
    flat = spans.flat() if isinstance(spans, Weave) else spans
    short = divided(np.frombuffer(flat, np.int64).reshape(-1, 3))
    return deque(as_spans(short[at : at + ROWS_MAX]) for at in range(0, len(short), ROWS_MAX))


def write_table(table: Rows, groups: Sequence[LaunchGroup]) -> None:
    """Fill the head of a flat table."""
    at, first = GROUP_NUMBERS * len(groups), 0
    for index, group in enumerate(groups):
        weave = group.spans if isinstance(group.spans, Weave) else Weave(group.spans, NO_SHIFT)
        column, shifts = np.frombuffer(weave.column, np.int64), np.frombuffer(weave.shifts, np.int64)
        head = first, group.target, group.source, at, len(column) // 3, at + len(column)
        table[GROUP_NUMBERS * index : GROUP_NUMBERS * (index + 1)] = head
        table[at : at + len(column)] = column
        table[at + len(column) : at + len(column) + len(shifts)] = shifts
        at += len(column) + len(shifts)
        first += weave.rows


def divided(rows: Rows) -> Rows:
    """The same (n, 3) bytes with no row too long for one team of the grid."""
    if not len(rows) or rows[:, 2].max() <= ROW_BYTES_MAX:
        return rows
    return pieces_of(rows, PIECE_BYTES)
