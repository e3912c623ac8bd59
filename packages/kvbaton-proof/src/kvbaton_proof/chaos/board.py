"""The outcome of every request: one line each, from which rows and totals are counted.

Law: a request is counted once, when it is over or when its time is; what nobody expected of it does not count it.
"""

from __future__ import annotations

import enum
from collections import Counter, deque
from dataclasses import dataclass, field

import msgspec

LINES_MAX = 1 << 20
WRONGS_MAX = 20
"""Kept word for word; all are counted."""


class Verdict(enum.StrEnum):
    RIGHT = "right"
    ERROR = "error"  # told so, with a status, an event or by a closed connection
    WRONG = "wrong"
    LATE = "late"


class Ended(msgspec.Struct, frozen=True):
    """One request. Instants on the conductor's clock."""

    began_at: float
    ended_at: float
    verdict: Verdict
    kind: str = ""  # of an error
    pair: str = ""  # who answered, P/D, where the router said so


class Counts(msgspec.Struct, frozen=True):
    requests: int
    right: int
    errors: int
    wrong: int
    late: int


@dataclass(slots=True)
class Board:
    """All requests of a run. Totals never forget; lines are kept up to a bound, for the rows."""

    totals: Counter[Verdict] = field(default_factory=Counter)
    kinds: Counter[str] = field(default_factory=Counter)
    wrongs: list[str] = field(default_factory=list)
    lates: list[str] = field(default_factory=list)
    slowest_s: float = 0.0
    lines: deque[Ended] = field(default_factory=lambda: deque(maxlen=LINES_MAX))

    def note(self, ended: Ended, what: str = "") -> None:
        self.totals[ended.verdict] += 1
        self.lines.append(ended)
        self.slowest_s = max(self.slowest_s, ended.ended_at - ended.began_at)
        if ended.verdict is Verdict.ERROR:
            self.kinds[ended.kind] += 1
        elif ended.verdict is Verdict.WRONG and len(self.wrongs) < WRONGS_MAX:
            self.wrongs.append(what)
        elif ended.verdict is Verdict.LATE and len(self.lates) < WRONGS_MAX:
            self.lates.append(what)

    def counts(self) -> Counts:
        return _counts(self.totals)

    def between(self, begin: float, end: float) -> Counts:
        """The requests that ended in this time."""
        found: Counter[Verdict] = Counter()
        for line in reversed(self.lines):  # nearly in the order in which they ended: late ones are noted when it is so
            if line.ended_at < begin:
                break
            if line.ended_at <= end:
                found[line.verdict] += 1
        return _counts(found)

    def right_since(self, instant: float, who: str = "") -> float | None:
        """When the first right answer ended that began after `instant`; None: none yet.

        `who` has part in it: a member, or both ends of a link (p0-d1). The router has part in every one.
        """
        needed = {name for name in who.split("-") if name and name != "router"}
        ends = []
        for line in reversed(self.lines):
            if line.ended_at < instant:
                break
            is_it = line.verdict is Verdict.RIGHT and line.began_at >= instant
            if is_it and any(needed <= set(pair.split("/")) for pair in line.pair.split(",")):
                ends.append(line.ended_at)
        return min(ends, default=None)


def _counts(found: Counter[Verdict]) -> Counts:
    return Counts(
        sum(found.values()), found[Verdict.RIGHT], found[Verdict.ERROR], found[Verdict.WRONG], found[Verdict.LATE]
    )
