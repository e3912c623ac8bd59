"""What is said of each handoff: a story with a beginning and an end, whatever became of it."""

from __future__ import annotations

import pytest
from pair import Make, Pair

from kvbaton.protocol import events as ev
from kvbaton.protocol.effects import Begun, Ended, Mark, Side, Step
from kvbaton.protocol.errors import Reason
from kvbaton.protocol.ids import HandoffId, LeaseId, RequestId, WorkerId
from kvbaton.protocol.settings import Settings
from kvbaton.protocol.wire.messages import Commit, Granted


def story(pair: Pair, name: str, side: Side) -> list[Step]:
    return [mark.step for mark in pair.parties[WorkerId(name)].ledger.desk.marks if mark.side is side]


def told(pair: Pair, name: str, step: Step) -> Mark:
    (found,) = (mark for mark in pair.parties[WorkerId(name)].ledger.desk.marks if mark.step is step)
    return found


def ended(pair: Pair, name: str) -> Ended:
    """How the one handoff of that side ended."""
    marks = pair.parties[WorkerId(name)].ledger.desk.marks
    (found,) = (mark.what for mark in marks if isinstance(mark.what, Ended))
    return found


def test_a_pull_is_told_from_both_sides(pair: Pair) -> None:
    pair.pull()
    assert story(pair, "d", Side.DECODE) == [
        Step.ASKED, Step.CLAIMED, Step.GRANTED, Step.ALLOCATED, Step.FIRST_BYTE, Step.COPIED, Step.ENDED, Step.RESTED,
    ]  # fmt: skip
    assert story(pair, "p", Side.PREFILL) == [
        Step.BEGUN, Step.COMPLETE, Step.SEATED, Step.COMMITTED, Step.CLOSED, Step.RESTED,
    ]  # fmt: skip
    begun = told(pair, "d", Step.ASKED).what
    assert isinstance(begun, Begun)
    assert (begun.request, begun.peer, begun.tokens, begun.push) == ("r", "p", 5, False)
    assert told(pair, "p", Step.SEATED).detail == "d"
    at_d, at_p = ended(pair, "d"), ended(pair, "p")
    assert at_d.end.delivered and at_d.bytes > 0 and at_d.blocks > 0 and at_d.transport and not at_d.retries
    assert at_p.end.delivered and at_p.bytes == 0 and at_p.transport == at_d.transport


def test_a_push_is_told_from_both_sides(pair: Pair) -> None:
    pair.d.want("r", pair.router_ticket(1), 1, push=True)
    pair.settle()
    pair.p.stream(1)
    pair.settle()
    assert story(pair, "d", Side.DECODE) == [
        Step.ASKED, Step.CLAIMED, Step.GRANTED, Step.ALLOCATED, Step.OFFERED, Step.COPIED, Step.ENDED, Step.RESTED,
    ]  # fmt: skip
    steps = story(pair, "p", Side.PREFILL)
    assert steps[:3] == [Step.BEGUN, Step.PARKED, Step.SEATED]
    assert [step for step in steps if step in (Step.OFFERED, Step.FIRST_BYTE, Step.WRITTEN, Step.COMMITTED)] == [
        Step.OFFERED, Step.FIRST_BYTE, Step.WRITTEN, Step.COMMITTED,
    ]  # fmt: skip
    assert steps[-2:] == [Step.CLOSED, Step.RESTED]
    assert ended(pair, "p").bytes > 0, "P wrote it"
    parked, begun = told(pair, "p", Step.PARKED), told(pair, "p", Step.BEGUN)
    assert parked.at <= begun.at


def test_a_copy_of_reused_blocks_is_told_as_stale_by_both(pair: Pair) -> None:
    pair.hold(Commit)
    pair.pull()
    pair.p.ledger.desk.epochs_of = lambda blocks: [99] * len(blocks)
    pair.release()
    pair.settle()
    assert Step.STALE in story(pair, "p", Side.PREFILL)
    assert ended(pair, "p").end.reason is Reason.STALE
    assert ended(pair, "d").end.reason is Reason.STALE


def test_a_reader_that_leaves_says_why(pair: Pair) -> None:
    pair.pull(copies=False)
    pair.give_up()
    left = told(pair, "p", Step.LEFT)
    assert left.detail == "d: aborted"
    assert ended(pair, "p").end.reason is Reason.ABORTED


def test_a_reader_whose_session_ended_is_gone(pair: Pair) -> None:
    pair.pull(copies=False)
    pair.d.leave()
    pair.settle()
    assert ended(pair, "p").end.reason in (Reason.PEER_GONE, Reason.ABORTED)


def test_repeated_claims_are_counted(pair: Pair) -> None:
    pair.lose(Granted)
    pair.d.want("r", pair.p.grant())
    pair.run(5)
    assert ended(pair, "d").end.delivered and ended(pair, "d").retries == 1


def test_what_is_refused_at_once_has_a_story_too(make_pair: Make) -> None:
    pair = make_pair("p", "d", settings=Settings(intakes_max=1, leases_max=1))
    pair.d.habits.copies = False
    pair.d.want("r", pair.p.grant(1))
    pair.settle()
    pair.d.want("s", pair.p.grant(2), 2)
    pair.settle()
    last = list(pair.d.ledger.desk.marks)[-3:]
    assert [mark.step for mark in last] == [Step.ASKED, Step.ENDED, Step.RESTED]
    assert isinstance(last[1].what, Ended) and last[1].what.end.reason is Reason.BUSY
    refused = [mark for mark in pair.p.ledger.desk.marks if mark.key == 2]
    assert [mark.step for mark in refused] == [Step.BEGUN, Step.CLOSED, Step.RESTED]
    assert isinstance(refused[1].what, Ended) and refused[1].what.end.reason is Reason.BUSY


def test_what_was_turned_away_at_the_door_is_told(pair: Pair) -> None:
    pair.d.tell(ev.TurnedAway(RequestId("r"), Reason.TICKET_FORGED, "ticket: no", "00-aa-bb-01"))
    assert story(pair, "d", Side.DECODE) == [Step.ASKED, Step.ENDED, Step.RESTED]
    begun = told(pair, "d", Step.ASKED).what
    assert begun == Begun(HandoffId(""), RequestId("r"), WorkerId(""), 0, trace="00-aa-bb-01")
    assert ended(pair, "d").end.reason is Reason.TICKET_FORGED
    assert pair.d.counts["turned_away.ticket_forged"] == 1


def test_marks_are_taken_once_and_bounded(pair: Pair) -> None:
    pair.pull()
    assert pair.d.ledger.take_marks() and not pair.d.ledger.take_marks()
    limit = pair.d.ledger.desk.marks.maxlen
    assert limit is not None and limit <= 1 << 15


@pytest.mark.parametrize("why", [Reason.LEASE_EXPIRED, Reason.DISCARDED])
def test_a_lease_that_nobody_read_says_why(pair: Pair, why: Reason) -> None:
    pair.p.grant()
    if why is Reason.DISCARDED:
        (lease,) = pair.p.ledger.producer.leases.values()
        pair.p.tell(ev.Discarded(lease.handoff))
    else:
        pair.run(400)
    assert ended(pair, "p").end.reason is why
    assert told(pair, "p", Step.BEGUN).key == LeaseId(1)
