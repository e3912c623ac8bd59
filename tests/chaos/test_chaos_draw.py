"""Plans: what a seed gives, and what a file may hold."""

from __future__ import annotations

import itertools

import pytest

from kvbaton_proof.chaos.chaos_plan import Plan, from_json, to_json
from kvbaton_proof.chaos.draw import GAP_S, RESTARTING, STREAM_FAULTS, Size, draw, draw_streams
from kvbaton_proof.chaos.fault_catalogue import BY_NAME, FAULTS, ON_STREAMS, Moment, Target
from kvbaton_proof.chaos.injuries import CHANGES, INJURIES

TWO = Size(2, 2)


def _drawn(seed: int = 1, minutes: float = 3.0, size: Size = TWO) -> Plan:
    return draw(seed, 60 * minutes, size)


@pytest.mark.parametrize("seed", range(5))
def test_three_minutes_hold_every_fault_at_every_moment(seed: int) -> None:
    steps = _drawn(seed).steps
    assert {step.fault for step in steps} == set(BY_NAME)
    for fault in FAULTS:
        if fault.targets != (Target.ROUTER,):
            assert {step.moment for step in steps if step.fault == fault.name} == set(fault.moments)


@pytest.mark.parametrize("seed", range(5))
def test_each_moment_is_one_of_the_router_s_death_or_of_its_stop(seed: int) -> None:
    steps = [step for step in _drawn(seed).steps if step.target == "router"]
    assert {step.fault for step in steps} == {"kill-router", "stop-router"}
    assert {step.moment for step in steps} == set(Moment)
    assert len(steps) == len(Moment) + 1


def test_a_router_s_fault_alone_has_every_moment() -> None:
    steps = draw(1, 180.0, TWO, ["kill-router"]).steps
    assert {step.moment for step in steps} == set(Moment)


@pytest.mark.parametrize("fault", ["kill", "stop", "reconfigure", "clock-step"])
def test_both_sides_are_hurt(fault: str) -> None:
    assert {step.target[0] for step in _drawn().steps if step.fault == fault} == {"p", "d"}


def test_ten_minutes_hold_every_fault_again() -> None:
    steps = _drawn(minutes=10).steps
    for name in BY_NAME:
        assert sum(step.fault == name for step in steps) >= 3


def test_in_a_soak_one_p_and_one_d_live_from_beginning_to_end() -> None:
    steps = _drawn(minutes=10.0).steps
    assert {step.target for step in steps if step.fault in RESTARTING} == {"p0", "d0"}
    assert {"p1", "d1"} <= {step.target for step in steps if step.fault == "stop"}
    assert {step.target for step in _drawn().steps if step.fault in RESTARTING} > {"p0", "d0"}


def test_the_same_seed_gives_the_same_plan_and_another_seed_another() -> None:
    assert _drawn(7) == _drawn(7)
    assert _drawn(7) != _drawn(8)


def test_steps_are_in_the_plan_s_time_with_some_at_once() -> None:
    plan = _drawn()
    times = [step.at_s for step in plan.steps]
    assert times == sorted(times)
    assert times[0] > 0
    assert times[-1] < plan.seconds
    gaps = [later - sooner for sooner, later in itertools.pairwise(times)]
    assert any(gap < GAP_S / 2 for gap in gaps)
    assert sum(gap > GAP_S for gap in gaps) > len(gaps) / 2


def test_a_short_plan_holds_what_fits() -> None:
    steps = _drawn(minutes=0.5).steps
    assert 3 <= len(steps) <= 8
    assert all(step.at_s < 30 for step in steps)


def test_only_members_that_there_are_are_hurt() -> None:
    names = {"p0", "d0", "router", ""}
    for seed in range(5):
        for step in _drawn(seed, size=Size(1, 1)).steps:
            assert set(step.target.split("-")) <= names


def test_a_d_is_never_given_other_weights() -> None:
    for seed in range(10):
        for step in _drawn(seed, minutes=10).steps:
            if step.fault == "reconfigure":
                assert step.detail in CHANGES
                assert step.detail != "other weights" or step.target.startswith("p")


def test_only_the_faults_that_were_asked_for() -> None:
    plan = draw(1, 60.0, TWO, ["kill", "flood"])
    assert {step.fault for step in plan.steps} == {"kill", "flood"}
    with pytest.raises(ValueError, match="faults: got 'fire', expected some of kill"):
        draw(1, 60.0, TWO, ["fire"])


def test_every_fault_of_the_catalogue_can_be_done() -> None:
    assert set(INJURIES) == {*BY_NAME, *(fault.name for fault in ON_STREAMS)}


def test_a_plan_is_the_same_after_json() -> None:
    plan = _drawn()
    assert from_json(to_json(plan)) == plan


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (b"{", "not a plan"),
        (b"\xff", "not a plan"),
        (b'{"name":"random"}', "seed"),
        (b'{"name":"x","seed":1,"engine":"tpu"}', r"\$\.engine"),
        (b'{"name":"x","seed":1,"engine":"embedded","prefills":99}', r"\$\.prefills"),
        (b'{"name":"x","seed":1,"engine":"embedded","odd":1}', "odd"),
        (
            b'{"name":"x","seed":1,"engine":"embedded","steps":[{"at_s":-1,"fault":"kill"}]}',
            r"\$\.steps\[0\]\.at_s",
        ),
        (b'{"name":"x","seed":1,"engine":"embedded","steps":[{"at_s":1,"fault":"fire"}]}', "fault: got 'fire'"),
        (
            b'{"name":"x","seed":1,"engine":"embedded","steps":[{"at_s":1,"fault":"flood","moment":"mid-copy"}]}',
            "moment",
        ),
    ],
)
def test_a_bad_file_is_refused_by_its_field(text: bytes, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        from_json(text)


def test_moments_have_names_that_a_plan_can_hold() -> None:
    assert [str(moment) for moment in Moment] == ["any", "before-claim", "mid-copy", "before-commit", "mid-stream"]


def test_streams_are_cut_in_every_way_at_every_d_and_also_with_a_p() -> None:
    plan = draw_streams(1, 120.0, TWO, 64)
    assert {step.fault for step in plan.steps} == set(STREAM_FAULTS)
    assert {step.target for step in plan.steps} == {"d0", "d1", ""}
    assert {step.moment for step in plan.steps if step.fault in ("kill", "stop")} == {Moment.MID_STREAM}
    assert {step.fault for step in plan.steps if step.detail.startswith("with p")} == {"kill", "roll"}
    assert plan == from_json(to_json(plan))


@pytest.mark.parametrize(
    ("size", "faults", "said"),
    [(Size(1, 1), None, "decode: got 1, expected 2"), (TWO, ["flood"], "faults: got flood, expected some of kill")],
)
def test_streams_need_another_d_and_faults_that_they_can_outlive(
    size: Size, faults: list[str] | None, said: str
) -> None:
    with pytest.raises(ValueError, match=said):
        draw_streams(1, 60.0, size, 8, faults)
