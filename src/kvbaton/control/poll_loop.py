"""One thread that takes turns: do what is due, sleep until something comes or the next deadline, repeat.

Laws: an exception out of a turn is a bug and never ends the thread; it is logged, counted, and followed by a pause, so
that it does not spin. Idle, the thread sleeps in the kernel. Whatever `finish` closes is closed on this thread, the
only one that used it.

Wakes a thread that sleeps in a poll, from any other thread. Many calls before it looks cost one wake-up.

Law: what a caller queued before `wake` is seen by the sleeper's next turn. So `clear` empties the descriptor first and
lowers the flag after; the other way round, a call in between would be lost for good.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable
from typing import Protocol

from kvbaton.observe.codes.entry import worth_saying


class Waker:
    """One descriptor to poll for reading, and the means to make it readable."""

    __slots__ = ("_lock", "_raised", "fd")

    def __init__(self) -> None:
        self.fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._raised = False
        self._lock = threading.Lock()

    def wake(self) -> None:
        """From any thread, also after `close`."""
        if self._raised:
            return
        with self._lock:  # or the descriptor could be closed, and be someone else's, between look and write
            if self.fd >= 0:
                self._raised = True
                os.eventfd_write(self.fd, 1)

    def clear(self) -> None:
        """By the sleeper, after the descriptor was readable and before it looks at its queues."""
        try:
            os.eventfd_read(self.fd)
        except BlockingIOError:
            pass
        finally:
            self._raised = False

    def close(self) -> None:
        with self._lock:
            if self.fd >= 0:
                os.close(self.fd)
                self.fd = -1


log = logging.getLogger(__name__)

PAUSE_S = 0.05
TURN_S_MIN = 0.001  # a deadline that stays in the past is a bug; it costs at most a thousand turns a second


class Sleeper(Protocol):
    """Something a thread can sleep on."""

    def wait(self, timeout_s: float | None) -> None:
        """Return when there is something to do, or after `timeout_s`."""

    def wake(self) -> None:
        """End the wait that is under way, or else the next. From any thread."""


class LoopThread:
    """Runs `turn(now)`, which answers when it is next due (None: not before something comes), until stopped."""

    def __init__(
        self,
        name: str,
        sleeper: Sleeper,
        turn: Callable[[float], float | None],
        finish: Callable[[], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.faults = 0
        self._sleeper = sleeper
        self._turn = turn
        self._finish = finish
        self._clock = clock
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self, timeout_s: float) -> bool:
        """End the thread after its current turn; False when that took longer than `timeout_s`."""
        started = self._thread.ident is not None
        first = not self._stopping.is_set()
        self._stopping.set()
        if not started:
            if first:
                self._guard(self._finish)
            return True
        self._sleeper.wake()
        if self.is_current:
            return True
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    @property
    def is_current(self) -> bool:
        """Whether the caller runs on this thread."""
        return threading.current_thread() is self._thread

    @property
    def is_alive(self) -> bool:
        return self._thread.is_alive()

    @property
    def is_stopping(self) -> bool:
        """Whether it has ended, or is about to."""
        return self._stopping.is_set()

    def _run(self) -> None:
        while not self._stopping.is_set():
            if not self._guard(self._once):
                self._stopping.wait(PAUSE_S)
        self._guard(self._finish)

    def _once(self) -> None:
        due = self._turn(self._clock())
        self._sleeper.wait(None if due is None else max(due - self._clock(), TURN_S_MIN))

    def _guard(self, action: Callable[[], None]) -> bool:
        try:
            action()
        except Exception:  # a bug in one turn must not end service to everybody
            self.faults += 1
            if worth_saying(self.faults):
                log.exception("[thread-fault] %s: fault %d; continuing", self._thread.name, self.faults)
            return False
        return True
