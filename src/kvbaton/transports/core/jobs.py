"""Accepted copies: counts them, ends each exactly once, and keeps the events until they are drained.

Law: an accepted copy ends when none of its parts is left to start and none is in flight, by one `CopyEnded`. Only
`abandon` ends it earlier, with `at_rest=False`; then one `CopyRested` follows when its last part has come to rest, or
none at all if that could not be proven. The waker is called without the lock, when the event list was empty before.

Tables of spans, which copies are of: divided into parts, and in their wire form. Pure functions. Law: the parts of a
copy cover exactly its bytes, once, in order. Tables are `array('q')`: triples (local offset, remote offset, bytes) at
home, pairs (remote offset, bytes) on the wire.

A thread that runs on calls, and in between polls things that do not report by themselves.

Law: the work of a turn is done by this thread only. It sleeps for as long as `patience` says, forever on None, and any
call wakes it. The first call starts it, so that a transport that is merely listed costs no thread.
"""

from __future__ import annotations

import itertools
import logging
import queue
import sys
import threading
from array import array
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np

from kvbaton.protocol.errors import Reason
from kvbaton.protocol.ids import JobId, PeerId
from kvbaton.transports.core.transport import Copy, CopyEnded, CopyRested, Spans, TransportEvent

log = logging.getLogger(__name__)

AGAIN_S, AGAIN_S_MAX = 0.001, 0.25
LENT_WAIT_S = 2.0
"""How long blocks that are not lent are asked for again, ever less often. The link to a rank takes a fraction of a
millisecond, unless the machine stands still."""


@dataclass(slots=True, eq=False)
class CopyJob:
    """One accepted copy."""

    copy: Copy
    parts: deque[Spans] = field(default_factory=deque)  # not begun
    live: int = 0  # begun and not at rest
    reason: Reason | None = None
    detail: str = ""
    ended: bool = False
    lost: bool = False  # it cannot be proven that some part is at rest
    halt: bytearray = field(default_factory=lambda: bytearray(1))  # read by movers while they copy
    refused_at: float = 0.0  # when the peer first refused this memory as not lent


class Jobs:
    """The accepted copies of one transport. `with jobs:` holds its lock, which may be nested."""

    def __init__(self, copies_max: int) -> None:
        self._copies_max = copies_max
        self._lock = threading.RLock()
        self._depth = 0
        self._open = 0  # accepted, end not drained: bounds the events as well
        self._jobs: dict[JobId, CopyJob] = {}
        self._news: list[TransportEvent] = []
        self._ring = False
        self._closed = False
        self._waker: Callable[[], None] | None = None

    def __enter__(self) -> Jobs:
        self._lock.acquire()
        self._depth += 1
        return self

    def __exit__(self, *_: object) -> None:
        # Only the outermost exit calls the waker, after the lock is free: a waker takes other locks, under which others
        # call us, and one call while the list was empty is enough for all events until it is drained.
        self._depth -= 1
        ring = self._ring and not self._depth
        if ring:
            self._ring = False
        waker = self._waker
        self._lock.release()
        if ring and waker is not None:
            try:
                waker()
            except Exception:
                log.warning("[waker-failed] the waker raised", exc_info=True)

    @property
    def has_room(self) -> bool:
        return self._open < self._copies_max and not self._closed

    def accept(self, copy: Copy) -> CopyJob | None:
        """A new job, or None at the bound."""
        with self:
            if copy.job in self._jobs:
                raise ValueError(f"job {copy.job} is already in flight")
            if not self.has_room:
                return None
            self._open += 1
            job = self._jobs[copy.job] = CopyJob(copy)
            return job

    def find(self, job: JobId) -> CopyJob | None:
        return self._jobs.get(job)

    def of_peer(self, peer: PeerId | None = None) -> list[CopyJob]:
        """Jobs that have not ended: of one peer, or all."""
        with self:
            return [job for job in self._jobs.values() if peer is None or job.copy.peer == peer]

    def begin(self, job: CopyJob) -> Spans | None:
        """The next part, now in flight; None when none is left."""
        with self:
            if not job.parts:
                return None
            job.live += 1
            return job.parts.popleft()

    def part_ended(self, job: CopyJob, reason: Reason | None = None, detail: str = "", rested: bool = True) -> None:
        """A started part is over; a reason fails the whole job. `rested` False: bytes may still land at any time."""
        with self:
            job.live -= 1
            job.lost |= not rested
            if reason is not None:
                self._stop(job, reason, detail)
            self.settle(job)

    def forgive(self, job: CopyJob) -> None:
        """The unproven rest no longer matters to anything: ends as at rest."""
        with self:
            if job.lost:
                job.lost = False
                self.settle(job)

    def fail(self, job: CopyJob, reason: Reason, detail: str = "") -> None:
        """The only way to fail: start no further part; ends when none is in flight."""
        with self:
            if not job.ended:
                self._stop(job, reason, detail)
                self.settle(job)

    def abandon(self, job: CopyJob, reason: Reason, detail: str = "") -> None:
        """Fail, and end now even if parts are in flight: `at_rest` is then False."""
        with self:
            if job.ended:
                return
            # The caller must not wait for the peer; but memory that a part may still touch stays out of use. So the end
            # is reported now with `at_rest=False`, and the last part to come to rest reports `CopyRested` (`settle`).
            self._stop(job, reason, detail)
            self._end(job, at_rest=not job.live and not job.lost)

    def settle(self, job: CopyJob) -> None:
        """End `job` if nothing of it is left."""
        with self:
            if job.parts or job.live:
                return
            # Nothing is in flight. Either this is the end, or the end was reported earlier (`abandon`) and this is the
            # rest. A lost part proves nothing: then no `CopyRested` follows, since a guess would free memory that is
            # still written to.
            if not job.ended:
                self._end(job, at_rest=not job.lost)
            elif not job.lost:
                self.post(CopyRested(job.copy.job))

    def post(self, event: TransportEvent) -> None:
        with self:
            self._ring |= not self._news
            self._news.append(event)

    def loan_ended(self, event: CopyEnded) -> None:
        """A loan is not a copy accepted here, but its end is drained like one."""
        with self:
            self._open += 1
            self.post(event)

    def again_s(self, job: CopyJob, now: float) -> float | None:
        """In how many seconds to retry a part that the peer would not lend; None: no more.

        The loan may still be on its way to the process that serves it when our request is already there.
        """
        with self:
            job.refused_at = job.refused_at or now
            waited_s = now - job.refused_at
            return None if waited_s >= LENT_WAIT_S or job.ended else min(max(waited_s, AGAIN_S), AGAIN_S_MAX)

    def put_back(self, job: CopyJob, spans: Spans) -> None:
        """A started part is no longer in flight, and is to be started again."""
        with self:
            job.live -= 1
            if not job.reason and not job.ended:
                job.parts.append(spans)
            self.settle(job)

    def drain(self) -> list[TransportEvent]:
        with self:
            news, self._news = self._news, []
            self._open -= sum(isinstance(event, CopyEnded) for event in news)
            return news

    def set_waker(self, waker: Callable[[], None]) -> None:
        with self:
            self._waker = waker
            self._ring |= bool(self._news)

    def close(self) -> bool:
        """Accept nothing more; True the first time."""
        with self:
            first, self._closed = not self._closed, True
            return first

    def _stop(self, job: CopyJob, reason: Reason, detail: str) -> None:
        if job.reason is None:
            job.reason, job.detail = reason, detail
        job.parts.clear()
        job.halt[0] = 1

    def _end(self, job: CopyJob, at_rest: bool) -> None:
        job.ended = True
        self._jobs.pop(job.copy.job, None)
        self.post(CopyEnded(job.copy.job, job.reason, at_rest, job.detail))


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
    table = np.frombuffer(spans, np.int64).reshape(-1, 3)
    rows = pieces_of(table, part_bytes.start)
    if rows is not table:
        spans = as_spans(rows)
    ends = np.cumsum(rows[:, 2])
    edges = np.searchsorted(ends, np.arange(size, total_bytes, size), side="left") + 1
    edges = np.union1d(edges, np.arange(rows_max, len(rows), rows_max))
    bounds = [0, *edges.tolist(), len(rows)]
    return deque(spans[3 * low : 3 * high] for low, high in itertools.pairwise(bounds) if low < high)


def pieces_of(rows: Rows, piece_bytes: int) -> Rows:
    """The same bytes in rows of at most `piece_bytes`, none of them empty."""
    if not len(rows) or (rows[:, 2].max() <= piece_bytes and rows[:, 2].all()):
        return rows
    pieces = -(-rows[:, 2] // piece_bytes)
    owner = np.repeat(np.arange(len(rows)), pieces)
    offset = (np.arange(len(owner)) - np.repeat(np.cumsum(pieces) - pieces, pieces)) * piece_bytes
    sizes = np.minimum(rows[owner, 2] - offset, piece_bytes)
    return np.stack((rows[owner, 0] + offset, rows[owner, 1] + offset, sizes), axis=1)


def as_spans(rows: Rows) -> Spans:
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


class TurnThread:
    """`begin` once, `turn` after every wake-up; after `stop`, turns for as long as `lingers`, then `end` once."""

    def __init__(
        self,
        name: str,
        turn: Callable[[], None],
        patience: Callable[[], float | None],
        lingers: Callable[[], bool],
        end: Callable[[], None],
        begin: Callable[[], None] = lambda: None,
    ) -> None:
        self._begin = begin
        self._turn = turn
        self._patience = patience
        self._lingers = lingers
        self._end = end
        self._calls: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._starting = threading.Lock()
        self.stopping = False

    def call(self, action: Callable[[], None]) -> None:
        """From any thread."""
        self._calls.put(action)
        with self._starting:
            if self._thread.ident is None:
                self._thread.start()

    def stop(self, join_s: float) -> bool:
        """Whether it has ended after `join_s`."""
        self.call(self._stop)
        if threading.current_thread() is not self._thread:
            self._thread.join(join_s)
        return not self._thread.is_alive()

    def _stop(self) -> None:
        self.stopping = True

    def _run(self) -> None:
        self._begin()
        while not self.stopping:
            self._wake_up()
        while self._lingers():
            self._wake_up()
        self._end()

    def _wake_up(self) -> None:
        patience_s = self._patience()
        try:
            self._calls.get(patience_s != 0, patience_s)()
            while True:
                self._calls.get_nowait()()
        except queue.Empty:
            pass
        self._turn()
