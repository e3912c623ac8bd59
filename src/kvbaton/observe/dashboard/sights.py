"""Views of one worker, one attempt, one failure: from the router's records to values of `scene`.

Law: pure. The side that failed is named, even if the client got its answer; a worker that left is shown with its last
report, and a restarted one is not shown its former incarnation's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from kvbaton.observe.dashboard.scene import Failure, MovingHandoff, SeenHandoff
from kvbaton.observe.flight.flight_records import Flight, FlightSeat
from kvbaton.observe.flight.journey import Journey
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
