"""OpenTelemetry's library: our spans through its SDK to a collector, as OTLP over HTTP or gRPC.

Law: the only module that imports `opentelemetry`. Nothing of it becomes global: a process with its own tracing, such as
vLLM, keeps its provider and its log. Used by one thread, except `close`.
"""

from __future__ import annotations

import importlib
import logging
import threading
from collections.abc import Mapping, Sequence
from types import ModuleType
from typing import Any

from opentelemetry import trace as otel
from opentelemetry.exporter.otlp.proto.http import trace_exporter
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import OTELResourceDetector, Resource
from opentelemetry.sdk.trace import Event, ReadableSpan
from opentelemetry.sdk.trace.export import SpanExportResult
from opentelemetry.sdk.util.instrumentation import InstrumentationScope

from kvbaton.observe.tracing.trace_spans import Span, SpanKind

SCOPE = "kvbaton"
_SAMPLED = otel.TraceFlags(otel.TraceFlags.SAMPLED)
_WELL = otel.Status(otel.StatusCode.UNSET)
_KINDS = {
    SpanKind.INTERNAL: otel.SpanKind.INTERNAL,
    SpanKind.SERVER: otel.SpanKind.SERVER,
    SpanKind.CLIENT: otel.SpanKind.CLIENT,
}


class Otlp:
    """One collector. `send` blocks for as long as that takes, `timeout_s` at most where the collector is silent.

    Of the environment the library itself reads headers, certificates and compression (OTEL_EXPORTER_OTLP_*), and what
    the operator calls this process (OTEL_SERVICE_NAME, OTEL_RESOURCE_ATTRIBUTES), which goes before our own names.
    """

    def __init__(
        self, url: str, service_name: str, attributes: Mapping[str, str], version: str, timeout_s: float
    ) -> None:
        ours = Resource({**attributes, "service.name": service_name, "service.version": version})
        self._resource = Resource.create({}).merge(ours).merge(OTELResourceDetector().detect())
        self._scope = InstrumentationScope(SCOPE, version)
        self._exporter, logger = _exporter(url, timeout_s)
        self._closed = False
        self._said = _Said(logger)
        self._said.logger.addFilter(self._said)

    def send(self, spans: Sequence[Span]) -> str:
        """Send them to the collector: "", or the error."""
        made = [self._made(span) for span in spans]
        self._said.thread, self._said.last = threading.get_ident(), ""
        try:
            taken = self._exporter.export(made) is SpanExportResult.SUCCESS
        finally:
            self._said.thread = None
            if self._closed:
                self._said.logger.removeFilter(self._said)
        return "" if taken else self._said.last or "no reason given"

    def close(self) -> None:
        """Stop, also a `send` that waits for its next attempt."""
        self._closed = True
        self._exporter.shutdown()
        if self._said.thread is None:
            self._said.logger.removeFilter(self._said)

    def _made(self, span: Span) -> ReadableSpan:
        """An ended span, with the ids that were propagated and its own times.

        Made directly, since a `Tracer` draws its own ids and takes twenty times as long; and sent without the SDK's
        queue, which counts no drops and may take 30 s to close.
        """
        trace_id, parent = int(span.trace_id, 16), None
        if span.parent_id:
            parent = otel.SpanContext(trace_id, int(span.parent_id, 16), span.is_entry, _SAMPLED)
        return ReadableSpan(
            name=span.name,
            context=otel.SpanContext(trace_id, int(span.span_id, 16), False, _SAMPLED),
            parent=parent,
            resource=self._resource,
            attributes=span.attributes,
            events=[Event(each.name, each.attributes, each.at_ns) for each in span.events],
            kind=_KINDS[span.kind],
            status=otel.Status(otel.StatusCode.ERROR, span.error) if span.error else _WELL,
            start_time=span.begin_ns,
            end_time=span.end_ns,
            instrumentation_scope=self._scope,
        )


def grpc_exporter() -> ModuleType:
    """The module of spans over gRPC, which is a package of its own; `ImportError` where it is missing."""
    return importlib.import_module("opentelemetry.exporter.otlp.proto.grpc.trace_exporter")


def _exporter(url: str, timeout_s: float) -> tuple[Any, str]:
    """The exporter for a URL, and the name of its logger."""
    scheme, _, host = url.partition("://")
    if scheme not in ("grpc", "grpcs"):
        return OTLPSpanExporter(endpoint=url, timeout=timeout_s), trace_exporter.__name__
    made = grpc_exporter().OTLPSpanExporter(endpoint=host, insecure=scheme == "grpc", timeout=timeout_s)
    return made, "opentelemetry.exporter.otlp.proto.grpc.exporter"


class _Said(logging.Filter):
    """The exporter reports errors only in its log, per batch: this captures what our thread logs there."""

    def __init__(self, logger: str) -> None:
        super().__init__()
        self.logger = logging.getLogger(logger)
        self.thread: int | None = None
        self.last = ""

    def filter(self, record: logging.LogRecord) -> bool:
        if record.thread != self.thread:
            return True
        self.last = record.getMessage()
        return False
