"""Bounded storage of journeys, oldest first, charged to the worker that reported them.

Law: when room is needed, the oldest story of the worker that holds the most is evicted: however much one worker
reports, it evicts its own stories and not those of the others. What the router itself saw is charged to the router,
whoever reported it first.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from kvbaton.observe.flight.flight_records import Flight, FlightSeat

ROUTER = ""
"""The teller of what the router saw; no worker has this name."""


@dataclass(slots=True)
class Story:
    """The records of one handoff, or of one attempt without a handoff."""

    key: str
    teller: str
    sides: dict[tuple[FlightSeat, str, str, str], Flight] = field(default_factory=dict)
    bytes: int = 0
    failed: bool = False


@dataclass(slots=True)
class _Bill:
    stories: dict[str, None] = field(default_factory=dict)  # keys, oldest first
    bytes: int = 0


class JourneyStore:
    """Stories by key. Not thread-safe; the owner has a lock."""

    def __init__(self) -> None:
        self._stories: dict[str, Story] = {}
        self._bills: dict[str, _Bill] = {}

    def __len__(self) -> int:
        return len(self._stories)

    def __contains__(self, key: str) -> bool:
        return key in self._stories

    def __iter__(self) -> Iterator[Story]:
        return iter(self._stories.values())

    def __reversed__(self) -> Iterator[Story]:
        return reversed(self._stories.values())

    def get(self, key: str) -> Story | None:
        return self._stories.get(key)

    def add(self, story: Story) -> None:
        self._stories[story.key] = story
        bill = self._bills.setdefault(story.teller, _Bill())
        bill.stories[story.key] = None
        bill.bytes += story.bytes

    def take(self, key: str) -> Story:
        """The story, no longer here."""
        story = self._stories.pop(key)
        self._strike(story)
        return story

    def grow(self, story: Story, by_bytes: int) -> None:
        story.bytes += by_bytes
        self._bills[story.teller].bytes += by_bytes

    def hand_over(self, story: Story, teller: str) -> None:
        """Charge it to another owner from here on, as the newest there."""
        self._strike(story)
        story.teller = teller
        bill = self._bills.setdefault(teller, _Bill())
        bill.stories[story.key] = None
        bill.bytes += story.bytes

    def drop(self, *, for_bytes: bool = False) -> Story:
        """Forget the oldest story of the owner that holds the most stories, or the most bytes."""
        bills = self._bills.values()
        most = max(bills, key=lambda bill: bill.bytes if for_bytes else len(bill.stories))
        return self.take(next(iter(most.stories)))

    def _strike(self, story: Story) -> None:
        bill = self._bills[story.teller]
        del bill.stories[story.key]
        bill.bytes -= story.bytes
        if not bill.stories:
            del self._bills[story.teller]
