"""Exports ended flights to an OTLP collector, off the threads that serve requests.

Law: `take` never waits and never raises; the queue is bounded, and what finds no room is dropped and counted. Whatever
the collector does, `close` returns within `close_s`, and problems only appear in the log.
"""

from __future__ import annotations

import importlib
import logging
import math
import threading
import time
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from types import ModuleType
from typing import Protocol
from urllib.parse import urlsplit

import msgspec

import kvbaton
from kvbaton.observe.flight.flight_records import Flight, parse_trace
from kvbaton.observe.tracing.trace_spans import Span, spans_of

log = logging.getLogger(__name__)

TRACES_PATH = "/v1/traces"
GRPC = ("grpc", "grpcs")
GRPC_PORT = 4317
WHY_CHARS_MAX = 300


class ExportError(Exception):
    """Traces cannot be exported; the operator must act, and the message is the whole line."""


class ExportSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Timeouts and bounds of the export."""

    flights_max: int = 8192  # that wait; one takes 2 KB or so
    batch_max: int = 64  # flights per request: 12 ms of work
    gather_s: float = 1.0  # after the first of a batch
    timeout_s: float = 5.0  # of one request to the collector, with its repetitions
    close_s: float = 2.0  # of `close`: what is not sent by then is lost
    say_again_s: float = 60.0


_DEFAULT = ExportSettings()


class Sender(Protocol):
    """Sends spans to a collector. `send` may block; `close` never does."""

    def send(self, spans: Sequence[Span]) -> str:
        """Deliver them: "", or the error."""

    def close(self) -> None: ...


class SpanExport:
    """One process's export to one collector. `take` goes to `on_flight` of a recorder or a collector."""

    def __init__(
        self,
        endpoint: str,
        service_name: str,
        attributes: Mapping[str, str] | None = None,
        *,
        settings: ExportSettings = _DEFAULT,
        sender: Sender | None = None,
    ) -> None:
        """Starts its thread. `attributes` are the resource's; `ExportError` where the library is missing."""
        try:
            self.url = traces_url(endpoint)
        except ValueError as error:
            raise ExportError(f"OTLP endpoint: {error}") from None
        self.counts: Counter[str] = Counter()  # exported (spans), dropped (flights, for want of room), failed (spans)
        self._settings = settings
        self._sender = sender or _otlp(self.url, service_name, attributes or {}, settings.timeout_s)
        self._waiting: deque[Flight] = deque()
        self._lock = threading.Lock()
        self._wake = threading.Event()
        self._closing = threading.Event()
        self._told_at = -settings.say_again_s
        self._told_dropped = 0
        self._fails = False
        self._thread = threading.Thread(target=self._run, name="kvbaton-spans", daemon=True)
        self._thread.start()

    def take(self, flight: Flight) -> None:
        """Export an ended flight, if its trace is sampled."""
        trace = parse_trace(flight.trace) if flight.trace else None
        if trace is None or not trace.sampled:
            return
        with self._lock:
            if len(self._waiting) >= self._settings.flights_max or self._closing.is_set():
                self.counts["dropped"] += 1
                return
            self._waiting.append(flight)
        if not self._wake.is_set():
            self._wake.set()

    def close(self) -> None:
        """Send the queue, as far as the collector accepts it in time; nothing is accepted afterwards."""
        if self._closing.is_set():
            return
        until = time.monotonic() + self._settings.close_s
        self._closing.set()
        self._wake.set()
        self._thread.join(max(until - time.monotonic(), 0.0))
        self._told_at = math.inf  # nothing is said after this
        if self._thread.is_alive():
            log.warning("[spans-unsent] stopped with spans of %d handoffs or more unsent", len(self._waiting))
        self._sender.close()

    # --- its thread

    def _run(self) -> None:
        while not (self._closing.is_set() and (self._fails or not self._waiting)):
            self._wake.wait()
            self._closing.wait(self._settings.gather_s)
            self._wake.clear()
            while batch := self._batch():
                self._send(batch)
                if self._closing.is_set() and self._fails:
                    break

    def _batch(self) -> list[Flight]:
        with self._lock:
            return [self._waiting.popleft() for _ in range(min(len(self._waiting), self._settings.batch_max))]

    def _send(self, batch: Sequence[Flight]) -> None:
        spans: list[Span] = []
        try:
            for flight in batch:
                spans += spans_of(flight)
            why = self._sender.send(spans)
        except Exception as error:  # noqa: BLE001 - of a record, or of the library: spans are lost, and nothing else
            why = f"{type(error).__name__}: {error}"
        self.counts["failed" if why else "exported"] += len(spans)
        self._tell(why)

    def _tell(self, why: str) -> None:
        """Report at once, and then now and again."""
        now, dropped = time.monotonic(), self.counts["dropped"]
        if not why and self._fails:
            log.info("spans reach %s again; %d could not be sent", self.url, self.counts["failed"])
        is_bad = bool(why) or dropped > self._told_dropped
        if is_bad and now >= self._told_at + self._settings.say_again_s:
            self._told_at, self._told_dropped = now, dropped
            said = "[spans-unsent] %s: %s; %d spans not sent so far, those of %d handoffs dropped; requests continue"
            log.warning(said, self.url, (why or "slow")[:WHY_CHARS_MAX], self.counts["failed"], dropped)
        self._fails = bool(why)


def traces_url(endpoint: str) -> str:
    """Where spans go: an HTTP endpoint as it is, or with the standard path where it names only a host; `grpc://` and
    `grpcs://` (with TLS) name a host alone. `ValueError`."""
    try:
        parts = urlsplit(endpoint)
        well = parts.scheme in ("http", "https", *GRPC) and bool(parts.hostname) and (parts.port or 1) > 0
    except ValueError:
        well = False
    has_path = well and bool(parts.path.strip("/"))
    if not well or (has_path and parts.scheme in GRPC):
        raise ValueError(f"got {endpoint!r}, expected http://host:4318 (OTLP over HTTP) or grpc://host:4317")
    if parts.scheme in GRPC:
        return f"{parts.scheme}://{parts.netloc}" + ("" if parts.port else f":{GRPC_PORT}")
    return endpoint if has_path else f"{endpoint.rstrip('/')}{TRACES_PATH}"


def needed(endpoint: str = "") -> ModuleType:
    """The library's adapter; `ExportError` where the library is missing, or its part for this endpoint."""
    over_grpc = endpoint.partition(":")[0] in GRPC
    extra = "otel-grpc" if over_grpc else "otel"
    try:
        adapter = importlib.import_module("kvbaton.observe.tracing.otlp")
        if over_grpc:
            adapter.grpc_exporter()
    except ImportError as error:
        what = "OTLP over gRPC requires OpenTelemetry's exporter for it" if over_grpc else _REQUIRES
        raise ExportError(f"{what} ({error}); install it: pip install 'kvbaton[{extra}]'") from None
    return adapter


_REQUIRES = "tracing requires OpenTelemetry's library"


def of_worker(endpoint: str, role: str, name: str) -> SpanExport | None:
    """A worker's export, under the name of what it does; None without an endpoint."""
    if not endpoint:
        return None
    service = f"kvbaton-{role if role in ('prefill', 'decode') else 'worker'}"
    return SpanExport(endpoint, service, {"service.instance.id": name})


def _otlp(url: str, service_name: str, attributes: Mapping[str, str], timeout_s: float) -> Sender:
    sender: Sender = needed(url).Otlp(url, service_name, attributes, kvbaton.__version__, timeout_s)
    return sender
