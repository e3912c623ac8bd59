"""The workload of the device benchmark: blocks of 64 segments of 32 KiB, scattered over a cache in device memory.

Law: nothing is right by chance. The source holds a different word at every place; a target is wiped before it is
judged, and every byte of it is: those that were asked for, and those that were not.
"""

from __future__ import annotations

import ctypes
import random
import time
from array import array
from collections.abc import Sequence

import numpy as np

from kvbaton.protocol.geometry.spans import Weave
from kvbaton.transports.core.shared_memory import DeviceMemory
from kvbaton.transports.core.transport import Spans
from kvbaton.transports.cuda.cuda_driver import SHARE, CudaGpu

SEGMENT_BYTES = 32 << 10
SEGMENTS = 64
BLOCK_BYTES = SEGMENTS * SEGMENT_BYTES
BLOCKS = 1101  # block 0 is nobody's
COUNTS = (16, 128, 1000)
REGION_BYTES = BLOCKS * BLOCK_BYTES
DEVICE = 0

Words = np.ndarray[tuple[int, ...], np.dtype[np.int64]]


def blocks_of(seed: int, count: int) -> list[int]:
    return random.Random(seed).sample(range(1, BLOCKS), count)


def spans_of(source: Sequence[int], target: Sequence[int]) -> Spans:
    """(target offset, source offset, bytes) of every segment of every pair of blocks."""
    layers = np.arange(SEGMENTS)[:, None] * BLOCKS
    to, at = layers + np.array(target), layers + np.array(source)
    rows = np.stack((to.ravel(), at.ravel(), np.ones(to.size, np.int64)), axis=1) * SEGMENT_BYTES
    spans = array("q")
    spans.frombytes(rows.astype(np.int64).tobytes())
    return spans


def weave_of(source: Sequence[int], target: Sequence[int]) -> Weave:
    """The same in product form: every pair of blocks, in every layer."""
    column, shifts = array("q"), array("q")
    for at, to in zip(source, target, strict=True):
        column.extend((to * SEGMENT_BYTES, at * SEGMENT_BYTES, SEGMENT_BYTES))
    for layer in range(SEGMENTS):
        shifts.extend((layer * BLOCKS * SEGMENT_BYTES,) * 2)
    return Weave(column, shifts)


def pattern() -> Words:
    """By layer, block and word: no two words are equal."""
    words = np.arange(REGION_BYTES // 8, dtype=np.int64)
    words *= np.int64(0x1E3779B97F4A7C15)
    return words.reshape(SEGMENTS, BLOCKS, -1)


class TimedGpu(CudaGpu):
    """A device that also times its launches, by its own clock."""

    def __init__(self, device: int, share: float = SHARE, ptx: str = "") -> None:
        super().__init__(device, share, ptx)
        with self:
            self._before, self._after = (self._make("cuEventCreate", 0) for _ in range(2))

    def move_rows(self, table: int, groups: int, rows: range, stream: int) -> None:
        if not rows.start:  # the first of the launches that move one table
            self.record(self._before, stream)
        super().move_rows(table, groups, rows, stream)
        self.record(self._after, stream)

    def digest_rows(self, table: int, groups: int, rows: range, stream: int) -> None:
        self.record(self._before, stream)
        super().digest_rows(table, groups, rows, stream)
        self.record(self._after, stream)

    def timed_copy(self, target: int, source: int, nbytes: int, stream: int) -> None:
        self.record(self._before, stream)
        self.copy(target, source, nbytes, stream)
        self.record(self._after, stream)

    def told(self) -> str:
        """What device this is, and which CUDA its driver speaks."""
        name, version = ctypes.create_string_buffer(256), ctypes.c_int()
        self._ask("cuDeviceGetName", name, len(name), self.device)
        self._ask("cuDriverGetVersion", ctypes.byref(version))
        return f"{name.value.decode()}, CUDA {version.value // 1000}.{version.value % 1000 // 10}"

    def last_ms(self) -> float:
        """How long the device worked on the last launch or copy that was timed. It is over."""
        took = ctypes.c_float()
        self._ask("cuEventElapsedTime", ctypes.byref(took), *map(ctypes.c_void_p, (self._before, self._after)))
        return took.value


class Cache:
    """A cache in device memory, as one region."""

    def __init__(self, gpu: CudaGpu) -> None:
        self._gpu = gpu
        with gpu:
            self.address = gpu.allocate(REGION_BYTES)
            self._stream, self._event = gpu.stream(), gpu.event()
            self._host = gpu.allocate_pinned(REGION_BYTES)
        held = (ctypes.c_char * REGION_BYTES).from_address(self._host)
        self._words: Words = np.frombuffer(memoryview(held), np.int64).reshape(SEGMENTS, BLOCKS, -1)

    @property
    def memory(self) -> DeviceMemory:
        return DeviceMemory(self.address, REGION_BYTES, DEVICE)

    def fill(self, words: Words) -> None:
        self._words[:] = words
        self.copy(self.address, self._host, REGION_BYTES)

    def wipe(self) -> None:
        self._words[:] = 0
        self.copy(self.address, self._host, REGION_BYTES)

    def holds(self, words: Words, source: Sequence[int], target: Sequence[int]) -> bool:
        """Whether `target` blocks hold what `source` blocks hold in `words`, and all others nothing."""
        self.copy(self._host, self.address, REGION_BYTES)
        others = np.setdiff1d(np.arange(BLOCKS), np.array(target))
        for layer in range(SEGMENTS):
            if not np.array_equal(self._words[layer, target], words[layer, source]) or self._words[layer, others].any():
                return False
        return True

    def begins_with(self, words: Words, nbytes: int) -> bool:
        """Whether the first bytes are those of `words`: after a contiguous copy."""
        self.copy(self._host, self.address, nbytes)
        return np.array_equal(self._words.ravel()[: nbytes // 8], words.ravel()[: nbytes // 8])

    def copy(self, target: int, source: int, nbytes: int) -> float:
        """One contiguous copy, waited for; how long that took, in seconds."""
        with self._gpu as gpu:
            begun = time.perf_counter()
            if isinstance(gpu, TimedGpu):
                gpu.timed_copy(target, source, nbytes, self._stream)
            else:
                gpu.copy(target, source, nbytes, self._stream)
            gpu.record(self._event, self._stream)
            gpu.wait(self._event)
            return time.perf_counter() - begun
