"""The embedded backend: values in host memory, evicted least recently used, to disk if there is a disk tier.

Laws: at most `bytes_max` of values are in memory at any time, whatever is put, and beside them at most a quarter of
that, or `SPARE_BYTES_MAX`, for the next ones. The lock is held for lookups only, not while bytes are copied or files
written. A stored value never changes, so readers need no lock on it.
"""

from __future__ import annotations

import threading
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import numpy as np

from kvbaton.store.disk_tier import DiskTier
from kvbaton.store.value_header import FRAME_BYTES

Value: TypeAlias = bytes | memoryview
KEY_COST_BYTES = 512  # overhead of an entry, so that many small ones are bounded too
SPARE_BYTES_MAX = 64 << 20
SPARE_SHARE = 4


class MemoryBackend:
    """Implements `Backend`; several stores of one process may share it."""

    lands_late = False

    def __init__(self, bytes_max: int, disk: DiskTier | None = None) -> None:
        if bytes_max < 1:
            raise ValueError(f"bytes_max: {bytes_max}; give the memory that values may take")
        self.counters: Counter[str] = Counter()
        self._bytes_max = bytes_max
        self.spare = SpareRoom(min(SPARE_BYTES_MAX, bytes_max // SPARE_SHARE))
        self._disk = disk
        self._lock = threading.Lock()
        self._values: OrderedDict[str, Value] = OrderedDict()  # the least recently used first
        self._bytes = 0

    @property
    def bytes_used(self) -> int:
        return self._bytes

    def __len__(self) -> int:
        return len(self._values)

    def register(self, memory: memoryview) -> None:
        pass

    def exists(self, keys: Sequence[str]) -> list[bool]:
        with self._lock:
            here = [key in self._values for key in keys]
            for key in keys:
                if key in self._values:
                    self._values.move_to_end(key)  # a lookup is followed by a get
        if self._disk is None:
            return here
        return [is_here or self._disk.has(key) for key, is_here in zip(keys, here, strict=True)]

    def put(self, keys: Sequence[str], values: Sequence[memoryview]) -> list[str]:
        return [self.adopt(key, bytes(value)) for key, value in zip(keys, values, strict=True)]

    def adopt(self, key: str, value: Value) -> str:
        """Put without a copy: the caller no longer uses `value`, and never changes it."""
        return "" if self._keep(key, value) else TOO_LARGE

    def value(self, key: str) -> Value | None:
        """Get without a copy: the result must not be changed."""
        with self._lock:
            value = self._values.get(key)
            if value is not None:
                self._values.move_to_end(key)
        if value is None and self._disk is not None:
            value = self._disk.read(key)
            if value is not None:
                self._keep(key, value)
        self.counters["hits" if value is not None else "misses"] += 1
        return value

    def get(self, keys: Sequence[str], into: Sequence[memoryview]) -> list[int]:
        return [self._read(key, buffer) for key, buffer in zip(keys, into, strict=True)]

    def discard(self, keys: Sequence[str]) -> None:
        with self._lock:
            for key in keys:
                self._drop(key)
        for key in keys:
            if self._disk is not None:
                self._disk.discard(key)

    def sweep(self, believes: Callable[[memoryview], bool]) -> int:
        """Drop values whose header is of somebody who is gone, here and on disk; returns how many. May take a while."""
        with self._lock:
            values = list(self._values.items())
        bad = [key for key, value in values if not believes(memoryview(value)[:FRAME_BYTES])]
        with self._lock:
            for key in bad:
                self._drop(key)
        on_disk = self._disk.sweep(believes, FRAME_BYTES) if self._disk is not None else 0
        self.counters["swept"] += len(bad) + on_disk
        return len(bad) + on_disk

    def close(self) -> None:
        """Memory is lost; with a disk tier its contents are there when this is opened again."""
        with self._lock:
            left, self._values, self._bytes = self._values, OrderedDict(), 0
        if self._disk is not None:
            for key, value in left.items():
                self._disk.write(key, value)
            self._disk.close()

    def _read(self, key: str, buffer: memoryview) -> int:
        value = self.value(key)
        if value is None or len(value) > buffer.nbytes:
            return 0 if value is None else len(value)  # too long for what was expected: the reader sees it
        buffer[: len(value)] = value
        return len(value)

    def _keep(self, key: str, value: Value) -> bool:
        cost = len(value) + KEY_COST_BYTES
        if cost > self._bytes_max:
            return False
        with self._lock:
            self._drop(key)
            evicted = []
            while self._bytes + cost > self._bytes_max:
                old, gone = self._values.popitem(last=False)
                self._bytes -= len(gone) + KEY_COST_BYTES
                evicted.append((old, gone))
            self._values[key] = value
            self._bytes += cost
        self.counters["evicted"] += len(evicted)
        if self._disk is not None:
            for old, gone in evicted:
                self._disk.write(old, gone)
        return True

    def _drop(self, key: str) -> None:
        value = self._values.pop(key, None)
        if value is not None:
            self._bytes -= len(value) + KEY_COST_BYTES


class _Room(np.ndarray[Any, np.dtype[np.uint8]]):
    """One value's memory, which is spare when the last view of it is gone."""

    spare: SpareRoom | None = None

    def __del__(self) -> None:
        if self.spare is not None and self.base is not None:
            self.spare.give(self.base)


class SpareRoom:
    """Memory of values that are gone, for the next ones: the kernel zeroes fresh memory, which is half of a put's time.

    Law: memory is handed out again only when nobody can see it, since its last view has given it back.
    """

    def __init__(self, bytes_max: int) -> None:
        self._bytes_max = bytes_max
        self.bytes = 0
        self._lock = threading.RLock()  # a view may go in the middle of this
        self._by_size: dict[int, list[Any]] = {}

    def take(self, size: int) -> memoryview:
        """Memory for a value that is about to be written in full."""
        with self._lock:
            found = self._by_size.get(size)
            memory = found.pop() if found else None
            if memory is not None:
                self.bytes -= size
        if memory is None:
            memory = np.empty(size, np.uint8)
        view = memory.view(_Room)
        view.spare = self
        return view.data

    def give(self, memory: Any) -> None:
        with self._lock:
            if self.bytes + memory.nbytes > self._bytes_max:
                self._by_size.clear()  # perhaps of sizes that do not come any more
                self.bytes = 0
            if memory.nbytes <= self._bytes_max:
                self._by_size.setdefault(memory.nbytes, []).append(memory)
                self.bytes += memory.nbytes


TOO_LARGE = "the value alone is larger than the store's memory"
