"""Clocks that disagree are put in order by cause and effect, and those that may be right are left alone."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from kvbaton.observe.flight.clocks import BEFORE, BEFORE_IF_DELIVERED, SLACK_S, offsets
from kvbaton.observe.flight.flight_records import Flight
from tests.observe.flight.handoffs import decode, moments, prefill, router

SKEWS = st.floats(-5000.0, 5000.0)


def broken(flights: list[Flight], shifts: tuple[float, ...]) -> float:
    """By how much the worst effect comes before its cause."""
    worst = 0.0
    for i, first in enumerate(flights):
        for j, second in enumerate(flights):
            for seat, step, other, later in (*BEFORE, *BEFORE_IF_DELIVERED):
                cause, effect = first.at(step), second.at(later)
                if (first.seat, second.seat) == (seat, other) and cause is not None and effect is not None:
                    worst = max(worst, cause + shifts[i] - effect - shifts[j])
    return worst


def test_clocks_that_agree_are_left_alone() -> None:
    assert offsets([router(), prefill(), decode()]).seconds == (0.0, 0.0, 0.0)


def test_a_mark_that_was_written_a_little_late_moves_no_clock() -> None:
    late = decode(moments=moments((("asked", 0.051 - SLACK_S / 2), ("granted", 0.058))))
    assert offsets([router(), prefill(), late]).seconds == (0.0, 0.0, 0.0)


@settings(deadline=None)
@given(p=SKEWS, d=SKEWS)
def test_any_two_clocks_are_put_in_order_with_the_first_ones(p: float, d: float) -> None:
    flights = [router(), prefill(p), decode(d)]
    found = offsets(flights)
    assert not found.doubtful
    assert found.seconds[0] == 0.0
    assert broken(flights, found.seconds) <= SLACK_S + 1e-6
    assert sum(map(abs, found.seconds)) <= abs(p) + abs(d) + 1e-5  # never more than it takes
    assert sum(1 for shift in found.seconds if abs(shift) > SLACK_S) <= bool(p) + bool(d)
    for skew, shift in zip((p, d), found.seconds[1:], strict=True):
        assert abs(skew + shift) <= 0.1  # about right: within what the handoff itself took


@settings(deadline=None)
@given(skew=SKEWS)
def test_without_a_router_d_goes_by_ps_clock(skew: float) -> None:
    flights = [prefill(), decode(skew)]
    found = offsets(flights)
    assert broken(flights, found.seconds) <= SLACK_S + 1e-6


def test_clocks_that_contradict_each_other_are_said_to_be_in_doubt() -> None:
    jumped = decode(moments=moments((("asked", -9.0), ("granted", -8.0), ("ended", 9.0))))
    found = offsets([router(), jumped])
    assert found.doubtful
    assert found.seconds[0] == 0.0


def test_what_failed_says_nothing_of_when_the_answer_began() -> None:
    failed = decode(end="lease_expired", moments=moments((("asked", 0.053), ("ended", 30.0))))
    assert offsets([router(), failed]).seconds == (0.0, 0.0)
