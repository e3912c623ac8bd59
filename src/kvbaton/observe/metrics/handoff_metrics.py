"""Metrics derived from one engine's flights: outcomes, stage latencies, bytes copied.

Law: one writer (the node's thread) and any number of readers; `observe` never blocks for longer than a reader copies a
few hundred numbers, and the labels are the closed ones of `metric_names`, so memory does not grow.

Counters of one engine's ledger, control plane and transports, by metric names without their `kvbaton_`.

Law: only reads of ints and copies of small dicts, so that any thread may call it while the node's thread runs.
"""

from __future__ import annotations

import math
import threading
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import msgspec

from kvbaton.observe.flight.flight_records import DELIVERED, Flight, FlightSeat, stages
from kvbaton.observe.metrics import metric_names
from kvbaton.observe.metrics.exposition import Family, Labels
from kvbaton.observe.metrics.metric_names import Metric, MetricKind
from kvbaton.observe.metrics.metric_types import Exemplar, Histogram
from kvbaton.transports.core.transport import refusals_of

if TYPE_CHECKING:
    from kvbaton.protocol.machines.ledger import Ledger
    from kvbaton.transports.core.transport import Transport

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


_BY_REASON = {
    "leases_refused_total": "lease_refused.",
    "claims_refused_total": "claim_refused.",
    "offers_refused_total": "offer_refused.",
    "abandoned_total": "abandoned.",
    "hello_refused_total": "hello_refused.",
    "frames_refused_total": "frames_refused.",
    "sessions_total": "sessions.",
    "links_total": "links.",
    "planes_given_up_total": "planes_given_up.",
    "ends_total": "ends.",
    "turns_total": "turns.",
}
_FRONTS = {front.removesuffix("."): name for name, front in _BY_REASON.items()}
_PLAIN = {
    "bytes_total": "bytes_moved",
    "copies_total": "copies",
    "leases_total": "leases",
    "leases_expired_total": "leases_expired",
    "leases_discarded_total": "leases_discarded",
    "commits_good_total": "commits.good",
    "commits_stale_total": "commits.stale",
    "cache_resets_total": "cache_resets",
    "cache_reset_blocks_total": "cache_reset_blocks",
}


def counters(ledger: Ledger, control: Mapping[str, int]) -> dict[str, int | dict[str, int]]:
    """Counters. `control`: those of its control plane."""
    counts = dict(ledger.desk.counts)
    quotas = {what: counts.get(f"over_quota.{what}", 0) for what in ("greetings", "sessions")}
    return {
        **{name: counts.get(key, 0) for name, key in _PLAIN.items()},
        **_by_name(counts),
        "over_quota_total": {"frames": control.get("over_quota", 0), **quotas},
        **connections(control),
    }


def connections(control: Mapping[str, int]) -> dict[str, int]:
    """Connections to a control port."""
    return {
        "connections_total": control.get("connections", 0),
        "connections_admitted_total": control.get("admitted", 0),
        "connections_refused_total": control.get("refused", 0),
    }


def data_refused(ranks: Iterable[Mapping[str, Transport]]) -> dict[str, int]:
    """Refusals at the data ports of all ranks: `transport:cause`. All causes of each transport, from zero on."""
    found: Counter[str] = Counter()
    for rank in ranks:
        for name, transport in rank.items():
            for cause, count in refusals_of(transport).items():
                found[f"{name}:{cause}"] += count
    return dict(found)


def gauges(ledger: Ledger, now: float, blocks: float = math.inf) -> dict[str, float]:
    """Gauges; `now` is the node's clock, `blocks` those of the engine's cache, where they are known."""
    settings = ledger.desk.settings
    return {
        "leases_held": len(ledger.producer.leases),
        "claims_parked": ledger.producer.claims.waiting,
        "intakes": len(ledger.consumer.by_handoff),
        "quarantined_blocks": ledger.consumer.quarantined_blocks,
        "quarantine_max_blocks": min(settings.quarantine_blocks_max, blocks),
        "oldest_lease_seconds": _oldest(ledger, now),
        "lease_hold_max_seconds": settings.max_hold_s,
    }


def figures(ledger: Ledger, control: Mapping[str, int], now: float, blocks: int) -> dict[str, Any]:
    """Both, for a worker's `/stats`."""
    return {**gauges(ledger, now, blocks), **counters(ledger, control)}


def _oldest(ledger: Ledger, now: float) -> float:
    hold_s = ledger.desk.settings.max_hold_s
    leases = list(ledger.producer.leases.values())
    begun = [lease.term.hold_until - hold_s for lease in leases if not lease.term.is_turn]
    return round(max(now - min(begun), 0.0), 3) if begun else 0.0


def _by_name(counts: Mapping[str, int]) -> dict[str, dict[str, int]]:
    """In one pass: an engine's scheduler calls it at every step."""
    found: dict[str, dict[str, int]] = {name: {} for name in _FRONTS.values()}
    for key, count in counts.items():
        front, dot, label = key.partition(".")
        if dot and front in _FRONTS:
            found[_FRONTS[front]][label] = count
    return found
