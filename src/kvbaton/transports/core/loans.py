"""Loans: the one place where a transport asks whether a peer may touch some memory.

Laws: nothing is served that is not lent to that peer, in that direction, at the moment its request is checked; an
accepted request is *in flight* until it calls `end`. A revoked loan accepts no new request, and ends when the last
request in flight under it has ended; one that takes longer than `GRACE_S` is cut off. Blocks are counted: blocks that
were lent twice stay lent until both loans are revoked. A loan for writing ends with how much of what was due under it
has not come (`written`): only whole requests count, and only those of its own blocks. From any thread; nothing here
blocks.
"""

from __future__ import annotations

import threading
from array import array
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import product
from typing import Protocol

import numpy as np

from kvbaton.protocol.effects import Capabilities, Direction, Loan
from kvbaton.protocol.errors import Reason
from kvbaton.protocol.events import CopyEnded
from kvbaton.protocol.geometry.layout import Band, PageTable
from kvbaton.protocol.ids import JobId, PeerId, WorkerId
from kvbaton.transports.core.mover import Bands, Counts, Mover
from kvbaton.transports.core.transport import Spans
from kvbaton.transports.core.written import WriteRecord, WriteRecords

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
            waits_for = {each for each in self._flights if each.key == key and not self._covers(each)}
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
        flight = BytesUnderWay((engine_of(peer), direction), region, pairs, cut)
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
        engine = engine_of(peer)
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

    def _cut(self, job: JobId) -> None:
        # A slow peer must not withhold blocks from their owner forever. Its connection is closed, which brings the
        # request to rest and so to `end`; the loan still ends by a fact, not by this timer.
        with self._lock:
            slow = list(self._closing.get(job, ()))
        for flight in slow:
            flight.cut()


def engine_of(peer: PeerId) -> PeerId:
    """The engine that a rank belongs to (`ids.rank_peer`); for any other peer, itself."""
    return PeerId(WorkerId(peer.worker.partition("#")[0]), peer.incarnation)


class _Lends(Protocol):
    def lend(self, loan: Loan) -> None: ...


def lend_everything(transport: _Lends, *peers: PeerId, able: Capabilities | None = None) -> None:
    """Where regions were not laid out, lend all of them, both ways: for benchmarks and tests of copies alone."""
    for number, (peer, way) in enumerate(product(peers, Direction)):
        if able is None or (able.lends_reads if way is Direction.READ else able.lends_writes):
            transport.lend(Loan(JobId(EVERYTHING + number), engine_of(peer), way, ((0,),)))
