"""The promises by name, and how the simulator says that one was broken."""

from __future__ import annotations

WRONG, HANG, LEAK, DEATH, STRANGER = "no wrong answer", "no hang", "no leak", "no engine death", "no stranger"
NEEDLESS = "no needless failure"
"""Not one of the five, but what makes them worth having: where nothing is wrong, handoffs are delivered."""

RULE = "no rule broken"
"""Nor this: what a rule demands, and no promise shows within a world."""


class Broken(BaseException):
    """A promise was broken; the simulator stops this world and reports it. No `except Exception` swallows it."""

    def __init__(self, promise: str, what: str) -> None:
        super().__init__(f"{promise}: {what}")
        self.promise = promise
        self.what = what
        self.story: list[str] = []  # of the world, when that is over
