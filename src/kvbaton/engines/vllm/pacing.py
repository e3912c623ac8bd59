"""The scheduler's steps as the connector counts them, and the naps that it takes where vLLM would take one itself.

Law: news end a nap at once. One that lies between two steps is short enough that a request that comes meanwhile does
not notice it.
"""

from __future__ import annotations

import threading

NAP_S = 0.004
"""Per step, of an engine that has nothing to do but to wait for its leases, unless there is news (docs/lab: 0.3 cores
instead of 0.7). A request that comes meanwhile waits this long at most."""
LOAD_NAP_S = 0.002
"""The same, of one that waits for loads: vLLM sleeps 1 ms between such steps, whatever arrives; from this nap a load
that arrives wakes it, and its thread has left the interpreter to those that bring it."""


class Pace:
    """Of one engine; the scheduler's thread alone uses it, other threads set `news`."""

    def __init__(self, *, lock_step: bool = False) -> None:
        """`lock_step`: other data-parallel ranks wait for each of our steps (a mixture of experts)."""
        self.lock_step = lock_step
        self.step = 0
        self.news = threading.Event()
        self._napped = 0
        self._computes = 0  # the last step that has something to compute

    def begin(self, computes: bool) -> None:
        """The next step."""
        self.step += 1
        if computes:
            self._computes = self.step

    def computes_since(self, step: int) -> bool:
        """Whether that step, or one that is on its way since, has something to compute."""
        return self._computes >= step

    def nap(self, seconds: float) -> None:
        self.news.wait(seconds)
        self.news.clear()

    def nap_once(self, seconds: float) -> None:
        """At most one between two steps, however often vLLM asks; none in lock-step, where others may have work."""
        if self._napped != self.step and not self.lock_step:
            self._napped = self.step
            self.nap(seconds)
