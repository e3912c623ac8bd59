"""The dashboard's state as values: workers, links, handoffs in flight, failures.

Law: nothing here is bounded yet; `state` selects what a browser gets.

Views of one worker, one attempt, one failure: from the router's records to values of `scene`.

Law: pure. The side that failed is named, even if the client got its answer; a worker that left is shown with its last
report, and a restarted one is not shown its former incarnation's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from kvbaton.observe.flight.flight_records import Flight, FlightSeat
from kvbaton.observe.flight.journey import Journey
from kvbaton.observe.flight.worker_reports import WorkerGauges


class SeenHandoff(msgspec.Struct, frozen=True):
    """A worker: its registry entry and its own reports."""

    name: str
    role: str  # prefill, decode, both
    state: str  # ready, draining, suspect, broken, gone
    incarnation: str = ""
    heard_s: float | None = None  # since its last report; None: it sends none
    gauges: Mapping[str, float] = {}
    rates: Mapping[str, float] = {}  # per second, in the window of all rates
    links: Mapping[str, str] = {}  # source worker: data plane
    note: str = ""  # why it is not used, where that is known
    address: str = ""  # where it is asked
    host: str = ""
    version: str = ""
    alone: tuple[float, float] | None = None  # prompt tokens of the last minute, and those computed for want of a P


class MovingHandoff(msgspec.Struct, frozen=True):
    """A handoff in flight, or one that has just ended."""

    number: int  # rises; of one that is under way 0
    source: str
    target: str
    stage: str = ""  # of one under way
    end: str = ""
    failed: bool = False
    tokens: int = 0
    key: str = ""  # of one under way: the same for as long as it is


class Failure(msgspec.Struct, frozen=True):
    """A handoff that did not arrive, or an attempt that failed."""

    at: float
    reason: str
    find: str  # what opens its timeline: an id that `/flights` knows
    handoff: str = ""
    request: str = ""
    source: str = ""
    target: str = ""
    seen_by: str = ""
    mode: str = ""
    transport: str = ""
    detail: str = ""
    answered: bool = False  # all the same: by a later try, or since D computed the prompt itself


class Figures(msgspec.Struct, frozen=True):
    """The router's own figures: those of now, and counts since it started, by the names of `pulse`."""

    in_flight: int = 0
    waiting: int = 0  # of those, for a first byte
    draining: bool = False
    counts: Mapping[str, int] = {}


class Trouble(msgspec.Struct, frozen=True):
    """What the router cannot serve, or only otherwise than it should, and why."""

    text: str
    is_down: bool  # requests are refused


class Scene(msgspec.Struct, frozen=True, kw_only=True):
    """A snapshot of a cluster."""

    at: float
    version: str = ""
    host: str = ""
    mode: str = ""
    drain: str = ""  # the command that drains a worker, but for its name; "" where there is none
    uptime_s: float = 0.0
    own: Figures = Figures()
    trouble: Trouble | None = None
    workers: Sequence[SeenHandoff] = ()
    under_way: Sequence[MovingHandoff] = ()
    ended: Sequence[MovingHandoff] = ()
    failures: Sequence[Failure] = ()
    pairs: Mapping[tuple[str, str], tuple[int, int]] = {}  # P and D: handoffs and tokens in the window of rates


_STEPS = {"prefill_sent": "prefill", "chosen": "prefill", "prefill_answered": "handoff", "decode_sent": "handoff"}
_ORDER = {FlightSeat.DECODE: 0, FlightSeat.PREFILL: 1, FlightSeat.ROUTER: 2}


class ListedWorker(msgspec.Struct, frozen=True):
    """A worker as the router lists it."""

    name: str
    role: str
    state: str  # ready, draining, suspect, broken
    incarnation: str = ""
    note: str = ""
    address: str = ""


def failure_of(journey: Journey) -> Failure:
    """The part of a journey that failed: D's report has precedence over P's, and both over the router's."""
    failed = sorted((lane for lane in journey.lanes if lane.failed), key=lambda lane: _ORDER[lane.seat])
    lane = failed[0] if failed else None
    prefill, decode = journey.lane(FlightSeat.PREFILL), journey.lane(FlightSeat.DECODE)
    names = {missing.seat: missing.worker for missing in journey.missing}
    last = max((moment.at for moment in lane.moments), default=journey.seconds) if lane else journey.seconds
    return Failure(
        at=journey.began + last,
        reason=lane.end if lane else journey.end,
        find=journey.handoff or journey.request,
        handoff=journey.handoff,
        request=journey.request,
        source=prefill.worker if prefill else names.get(FlightSeat.PREFILL, ""),
        target=decode.worker if decode else names.get(FlightSeat.DECODE, ""),
        seen_by=lane.worker if lane else "",
        mode=journey.mode,
        transport=journey.transport,
        detail=(lane.detail if lane else "") or journey.detail,
        answered=journey.answered_by is not None or journey.end == "ok",
    )


def seen(
    listed: Sequence[ListedWorker],
    workers: Sequence[WorkerGauges],
    rates: Mapping[str, Mapping[str, float]],
    alone: Mapping[str, tuple[float, float]],
) -> list[SeenHandoff]:
    """Registered workers with their reports; and workers that reported and are no longer registered."""
    told = {each.name: each for each in workers}
    found = [_joined(each, told.get(each.name), rates.get(each.name, {}), alone.get(each.name)) for each in listed]
    here = {each.name for each in listed}
    for each in workers:
        if each.name not in here and each.seat and each.age_s is not None:
            found.append(SeenHandoff(each.name, each.seat, "gone", each.incarnation, each.age_s))
    return found


def _joined(
    listed: ListedWorker, told: WorkerGauges | None, rates: Mapping[str, float], alone: tuple[float, float] | None
) -> SeenHandoff:
    found = SeenHandoff(
        listed.name, listed.role, listed.state, listed.incarnation, note=listed.note, address=listed.address
    )
    if told is None or (listed.incarnation and told.incarnation != listed.incarnation):
        return found
    return msgspec.structs.replace(
        found,
        heard_s=told.age_s,
        gauges=told.gauges,
        rates=rates,
        links=told.links,
        host=told.host,
        version=told.version,
        alone=alone,
    )


def key_of(flight: Flight) -> str:
    return f"{flight.request[:40]}#{flight.retries}@{flight.began:.6f}"


def moving_of(flight: Flight) -> MovingHandoff:
    stage = "prefill"
    for moment in flight.moments:
        stage = "decode" if moment.step == "first_byte" else _STEPS.get(moment.step, stage)
    return MovingHandoff(0, flight.peers[0], flight.peers[1], stage=stage, tokens=flight.tokens, key=key_of(flight))
