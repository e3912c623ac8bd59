"""Spans over gRPC: through OpenTelemetry's exporter to a real gRPC server."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from kvbaton.observe.tracing.export import ExportSettings, SpanExport
from kvbaton.processes.child_process import free_ports
from tests.observe.tracing.flights import router
from tests.waiting import until

grpc = pytest.importorskip("grpc", reason="spans over gRPC: pip install 'kvbaton[otel-grpc]'")
pytest.importorskip(
    "opentelemetry.exporter.otlp.proto.grpc.trace_exporter",
    reason="spans over gRPC: pip install 'kvbaton[otel-grpc]'",
)
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc  # noqa: E402


class Collecting(trace_service_pb2_grpc.TraceServiceServicer):  # type: ignore[misc]
    def __init__(self) -> None:
        self.names: list[str] = []
        self.refuses = threading.Event()

    def Export(self, request: Any, context: Any) -> Any:
        if self.refuses.is_set():
            context.abort(grpc.StatusCode.PERMISSION_DENIED, "not you")
        for resource in request.resource_spans:
            self.names += [span.name for scope in resource.scope_spans for span in scope.spans]
        return trace_service_pb2.ExportTraceServiceResponse()


@pytest.fixture
def collector() -> Iterator[tuple[Collecting, str]]:
    servicer = Collecting()
    server = grpc.server(ThreadPoolExecutor(2))
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(servicer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield servicer, f"grpc://127.0.0.1:{port}"
    server.stop(0).wait()


def test_spans_arrive_over_grpc_and_a_refusal_is_said(collector: tuple[Collecting, str], caplog: Any) -> None:
    servicer, url = collector
    export = SpanExport(url, "kvbaton-router", settings=ExportSettings(gather_s=0.01))
    try:
        export.take(router())
        until(lambda: export.counts["exported"] > 0)
        assert "kvbaton.request" in servicer.names
        servicer.refuses.set()
        export.take(router())
        until(lambda: export.counts["failed"] > 0)
        until(lambda: "[spans-unsent]" in caplog.text)
    finally:
        export.close()
    assert "PERMISSION_DENIED" in caplog.text and "not you" in caplog.text


def test_a_collector_that_is_not_there_costs_spans_and_no_time_at_the_end() -> None:
    (port,) = free_ports(1)
    settings = ExportSettings(gather_s=0.01, timeout_s=0.2, close_s=5.0)
    export = SpanExport(f"grpc://127.0.0.1:{port}", "kvbaton-router", settings=settings)
    export.take(router())
    until(lambda: export.counts["failed"] > 0)
    export.close()
