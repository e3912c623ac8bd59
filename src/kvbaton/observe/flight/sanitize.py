"""Sanitises workers' reports before they are stored or shown: printable, bounded, under the reporter's own name.

Law: pure. An authenticated peer may still be wrong, or compromised: its texts end up on an operator's screen and its
numbers in arithmetic, so texts are escaped and invalid numbers are dropped.
"""

from __future__ import annotations

from typing import Any

import msgspec

from kvbaton.observe.flight.flight_records import NAME_CHARS_MAX, TEXT_CHARS_MAX, Flight, FlightSeat, Moment
from kvbaton.observe.flight.report import FlightReport
from kvbaton.protocol.ids import is_handoff_id

YEAR_9999 = 253_402_300_800.0
GAUGE_MAX = 2.0**63
"""Beyond it nothing is counted; sums and differences of what is left stay finite."""
_MOMENT_BYTES = 160
_FLIGHT_BYTES = 700


def clean(report: FlightReport, worker: str, incarnation: str) -> tuple[FlightReport, int]:
    """The sanitised report, and how many flights were dropped."""
    flights = [found for flight in report.flights if (found := clean_flight(flight, worker, incarnation)) is not None]
    tidy = FlightReport(
        at=_instant(report.at),
        gauges={printable(name): value for name, value in report.gauges.items() if abs(value) <= GAUGE_MAX},
        links={printable(name): printable(value) for name, value in report.links.items()},
        flights=tuple(flights),
        share=report.share if 0.0 <= report.share <= 1.0 else 1.0,
        missed=max(report.missed, 0),
        version=printable(report.version),
        host=printable(report.host),
    )
    return tidy, len(report.flights) - len(flights)


def clean_flight(flight: Flight, worker: str, incarnation: str) -> Flight | None:
    """The flight under the authenticated name; None if a worker cannot report it."""
    if flight.seat is FlightSeat.ROUTER or not flight.moments:
        return None
    if not is_handoff_id(flight.handoff) and (flight.handoff or not flight.failed):  # "": refused at D's door
        return None
    if not all(0.0 < moment.at < YEAR_9999 for moment in flight.moments):  # also where it is no number
        return None
    odd = not all(moment.step.isprintable() and moment.detail.isprintable() for moment in flight.moments)
    moments = flight.moments
    if odd:
        moments = tuple(
            Moment(printable(each.step), each.at, printable(each.detail, TEXT_CHARS_MAX)) for each in moments
        )
    return msgspec.structs.replace(
        flight,
        mistake=False,  # the router's to judge
        worker=worker,
        incarnation=incarnation,
        moments=moments,
        request=printable(flight.request),
        peers=tuple(printable(peer) for peer in flight.peers),
        mode=printable(flight.mode),
        transport=printable(flight.transport),
        end=printable(flight.end),
        detail=printable(flight.detail, TEXT_CHARS_MAX),
        trace=printable(flight.trace),
        parent=printable(flight.parent),
        legs=tuple(printable(leg) for leg in flight.legs),
    )


def printable(text: str, chars_max: int = NAME_CHARS_MAX) -> str:
    """The text with all terminal control characters escaped."""
    if text.isprintable():
        return text
    shown = "".join(
        char if char.isprintable() else char.encode("unicode_escape", "backslashreplace").decode() for char in text
    )
    return shown[:chars_max]


def printable_all(value: Any) -> Any:
    """Plain data with every text made printable."""
    if isinstance(value, str):
        return printable(value, TEXT_CHARS_MAX)
    if isinstance(value, dict):
        return {printable_all(name): printable_all(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [printable_all(each) for each in value]
    return value


def size_of(flight: Flight) -> int:
    """About how much memory it takes."""
    texts = sum(len(moment.step) + len(moment.detail) for moment in flight.moments)
    return _FLIGHT_BYTES + _MOMENT_BYTES * len(flight.moments) + texts + len(flight.detail) + len(flight.request)


def _instant(at: float) -> float:
    return at if 0.0 < at < YEAR_9999 else 0.0
