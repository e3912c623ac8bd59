"""Deadlines of requests: a task that has not come to its end in time is cancelled, and told so.

Law: as `asyncio.timeout_at`, but with one timer for all. It is set for the earliest deadline that it knew of, and then
looks for the next: a request that ends in time, as almost all do, sets and cancels none.
"""

from __future__ import annotations

import asyncio
import math
from types import TracebackType


class Deadlines:
    """Those that have not passed. One per event loop."""

    def __init__(self) -> None:
        self.loop = asyncio.get_running_loop()
        self._kept: dict[Deadline, None] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._looks_at = math.inf  # when the timer runs out; uvloop's may not say

    def keep(self, deadline: Deadline) -> None:
        self._kept[deadline] = None
        if self._looks_at > deadline.when:
            self._look_at(deadline.when)

    def forget(self, deadline: Deadline) -> None:
        self._kept.pop(deadline, None)

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer, self._looks_at = None, math.inf

    def _look_at(self, when: float) -> None:
        self.close()
        self._timer, self._looks_at = self.loop.call_at(when, self._look), when

    def _look(self) -> None:
        self.close()
        now = self.loop.time()
        for deadline in [each for each in self._kept if each.when <= now]:
            self.forget(deadline)
            deadline.pass_by()
        if self._kept:
            self._look_at(min(each.when for each in self._kept))


class Deadline:
    """A context for the current task, on the event loop's clock; `TimeoutError` if it is not left by then."""

    __slots__ = ("_cancelling", "_deadlines", "_has_passed", "_task", "when")

    def __init__(self, deadlines: Deadlines, when: float) -> None:
        self.when = when
        self._deadlines = deadlines
        self._has_passed = False

    def __enter__(self) -> None:
        task = asyncio.current_task(self._deadlines.loop)
        assert task is not None
        self._task = task
        self._cancelling = task.cancelling()
        self._deadlines.keep(self)

    def pass_by(self) -> None:
        self._has_passed = True
        self._task.cancel()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if not self._has_passed:
            self._deadlines.forget(self)
        # Who else has cancelled the task meanwhile still wants it cancelled
        elif self._task.uncancel() <= self._cancelling and isinstance(error, asyncio.CancelledError):
            raise TimeoutError from error
