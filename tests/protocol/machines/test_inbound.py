"""Rules 17 and 18 as a machine: one end, and D's blocks are let go only where nothing can touch them any more."""

from __future__ import annotations

import pytest

from kvbaton.protocol.errors import ProtocolError, Reason
from kvbaton.protocol.geometry.progress import GroupProgress, Progress, whole
from kvbaton.protocol.ids import LeaseId
from kvbaton.protocol.legality import Verdict
from kvbaton.protocol.machines.inbound import INTAKE, WAITED_FOR, IntakeEvent, IntakeState, Source
from kvbaton_proof.sim.world.sim_memory import Shape

LIVE = [state for state in IntakeState if (state, IntakeEvent.FAILED) in INTAKE.next]
OVER = [state for state in IntakeState if state not in LIVE]


def test_every_state_that_waits_for_somebody_has_a_reason_to_give() -> None:
    """Promise 2: whatever a handoff waits for, its deadline ends it."""
    assert set(WAITED_FOR) == set(LIVE)


@pytest.mark.parametrize("state", OVER)
def test_an_end_is_final(state: IntakeState) -> None:
    assert INTAKE.step(state, IntakeEvent.FAILED) is Verdict.LATE
    assert not {to for (at, _), to in INTAKE.next.items() if at is state} & set(LIVE)


def test_blocks_are_let_go_only_at_rest() -> None:
    assert {pair for pair, to in INTAKE.next.items() if to is IntakeState.DONE} == {
        (IntakeState.SETTLING, IntakeEvent.RESTED)
    }


def test_a_source_that_may_be_writing_must_first_be_quiet() -> None:
    assert INTAKE.step(IntakeState.OFFERED, IntakeEvent.FAILED) is IntakeState.REVOKING
    ways_out = {event for (at, event) in INTAKE.next if at is IntakeState.REVOKING}
    assert ways_out == {IntakeEvent.QUIESCED, IntakeEvent.WRITTEN}


def test_nothing_is_read_again_after_the_commit() -> None:
    """Rule 5: once its Commit is sent, a reader never copies again."""
    after = {to for (at, _), to in INTAKE.next.items() if at is IntakeState.COMMITTING}
    assert after == {IntakeState.SETTLING}


GROUPS = Shape(group_layers=(2, 1)).layout().groups


def source(*blocks: list[int], ready: Progress, final: bool = False) -> Source:
    return Source(LeaseId(1), 5, blocks, ready, final)


@pytest.mark.parametrize(
    "told",
    [
        source([], [], ready=whole([0, 0])),
        source([1, 2], [3], ready=whole([2, 0])),
        source([1, 2], [3], ready=(GroupProgress(1, 2, 1), GroupProgress())),
        source([1, 2, 3], [4, 5, 6], ready=whole([3, 3]), final=True),
    ],
)
def test_what_can_be_this_prompt_is_believed(told: Source) -> None:
    told.check(GROUPS)


@pytest.mark.parametrize(
    ("told", "detail"),
    [
        (source([1], ready=whole([1])), "blocks: not one list and one progress per group of the source"),
        (source([1], [1], ready=whole([1])), "blocks: not one list and one progress per group of the source"),
        (source([1, 2, 3, 4], [], ready=whole([0, 0])), "blocks: 4 of 'g0', 3 make the prompt"),
        (source([1], [], ready=whole([1, 1])), "progress: more of 'g1' is ready than is listed"),
        (source([1], [], ready=(GroupProgress(0, 2, 1), GroupProgress())), "progress: more of 'g0' is ready"),
        (source([1, 2, 3], [4, 5], ready=whole([3, 2]), final=True), "final: 2 of 3 blocks of 'g1'"),
    ],
)
def test_what_cannot_be_this_prompt_is_a_bad_message(told: Source, detail: str) -> None:
    """So a peer can make D neither remember nor read more than the prompt, nor take less for all of it."""
    with pytest.raises(ProtocolError) as error:
        told.check(GROUPS)
    assert error.value.reason is Reason.BAD_MESSAGE and error.value.detail.startswith(detail)
