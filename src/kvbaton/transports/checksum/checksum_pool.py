"""Threads that digest memory, so that neither a loop nor an engine does.

Law: a digester touches memory only while it runs a task, and `close` waits, for a bounded time, for the current task.
The task queue is bounded by its owners: by accepted copies on one side, by the window of each connection on the other.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable

log = logging.getLogger(__name__)


class Digesters:
    """A few threads, started by the first task; tasks start in the order they were added."""

    def __init__(self, name: str, threads: int) -> None:
        self._name = name
        self._threads_max = threads
        self._threads: list[threading.Thread] = []
        self._due: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._closed = False

    def add(self, task: Callable[[], None]) -> None:
        """Run `task` soon; never, once this is closed."""
        with self._lock:
            if self._closed:
                return
            while len(self._threads) < self._threads_max:
                thread = threading.Thread(target=self._run, name=f"{self._name}-{len(self._threads)}", daemon=True)
                self._threads.append(thread)
                thread.start()
            self._due.put(task)

    def close(self, join_s: float) -> bool:
        """Start nothing more; whether all threads have ended within `join_s`. Idempotent."""
        with self._lock:
            self._closed = True
            threads = [thread for thread in self._threads if thread is not threading.current_thread()]
        for _ in self._threads:
            self._due.put(None)
        deadline = time.monotonic() + join_s
        for thread in threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        return not any(thread.is_alive() for thread in threads)

    def _run(self) -> None:
        while (task := self._due.get()) is not None:
            if self._closed:
                continue
            try:
                task()
            except Exception:
                log.exception("[digest-failed] a digest failed on %s", threading.current_thread().name)
