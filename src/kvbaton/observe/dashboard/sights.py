"""Views of one worker, one attempt, one failure: from the router's records to values of `scene`.

Law: pure. The side that failed is named, though the client was answered all the same; a worker that left is shown with
what it told last, and one that started again is not shown what its former life told.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from kvbaton.observe.dashboard.scene import Failure, MovingHandoff, SeenHandoff
from kvbaton.observe.flight.flight_records import DELIVERED, QUIET, Flight, FlightSeat
from kvbaton.observe.flight.journey import Journey, JourneyLane
from kvbaton.observe.flight.worker_reports import WorkerGauges

_STEPS = {"prefill_sent": "prefill", "chosen": "prefill", "prefill_answered": "handoff", "decode_sent": "handoff"}
_ORDER = {FlightSeat.DECODE: 0, FlightSeat.PREFILL: 1, FlightSeat.ROUTER: 2}


class ListedWorker(msgspec.Struct, frozen=True):
    """A worker as the router lists it."""

    name: str
    role: str
    state: str  # ready, draining, suspect, broken
    incarnation: str = ""
    note: str = ""


def failure_of(journey: Journey) -> Failure:
    """The part of a journey that failed: D's word goes before P's, and both before the router's."""
    failed = sorted(filter(_has_failed, journey.lanes), key=lambda lane: _ORDER[lane.seat])
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
    )


def _has_failed(lane: JourneyLane) -> bool:
    return lane.end not in ("", DELIVERED, *QUIET)


def seen(listed: Sequence[ListedWorker], workers: Sequence[WorkerGauges]) -> list[SeenHandoff]:
    """Who is listed, with what each told; and who told something and is listed no more."""
    told = {each.name: each for each in workers}
    found = [_joined(each, told.get(each.name)) for each in listed]
    here = {each.name for each in listed}
    for each in workers:
        if each.name not in here and each.seat and each.age_s is not None:
            found.append(SeenHandoff(each.name, each.seat, "gone", each.incarnation, each.age_s))
    return found


def _joined(listed: ListedWorker, told: WorkerGauges | None) -> SeenHandoff:
    if told is None or (listed.incarnation and told.incarnation != listed.incarnation):
        return SeenHandoff(listed.name, listed.role, listed.state, listed.incarnation, note=listed.note)
    return SeenHandoff(
        listed.name,
        listed.role,
        listed.state,
        listed.incarnation,
        told.age_s,
        told.gauges,
        told.rates,
        told.links,
        listed.note,
    )


def pair_of(flight: Flight) -> tuple[str, str] | None:
    """P and D of one of the router's tries; None where there was no handoff to be."""
    if len(flight.peers) != 2 or flight.peers[0] in ("", "-"):
        return None
    return flight.peers[0], flight.peers[1]


def key_of(flight: Flight) -> str:
    return f"{flight.request[:40]}#{flight.retries}@{flight.began:.6f}"


def moving_of(flight: Flight) -> MovingHandoff:
    stage = "prefill"
    for moment in flight.moments:
        stage = "decode" if moment.step == "first_byte" else _STEPS.get(moment.step, stage)
    return MovingHandoff(0, flight.peers[0], flight.peers[1], stage=stage, tokens=flight.tokens, key=key_of(flight))
