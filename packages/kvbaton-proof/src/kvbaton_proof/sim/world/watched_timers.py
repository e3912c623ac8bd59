"""The production timers, with a limit to what happens at one time: a step that never ends is a hang, and is told."""

from __future__ import annotations

from collections.abc import Callable

from kvbaton.protocol.clock import Timers
from kvbaton.protocol.machines.context import TimerKey
from kvbaton_proof.sim.promises import HANG, Broken

AT_ONE_TIME_MAX = 5_000


class BoundedTimers(Timers[TimerKey]):
    """Of one life."""

    __slots__ = ("_looks", "_now", "on_due", "on_set")

    def __init__(self) -> None:
        super().__init__()
        self._now, self._looks = 0.0, 0
        self.on_set: Callable[[TimerKey, float], None] = lambda key, at: None  # whoever measures
        self.on_due: Callable[[TimerKey, float], None] = lambda key, at: None

    def set(self, key: TimerKey, at: float) -> None:
        self.on_set(key, at)
        super().set(key, at)

    def pop_due(self, now: float) -> TimerKey | None:
        self._looks = self._looks + 1 if now == self._now else 0
        self._now = now
        if self._looks > AT_ONE_TIME_MAX:
            raise Broken(HANG, f"a step has handled {self._looks} timers of one time, and there are more")
        before = self.next_at()
        key = super().pop_due(now)
        if key is not None:
            self.on_due(key, before if before is not None else now)
        return key
