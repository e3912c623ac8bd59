"""Tracing options: the OTLP endpoint, and the sampling rate for requests without a trace context.

Law: an invalid flag ends the command in one line, before any port is opened. An invalid endpoint in the environment,
which may be meant for other programs, only leaves tracing off.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Protocol

from kvbaton.observe.flight.flight_records import Flight
from kvbaton.observe.tracing.export import TRACES_PATH, ExportError, SpanExport, needed, traces_url
from kvbaton.processes.operator_errors import CommandError

log = logging.getLogger(__name__)

SAMPLE_DEFAULT = 1.0
BASE_VARIABLE = "OTEL_EXPORTER_OTLP_ENDPOINT"
TRACES_VARIABLE = "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT"
OFF_VARIABLE = "OTEL_SDK_DISABLED"
PROTOCOL_VARIABLES = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
HELP = f"send spans to an OTLP collector, http://host:4318 or grpc://host:4317 (default: ${BASE_VARIABLE})"


class TraceFlags(Protocol):
    """A source of finished flights."""

    @property
    def on_flight(self) -> list[Callable[[Flight], None]]: ...


def add_arguments(group: argparse.ArgumentParser | argparse._ArgumentGroup) -> None:
    """Options of the router; a worker's are fields of its options."""
    group.add_argument("--otlp-endpoint", default="", metavar="URL", help=HELP)
    group.add_argument(
        "--trace-sample",
        type=ratio,
        default=SAMPLE_DEFAULT,
        metavar="RATIO",
        help="share of requests without traceparent that get one, 0 to 1",
    )


def ratio(text: str) -> float:
    """An argument type: a fraction."""
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value <= 1:
        raise argparse.ArgumentTypeError(f"got {text!r}, expected a number from 0 to 1")
    return value


def endpoint_of(flag: str, environ: Mapping[str, str]) -> str:
    """The checked destination of spans: the flag, else the environment; "" for none."""
    if flag:
        try:
            found = traces_url(flag)
            needed(found)
            return found
        except (ExportError, ValueError) as error:
            raise CommandError(f"argument --otlp-endpoint: {error}") from None
    base = environ.get(BASE_VARIABLE, "")
    protocol = next((environ[name] for name in PROTOCOL_VARIABLES if environ.get(name)), "")
    if protocol == "grpc":
        found = _as_grpc(environ.get(TRACES_VARIABLE, "") or base)
    else:
        found = environ.get(TRACES_VARIABLE, "") or (f"{base.rstrip('/')}{TRACES_PATH}" if base else "")
    if not found or environ.get(OFF_VARIABLE, "").lower() == "true":
        return ""
    try:
        found = traces_url(found)
        needed(found)
        return found
    except (ExportError, ValueError) as error:
        log.warning("[spans-off] the environment names an OTLP endpoint, but no spans are sent: %s", error)
        return ""


def _as_grpc(endpoint: str) -> str:
    """An endpoint of the environment, which says by another variable that it is gRPC: `https` there is with TLS."""
    scheme, colon, rest = endpoint.partition("://")
    if not colon:
        return f"grpc://{endpoint}" if endpoint else ""
    return f"{'grpcs' if scheme in ('https', 'grpcs') else 'grpc'}://{rest.rstrip('/')}"


@contextlib.asynccontextmanager
async def exported(endpoint: str, name: str, telling: TraceFlags) -> AsyncIterator[SpanExport | None]:
    """Exports the router's flights as spans while the context lasts; does nothing without an endpoint."""
    if not endpoint:
        yield None
        return
    export = SpanExport(endpoint, "kvbaton-router", {"service.instance.id": name})
    telling.on_flight.append(export.take)
    try:
        yield export
    finally:
        telling.on_flight.remove(export.take)
        await asyncio.to_thread(export.close)
