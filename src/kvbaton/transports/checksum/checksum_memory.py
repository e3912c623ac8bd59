"""Memory that can be digested: the interface that checksums need, and its implementation for host memory.

Laws: `digest` returns at once and never touches memory on the caller's thread; `tell` is called once, from another,
with a digest for each row or with an error, unless this was closed. The caller has range-checked every row. Both sides
of a pair have the same `kind`: digests of two kinds cannot be compared.
"""

from __future__ import annotations

import ctypes
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

from kvbaton.transports.checksum.checksum_portions import PART_BYTES, PIECE_BYTES
from kvbaton.transports.core.shared_memory import RegisteredMemory
from kvbaton.transports.core.transport import Spans

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
