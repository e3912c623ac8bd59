"""Slots: ranges of pinned host memory through which device memory travels, each with a shadow on the device.

Spans are gathered into the shadow by one launch and go to the host in one piece (or come from there and are scattered),
because a copy engine moves contiguous memory at the full rate of the bus, both ways at once, while kernels compute.

Law: a slot belongs to one chunk at a time, and to one connection permanently. Late writes of a stopped peer land in a
slot of a closed connection, and nowhere else.
"""

from __future__ import annotations

import ctypes
import fcntl
import mmap

import numpy as np

from kvbaton.transports.core.shared_memory import Region, allocate
from kvbaton.transports.core.span_tables import Rows
from kvbaton.transports.core.transport import Spans
from kvbaton.transports.cuda.cuda_driver import Gpu
from kvbaton.transports.cuda.cuda_table import as_spans, divided

SLOTS_MAX = 64
SLOT_BYTES = range(1 << 20, (64 << 20) + 1)


class Slots:
    """Host memory for `count` chunks and, once opened, as much on the device."""

    def __init__(self, view: memoryview, slot_bytes: int, count: int) -> None:
        """ValueError for memory that is too small."""
        if view.nbytes < slot_bytes * count or slot_bytes not in SLOT_BYTES or not 2 <= count <= SLOTS_MAX:
            raise ValueError(f"{count} slots of {slot_bytes} bytes in {view.nbytes}")
        self.slot_bytes = slot_bytes
        self.count = count
        self._view = view
        self._address = ctypes.addressof(ctypes.c_char.from_buffer(view))
        self._device = 0

    def view(self, slot: int, size: int) -> memoryview:
        return self._view[slot * self.slot_bytes : slot * self.slot_bytes + size]

    def on_host(self, slot: int) -> int:
        return self._address + slot * self.slot_bytes

    def on_device(self, slot: int) -> int:
        return self._device + slot * self.slot_bytes

    def open(self, gpu: Gpu) -> None:
        """Pin them and get the shadows. Idempotent. CudaError. On the runner's thread."""
        if self._device:
            return
        size = self.slot_bytes * self.count
        gpu.pin(self._address, size)
        try:
            self._device = gpu.allocate(size)
        except BaseException:
            gpu.unpin(self._address)
            raise

    def close(self, gpu: Gpu) -> None:
        """Nothing is in flight in them. Idempotent. On the runner's thread."""
        if self._device:
            device, self._device = self._device, 0
            gpu.free(device)
            gpu.unpin(self._address)


def allocate_slots(slot_bytes: int, count: int) -> tuple[Slots, Region]:
    """Slots of our own, and the memfd that lets another process map the same."""
    region = allocate(slot_bytes * count)
    return Slots(region.view, slot_bytes, count), region


def map_slots(fd: int, slot_bytes: int, count: int) -> Slots:
    """The slots of another process. ValueError or OSError for what cannot be them."""
    if not fcntl.fcntl(fd, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK:
        raise ValueError("the slots could shrink while they are used: the descriptor is not sealed")
    return Slots(memoryview(mmap.mmap(fd, 0, mmap.MAP_SHARED)), slot_bytes, count)


def gather_rows(spans: Spans, width: int) -> Spans:
    """(packed offset, local offset, bytes) of spans of `width`, pairs or triples: one behind the other."""
    offsets, packed, sizes = _columns(spans, width)
    return as_spans(divided(np.stack((packed, offsets, sizes), axis=1)))


def scatter_rows(spans: Spans, width: int) -> Spans:
    """The way back: (local offset, packed offset, bytes)."""
    return as_spans(divided(np.stack(_columns(spans, width), axis=1)))


def _columns(spans: Spans, width: int) -> tuple[Rows, Rows, Rows]:
    """Local offsets, where each begins when they are packed, and bytes."""
    table = np.frombuffer(spans, np.int64).reshape(-1, width)
    sizes = table[:, -1]
    return table[:, 0], np.cumsum(sizes) - sizes, sizes
