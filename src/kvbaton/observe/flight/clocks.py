"""Clock offsets between the sides of a handoff, inferred from cause and effect.

Law: pure. Clocks that could all be right are taken as right: a correction is made only where an effect would precede
its cause, and then the smallest that orders all of them. Where none does, the nearest is taken, and marked as doubtful.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import msgspec

from kvbaton.observe.flight.flight_records import DELIVERED, Flight, FlightSeat

SLACK_S = 0.002
"""Threads write their marks down a little late; within this no clock is called wrong."""

_R, _P, _D = FlightSeat.ROUTER, FlightSeat.PREFILL, FlightSeat.DECODE

BEFORE: tuple[tuple[FlightSeat, str, FlightSeat, str], ...] = (
    (_R, "prefill_sent", _P, "accepted"),
    (_R, "prefill_sent", _P, "begun"),
    (_P, "begun", _R, "prefill_answered"),
    (_P, "complete", _R, "prefill_answered"),
    (_R, "decode_sent", _D, "asked"),
    (_D, "taken", _R, "first_byte"),
    (_D, "claimed", _P, "parked"),
    (_D, "claimed", _P, "seated"),
    (_P, "seated", _D, "granted"),
    (_D, "offered", _P, "offered"),
    (_P, "complete", _D, "copied"),
    (_D, "copied", _P, "committed"),
)
"""A step of one side, and one of another that it must have come before."""
BEFORE_IF_DELIVERED: tuple[tuple[FlightSeat, str, FlightSeat, str], ...] = (
    (_D, "ended", _R, "first_byte"),
    (_P, "committed", _D, "ended"),
    (_P, "written", _D, "ended"),
)
"""The same, for a handoff that came through."""


class Offsets(msgspec.Struct, frozen=True):
    """Seconds to add to each side's times, in the order of the flights that were given."""

    seconds: tuple[float, ...]
    doubtful: bool = False  # no offset puts every effect after its cause


def offsets(flights: Sequence[Flight]) -> Offsets:
    """By the clock of the first flight."""
    limits = _limits(flights)
    if all(limit >= -SLACK_S for limit in limits.values()):
        return Offsets((0.0,) * len(flights))
    count = len(flights)
    closed = _closed(limits, count)
    if any(closed[index][index] < -1e-9 for index in range(count)):
        return Offsets(tuple(_nearest(limits, index) for index in range(count)), doubtful=True)
    orders = (range(1, count), range(count - 1, 0, -1))
    return Offsets(min((_placed(closed, order) for order in orders), key=_cost))


def _cost(shifts: Sequence[float]) -> tuple[int, float]:
    """As few clocks as possible are considered wrong, and by as little as possible."""
    return sum(1 for shift in shifts if abs(shift) > SLACK_S), sum(map(abs, shifts))


def _limits(flights: Sequence[Flight]) -> dict[tuple[int, int], float]:
    """(i, j): the offset of i less that of j may be this much at most."""
    limits: dict[tuple[int, int], float] = {}
    for i, first in enumerate(flights):
        for j, second in enumerate(flights):
            if i == j:
                continue
            for seat, step, other, later in _pairs(first, second):
                if (first.seat, second.seat) != (seat, other):
                    continue
                cause, effect = first.at(step), second.at(later)
                if cause is not None and effect is not None:
                    limits[i, j] = min(limits.get((i, j), math.inf), effect - cause)
    return limits


def _pairs(first: Flight, second: Flight) -> Sequence[tuple[FlightSeat, str, FlightSeat, str]]:
    decoding = first if first.seat is _D else second if second.seat is _D else None
    delivered = decoding is not None and decoding.end == DELIVERED
    return (*BEFORE, *BEFORE_IF_DELIVERED) if delivered else BEFORE


def _closed(limits: Mapping[tuple[int, int], float], count: int) -> list[list[float]]:
    """The limits that follow from all limits together, for every two sides."""
    table = [[0.0 if i == j else limits.get((i, j), math.inf) for j in range(count)] for i in range(count)]
    _close(table)
    return table


def _close(table: list[list[float]]) -> None:
    count = range(len(table))
    for k in count:
        for i in count:
            for j in count:
                table[i][j] = min(table[i][j], table[i][k] + table[k][j])


def _placed(closed: Sequence[Sequence[float]], order: Sequence[int]) -> tuple[float, ...]:
    """Each side in turn as near to 0 as it may be, given those that are placed already."""
    table = [list(row) for row in closed]
    found = [0.0] * len(table)
    for index in order:
        low, high = -table[0][index], table[index][0]
        found[index] = min(max(0.0, low), high)
        table[index][0] = found[index]
        table[0][index] = -found[index]
        _close(table)
    return tuple(found)


def _nearest(limits: Mapping[tuple[int, int], float], index: int) -> float:
    """The smallest violation of the order with the first side, for one whose limits contradict each other."""
    high, low = limits.get((index, 0), math.inf), -limits.get((0, index), math.inf)
    if index == 0 or (low <= 0.0 <= high):
        return 0.0
    if low > high:
        return (low + high) / 2
    return low if low > 0 else high
