"""One side's record of one handoff: peers, times, sizes and outcome.

Law: a record is a value, of bounded size whatever names a peer or a client chose, and contains nothing of a prompt.
Times are Unix seconds by the clock of the process that wrote them; `journey` puts them on one clock.

Which trace a request belongs to is said by the header of W3C's trace context. Law: `parse_trace` never raises, and its
result is valid: hexadecimal ids in lower case, neither of them all zeros. The header sent is always version 00 with the
flags that version defines, whatever came in.

A worker's periodic report to the router: gauges, and records of handoffs that ended since the last one.

Law: `decode` raises `ReportError` and nothing else, whatever the bytes; its result is within bounds. A busy worker
reports a share of its handoffs, chosen by their ids: the same ones at P, D and router.
"""

from __future__ import annotations

import enum
import re
import secrets
from typing import Annotated

import msgspec
from msgspec import Meta

from kvbaton.protocol.errors import Reason

NAME_CHARS_MAX = 128
TEXT_CHARS_MAX = 256
MOMENTS_MAX = 48
DELIVERED = "delivered"
WHOLE = "whole answer"
"""Detail of the router's first byte where nothing was streamed: it came with the last."""
QUIET = ("ok", "client_gone", "moved", Reason.ABORTED, Reason.CANCELLED, Reason.DISCARDED)
"""Ends that are nobody's fault: the client left, its stream went on at another D, or the prompt was not needed after
all. `ok`, `client_gone` and `moved` are the router's."""

Name = Annotated[str, Meta(max_length=NAME_CHARS_MAX)]
Text = Annotated[str, Meta(max_length=TEXT_CHARS_MAX)]
Count = Annotated[int, Meta(ge=0, le=(1 << 63) - 1)]


class FlightSeat(enum.StrEnum):
    """The side that observed a handoff."""

    ROUTER = "router"
    PREFILL = "prefill"
    DECODE = "decode"


class Moment(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A step: `protocol.effects.Step`, or one of the router's: received, chosen, prefill_sent, prefill_answered,
    prefill_refused, decode_sent, decode_refused, first_byte, moved, ended."""

    step: Name
    at: float
    detail: Text = ""


Moments = Annotated[tuple[Moment, ...], Meta(max_length=MOMENTS_MAX)]


class Flight(msgspec.Struct, frozen=True, omit_defaults=True, gc=False):
    """One handoff as one process saw it. At the router: one attempt of a request."""

    seat: FlightSeat
    worker: Name  # the writer
    incarnation: Name = ""  # hex
    handoff: Name = ""  # "" where there was none
    request: Name = ""  # this side's own id of the request; the router's is the client's
    peers: Annotated[tuple[Name, ...], Meta(max_length=8)] = ()  # the other side; at the router P (or "-"), D
    mode: Name = ""  # pull, stream, push; alone
    transport: Name = ""
    tokens: Count = 0  # of the prompt; estimated at the router
    blocks: Count = 0
    bytes: Count = 0  # that this side copied
    retries: Count = 0  # repeated messages; at the router: the attempt's number, from 0
    moments: Moments = ()
    end: Name = ""  # "" while under way; delivered; a reason; at the router ok, or the error's code
    mistake: bool = False  # at the router: the client's, which a worker refused; no handoff has failed
    chunks: Count = 0  # at the router: of a streamed answer, those that bear a token
    detail: Text = ""
    trace: Name = ""  # W3C traceparent: at the router its own span of this try, at P and D the leg that they serve
    parent: Name = ""  # at the router: the traceparent that the client sent, or that of the request's span
    legs: Annotated[tuple[Name, ...], Meta(max_length=2)] = ()  # at the router: span ids of the legs to P and to D
    path: Name = ""  # at the router: what the client asked
    model: Name = ""  # at the router: the model that the client named
    status: Count = 0  # at the router: of its answer; 0 where there was none
    output_tokens: Count = 0  # at the router: of an answer that came to its end

    @property
    def began(self) -> float:
        return self.moments[0].at if self.moments else 0.0

    @property
    def is_over(self) -> bool:
        return bool(self.end)

    @property
    def failed(self) -> bool:
        """It ended, not successfully, and neither by the client's mistake nor because it was no longer wanted."""
        return not self.mistake and self.end not in ("", DELIVERED, *QUIET)

    @property
    def pair(self) -> tuple[str, str] | None:
        """At the router: the P and D of an attempt; None if there was no handoff."""
        if len(self.peers) != 2 or self.peers[0] in ("", "-"):
            return None
        return self.peers[0], self.peers[1]

    @property
    def is_handoff(self) -> bool:
        """Whether it is a handoff's: a worker's always, the router's where it had a pair for it."""
        return self.seat is not FlightSeat.ROUTER or self.pair is not None

    @property
    def itl_s(self) -> float | None:
        """At the router: the mean time between tokens (ITL) of a streamed answer."""
        first, last = self.at("first_token") or self.at("first_byte"), self.at("ended")
        if self.chunks < 2 or first is None or last is None or self.end != "ok":
            return None
        return max(last - first, 0.0) / (self.chunks - 1)

    def at(self, step: str) -> float | None:
        """When it first came to that step."""
        return next((moment.at for moment in self.moments if moment.step == step), None)


STAGES = ("claim", "queue", "first_byte", "copy", "commit", "deliver")
"""Of a handoff at D. Claim: asked to granted. Queue: to blocks for it. First byte and copy: from there. Commit: from
the last byte to P's word. Deliver: from there to the engine's taking it."""


def stages(flight: Flight) -> dict[str, float]:
    """How long D spent in each of its stages, in seconds; never negative."""
    edges = {
        "claim": ("asked", "granted"),
        "queue": ("granted", "allocated"),
        "first_byte": ("allocated", "first_byte"),
        "copy": ("allocated", "copied"),
        "commit": ("copied", "ended"),
        "deliver": ("ended", "taken"),
    }
    found: dict[str, float] = {}
    for name, (first, last) in edges.items():
        begin, end = flight.at(first), flight.at(last)
        if begin is not None and end is not None:
            found[name] = max(end - begin, 0.0)
    return found


TRACE_HEADER = "traceparent"
SAMPLED = 0x01
RANDOM_TRACE_ID = 0x02
KNOWN_FLAGS = SAMPLED | RANDOM_TRACE_ID
TRACEPARENT_CHARS_MAX = 256
"""A version after 00 may say more behind the four fields that we read; this much is borne with."""
VERSION_00_CHARS = 55

_FIELDS = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})")
_SPAN_ID = re.compile(r"[0-9a-f]{16}")
NO_TRACE = "0" * 32
NO_SPAN = "0" * 16


class Traceparent(msgspec.Struct, frozen=True):
    """A span as others refer to it; `str()` is the header's value."""

    trace_id: str  # 32 hexadecimal digits
    span_id: str  # 16
    flags: int = 0

    @property
    def sampled(self) -> bool:
        """Whether its caller records this trace, and so should we."""
        return bool(self.flags & SAMPLED)

    def child(self, span_id: str) -> Traceparent:
        """The same trace, propagated under the span `span_id`."""
        return Traceparent(trace_id=self.trace_id, span_id=span_id, flags=self.flags)

    def __str__(self) -> str:
        return f"00-{self.trace_id}-{self.span_id}-{self.flags:02x}"


def parse_trace(text: str | None) -> Traceparent | None:
    """The parsed header; None where it is missing or invalid, in which case a new trace starts."""
    if not text or len(text) > TRACEPARENT_CHARS_MAX:
        return None
    fields = _FIELDS.match(text)
    if fields is None:
        return None
    version, trace_id, span_id, flags = fields.groups()
    more = text[VERSION_00_CHARS:]
    if version == "ff" or (more and (version == "00" or more[0] != "-")):
        return None
    if trace_id == NO_TRACE or span_id == NO_SPAN:
        return None
    return Traceparent(trace_id=trace_id, span_id=span_id, flags=int(flags, 16) & KNOWN_FLAGS)


def new_trace(*, sampled: bool = True) -> Traceparent:
    """A trace that starts here."""
    flags = RANDOM_TRACE_ID | (SAMPLED if sampled else 0)
    return Traceparent(trace_id=_hex(16), span_id=new_span_id(), flags=flags)


def new_span_id() -> str:
    """16 hexadecimal digits, never all zeros."""
    return _hex(8)


def is_span_id(text: str) -> bool:
    return _SPAN_ID.fullmatch(text) is not None and text != NO_SPAN


def _hex(size: int) -> str:
    while not any(octets := secrets.token_bytes(size)):
        pass
    return octets.hex()


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
