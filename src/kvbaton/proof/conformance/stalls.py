"""How long this process was not run: a case that demands something of real time proves nothing while it stood still.

Law: only what was *not in time* is excused by it, and only to be run again; a wrong answer or an assertion never is.
"""

from __future__ import annotations

import threading
import time

BEAT_S = 0.02
STALL_S = 0.1
"""A quarter of the shortest time-out that a case sets."""


class StallMeter:
    """Measures, while it is entered, by how much the worst of its short sleeps was too long."""

    def __init__(self) -> None:
        self.worst_s = 0.0
        self._over = threading.Event()
        self._beats = threading.Thread(target=self._measure, name="stall-meter", daemon=True)

    def __enter__(self) -> StallMeter:
        self._beats.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._beats.join()

    @property
    def stalled(self) -> bool:
        return self.worst_s >= STALL_S

    def _measure(self) -> None:
        over = False
        while not over:
            begun = time.monotonic()
            over = self._over.wait(BEAT_S)
            self.worst_s = max(self.worst_s, time.monotonic() - begun - BEAT_S)
