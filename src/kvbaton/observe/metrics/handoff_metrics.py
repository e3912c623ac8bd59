"""Metrics derived from one engine's flights: outcomes, stage latencies, bytes copied.

Law: one writer (the node's thread) and any number of readers; `observe` never blocks for longer than a reader copies a
few hundred numbers, and the labels are the closed ones of `metric_names`, so memory does not grow.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator

import msgspec

from kvbaton.observe.flight.flight_records import DELIVERED, Flight, FlightSeat, stages
from kvbaton.observe.metrics import metric_names
from kvbaton.observe.metrics.exposition import Exemplar, Family, Histogram, Labels
from kvbaton.observe.metrics.metric_names import Metric, MetricKind

OBSERVED = (
    metric_names.HANDOFFS, metric_names.STAGE_SECONDS, metric_names.HANDOFF_SECONDS, metric_names.HANDOFF_BYTES,
    metric_names.LEASE_ENDS, metric_names.LEASE_HELD_SECONDS, metric_names.REPEATED,
)  # fmt: skip
"""What comes of flights and of nothing else."""


class Observation(msgspec.Struct, frozen=True):
    """An increment of a counter, or a value for a histogram."""

    metric: Metric
    labels: Labels
    value: float


def observations(flight: Flight) -> Iterator[Observation]:
    """The samples of an ended flight. The router's has its own metrics."""
    if flight.seat is FlightSeat.ROUTER or not flight.is_over:
        return
    mode, transport = flight.mode, flight.transport
    if flight.seat is FlightSeat.DECODE:
        yield _one(metric_names.HANDOFFS, (mode, transport, flight.end), 1)
        if flight.end == DELIVERED:
            yield from _times(flight)
    else:
        yield _one(metric_names.LEASE_ENDS, (mode, flight.end), 1)
        closed = flight.at("rested") or flight.at("closed")
        if closed is not None:
            yield _one(metric_names.LEASE_HELD_SECONDS, (mode,), max(closed - flight.began, 0.0))
    if flight.bytes:
        yield _one(metric_names.HANDOFF_BYTES, (mode, transport), float(flight.bytes))
    if flight.retries:
        yield _one(metric_names.REPEATED, (), flight.retries)


def _times(flight: Flight) -> Iterator[Observation]:
    """Only of delivered ones: how long a failure took depends on its timeout."""
    mode, transport = flight.mode, flight.transport
    for stage, seconds in stages(flight).items():
        yield _one(metric_names.STAGE_SECONDS, (stage, mode, transport), seconds)
    asked, taken = flight.at("asked"), flight.at("taken") or flight.at("ended")
    if asked is not None and taken is not None:
        yield _one(metric_names.HANDOFF_SECONDS, (mode, transport), max(taken - asked, 0.0))


def _one(metric: Metric, labels: Labels, value: float) -> Observation:
    return Observation(metric, metric.labelled(labels), value)


class Histograms:
    """Those of one metric, by labels."""

    def __init__(self, metric: Metric) -> None:
        self.metric = metric
        self._found: dict[Labels, Histogram] = {}

    def observe(self, labels: Labels, value: float, transfer: str = "", at: float = 0.0) -> None:
        self.of(labels).observe(value, transfer, at)

    def of(self, labels: Labels) -> Histogram:
        """That of these labels, to observe much in it."""
        found = self._found.get(labels)  # under which they are exported, as mostly
        if found is None:
            found = self._found.setdefault(self.metric.labelled(labels), Histogram(self.metric.buckets))
        return found

    def counted(self) -> dict[Labels, Histogram]:
        return dict(self._found)

    def add(self, labels: Labels, counted: Histogram) -> None:
        """Count what another process has counted."""
        self._found.setdefault(labels, Histogram(self.metric.buckets)).add(counted)

    def family(self) -> Family:
        return Family(self.metric, {labels: each.copy() for labels, each in self._found.items()})


class HandoffMetrics:
    """Give `observe` to `recorder.on_flight`."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._histograms = {each.name: Histograms(each) for each in OBSERVED if each.kind is MetricKind.HISTOGRAM}
        self._counts: dict[str, dict[Labels, float]] = {
            each.name: {} if each.labels else {(): 0} for each in OBSERVED if each.kind is MetricKind.COUNTER
        }
        self._exemplars: dict[str, dict[Labels, Exemplar]] = {name: {} for name in self._counts}

    def observe(self, flight: Flight) -> None:
        """A flight is over."""
        at = flight.moments[-1].at if flight.moments else 0.0
        with self._lock:
            for each in observations(flight):
                name = each.metric.name
                if name in self._histograms:
                    self._histograms[name].observe(each.labels, each.value, flight.handoff, at)
                else:
                    counts = self._counts[name]
                    counts[each.labels] = counts.get(each.labels, 0) + each.value
                    if flight.handoff:
                        self._exemplars[name][each.labels] = Exemplar(flight.handoff, each.value, at)

    def families(self) -> list[Family]:
        with self._lock:
            counters = [
                Family(metric_names.BY_NAME[name], {**counts}, {**self._exemplars[name]})
                for name, counts in self._counts.items()
            ]
            return [*counters, *(each.family() for each in self._histograms.values())]
