"""The production timers, with a limit to what happens at one time: a step that never ends is a hang, and is told."""

from __future__ import annotations

from kvbaton.protocol.clock import Timers
from kvbaton.protocol.desk import TimerKey
from kvbaton.sim.promises import HANG, Broken

AT_ONE_TIME_MAX = 5_000


class BoundedTimers(Timers[TimerKey]):
    """Of one life."""

    __slots__ = ("_looks", "_now")

    def __init__(self) -> None:
        super().__init__()
        self._now, self._looks = 0.0, 0

    def pop_due(self, now: float) -> TimerKey | None:
        self._looks = self._looks + 1 if now == self._now else 0
        self._now = now
        if self._looks > AT_ONE_TIME_MAX:
            raise Broken(HANG, f"a step has handled {self._looks} timers of one time, and there are more")
        return super().pop_due(now)
