"""A flight record as spans: the router's request with its two worker requests, P's lease, D's handoff with its stages.

Law: pure, and bounded as the record is. Every span but the first of a flight has its parent in the same flight; the
parent of the first is the caller's. A child lies within its parent. Only ended flights of sampled traces have spans.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable, Mapping, Sequence

import msgspec

from kvbaton.observe.flight.flight_records import (
    QUIET,
    Flight,
    FlightSeat,
    Moment,
    Traceparent,
    is_span_id,
    new_span_id,
    parse_trace,
)
from kvbaton.protocol.ids import is_handoff_id

Value = str | int
NewId = Callable[[], str]

STAGES = (
    ("claim", ("asked",), "granted"),
    ("queue", ("granted",), "allocated"),
    ("copy", ("granted", "allocated"), "copied"),
    ("commit", ("copied",), "ended"),
    ("deliver", ("ended",), "taken"),
)
"""Of a handoff at D: a stage begins when all that it waits for is there, and ends with its own step."""
LEGS = (("prefill", "prefill_sent", "prefill_answered"), ("decode", "decode_sent", "ended"))
COMPLETIONS = "/v1/completions"
READER_GONE = ("committed", "stale", "left")


class SpanKind(enum.StrEnum):
    """The span kind in OpenTelemetry's sense."""

    INTERNAL = "internal"
    SERVER = "server"
    CLIENT = "client"


class Event(msgspec.Struct, frozen=True):
    """An instantaneous event."""

    name: str
    at_ns: int
    attributes: Mapping[str, Value] = {}


class Span(msgspec.Struct, frozen=True, kw_only=True):
    """One line of a trace. Times are Unix nanoseconds by the clock of the process that wrote the record."""

    name: str
    kind: SpanKind
    trace_id: str
    span_id: str
    parent_id: str = ""  # "" where the trace begins here
    is_entry: bool = False  # its parent belongs to another process
    begin_ns: int
    end_ns: int
    attributes: Mapping[str, Value] = {}
    events: Sequence[Event] = ()
    error: str = ""  # the reason, where it failed


def spans_of(flight: Flight, new_id: NewId = new_span_id) -> list[Span]:
    """The spans of one ended flight, parents first; none where its trace is not sampled."""
    trace = parse_trace(flight.trace)
    if trace is None or not trace.sampled or not flight.is_over or not flight.moments:
        return []
    if flight.seat is FlightSeat.ROUTER:
        return _at_router(flight, trace, new_id)
    entry = _entry(flight, trace.child(new_id()), trace.span_id)
    children = _at_decode if flight.seat is FlightSeat.DECODE else _at_prefill
    return [entry, *children(flight, entry, new_id)]


def _at_router(flight: Flight, trace: Traceparent, new_id: NewId) -> list[Span]:
    parent = parse_trace(flight.parent)
    above = parent.span_id if parent is not None and parent.trace_id == trace.trace_id else ""
    entry = _entry(flight, trace, above if above != trace.span_id else "")
    found = [entry]
    for index, (name, first, last) in enumerate(LEGS):
        begin, end = flight.at(first), flight.at(last)
        if begin is None:
            continue
        peer = flight.peers[index] if index < len(flight.peers) else ""
        cut = flight.failed and (end is None or last == "ended")
        leg = _child(
            entry, name, new_id, begin, end, attributes=_present({"kvbaton.peer": peer, **_leg(flight)}),
            error=_reason(flight) if cut else "",
        )  # fmt: skip
        told = flight.legs[index] if index < len(flight.legs) else ""
        span_id = told if is_span_id(told) else leg.span_id
        found.append(msgspec.structs.replace(leg, kind=SpanKind.CLIENT, span_id=span_id))
    return found


def _leg(flight: Flight) -> Mapping[str, Value]:
    return {"http.request.method": "POST", "url.path": flight.path} if flight.path else {}


def _at_decode(flight: Flight, entry: Span, new_id: NewId) -> Iterable[Span]:
    over = flight.at("ended")
    for name, needs, last in STAGES:
        begins = [flight.at(step) for step in needs]
        known = [begin for begin in begins if begin is not None]
        end = flight.at(last)
        if len(known) < len(needs) or (last == "taken" and end is None):
            continue
        open_at_end = flight.failed and (end is None or last == "ended")
        events = _events(moment for moment in flight.moments if name == "copy" and moment.step == "first_byte")
        error = _reason(flight) if open_at_end else ""
        yield _child(entry, name, new_id, max(known), end if end is not None else over, events=events, error=error)


def _at_prefill(flight: Flight, entry: Span, new_id: NewId) -> Iterable[Span]:
    accepted, scheduled = flight.at("accepted"), flight.at("scheduled")
    if accepted is not None and scheduled is not None:
        yield _child(entry, "prefill_queue", new_id, accepted, max(scheduled, accepted))
    begun, complete = flight.at("begun") if scheduled is None else scheduled, flight.at("complete")
    if begun is not None and complete is not None and complete > begun:
        yield _child(entry, "compute", new_id, begun, complete)
    offered, written = flight.at("offered"), flight.at("written")
    if offered is not None and written is not None:
        first = _events(moment for moment in flight.moments if moment.step == "first_byte")
        yield _child(entry, "write", new_id, offered, written, events=first)
    yield from _readers(flight, entry, new_id)


def _readers(flight: Flight, entry: Span, new_id: NewId) -> Iterable[Span]:
    """A reader's time at P: from its seat to its going, or to the lease's end."""
    goings = [moment for moment in flight.moments if moment.step in READER_GONE]
    for seated in flight.moments:
        if seated.step != "seated":
            continue
        its = (each for each in goings if each.at >= seated.at and each.detail.partition(":")[0] == seated.detail)
        going = next(its, None)
        if going is not None:
            goings.remove(going)
        step, why = ("", "") if going is None else (going.step, going.detail.partition(": ")[2])
        error = (why or step) if step not in ("", "committed") and why not in QUIET else ""
        attributes = _present({"kvbaton.peer": seated.detail, "kvbaton.end": why or step})
        end = flight.at("closed") if going is None else going.at
        yield _child(entry, "read", new_id, seated.at, end, attributes=attributes, error=error)


# --- parts


def _entry(flight: Flight, trace: Traceparent, parent_id: str) -> Span:
    name = {FlightSeat.ROUTER: "request", FlightSeat.PREFILL: "lease", FlightSeat.DECODE: "handoff"}[flight.seat]
    times = [moment.at for moment in flight.moments]
    return Span(
        name=f"kvbaton.{name}",
        kind=SpanKind.SERVER,
        trace_id=trace.trace_id,
        span_id=trace.span_id,
        parent_id=parent_id,
        is_entry=bool(parent_id),
        begin_ns=_ns(min(times)),
        end_ns=_ns(max(times)),
        attributes=_attributes(flight),
        events=_events(flight.moments),
        error=_reason(flight) if flight.failed else "",
    )


def _child(
    entry: Span,
    name: str,
    new_id: NewId,
    begin: float,
    end: float | None,
    *,
    attributes: Mapping[str, Value] = {},
    events: Sequence[Event] = (),
    error: str = "",
) -> Span:
    begin_ns = _ns(begin)
    return Span(
        name=f"kvbaton.{name}",
        kind=SpanKind.INTERNAL,
        trace_id=entry.trace_id,
        span_id=new_id(),
        parent_id=entry.span_id,
        begin_ns=begin_ns,
        end_ns=entry.end_ns if end is None else max(_ns(end), begin_ns),
        attributes=attributes,
        events=events,
        error=error,
    )


def _attributes(flight: Flight) -> Mapping[str, Value]:
    """Attributes for searching traces; no empty ones."""
    handoff, retries = flight.handoff, "try" if flight.seat is FlightSeat.ROUTER else "retries"
    return _present(
        {
            "kvbaton.handoff": handoff,
            "kvbaton.transfer_id": handoff.rpartition(".")[0] if is_handoff_id(handoff) else "",
            "kvbaton.request": flight.request,
            "kvbaton.worker": flight.worker,
            "kvbaton.incarnation": flight.incarnation,
            "kvbaton.peer": ",".join(peer for peer in flight.peers if peer not in ("", "-")),
            "kvbaton.mode": flight.mode,
            "kvbaton.transport": flight.transport,
            "kvbaton.tokens": flight.tokens,
            "kvbaton.blocks": flight.blocks,
            "kvbaton.bytes": flight.bytes,
            f"kvbaton.{retries}": flight.retries,
            "kvbaton.end": flight.end,
            "kvbaton.detail": flight.detail,
            "error.type": flight.end if flight.failed else "",
            **_standard(flight),
        }
    )


def _standard(flight: Flight) -> Mapping[str, Value]:
    """The router's request by OpenTelemetry's semantic conventions for HTTP servers and generative AI."""
    if not flight.path:
        return {}
    return {
        "http.request.method": "POST",
        "http.route": flight.path,
        "url.path": flight.path,
        "http.response.status_code": flight.status,
        "gen_ai.operation.name": "text_completion" if flight.path == COMPLETIONS else "chat",
        "gen_ai.provider.name": "kvbaton",
        "gen_ai.request.model": flight.model,
        "gen_ai.usage.input_tokens": flight.tokens,
        "gen_ai.usage.output_tokens": flight.output_tokens,
    }


def _present(values: Mapping[str, Value]) -> Mapping[str, Value]:
    return {name: value for name, value in values.items() if value not in ("", 0)}


def _events(moments: Iterable[Moment]) -> Sequence[Event]:
    return [Event(each.step, _ns(each.at), _present({"kvbaton.detail": each.detail})) for each in moments]


def _reason(flight: Flight) -> str:
    return f"{flight.end}: {flight.detail}" if flight.detail else flight.end


def _ns(at: float) -> int:
    """Whole microseconds: a float of Unix seconds holds no more."""
    return max(round(at * 1_000_000), 0) * 1_000
