"""Digests of device memory, computed by the device: one launch reads the bytes of many queries in place.

Laws: only digests leave the device. A launch takes at most `BATCH_MAX` queries, and the digests of a batch stay in its
slot until they are delivered. Kernels share the bounded part of the device that copies use (`cuda_driver`).
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import numpy as np

from kvbaton.transports.checksum.checksum_memory import Portioning, Tell
from kvbaton.transports.core.jobs import as_spans
from kvbaton.transports.core.shared_memory import DeviceMemory, RegisteredDevice
from kvbaton.transports.core.transport import Spans
from kvbaton.transports.cuda.cuda_driver import SHARE, CudaGpu, Gpu
from kvbaton.transports.cuda.cuda_runner import UNDER_WAY_MAX, CudaRunner, LaunchGroup, Tables
from kvbaton.transports.net.stream_socket import ROWS_MAX

BATCH_MAX = 16
"""Questions in one launch: 512 KiB of digests at most."""

PIECE_BYTES = 64 << 10
"""A row is read by one warp: so long, and no longer, that a small handoff has rows for all of them."""

PART_BYTES = 48 << 20
"""Bytes in one question: 0.05 ms of an H200, where asking takes longer. A frame's bound is 64 MiB."""


@dataclass(slots=True, eq=False)
class DueDigest:
    """The digests of some rows of one region."""

    memory: DeviceMemory
    spans: Spans
    width: int
    halt: bytearray
    tell: Tell
    address: int = 0  # of its digests, while it is on the device

    @property
    def rows(self) -> int:
        return len(self.spans) // self.width


class DeviceSums:
    """See `checksum_memory.Sums` and `cuda_runner.Worker`. Two threads, started by the first query."""

    kind = "device"
    portioning = Portioning(PIECE_BYTES, PART_BYTES, PIECE_BYTES)

    def __init__(self, name: str, device: int, share: float = SHARE, gpu: Gpu | None = None) -> None:
        """ImportError without a driver, CudaError without a device; `gpu` is for tests."""
        self._gpu = gpu or CudaGpu(device, share)
        self._memory = RegisteredDevice(device)
        self._tables = Tables(self._gpu, UNDER_WAY_MAX)
        self._found = [0] * UNDER_WAY_MAX  # by slot: pinned memory that the device writes digests to
        self._runner: CudaRunner[DueDigest] = CudaRunner(name, self._gpu, self, BATCH_MAX)

    def add(self, region: int, memory: DeviceMemory) -> None:
        self._memory.add(region, memory)

    def size_of(self, region: int) -> int | None:
        memory = self._memory.get(region)
        return None if memory is None else memory.nbytes

    def digest(self, region: int, spans: Spans, width: int, halt: bytearray, tell: Tell) -> None:
        memory = self._memory.get(region)
        if memory is None or len(spans) > ROWS_MAX * width:
            raise ValueError(f"{len(spans) // width} rows of region {region}: more than {ROWS_MAX}, or not registered")
        self._runner.add(DueDigest(memory, spans, width, halt, tell))

    def close(self, join_s: float) -> bool:
        stopped = self._runner.close(join_s)
        if stopped:
            self._memory.clear()
        return stopped

    def begin(self, batch: list[DueDigest], slot: int, stream: int) -> list[DueDigest]:
        if not self._found[slot]:
            self._found[slot] = self._gpu.allocate_pinned(DIGEST_BYTES * ROWS_MAX * BATCH_MAX)
        groups, address = list[LaunchGroup](), self._found[slot]
        for due in batch:
            if due.halt[0]:  # no longer wanted
                continue
            due.address = address
            groups.append(LaunchGroup(address, due.memory.address, _rows(due)))
            address += DIGEST_BYTES * due.rows
        self._tables.digest(groups, slot, stream)
        return batch

    def end(self, batch: list[DueDigest], problem: str) -> None:
        for due in batch:
            if problem or not due.address:
                due.tell(b"", problem or "no longer wanted")
            else:
                due.tell(ctypes.string_at(due.address, DIGEST_BYTES * due.rows), "")

    def closed(self) -> None:
        self._tables.clear()
        for address in self._found:
            if address:
                self._gpu.free_pinned(address)
        self._found = [0] * UNDER_WAY_MAX


def _rows(due: DueDigest) -> Spans:
    """(where its digest goes, offset, bytes) of each row."""
    told = np.frombuffer(due.spans, np.int64).reshape(-1, due.width)
    return as_spans(np.stack((DIGEST_BYTES * np.arange(len(told)), told[:, 0], told[:, -1]), axis=1))


# The digest of a range: 64-bit words, little-endian, the last padded with zeros. Each is combined with a key made of
# its position (position + 1, times 0x9E3779B97F4A7C15) and put through a mixer, and all are added, with the length,
# modulo 2**64. For a fixed position the mixer is one to one, so a change within one word always changes the digest.
# Several changes cancel only by chance, one time in 2**64; so do words that swapped positions. Addition in any order
# gives the same result, which lets thousands of threads share the work. It detects accidents, no attacker who chooses
# the bytes: knowing the mixer, one can find two inputs with one digest. A peer's data is authenticated by other means.

DIGEST_BYTES = 8
_WEYL = np.uint64(0x9E3779B97F4A7C15)
_FIRST, _SECOND = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)
_HALF = np.uint64(32)


def digest_of(data: bytes | bytearray | memoryview) -> int:
    """The reference: bit for bit the device's result."""
    text = bytes(data)
    words = np.frombuffer(text + bytes(-len(text) % 8), "<u8").astype(np.uint64)
    mixed = words ^ np.arange(1, len(words) + 1, dtype=np.uint64) * _WEYL
    for factor in (_FIRST, _SECOND):
        mixed ^= mixed >> _HALF
        mixed *= factor
    mixed ^= mixed >> _HALF
    return (int(mixed.sum(dtype=np.uint64)) + len(text)) % (1 << 64)
