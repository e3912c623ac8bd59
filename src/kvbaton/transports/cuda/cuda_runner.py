"""Two threads that give work to a device and wait for it: started work ends once, in the order of its start.

Law: work is over when the device says so, and not before. Both threads sleep while they wait, for work in a queue and
for the device in the driver; the starting thread never waits for the device, so it is not idle while there is work.
Work that is due together is started together, which lets many copies share one launch; each batch has its own stream,
so the copy of one overlaps the gather of the next. A device error fails the work concerned; a sticky one fails
everything from then on, and is never raised out of here.

Work that finds the device idle, and is quick to start, is started by the thread that adds it: waking another one takes
longer than a launch. Work added meanwhile is queued, and so started together. One thread starts work at a time, and
adding never waits.

Enqueues a table of spans on a stream: written to pinned memory, and moved or digested by launches that read it.

Law: a table belongs to one slot, and a slot to one batch until it is done. A launch moves about `LAUNCH_BYTES`: between
two launches a kernel that waits for the whole device gets it. A large table is read in place, over the bus, which costs
no more than uploading it (1.10 against 1.11 ms for 64,000 rows on an H200); a small one is uploaded, since every block
of the grid reads from it.

From span tables to the input of one launch: groups, then columns and shifts. Pure arithmetic, and a launch's limits.

Law: the rows of a launch name exactly the bytes of the spans that were checked, once. A few threads of the grid copy a
row, so none is longer than `ROW_BYTES_MAX`; a launch has at most `GROUPS_MAX` groups and a table of bounded size.
"""

from __future__ import annotations

import ctypes
import logging
import queue
import threading
from array import array
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Generic, Protocol, TypeVar

import msgspec
import numpy as np

from kvbaton.protocol.geometry.spans import Weave
from kvbaton.transports.core.jobs import Rows, as_spans, pieces_of
from kvbaton.transports.core.transport import Spans
from kvbaton.transports.cuda.cuda_driver import CudaError, Gpu

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


NUMBER_BYTES = 8
LAUNCH_BYTES = 128 << 20
"""Some 0.07 ms of an H200's memory, where a launch costs 2 or 3 µs."""

SMALL_NUMBERS = 8192
"""64 KiB: a column of 2,700 blocks, say, and any number of layers."""


class Tables:
    """Room for the table of one launch in each slot. Grows to what was needed so far, and to a named bound."""

    def __init__(self, gpu: Gpu, slots: int) -> None:
        """From then on only the runner calls, one thread at a time and with the device current."""
        self._gpu = gpu
        self._slots: list[_Table | None] = [None] * slots

    def launch(self, groups: Sequence[LaunchGroup], slot: int, stream: int) -> None:
        """Move all of `groups`, which together are within the bounds. CudaError."""
        at, rows = self._write(groups, slot, stream), sum(group.rows for group in groups)
        step = rows_a_launch(groups)
        for first in range(0, rows, step):
            self._gpu.move_rows(at, len(groups), range(first, min(first + step, rows)), stream)

    def digest(self, groups: Sequence[LaunchGroup], slot: int, stream: int) -> None:
        """Digest the sources of all of `groups` to their targets, 8 bytes a row. CudaError."""
        at, rows = self._write(groups, slot, stream), sum(group.rows for group in groups)
        if rows:
            self._gpu.digest_rows(at, len(groups), range(rows), stream)

    def _write(self, groups: Sequence[LaunchGroup], slot: int, stream: int) -> int:
        """The table's address for the device."""
        numbers = sum(group.numbers for group in groups)
        if numbers > TABLE_NUMBERS_MAX or len(groups) > GROUPS_MAX:
            raise ValueError(f"{numbers} numbers in {len(groups)} groups are more than one launch takes")
        if not any(group.rows for group in groups):
            return 0
        table = self._room(slot, numbers)
        write_table(table.numbers, groups)
        if numbers > SMALL_NUMBERS:
            return table.address
        self._gpu.copy(table.on_device, table.address, NUMBER_BYTES * numbers, stream)
        return table.on_device

    def has_room(self, slot: int, numbers: int) -> bool:
        """Whether such a table can be written without allocating."""
        table = self._slots[slot]
        return table is not None and len(table.numbers) >= numbers

    def clear(self) -> None:
        """Nothing is in flight."""
        for slot in range(len(self._slots)):
            self._drop(slot)

    def _room(self, slot: int, numbers: int) -> _Table:
        table = self._slots[slot]
        if table is None or not self.has_room(slot, numbers):
            self._drop(slot)
            table = self._slots[slot] = _Table(self._gpu, min(TABLE_NUMBERS_MAX, max(SMALL_NUMBERS, 2 * numbers)))
        return table

    def _drop(self, slot: int) -> None:
        table, self._slots[slot] = self._slots[slot], None
        if table is not None:
            self._gpu.free(table.on_device)
            self._gpu.free_pinned(table.address)


def rows_a_launch(groups: Sequence[LaunchGroup]) -> int:
    """As many as have `LAUNCH_BYTES` together, where all are of the mean length."""
    rows, nbytes = sum(group.rows for group in groups), sum(group.bytes for group in groups)
    return max(1, rows * LAUNCH_BYTES // max(nbytes, LAUNCH_BYTES))


class _Table:
    def __init__(self, gpu: Gpu, numbers: int) -> None:
        size = NUMBER_BYTES * numbers
        self.address = gpu.allocate_pinned(size)
        try:
            self.on_device = gpu.allocate(NUMBER_BYTES * SMALL_NUMBERS)
        except BaseException:
            gpu.free_pinned(self.address)
            raise
        held = (ctypes.c_char * size).from_address(self.address)
        self.numbers: Rows = np.frombuffer(memoryview(held), np.int64)


log = logging.getLogger(__name__)

UNDER_WAY_MAX = 4
"""Batches on the device at once: two that overlap, and slack for the threads to wake."""

Item = TypeVar("Item")


class CudaWorker(Protocol[Item]):
    """Knows how to start and end the work."""

    def begin(self, batch: list[Item], slot: int, stream: int) -> list[Item]:
        """Enqueue `batch` on the stream; returns the enqueued ones. `slot` is exclusively theirs until they have
        ended."""

    def end(self, batch: list[Item], problem: str) -> None:
        """The device is done with it, or will never begin it. On either thread."""

    def closed(self) -> None:
        """Nothing is in flight and nothing follows."""


class _First(msgspec.Struct):
    run: Callable[[], None]


class _After(msgspec.Struct):
    run: Callable[[], None]


class CudaRunner(Generic[Item]):
    """The threads, their streams, and the events by which they sleep. Started by the first work."""

    def __init__(self, name: str, gpu: Gpu, worker: CudaWorker[Item], batch_max: int) -> None:
        self._name = name
        self._gpu = gpu
        self._worker = worker
        self._batch_max = batch_max
        self._due: queue.SimpleQueue[Item | _First | _After | None] = queue.SimpleQueue()
        self._begun: queue.SimpleQueue[tuple[list[Item], int, str] | _After | None] = queue.SimpleQueue()
        self._slots: queue.LifoQueue[int] = queue.LifoQueue()  # free ones; the last used first
        self._streams: list[int] = []
        self._events: list[int] = []
        self._threads: list[threading.Thread] = []
        self._lock = threading.Lock()
        self._beginning = threading.Lock()  # serialises starting work and queueing after it
        self._closed = False
        self.broken = ""
        """What made the device unusable for this process; empty while it works."""

    def add(self, item: Item, is_quick: Callable[[int], bool] | None = None) -> None:
        """Started here and now if nothing is queued and `is_quick`, which is called with a slot, says that starting it
        there waits for nothing: no allocation, no opening, few calls. Queued otherwise."""
        if is_quick is None or not self._begin_here(item, is_quick):
            self._put(item)

    def first(self, action: Callable[[], None]) -> None:
        """Run `action` before what is added later, on the thread that begins."""
        self._put(_First(action))

    def after(self, action: Callable[[], None]) -> None:
        """Run `action` once all that was added before is over."""
        self._put(_After(action))

    def close(self, join_s: float) -> bool:
        """End after the added work; False if the device was still busy after `join_s`."""
        with self._lock:
            threads = list(self._threads)
        with self._beginning:
            self._closed = True
        if threads:
            self._due.put(None)
        for thread in threads:
            thread.join(join_s)
        return not any(thread.is_alive() for thread in threads)

    def _put(self, item: Item | _First | _After) -> None:
        with self._lock:
            if not self._threads:
                for run, what in ((self._run_beginning, "begin"), (self._run_ending, "end")):
                    thread = threading.Thread(target=run, name=f"{self._name}-{what}", daemon=True)
                    self._threads.append(thread)
                for thread in self._threads:
                    thread.start()
        self._due.put(item)

    def _run_beginning(self) -> None:
        self._guard(self._open)
        while self._next():
            pass
        self._begun.put(None)

    def _open(self) -> None:
        self._gpu.enter()
        self._streams = [self._gpu.stream() for _ in range(UNDER_WAY_MAX)]
        self._events = [self._gpu.event() for _ in range(UNDER_WAY_MAX)]
        for slot in range(UNDER_WAY_MAX):
            self._slots.put(slot)

    def _next(self) -> bool:
        """Begin all that is due now; False at the end."""
        batch: list[Item] = []
        item = self._due.get()
        while item is not None and not isinstance(item, _First | _After):
            batch.append(item)
            if len(batch) >= self._batch_max or self._due.empty():
                self._begin(batch)
                return True
            item = self._due.get()
        if batch:
            self._begin(batch)
        if isinstance(item, _First):
            self._guard(item.run)
        elif item is not None:
            with self._beginning:  # after what another thread is starting
                self._begun.put(item)
        return item is not None

    def _begin(self, batch: list[Item]) -> None:
        if self.broken:
            self._worker.end(batch, self.broken)
            return
        slot = self._slots.get()  # returns: work on the device ends, or breaks it
        with self._beginning:
            self._begin_in(slot, batch, nullcontext())

    def _begin_here(self, item: Item, is_quick: Callable[[int], bool]) -> bool:
        """By any thread, without waiting; False if it must be queued."""
        # Handing a copy to another thread costs more than launching a small one. But order must hold for `after`, and a
        # caller must not wait: so only if no thread is starting work, nothing is queued and every slot is free.
        if not self._beginning.acquire(blocking=False):
            return False
        try:
            idle = self._due.empty() and self._slots.qsize() == UNDER_WAY_MAX  # and opened: before, there are none
            if self._closed or self.broken or not idle:
                return False
            slot = self._slots.get()
            if not is_quick(slot):
                self._slots.put(slot)
                return False
            self._begin_in(slot, [item], self._gpu)
            return True
        finally:
            self._beginning.release()

    def _begin_in(self, slot: int, batch: list[Item], current: AbstractContextManager[object]) -> None:
        """`current` makes the device current, in others' threads."""
        problem = ""
        try:
            with current:
                begun = self._worker.begin(batch, slot, self._streams[slot])
                if begun:
                    self._gpu.record(self._events[slot], self._streams[slot])
        except CudaError as error:
            self._note(error)
            begun, problem = batch, str(error)  # part of it may be on the stream
        if begun:
            self._begun.put((begun, slot, problem))
        else:
            self._slots.put(slot)

    def _run_ending(self) -> None:
        self._guard(self._gpu.enter)
        while (begun := self._begun.get()) is not None:
            if isinstance(begun, _After):
                self._guard(begun.run)
            else:
                self._end(*begun)
            del begun  # or an idle thread would keep the last work alive
        self._guard(self._close)

    def _end(self, batch: list[Item], slot: int, problem: str) -> None:
        try:
            if problem:  # its event may not have been recorded: wait until the stream is empty
                self._gpu.record(self._events[slot], self._streams[slot])
            problem = problem or self.broken
            self._gpu.wait(self._events[slot])
        except CudaError as error:
            self._note(error)
            problem = problem or str(error)
        try:
            self._worker.end(batch, problem)
        finally:
            self._slots.put(slot)

    def _close(self) -> None:
        self._worker.closed()
        for event in self._events:
            self._gpu.drop_event(event)
        for stream in self._streams:
            self._gpu.drop_stream(stream)

    def _note(self, error: CudaError) -> None:
        if error.sticky and not self.broken:
            self.broken = f"the device cannot be used any more by this process: {error}"
            log.error("[device-lost] %s: %s", self._name, self.broken)

    def _guard(self, action: Callable[[], None]) -> None:
        try:
            action()
        except CudaError as error:
            self._note(error)
            if not self.broken and len(self._events) < UNDER_WAY_MAX:
                self.broken = str(error)  # it never opened
            log.warning("[device-fault] %s: %s", self._name, error)
