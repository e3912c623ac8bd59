"""Enqueues a table of spans on a stream: written to pinned memory, and moved or digested by launches that read it.

Law: a table belongs to one slot, and a slot to one batch until it is done. A launch moves about `LAUNCH_BYTES`: between
two launches a kernel that waits for the whole device gets it. A large table is read in place, over the bus, which costs
no more than uploading it (1.10 against 1.11 ms for 64,000 rows on an H200); a small one is uploaded, since every block
of the grid reads from it.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import numpy as np

from kvbaton.transports.core.span_tables import Rows
from kvbaton.transports.cuda.cuda_driver import Gpu
from kvbaton.transports.cuda.cuda_table import GROUPS_MAX, TABLE_NUMBERS_MAX, LaunchGroup, write_table

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
