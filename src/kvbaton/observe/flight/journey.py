"""One handoff as all sides saw it, on one clock: stages, outcome, and sides that have not reported yet.

Law: pure. A side that did not report is named as missing, with the reason; nothing is made up. Times of a journey are
seconds from its first moment, by the router's clock if the router saw it. The JSON form is that of these structs, and
documented in docs/inspect.md: fields may be added, none changes its meaning.

Records from anywhere, in any order, as journeys: `kvbaton inspect --files` works without a router.

Law: pure; the last finished record of a side stands, whatever came first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

import msgspec

from kvbaton.observe.flight.clocks import offsets
from kvbaton.observe.flight.flight_records import DELIVERED, QUIET, Flight, FlightSeat, Moment

FIND_CHARS_MIN = 6
"""Of the beginning of a transfer id, or of a part of a request id."""
NO_DUMP = "no dump given"


def key_of(flight: Flight) -> str:
    """The common key of one handoff's records; an attempt without a handoff stands alone."""
    return flight.handoff or f"{flight.request}#{flight.retries}@{flight.began!r}"


def side_of(flight: Flight) -> tuple[FlightSeat, str, str, str]:
    """The writer and the request of a record; a later record of the same replaces it."""
    return flight.seat, flight.worker, flight.incarnation, flight.request


def matches(flight: Flight, text: str) -> bool:
    """Whether this id refers to this record."""
    if text in (flight.handoff, flight.request):
        return True
    return len(text) >= FIND_CHARS_MIN and (flight.handoff.startswith(text) or text in flight.request)


def began(flights: Iterable[Flight]) -> float:
    """When the router saw it first, or else any side."""
    known = list(flights)
    router = [flight.began for flight in known if flight.seat is FlightSeat.ROUTER]
    return min(router or [flight.began for flight in known])


def tries_of(groups: Iterable[Sequence[Flight]]) -> dict[str, int]:
    """The number of known attempts of each request; clients may use one id for several requests."""
    tries: dict[str, int] = {}
    for group in groups:
        for flight in group:
            if flight.seat is FlightSeat.ROUTER:
                tries[flight.request] = max(tries.get(flight.request, 1), flight.retries + 1)
    return tries


Answered = tuple[int, float]
"""A try that was answered: its number, and when it began."""


def answered(groups: Iterable[Sequence[Flight]]) -> dict[str, Answered]:
    """The repeated attempts that were answered, by request."""
    return {
        flight.request: (flight.retries, flight.began)
        for group in groups
        for flight in group
        if is_answered_retry(flight)
    }


def is_answered_retry(flight: Flight) -> bool:
    return flight.seat is FlightSeat.ROUTER and flight.retries > 0 and flight.end == "ok"


def answered_by(group: Iterable[Flight], found: Mapping[str, Answered]) -> int | None:
    """The later try of the same request that was answered; clients may use one id for several requests."""
    router = next((flight for flight in group if flight.seat is FlightSeat.ROUTER), None)
    number, at = found.get(router.request, (0, 0.0)) if router is not None else (0, 0.0)
    return number if router is not None and number > router.retries and at >= router.began else None


def joined(flights: Iterable[Flight], *, last: int, failed: bool = False, find: str = "") -> list[Journey]:
    """Newest first."""
    stories: dict[str, dict[tuple[FlightSeat, str, str, str], Flight]] = {}
    for flight in flights:
        sides = stories.setdefault(key_of(flight), {})
        before = sides.get(side_of(flight))
        if before is None or not before.is_over or flight.is_over:
            sides[side_of(flight)] = flight
    groups = [list(sides.values()) for sides in stories.values()]
    retried = answered(groups)
    if find:
        groups = [group for group in groups if any(matches(flight, find) for flight in group)]
    if failed:
        groups = [group for group in groups if any(flight.failed for flight in group)]
    groups.sort(key=began, reverse=True)
    tries = tries_of(groups)
    return [
        join(
            group,
            why=lambda _, __: NO_DUMP,
            tries=max((tries.get(each.request, 1) for each in group), default=1),
            answered_by=answered_by(group, retried),
        )
        for group in groups[:last]
    ]


NOT_YET = "not reported yet"
GONE = "gone"
SAMPLED_OUT = "sampled out"
FOREIGN = "does not report"
FORGOTTEN = "no longer known there"
NOT_SEEN = "not seen here"
REFUSED = "refused the request before a handoff began"
WITHDRAWN = "asked no further, as the other side had refused the request"

ROUTER_STAGES = {
    "choose": ("received", "chosen"),
    "prefill": ("prefill_sent", "prefill_answered"),
    "handover": ("prefill_answered", "decode_sent"),
    "first_token": ("decode_sent", "first_byte"),
    "answer": ("first_byte", "ended"),
}
PREFILL_STAGES = {
    "prefill_queue": ("accepted", "scheduled"),
    "compute": ("scheduled", "complete"),
    "hold": ("complete", "closed"),
}
DECODE_STAGES = {
    "connect": ("asked", "claimed"),
    "claim": ("asked", "granted"),
    "queue": ("granted", "allocated"),
    "first_byte": ("allocated", "first_byte"),
    "copy": ("allocated", "copied"),
    "commit": ("copied", "ended"),
    "deliver": ("ended", "taken"),
}
"""As `records.stages`, which a test compares; the first part of a claim is to have a link to P at all."""
STAGES: Mapping[FlightSeat, Mapping[str, tuple[str, str]]] = {
    FlightSeat.ROUTER: ROUTER_STAGES,
    FlightSeat.PREFILL: PREFILL_STAGES,
    FlightSeat.DECODE: DECODE_STAGES,
}
_ORDER = list(FlightSeat)
Why = Callable[[FlightSeat, str], str]
"""Says why a side's record is not here, given the worker's name."""


class Stage(msgspec.Struct, frozen=True):
    """An interval of one side's time; one that was never finished is not listed."""

    name: str
    seat: FlightSeat
    worker: str
    begin_s: float
    end_s: float

    @property
    def seconds(self) -> float:
        return self.end_s - self.begin_s


class JourneyLane(msgspec.Struct, frozen=True, omit_defaults=True):
    """One side's part. Its own clock's time of a moment is `journey.began + moment.at - clock_offset_s`."""

    seat: FlightSeat
    worker: str
    incarnation: str = ""
    request: str = ""  # its own id of the request
    moments: tuple[Moment, ...] = ()  # `at` is in seconds from the journey's beginning
    clock_offset_s: float = 0.0
    end: str = ""  # "" while it is under way, as far as was told
    mistake: bool = False  # the client's, not this side's failure
    detail: str = ""
    gone: bool = False  # the process is no longer there; this is what it told last
    bytes: int = 0
    blocks: int = 0
    retries: int = 0
    transport: str = ""
    trace: str = ""

    @property
    def failed(self) -> bool:
        return not self.mistake and self.end not in ("", DELIVERED, *QUIET)


class Missing(msgspec.Struct, frozen=True):
    seat: FlightSeat
    worker: str  # "" if unknown
    why: str


class Journey(msgspec.Struct, frozen=True, omit_defaults=True):
    """One attempt of one request, from its arrival at the router to D's first token, as far as it is known."""

    began: float  # Unix seconds
    seconds: float  # from its first moment to the last that is known
    handoff: str = ""  # "" where none came about
    request: str = ""  # the client's id where the router saw it
    number: int = 0  # which try of that request this is, from 0
    tries: int = 1  # of that request that are known
    answered_by: int | None = None  # the number of a later try of that request, which was answered
    mode: str = ""
    transport: str = ""
    tokens: int = 0
    blocks: int = 0
    bytes: int = 0  # that were copied
    end: str = ""  # "" under way; ok or delivered; else why not
    failed: bool = False  # on any side: a request may be answered although its handoff failed
    mistake: bool = False  # the client's: a worker refused the request, and no handoff failed
    detail: str = ""
    lanes: tuple[JourneyLane, ...] = ()  # router, P, D, as far as they told
    stages: tuple[Stage, ...] = ()
    missing: tuple[Missing, ...] = ()
    ttft_s: float | None = None  # at the router: from the request to the first byte of its answer
    chunks: int = 0  # of a streamed answer, those that bear a token
    itl_s: float | None = None  # mean time between tokens of a streamed answer
    transfer_s: float | None = None  # D wanted the KV and P had all of it, until D's engine took it
    transfer_share: float | None = None  # of ttft_s
    bytes_per_s: float | None = None  # while copying
    clocks_doubtful: bool = False  # no correction puts every effect after its cause

    @property
    def is_over(self) -> bool:
        return bool(self.end)

    def lane(self, seat: FlightSeat) -> JourneyLane | None:
        return next((lane for lane in self.lanes if lane.seat is seat), None)


def join(
    flights: Iterable[Flight],
    *,
    why: Why = lambda _, __: NOT_SEEN,
    gone: Callable[[Flight], bool] = lambda _: False,
    tries: int = 1,
    answered_by: int | None = None,
) -> Journey:
    """The journey of one handoff; at least one record. Those of one seat may be several: a lease can have readers."""
    known = sorted(flights, key=lambda flight: (_ORDER.index(flight.seat), flight.began, flight.worker))
    found = offsets(known)
    timed = [flight for flight in known if flight.moments]
    shifts = dict(zip(map(id, known), found.seconds, strict=True))
    starts = [flight.began + shifts[id(flight)] for flight in timed]
    began = min(starts, default=0.0)
    lanes = tuple(_lane(flight, shifts[id(flight)], began, gone(flight)) for flight in known)
    stages = tuple(stage for lane in lanes for stage in _stages(lane))
    router = next((flight for flight in known if flight.seat is FlightSeat.ROUTER), None)
    decode = next((flight for flight in known if flight.seat is FlightSeat.DECODE), None)
    head = router or decode or known[0]
    end, detail = _end(known, router)
    ttft_s = _between(lanes, FlightSeat.ROUTER, "received", "first_token")  # P's, where that was told
    if ttft_s is None:
        ttft_s = _between(lanes, FlightSeat.ROUTER, "received", "first_byte")
    transfer_s = _transfer_s(lanes)
    copied = max((flight.bytes for flight in known), default=0)
    copy_s = next((stage.seconds for stage in stages if stage.name == "copy"), 0.0)
    return Journey(
        began=began,
        seconds=round(max((moment.at for lane in lanes for moment in lane.moments), default=0.0), 6),
        handoff=next((flight.handoff for flight in known if flight.handoff), ""),
        request=head.request,
        number=0 if router is None else router.retries,
        tries=tries,
        answered_by=answered_by,
        mode=_first(known, "mode"),
        transport=_first((flight for flight in known if flight.seat is not FlightSeat.ROUTER), "transport"),
        tokens=next((flight.tokens for flight in reversed(known) if flight.tokens), 0),
        blocks=max((flight.blocks for flight in known), default=0),
        bytes=copied,
        end=end,
        failed=any(flight.failed for flight in known),
        mistake=any(flight.mistake for flight in known),
        detail=detail,
        lanes=lanes,
        stages=stages,
        missing=_missing(known, router, why),
        ttft_s=ttft_s,
        chunks=0 if router is None else router.chunks,
        itl_s=None if router is None or router.itl_s is None else round(router.itl_s, 9),
        transfer_s=transfer_s,
        transfer_share=round(min(transfer_s / ttft_s, 1.0), 6) if ttft_s and transfer_s is not None else None,
        bytes_per_s=round(copied / copy_s, 1) if copied and copy_s > 0 else None,
        clocks_doubtful=found.doubtful,
    )


def _lane(flight: Flight, shift: float, began: float, gone: bool) -> JourneyLane:
    moments = tuple(
        Moment(moment.step, round(moment.at + shift - began, 6), moment.detail) for moment in flight.moments
    )
    return JourneyLane(
        flight.seat,
        flight.worker,
        flight.incarnation,
        flight.request,
        moments,
        round(shift, 6),
        flight.end,
        flight.mistake,
        flight.detail,
        gone,
        flight.bytes,
        flight.blocks,
        flight.retries,
        flight.transport,
        flight.trace,
    )


def _stages(lane: JourneyLane) -> Iterable[Stage]:
    when = _when(lane)
    if "begun" in when:  # a P of the release before tells no more
        when.setdefault("scheduled", when["begun"])
    for name, (first, last) in STAGES[lane.seat].items():
        begin, end = when.get(first), when.get(last)
        if name == "handover" and lane.seat is FlightSeat.ROUTER and when.get(last, 0.0) < when.get(first, 0.0):
            continue  # both were asked at once
        if begin is not None and end is not None:
            yield Stage(name, lane.seat, lane.worker, begin, max(end, begin))


def _when(lane: JourneyLane) -> dict[str, float]:
    """Each step's first moment."""
    return {moment.step: moment.at for moment in reversed(lane.moments)}


def _between(lanes: Sequence[JourneyLane], seat: FlightSeat, first: str, last: str) -> float | None:
    for lane in lanes:
        if lane.seat is seat:
            when = _when(lane)
            if first in when and last in when:
                return round(max(when[last] - when[first], 0.0), 6)
    return None


def _transfer_s(lanes: Sequence[JourneyLane]) -> float | None:
    decode = next((lane for lane in lanes if lane.seat is FlightSeat.DECODE and lane.end == DELIVERED), None)
    if decode is None:
        return None
    when = _when(decode)
    until = when.get("taken", when.get("ended"))
    if until is None or "asked" not in when:
        return None
    ready = [_when(lane).get("complete", 0.0) for lane in lanes if lane.seat is FlightSeat.PREFILL]
    return round(max(until - max([when["asked"], *ready]), 0.0), 6)


def _end(known: Sequence[Flight], router: Flight | None) -> tuple[str, str]:
    """The router's outcome has precedence over the others'; a failure over a success."""
    if router is not None:
        return router.end, router.detail
    for flight in known:
        if flight.failed:
            return flight.end, flight.detail
    ended = [flight for flight in known if flight.is_over]
    decode = [flight for flight in ended if flight.seat is FlightSeat.DECODE]
    return (decode or ended)[0].end if ended else "", ""


def _missing(known: Sequence[Flight], router: Flight | None, why: Why) -> tuple[Missing, ...]:
    here = {flight.seat for flight in known}
    found = []
    if router is None:
        found.append(Missing(FlightSeat.ROUTER, "", why(FlightSeat.ROUTER, "")))
    elif router.mode == "alone" or not router.peers:
        return ()
    for index, seat in enumerate((FlightSeat.PREFILL, FlightSeat.DECODE)):
        if seat in here:
            continue
        if router is not None and router.at(f"{seat}_sent") is None:
            continue  # it was never asked
        worker = _named(known, router, seat, index)
        found.append(Missing(seat, worker, _refused(router, seat) or why(seat, worker)))
    if any(side.why == REFUSED for side in found):  # then the other side has nothing to tell, and forgot nothing
        found = [msgspec.structs.replace(side, why=WITHDRAWN) if side.why == FORGOTTEN else side for side in found]
    return tuple(found)


def _refused(router: Flight | None, seat: FlightSeat) -> str:
    return REFUSED if router is not None and router.at(f"{seat}_refused") is not None else ""


def _named(known: Sequence[Flight], router: Flight | None, seat: FlightSeat, index: int) -> str:
    if router is not None:
        return router.peers[index] if index < len(router.peers) else ""
    other = FlightSeat.DECODE if seat is FlightSeat.PREFILL else FlightSeat.PREFILL
    return next((flight.peers[0] for flight in known if flight.seat is other and flight.peers), "")


def _first(flights: Iterable[Flight], field: str) -> str:
    return next((str(value) for flight in flights if (value := getattr(flight, field))), "")
