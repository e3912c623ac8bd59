"""The runner's work for staging: gather a chunk into a host slot, or scatter one from there.

Law: each is one launch and one copy, on one stream; the slot is whole, or the memory is, when it has ended.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from kvbaton.transports.core.transport import Spans
from kvbaton.transports.cuda.cuda_driver import CudaError, Gpu
from kvbaton.transports.cuda.cuda_launch import Tables
from kvbaton.transports.cuda.cuda_runner import UNDER_WAY_MAX, CudaRunner
from kvbaton.transports.cuda.cuda_table import LaunchGroup
from kvbaton.transports.staged.staged_slots import Slots


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
