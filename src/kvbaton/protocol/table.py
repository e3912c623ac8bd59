"""Legality as a table: every (state, event) pair is decided as a transition, as LATE or as ILLEGAL.

LATE is what a healthy network produces (duplicates, crossings): ignored and counted. ILLEGAL is a peer's fault: refused
and counted against the sender. A pair in neither list cannot be constructed into a table, so a new state or event asks
all its questions at import.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Mapping
from typing import Generic, TypeVar

S = TypeVar("S", bound=enum.Enum)
E = TypeVar("E", bound=enum.Enum)


class Verdict(enum.Enum):
    """The verdict on a pair that is not a transition."""

    LATE = "late"
    ILLEGAL = "illegal"


class Table(Generic[S, E]):
    """A complete transition table over two enumerations."""

    __slots__ = ("events", "late", "name", "next", "states")

    def __init__(
        self,
        name: str,
        states: type[S],
        events: type[E],
        next: Mapping[tuple[S, E], S],
        late: Iterable[tuple[S, E]],
        illegal: Iterable[tuple[S, E]] = (),
    ) -> None:
        self.name = name
        self.states = states
        self.events = events
        self.next = dict(next)
        self.late = frozenset(late)
        bad = frozenset(illegal)
        for state in states:
            for event in events:
                pair = (state, event)
                decided = (pair in self.next) + (pair in self.late) + (pair in bad)
                if decided != 1:
                    raise ValueError(f"{name}: ({state.name}, {event.name}) is decided {decided} times")

    def step(self, state: S, event: E) -> S | Verdict:
        """The next state, or why there is none."""
        pair = (state, event)
        if pair in self.next:
            return self.next[pair]
        return Verdict.LATE if pair in self.late else Verdict.ILLEGAL


def pairs(states: Iterable[S], events: Iterable[E]) -> set[tuple[S, E]]:
    """Every combination of the two; for writing whole rows of a table."""
    listed = list(events)
    return {(state, event) for state in states for event in listed}
