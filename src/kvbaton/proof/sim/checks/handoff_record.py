"""The marks of one incarnation's handoffs (`protocol/marks.py`), checked against what marks promise.

Laws: of one handoff on one side each step is said once (a claim as often as it greets, readers as often as they come),
it ends once and then rests once, and nothing is said of it after that. Nobody gives up before its time.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from kvbaton.proof.sim.checks.excuses import are_lies_told
from kvbaton.proof.sim.promises import HANG, NEEDLESS, RULE, Broken
from kvbaton.protocol.errors import Reason
from kvbaton.protocol.marks import Ended, Mark, Side, Step
from kvbaton.protocol.settings import Settings

_MORE_THAN_ONCE = {Step.CLAIMED, Step.PARKED, Step.SEATED, Step.WRITTEN, Step.COMMITTED, Step.STALE, Step.LEFT}
_OF_READERS = {Step.OFFERED, *_MORE_THAN_ONCE}
_TIMEOUTS = {Reason.CLAIM_TIMEOUT, Reason.DEFER_TIMEOUT, Reason.TRANSFER_TIMEOUT}
_EARLY = 0.9
"""Clocks drift, and one side's may be the one that counts."""

Take = Callable[[Sequence[Mark], Sequence[tuple[Any, float]], float, float], None]


class Record:
    """Of one life."""

    def __init__(self, name: str, settings: Settings, faults: Mapping[str, int]) -> None:
        self.name = name
        self._faults = faults
        self.open: dict[tuple[Side, int], dict[Step, float]] = {}
        self._soonest_s = _EARLY * min(
            settings.claim_timeout, settings.defer_timeout, settings.transfer_timeout, settings.max_hold_s
        )

    def watching(self, take: Take) -> Take:
        """The recorder's own, and this."""

        def watched(
            marks: Sequence[Mark], taken: Sequence[tuple[Any, float]], now: float, wall_offset_s: float
        ) -> None:
            for mark in marks:
                self._note(mark)
            take(marks, taken, now, wall_offset_s)

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
        if mark.step is Step.ENDED:
            self._check_end(mark, steps)
        elif mark.step is Step.RESTED:
            if Step.ENDED not in steps and Step.CLOSED not in steps:
                raise Broken(RULE, f"{self.name}: {key} rests before it has ended")
            del self.open[key]

    def _check_end(self, mark: Mark, steps: dict[Step, float]) -> None:
        assert isinstance(mark.what, Ended)
        waited_s = mark.at - steps[Step.ASKED]
        early = mark.what.end.reason in _TIMEOUTS and waited_s < self._soonest_s
        if early and not are_lies_told(self._faults):  # a liar may say that it waited
            raise Broken(NEEDLESS, f"{self.name}: {mark.what.end.reason} after {waited_s:.2f} s")
