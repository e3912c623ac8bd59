"""Wakes a thread that sleeps in a poll, from any other thread. Many calls before it looks cost one wake-up.

Law: what a caller queued before `wake` is seen by the sleeper's next turn. So `clear` empties the descriptor first and
lowers the flag after; the other way round, a call in between would be lost for good.
"""

from __future__ import annotations

import os
import threading


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
