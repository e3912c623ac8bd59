"""Rate limits for log lines, so that no peer can fill a log."""

from __future__ import annotations

FIRST = 8


def worth_saying(count: int) -> bool:
    """Whether the `count`th report of one kind should be logged: the first few, then ever more rarely."""
    return count <= FIRST or count & (count - 1) == 0
