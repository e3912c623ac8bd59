"""One rank's access to the store where the rank's memory is on a device. Implements `RankStoreInterface`.

Blocks travel through slots of pinned memory, a few at a time: a put gathers them into a slot with one launch and stores
the slot, a get fetches into a slot and scatters with one launch. To the store below (`rank_store`) the slots are the
engine's memory.

Laws: blocks of a put are complete on the device when it is ordered; blocks of a get are complete when its order ends. A
slot belongs to one order from its first block to its end, gets and puts have separate slots, and an order that waits
for one ends by its timeout. An order ends when neither the store nor the device touches its memory any more: a launch
cannot be stopped, but it finishes within milliseconds. Everything is decided on the calling thread; other threads only
queue a callback and wake it. Slots are pinned by the first order that needs one, and released by `close` at the latest.
"""

from __future__ import annotations

import itertools
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Literal

import numpy as np

from kvbaton.protocol.errors import Reason
from kvbaton.ranks.rank_store import LocalRankStore, NotStorable, RankValues, Run, rank_store_settings
from kvbaton.ranks.store_trust import RankStoreTrust
from kvbaton.store.interface import Backend, OrderEnded, OrderId
from kvbaton.transports.core.jobs import as_spans
from kvbaton.transports.core.shared_memory import DeviceMemory
from kvbaton.transports.core.transport import Spans
from kvbaton.transports.cuda.cuda_driver import Gpu
from kvbaton.transports.cuda.cuda_runner import PIECE_BYTES, ROWS_MAX, divided
from kvbaton.transports.staged.staged_slots import SLOT_BYTES, StagedChunk, Stager, allocate_slots

Kind = Literal["get", "put"]

SLOT_BYTES_WANTED = 16 << 20
"""Some 0.3 ms of a bus; four slots are 64 MiB of the host and as much of the device."""
SLOTS = {"get": (0, 1), "put": (2, 3)}
CLOSE_S = 5.0


class StagingShape:
    """The layout of blocks in slots, and the tables that move them. ValueError for values that no slot can hold."""

    def __init__(self, values: RankValues, memory: Sequence[DeviceMemory]) -> None:
        size = values.space.value_bytes
        if size not in range(1, SLOT_BYTES.stop):
            raise NotStorable(f"a block has {size} bytes on this rank; on a device at most {SLOT_BYTES.stop - 1}")
        for run in values.runs:
            last = run.offset + (values.block_count - 1) * run.block_stride + run.bytes
            if run.offset < 0 or last > memory[run.region].nbytes:
                raise ValueError(f"region {run.region} ends before its last block")
        rows = sum(-(-run.bytes // PIECE_BYTES) for run in values.runs)
        self.value_bytes = size
        self.per_slot = max(1, min(SLOT_BYTES_WANTED // size, ROWS_MAX // rows))
        self.stride = max(self.per_slot, -(-SLOT_BYTES.start // size))  # blocks from one slot to the next
        self.slot_bytes = self.stride * size
        self.base = min(each.address for each in memory)
        self.block_count = values.block_count
        sizes = np.array([run.bytes for run in values.runs], np.int64)
        self._sizes = sizes
        self._starts = np.cumsum(sizes) - sizes
        self._at = np.array([memory[run.region].address - self.base + run.offset for run in values.runs], np.int64)
        self._steps = np.array([run.block_stride for run in values.runs], np.int64)

    def rows(self, blocks: Sequence[int], gathers: bool) -> Spans:
        """Between the device's memory, from `base` on, and a slot."""
        ids = np.array(blocks, np.int64)[:, None]
        near = (self._at + ids * self._steps).ravel()
        packed = (np.arange(len(blocks), dtype=np.int64)[:, None] * self.value_bytes + self._starts).ravel()
        sizes = np.tile(self._sizes, len(blocks))
        return as_spans(divided(np.stack((packed, near, sizes) if gathers else (near, packed, sizes), axis=1)))


@dataclass(slots=True, eq=False)
class _Job:
    kind: Kind
    order: OrderId
    hashes: Sequence[bytes]
    blocks: Sequence[int]
    deadline: float
    slot: int = -1
    at: int = 0  # blocks already processed
    part: int = 0  # blocks in the slot
    count: int = 0
    asked: OrderId | None = None  # of the store below, now
    cancelled: bool = False
    ended: OrderEnded | None = None  # of the get that filled the slot
    origins: tuple[bytes, ...] = ()  # of a put
    writers: dict[bytes, None] = field(default_factory=dict)  # of a get: whose values have landed


@dataclass(slots=True)
class _DeviceLane:
    free: list[int]
    waiting: deque[_Job] = field(default_factory=deque)


class _Below:
    """The store below, which numbers orders itself; each end goes to the order that asked."""

    def __init__(self, store: LocalRankStore) -> None:
        self.store = store
        self._asked: dict[OrderId, Callable[[OrderEnded], None]] = {}
        self._numbers = itertools.count(1)

    def ask(self, act: Callable[[OrderId], bool], ended: Callable[[OrderEnded], None]) -> OrderId | None:
        """None: the store has no room for more orders."""
        order = OrderId(next(self._numbers))
        self._asked[order] = ended
        if act(order):
            return order
        del self._asked[order]
        return None

    def turn(self) -> None:
        for end in self.store.drain():
            self._asked.pop(end.order)(end)


class _Staging:
    """The slots, and the device's threads that gather into them and scatter from them."""

    def __init__(self, slot_bytes: int, count: int, gpu: Gpu) -> None:
        self.slots, self.region = allocate_slots(slot_bytes, count)
        self.stager = Stager("kvbaton-store", gpu)
        self.is_pinned: bool | None = False  # None: being pinned

    def pin(self, ended: Callable[[str], bool]) -> None:
        """By the first order that needs a slot, and again by a later one where that failed."""
        if self.is_pinned is False:
            self.is_pinned = None
            self.stager.open(self.slots, ended)

    def close(self) -> bool:
        """Whether the device no longer uses the slots, so that their memory can be freed."""
        if self.is_pinned is not False:
            self.stager.release(self.slots, lambda: None)
        return self.stager.close(CLOSE_S)


class DeviceRankStore:
    """Values of one rank, through any `Backend`, which belongs to this rank and is closed with it."""

    def __init__(
        self,
        backend: Backend,
        values: RankValues,
        memory: Sequence[DeviceMemory],
        gpu: Gpu,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._shape = shape = StagingShape(values, memory)
        self._settings = rank_store_settings(shape.value_bytes)
        self._clock = clock
        count = sum(map(len, SLOTS.values()))
        self._staging = _Staging(shape.slot_bytes, count, gpu)
        packed = RankValues(values.space, count * shape.stride, (Run(0, 0, shape.value_bytes, shape.value_bytes),))
        self._below = _Below(LocalRankStore(backend, packed, [self._staging.region.view], self._settings, owned=True))
        self._lanes: dict[Kind, _DeviceLane] = {
            "get": _DeviceLane(list(SLOTS["get"])),
            "put": _DeviceLane(list(SLOTS["put"])),
        }
        self._jobs: dict[OrderId, _Job] = {}
        self._lookups: dict[OrderId, OrderId] = {}  # of the caller, as the store below knows them
        self._notes: deque[Callable[[], None]] = deque()  # left by the device's threads
        self._ends: list[OrderEnded] = []
        self._open = 0  # accepted, end not drained
        self._closed = False
        self._waker: Callable[[], None] = lambda: None

    @property
    def counters(self) -> Mapping[str, int]:
        """Counters of the store below; `pins`: blocks being put."""
        pins = sum(len(job.blocks) for job in list(self._jobs.values()) if job.kind == "put")
        return {**self._below.store.counters, "pins": pins}

    # --- orders

    def lookup(self, order: OrderId, hashes: Sequence[bytes], timeout_s: float) -> bool:
        if self._is_full:
            return False

        def ended(end: OrderEnded) -> None:
            del self._lookups[order]
            self._end(OrderEnded(order, end.count, end.reason, end.detail))

        asked = self._below.ask(lambda number: self._below.store.lookup(number, hashes, timeout_s), ended)
        if asked is None:
            return False
        self._lookups[order] = asked
        self._open += 1
        return True

    def get(self, order: OrderId, hashes: Sequence[bytes], blocks: Sequence[int], timeout_s: float) -> bool:
        return self._submit("get", order, hashes, blocks, timeout_s)

    def set_trust(self, trust: RankStoreTrust) -> None:
        self._below.store.set_trust(trust)

    def put(
        self,
        order: OrderId,
        hashes: Sequence[bytes],
        blocks: Sequence[int],
        timeout_s: float,
        origins: tuple[bytes, ...] = (),
    ) -> bool:
        return self._submit("put", order, hashes, blocks, timeout_s, origins)

    def cancel(self, order: OrderId) -> None:
        job = self._jobs.get(order)
        if job is not None and job.slot < 0:
            self._lanes[job.kind].waiting.remove(job)
            self._finish(job, Reason.CANCELLED, "cancelled")
            return
        if job is not None:
            job.cancelled = True
        asked = job.asked if job is not None else self._lookups.get(order)
        if asked is not None:
            self._below.store.cancel(asked)

    def drain(self) -> Sequence[OrderEnded]:
        self._turn()
        ends, self._ends = self._ends, []
        self._open -= len(ends)
        return ends

    def set_waker(self, waker: Callable[[], None]) -> None:
        self._waker = waker
        self._below.store.set_waker(waker)

    def close(self) -> None:
        """End all orders; bounded in time even if the backend or the device hangs. Ends can still be drained."""
        if self._closed:
            return
        self._closed = True
        for lane in self._lanes.values():
            while lane.waiting:
                self._finish(lane.waiting.popleft(), Reason.CANCELLED, "the store was closed")
        self._below.store.close()
        self._turn()
        if self._staging.close():
            self._turn()
            self._staging.region.close()

    @property
    def _is_full(self) -> bool:
        return self._closed or self._open >= self._settings.orders_max

    def _submit(
        self,
        kind: Kind,
        order: OrderId,
        hashes: Sequence[bytes],
        blocks: Sequence[int],
        timeout_s: float,
        origins: tuple[bytes, ...] = (),
    ) -> bool:
        if self._is_full:
            return False
        self._open += 1
        job = self._jobs[order] = _Job(kind, order, hashes, blocks, self._clock() + timeout_s)
        job.origins = origins
        problem = self._problem(hashes, blocks, timeout_s)
        if problem:
            self._finish(job, Reason.BAD_SPAN, problem)
        else:
            self._lanes[kind].waiting.append(job)
            self._begin()
        return True

    def _problem(self, hashes: Sequence[bytes], blocks: Sequence[int], timeout_s: float) -> str:
        """Invalid orders."""
        wrong = next((block for block in blocks if not 0 <= block < self._shape.block_count), None)
        if wrong is not None:
            return f"block {wrong} is outside 0..{self._shape.block_count - 1}"
        if not 0 < len(hashes) <= self._settings.keys_max or len(hashes) != len(blocks):
            return f"{len(hashes)} hashes for {len(blocks)} blocks; give 1..{self._settings.keys_max} of each"
        if not 0 < timeout_s <= self._settings.timeout_s_max:
            return f"timeout_s: {timeout_s}; give more than 0 and at most {self._settings.timeout_s_max}"
        return ""

    # --- turns

    def _turn(self) -> None:
        """Continue every order that has news."""
        while self._notes:
            self._notes.popleft()()
        self._below.turn()
        now = self._clock()
        for lane in self._lanes.values():
            for job in [job for job in lane.waiting if job.deadline <= now]:
                lane.waiting.remove(job)
                self._finish(job, Reason.TRANSFER_TIMEOUT, "timed out: other orders held all slots")
        self._begin()

    def _begin(self) -> None:
        """Give slots to the orders that wait for one."""
        if not any(lane.waiting for lane in self._lanes.values()):
            return
        self._staging.pin(self._on_pinned)
        while self._staging.is_pinned and (
            ready := [lane for lane in self._lanes.values() if lane.waiting and lane.free]
        ):
            job, job_slot = ready[0].waiting.popleft(), ready[0].free.pop()
            job.slot = job_slot
            self._next(job)

    def _on_pinned(self, problem: str) -> bool:
        """On a thread of the device's."""

        def note() -> None:
            self._staging.is_pinned = not problem
            for lane in self._lanes.values() if problem else ():
                while lane.waiting:
                    self._finish(lane.waiting.popleft(), Reason.STORE_FAILED, f"no pinned memory: {problem}")

        self._leave(note)
        return True

    def _next(self, job: _Job) -> None:
        """The next blocks of an order that has a slot."""
        left_s = job.deadline - self._clock()
        if self._closed or job.cancelled:
            self._finish(job, Reason.CANCELLED, "the store was closed" if self._closed else "cancelled")
        elif left_s <= 0:
            self._finish(job, Reason.TRANSFER_TIMEOUT, "the store did not answer in time")
        else:
            job.part = min(self._shape.per_slot, len(job.blocks) - job.at)
            if job.kind == "put":
                self._move(job, job.part)
            else:
                self._ask(job, left_s)

    def _ask(self, job: _Job, left_s: float) -> None:
        """Let the store below fetch into the slot, or store its contents."""
        store, gets = self._below.store, job.kind == "get"
        act = store.get if gets else partial(store.put, origins=job.origins)
        ended = self._got if gets else self._kept
        first = job.slot * self._shape.stride
        hashes, slots = job.hashes[job.at : job.at + job.part], range(first, first + job.part)
        job.asked = self._below.ask(lambda order: act(order, hashes, slots, left_s), lambda end: ended(job, end))
        if job.asked is None:
            self._finish(job, Reason.BUSY, "the rank's store has no room for more orders")

    def _move(self, job: _Job, count: int) -> None:
        """Let the device gather `count` blocks into the slot, or scatter them from it."""
        blocks, gathers = job.blocks[job.at : job.at + count], job.kind == "put"
        rows, size = self._shape.rows(blocks, gathers), count * self._shape.value_bytes
        moved = self._gathered if gathers else self._scattered

        def ended(problem: str) -> None:
            self._leave(lambda: moved(job, problem))

        self._staging.stager.add(
            StagedChunk(self._staging.slots, job.slot, size, self._shape.base, rows, gathers, ended)
        )

    def _gathered(self, job: _Job, problem: str) -> None:
        if problem:
            self._finish(job, Reason.STORE_FAILED, problem)
        elif self._closed or job.cancelled or job.deadline <= self._clock():
            self._next(job)
        else:
            self._ask(job, job.deadline - self._clock())

    def _kept(self, job: _Job, end: OrderEnded) -> None:
        job.asked = None
        job.count += end.count
        self._go_on(job, end)

    def _got(self, job: _Job, end: OrderEnded) -> None:
        job.asked, job.ended = None, end
        if end.count and not self._closed:
            self._move(job, end.count)
        else:
            self._finish(job, end.reason, end.detail)

    def _scattered(self, job: _Job, problem: str) -> None:
        assert job.ended is not None
        if problem:
            self._finish(job, Reason.STORE_FAILED, problem)
            return
        job.count += job.ended.count
        job.writers.update(dict.fromkeys(job.ended.writers))
        self._go_on(job, job.ended)

    def _go_on(self, job: _Job, end: OrderEnded) -> None:
        """Continue after the blocks that `end` refers to: with the next, or to the end."""
        job.at += job.part
        if end.reason is not None or job.at >= len(job.blocks) or (job.kind == "get" and end.count < job.part):
            self._finish(job, end.reason, end.detail)
        else:
            self._next(job)

    def _finish(self, job: _Job, reason: Reason | None, detail: str) -> None:
        """The one end of a get or a put."""
        del self._jobs[job.order]
        if job.slot >= 0:
            self._lanes[job.kind].free.append(job.slot)
        self._end(OrderEnded(job.order, job.count, reason, detail, tuple(job.writers)))

    def _end(self, end: OrderEnded) -> None:
        self._ends.append(end)
        if len(self._ends) == 1:
            self._waker()

    def _leave(self, note: Callable[[], None]) -> None:
        self._notes.append(note)
        self._waker()
