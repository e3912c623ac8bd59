"""Threads that copy from one memory to another, with the GIL released.

Law: a mover holds a part from `begin` to `part_ended` and touches no memory outside that time.
"""

from __future__ import annotations

import queue
import threading

from kvbaton.protocol.errors import Reason
from kvbaton.transports.core.jobs import CopyJob, Jobs
from kvbaton.transports.core.mover import Mover
from kvbaton.transports.core.shared_memory import RegisteredMemory


class Movers:
    """Threads that copy, started by the first part; each takes the next part of whichever copy is due."""

    def __init__(self, name: str, mover: Mover, jobs: Jobs, memory: RegisteredMemory, threads: int) -> None:
        self._name = name
        self._mover = mover
        self._jobs = jobs
        self._memory = memory
        self._due: queue.SimpleQueue[tuple[CopyJob, memoryview] | None] = queue.SimpleQueue()
        self._threads_max = threads
        self._threads: list[threading.Thread] = []

    def add(self, job: CopyJob, source: memoryview) -> None:
        """Copy every part of `job` out of `source`. The caller holds the lock of the jobs."""
        while len(self._threads) < self._threads_max:
            thread = threading.Thread(target=self._run, name=f"{self._name}-{len(self._threads)}", daemon=True)
            self._threads.append(thread)
            thread.start()
        for _ in range(len(job.parts)):
            self._due.put((job, source))

    def close(self, join_s: float) -> bool:
        """End the threads; False if one was still busy after `join_s`."""
        for _ in self._threads:
            self._due.put(None)
        for thread in self._threads:
            thread.join(join_s)
        return not any(thread.is_alive() for thread in self._threads)

    def _run(self) -> None:
        while (due := self._due.get()) is not None:
            self._move(*due)
            del due  # otherwise an idle thread would keep the last peer's memory mapped

    def _move(self, job: CopyJob, source: memoryview) -> None:
        spans = self._jobs.begin(job)
        target = self._memory.get(job.copy.local_region)
        if spans is None:
            return
        try:
            if target is None:
                raise ValueError(f"region {job.copy.local_region} is not registered")
            self._mover.copy_spans(target, source, spans, False, 0, len(spans) // 3, job.halt)
        except (ValueError, BufferError) as error:
            self._jobs.part_ended(job, Reason.BAD_SPAN, str(error))
        else:
            self._jobs.part_ended(job)
