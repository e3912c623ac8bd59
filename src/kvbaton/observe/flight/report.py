"""A worker's periodic report to the router: gauges, and records of handoffs that ended since the last one.

Law: `decode` raises `ReportError` and nothing else, whatever the bytes; its result is within bounds. A busy worker
reports a share of its handoffs, chosen by their ids: the same ones at P, D and router.
"""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from kvbaton.observe.flight.flight_records import Flight, Name

FLIGHTS_MAX = 256
GAUGES_MAX = 64
REPORT_BYTES_MAX = 512 << 10


class ReportError(Exception):
    """Bytes that are not a report; the text names the field."""


class FlightReport(msgspec.Struct, frozen=True, omit_defaults=True):
    """From one worker, in one incarnation."""

    at: float  # Unix time at the worker
    gauges: Annotated[dict[Name, float], Meta(max_length=GAUGES_MAX)] = {}  # pins, leases, bytes_moved_total, ...
    links: Annotated[dict[Name, Name], Meta(max_length=GAUGES_MAX)] = {}  # source worker: data plane, now
    flights: Annotated[tuple[Flight, ...], Meta(max_length=FLIGHTS_MAX)] = ()  # ended since, and those asked for
    share: float = 1.0  # of those that ended without failure
    missed: int = 0  # records that did not fit
    version: Name = ""  # of kvbaton in that process
    host: Name = ""


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(FlightReport)


def encode(report: FlightReport) -> bytes:
    return _encoder.encode(report)


def decode(data: bytes) -> FlightReport:
    if len(data) > REPORT_BYTES_MAX:
        raise ReportError(f"report: {len(data)} bytes, at most {REPORT_BYTES_MAX}")
    try:
        return _decoder.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, OverflowError) as error:
        raise ReportError(f"report: {error}") from None
