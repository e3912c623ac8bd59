"""The marks of one incarnation's handoffs (`protocol/marks.py`), checked against what marks promise.

Laws: of one handoff on one side each step is said once (a claim as often as it greets, readers as often as they come),
it ends once and then rests once, and nothing is said of it after that.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from kvbaton.protocol.marks import Mark, Side, Step
from kvbaton_proof.sim.promises import HANG, RULE, Broken

_MORE_THAN_ONCE = {Step.CLAIMED, Step.PARKED, Step.SEATED, Step.WRITTEN, Step.COMMITTED, Step.STALE, Step.LEFT}
_OF_READERS = {Step.OFFERED, *_MORE_THAN_ONCE}

Take = Callable[[Sequence[Mark], Sequence[tuple[Any, float]], float, float, Any], None]


class Record:
    """Of one life."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.open: dict[tuple[Side, int], dict[Step, float]] = {}

    def watching(self, take: Take) -> Take:
        """The recorder's own, and this."""

        def watched(
            marks: Sequence[Mark], taken: Sequence[tuple[Any, float]], now: float, wall_offset_s: float, before: Any
        ) -> None:
            for mark in marks:
                self._note(mark)
            take(marks, taken, now, wall_offset_s, before)

        return watched

    def check_at_rest(self) -> None:
        if self.open:
            raise Broken(HANG, f"{self.name}: on record, and never at rest: {list(self.open)[:3]}")

    def _note(self, mark: Mark) -> None:
        key = (mark.side, mark.key)
        steps = self.open.get(key)
        if steps is None:
            if mark.step not in (Step.ASKED, Step.BEGUN):
                raise Broken(RULE, f"{self.name}: {mark.step.value} is said of {key}, which has not begun, or is over")
            steps = self.open[key] = {}
        if mark.step in steps and mark.step not in (_OF_READERS if mark.side is Side.PREFILL else _MORE_THAN_ONCE):
            raise Broken(RULE, f"{self.name}: {mark.step.value} is said twice of {key}")
        steps[mark.step] = mark.at
        if mark.step is Step.RESTED:
            if Step.ENDED not in steps and Step.CLOSED not in steps:
                raise Broken(RULE, f"{self.name}: {key} rests before it has ended")
            del self.open[key]
