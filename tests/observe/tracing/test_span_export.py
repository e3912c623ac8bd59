"""Spans through OpenTelemetry's own library to a collector that decodes its own messages; and collectors that fail."""

from __future__ import annotations

import logging
import socket
import sys
import threading
import time

import pytest

import kvbaton
from kvbaton.observe.tracing.export import ExportError, ExportSettings, SpanExport, traces_url
from kvbaton.observe.tracing.trace_spans import spans_of
from tests.observe.tracing.collector import collecting
from tests.observe.tracing.flights import (
    CLIENT,
    LEG_D,
    LEG_P,
    TRACE,
    TRY,
    at_ns,
    decode,
    header,
    moments,
    prefill,
    router,
)
from tests.waiting import until

QUICK = ExportSettings(gather_s=0.01, timeout_s=30.0, close_s=30.0)
SPEAKERS = ("kvbaton.observe.tracing", "opentelemetry", "requests", "urllib3")
"""Whose words these tests are about; what other tests left behind may speak as well."""
SLACK_S = 20.0
"""For a machine that is busy; nothing that is tested here takes that long."""


def no_thread_left() -> bool:
    return not any(thread.name == "kvbaton-spans" for thread in threading.enumerate())


def test_one_request_arrives_as_one_tree_from_three_processes():
    with collecting() as collector:
        exports = {
            name: SpanExport(collector.url, f"kvbaton-{name}", {"service.instance.id": name}, settings=QUICK)
            for name in ("router", "prefill", "decode")
        }
        for export, flight in zip(exports.values(), (router(), prefill(), decode()), strict=True):
            export.take(flight)
        for export in exports.values():
            export.close()
        spans = {span.name.removeprefix("kvbaton."): span for span in collector.spans}
    assert {name: spans[name].service for name in ("request", "lease", "handoff")} == {
        "request": "kvbaton-router",
        "lease": "kvbaton-prefill",
        "handoff": "kvbaton-decode",
    }
    assert spans["lease"].resource["service.instance.id"] == "prefill"
    assert spans["lease"].resource["service.version"] == kvbaton.__version__
    assert {span.trace_id for span in spans.values()} == {TRACE}
    ids = {name: span.span_id for name, span in spans.items()}
    assert (ids["request"], ids["prefill"], ids["decode"]) == (TRY, LEG_P, LEG_D)
    assert {name: span.parent_id for name, span in spans.items()} == {
        "request": CLIENT,
        "prefill": TRY,
        "decode": TRY,
        "lease": LEG_P,
        "handoff": LEG_D,
        "compute": ids["lease"],
        "read": ids["lease"],
        **dict.fromkeys(("claim", "queue", "copy", "commit", "deliver"), ids["handoff"]),
    }
    assert (spans["copy"].begin_ns, spans["copy"].end_ns) == (at_ns(40), at_ns(50))
    assert spans["copy"].events == (("first_byte", at_ns(44)),)
    assert spans["handoff"].attributes["kvbaton.bytes"] == 4096
    assert [spans[name].kind for name in ("request", "decode", "handoff", "copy")] == [
        "SERVER",
        "CLIENT",
        "SERVER",
        "INTERNAL",
    ]
    assert {span.error for span in spans.values()} == {None}
    assert set(collector.paths) == {"/v1/traces"}
    assert {headers["content-type"] for headers in collector.headers} == {"application/x-protobuf"}


def test_a_root_and_a_failure_arrive_as_such():
    failed = decode(end="peer_gone", detail="p0 is gone", moments=moments(("asked", 0), ("ended", 9), ("rested", 9)))
    with collecting() as collector:
        export = SpanExport(collector.url, "kvbaton-router", settings=QUICK)
        export.take(router(parent=""))
        export.take(failed)
        export.close()
        spans = {span.name: span for span in collector.spans}
    assert spans["kvbaton.request"].parent_id == ""
    assert spans["kvbaton.request"].trace_id == TRACE
    assert spans["kvbaton.handoff"].error == spans["kvbaton.claim"].error == "peer_gone: p0 is gone"
    assert spans["kvbaton.handoff"].attributes["error.type"] == "peer_gone"


def test_spans_come_by_themselves_and_in_batches():
    with collecting() as collector:
        export = SpanExport(collector.url, "kvbaton-router", settings=QUICK)
        try:
            export.take(router())
            collector.wait(lambda spans: len(spans) == 3)
            before = collector.requests
            for _ in range(400):
                export.take(router())
            collector.wait(lambda spans: len(spans) == 3 * 401)
            assert collector.requests - before < 100
            until(lambda: export.counts == {"exported": 3 * 401})
        finally:
            export.close()


def test_what_is_not_sampled_goes_nowhere():
    with collecting() as collector:
        export = SpanExport(collector.url, "kvbaton-router", settings=QUICK)
        export.take(router(trace=""))
        export.take(router(trace=header(TRY, "00")))
        export.close()
        assert (collector.requests, dict(export.counts)) == (0, {})


def test_nothing_is_taken_after_the_close_and_a_second_close_does_nothing():
    with collecting() as collector:
        export = SpanExport(collector.url, "kvbaton-router", settings=QUICK)
        export.close()
        export.take(router())
        export.close()
        assert (collector.requests, dict(export.counts)) == (0, {"dropped": 1})


def test_a_collector_that_answers_nothing_costs_bounded_memory_and_time(caplog):
    settings = ExportSettings(flights_max=50, batch_max=10, gather_s=0.0, timeout_s=60.0, close_s=0.3)
    with collecting() as collector:
        collector.silent.set()
        export = SpanExport(collector.url, "kvbaton-router", settings=settings)
        export.take(router())
        until(lambda: collector.requests == 1)
        begun = time.monotonic()
        for _ in range(1000):
            export.take(router())
        export.close()
        assert time.monotonic() - begun < SLACK_S
        assert export.counts["dropped"] == 950
        assert "exported" not in export.counts
        assert "[spans-unsent] stopped with spans of 50 handoffs" in caplog.text
    until(no_thread_left)
    assert caplog.text.count("[spans-unsent]") == 1, "nothing is said after the close"


def test_a_collector_that_fails_is_told_of_once_in_a_while_and_tried_on(caplog):
    caplog.set_level(logging.INFO)
    with collecting() as collector:
        collector.status = 500
        export = SpanExport(collector.url, "kvbaton-router", settings=QUICK)
        try:
            for n in range(1, 4):
                export.take(router())
                until(lambda n=n: export.counts["failed"] == 3 * n)
            told = [
                record
                for record in caplog.records
                if record.levelno >= logging.WARNING and record.name.startswith(SPEAKERS)
            ]
            assert [record.name for record in told] == ["kvbaton.observe.tracing.export"], (
                "the library's own words stay away"
            )
            assert told[0].getMessage().startswith(f"[spans-unsent] {collector.url}/v1/traces: Failed to export")
            assert "500" in told[0].getMessage()
            collector.status = 200
            export.take(router())
            collector.wait(lambda spans: len(spans) == 3)
            until(lambda: "again; 9 could not be sent" in caplog.text)
        finally:
            export.close()
    assert export.counts == {"failed": 9, "exported": 3}


def test_a_collector_that_is_not_there_does_not_keep_anybody_from_stopping():
    with socket.socket() as taken:  # bound and not listening: every connection is refused
        taken.bind(("127.0.0.1", 0))
        settings = ExportSettings(gather_s=0.0, timeout_s=60.0, close_s=0.3)
        export = SpanExport(f"http://127.0.0.1:{taken.getsockname()[1]}", "kvbaton-router", settings=settings)
        export.take(router())
        begun = time.monotonic()
        export.close()
        assert time.monotonic() - begun < SLACK_S
    until(no_thread_left)


class Waiting:
    """A sender that takes nothing before it is let, and then raises."""

    def __init__(self) -> None:
        self.let = threading.Event()
        self.closed = False

    def send(self, spans):
        self.let.wait()
        raise RuntimeError("the library is out of order")

    def close(self) -> None:
        self.closed = True
        self.let.set()


def test_taking_never_waits_for_sending_and_an_error_of_the_library_stays_there(caplog):
    sender = Waiting()
    export = SpanExport("http://-", "kvbaton-router", settings=QUICK, sender=sender)
    for _ in range(100):
        export.take(router())
    sender.let.set()
    until(lambda: export.counts["failed"] >= 300)
    export.take(router())
    until(lambda: export.counts["failed"] >= 303)
    export.close()
    assert sender.closed
    assert caplog.text.count("[spans-unsent]") == 1
    assert "RuntimeError: the library is out of order" in caplog.text


def test_drops_are_told_even_where_the_collector_takes_the_rest(caplog):
    class Slow(Waiting):
        def send(self, spans):
            self.let.wait()
            return ""

    sender = Slow()
    settings = ExportSettings(flights_max=1, batch_max=1, gather_s=0.0)
    export = SpanExport("http://-", "kvbaton-router", settings=settings, sender=sender)
    for _ in range(10):
        export.take(router())
    sender.let.set()
    until(lambda: "[spans-unsent] http://-/v1/traces: slow" in caplog.text)
    export.close()
    assert export.counts["dropped"] + export.counts["exported"] // 3 == 10


@pytest.mark.parametrize(
    ("endpoint", "url"),
    [
        ("http://localhost:4318", "http://localhost:4318/v1/traces"),
        ("http://localhost:4318/", "http://localhost:4318/v1/traces"),
        ("https://[::1]:4318", "https://[::1]:4318/v1/traces"),
        ("https://collector/tenant/v1/traces", "https://collector/tenant/v1/traces"),
    ],
)
def test_an_endpoint_that_names_a_host_gets_the_standard_path(endpoint, url):
    assert traces_url(endpoint) == url


@pytest.mark.parametrize(
    "endpoint", ["", "localhost:4317", "grpc://localhost/v1/traces", "http://", "http://h:99999", "x"]
)
def test_what_is_no_endpoint_is_refused_in_one_line(endpoint):
    with pytest.raises(ExportError, match="expected http://host:4318") as refused:
        SpanExport(endpoint, "kvbaton-router")
    assert "\n" not in str(refused.value)


def test_a_missing_library_is_told_with_the_command_that_installs_it(monkeypatch):
    monkeypatch.delitem(sys.modules, "kvbaton.observe.tracing.otlp", raising=False)
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)
    with pytest.raises(ExportError) as missing:
        SpanExport("http://localhost:4318", "kvbaton-router")
    assert "pip install 'kvbaton[otel]'" in str(missing.value)
    assert "\n" not in str(missing.value)


def test_the_library_is_not_imported_before_it_is_used():
    """A worker without traces pays nothing for them."""
    import subprocess

    code = (
        "import sys, kvbaton.observe.tracing.export; print([name for name in sys.modules if 'opentelemetry' in name])"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert found.stdout.strip() == "[]"


def test_a_process_with_traces_of_its_own_keeps_them():
    """vLLM has a provider and a log of its own."""
    from opentelemetry import trace

    before = trace.get_tracer_provider()
    words = logging.getLogger("opentelemetry.exporter.otlp.proto.http.trace_exporter")
    seen: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: seen.append(record.getMessage())
    words.addHandler(handler)
    try:
        with collecting() as collector:
            export = SpanExport(collector.url, "kvbaton-router", settings=QUICK)
            words.error("said by another")
            export.close()
        assert trace.get_tracer_provider() is before
        assert (seen, words.filters) == (["said by another"], [])
    finally:
        words.removeHandler(handler)


def test_a_flight_has_as_many_spans_as_are_counted():
    assert [len(spans_of(make())) for make in (router, prefill, decode)] == [3, 3, 6]
