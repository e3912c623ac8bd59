"""D's book of links: greets when needed, repeats until answered, and no loss goes unnoticed (promise 2, rule 3)."""

from __future__ import annotations

import msgspec
import pytest
from pair import Make, Pair
from party import Load

from kvbaton.protocol.effects import Connect, Disconnect, StartFence
from kvbaton.protocol.errors import Reason
from kvbaton.protocol.events import Departed, LineRefused, RankFenced
from kvbaton.protocol.ids import Incarnation, PeerId, WorkerId
from kvbaton.protocol.settings import Settings
from kvbaton.protocol.wire.messages import (
    Claim,
    Commit,
    Goodbye,
    Granted,
    Hello,
    HelloRefused,
    Joined,
    Linked,
    Quiesced,
    Reset,
    Revoke,
    Welcome,
)
from kvbaton_proof.sim.world.sim_memory import Shape


def failure(load: Load) -> tuple[Reason | None, str]:
    end = load.failed or load.end
    assert end is not None
    return end.reason, end.detail


def test_a_source_is_greeted_when_first_needed_and_only_once(pair: Pair) -> None:
    assert not pair.said(Hello)
    pair.d.want("r1", pair.p.grant(1), 1)
    pair.d.want("r2", pair.p.grant(2), 2)
    pair.settle()
    pair.d.want("r3", pair.p.grant(3), 3)
    pair.settle()
    assert len(pair.said(Hello)) == 1
    assert all(load.end is not None and load.end.delivered for load in pair.d.loads.values())


def test_a_silent_source_is_greeted_again_and_then_given_up(pair: Pair) -> None:
    pair.lose(Hello, times=99)
    load = pair.d.want("r", pair.router_ticket())  # deferred: waits longer for P to begin, but not for a handshake
    pair.run(9.9)
    assert len(pair.said(Hello)) == 20 and load.failed is None
    pair.run(0.2)
    assert failure(load) == (Reason.HANDSHAKE_TIMEOUT, "worker p did not answer the handshake")
    assert not pair.d.ledger.consumer.links.by_worker


def test_a_handshake_that_stops_half_way_ends_too(pair: Pair) -> None:
    pair.lose(Linked, times=99)
    load = pair.d.want("r", pair.router_ticket())
    pair.run(10)
    assert failure(load)[0] is Reason.HANDSHAKE_TIMEOUT
    assert len(pair.said(Joined)) == 20
    assert [effect.peer for effect in pair.done(Disconnect, "d")] == [pair.p.me]


def test_a_source_that_nobody_knows_fails_the_request_alone(pair: Pair) -> None:
    load = pair.d.want("r", pair.p.grant())
    other = pair.d.want("q", pair.router_ticket(2, source="nobody"), 2, source="nobody")
    pair.d.tell(Departed(WorkerId("nobody"), reason=Reason.PEER_UNKNOWN))
    pair.settle()
    assert failure(other) == (Reason.PEER_UNKNOWN, "worker nobody has left or is not registered")
    assert load.end is not None and load.end.delivered


def test_duplicates_of_the_handshake_change_nothing(pair: Pair) -> None:
    for kind in (Hello, Welcome, Joined, Linked):
        pair.double(kind)
    load = pair.d.want("r", pair.p.grant())
    pair.run(1)
    assert load.end is not None and load.end.delivered
    assert len(pair.done(Connect, "d")) == 1 == len(pair.done(Connect, "p"))
    assert pair.d.counts["late.welcome"] and pair.d.counts["late.linked"]


def test_a_welcome_that_nobody_waits_for_is_late(pair: Pair) -> None:
    pair.hold(Welcome, times=99)
    pair.d.want("r", pair.router_ticket())
    pair.run(11)
    pair.release(Welcome)
    assert pair.d.counts["late.welcome"] == 20 and not pair.done(Connect, "d")


def test_a_welcome_to_an_earlier_greeting_is_late(pair: Pair) -> None:
    pair.hold(Welcome, times=99)
    pair.d.want("r", pair.router_ticket())
    pair.run(11)
    pair.d.want("q", pair.router_ticket(2), 2)
    pair.settle()
    held, pair.held = pair.held, []
    old = next(frame for frame in held if frame.message.nonce == 1)  # type: ignore[union-attr]
    pair.wire.append(old)
    pair.settle()
    assert pair.d.counts["late.welcome"] == 1 and not pair.done(Connect, "d")


def test_a_welcome_of_a_source_that_does_not_fit_is_refused_by_d(pair: Pair) -> None:
    """Both sides check: an old P may have accepted what D must not."""
    pair.lose(Welcome, times=99)
    load = pair.pull()
    good = pair.said(Welcome)[0]
    card = msgspec.structs.replace(good.card, compat={"model": "another"})
    pair.heal()
    pair.inject("p", "d", msgspec.structs.replace(good, card=card), session=1)
    assert failure(load)[0] is Reason.INCOMPATIBLE


def test_a_welcome_without_an_endpoint_for_each_pair_of_ranks_is_refused(pair: Pair) -> None:
    pair.lose(Welcome, times=99)
    load = pair.pull()
    good = pair.said(Welcome)[0]
    pair.heal()
    pair.inject("p", "d", msgspec.structs.replace(good, endpoints=()), session=1)
    assert failure(load) == (Reason.BAD_MESSAGE, "endpoints: not one for each pair of ranks")


def test_a_late_refusal_is_ignored(pair: Pair) -> None:
    load = pair.pull()
    pair.inject("p", "d", HelloRefused(1, Reason.BUSY, ""))
    pair.inject("p", "d", HelloRefused(99, Reason.BUSY, ""))
    assert load.end is not None and load.end.delivered
    assert pair.d.counts["late.hello_refused"] == 2
    assert "p" in pair.d.ledger.consumer.links.by_worker


class TestReset:
    """A source that has forgotten the session, or was restarted."""

    def test_a_restarted_source_is_greeted_anew_for_what_was_not_granted(self, pair: Pair) -> None:
        """The ticket of the router names no life: whoever is there now will do."""
        pair.d.want("r1", pair.p.grant(1), 1)
        pair.settle()
        pair.restart("p")
        load = pair.d.want("r2", pair.router_ticket(2), 2)
        pair.settle()
        assert [message.incarnation for message in pair.said(Reset)] == [pair.graves[0].me.incarnation]
        pair.p.stream(2)
        pair.run(1)
        assert load.end is not None and load.end.delivered

    def test_nothing_is_claimed_while_the_new_life_is_being_greeted(self, pair: Pair) -> None:
        pair.d.want("r1", pair.p.grant(1), 1)
        pair.settle()
        pair.restart("p")
        pair.lose(Hello, times=3)
        load = pair.d.want("r2", pair.router_ticket(2), 2)
        pair.p.stream(2)
        pair.run(1.4)
        assert len(pair.said(Claim)) == 2 and load.failed is None
        pair.run(0.2)
        assert load.end is not None and load.end.delivered

    def test_a_source_that_dies_during_the_handshake_is_greeted_anew(self, pair: Pair) -> None:
        pair.lose(Joined)
        load = pair.d.want("r", pair.router_ticket())
        pair.settle()
        pair.restart("p")
        pair.p.stream()
        pair.run(1)
        assert load.end is not None and load.end.delivered and len(pair.said(Reset)) == 1

    def test_two_that_wait_share_the_new_link(self, pair: Pair) -> None:
        pair.d.want("r1", pair.p.grant(1), 1)
        pair.settle()
        pair.restart("p")
        loads = [pair.d.want(f"q{n}", pair.router_ticket(n), n) for n in (2, 3)]
        pair.settle()
        for n in (2, 3):
            pair.p.stream(n)
        pair.run(1)
        assert all(load.end is not None and load.end.delivered for load in loads)
        assert len(pair.said(Hello)) == 2

    def test_what_was_granted_by_the_old_life_fails(self, pair: Pair) -> None:
        """Rule 3: everything held for the old life ends."""
        load = pair.pull(copies=False)
        pair.restart("p")
        pair.d.finish(reason=Reason.TRANSFER_FAILED)
        pair.run(1)
        assert failure(load)[0] is Reason.TRANSFER_FAILED
        pair.d.want("s", pair.router_ticket(2), 2)
        pair.run(1)
        assert len(pair.said(Reset)) == 1

    def test_a_commit_to_a_life_that_is_over_fails(self, pair: Pair) -> None:
        """Promise 1: the new life cannot vouch for the old one's blocks."""
        pair.lose(Commit)
        load = pair.pull()
        pair.restart("p")
        pair.run(1)
        assert failure(load) == (Reason.WRONG_INCARNATION, "the source no longer knows this session")

    def test_a_ticket_of_the_old_life_is_refused_by_the_new_one(self, pair: Pair) -> None:
        ticket = pair.p.grant()
        pair.restart("p")
        load = pair.d.want("r", ticket)
        pair.settle()
        reason, detail = failure(load)
        assert reason is Reason.WRONG_INCARNATION and "restarted" in detail

    def test_a_reset_of_another_session_or_life_is_ignored(self, pair: Pair) -> None:
        pair.pull()
        link = pair.d.ledger.consumer.links.by_worker[pair.p.name]
        pair.inject("p", "d", Reset(pair.p.me.incarnation), session=link.session + 1)
        pair.inject("p", "d", Reset(12345), session=link.session)
        pair.inject("p", "d", Reset(12345), session=link.session, incarnation=777)
        assert pair.d.ledger.consumer.links.by_worker[pair.p.name] is link

    def test_a_reset_from_one_who_is_no_source_is_ignored(self, pair: Pair) -> None:
        pair.inject("p", "d", Reset(5), session=0)
        assert not pair.d.ledger.consumer.links.by_worker


class TestLoss:
    """A link can also end by a goodbye, or by word of the registry."""

    @pytest.mark.parametrize("push", [False, True])
    def test_a_goodbye_fails_what_is_under_way(self, pair: Pair, push: bool) -> None:
        pair.d.habits.copies = pair.p.habits.copies = False
        pair.d.want("r", pair.router_ticket(), push=push)
        pair.p.stream()
        pair.settle()
        pair.p.leave()
        pair.settle()
        assert failure(pair.d.loads["r"]) == (Reason.PEER_GONE, "the source said goodbye")  # type: ignore[index]
        assert len(pair.done(StartFence, "d")) == (1 if push else 0)

    def test_word_of_another_life_s_departure_changes_nothing(self, pair: Pair) -> None:
        load = pair.pull()
        pair.d.tell(Departed(pair.p.name, Incarnation(12345)))
        assert "p" in pair.d.ledger.consumer.links.by_worker and load.end is not None

    def test_word_of_a_life_s_end_says_nothing_about_whom_we_are_greeting(self, pair: Pair) -> None:
        pair.lose(Hello, times=99)
        load = pair.d.want("r", pair.router_ticket())
        pair.d.tell(Departed(pair.p.name, Incarnation(12345)))
        assert load.failed is None
        pair.d.tell(Departed(pair.p.name))
        assert failure(load)[0] is Reason.PEER_GONE

    def test_where_nothing_listens_any_more_nothing_is_waited_for(self, pair: Pair) -> None:
        """Rule 9: of whom has answered there, or not yet; no other worker's handoffs are touched."""
        pair.d.habits.copies = False
        first = pair.d.want("r", pair.router_ticket())
        pair.settle()
        pair.d.tell(LineRefused(WorkerId("nobody")))
        assert first.failed is None and "p" in pair.d.ledger.consumer.links.by_worker
        pair.d.tell(LineRefused(pair.p.name))
        assert failure(first) == (Reason.PEER_GONE, "worker p has left or is not registered")
        pair.lose(Hello, times=99)
        second = pair.d.want("q", pair.router_ticket(2), 2)
        pair.d.tell(LineRefused(pair.p.name))
        assert failure(second) == (Reason.PEER_GONE, "nothing listens at the address of worker p")

    def test_leaving_says_goodbye_where_somebody_answered(self, pair: Pair) -> None:
        pair.pull()
        waiting = pair.d.want("s", pair.router_ticket(2, source="q"), 2, source="q")
        pair.d.leave()
        pair.settle()
        assert [frame.target for frame in pair.log if getattr(frame, "message", None) == Goodbye()] == ["p"]
        assert failure(waiting)[0] is Reason.ABORTED


class TestFence:
    """Rule 16: where P is silent, D shuts it out of its memory before it lets the blocks go."""

    def offered(self, pair: Pair) -> Load:
        pair.p.habits.copies = pair.d.habits.fences = False
        load = pair.d.want("r", pair.router_ticket(), push=True)
        pair.p.stream()
        pair.settle()
        assert pair.p.copies
        return load

    def test_a_silent_source_is_fenced_after_revoke_timeout(self, pair: Pair) -> None:
        load = self.offered(pair)
        pair.cut("p")
        pair.d.give_up("r")
        pair.run(4.9)
        assert load.end is not None and not pair.d.fences and len(pair.said(Revoke)) == 10
        pair.run(0.2)
        assert len(pair.d.fences) == 1 and not load.drops
        pair.p.finish()  # its write lands meanwhile, in blocks that are still held
        pair.d.end_fences()
        assert load.drops == 1

    def test_every_pair_of_ranks_is_fenced(self, make_pair: Make) -> None:
        pair = make_pair("p", "d", shape=Shape(ranks=2))
        load = self.offered(pair)
        pair.cut("p")
        pair.d.give_up("r")
        pair.run(6)
        fences = list(pair.d.fences)
        assert [(fence.rank, fence.peer.worker) for fence in fences] == [
            (rank, f"p#{remote}") for rank in (0, 1) for remote in (0, 1)
        ]
        for fence in fences:
            assert not load.drops, "not before the last"
            pair.d.tell(RankFenced(fence.rank, fence.peer))
        assert load.drops == 1
        pair.d.fences.clear()
        pair.d.admitted.clear()

    def test_a_lost_link_fences_at_once(self, pair: Pair) -> None:
        """Rule 14: a new incarnation proves death, not rest."""
        load = self.offered(pair)
        pair.d.tell(Departed(pair.p.name, pair.p.me.incarnation))
        assert load.end is not None and load.end.reason is Reason.PEER_GONE
        assert len(pair.d.fences) == 1 and not load.drops

    def test_a_link_lost_while_revoking_fences(self, pair: Pair) -> None:
        load = self.offered(pair)
        pair.cut("p")
        pair.give_up()
        assert not pair.d.fences
        pair.d.tell(Departed(pair.p.name))
        assert len(pair.d.fences) == 1 and not load.drops
        pair.run(1)  # the next repetition of Revoke has nowhere to go
        assert len(pair.said(Revoke)) == 1

    def test_one_fence_brings_all_of_that_source_to_rest(self, pair: Pair) -> None:
        first = self.offered(pair)
        second = pair.d.want("s", pair.router_ticket(2), 2, push=True)
        pair.p.stream(2)
        pair.settle()
        pair.d.tell(Departed(pair.p.name))
        assert len(pair.d.fences) == 1
        pair.d.end_fences()
        pair.settle()
        assert (first.drops, second.drops) == (1, 1)

    def test_a_fence_takes_others_of_the_same_source_along(self, pair: Pair) -> None:
        """The link is given up as a whole: what else runs over it fails, explicitly."""
        self.offered(pair)
        pulled = pair.d.want("s", pair.router_ticket(2), 2)
        pair.d.habits.copies = False
        pair.p.stream(2)
        pair.settle()
        pair.cut("p")
        pair.d.give_up("r")
        pair.run(5.1)
        assert failure(pulled)[0] is Reason.PEER_GONE

    def test_a_fence_of_somebody_else_ends_nothing(self, pair: Pair) -> None:
        load = self.offered(pair)
        pair.d.tell(Departed(pair.p.name))
        pair.d.tell(RankFenced(0, PeerId(WorkerId("q#0"), Incarnation(1))))
        assert not load.drops and pair.d.counts["late.fence"] == 1

    def test_the_end_of_an_earlier_fence_is_not_that_of_a_later_one(self, pair: Pair) -> None:
        """Safety leans on no time-out: a slow first fence of the same peer says nothing about the second."""
        loads = [self.offered(pair)]
        pair.d.tell(Departed(pair.p.name))
        loads.append(pair.d.want("s", pair.router_ticket(2), 2, push=True))
        pair.p.stream(2)
        pair.settle()
        pair.d.tell(Departed(pair.p.name))
        while pair.d.taken_back:  # what was lent, which the fences below are not about
            pair.d.act()
        assert len(pair.d.fences) == 2
        for fence in list(pair.d.fences):
            pair.d.tell(RankFenced(fence.rank, fence.peer))
            assert [load.drops for load in loads] == ([1, 0] if fence is pair.d.fences[0] else [1, 1])
        pair.d.fences.clear()
        pair.d.admitted.clear()

    def test_quiet_that_comes_during_the_fence_is_late(self, pair: Pair) -> None:
        load = self.offered(pair)
        pair.hold(Quiesced, times=99)
        pair.give_up()
        pair.p.finish()
        pair.run(6)
        assert pair.d.fences
        pair.release(Quiesced)
        assert not load.drops and pair.d.counts["late.session"]

    def test_a_fence_ends_both_roles_of_the_pair(self, pair: Pair) -> None:
        """It shuts the peer out of our memory, which it may be reading from as well: that must be paired anew."""
        pair.p.want("back", pair.d.grant(2), 2, source="d")
        self.offered(pair)
        assert [s.joined for s in pair.d.ledger.sessions.by_number.values()] == [True]
        pair.d.tell(Departed(WorkerId("p"), Incarnation(12345)))
        assert not pair.d.fences, "another life's departure"
        pair.cut("p")
        pair.d.give_up("r")
        pair.run(6)
        assert pair.d.fences and not pair.d.ledger.sessions.by_number
        assert pair.p.me not in pair.d.holders

    def test_a_new_link_can_be_made_while_the_old_one_is_fenced(self, pair: Pair) -> None:
        old = self.offered(pair)
        pair.d.tell(Departed(pair.p.name))
        pair.p.habits.copies = True
        new = pair.d.want("s", pair.router_ticket(2), 2)
        pair.p.stream(2)
        pair.run(1)
        assert new.end is not None and new.end.delivered and not old.drops


class TestBound:
    """At most `sessions_max` links; those that nothing is taken from give way."""

    def test_an_idle_source_is_let_go_for_another(self, make_pair: Make) -> None:
        pair = make_pair("p", "d", "q", settings=Settings(sessions_max=1))
        first = pair.d.want("r", pair.p.grant(1), 1)
        pair.settle()
        second = pair.d.want("s", pair.q.grant(2), 2, source="q")
        pair.settle()
        assert first.end is not None and second.end is not None and second.end.delivered
        assert list(pair.d.ledger.consumer.links.by_worker) == ["q"]
        assert not pair.p.ledger.sessions.by_number, "it was told"

    def test_when_all_are_in_use_a_request_is_told_so(self, make_pair: Make) -> None:
        pair = make_pair("p", "d", "q", settings=Settings(sessions_max=1))
        pair.d.habits.copies = False
        pair.d.want("r", pair.p.grant(1), 1)
        pair.settle()
        load = pair.d.want("s", pair.q.grant(2), 2, source="q")
        assert failure(load) == (Reason.BUSY, "sessions_max: 1 links are in use")

    def test_one_that_is_only_being_greeted_is_let_go_without_a_word(self, make_pair: Make) -> None:
        pair = make_pair("p", "d", "q", settings=Settings(sessions_max=1))
        pair.lose(Hello)
        first = pair.d.want("r", pair.router_ticket(1), 1)
        pair.d.give_up("r")
        second = pair.d.want("s", pair.q.grant(2), 2, source="q")
        pair.settle()
        assert failure(first)[0] is Reason.ABORTED
        assert second.end is not None and second.end.delivered and not pair.said(Goodbye)


def test_talk_of_an_earlier_link_is_late(pair: Pair) -> None:
    pair.hold(Granted)
    pair.pull()
    pair.d.tell(Departed(pair.p.name))
    pair.release(Granted)
    assert pair.d.counts["late.session"] == 1


def test_talk_to_an_earlier_life_is_late(pair: Pair) -> None:
    pair.hold(Welcome)
    pair.d.want("r", pair.router_ticket())
    pair.settle()
    pair.restart("d")
    pair.release(Welcome)
    assert pair.d.counts["late.incarnation"] == 1
    assert not pair.said(Claim)


def test_an_answer_to_an_earlier_life_is_late(pair: Pair) -> None:
    pair.hold(Granted)
    pair.pull()
    pair.restart("d")
    pair.release(Granted)
    assert pair.d.counts["late.incarnation"] == 1
