"""A thread that runs on calls, and in between polls things that do not report by themselves.

Law: the work of a turn is done by this thread only. It sleeps for as long as `patience` says, forever on None, and any
call wakes it. The first call starts it, so that a transport that is merely listed costs no thread.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable


class TurnThread:
    """`begin` once, `turn` after every wake-up; after `stop`, turns for as long as `lingers`, then `end` once."""

    def __init__(
        self,
        name: str,
        turn: Callable[[], None],
        patience: Callable[[], float | None],
        lingers: Callable[[], bool],
        end: Callable[[], None],
        begin: Callable[[], None] = lambda: None,
    ) -> None:
        self._begin = begin
        self._turn = turn
        self._patience = patience
        self._lingers = lingers
        self._end = end
        self._calls: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._starting = threading.Lock()
        self.stopping = False

    def call(self, action: Callable[[], None]) -> None:
        """From any thread."""
        self._calls.put(action)
        with self._starting:
            if self._thread.ident is None:
                self._thread.start()

    def stop(self, join_s: float) -> bool:
        """Whether it has ended after `join_s`."""
        self.call(self._stop)
        if threading.current_thread() is not self._thread:
            self._thread.join(join_s)
        return not self._thread.is_alive()

    def _stop(self) -> None:
        self.stopping = True

    def _run(self) -> None:
        self._begin()
        while not self.stopping:
            self._wake_up()
        while self._lingers():
            self._wake_up()
        self._end()

    def _wake_up(self) -> None:
        patience_s = self._patience()
        try:
            self._calls.get(patience_s != 0, patience_s)()
            while True:
                self._calls.get_nowait()()
        except queue.Empty:
            pass
        self._turn()
