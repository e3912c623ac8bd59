"""How long this process was not run: a case that demands something of real time proves nothing while it stood still.

Law: only what was *not in time* is excused by it, and only to be run again; a wrong answer or an assertion never is.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path

import msgspec

from kvbaton_proof.conformance.case_registry import CaseVerdict

BEAT_S = 0.02
STALL_S = 0.1
"""A quarter of the shortest time-out that a case sets."""
WINDOW_BEATS = 20
"""About that time-out: to have waited a little now and then over a long case is no stall."""
THREADS = Path("/proc/self/task")
TRIES = 4
"""How often a case is run that was not in time on a machine that stood still."""
NOT_IN_TIME = "broken"  # of a verdict's kinds


def unstalled(run: Callable[[], CaseVerdict]) -> CaseVerdict:
    """What it comes to on a machine that runs it: while this process stands still, leases and time-outs run out."""
    for again in range(TRIES):
        with StallMeter() as meter:
            verdict = run()
        verdict = msgspec.structs.replace(verdict, run_again=again)
        if verdict.kind != NOT_IN_TIME or not meter.stalled:
            break
    return verdict


class StallMeter:
    """Measures, while it is entered, how long this process was kept waiting for a processor.

    `worst_s`: by how much the worst of its short sleeps was too long; then all of it stood still. `queued_s`: how long
    one of its threads was ready and not run, within the shortest time-out, as the kernel says (Linux): others may wait
    for long while one that sleeps is run whenever it wakes.
    """

    def __init__(self) -> None:
        self.worst_s = 0.0
        self.queued_s = 0.0
        self._lately = deque([_waited_s()], maxlen=WINDOW_BEATS)
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
        return max(self.worst_s, self.queued_s) >= STALL_S

    def _measure(self) -> None:
        over = False
        while not over:
            begun = time.monotonic()
            over = self._over.wait(BEAT_S)
            self.worst_s = max(self.worst_s, time.monotonic() - begun - BEAT_S)
            waited, before = _waited_s(), self._lately[0]
            self._lately.append(waited)
            grown = (each - before.get(thread, 0.0) for thread, each in waited.items())
            self.queued_s = max(self.queued_s, *grown, 0.0)


def _waited_s() -> dict[str, float]:
    """Of each thread the seconds it has waited in a run queue."""
    waited = {}
    with contextlib.suppress(OSError):
        for thread in THREADS.iterdir():
            with contextlib.suppress(OSError, ValueError, IndexError):  # it has ended
                waited[thread.name] = int((thread / "schedstat").read_text().split()[1]) / 1e9
    return waited
