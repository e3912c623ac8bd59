"""When P got a prompt and began to compute it, as its record has it."""

from __future__ import annotations

from kvbaton.node.prompt_account import PROMPTS_MAX, UNRECORDED_MAX, PromptTimes
from kvbaton.observe.flight.flight_records import Moment
from kvbaton.protocol.ids import LeaseId, RequestId

R = RequestId("r")


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def test_a_leases_record_begins_when_its_prompt_was_accepted_and_scheduled() -> None:
    clock = Clock()
    times = PromptTimes(clock)
    times.accepted(R)
    clock.now = 103.0
    times.scheduled(R)
    clock.now = 109.0
    times.scheduled(R)  # computed again after a preemption
    times.leased(R, LeaseId(7))
    assert times.take(7) == (Moment("accepted", 100.0), Moment("scheduled", 103.0))
    assert times.take(7) == () and not len(times), "once"


def test_a_front_ends_earlier_time_counts_and_none_of_the_future() -> None:
    times = PromptTimes(Clock())
    times.accepted(R, 90.0)
    times.leased(R, LeaseId(1))
    times.accepted(R, 190.0)
    times.leased(R, LeaseId(2))
    assert [times.take(lease)[0].at for lease in (1, 2)] == [90.0, 100.0]


def test_nothing_stays_of_a_request_that_left_and_what_nobody_takes_is_bounded() -> None:
    times = PromptTimes(Clock())
    times.accepted(R)
    times.left(R)
    times.scheduled(R)  # of a request that is not for others
    times.leased(R, LeaseId(1))
    assert times.take(1) == () and not len(times)
    for number in range(UNRECORDED_MAX + 5):
        times.accepted(R)
        times.leased(R, LeaseId(number))
    assert len(times) == UNRECORDED_MAX
    for number in range(PROMPTS_MAX + 5):
        times.accepted(RequestId(f"{number}"))
        times.scheduled(RequestId(f"{number}"))
    assert len(times) == UNRECORDED_MAX + PROMPTS_MAX
