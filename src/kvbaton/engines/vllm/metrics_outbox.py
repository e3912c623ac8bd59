"""What flights add to metrics, on its way from the node's thread to vLLM's metrics, which live in another process.

Laws: bounded; the oldest are lost first, which costs a histogram some counts and nothing else. What crosses is plain
msgpack data, of metrics that are on the list.
"""

from __future__ import annotations

from collections import deque
from typing import Any

from kvbaton.observe.flight.flight_records import Flight
from kvbaton.observe.metrics.handoff_metrics import observations

FLIGHTS_MAX = 512
Row = list[Any]
"""A metric's name, its labels, the value."""


class Tray:
    """Flights that were not told yet. Give `add` to `recorder.on_flight`."""

    def __init__(self) -> None:
        self._flights: deque[list[Row]] = deque(maxlen=FLIGHTS_MAX)

    def add(self, flight: Flight) -> None:
        """On the node's thread, which does the work: a scheduler's step must not wait for it."""
        self._flights.append([[each.metric.name, list(each.labels), each.value] for each in observations(flight)])

    def take(self) -> list[Row]:
        """What is new since the last time; the other thread may add meanwhile."""
        rows: list[Row] = []
        for _ in range(len(self._flights)):
            rows += self._flights.popleft()
        return rows
