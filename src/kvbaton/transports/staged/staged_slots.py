"""Slots: ranges of pinned host memory through which device memory travels, each with a shadow on the device.

Spans are gathered into the shadow by one launch and go to the host in one piece (or come from there and are scattered),
because a copy engine moves contiguous memory at the full rate of the bus, both ways at once, while kernels compute.

Law: a slot belongs to one chunk at a time, and to one connection permanently. Late writes of a stopped peer land in a
slot of a closed connection, and nowhere else.

The runner's work for staging: gather a chunk into a host slot, or scatter one from there.

Law: each is one launch and one copy, on one stream; the slot is whole, or the memory is, when it has ended.
"""

from __future__ import annotations

import ctypes
import fcntl
import mmap
from collections.abc import Callable

import msgspec
import numpy as np

from kvbaton.transports.core.jobs import Rows, as_spans
from kvbaton.transports.core.shared_memory import Region, allocate
from kvbaton.transports.core.transport import Spans
from kvbaton.transports.cuda.cuda_driver import CudaError, Gpu
from kvbaton.transports.cuda.cuda_runner import UNDER_WAY_MAX, CudaRunner, LaunchGroup, Tables, divided

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


class StagedChunk(msgspec.Struct, frozen=True):
    """A stretch of device memory on its way through a slot. `rows` count from `address` and from the slot."""

    slots: Slots
    slot: int
    size: int
    address: int
    rows: Spans
    gathers: bool
    ended: Callable[[str], None]  # "" or what went wrong; on the runner's thread


class Stager:
    """See `cuda_runner.Worker`."""

    def __init__(self, name: str, gpu: Gpu) -> None:
        self._gpu = gpu
        self._tables = Tables(gpu, UNDER_WAY_MAX)
        self._runner: CudaRunner[StagedChunk] = CudaRunner(name, gpu, self, 1)

    @property
    def broken(self) -> str:
        return self._runner.broken

    def add(self, chunk: StagedChunk) -> None:
        self._runner.add(chunk)

    def open(self, slots: Slots, then: Callable[[str], bool], unwanted: Callable[[], None] = lambda: None) -> None:
        """Pin `slots`, then call `then` with "" or an error, on a thread of the runner's. It returns whether they are
        wanted; otherwise they are released at once, and `unwanted` is called."""

        def pin() -> None:
            try:
                slots.open(self._gpu)
            except CudaError as error:
                then(str(error))
                raise
            if not then(""):
                slots.close(self._gpu)
                unwanted()

        self._runner.first(pin)

    def release(self, slots: Slots, then: Callable[[], None]) -> None:
        """Release `slots` once nothing is in flight in them."""

        def close() -> None:
            slots.close(self._gpu)
            then()

        self._runner.after(close)

    def after(self, then: Callable[[], None]) -> None:
        """Call `then` once all that was added before has ended."""
        self._runner.after(then)

    def close(self, join_s: float) -> bool:
        return self._runner.close(join_s)

    def begin(self, batch: list[StagedChunk], slot: int, stream: int) -> list[StagedChunk]:
        for chunk in batch:
            slots = chunk.slots
            host, device = slots.on_host(chunk.slot), slots.on_device(chunk.slot)
            if chunk.gathers:
                self._tables.launch([LaunchGroup(device, chunk.address, chunk.rows)], slot, stream)
                self._gpu.copy(host, device, chunk.size, stream)
            else:
                self._gpu.copy(device, host, chunk.size, stream)
                self._tables.launch([LaunchGroup(chunk.address, device, chunk.rows)], slot, stream)
        return batch

    def end(self, batch: list[StagedChunk], problem: str) -> None:
        for chunk in batch:
            chunk.ended(problem)

    def closed(self) -> None:
        self._tables.clear()
