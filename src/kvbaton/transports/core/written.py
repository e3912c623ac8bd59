"""What a peer has written under one loan, and what is missing of what it had to write.

Law: a byte counts as written only if a request under this very loan has landed there, whole. The record is bounded by
what is due: a peer that writes more, in ever other pieces, is not recorded any more, and what it wrote does not count.
"""

from __future__ import annotations

import bisect
from array import array
from collections.abc import Iterable, Mapping, Sequence
from operator import itemgetter
from typing import TypeAlias

import numpy as np

from kvbaton.protocol.effects import Loan
from kvbaton.protocol.geometry.spans import Area
from kvbaton.protocol.ids import JobId, PeerId
from kvbaton.transports.core.mover import Bands
from kvbaton.transports.core.transport import Spans

RUNS_MIN = 1 << 12
"""Of a record, at least: an honest writer's pieces come in any order, and become one run as their neighbours come."""

FEW = 64
"""Rows for which lists are faster than arrays: of a short prompt, those of most layers."""

AT_ONCE = 1 << 18
"""Rows of an area that are compared at once: a few megabytes."""

Numbers: TypeAlias = "np.ndarray[tuple[int], np.dtype[np.int64]]"
Runs = tuple[Numbers, Numbers]
"""Where they begin and end: in order, and apart."""


class WriteRecord:
    """The record of one loan. Not thread-safe: the caller has a lock."""

    def __init__(self, due: Sequence[Area]) -> None:
        self.due = tuple(due)
        self._runs_max = RUNS_MIN + 2 * sum(len(area.rows) // 2 * len(area.shifts) for area in due)
        self._by_region: dict[int, list[Spans]] = {area.region: [] for area in due}
        self._rows = 0
        self._full = False

    def add(self, region: int, pairs: Spans) -> None:
        """These have landed, every byte of them."""
        record = self._by_region.get(region)
        if record is None or self._full:
            return
        record.append(pairs)
        self._rows += len(pairs) // 2
        if self._rows > 2 * self._runs_max:
            self._condense()

    def missing_bytes(self) -> int:
        """Of what is due. A row of which a part is missing counts whole."""
        return sum(_missing_of(area, self._by_region[area.region]) for area in self.due)

    def _condense(self) -> None:
        """Neighbours as one run, and what was written twice once; if that is still too much, it is nothing."""
        for record in self._by_region.values():
            starts, ends = runs_of(record)
            table = np.stack((starts, ends - starts), axis=1)
            record[:] = [_spans(table)]
        self._rows = sum(len(record[0]) // 2 for record in self._by_region.values())
        if self._rows > self._runs_max:
            self._full = True
            self._by_region = {region: [] for region in self._by_region}


class WriteRecords:
    """Of all loans for writing of one rank under which something is due. The caller has a lock."""

    def __init__(self) -> None:
        self._by_job: dict[JobId, WriteRecord] = {}
        self._lenders: dict[PeerId, dict[int, array[int]]] = {}  # by engine and group: the loan of each block, or 0

    def lend(self, loan: Loan, sizes: Mapping[int, int]) -> None:
        """`sizes`: how many blocks each group has."""
        if loan.due:
            self._by_job[loan.job] = WriteRecord(loan.due)
            for group, ids in enumerate(loan.blocks):
                size = sizes.get(group, 0)
                lenders = self._lenders.setdefault(loan.peer, {}).setdefault(group, array("q", bytes(8 * size)))
                for block in ids:
                    if 0 <= block < size:
                        lenders[block] = loan.job

    def take_back(self, loan: Loan) -> None:
        """What begins from now on does not count for it; what is under way does."""
        by_group = self._lenders.get(loan.peer, {}) if loan.due else {}
        for group, lenders in by_group.items():
            for block in loan.blocks[group] if group < len(loan.blocks) else ():
                if 0 <= block < len(lenders) and lenders[block] == loan.job:
                    lenders[block] = 0

    def of(self, engine: PeerId, pairs: Spans, tables: Iterable[tuple[int, Bands]]) -> tuple[WriteRecord, ...]:
        """Where a request counts: in the loan that it begins in; an honest one is of one handoff, and ends there."""
        # Not row by row: what else it names is recorded where it is not due, and so counts nowhere.
        lenders = self._lenders.get(engine, {})
        at = next((pairs[i] for i in range(0, len(pairs), 2) if pairs[i + 1]), -1) if lenders else -1
        found: set[int] = set()
        for group, bands in tables if at >= 0 else ():
            band = int(np.searchsorted(bands[:, 0], at, side="right")) - 1
            block = int((at - bands[band, 0]) // bands[band, 2]) if band >= 0 else -1
            if group in lenders and 0 <= block < len(lenders[group]):
                found.add(lenders[group][block])
        return tuple(self._by_job[JobId(job)] for job in sorted(found) if job in self._by_job)

    def end(self, job: JobId) -> WriteRecord | None:
        return self._by_job.pop(job, None)

    def forget(self, engine: PeerId) -> None:
        self._lenders.pop(engine, None)

    def clear(self) -> None:
        self._by_job.clear()
        self._lenders.clear()


def _missing_of(area: Area, record: Sequence[Spans]) -> int:
    few = len(area.rows) // 2 * len(area.shifts) <= FEW and sum(map(len, record)) // 2 <= FEW
    return _missing_few(area, record) if few else _missing(area, runs_of(record))


def _missing_few(area: Area, record: Iterable[Spans]) -> int:
    """The same as `_missing`, without the price of two dozen arrays."""
    runs: list[list[int]] = []
    for start, size in sorted((pairs[at], pairs[at + 1]) for pairs in record for at in range(0, len(pairs), 2)):
        if runs and start <= runs[-1][1]:
            runs[-1][1] = max(runs[-1][1], start + size)
        else:
            runs.append([start, start + size])
    missing = 0
    for shift in area.shifts:
        for at in range(0, len(area.rows), 2):
            start, size = area.rows[at] + shift, area.rows[at + 1]
            run = bisect.bisect_right(runs, start, key=itemgetter(0)) - 1
            if run < 0 or runs[run][1] < start + size:
                missing += size
    return missing


def runs_of(record: Iterable[Spans]) -> Runs:
    """(offset, bytes) pairs, joined where they touch or overlap."""
    tables = [np.frombuffer(pairs, np.int64).reshape(-1, 2) for pairs in record if pairs]
    if not tables:
        return np.zeros(0, np.int64), np.zeros(0, np.int64)
    table = np.concatenate(tables)
    table = table[np.argsort(table[:, 0], kind="stable")]
    ends = np.maximum.accumulate(table[:, 0] + table[:, 1])
    begins = np.ones(len(table), bool)
    begins[1:] = table[1:, 0] > ends[:-1]
    last = np.append(begins[1:], True)
    return table[begins, 0], ends[last]


def _missing(area: Area, runs: Runs) -> int:
    starts, ends = runs
    rows = np.frombuffer(area.rows, np.int64).reshape(-1, 2)
    shifts = np.frombuffer(area.shifts, np.int64)
    if not len(rows):
        return 0
    if not len(starts):
        return int(rows[:, 1].sum()) * len(shifts)
    missing, step = 0, max(1, AT_ONCE // len(rows))
    for first in range(0, len(shifts), step):
        offsets = shifts[first : first + step, None] + rows[:, 0]
        runs_at = np.searchsorted(starts, offsets, side="right") - 1
        whole = (runs_at >= 0) & (ends[runs_at] >= offsets + rows[:, 1])
        if not whole.all():
            missing += int((~whole * rows[:, 1]).sum())
    return missing


def _spans(table: np.ndarray[tuple[int, ...], np.dtype[np.int64]]) -> Spans:
    found = array("q")
    found.frombytes(table.tobytes())
    return found
