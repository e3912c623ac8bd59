"""Records from anywhere, in any order, as journeys: `kvbaton inspect --files` works without a router.

Law: pure; the last finished record of a side stands, whatever came first.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from kvbaton.observe.flight.flight_records import Flight, FlightSeat
from kvbaton.observe.flight.journey import Journey, join

FIND_CHARS_MIN = 6
"""Of the beginning of a transfer id, or of a part of a request id."""
NO_DUMP = "no dump given"


def key_of(flight: Flight) -> str:
    """The common key of one handoff's records; an attempt without a handoff stands alone."""
    return flight.handoff or f"{flight.request}#{flight.retries}@{flight.began!r}"


def side_of(flight: Flight) -> tuple[FlightSeat, str, str, str]:
    """The writer and the request of a record; a later record of the same replaces it."""
    return flight.seat, flight.worker, flight.incarnation, flight.request


def matches(flight: Flight, text: str) -> bool:
    """Whether this id refers to this record."""
    if text in (flight.handoff, flight.request):
        return True
    return len(text) >= FIND_CHARS_MIN and (flight.handoff.startswith(text) or text in flight.request)


def began(flights: Iterable[Flight]) -> float:
    """When the router saw it first, or else any side."""
    known = list(flights)
    router = [flight.began for flight in known if flight.seat is FlightSeat.ROUTER]
    return min(router or [flight.began for flight in known])


def tries_of(groups: Iterable[Sequence[Flight]]) -> dict[str, int]:
    """The number of known attempts of each request; clients may use one id for several requests."""
    tries: dict[str, int] = {}
    for group in groups:
        for flight in group:
            if flight.seat is FlightSeat.ROUTER:
                tries[flight.request] = max(tries.get(flight.request, 1), flight.retries + 1)
    return tries


Answered = tuple[int, float]
"""A try that was answered: its number, and when it began."""


def answered(groups: Iterable[Sequence[Flight]]) -> dict[str, Answered]:
    """The repeated attempts that were answered, by request."""
    return {
        flight.request: (flight.retries, flight.began)
        for group in groups
        for flight in group
        if is_answered_retry(flight)
    }


def is_answered_retry(flight: Flight) -> bool:
    return flight.seat is FlightSeat.ROUTER and flight.retries > 0 and flight.end == "ok"


def answered_by(group: Iterable[Flight], found: Mapping[str, Answered]) -> int | None:
    """The later try of the same request that was answered; clients may use one id for several requests."""
    router = next((flight for flight in group if flight.seat is FlightSeat.ROUTER), None)
    number, at = found.get(router.request, (0, 0.0)) if router is not None else (0, 0.0)
    return number if router is not None and number > router.retries and at >= router.began else None


def joined(flights: Iterable[Flight], *, last: int, failed: bool = False, find: str = "") -> list[Journey]:
    """Newest first."""
    stories: dict[str, dict[tuple[FlightSeat, str, str, str], Flight]] = {}
    for flight in flights:
        sides = stories.setdefault(key_of(flight), {})
        before = sides.get(side_of(flight))
        if before is None or not before.is_over or flight.is_over:
            sides[side_of(flight)] = flight
    groups = [list(sides.values()) for sides in stories.values()]
    retried = answered(groups)
    if find:
        groups = [group for group in groups if any(matches(flight, find) for flight in group)]
    if failed:
        groups = [group for group in groups if any(flight.failed for flight in group)]
    groups.sort(key=began, reverse=True)
    tries = tries_of(groups)
    return [
        join(
            group,
            why=lambda _, __: NO_DUMP,
            tries=max((tries.get(each.request, 1) for each in group), default=1),
            answered_by=answered_by(group, retried),
        )
        for group in groups[:last]
    ]
