"""Records of three sides become one story: stages, shares, ends, and who is missing."""

from __future__ import annotations

import itertools

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvbaton.observe.flight import journey as j
from kvbaton.observe.flight.flight_records import Flight, FlightSeat, Moment, stages
from kvbaton.observe.flight.journey import Journey, join
from tests.observe.flight.handoffs import HANDOFF, NOW, decode, moments, prefill, router


def seconds(journey: Journey, name: str) -> float:
    (found,) = (stage for stage in journey.stages if stage.name == name)
    return found.seconds


def test_a_whole_handoff_has_every_stage_of_every_side() -> None:
    journey = join([router(), prefill(), decode()])
    assert {stage.name for stage in journey.stages} == {*j.ROUTER_STAGES, *j.PREFILL_STAGES, *j.DECODE_STAGES}
    assert (journey.handoff, journey.request, journey.end, journey.failed) == (HANDOFF, "mine", "ok", False)
    assert (journey.transport, journey.blocks, journey.bytes, journey.tokens) == ("shm", 3, 2_000_000, 24)
    assert [lane.seat for lane in journey.lanes] == [FlightSeat.ROUTER, FlightSeat.PREFILL, FlightSeat.DECODE]
    assert (journey.began, journey.missing) == (NOW, ())
    assert seconds(journey, "prefill") == pytest.approx(0.048, abs=1e-5)
    assert seconds(journey, "copy") == pytest.approx(0.020, abs=1e-5)
    assert journey.bytes_per_s == pytest.approx(1e8, rel=1e-3)


def test_stages_of_d_are_those_that_are_measured() -> None:
    journey = join([decode()])
    measured = stages(decode())
    assert {name: pytest.approx(seconds(journey, name), abs=1e-5) for name in measured} == measured
    assert set(j.DECODE_STAGES) - set(measured) == {"connect"}


def test_the_transfers_share_is_from_when_both_were_ready_to_when_the_engine_took_it() -> None:
    journey = join([router(), prefill(), decode()])
    assert journey.ttft_s == pytest.approx(0.1, abs=1e-5)
    assert journey.transfer_s == pytest.approx(0.090 - 0.053, abs=1e-5)
    assert journey.transfer_share == pytest.approx(0.37, abs=1e-3)


def test_in_streaming_what_passes_while_p_computes_is_not_the_transfers() -> None:
    late = prefill(moments=moments((("begun", 0.010), ("seated", 0.056), ("complete", 0.079), ("committed", 0.085))))
    both = router(moments=moments((("received", 0.0), ("prefill_sent", 0.002), ("decode_sent", 0.002),
                                   ("prefill_answered", 0.081), ("first_byte", 0.1))))  # fmt: skip
    journey = join([both, late, decode()])
    assert journey.transfer_s == pytest.approx(0.090 - 0.079, abs=1e-5)
    assert "handover" not in {stage.name for stage in journey.stages}


@settings(deadline=None)
@given(st.permutations(range(3)), st.floats(-100, 100), st.floats(-100, 100))
def test_the_order_in_which_records_come_changes_nothing(order: list[int], p: float, d: float) -> None:
    flights = [router(), prefill(p), decode(d)]
    assert join([flights[index] for index in order]) == join(flights)


@settings(deadline=None)
@given(st.floats(-1000, 1000))
def test_a_skewed_clock_is_corrected_and_said(skew: float) -> None:
    journey = join([router(), prefill(), decode(skew)])
    lane = journey.lane(FlightSeat.DECODE)
    assert lane is not None
    assert lane.moments[0].at == pytest.approx(0.053, abs=0.06)
    own = [journey.began + moment.at - lane.clock_offset_s for moment in lane.moments]
    assert own == pytest.approx([moment.at for moment in decode(skew).moments], abs=1e-4)
    assert journey.transfer_s is not None
    assert journey.transfer_s <= 0.06


@pytest.mark.parametrize("here", [set(each) for n in (1, 2) for each in itertools.combinations(range(3), n)])
def test_sides_that_did_not_tell_are_named_with_why(here: set[int]) -> None:
    flights = [router(), prefill(), decode()]
    journey = join([flights[index] for index in sorted(here)], why=lambda seat, worker: f"{seat} {worker}: not here")
    names = {0: ("router", ""), 1: ("prefill", "p0"), 2: ("decode", "d0")}
    expected = {(*names[index], f"{names[index][0]} {names[index][1]}: not here") for index in {0, 1, 2} - here}
    assert {(each.seat.value, each.worker, each.why) for each in journey.missing} == expected


def test_d_alone_misses_nobody() -> None:
    alone = router(mode="alone", handoff="", peers=("-", "d0"))
    assert join([alone]).missing == ()


def test_a_side_that_was_never_asked_is_not_missed() -> None:
    died = router(
        handoff="", end="worker_died", detail="p0 went away", moments=moments((("received", 0), ("prefill_sent", 0.1)))
    )
    journey = join([died])
    assert [(each.seat, each.worker) for each in journey.missing] == [(FlightSeat.PREFILL, "p0")]
    assert (journey.failed, journey.detail) == (True, "p0 went away")


def test_without_the_router_the_failure_of_a_side_is_the_end() -> None:
    failed = decode(end="lease_expired", detail="P let go")
    assert (join([prefill(), failed]).end, join([prefill(), failed]).detail) == ("lease_expired", "P let go")
    assert join([prefill(), decode()]).end == "delivered"
    assert join([prefill(end="")]).is_over is False


def test_what_a_process_told_before_it_died_is_marked() -> None:
    journey = join([router(), prefill(end="")], gone=lambda flight: flight.worker == "p0")
    lane = journey.lane(FlightSeat.PREFILL)
    assert lane is not None
    assert (lane.gone, lane.end) == (True, "")


def test_a_journey_reads_back_from_its_json() -> None:
    journey = join([router(), prefill(1.0), decode(-2.0)])
    assert msgspec.json.decode(msgspec.json.encode(journey), type=Journey) == journey


NAMES = st.text(max_size=12)
STEPS = st.sampled_from(
    [
        "received", "prefill_sent", "decode_sent", "first_byte", "ended", "begun", "complete", "seated", "committed",
        "asked", "claimed", "granted", "allocated", "copied", "taken", "odd",
    ]
)  # fmt: skip
FLIGHTS = st.builds(
    Flight,
    seat=st.sampled_from(FlightSeat),
    worker=NAMES,
    handoff=NAMES,
    request=NAMES,
    peers=st.lists(NAMES, max_size=3).map(tuple),
    mode=st.sampled_from(["", "pull", "alone"]),
    end=st.sampled_from(["", "ok", "delivered", "peer_gone"]),
    bytes=st.integers(0, 1 << 40),
    moments=st.lists(st.builds(Moment, STEPS, st.floats(1.0, 1e10)), max_size=8).map(tuple),
)


@settings(deadline=None)
@given(st.lists(FLIGHTS, min_size=1, max_size=6))
def test_whatever_was_recorded_can_be_joined_and_no_stage_is_negative(flights: list[Flight]) -> None:
    journey = join(flights)
    assert all(stage.end_s >= stage.begin_s for stage in journey.stages)
    assert journey.seconds >= 0
    assert len(journey.lanes) == len(flights)
    assert msgspec.json.decode(msgspec.json.encode(journey), type=Journey) == journey


@pytest.mark.parametrize(
    ("told", "shown"), [(j.FORGOTTEN, j.WITHDRAWN), (j.NOT_YET, j.NOT_YET), (j.GONE, j.GONE)], ids=lambda text: text
)
def test_where_d_refused_first_p_is_not_said_to_have_forgotten_what_it_never_began(told: str, shown: str) -> None:
    both = router(moments=moments((("received", 0.0), ("prefill_sent", 0.002), ("decode_sent", 0.002),
                                   ("decode_refused", 0.004))), end="invalid_value", mistake=True)  # fmt: skip
    journey = join([both], why=lambda _, __: told)
    assert [(side.seat, side.why) for side in journey.missing] == [
        (FlightSeat.PREFILL, shown),
        (FlightSeat.DECODE, j.REFUSED),
    ]
