"""An OTLP collector of this process: OpenTelemetry's own message types over a real socket, well behaved or not."""

from __future__ import annotations

import contextlib
import gzip
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from opentelemetry.proto.trace.v1.trace_pb2 import Span as WireSpan
from opentelemetry.proto.trace.v1.trace_pb2 import Status

from tests.waiting import until

WAIT_S = 30.0


@dataclass(frozen=True)
class Received:
    """One span as the collector got it, in plain types."""

    name: str
    service: str
    resource: dict[str, object]
    kind: str
    trace_id: str
    span_id: str
    parent_id: str
    begin_ns: int
    end_ns: int
    attributes: dict[str, object]
    events: tuple[tuple[str, int], ...]
    error: str | None  # None where the status is not ERROR


@dataclass
class Collector:
    """What came. `status` is its answer; while `silent` is set it answers nothing at all."""

    url: str = ""
    status: int = 200
    silent: threading.Event = field(default_factory=threading.Event)
    ending: threading.Event = field(default_factory=threading.Event)
    requests: int = 0
    spans: list[Received] = field(default_factory=list)
    paths: list[str] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)

    def wait(self, enough: Callable[[list[Received]], bool], seconds: float = WAIT_S) -> list[Received]:
        """All spans, once they are enough."""
        until(lambda: enough(list(self.spans)), seconds, lambda: f"got {sorted(s.name for s in self.spans)}")
        return list(self.spans)


@contextlib.contextmanager
def collecting() -> Iterator[Collector]:
    collector = Collector()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            data = self.rfile.read(int(self.headers["content-length"]))
            collector.requests += 1
            collector.paths.append(self.path)
            collector.headers.append({name.lower(): value for name, value in self.headers.items()})
            if collector.silent.is_set():
                collector.ending.wait()
                self.close_connection = True
                return
            if collector.status == 200:
                if self.headers.get("content-encoding") == "gzip":
                    data = gzip.decompress(data)
                collector.spans += read(data)
            answer = ExportTraceServiceResponse().SerializeToString()
            self.send_response(collector.status)
            self.send_header("content-type", "application/x-protobuf")
            self.send_header("content-length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer)

        def log_message(self, *_: object) -> None:
            return

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    collector.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield collector
    finally:
        collector.ending.set()
        server.shutdown()
        server.server_close()
        thread.join()


def read(data: bytes) -> list[Received]:
    """The spans of one request's body."""
    found = []
    for group in ExportTraceServiceRequest.FromString(data).resource_spans:
        resource = _plain(group.resource.attributes)
        for scope in group.scope_spans:
            assert scope.scope.name == "kvbaton"
            found += [_received(span, resource) for span in scope.spans]
    return found


def _received(span: WireSpan, resource: dict[str, object]) -> Received:
    return Received(
        name=span.name,
        service=str(resource["service.name"]),
        resource=resource,
        kind=WireSpan.SpanKind.Name(span.kind).removeprefix("SPAN_KIND_"),
        trace_id=span.trace_id.hex(),
        span_id=span.span_id.hex(),
        parent_id=span.parent_span_id.hex(),
        begin_ns=span.start_time_unix_nano,
        end_ns=span.end_time_unix_nano,
        attributes=_plain(span.attributes),
        events=tuple((event.name, event.time_unix_nano) for event in span.events),
        error=span.status.message if span.status.code == Status.STATUS_CODE_ERROR else None,
    )


def _plain(attributes) -> dict[str, object]:
    return {each.key: getattr(each.value, each.value.WhichOneof("value")) for each in attributes}
