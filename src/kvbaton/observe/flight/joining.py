"""Records from anywhere, in any order, as journeys: what `kvbaton inspect --files` does without a router.

Law: pure; the last record of a side that is over stands, whatever came first.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from kvbaton.observe.flight.flight_records import Flight, FlightSeat
from kvbaton.observe.flight.journey import Journey, join

FIND_CHARS_MIN = 6
"""Of the beginning of a transfer id, or of a part of a request id."""
NO_DUMP = "no dump of it was given"


def key_of(flight: Flight) -> str:
    """What records of one handoff share; a try that came to none stands alone."""
    return flight.handoff or f"{flight.request}#{flight.retries}@{flight.began!r}"


def side_of(flight: Flight) -> tuple[FlightSeat, str, str, str]:
    """Who wrote it, and of which of its requests; a later record of the same replaces it."""
    return flight.seat, flight.worker, flight.incarnation, flight.request


def matches(flight: Flight, text: str) -> bool:
    """Whether somebody who gives this id means this record."""
    if text in (flight.handoff, flight.request):
        return True
    return len(text) >= FIND_CHARS_MIN and (flight.handoff.startswith(text) or text in flight.request)


def began(flights: Iterable[Flight]) -> float:
    """When the router saw it first, or else anybody."""
    known = list(flights)
    router = [flight.began for flight in known if flight.seat is FlightSeat.ROUTER]
    return min(router or [flight.began for flight in known])


def tries_of(groups: Iterable[Sequence[Flight]]) -> dict[str, int]:
    """How many tries of each request are known; clients may give one id to several requests."""
    tries: dict[str, int] = {}
    for group in groups:
        for flight in group:
            if flight.seat is FlightSeat.ROUTER:
                tries[flight.request] = max(tries.get(flight.request, 1), flight.retries + 1)
    return tries


def joined(flights: Iterable[Flight], *, last: int, failed: bool = False, find: str = "") -> list[Journey]:
    """Newest first."""
    stories: dict[str, dict[tuple[FlightSeat, str, str, str], Flight]] = {}
    for flight in flights:
        sides = stories.setdefault(key_of(flight), {})
        before = sides.get(side_of(flight))
        if before is None or not before.is_over or flight.is_over:
            sides[side_of(flight)] = flight
    groups = [list(sides.values()) for sides in stories.values()]
    if find:
        groups = [group for group in groups if any(matches(flight, find) for flight in group)]
    if failed:
        groups = [group for group in groups if any(flight.failed for flight in group)]
    groups.sort(key=began, reverse=True)
    tries = tries_of(groups)
    return [
        join(group, why=lambda _, __: NO_DUMP, tries=max((tries.get(each.request, 1) for each in group), default=1))
        for group in groups[:last]
    ]
