"""A worker's page, and the router's: everything that they count is shown, by a listed name."""

from __future__ import annotations

import asyncio
import socket
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as read

from kvbaton.control import keyring
from kvbaton.engines.embedded.embedded_worker import EmbeddedWorker
from kvbaton.engines.embedded.worker_options import WorkerOptions
from kvbaton.observe.metrics import handoff_metrics, metric_names
from kvbaton.observe.metrics.exposition import render
from kvbaton.observe.metrics.handoff_metrics import OBSERVED, HandoffMetrics
from kvbaton.observe.metrics.metric_names import BY_NAME, MetricKind, Where
from kvbaton.observe.metrics.process_metrics import NOT_METRICS, RENAMED, render_worker
from kvbaton.protocol.ids import Incarnation, PeerId, WorkerId
from kvbaton.router.router_stats import RouterStats, count
from kvbaton.testing.transport_harness import poll
from kvbaton.transports.core.transport import Cause, refusals_of
from kvbaton.transports.tcp.tcp_transport import TcpEndpoint

D = PeerId(WorkerId("d0"), Incarnation(1))


async def asked(directory: Path) -> tuple[Mapping[str, Any], str]:
    """The figures and the page of a worker that has just started."""
    keyring.mint(directory, ["p0"])
    options = WorkerOptions(name="p0", role="prefill", keys=str(directory), registry="tcp://127.0.0.1:1", blocks=8)
    worker = EmbeddedWorker(options, keyring.load(directory, "p0"))
    worker.start()
    try:
        stats = {**worker.door.stats(), "http_malformed_total": 0}  # which its HTTP server adds
        return stats, render_worker(stats, worker.node.watch.handoffs, True, worker.thread.times.families())
    finally:
        await asyncio.to_thread(worker.stop)


def test_every_figure_of_a_real_worker_is_a_metric_or_said_to_be_none(tmp_path: Path) -> None:
    stats, text = asyncio.run(asked(tmp_path / "keys"))
    unknown = [k for k in stats if k not in RENAMED and k not in NOT_METRICS and f"kvbaton_{k}" not in BY_NAME]
    assert unknown == []
    samples = [sample for family in read(text) for sample in family.samples]
    shown = {sample.name for sample in samples}
    assert all(each.labels["worker"] == "p0" for each in samples), "to group by, on every series"
    assert {each.labels.get("role") for each in samples} == {"prefill"}
    quiet = {m.name for m in metric_names.of(Where.WORKER) if m.labels and not m.from_zero} | {m.name for m in OBSERVED}
    silent = [m.name for m in metric_names.of(Where.WORKER) if m.name not in quiet and not set(m.series) <= shown]
    assert silent == [], "all that is said to be told by workers is told, if it can be before anything has happened"


async def visited(directory: Path) -> tuple[str, str]:
    """The page of a worker before and after a stranger was at the data port of its second rank."""
    keyring.mint(directory, ["p0"])
    options = WorkerOptions(
        name="p0",
        role="prefill",
        keys=str(directory),
        registry="tcp://127.0.0.1:1",
        blocks=8,
        tp=2,
        transport="tcp,shm",
    )
    worker = EmbeddedWorker(options, keyring.load(directory, "p0"))
    worker.start()
    try:
        port = worker.node.ranks[1]["tcp"]
        there = msgspec.msgpack.decode(port.endpoint(D), type=TcpEndpoint)
        before = render_worker(worker.door.stats(), None, False)
        with socket.create_connection((there.host, there.port), 20) as stranger:
            stranger.sendall(b"GET /metrics HTTP/1.1\r\nHost: a-port-like-any-other\r\n\r\n")
            assert await asyncio.to_thread(poll, lambda: sum(refusals_of(port).values()) > 0, 20)
        return before, render_worker(worker.door.stats(), None, False)
    finally:
        await asyncio.to_thread(worker.stop)


def test_a_stranger_at_a_data_port_is_on_the_page_and_zero_before(tmp_path: Path) -> None:
    before, after = (text.splitlines() for text in asyncio.run(visited(tmp_path / "keys")))
    line = 'kvbaton_data_refused_total{{role="prefill",worker="p0",transport="{}",reason="{}"}} {}'
    for plane in ("tcp", "shm"):
        for cause in set(Cause) - {Cause.OTHER}:
            assert line.format(plane, cause, 0) in before
            assert line.format(plane, cause, int((plane, cause) == ("tcp", "bad_greeting"))) in after


def test_figures_become_series_with_the_labels_of_the_list() -> None:
    stats = {
        "worker": "p0", "role": "both", "pins": 3, "ends_total": {"delivered": 2, "of tomorrow": 1}, "running": 1,
        "waiting": 0, "links": {"p0": "shm", "p1": "shm"}, "planes": ["shm"], "incarnation": "00", "handoffs_total": 3,
    }  # fmt: skip
    lines = render_worker(stats, None, False).splitlines()
    for line in (
        'kvbaton_pinned_blocks{role="both",worker="p0"} 3',
        'kvbaton_ends_total{role="both",worker="p0",end="delivered"} 2',
        'kvbaton_ends_total{role="both",worker="p0",end="other"} 1',
        'kvbaton_ends_total{role="both",worker="p0",end="stale"} 0',
        'kvbaton_engine_requests{role="both",worker="p0",state="running"} 1',
        'kvbaton_links_open{role="both",worker="p0",transport="shm"} 2',
    ):
        assert line in lines
    assert not any(line.startswith("kvbaton_handoffs_total") for line in lines), "that is counted from flights"


def test_the_oldest_lease_ages_and_connections_are_told() -> None:
    control = Counter({"connections": 5, "admitted": 3, "refused": 1, "frames_in": 9})
    assert handoff_metrics.connections(control) == {
        "connections_total": 5, "connections_admitted_total": 3, "connections_refused_total": 1
    }  # fmt: skip


def test_all_that_the_router_counts_is_shown() -> None:
    stats = RouterStats()
    stats.ended("ok", 200)
    stats.ended("worker_timeout", 504)
    stats.ended("full", 429)
    stats.ended("client_gone", 0)
    stats.failures["prefill:late:worker_timeout"] += 1
    count(stats.failures, "an odd code of a worker", "decode")
    count(stats.waits.moves_failed, "differs")
    stats.waits.note("pull", 2.0, (0.5, 1.5), "t1")
    stats.waits.ended("pull", 3.0, 100, 7, "t1")
    stats.waits.between.observe(("pull",), 0.02)
    stats.waits.leg("asked", "prefill", "p0")
    stats.waits.leg("failed", "prefill", "p0")
    stats.waits.leg("asked", "decode", "d.1:2")  # an odd name, not one of ours
    stats.elsewhere = lambda: {
        **handoff_metrics.connections({"connections": 2}), "worker_requests": {"prefill:p0:waiting": 61},
    }  # fmt: skip
    numbers = {**stats.as_numbers(), **stats.elsewhere(), "workers": {"prefill:serving": 1}, "pairs": {"pull": 0},
               "worker_tokens": {"prefill:p0": 512}, "breakers_opened_total": 0, "draining": True}  # fmt: skip
    text = render(stats.families(numbers), openmetrics=True)
    samples = {(s.name, tuple(s.labels.values())): s.value for family in read(text) for s in family.samples}
    assert samples["kvbaton_router_requests_total", ("worker_timeout",)] == 1
    responses = [
        samples["kvbaton_router_responses_total", (status,)] for status in ("2xx", "4xx", "429", "5xx", "gone")
    ]
    assert responses == [1, 0, 1, 1, 1]
    assert samples["kvbaton_router_leg_failures_total", ("prefill", "late:worker_timeout")] == 1
    assert samples["kvbaton_router_leg_failures_total", ("decode", "other")] == 1
    assert samples["kvbaton_router_workers", ("prefill", "serving")] == 1
    assert samples["kvbaton_connections_total", ()] == 2
    assert text.count('transfer_id="t1"') == 4, "TTFT, P's leg, what came after, and the whole"
    assert samples["kvbaton_router_worker_requests", ("prefill", "p0", "waiting")] == 61
    assert samples["kvbaton_router_worker_tokens", ("prefill", "p0")] == 512
    assert samples["kvbaton_router_worker_asked_total", ("prefill", "p0")] == 1
    assert samples["kvbaton_router_worker_asked_total", ("decode", "d.1:2")] == 1
    assert samples["kvbaton_router_worker_failures_total", ("prefill", "p0")] == 1
    assert samples["kvbaton_router_prompt_tokens_total", ("pull",)] == 100
    assert samples["kvbaton_router_output_tokens_total", ("pull",)] == 7
    assert samples["kvbaton_router_output_tokens_total", ("push",)] == 0
    assert samples["kvbaton_router_request_seconds_sum", ("pull",)] == 3.0
    shown = {name for name, _ in samples}
    quiet = {"kvbaton_router_probes_total"}
    assert shown <= {series for m in metric_names.of(Where.ROUTER) for series in m.series}
    missing = [m.name for m in metric_names.of(Where.ROUTER) if not set(m.series) <= shown and m.name not in quiet]
    assert missing == []


@pytest.mark.parametrize(
    ("first_byte", "prefill", "leg", "handover"),
    [
        (2.0, (0.5, 1.5), 1.0, 0.5),  # pull: what comes after P
        (2.0, (0.0, float("inf")), 2.0, 0.0),  # push: D was first
        (2.0, (0.0, 1.9), 1.9, 0.1),
        (2.0, None, None, None),  # D alone
    ],
)
def test_a_clients_wait_is_ps_and_the_handovers(
    first_byte: float, prefill: tuple[float, float] | None, leg: float | None, handover: float | None
) -> None:
    stats = RouterStats()
    stats.waits.note("push", first_byte, prefill)
    found = {each.metric.name: each.samples.get(("push",)) for each in stats.waits.families()}
    sums = [None if each is None else round(each.sum, 6) for each in found.values()]  # type: ignore[union-attr]
    assert sums == [first_byte, leg, handover, None, None]


def test_a_router_that_counts_something_new_has_to_list_it() -> None:
    with pytest.raises(metric_names.MetricError, match="kvbaton_novelty: no such metric"):
        RouterStats().families({"novelty": 1})


def test_counters_that_come_of_flights_are_there_before_the_first() -> None:
    counters = [m for m in OBSERVED if m.kind is MetricKind.COUNTER and not m.labels]
    text = render(HandoffMetrics().families(), openmetrics=False)
    assert counters and all(f"\n{m.name} 0" in text for m in counters)
