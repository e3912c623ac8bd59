"""Memory that can be digested: the interface that checksums need, and its implementation for host memory.

Laws: `digest` returns at once and never touches memory on the caller's thread; `tell` is called once, from another,
with a digest for each row or with an error, unless this was closed. The caller has range-checked every row. Both sides
of a pair have the same `kind`: digests of two kinds cannot be compared.

Which bytes of a copy are compared with the other side's, and in what portions. Pure functions.

Law: `full` covers every byte of a copy once; `sample` about one in sixteen, always with the first and the last piece.
The choice depends only on the copy and its job number, so a repetition selects the same bytes. Segments are compared
one by one, in pieces of bounded size: a difference can then be located, and no query is large.
"""

from __future__ import annotations

import ctypes
import enum
import importlib
import logging
import queue
import struct
import threading
import time
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, Protocol, TypeAlias

import msgspec
import numpy as np
import xxhash

from kvbaton.transports.core.jobs import Rows, as_spans, pieces_of
from kvbaton.transports.core.shared_memory import RegisteredMemory
from kvbaton.transports.core.transport import Copy, Spans
from kvbaton.transports.net.stream_socket import ROWS_MAX

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


Tell: TypeAlias = Callable[[bytes, str], None]
"""Little-endian digests, one for each row; or why there are none."""


class Portioning(msgspec.Struct, frozen=True):
    """How the compared bytes are divided."""

    piece_bytes: int = PIECE_BYTES
    part_bytes: int = PART_BYTES
    row_bytes_max: int = PART_BYTES + PIECE_BYTES  # in a peer's query

    @property
    def question_bytes_max(self) -> int:
        """More than an honest peer ever asks about at once: others wait in the same queue."""
        return self.part_bytes + self.piece_bytes


class Sums(Protocol):
    """The registered memory of one transport, as seen by digests."""

    kind: str
    portioning: Portioning

    def add(self, region: int, memory: Any) -> None: ...
    def size_of(self, region: int) -> int | None: ...
    def digest(self, region: int, spans: Spans, width: int, halt: bytearray, tell: Tell) -> None:
        """Rows of `width` numbers, offset first and bytes last. May end early, with undefined results, once
        `halt[0]`."""

    def close(self, join_s: float) -> bool:
        """Start nothing more; whether nothing touches memory any more within `join_s`."""


class HostSums:
    """Host memory, by xxh3 on its own threads."""

    kind = "host"
    portioning = Portioning()

    def __init__(self, name: str, threads: int) -> None:
        self.digesters = Digesters(name, threads)
        self.digests = digests
        self._memory = RegisteredMemory()

    def add(self, region: int, memory: memoryview) -> None:
        self._memory.add(region, memory)

    def size_of(self, region: int) -> int | None:
        memory = self._memory.get(region)
        return None if memory is None else memory.nbytes

    def digest(self, region: int, spans: Spans, width: int, halt: bytearray, tell: Tell) -> None:
        self.digesters.add(partial(self._run, self._memory.get(region), spans, width, halt, tell))

    def close(self, join_s: float) -> bool:
        stopped = self.digesters.close(join_s)
        if stopped:
            self._memory.clear()
        return stopped

    def _run(self, memory: memoryview | None, spans: Spans, width: int, halt: bytearray, tell: Tell) -> None:
        """On a digester."""
        try:
            found = self.digests(memory or memoryview(b""), spans, width, halt)
        except Exception as error:
            tell(b"", repr(error))
            raise
        tell(found, "")


log = logging.getLogger(__name__)

# xxhash holds the GIL while it digests a small buffer (64 KiB; not at 256), so digesting 16 KiB segments in a row makes
# every other thread wait out a switch interval, 5 ms, each time it wants to run. The library's C function, called past
# its Python wrapper, lets them run within 0.07 ms (docs/lab/2026-11-15-checksum.md). It is used where the shared object
# exports it (seen in the wheels of 3.5.0 for x86_64 and 4.1.0 for x86_64 and aarch64) and agrees with the wrapper.
# Delete this path when the wrapper releases the GIL for small buffers too.

ROWS_A_LOOK = 64
"""Rows that are digested between two looks at `halt`: 2 ms at the largest piece that is asked for here."""

_PROBE = bytes(range(256)) * 5


def digests(memory: memoryview, spans: Spans, width: int, halt: bytearray) -> bytes:
    """A little-endian digest for each row; ends early, with undefined results, once `halt[0]` is set."""
    found: list[int] = []
    for low in range(0, len(spans), ROWS_A_LOOK * width):
        if halt[0]:
            break
        rows = spans[low : low + ROWS_A_LOOK * width]
        found += _each(memory, zip(rows[0::width], rows[width - 1 :: width], strict=True))
    return struct.pack(f"<{len(found)}Q", *found)


def _each(memory: memoryview, rows: Iterable[tuple[int, int]]) -> list[int]:
    digest = _native
    if digest is None:
        return [xxhash.xxh3_64_intdigest(memory[at : at + size]) for at, size in rows]
    base = np.frombuffer(memory, np.uint8).__array_interface__["data"][0] if memory.nbytes else 0
    return [digest(base + at, size) for at, size in rows]


def _load() -> Callable[[int, int], int] | None:
    """The library's own function, if it is available and agrees with its wrapper."""
    try:
        library = ctypes.CDLL(importlib.import_module("xxhash._xxhash").__file__)
        function = library.XXH3_64bits
    except (ImportError, OSError, AttributeError) as error:
        log.info("digesting with the GIL held: %s", error)
        return None
    function.argtypes, function.restype = (ctypes.c_void_p, ctypes.c_size_t), ctypes.c_uint64
    probe = np.frombuffer(_PROBE, np.uint8).ctypes.data
    agrees = all(function(probe, size) == xxhash.xxh3_64_intdigest(_PROBE[:size]) for size in (0, 9, 200, len(_PROBE)))
    return function if agrees else None


_native = _load()


class Digesters:
    """Threads that digest memory, so that neither a loop nor an engine does; started by the first task, in order.

    Law: a digester touches memory only while it runs a task, and `close` waits, for a bounded time, for the current
    task. The task queue is bounded by its owners: by accepted copies on one side, by the window of each connection on
    the other.
    """

    def __init__(self, name: str, threads: int) -> None:
        self._name = name
        self._threads_max = threads
        self._threads: list[threading.Thread] = []
        self._due: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._closed = False

    def add(self, task: Callable[[], None]) -> None:
        """Run `task` soon; never, once this is closed."""
        with self._lock:
            if self._closed:
                return
            while len(self._threads) < self._threads_max:
                thread = threading.Thread(target=self._run, name=f"{self._name}-{len(self._threads)}", daemon=True)
                self._threads.append(thread)
                thread.start()
            self._due.put(task)

    def close(self, join_s: float) -> bool:
        """Start nothing more; whether all threads have ended within `join_s`. Idempotent."""
        with self._lock:
            self._closed = True
            threads = [thread for thread in self._threads if thread is not threading.current_thread()]
        for _ in self._threads:
            self._due.put(None)
        deadline = time.monotonic() + join_s
        for thread in threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        return not any(thread.is_alive() for thread in threads)

    def _run(self) -> None:
        while (task := self._due.get()) is not None:
            if self._closed:
                continue
            try:
                task()
            except Exception:
                log.exception("[digest-failed] a digest failed on %s", threading.current_thread().name)
