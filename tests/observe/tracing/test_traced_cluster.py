"""A live cluster with traces: what a client's trace shows of router, P and D; and that no collector hurts anybody."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass

import aiohttp
import pytest

from kvbaton.observe.flight.flight_records import STAGES, Traceparent, new_trace
from tests.e2e.cluster import STOP_S, Up, up, wait_for
from tests.observe.tracing.collector import Collector, Received, collecting

D_STAGES = {f"kvbaton.{stage}" for stage in STAGES} - {"kvbaton.first_byte"}
REQUEST_S = 60.0
QUICK = ("--decode", "2", "--claim-timeout", "4")
TRIES = 8
"""D gives up half-way to the time when a P that is silent leaves the list."""
STRICT = ("--fallback", "strict")
"""Else D answers alone for a P that was evicted, and its handoff has not failed."""


@dataclass
class Traced:
    cluster: Up
    collector: Collector


@pytest.fixture(scope="module")
def traced(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Traced]:
    where = tmp_path_factory.mktemp("traced")
    with collecting() as collector, up(where, *STRICT, "--otlp-endpoint", collector.url, *QUICK) as cluster:
        yield Traced(cluster, collector)


def ask(url: str, prompt: str | list[str], *, mode: str = "pull", **headers: str) -> int:
    async def asked() -> int:
        body = {"prompt": prompt, "max_tokens": 4, "temperature": 0}
        timeout = aiohttp.ClientTimeout(total=REQUEST_S)
        told = {"x-kvbaton-mode": mode, **headers}
        async with (
            aiohttp.ClientSession(timeout=timeout) as session,
            session.post(f"{url}/v1/completions", json=body, headers=told) as response,
        ):
            await response.read()
            return response.status

    return asyncio.run(asked())


def of_trace(spans: list[Received], trace_id: str) -> dict[str, Received]:
    return {span.name: span for span in spans if span.trace_id == trace_id}


def whole(trace: Traceparent):
    """Whether all three processes have told of it."""
    names = {"kvbaton.request", "kvbaton.lease", "kvbaton.handoff"}
    return lambda spans: names <= set(of_trace(spans, trace.trace_id))


@pytest.mark.parametrize("mode", ["pull", "stream", "push"])
def test_a_clients_trace_goes_through_router_p_and_d(traced, mode):
    trace = new_trace()
    assert (
        ask(traced.cluster.url, f"{mode} " + "a prompt of some blocks " * 8, mode=mode, traceparent=str(trace)) == 200
    )
    spans = of_trace(traced.collector.wait(whole(trace)), trace.trace_id)
    request, lease, handoff = (spans[f"kvbaton.{name}"] for name in ("request", "lease", "handoff"))
    assert [span.service for span in (request, lease, handoff)] == [
        "kvbaton-router",
        "kvbaton-prefill",
        "kvbaton-decode",
    ]
    assert handoff.resource["service.instance.id"] in ("d0", "d1")
    assert request.parent_id == trace.span_id, "under what the client sent"
    for leg, under in (("kvbaton.prefill", lease), ("kvbaton.decode", handoff)):
        assert spans[leg].parent_id == request.span_id
        assert under.parent_id == spans[leg].span_id, "under the leg that it served"
    assert set(spans) >= D_STAGES
    assert {spans[stage].parent_id for stage in D_STAGES} == {handoff.span_id}
    assert len({span.attributes["kvbaton.handoff"] for span in (request, lease, handoff)}) == 1
    assert {span.attributes["kvbaton.mode"] for span in (request, handoff)} == {mode}
    assert handoff.attributes["kvbaton.end"] == "delivered"
    assert {span.error for span in spans.values()} == {None}
    in_time = all(request.begin_ns <= span.begin_ns for span in spans.values())
    assert in_time, "one machine, one clock"
    ends = [spans[f"kvbaton.{stage}"].end_ns for stage in ("claim", "queue", "copy", "commit", "deliver")]
    assert ends == sorted(ends)


def test_a_trace_that_is_not_sampled_is_not_exported_and_one_that_is_goes_on(traced):
    hidden, shown = new_trace(sampled=False), new_trace()
    assert ask(traced.cluster.url, "nobody records this prompt", traceparent=str(hidden)) == 200
    assert ask(traced.cluster.url, "somebody records this prompt", traceparent=str(shown)) == 200
    spans = traced.collector.wait(whole(shown))
    assert of_trace(spans, hidden.trace_id) == {}


def test_a_request_without_a_trace_gets_one(traced):
    before = {span.trace_id for span in traced.collector.spans}

    def roots(spans: list[Received]) -> list[Received]:
        return [span for span in spans if span.name == "kvbaton.request" and span.trace_id not in before]

    assert ask(traced.cluster.url, "a prompt that came alone", traceparent="not-a-trace") == 200
    root = roots(traced.collector.wait(lambda spans: bool(roots(spans))))[0]
    assert root.parent_id == ""
    traced.collector.wait(lambda spans: "kvbaton.handoff" in of_trace(spans, root.trace_id))


def test_several_prompts_of_one_body_hang_under_one_root(traced):
    before = {span.trace_id for span in traced.collector.spans}

    def requests(spans: list[Received]) -> list[Received]:
        return [span for span in spans if span.name == "kvbaton.request" and span.trace_id not in before]

    assert ask(traced.cluster.url, ["a first prompt", "and a second one"]) == 200
    found = requests(traced.collector.wait(lambda spans: len(requests(spans)) == 2))
    assert len({span.span_id for span in found}) == 2
    root = next(span for span in found if not span.parent_id)
    assert {span.parent_id for span in found} == {"", root.span_id}


def test_a_handoff_that_failed_is_an_error_in_the_stage_that_failed(traced):
    """P stands still, so nobody answers D's claim; D computes the prompt itself, and the client sees nothing of it.

    Unless the registry evicts P before D gives up, which the client is told: then it is tried again.
    """
    spans = None
    for _ in range(TRIES):
        trace, pid = new_trace(), traced.cluster.pid("p0")
        os.kill(pid, signal.SIGSTOP)
        try:
            status = ask(traced.cluster.url, "a prompt that P never saw", mode="stream", traceparent=str(trace))
            if status == 200:
                told = {"kvbaton.request", "kvbaton.handoff"}  # of P nobody hears before it goes on
                spans = traced.collector.wait(lambda spans: told <= set(of_trace(spans, trace.trace_id)))  # noqa: B023
                break
            assert status == 502, "P was evicted"
        finally:
            os.kill(pid, signal.SIGCONT)
            unrecorded = str(new_trace(sampled=False))
            wait_for(lambda: ask(traced.cluster.url, "P is back", traceparent=unrecorded) == 200, 60)  # noqa: B023
    assert spans is not None
    found = of_trace(spans, trace.trace_id)
    handoff, claim = found["kvbaton.handoff"], found["kvbaton.claim"]
    assert handoff.error
    assert claim.error == handoff.error
    assert handoff.attributes["error.type"] == handoff.attributes["kvbaton.end"] != "delivered"
    assert handoff.error.startswith(str(handoff.attributes["error.type"]))
    assert {span.name for span in found.values() if span.error} == {"kvbaton.handoff", "kvbaton.claim"}


def test_whatever_the_collector_does_requests_are_answered_and_the_cluster_ends(tmp_path):
    with collecting() as collector:
        collector.status = 500
        with up(tmp_path, "--otlp-endpoint", collector.url) as cluster:
            assert ask(cluster.url, "while the collector fails") == 200
            collector.wait(lambda _: collector.requests > 0)
            collector.silent.set()
            before = collector.requests
            assert ask(cluster.url, "while it says nothing") == 200
            collector.wait(lambda _: collector.requests > before)
            assert ask(cluster.url, "while spans wait for it") == 200
            begun = time.monotonic()
            os.kill(cluster.process.pid, signal.SIGINT)
            cluster.process.wait(STOP_S)
            assert time.monotonic() - begun < STOP_S
        assert cluster.process.returncode == 0
        assert "[spans-unsent]" in cluster.text()
        assert "Traceback" not in cluster.text()
        assert collector.spans == []
