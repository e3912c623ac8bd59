"""The router's own flight records: one for each try of a request, from its first moment on.

Law: a try ends once, whatever ends it, and what happens after that is not written down. Writing a moment costs an
append; a record is made when the try ends, or when somebody looks. Of a worker's error only its status, and its code
if that is a known one, are written down: its words may be those of a prompt.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from kvbaton.api.api_errors import ApiError
from kvbaton.api.http.http_types import Header
from kvbaton.observe.codes.reasons import CODES
from kvbaton.observe.flight.collector import Gathering
from kvbaton.observe.flight.dumps import printable
from kvbaton.observe.flight.flight_records import (
    NAME_CHARS_MAX,
    QUIET,
    TEXT_CHARS_MAX,
    TRACE_HEADER,
    Flight,
    FlightSeat,
    Moment,
    Traceparent,
    new_span_id,
    new_trace,
    parse_trace,
)
from kvbaton.protocol.errors import Reason

RECEIVED = "received"
CHOSEN = "chosen"
PREFILL_SENT = "prefill_sent"
PREFILL_ANSWERED = "prefill_answered"
DECODE_SENT = "decode_sent"
FIRST_TOKEN = "first_token"
"""The client was told P's."""
FIRST_BYTE = "first_byte"
"""Of D's."""
ENDED = "ended"
MOVED = "moved"
"""A step, of a try that goes on with an answer; the end of one whose D was left while it answered."""
OK = "ok"
CLIENT_GONE = "client_gone"
ALONE = "alone"
_FINE = frozenset([OK, *QUIET])
_CODES = frozenset([*(entry.code for entry in CODES), *Reason])
"""A worker's own word for what went wrong is not written down: it may be anything, also of a prompt."""
_MOMENTS_MAX = 16
_TRACEPARENT = TRACE_HEADER.encode()


class FlightSpan:
    """Whose trace a request belongs to, and the spans of one try: its own, and one for each leg."""

    __slots__ = ("decode", "is_recorded", "own", "parent", "prefill")

    def __init__(self, parent: Traceparent, *, is_recorded: bool, is_root: bool = False) -> None:
        """Where nobody records spans here, workers hang theirs under the client's. The root is its own parent."""
        self.parent = parent
        self.is_recorded = is_recorded
        self.own = parent.child(new_span_id()) if is_recorded and not is_root else parent
        self.prefill = parent.child(new_span_id()) if is_recorded else parent
        self.decode = parent.child(new_span_id()) if is_recorded else parent


def begun(
    headers: Sequence[Header], share: float, chance: Callable[[], float] = lambda: secrets.randbits(32) / (1 << 32)
) -> tuple[Traceparent | None, bool]:
    """The trace that a client's request belongs to, and whether it begins here; of those without, `share` get one."""
    found = [value for name, value in headers if name == _TRACEPARENT]
    parent = parse_trace(found[0].decode("latin-1")) if len(found) == 1 else None
    if parent is None and share > 0.0 and chance() < share:
        return new_trace(), True
    return parent, False


@dataclass(slots=True)
class HttpCall:
    """What the client asked, and what came of it."""

    path: str = ""
    model: str = ""
    status: int = 0  # 0: no answer yet, or none
    output_tokens: int = 0
    chunks: int = 0  # of a streamed answer, those that bear a token
    mistake: bool = False  # the client's


class Trip:
    """One try under way."""

    __slots__ = (
        "_gathering", "_moments", "_wall", "attempt", "call", "detail", "end", "handoff", "mode", "peers",
        "request", "span", "tokens", "worker",
    )  # fmt: skip

    def __init__(
        self,
        gathering: Gathering,
        worker: str,
        request: str,
        attempt: int,
        tokens: int,
        span: FlightSpan | None,
        wall: Callable[[], float] = time.time,
        call: HttpCall | None = None,
    ) -> None:
        self.worker = worker  # who writes
        self.call = call or HttpCall()
        self.request = request
        self.attempt = attempt
        self.tokens = tokens
        self.span = span
        self.handoff = ""
        self.peers: tuple[str, ...] = ()
        self.mode = ""
        self.end = ""
        self.detail = ""
        self._wall = wall
        self._moments: list[tuple[str, float, str]] = [(RECEIVED, wall(), "")]
        self._gathering = gathering
        gathering.watch(self)

    def mark(self, step: str, detail: str = "") -> None:
        """Something happened; nothing does after the end."""
        if not self.end and len(self._moments) < _MOMENTS_MAX:
            self._moments.append((step, self._wall(), detail))

    def late(self, step: str) -> None:
        """After the end: where both were asked at once, P may answer when D's answer has gone to the client."""
        if len(self._moments) < _MOMENTS_MAX:
            self._moments.append((step, self._wall(), ""))
            self._gathering.amend(self.flight())

    def chose(self, prefill: str, decode: str, mode: str) -> None:
        """Who is asked; also again, where D drained while P computed. `prefill` is "-" where D is asked alone."""
        self.peers = (prefill, decode)
        self.mode = ALONE if prefill == "-" else mode
        self.mark(CHOSEN)

    def answered(self, handoff: str) -> None:
        """P has answered; in pull it says which handoff that is."""
        self.handoff = handoff or self.handoff
        self.mark(PREFILL_ANSWERED)

    def refused(self, side: str) -> None:
        """A worker answered, and not with what was asked for."""
        self.mark(f"{side}_refused")

    def leg(self, side: Literal["prefill", "decode"]) -> str:
        """The traceparent that a leg is told; "" if there is none."""
        if self.span is None:
            return ""
        return str(self.span.prefill if side == "prefill" else self.span.decode)

    def over(self, end: str, detail: str = "") -> None:
        """The try has ended. What ends it first is why; one that found nobody after others failed is none."""
        if self.end:
            return
        if self.attempt and not self.peers:
            self.end = end
            self._gathering.unwatch(self)
            return
        self.mark(ENDED)
        self.end, self.detail = end or OK, detail
        self.call.status = 200 if self.end == OK else self.call.status
        if end not in _FINE:  # words of a worker, for an operator's screen
            self.end, self.detail = printable(end)[:NAME_CHARS_MAX], printable(detail, TEXT_CHARS_MAX)
        self._gathering.unwatch(self)
        traced = self.span is not None and self.span.is_recorded
        always = traced or self.attempt > 0 or self.end not in _FINE
        if self._gathering.wants(self.handoff, always=always, request=self.request):
            self._gathering.note(self.flight())

    def broke(self, error: BaseException) -> None:
        """The try has ended by an error; one that cancels it is the client's going."""
        if isinstance(error, ApiError):
            self.call.status = self.call.status or error.status
            known = error.code is not None and (error.code in _CODES or error.code.isdigit())
            self.call.mistake = not self.end and error.is_clients
            self.over(str(error.code) if known else str(error.status), error.recorded)
        elif isinstance(error, asyncio.CancelledError | GeneratorExit):
            self.over(CLIENT_GONE)
        else:
            self.over("internal", type(error).__name__)

    def flight(self) -> Flight:
        span = self.span
        return Flight(
            seat=FlightSeat.ROUTER,
            worker=self.worker,
            handoff=self.handoff,
            request=self.request[:NAME_CHARS_MAX],
            peers=self.peers,
            mode=self.mode,
            tokens=self.tokens,
            retries=self.attempt,
            moments=tuple([Moment(step, at, detail) for step, at, detail in self._moments]),
            end=self.end,
            mistake=self.call.mistake,
            chunks=self.call.chunks,
            detail=self.detail[:TEXT_CHARS_MAX],
            trace="" if span is None or not span.is_recorded else str(span.own),
            parent="" if span is None else str(span.parent),
            legs=() if span is None or not span.is_recorded else (span.prefill.span_id, span.decode.span_id),
            path=self.call.path[:NAME_CHARS_MAX],
            model=printable(self.call.model)[:NAME_CHARS_MAX],
            status=self.call.status,
            output_tokens=self.call.output_tokens,
        )


class LogBook:
    """Begins the records of one router."""

    def __init__(self, gathering: Gathering, name: str = "router", traces: bool = False) -> None:
        self._gathering = gathering
        self._name = name
        self._traces = traces

    def begin(
        self,
        request: str,
        attempt: int,
        tokens: int,
        trace: Traceparent | None = None,
        begins_trace: bool = False,
        call: HttpCall | None = None,
    ) -> Trip:
        span = None
        if trace is not None:
            span = FlightSpan(trace, is_recorded=self._traces, is_root=begins_trace and not attempt)
        return Trip(self._gathering, self._name, request, attempt, tokens, span, call=call)
