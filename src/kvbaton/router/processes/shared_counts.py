"""Counts in memory that all processes of a router share: each writes a row of its own, and reads the sum of all.

Laws: one writer for each row, so nothing is locked; a sum may lack what another process is just writing, never more.
The row of a process that ended is cleared by the parent: what it held is free. A worker's life has a number, which is
its column; numbers are not given again before 65,535 others were.

    column      of each process
    0           1 while it takes connections
    1           its connections of clients
    2           its calls under way
    3           the bytes that it holds
    4 …         of these, by client address (a keyed hash of it: two that share a column share its bound)
    4100 …      tokens under way at each worker, by the worker's number

Behind the rows is a table of prompts' beginnings: their names, and the numbers of up to four workers that saw them;
behind that, where turns are kept, the table of `shared_turns`.

Figures of a router's processes as those of one router: counters are summed, histograms merged, gauges summed.

Law: pure. What an ended process counted stays counted; what it had under way does not.
"""

from __future__ import annotations

import hashlib
import mmap
import os
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import msgspec

from kvbaton.api.http.client_quotas import ClientQuotas
from kvbaton.observe.metrics import process_metrics
from kvbaton.observe.metrics.metric_types import Histogram
from kvbaton.observe.metrics.process_metrics import ProcessFigures
from kvbaton.protocol.ids import PeerId
from kvbaton.router.processes.process_link import CountedFigures, CountedTimes
from kvbaton.router.router_stats import RouterStats, Waits
from kvbaton.router.workers.prefixes import HOLDERS_MAX, Prefixes
from kvbaton.router.workers.worker_load import Loads

_NUMBERS = ("tickets", "discards", "dropped")
_COUNTERS = ("tries", "alone", "ends", "responses", "failures", "retries", "probes")
_OF_THE_ROOM = ("refused", "turned_away")
_OF_THE_WAITS = ("tokens", "legs", "turns", "first_tokens", "moves", "moves_failed")


class MergedStats(RouterStats):
    """Of all processes, whenever somebody asks: who counts in time needs figures of now, not of the last page's."""

    def __init__(self, merge_told: Callable[[], None]) -> None:
        super().__init__()
        self._merge_told = merge_told
        self.processes = 0  # that serve
        self.restarts = 0
        self.used = ProcessFigures()

    @property
    def of_processes(self) -> ProcessFigures:
        self._merge_told()
        return self.used

    def as_numbers(self) -> dict[str, Any]:
        self._merge_told()
        return {**super().as_numbers(), "processes": self.processes, "process_restarts_total": self.restarts}


def counted(stats: RouterStats) -> CountedFigures:
    """One process's figures, as they are sent."""
    waits = stats.waits
    return CountedFigures(
        in_flight=stats.in_flight,
        held_bytes=stats.room.bytes,
        waiting=waits.waiting,
        numbers={name: getattr(stats, name) for name in _NUMBERS},
        counters={
            **{name: dict(getattr(stats, name)) for name in _COUNTERS},
            **{name: dict(getattr(stats.room, name)) for name in _OF_THE_ROOM},
            **{name: dict(getattr(waits, name)) for name in _OF_THE_WAITS},
        },
        waits=(waits.sum_s, waits.count),
        times=tuple(
            CountedTimes(each.metric.name, labels, list(found.counts), found.sum, list(found.exemplars))
            for each in waits.histograms
            for labels, found in each.counted().items()
        ),
        process=process_metrics.own(),
    )


def at_rest(figures: CountedFigures) -> CountedFigures:
    """What stays of a process that has ended."""
    rest = process_metrics.at_rest(figures.process)
    return msgspec.structs.replace(figures, in_flight=0, held_bytes=0, waiting=0, process=rest)


def merge(stats: RouterStats, figures: Iterable[CountedFigures]) -> None:
    """Put the sum of all into `stats`."""
    found = list(figures)
    stats.in_flight = sum(each.in_flight for each in found)
    stats.room.bytes = sum(each.held_bytes for each in found)
    for name in _NUMBERS:
        setattr(stats, name, sum(each.numbers.get(name, 0) for each in found))
    for name in _COUNTERS:
        setattr(stats, name, summed(each.counters.get(name, {}) for each in found))
    for name in _OF_THE_ROOM:
        setattr(stats.room, name, summed(each.counters.get(name, {}) for each in found))
    stats.waits = waits = Waits()
    waits.waiting = sum(each.waiting for each in found)
    waits.sum_s = sum(each.waits[0] for each in found)
    waits.count = sum(each.waits[1] for each in found)
    for name in _OF_THE_WAITS:
        setattr(waits, name, summed(each.counters.get(name, {}) for each in found))
    by_name = {each.metric.name: each for each in waits.histograms}
    for told in (times for each in found for times in each.times):
        histogram = Histogram(by_name[told.name].metric.buckets)
        histogram.counts, histogram.exemplars, histogram.sum = told.counts, told.exemplars, told.sum
        by_name[told.name].add(told.labels, histogram)


def together(figures: Iterable[CountedFigures]) -> CountedFigures:
    """Figures of several processes, or lives of one, as one's."""
    found, stats = list(figures), RouterStats()
    merge(stats, found)
    used = process_metrics.together(each.process for each in found)
    return msgspec.structs.replace(counted(stats), process=used)


OPEN, CONNECTIONS, IN_FLIGHT, HELD = range(4)
_CALLERS_AT = 4
CALLERS = 4096
_LOADS_AT = _CALLERS_AT + CALLERS
NUMBERS = 1 << 16
COLUMNS = _LOADS_AT + NUMBERS
LOOK_S = 0.002
"""For so long a process relies on what it last read of the others' load."""
_PIECE = 2  # words of the table for each beginning: its name, and who saw it
_WORD = (1 << 64) - 1
_HOLDER_BITS = 16


class SharedCounts:
    """The memory, as every process maps it."""

    def __init__(self, file: int, processes: int, pieces_max: int, turns_bytes: int = 0) -> None:
        self.file = file
        self.processes = processes
        self.pieces_max = pieces_max
        rows = 8 * COLUMNS * processes
        pieces = rows + 8 * _PIECE * max(pieces_max, 1)
        size = pieces + turns_bytes
        if os.fstat(file).st_size < size:
            os.ftruncate(file, size)
        memory = memoryview(mmap.mmap(file, size))
        self._rows = memory[:rows].cast("q")
        self.pieces = memory[rows:pieces].cast("Q")
        self.turns = memory[pieces:size]

    @classmethod
    def made(cls, processes: int, pieces_max: int, turns_bytes: int = 0) -> SharedCounts:
        return cls(os.memfd_create("kvbaton-router"), processes, pieces_max, turns_bytes)

    def close(self) -> None:
        """The descriptor; the memory goes with the process."""
        os.close(self.file)

    def row(self, index: int) -> memoryview:
        return self._rows[index * COLUMNS : (index + 1) * COLUMNS]

    def each(self, column: int) -> list[int]:
        return self._rows[column::COLUMNS].tolist()

    def total(self, column: int) -> int:
        return sum(self.each(column))

    def clear(self, index: int) -> None:
        """Of a process that has ended."""
        self.row(index)[:] = memoryview(bytes(8 * COLUMNS)).cast("q")

    def tokens(self, number: int) -> int:
        return self.total(_LOADS_AT + number)


class WorkerNumbers:
    """A number for each life of a worker. The parent gives them."""

    def __init__(self) -> None:
        self._given: dict[PeerId, int] = {}
        self._last = 0

    def of(self, peers: Iterable[PeerId]) -> dict[PeerId, int]:
        """Those of all that are listed now; others are forgotten."""
        listed = list(peers)
        taken = {self._given[peer] for peer in listed if peer in self._given}
        found = {}
        for peer in listed:
            number = self._given.get(peer)
            while number is None:
                self._last = self._last % (NUMBERS - 1) + 1  # 0 is nobody's
                number = None if self._last in taken else self._last
            found[peer] = number
            taken.add(number)
        self._given = found
        return dict(found)


class SharedLoads(Loads):
    """Tokens under way at each worker, of all processes. `row` is None where nothing is ever taken."""

    def __init__(self, counts: SharedCounts, row: memoryview | None) -> None:
        super().__init__()
        self._counts = counts
        self._row = row
        self._numbers: dict[PeerId, int] = {}
        self._read_at = float("-inf")

    def know(self, numbers: Mapping[PeerId, int]) -> None:
        """Who is listed now; who has left is remembered while something is under way there."""
        row = self._row
        left = {peer: n for peer, n in self._numbers.items() if row is not None and row[_LOADS_AT + n]}
        for peer, before in left.items():
            number = numbers.get(peer, before)
            if row is not None and number != before:  # it left and came back: what is under way there goes along
                row[_LOADS_AT + number] += row[_LOADS_AT + before]
                row[_LOADS_AT + before] = 0
        self._numbers = left | dict(numbers)
        self._read_at = float("-inf")

    def look(self, now: float) -> None:
        if 0 <= now - self._read_at < LOOK_S:
            return
        self._read_at = now
        found = ((peer, self._counts.tokens(number)) for peer, number in self._numbers.items())
        self.tokens.clear()
        self.tokens.update((peer, tokens) for peer, tokens in found if tokens > 0)

    def _change(self, peer: PeerId, tokens: int) -> None:
        left = self.tokens.get(peer, 0) + tokens  # until the next look
        if left > 0:
            self.tokens[peer] = left
        else:
            self.tokens.pop(peer, None)
        number = self._numbers.get(peer)
        if number is not None and self._row is not None:
            self._row[_LOADS_AT + number] += tokens


class SharedStats(RouterStats):
    """Counters of one process, whose calls under way count against the bound of all."""

    def __init__(self, counts: SharedCounts, row: memoryview, room: ClientQuotas) -> None:
        super().__init__(room=room)
        self._counts = counts
        self._row = row

    @property
    def under_way(self) -> int:
        return self._counts.total(IN_FLIGHT)

    def enter(self, calls: int, most: int) -> bool:
        # Written before it is compared: of two processes that take the last place at once, none gets more than there is
        self._row[IN_FLIGHT] += calls
        if self._counts.total(IN_FLIGHT) > most:
            self._row[IN_FLIGHT] -= calls
            return False
        self.in_flight += calls
        return True

    def leave(self, calls: int) -> None:
        self.in_flight -= calls
        self._row[IN_FLIGHT] -= calls


class SharedQuotas(ClientQuotas):
    """Bytes that are held, of all processes together."""

    def __init__(self, counts: SharedCounts, row: memoryview, key: bytes, bytes_max: int) -> None:
        super().__init__(bytes_max)
        self._counts = counts
        self._row = row
        self._key = key

    @property
    def total(self) -> int:
        return self._counts.total(HELD)

    def _change(self, who: str, more: int) -> bool:
        digest = hashlib.blake2b(who.encode(), digest_size=4, key=self._key).digest()
        caller = _CALLERS_AT + int.from_bytes(digest, "little") % CALLERS
        row, counts = self._row, self._counts
        row[HELD] += more
        row[caller] += more
        if more > 0 and counts.total(caller) + counts.total(HELD) > self.bytes_max:
            row[HELD] -= more
            row[caller] -= more
            return False
        self.bytes += more
        return True


class SharedPrefixes(Prefixes):
    """Who has seen which beginnings of prompts, of all processes.

    A beginning has one place in the table, which the next one that belongs there takes. Two processes that write at
    once may mix theirs up, and a number may be another worker's by now: both are wrong guesses, which cost time only.
    Every process has to hash alike (`PYTHONHASHSEED`).
    """

    def __init__(self, counts: SharedCounts) -> None:
        super().__init__(counts.pieces_max)
        self._table = counts.pieces
        self._size = max(counts.pieces_max, 1)
        self._peers: dict[int, PeerId] = {}
        self._numbers: dict[PeerId, int] = {}

    def know(self, numbers: Mapping[PeerId, int]) -> None:
        self._numbers = dict(numbers)
        self._peers = {number: peer for peer, number in numbers.items()}

    def _seen_by(self, name: int) -> tuple[PeerId, ...] | None:
        at = _PIECE * (name % self._size)
        if self._table[at] != name & _WORD:
            return None
        found = (self._peers.get(number) for number in _unpacked(self._table[at + 1]))
        return tuple(peer for peer in found if peer is not None)

    def note(self, peer: PeerId, names: Sequence[int]) -> None:
        own = self._numbers.get(peer)
        if own is None:
            return
        table = self._table
        for name in names:
            at = _PIECE * (name % self._size)
            others: list[int] = []
            if table[at] == name & _WORD:
                others = [number for number in _unpacked(table[at + 1]) if number != own]
            packed = 0
            for number in reversed([own, *others[: HOLDERS_MAX - 1]]):
                packed = packed << _HOLDER_BITS | number
            table[at + 1] = packed
            table[at] = name & _WORD


def _unpacked(packed: int) -> list[int]:
    found = []
    while packed:
        found.append(packed & (NUMBERS - 1))
        packed >>= _HOLDER_BITS
    return found


def summed(counts: Iterable[Mapping[str, int]]) -> Counter[str]:
    """Counters of several processes as one."""
    total: Counter[str] = Counter()
    for each in counts:
        total.update(each)
    return total
