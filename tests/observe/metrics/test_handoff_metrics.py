"""Flights, counted."""

from __future__ import annotations

import threading
from collections.abc import Sequence

from kvbaton.observe.flight.flight_records import Flight, FlightSeat, Moment
from kvbaton.observe.metrics import metric_names
from kvbaton.observe.metrics.exposition import Family, render
from kvbaton.observe.metrics.handoff_metrics import OBSERVED, HandoffMetrics
from kvbaton.observe.metrics.metric_names import Metric
from kvbaton.observe.metrics.metric_types import Histogram

TIMES = ("asked", 10.0), ("granted", 10.5), ("allocated", 11.5), ("first_byte", 11.75), ("copied", 13.5)
END = ("ended", 13.75), ("taken", 14.75), ("rested", 14.8)


def flight(
    seat: FlightSeat = FlightSeat.DECODE,
    end: str = "delivered",
    times: Sequence[tuple[str, float]] = (*TIMES, *END),
    mode: str = "pull",
    transport: str = "shm",
    size: int = 4096,
    retries: int = 0,
) -> Flight:
    return Flight(
        seat=seat, worker="d0", handoff="h1", mode=mode, transport=transport, bytes=size, end=end,
        retries=retries, moments=tuple(Moment(step, at) for step, at in times),
    )  # fmt: skip


def found(metrics: HandoffMetrics, metric: Metric) -> Family:
    (family,) = [each for each in metrics.families() if each.metric is metric]
    return family


def sums(metrics: HandoffMetrics, metric: Metric) -> dict[tuple[str, ...], tuple[int, float]]:
    samples = found(metrics, metric).samples.items()
    return {labels: (each.count, each.sum) for labels, each in samples if isinstance(each, Histogram)}


def test_a_delivered_handoff_is_counted_and_each_of_its_stages_timed() -> None:
    metrics = HandoffMetrics()
    metrics.observe(flight(retries=2))
    assert found(metrics, metric_names.HANDOFFS).samples == {("pull", "shm", "delivered"): 1}
    assert sums(metrics, metric_names.STAGE_SECONDS) == {
        (stage, "pull", "shm"): (1, seconds)
        for stage, seconds in {
            "claim": 0.5, "queue": 1.0, "first_byte": 0.25, "copy": 2.0, "commit": 0.25, "deliver": 1.0,
        }.items()
    }  # fmt: skip
    assert sums(metrics, metric_names.HANDOFF_SECONDS) == {("pull", "shm"): (1, 4.75)}
    assert sums(metrics, metric_names.HANDOFF_BYTES) == {("pull", "shm"): (1, 4096.0)}
    assert found(metrics, metric_names.REPEATED).samples == {(): 2}


def test_a_failure_is_counted_by_its_reason_and_not_timed() -> None:
    metrics = HandoffMetrics()
    for _ in range(2):
        metrics.observe(flight(end="claim_timeout", times=[("asked", 1.0), ("ended", 11.0)], transport="", size=0))
    assert found(metrics, metric_names.HANDOFFS).samples == {("pull", "none", "claim_timeout"): 2}
    assert sums(metrics, metric_names.STAGE_SECONDS) == sums(metrics, metric_names.HANDOFF_SECONDS) == {}


def test_a_lease_is_counted_at_p_with_how_long_it_was_held() -> None:
    metrics = HandoffMetrics()
    times = [("begun", 5.0), ("seated", 6.0), ("closed", 8.0), ("rested", 9.0)]
    metrics.observe(flight(FlightSeat.PREFILL, times=times, mode="push", transport="tcp"))
    assert found(metrics, metric_names.LEASE_ENDS).samples == {("push", "delivered"): 1}
    assert sums(metrics, metric_names.LEASE_HELD_SECONDS) == {("push",): (1, 4.0)}
    assert sums(metrics, metric_names.HANDOFF_BYTES) == {("push", "tcp"): (1, 4096.0)}, "in push P copies"
    assert found(metrics, metric_names.HANDOFFS).samples == {}


def test_the_routers_flights_and_those_under_way_are_not_counted_here() -> None:
    metrics = HandoffMetrics()
    metrics.observe(flight(FlightSeat.ROUTER))
    metrics.observe(flight(end=""))
    samples = [each.samples for each in metrics.families() if each.metric is not metric_names.REPEATED]
    assert samples == [{}] * len(samples) and len(samples) == len(OBSERVED) - 1


def test_a_transfer_can_be_found_from_what_was_counted() -> None:
    metrics = HandoffMetrics()
    metrics.observe(flight(end="stale"))
    metrics.observe(flight())
    text = render(metrics.families(), openmetrics=True)
    stale = next(line for line in text.splitlines() if 'end="stale"' in line)
    assert stale.endswith('1 # {transfer_id="h1"} 1 14.800')
    copies = [line for line in text.splitlines() if 'stage="copy"' in line and "transfer_id" in line]
    assert len(copies) == 1 and 'le="2.0"' in copies[0]


def test_what_peers_make_up_does_not_grow_the_page() -> None:
    metrics = HandoffMetrics()
    for number in range(500):
        metrics.observe(flight(end=f"reason {number}", mode=f"mode {number}", transport=f"plane {number}"))
    assert found(metrics, metric_names.HANDOFFS).samples == {("other", "other", "other"): 500}


def test_it_is_read_while_it_is_written() -> None:
    metrics = HandoffMetrics()
    writer = threading.Thread(target=lambda: [metrics.observe(flight()) for _ in range(2000)])
    writer.start()
    while writer.is_alive():
        for count, total in sums(metrics, metric_names.HANDOFF_SECONDS).values():
            assert abs(total - 4.75 * count) < 1e-6
    writer.join(30)
    assert sums(metrics, metric_names.HANDOFF_SECONDS)["pull", "shm"][0] == 2000
