"""Loans: the one place where a transport asks whether a peer may touch some memory.

Laws: nothing is served that is not lent to that peer, in that direction, at the moment its request is checked; an
accepted request is *in flight* until it calls `end`. A revoked loan accepts no new request, and ends when the last
request in flight under it has ended; one that takes longer than `GRACE_S` is cut off. Blocks are counted: blocks that
were lent twice stay lent until both loans are revoked. A loan for writing ends with how much of what was due under it
has not come (`written`): only whole requests count, and only those of its own blocks. From any thread; nothing here
blocks.

What a peer has written under one loan, and what is missing of what it had to write.

Law: a byte counts as written only if a request under this very loan has landed there, whole. The record is bounded by
what is due: a peer that writes more, in ever other pieces, is not recorded any more, and what it wrote does not count.
"""

from __future__ import annotations

import bisect
import threading
from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from operator import itemgetter
from typing import Protocol, TypeAlias

import numpy as np

from kvbaton.protocol.effects import Capabilities, Direction, Loan
from kvbaton.protocol.errors import Reason
from kvbaton.protocol.events import CopyEnded
from kvbaton.protocol.geometry.layout import Band, PageTable
from kvbaton.protocol.geometry.spans import Area
from kvbaton.protocol.ids import JobId, PeerId, owner_of
from kvbaton.transports.core.mover import Bands, Counts, Mover
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


GRACE_S = 5.0
"""How long what is under way may still take once its loan was taken back: an honest reader of a slow network is done,
and blocks are not kept from their owner for longer by one who reads on purpose byte by byte."""

ROWS_MAX = 1 << 18
"""Spans under way for one engine; beyond it is told to ask again. Whoever takes a loan back looks at them all: 5 ms."""

EVERYTHING = 1 << 40
"""Job ids of `lend_everything`: far from those of copies."""

Key = tuple[PeerId, Direction]


@dataclass(slots=True, eq=False)
class BytesUnderWay:
    """One request being served."""

    key: Key
    region: int
    pairs: Spans
    cut: Callable[[], None]  # ends it, and its connection; from any thread
    awaited: list[JobId] = field(default_factory=list)  # loans that wait for its end
    records: tuple[WriteRecord, ...] = ()  # of a write: where it counts once it has landed


class Loans:
    """The loans of one rank's data plane."""

    def __init__(self, mover: Mover, ended: Callable[[CopyEnded], None], later: Callable[[Callable[[], None]], None]):
        """`ended` is called once per loan; `later` calls back after `GRACE_S`."""
        self._mover = mover
        self._ended = ended
        self._later = later
        self._lock = threading.Lock()
        self._tables: dict[int, list[tuple[int, Bands]]] = {}  # by region: (group, bands)
        self._blocks: dict[int, int] = {}  # by group
        self._loans: dict[JobId, Loan] = {}
        self._counts: dict[Key, dict[int, Counts]] = {}  # by group: how often each block is lent
        self._flights: dict[BytesUnderWay, None] = {}
        self._rows: dict[Key, int] = {}  # of them
        self._closing: dict[JobId, set[BytesUnderWay]] = {}
        self._written = WriteRecords()
        self._closed = False

    def lay_out(self, tables: Iterable[PageTable]) -> None:
        """Before anything is lent."""
        self._tables.clear()
        self._blocks.clear()
        for table in tables:
            self._add(table)

    def add_region(self, region: int, size_bytes: int) -> None:
        """Until it is laid out, a region is one block."""
        if size_bytes and region not in self._tables:
            self._add(PageTable(0, region, 1, (Band(0, size_bytes, size_bytes),)))

    def lend(self, loan: Loan) -> None:
        with self._lock:
            refused = self._closed or loan.job in self._loans or loan.job in self._closing
            if not refused:
                key = loan.peer, loan.direction
                self._loans[loan.job] = loan
                self._count(key, loan, 1)
                self._written.lend(loan, self._blocks)
        if refused:
            self._ended(
                CopyEnded(loan.job, Reason.CANCELLED, detail="the transport is closed, or has lent this already")
            )

    def take_back(self, job: JobId) -> bool:
        """Whether there is such a loan."""
        with self._lock:
            loan = self._loans.pop(job, None)
            if loan is None:
                return job in self._closing
            key = loan.peer, loan.direction
            # Counts first: from here on no new request is served under this loan. Blocks may be lent twice (a prefix
            # shared by two handoffs), so only blocks that no other loan covers have to be waited for.
            self._count(key, loan, -1)
            self._written.take_back(loan)
            # Nor what is under way in other blocks: it may be of a handoff that was given up, whose write is stuck.
            open_ones = (each for each in self._flights if each.key == key and not self._covers(each))
            waits_for = {each for each in open_ones if self._touches(each, loan)}
            for flight in waits_for:
                flight.awaited.append(job)
            if waits_for:
                self._closing[job] = waits_for
        if waits_for:
            self._later(lambda: self._cut(job))
        else:
            self._end_loan(job)
        return True

    def begin(
        self, peer: PeerId, direction: Direction, region: int, pairs: Spans, cut: Callable[[], None]
    ) -> BytesUnderWay | None:
        """None unless every byte is lent to `peer`, a rank of an engine. Spans were range-checked before."""
        flight = BytesUnderWay((owner_of(peer), direction), region, pairs, cut)
        with self._lock:
            rows = self._rows.get(flight.key, 0) + len(pairs) // 2
            if self._closed or rows > ROWS_MAX or not self._covers(flight):
                return None
            self._flights[flight] = None
            self._rows[flight.key] = rows
            if direction is Direction.WRITE:
                flight.records = self._written.of(flight.key[0], pairs, self._tables.get(region, ()))
        return flight

    def end(self, flight: BytesUnderWay, landed: bool = False) -> None:
        """It touches no memory any more; `landed` if every byte of it has been written. Idempotent."""
        over: list[JobId] = []
        with self._lock:
            if flight in self._flights:
                del self._flights[flight]
                for record in flight.records if landed else ():
                    record.add(flight.region, flight.pairs)
                self._rows[flight.key] -= len(flight.pairs) // 2
                if not self._rows[flight.key]:
                    del self._rows[flight.key]
            awaited, flight.awaited = flight.awaited, []
            for job in awaited:
                waits_for = self._closing.get(job, {flight})  # none of it once this was closed
                waits_for.discard(flight)
                if not waits_for and self._closing.pop(job, None) is not None:
                    over.append(job)
        for job in over:
            self._end_loan(job)

    def forget(self, peer: PeerId) -> None:
        """The peer is disconnected: keep no counts of an engine to which nothing is lent."""
        engine = owner_of(peer)
        with self._lock:
            if not any(loan.peer == engine for loan in self._loans.values()):
                for way in Direction:
                    self._counts.pop((engine, way), None)
                self._written.forget(engine)

    def close(self) -> None:
        """Nothing is in flight any more, and nothing will be."""
        with self._lock:
            self._closed = True
            over = [*self._loans, *self._closing]
            for book in (self._loans, self._closing, self._counts, self._flights, self._rows, self._written):
                book.clear()
        for job in over:
            self._ended(CopyEnded(job, Reason.CANCELLED, detail="the transport was closed"))

    def _add(self, table: PageTable) -> None:
        rows = [(band.start, band.end(table.blocks), band.stride, band.extent) for band in table.bands]
        self._tables.setdefault(table.region, []).append((table.group, np.array(rows, np.int64)))
        self._blocks[table.group] = max(table.blocks, self._blocks.get(table.group, 0))

    def _count(self, key: Key, loan: Loan, step: int) -> None:
        held = self._counts.setdefault(key, {})
        for group, ids in enumerate(loan.blocks):
            size = self._blocks.get(group, 0)
            if size and ids:
                if group not in held:
                    held[group] = array("i", bytes(4 * size))
                counts = held[group]
                for block in ids:
                    if 0 <= block < size:
                        counts[block] += step

    def _end_loan(self, job: JobId) -> None:
        with self._lock:
            record = self._written.end(job)
        self._ended(CopyEnded(job, Reason.CANCELLED, unwritten=None if record is None else record.missing_bytes()))

    def _covers(self, flight: BytesUnderWay) -> bool:
        held = self._counts.get(flight.key, {})
        tables = [(bands, held[group]) for group, bands in self._tables.get(flight.region, ()) if group in held]
        return self._mover.check_pages(flight.pairs, 2, tables)

    def _touches(self, flight: BytesUnderWay, loan: Loan) -> bool:
        """Whether any byte of it is in a block of this loan."""
        others = []
        for group, bands in self._tables.get(flight.region, ()):
            outside = array("i", [1]) * self._blocks[group]
            for block in loan.blocks[group] if group < len(loan.blocks) else ():
                if 0 <= block < len(outside):
                    outside[block] = 0
            others.append((bands, outside))
        return not self._mover.check_pages(flight.pairs, 2, others)

    def _cut(self, job: JobId) -> None:
        # A slow peer must not withhold blocks from their owner forever. Its connection is closed, which brings the
        # request to rest and so to `end`; the loan still ends by a fact, not by this timer.
        with self._lock:
            slow = list(self._closing.get(job, ()))
        for flight in slow:
            flight.cut()


class _Lends(Protocol):
    def lend(self, loan: Loan) -> None: ...


def lend_everything(transport: _Lends, *peers: PeerId, able: Capabilities | None = None) -> None:
    """Where regions were not laid out, lend all of them, both ways: for benchmarks and tests of copies alone."""
    for number, (peer, way) in enumerate(product(peers, Direction)):
        if able is None or (able.lends_reads if way is Direction.READ else able.lends_writes):
            transport.lend(Loan(JobId(EVERYTHING + number), owner_of(peer), way, ((0,),)))
