"""A ticket that D will not read by: P lets go at once of what it leased for it, whoever turned the request away."""

from __future__ import annotations

import pytest
from pair import Make, Pair
from party import KEY, WALL_S

from kvbaton.protocol import events as ev
from kvbaton.protocol.effects import Unpin
from kvbaton.protocol.errors import Reason
from kvbaton.protocol.ids import LeaseId, WorkerId
from kvbaton.protocol.machines import consumer
from kvbaton.protocol.settings import Settings
from kvbaton.protocol.wire.messages import Abandon, Claim, Commit, Goodbye, Stale, Welcome
from kvbaton.protocol.wire.ticket import unseal


def disown(pair: Pair, ticket: str, reason: Reason = Reason.BAD_MESSAGE, who: str = "d") -> None:
    opened = unseal(ticket, (KEY,), WALL_S)
    deferred = opened.lease == 0
    event = ev.Disowned(opened.handoff, opened.source, ticket, opened.digest, deferred, reason)
    getattr(pair, who).tell(event)
    pair.settle()


class TestAnotherPrompt:
    """Rule 2: whoever comes with a ticket and another prompt has had its turn."""

    def test_a_lease_of_a_finished_prompt_ends_with_the_refusal(self, pair: Pair) -> None:
        load = pair.d.want("r", pair.p.grant(), content=9)
        pair.settle()
        assert load.failed is not None and load.failed.reason is Reason.CONTENT_MISMATCH
        assert pair.done(Unpin) == [Unpin(LeaseId(1))] and pair.now == 0.0

    @pytest.mark.parametrize("early", [True, False])
    def test_so_does_one_that_is_streamed(self, pair: Pair, early: bool) -> None:
        """P and D disagree on an adapter, say; the router's ticket holds no digest."""
        if early:
            pair.d.want("r", pair.router_ticket(), content=9)
            pair.settle()
        source = pair.p.begin(tokens=40)
        pair.p.chunk(source, 1)
        if not early:
            pair.d.want("r", pair.router_ticket(), content=9)
        pair.settle()
        assert len(pair.done(Unpin)) == 1 and pair.now == 0.0

    def test_a_ticket_of_another_prompt_spends_nothing(self, pair: Pair) -> None:
        pair.p.grant()
        other = pair.p.ticket(pair.p.sources[LeaseId(1)], digest=b"of another prompt")
        disown(pair, other, Reason.CONTENT_MISMATCH)
        assert not pair.done(Unpin) and pair.p.counts["claim_refused.content_mismatch"] == 1

    def test_the_place_of_another_reader_is_kept(self, make_pair: Make) -> None:
        pair = make_pair("p", "d", "e")
        pair.p.stream(max_readers=2)
        pair.d.want("r", pair.router_ticket(max_readers=2), content=9)
        pair.settle()
        assert not pair.done(Unpin)
        load = pair.e.want("s", pair.router_ticket(max_readers=2))
        pair.settle()
        assert load.end is not None and load.end.delivered and len(pair.done(Unpin)) == 1

    def test_one_reader_takes_one_place_however_often_it_asks(self, pair: Pair) -> None:
        pair.double(Claim, times=9)
        pair.p.stream(max_readers=2)
        pair.d.want("r", pair.router_ticket(max_readers=2), content=9)
        pair.settle()
        assert not pair.done(Unpin)

    def test_a_lease_that_all_readers_have_is_ended_by_them_alone(self, make_pair: Make) -> None:
        pair = make_pair("p", "d", "e")
        load = pair.pull(copies=False)
        pair.e.want("s", pair.p.ticket(pair.p.sources[1]), content=9)
        pair.settle()
        assert not pair.done(Unpin)
        pair.d.finish()
        pair.settle()
        assert load.end is not None and load.end.delivered

    def test_whom_the_lease_is_not_for_ends_nothing(self, make_pair: Make) -> None:
        pair = make_pair("p", "d", "e")
        pair.p.stream(target="d")
        pair.e.want("s", pair.router_ticket(), content=9)
        pair.settle()
        assert not pair.done(Unpin)

    def test_it_cannot_have_what_it_was_refused_confirmed(self, pair: Pair) -> None:
        pair.p.stream(max_readers=2)
        pair.d.want("r", pair.router_ticket(max_readers=2), content=9)
        pair.settle()
        pair.inject("d", "p", Commit(LeaseId(1), 1))
        assert len(pair.said(Stale)) == 1


class TestTurnedAway:
    def test_its_lease_is_released_at_once_and_p_knows_why(self, pair: Pair) -> None:
        disown(pair, pair.p.grant(), Reason.BAD_MESSAGE)
        assert pair.done(Unpin) == [Unpin(LeaseId(1))] and pair.now == 0.0
        assert pair.p.counts["abandoned.bad_message"] == 1 and pair.d.counts["disowned"] == 1

    def test_a_source_that_is_known_is_told_without_a_greeting(self, pair: Pair) -> None:
        pair.pull()
        disown(pair, pair.p.grant(2))
        assert len(pair.said(Welcome)) == 1 and len(pair.done(Unpin)) == 2

    def test_a_prompt_that_p_begins_later_is_not_kept(self, pair: Pair) -> None:
        disown(pair, pair.router_ticket())
        assert len(pair.p.ledger.producer.parked) == 1
        pair.p.stream()
        pair.settle()
        assert len(pair.done(Unpin)) == 1 and pair.now == 0.0

    def test_it_is_said_once_for_a_ticket_that_comes_again_and_again(self, pair: Pair) -> None:
        ticket = pair.p.grant()
        for _ in range(9):
            disown(pair, ticket)
        assert len(pair.said(Claim)) == 1 == len(pair.said(Abandon))

    def test_a_ticket_by_which_another_request_reads_is_not_given_back(self, pair: Pair) -> None:
        pair.d.habits.copies = False
        ticket = pair.p.grant()
        load = pair.d.want("r", ticket)
        pair.settle()
        disown(pair, ticket, Reason.DUPLICATE)
        pair.d.finish()
        pair.settle()
        assert load.end is not None and load.end.delivered

    def test_a_request_that_is_given_up_while_p_is_greeted_costs_no_lease(self, pair: Pair) -> None:
        pair.hold(Welcome)
        pair.pull()
        pair.d.give_up("r")
        pair.release(Welcome)
        pair.settle()
        assert len(pair.done(Unpin)) == 1 and pair.now == 0.0
        assert pair.d.counts["ends.aborted"] == 1

    def test_a_request_that_found_no_room_costs_no_lease(self, make_pair: Make) -> None:
        pair = make_pair(settings=Settings(intakes_max=1))
        pair.pull(copies=False)
        late = pair.d.want("s", pair.p.grant(2), 2)
        pair.settle()
        assert late.failed is not None and late.failed.reason is Reason.BUSY
        assert pair.done(Unpin) == [Unpin(LeaseId(2))] and pair.p.counts["abandoned.busy"] == 1
        pair.d.finish()


class TestBounds:
    """What cannot be told is left to the lease's end."""

    def test_so_many_wait_for_a_greeting_and_no_more(self, pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(consumer, "DISOWNED_WAITING_MAX", 2)
        pair.hold(Welcome)
        for number in (1, 2, 3):
            disown(pair, pair.p.grant(number))
        assert pair.d.counts["disowned_dropped"] == 1
        pair.release(Welcome)
        pair.settle()
        assert len(pair.done(Unpin)) == 2

    def test_no_source_is_pushed_out_for_it(self, make_pair: Make) -> None:
        pair = make_pair("p", "q", "d", settings=Settings(sessions_max=1))
        pair.pull(copies=False)
        disown(pair, pair.q.grant(2))
        assert pair.d.counts["disowned_dropped"] == 1 and not pair.done(Unpin)
        pair.d.finish()

    def test_a_source_that_goes_while_it_is_greeted_is_told_nothing(self, pair: Pair) -> None:
        ticket = pair.p.grant()
        pair.hold(Welcome)
        disown(pair, ticket)
        pair.d.tell(ev.Departed(WorkerId("p")))
        pair.release(Welcome)
        pair.settle()
        assert not pair.said(Claim) and not pair.said(Goodbye)
