"""The budget of pins (rule 33): who is admitted, who waits, who is refused; what the doorway counts against it."""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from kvbaton.node.doorway import Doorway, DoorwayConfig, UnpinBlocks
from kvbaton.node.epochs import EpochTable
from kvbaton.node.pin_budget import PIN_WAIT_S, PinBudget, Room, budget_of
from kvbaton.protocol import effects as fx
from kvbaton.protocol.ids import Incarnation, LeaseId, PeerId, RequestId, TransferId, WorkerId

A, B, C = RequestId("a"), RequestId("b"), RequestId("c")
IN, WAIT, OUT = Room.ADMITTED, Room.WAITING, Room.REFUSED


def door(budget: PinBudget) -> Doorway:
    me = PeerId(WorkerId("p"), Incarnation(1))
    config = DoorwayConfig(me, 1, 1, (b"k" * 32,), 60.0, lambda: TransferId("ab" * 16), lambda: 0.0)
    found = Doorway(config, EpochTable(64))
    found.budget = budget
    return found


def test_what_fits_is_admitted_and_what_does_not_waits_for_room() -> None:
    budget = PinBudget(10)
    assert [budget.ask(A, 6, 0), budget.ask(B, 4, 0), budget.ask(C, 1, 0)] == [IN, IN, WAIT]
    budget.left(B)
    assert budget.ask(C, 1, 1) is IN
    assert [budget.ask(A, 6, 9), budget.ask(C, 1, 99)] == [IN, IN]  # once admitted, always


def test_one_that_has_the_budget_to_itself_may_be_as_large_as_it_is() -> None:
    budget = PinBudget(10)
    assert budget.ask(A, 50, 0) is IN
    assert budget.ask(B, 1, 0) is WAIT
    budget.left(A)
    assert budget.ask(B, 1, 0) is IN
    assert budget.ask(C, 50, 0) is WAIT


def test_a_large_prompt_is_not_passed_by_small_ones() -> None:
    budget = PinBudget(10)
    assert [budget.ask(A, 6, 0), budget.ask(B, 8, 0), budget.ask(C, 1, 0)] == [IN, WAIT, WAIT]
    assert budget.waits(B, 1) and budget.waits(C, 1)
    budget.left(B)  # its client has gone
    assert not budget.waits(C, 1)
    assert budget.ask(C, 1, 1) is IN


def test_who_waits_too_long_is_refused_and_no_longer_in_the_way() -> None:
    budget = PinBudget(10, wait_s=5)
    assert [budget.ask(A, 6, 0), budget.ask(B, 8, 1), budget.ask(C, 4, 3)] == [IN, WAIT, WAIT]
    assert budget.ask(C, 4, 6) is IN  # though nobody asked for b again, whose time is over
    assert not budget.waits(B, 6)
    assert [budget.ask(B, 8, 6), budget.ask(B, 8, 7)] == [OUT, OUT]
    assert budget.refused_total == 1
    budget.left(B)
    assert budget.ask(B, 8, 8) is WAIT  # the same name again is another request


def test_asking_again_wins_no_time() -> None:
    """Engines ask at every step: whoever waits is refused at the deadline of its first question."""
    budget = PinBudget(10, wait_s=5)
    assert budget.ask(A, 6, 0) is IN
    assert [budget.ask(B, 8, now) for now in (0, 1, 2, 3, 4, 5)] == [WAIT, WAIT, WAIT, WAIT, WAIT, OUT]


def test_at_its_deadline_nobody_waits_and_is_to_be_asked_about() -> None:
    budget = PinBudget(10, wait_s=5)
    assert [budget.ask(A, 6, 0), budget.ask(B, 8, 0)] == [IN, WAIT]
    assert budget.waits(B, 4.9) and not budget.waits(B, 5) and not budget.waits(A, 0)


def test_all_whose_time_is_over_are_refused_at_once() -> None:
    budget = PinBudget(10, wait_s=5)
    assert [budget.ask(A, 9, 0), budget.ask(B, 8, 0), budget.ask(C, 8, 1)] == [IN, WAIT, WAIT]
    assert budget.ask(RequestId("d"), 1, 6) is IN, "nobody is in its way"
    assert (budget.refused_total, budget.waiting) == (2, 0)


def test_whoever_has_room_at_its_deadline_is_admitted() -> None:
    budget = PinBudget(10, wait_s=5)
    assert [budget.ask(A, 6, 0), budget.ask(B, 8, 0)] == [IN, WAIT]
    budget.left(A)
    assert budget.ask(B, 8, 50) is IN


def test_no_more_than_so_many_wait() -> None:
    budget = PinBudget(1, waiting_max=2)
    budget.ask(A, 1, 0)
    found = [budget.ask(RequestId(str(n)), 1, 0) for n in range(4)]
    assert found == [WAIT, WAIT, OUT, OUT]
    assert (budget.waiting, budget.refused_total) == (2, 2)


def test_without_a_limit_everybody_is_admitted() -> None:
    assert [PinBudget().ask(A, 1 << 40, 0), budget_of(100, 1.0).ask(A, 1 << 40, 0)] == [IN, IN]
    assert PinBudget().holds(B), "which nobody has asked about"
    assert not PinBudget(4).holds(B)
    assert budget_of(100, 0.755).blocks_max == 75
    assert budget_of(100, 0.001).blocks_max == 1
    assert budget_of(100, 0.5, 2.5).wait_s == 2.5
    assert budget_of(100, 1.0).blocks_max == math.inf
    assert PIN_WAIT_S > 0


def test_what_is_pinned_is_counted_in_place_of_what_was_promised() -> None:
    budget = PinBudget(10)
    budget.ask(A, 6, 0)
    budget.begun(LeaseId(1), A)
    budget.pin(LeaseId(1), (1, 2, 3, 4))
    assert (budget.pinned_blocks, budget.promised_blocks) == (4, 2)
    budget.pin(LeaseId(1), (5, 6, 7))  # more than it said
    assert (budget.pinned_blocks, budget.promised_blocks) == (7, 0)
    budget.left(A)  # the lease outlives its request
    assert budget.pinned_blocks == 7
    assert budget.ask(B, 4, 0) is WAIT
    budget.unpin(LeaseId(1), (1, 2, 3, 4, 5, 6, 7))
    assert budget.ask(B, 4, 0) is IN
    assert budget.pinned_blocks == 0 and not budget._of, "nothing is remembered of a lease that is over"


def test_blocks_that_two_leases_share_count_once() -> None:
    budget = PinBudget(10)
    for lease in (1, 2):
        budget.begun(LeaseId(lease), A)
        budget.pin(LeaseId(lease), (1, 2, 3))
    assert budget.pinned_blocks == 3
    budget.unpin(LeaseId(1), (1, 2, 3))
    assert budget.pinned_blocks == 3
    budget.unpin(LeaseId(2), (1, 2, 3))
    assert budget.pinned_blocks == 0


def test_the_doorway_counts_leases_and_no_puts() -> None:
    budget = PinBudget(4)
    subject = door(budget)
    assert budget.ask(A, 3, 0) is IN
    subject.grant(b"d", 3, ((1, 2, 3),), request=A)
    budget.left(A)
    subject.put(((4, 5),), (b"k",))
    assert (budget.pinned_blocks, subject.pinned_blocks) == (3, 5)
    assert budget.ask(B, 2, 0) is WAIT
    subject.hand_in(fx.Unpin(LeaseId(1)))
    assert subject.duties() == [UnpinBlocks((1, 2, 3))]
    assert (budget.pinned_blocks, budget.ask(B, 2, 0)) == (0, IN)


def test_figures_tell_of_the_limit_and_of_who_waits() -> None:
    budget = PinBudget(4)
    budget.ask(A, 4, 0)
    budget.ask(B, 4, 0)
    assert budget.figures(100) == {"pin_max_blocks": 4, "pin_waiting": 1, "pin_refused_total": 0}
    assert PinBudget().figures(100)["pin_max_blocks"] == 100


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(1, 12), st.booleans()), max_size=60))
def test_the_limit_holds_whatever_comes_in_whatever_order(steps: list[tuple[int, int, bool]]) -> None:
    budget, now, asked = PinBudget(10, wait_s=3, waiting_max=3), 0.0, {}
    for number, blocks, leaves in steps:
        now += 0.5
        name = RequestId(str(number))
        if leaves:
            budget.left(name)
            asked.pop(name, None)
        else:
            asked.setdefault(name, blocks)
            budget.ask(name, asked[name], now)
        held = [each for each in asked if budget.holds(each)]
        assert budget.promised_blocks <= 10 or len(held) == 1
        assert budget.waiting <= 3
