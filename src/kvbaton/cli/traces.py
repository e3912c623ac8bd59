"""Tracing options: the OTLP endpoint, and the sampling rate for requests without a trace context.

Law: a flag that cannot be followed ends the command in one line, before any port is opened. The environment's endpoint,
which may be there for others, only fails to switch traces on.
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
HELP = f"send spans to an OTLP collector, http://host:4318 (default: ${BASE_VARIABLE})"


class TraceFlags(Protocol):
    """Whoever tells of flights that are over."""

    @property
    def on_flight(self) -> list[Callable[[Flight], None]]: ...


def add_arguments(group: argparse.ArgumentParser | argparse._ArgumentGroup) -> None:
    """Of a router; a worker's are fields of its options."""
    group.add_argument("--otlp-endpoint", default="", metavar="URL", help=HELP)
    group.add_argument(
        "--trace-sample",
        type=ratio,
        default=SAMPLE_DEFAULT,
        metavar="RATIO",
        help="share of requests without traceparent that get one, 0 to 1",
    )


def ratio(text: str) -> float:
    """An argument type: a share."""
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value <= 1:
        raise argparse.ArgumentTypeError(f"got {text!r}, expected a number from 0 to 1")
    return value


def endpoint_of(flag: str, environ: Mapping[str, str]) -> str:
    """Where spans go, checked: what the flag says, else what the environment does; "" for nowhere."""
    if flag:
        try:
            needed()
            return traces_url(flag)
        except (ExportError, ValueError) as error:
            raise CommandError(f"argument --otlp-endpoint: {error}") from None
    base = environ.get(BASE_VARIABLE, "")
    found = environ.get(TRACES_VARIABLE, "") or (f"{base.rstrip('/')}{TRACES_PATH}" if base else "")
    if not found or environ.get(OFF_VARIABLE, "").lower() == "true":
        return ""
    try:
        needed()
        return traces_url(found)
    except (ExportError, ValueError) as error:
        log.warning("[spans-off] the environment names an OTLP endpoint, but no spans are sent: %s", error)
        return ""


@contextlib.asynccontextmanager
async def exported(endpoint: str, name: str, telling: TraceFlags) -> AsyncIterator[SpanExport | None]:
    """The router's flights as spans, while the context lasts; nothing without an endpoint."""
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
