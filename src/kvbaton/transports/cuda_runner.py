"""Two threads that give work to a device and wait for it: what was begun ends once, in the order of its beginning.

Law: work is over when the device says so, and not before. Both threads sleep while they wait, for work in a queue and
for the device in the driver; the one that begins never waits for the device, so it is not idle while there is work.
What is due together is begun together, which lets many copies share one launch; each batch has a stream of its own, so
the copying of one runs beside the gathering of the next. An error of the device fails what it is about; one that stays
fails everything from then on, and is never raised out of here.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable
from typing import Generic, Protocol, TypeVar

import msgspec

from kvbaton.transports.cuda_driver import CudaError, Gpu

log = logging.getLogger(__name__)

UNDER_WAY_MAX = 4
"""Batches on the device at once: two that overlap, and slack for the threads to wake."""

Item = TypeVar("Item")


class Worker(Protocol[Item]):
    """Who knows what the work is."""

    def begin(self, batch: list[Item], slot: int, stream: int) -> list[Item]:
        """Put `batch` on the stream; those that are on it. Nobody else uses `slot` until they have ended."""

    def end(self, batch: list[Item], problem: str) -> None:
        """The device is done with it, or will never begin it. On either thread."""

    def closed(self) -> None:
        """Nothing is under way and nothing follows."""


class _First(msgspec.Struct):
    run: Callable[[], None]


class _After(msgspec.Struct):
    run: Callable[[], None]


class Runner(Generic[Item]):
    """The threads, their streams, and the events by which they sleep. Started by the first work."""

    def __init__(self, name: str, gpu: Gpu, worker: Worker[Item], batch_max: int) -> None:
        self._name = name
        self._gpu = gpu
        self._worker = worker
        self._batch_max = batch_max
        self._due: queue.SimpleQueue[Item | _First | _After | None] = queue.SimpleQueue()
        self._begun: queue.SimpleQueue[tuple[list[Item], int] | _After | None] = queue.SimpleQueue()
        self._slots: queue.SimpleQueue[int] = queue.SimpleQueue()  # free ones
        self._streams: list[int] = []
        self._events: list[int] = []
        self._threads: list[threading.Thread] = []
        self._lock = threading.Lock()
        self.broken = ""
        """What made the device unusable for this process; empty while it works."""

    def add(self, item: Item) -> None:
        self._put(item)

    def first(self, action: Callable[[], None]) -> None:
        """Run `action` before what is added later, on the thread that begins."""
        self._put(_First(action))

    def after(self, action: Callable[[], None]) -> None:
        """Run `action` once all that was added before is over."""
        self._put(_After(action))

    def close(self, join_s: float) -> bool:
        """End after what was added; False if the device was still at it after `join_s`."""
        with self._lock:
            threads = list(self._threads)
        if threads:
            self._due.put(None)
        for thread in threads:
            thread.join(join_s)
        return not any(thread.is_alive() for thread in threads)

    def _put(self, item: Item | _First | _After) -> None:
        with self._lock:
            if not self._threads:
                for run, what in ((self._run_beginning, "begin"), (self._run_ending, "end")):
                    thread = threading.Thread(target=run, name=f"{self._name}-{what}", daemon=True)
                    self._threads.append(thread)
                for thread in self._threads:
                    thread.start()
        self._due.put(item)

    def _run_beginning(self) -> None:
        self._guard(self._open)
        while self._next():
            pass
        self._begun.put(None)

    def _open(self) -> None:
        self._gpu.enter()
        self._streams = [self._gpu.stream() for _ in range(UNDER_WAY_MAX)]
        self._events = [self._gpu.event() for _ in range(UNDER_WAY_MAX)]
        for slot in range(UNDER_WAY_MAX):
            self._slots.put(slot)

    def _next(self) -> bool:
        """Begin all that is due now; False at the end."""
        batch: list[Item] = []
        item = self._due.get()
        while item is not None and not isinstance(item, _First | _After):
            batch.append(item)
            if len(batch) >= self._batch_max or self._due.empty():
                self._begin(batch)
                return True
            item = self._due.get()
        if batch:
            self._begin(batch)
        if isinstance(item, _First):
            self._guard(item.run)
        elif item is not None:
            self._begun.put(item)
        return item is not None

    def _begin(self, batch: list[Item]) -> None:
        if self.broken:
            self._worker.end(batch, self.broken)
            return
        slot = self._slots.get()  # comes back: whoever is on the device ends, or breaks it
        try:
            begun = self._worker.begin(batch, slot, self._streams[slot])
            if begun:
                self._gpu.record(self._events[slot], self._streams[slot])
        except CudaError as error:
            self._note(error)
            self._settle(slot)  # part of it may be on the stream
            self._worker.end(batch, str(error))
            begun = []
        if begun:
            self._begun.put((begun, slot))
        else:
            self._slots.put(slot)

    def _run_ending(self) -> None:
        self._guard(self._gpu.enter)
        while (begun := self._begun.get()) is not None:
            if isinstance(begun, _After):
                self._guard(begun.run)
            else:
                self._end(*begun)
            del begun  # or an idle thread would keep the last work alive
        self._guard(self._close)

    def _end(self, batch: list[Item], slot: int) -> None:
        problem = self.broken
        try:
            self._gpu.wait(self._events[slot])
        except CudaError as error:
            self._note(error)
            problem = str(error)
        try:
            self._worker.end(batch, problem)
        finally:
            self._slots.put(slot)

    def _close(self) -> None:
        self._worker.closed()
        for event in self._events:
            self._gpu.drop_event(event)
        for stream in self._streams:
            self._gpu.drop_stream(stream)

    def _settle(self, slot: int) -> None:
        """Wait until the slot's stream is empty, so that a batch that was begun in part is at rest."""
        try:
            self._gpu.record(self._events[slot], self._streams[slot])
            self._gpu.wait(self._events[slot])
        except CudaError as error:
            self._note(error)

    def _note(self, error: CudaError) -> None:
        if error.sticky and not self.broken:
            self.broken = f"the device cannot be used any more by this process: {error}"
            log.error("[device-lost] %s: %s", self._name, self.broken)

    def _guard(self, action: Callable[[], None]) -> None:
        try:
            action()
        except CudaError as error:
            self._note(error)
            if not self.broken and len(self._events) < UNDER_WAY_MAX:
                self.broken = str(error)  # it never opened
            log.warning("[device-fault] %s: %s", self._name, error)
