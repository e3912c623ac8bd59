"""P's role: claims are judged by their tickets, commits by the epochs, and every lease is unpinned exactly once."""

from __future__ import annotations

import pytest
from pair import Make, Pair
from party import KEY, WALL_S, Load, delivered, transfer, why

from kvbaton.protocol import events as ev
from kvbaton.protocol.effects import MatchFailed, MatchFound, Step, Unpin
from kvbaton.protocol.errors import Reason
from kvbaton.protocol.geometry.progress import GroupProgress, whole
from kvbaton.protocol.ids import HandoffId, Incarnation, LeaseId, WorkerId
from kvbaton.protocol.settings import Settings
from kvbaton.protocol.wire.codec import unpack_blocks
from kvbaton.protocol.wire.messages import (
    Abandon,
    Claim,
    ClaimRefused,
    Commit,
    Committed,
    Granted,
    Hello,
    Ready,
    Renew,
    Renewed,
    RenewRefused,
    SourceLost,
    Stale,
)
from kvbaton.protocol.wire.ticket import Ticket, seal
from kvbaton_proof.sim.world.sim_memory import Shape


class TestCommit:
    """Promise 1, rules 5 to 7: D decodes only on bytes that P confirmed after the copy."""

    def test_untouched_blocks_are_confirmed_and_released(self, pair: Pair) -> None:
        load = pair.pull()
        assert delivered(load) and pair.done(Unpin) == [Unpin(LeaseId(1))]
        assert pair.p.counts["commits.good"] == 1

    @pytest.mark.parametrize("lost", [Claim, Granted, Commit, Committed])
    def test_whatever_is_lost_is_said_again(self, pair: Pair, lost: type) -> None:
        pair.lose(lost)
        load = pair.d.want("r", pair.p.grant())
        pair.run(0.6)
        assert delivered(load) and len(pair.done(Unpin)) == 1

    @pytest.mark.parametrize("doubled", [Claim, Granted, Commit, Committed])
    def test_whatever_comes_twice_counts_once(self, pair: Pair, doubled: type) -> None:
        pair.double(doubled, times=9)
        load = pair.d.want("r", pair.p.grant())
        pair.run(1)
        assert delivered(load) and pair.p.counts["commits.good"] == 1
        assert len(pair.done(MatchFound)) == 1

    def test_the_same_reader_is_answered_the_same_ever_after(self, pair: Pair) -> None:
        """Idempotent, and sound: a reader that has sent its commit never copies again."""
        pair.pull()
        pair.p.reuse(1)
        pair.inject("d", "p", Commit(LeaseId(1), 1))
        assert len(pair.said(Committed)) == 2 and not pair.said(Stale)

    def test_a_late_commit_on_untouched_blocks_is_good(self, pair: Pair) -> None:
        """Expiry unpins, it does not lie."""
        load = pair.pull(copies=False)
        pair.lose(Renew, times=99)
        pair.run(16)
        assert len(pair.done(Unpin)) == 1
        pair.d.finish()
        pair.settle()
        assert delivered(load)

    def test_a_late_commit_on_reused_blocks_is_stale(self, pair: Pair) -> None:
        load = pair.pull(copies=False)
        pair.lose(Renew, times=99)
        pair.run(16)
        pair.p.reuse(2)
        pair.d.finish()
        pair.settle()
        assert why(load) is Reason.STALE
        assert [message.good for message in pair.said(Stale)] == [(1,)]
        assert load.end is not None and load.end.good_tokens == 2
        assert pair.p.counts["commits.stale"] == 1

    def test_a_stale_answer_is_repeated_although_more_was_reused_since(self, pair: Pair) -> None:
        pair.pull(copies=False)
        pair.lose(Renew, times=99)
        pair.run(16)
        pair.p.reuse(2)
        pair.d.finish()
        pair.settle()
        pair.p.reuse(1)
        pair.inject("d", "p", Commit(LeaseId(1), 1))
        assert [message.good for message in pair.said(Stale)] == [(1,), (1,)]

    def test_a_commit_before_the_final_ready_is_stale(self, pair: Pair) -> None:
        """Rule 10: a partial block grows after it was read."""
        pair.d.want("r", pair.router_ticket())
        source = pair.p.begin()
        pair.p.chunk(source, 2)
        pair.settle()
        pair.inject("d", "p", Commit(source.lease, 1))
        assert [message.good for message in pair.said(Stale)] == [(0,)]

    def test_a_forgotten_tombstone_answers_stale(self, make_pair: Make) -> None:
        """Rule 5: P does not guess about what it no longer remembers."""
        pair = make_pair(settings=Settings(tombstones_max=1))
        for number in (1, 2):
            pair.d.want(f"r{number}", pair.p.grant(number), number)
            pair.settle()
        pair.inject("d", "p", Commit(LeaseId(1), 1))
        pair.inject("d", "p", Commit(LeaseId(2), 2))
        assert [message.lease for message in pair.said(Stale)] == [1]
        assert pair.said(Stale)[0].good == ()
        assert pair.p.counts["commits.unknown"] == 1

    def test_a_commit_of_one_who_never_claimed_is_stale(self, make_pair: Make) -> None:
        pair = make_pair("p", "d", "e")
        pair.d.habits.copies = False
        pair.d.want("r", pair.p.grant(1, max_readers=2))
        pair.e.want("q", pair.p.grant(2), 2)
        pair.settle()
        pair.inject("e", "p", Commit(LeaseId(1), 7))
        assert [message.lease for message in pair.said(Stale)] == [1]
        assert len(pair.p.ledger.producer.leases) == 1

    def test_without_a_watcher_a_commit_after_release_is_stale(self, pair: Pair) -> None:
        """Rule 7: where the pool does not tell of reuse, nothing is known once the pins are gone."""
        pair.p.ledger.desk.identity.exact_epochs = False
        pair.d.habits.copies = False
        first = pair.d.want("r", pair.p.grant(1), 1)
        second = pair.d.want("s", pair.p.grant(2), 2)
        pair.settle()
        pair.d.finish(1)
        pair.settle()
        assert delivered(first), "pinned all along"
        pair.lose(Renew, times=99)
        pair.run(16)
        pair.d.finish()
        pair.settle()
        assert why(second) is Reason.STALE and pair.said(Stale)[0].good == ()

    def test_a_reader_that_left_and_still_commits_is_judged(self, pair: Pair) -> None:
        pair.d.habits.allocates = False
        pair.pull()
        pair.d.not_needed("r")
        pair.settle()
        pair.inject("d", "p", Commit(LeaseId(1), 1))
        assert len(pair.said(Committed)) == 1 and len(pair.done(Unpin)) == 1


class TestReaders:
    """Rule 4: known by identity, counted never by message."""

    def test_a_lease_is_held_until_its_last_reader_is_done(self, make_pair: Make) -> None:
        pair = make_pair("p", "d", "e")
        ticket = pair.p.grant(max_readers=2)
        first = pair.d.want("r", ticket)
        pair.settle()
        assert delivered(first) and not pair.done(Unpin)
        pair.double(Commit, times=9)
        pair.inject("d", "p", Commit(LeaseId(1), 1))
        assert not pair.done(Unpin), "one reader committing twice is still one reader"
        second = pair.e.want("q", ticket)
        pair.settle()
        assert delivered(second) and len(pair.done(Unpin)) == 1

    def test_one_reader_more_than_the_ticket_allows_is_refused(self, make_pair: Make) -> None:
        pair = make_pair("p", "d", "e")
        pair.d.habits.copies = False
        ticket = pair.p.grant()
        pair.d.want("r", ticket)
        pair.settle()
        late = pair.e.want("q", ticket)
        pair.settle()
        assert why(late) is Reason.TICKET_SPENT
        assert late.failed is not None and late.failed.detail == "max_readers: all 1 have claimed it"

    def test_a_ticket_used_again_after_the_lease_is_over_is_spent(self, pair: Pair) -> None:
        """A replay: every claim is a new reader."""
        ticket = pair.p.grant()
        pair.d.want("r", ticket)
        pair.settle()
        again = pair.d.want("s", ticket)
        pair.settle()
        assert why(again) is Reason.TICKET_SPENT

    def test_a_reader_that_leaves_frees_its_seat_for_nobody_but_ends_the_lease(self, pair: Pair) -> None:
        pair.d.habits.allocates = False
        pair.pull()
        pair.d.not_needed("r")
        pair.settle()
        assert len(pair.done(Unpin)) == 1

    def test_a_claim_of_a_reader_that_has_left_is_not_answered(self, make_pair: Make) -> None:
        pair = make_pair("p", "d", "e")
        pair.d.habits.allocates = False
        ticket = pair.p.grant(max_readers=2)
        pair.hold(Claim)
        pair.d.want("r", ticket)
        pair.run(0.6)  # the repetition overtakes
        pair.d.not_needed("r")
        pair.settle()
        pair.release(Claim)
        assert pair.p.counts["late.claim"] == 1 and len(pair.said(Granted)) == 1

    def test_only_readers_that_are_there_hear_of_progress(self, make_pair: Make) -> None:
        pair = make_pair("p", "d", "e")
        source = pair.p.begin(max_readers=2)
        ticket = pair.router_ticket()
        pair.d.want("r", ticket)
        pair.e.want("q", ticket)
        pair.settle()
        pair.e.give_up("q")
        pair.settle()
        pair.p.chunk(source, 1)
        assert [frame.target for frame in pair.log if isinstance(getattr(frame, "message", None), Ready)] == ["d"]

    def test_an_abandoned_handoff_that_nobody_knows_is_no_news(self, pair: Pair) -> None:
        pair.pull()
        pair.inject("d", "p", Abandon(transfer(9), 1))
        pair.inject("d", "p", Abandon(HandoffId(""), 99))
        assert not pair.p.counts["late.reader"]

    def test_leaving_twice_counts_as_late(self, make_pair: Make) -> None:
        pair = make_pair("p", "d", "e")
        pair.double(Abandon)
        pair.d.habits.allocates = False
        pair.d.want("r", pair.p.grant(max_readers=2))
        pair.settle()
        pair.give_up()
        assert pair.p.counts["late.reader"] == 1


class TestTickets:
    """Promise 5: forged, expired, replayed, of another prompt, target or life: refused, each by name."""

    def claim(self, pair: Pair, ticket: str, **options: object) -> Load:
        load = pair.d.want("r", ticket, **options)  # type: ignore[arg-type]
        pair.settle()
        assert load.failed is not None and not pair.said(Granted)
        return load

    def test_a_forged_ticket_names_nothing(self, pair: Pair) -> None:
        ticket = pair.p.grant()
        forged = ticket[:-4] + ("AAAA" if ticket[-4:] != "AAAA" else "BBBB")
        assert why(self.claim(pair, forged)) is Reason.TICKET_FORGED
        assert pair.p.counts["claim_refused.ticket_forged"] == 1

    @pytest.mark.parametrize(
        ("says", "reason"),
        [
            ({"expires_unix_s": WALL_S - 1.0}, Reason.TICKET_EXPIRED),
            ({"target": WorkerId("e")}, Reason.TICKET_FORGED),
            ({"source": WorkerId("q")}, Reason.TICKET_FORGED),
            ({"handoff": transfer(7)}, Reason.TICKET_FORGED),
            ({"incarnation": Incarnation(5)}, Reason.WRONG_INCARNATION),
        ],
        ids=["over", "of another target", "of another prefiller", "of another handoff", "of an earlier life"],
    )
    def test_a_genuine_ticket_that_is_not_for_this_claim_is_refused(
        self, pair: Pair, says: dict[str, object], reason: Reason
    ) -> None:
        ticket = pair.p.ticket(pair.p.stream(deferred=False), **says)  # type: ignore[arg-type]
        assert why(self.claim(pair, ticket)) is reason

    @pytest.mark.parametrize(
        ("expires_unix_s", "told"),
        [(WALL_S + 3601.0, "3600 s at most"), (float("inf"), "unreadable"), (float("nan"), "unreadable")],
    )
    def test_a_ticket_that_would_be_good_for_ever_is_refused(
        self, pair: Pair, expires_unix_s: float, told: str
    ) -> None:
        source = pair.p.stream(deferred=False)
        ticket = pair.p.ticket(source, expires_unix_s=expires_unix_s)
        load = self.claim(pair, ticket)
        assert why(load) is Reason.TICKET_FORGED
        assert load.failed is not None and told in load.failed.detail

    def test_expiry_is_judged_by_the_wall_and_not_by_the_node_s_clock(self, pair: Pair) -> None:
        source = pair.p.stream(deferred=False)
        pair.run(10)
        load = pair.d.want("r", pair.p.ticket(source, expires_unix_s=WALL_S + 10.5))
        pair.settle()
        assert delivered(load)

    def test_a_ticket_for_another_prompt_is_a_mismatch(self, pair: Pair) -> None:
        """Rule 2: all else checks out, and D would decode X' on X's KV."""
        assert why(self.claim(pair, pair.p.grant(), content=99)) is Reason.CONTENT_MISMATCH

    def test_a_ticket_of_the_router_for_another_prompt_than_p_computed_is_a_mismatch(self, pair: Pair) -> None:
        pair.p.stream()
        load = self.claim(pair, pair.router_ticket(), content=99)
        assert why(load) is Reason.CONTENT_MISMATCH
        assert load.failed is not None and "computed another prompt" in load.failed.detail

    def test_a_handoff_for_another_target_is_refused(self, pair: Pair) -> None:
        pair.p.stream(target="e")
        load = self.claim(pair, pair.router_ticket())
        assert why(load) is Reason.TICKET_FORGED
        assert load.failed is not None and load.failed.detail == "target: this handoff is for e"

    def test_a_genuine_ticket_of_a_lease_that_p_never_had_is_unknown(self, pair: Pair) -> None:
        ticket = Ticket(transfer(1), pair.p.name, WALL_S + 99, pair.p.me.incarnation, LeaseId(77))
        assert why(self.claim(pair, seal(ticket, KEY))) is Reason.UNKNOWN_LEASE

    def test_a_refused_claim_tells_d_which_reason_at_most_in_512_characters(self, pair: Pair) -> None:
        self.claim(pair, pair.p.ticket(pair.p.stream(deferred=False), target=WorkerId("e" * 600)))
        assert len(pair.said(ClaimRefused)[0].detail) == 512


class TestEndedHandoffs:
    """A claim that comes after the end is told how it ended."""

    def test_expired(self, pair: Pair) -> None:
        ticket = pair.p.grant()
        pair.run(16)
        load = pair.d.want("r", ticket)
        pair.settle()
        assert why(load) is Reason.LEASE_EXPIRED and pair.p.counts["leases_expired"] == 1

    @pytest.mark.parametrize("reason", [Reason.SOURCE_PREEMPTED, Reason.SOURCE_ABORTED])
    def test_given_up_by_p(self, pair: Pair, reason: Reason) -> None:
        source = pair.p.begin()
        pair.p.tell(ev.SourceEnded(source.lease, reason))
        load = pair.d.want("r", pair.router_ticket())
        pair.settle()
        assert why(load) is reason

    def test_forgotten(self, make_pair: Make) -> None:
        pair = make_pair(settings=Settings(tombstones_max=1))
        first = pair.p.grant(1)
        pair.p.grant(2)
        pair.run(16)
        load = pair.d.want("r", first)
        pair.settle()
        assert why(load) is Reason.UNKNOWN_LEASE


class TestParking:
    """Rules 9 and 12: a claim before its request waits, bounded, with a deadline; nothing is dropped in silence."""

    def test_a_claim_before_the_request_is_granted_when_p_begins(self, pair: Pair) -> None:
        load = pair.d.want("r", pair.router_ticket())
        pair.run(3)
        assert len(pair.p.ledger.producer.parked) == 1 and load.found == 0
        pair.p.stream()
        pair.run(1)
        assert delivered(load)

    def test_repetitions_of_a_parked_claim_are_the_same_claim(self, pair: Pair) -> None:
        pair.d.want("r", pair.router_ticket())
        pair.run(5)
        assert len(pair.said(Claim)) == 11 and len(pair.p.ledger.producer.parked) == 1
        assert not pair.said(ClaimRefused)

    def test_only_the_claims_of_that_handoff_are_answered(self, pair: Pair) -> None:
        loads = [pair.d.want(f"r{n}", pair.router_ticket(n), n) for n in (1, 2)]
        pair.settle()
        pair.p.begin(2)
        pair.settle()
        assert [load.found for load in loads] == [0, 1]

    def test_a_parked_claim_that_p_never_hears_of_is_refused_in_time(self, make_pair: Make) -> None:
        pair = make_pair("p", settings=Settings(defer_timeout=3.0))
        pair.add("d", settings=Settings(defer_timeout=60.0))
        load = pair.d.want("r", pair.router_ticket())
        pair.run(3.1)
        assert why(load) is Reason.DEFER_TIMEOUT
        assert pair.p.ledger.is_idle()

    def test_a_parked_claim_goes_with_its_link(self, pair: Pair) -> None:
        pair.d.want("r", pair.router_ticket())
        pair.settle()
        assert len(pair.p.ledger.producer.parked) == 1
        pair.p.tell(ev.Departed(pair.d.name))
        assert not pair.p.ledger.producer.parked

    def test_a_full_park_says_busy(self, make_pair: Make) -> None:
        """Parking that is full answers, it never drops."""
        pair = make_pair(settings=Settings(parked_max=2))
        loads = [pair.d.want(f"r{n}", pair.router_ticket(n), n) for n in (1, 2, 3)]
        pair.settle()
        assert why(loads[2]) is Reason.BUSY
        assert [load.failed for load in loads[:2]] == [None, None]

    def test_a_draining_p_parks_nothing_new_but_keeps_its_word(self, pair: Pair) -> None:
        first = pair.d.want("r1", pair.router_ticket(1), 1)
        pair.settle()
        pair.p.tell(ev.DrainStarted())
        second = pair.d.want("r2", pair.router_ticket(2), 2)
        third = pair.d.want("r3", pair.p.grant(3), 3)
        pair.run(1)
        assert why(second) is Reason.DRAINING
        assert delivered(third), "what is there is finished"
        pair.p.stream(1)
        pair.run(1)
        assert delivered(first)

    @pytest.mark.parametrize("push", [False, True])
    def test_nothing_is_held_for_a_claim_that_was_given_up(self, pair: Pair, push: bool) -> None:
        """The Abandon came while the claim was parked: P held its blocks for the whole first term."""
        pair.d.want("r", pair.router_ticket(), push=push)
        pair.settle()
        pair.give_up()
        assert pair.p.ledger.is_idle() and pair.p.ledger.producer.claims.waiting == 0
        pair.p.stream()
        assert not pair.said(Granted) and not pair.p.ledger.producer.leases and len(pair.done(Unpin)) == 1
        assert len(pair.p.ledger.desk.timers) == 0 and pair.p.counts["abandoned.aborted"] == 1

    def test_a_reader_that_left_takes_one_seat_and_no_other(self, make_pair: Make) -> None:
        pair = make_pair("p", "d", "e")
        pair.d.want("r", pair.router_ticket())
        other = pair.e.want("q", pair.router_ticket())
        pair.settle()
        pair.give_up()
        pair.p.stream(max_readers=2)
        pair.run(1)
        assert delivered(other) and len(pair.done(Unpin)) == 1, "and P waits for nobody else"

    def test_what_was_given_up_is_remembered_after_its_session(self, pair: Pair) -> None:
        """As when D's cache is reset, or D leaves: it abandons everything and says goodbye."""
        pair.d.want("r", pair.router_ticket())
        pair.settle()
        pair.d.leave()
        pair.settle()
        assert not pair.p.ledger.sessions.by_number
        pair.p.begin()
        assert not pair.p.ledger.producer.leases

    def test_a_prompt_that_p_begins_after_its_reader_was_refused_is_held_for_nobody(self, make_pair: Make) -> None:
        pair = make_pair("p", settings=Settings(defer_timeout=3.0))
        pair.add("d", settings=Settings(defer_timeout=60.0))
        load = pair.d.want("r", pair.router_ticket())
        pair.run(5)
        assert why(load) is Reason.DEFER_TIMEOUT
        pair.p.begin()
        assert not pair.p.ledger.producer.leases and pair.p.counts["abandoned.defer_timeout"] == 1

    def test_a_reader_that_left_is_remembered_as_long_as_its_claim_would_have_waited(self, pair: Pair) -> None:
        pair.d.want("r", pair.router_ticket())
        pair.settle()
        pair.d.give_up("r")
        pair.run(60.1)
        assert not pair.p.ledger.producer.parked and len(pair.p.ledger.desk.timers) == 0

    def test_a_claim_of_a_reader_that_left_is_refused(self, pair: Pair) -> None:
        pair.hold(Claim)
        pair.d.want("r", pair.router_ticket())
        pair.run(0.6)  # said twice, heard once
        pair.give_up()
        pair.release()
        pair.settle()
        assert [message.reason for message in pair.said(ClaimRefused)] == [Reason.ABORTED]
        assert pair.p.ledger.producer.claims.waiting == 0

    def test_a_claim_of_a_reader_that_left_with_another_prompt_spends_the_lease(self, pair: Pair) -> None:
        pair.d.want("r", pair.router_ticket(), content=99)
        pair.settle()
        pair.give_up()
        pair.p.begin()
        assert not pair.p.ledger.producer.leases

    def test_two_that_left_take_the_one_seat_that_there_is(self, make_pair: Make) -> None:
        pair = make_pair("p", "d", "e")
        for party, request in ((pair.d, "r"), (pair.e, "q")):
            party.want(request, pair.router_ticket())
            pair.settle()
            party.give_up(request)
            pair.settle()
        pair.p.begin()
        assert not pair.p.ledger.producer.leases and pair.p.counts["abandoned.aborted"] == 1

    def test_a_p_that_leaves_remembers_nobody(self, pair: Pair) -> None:
        pair.d.want("r", pair.router_ticket())
        pair.settle()
        pair.give_up()
        assert pair.p.ledger.producer.parked
        pair.p.leave()
        assert not pair.p.ledger.producer.parked and len(pair.p.ledger.desk.timers) == 0

    def test_a_ticket_whose_key_was_withdrawn_while_it_waited_spends_nothing(self, pair: Pair) -> None:
        load = pair.d.want("r", pair.router_ticket(), content=99)
        pair.settle()
        pair.lose(Claim, times=99)
        pair.p.ledger.desk.identity.ticket_keys = (bytes(32),)
        pair.p.begin()
        pair.settle()
        assert why(load) is Reason.CONTENT_MISMATCH and len(pair.p.ledger.producer.leases) == 1

    def test_one_that_waits_comes_before_one_that_has_left(self, make_pair: Make) -> None:
        pair = make_pair("p", "d", "e", settings=Settings(parked_max=3, parked_per_peer_max=2))
        for n in (1, 2):
            pair.d.want(f"r{n}", pair.router_ticket(n), n)
            pair.settle()
            pair.d.give_up(f"r{n}")
        pair.settle()
        loads = [pair.d.want("r3", pair.router_ticket(3), 3), pair.e.want("q4", pair.router_ticket(4), 4)]
        pair.settle()
        loads.append(pair.e.want("q5", pair.router_ticket(5), 5))
        pair.settle()
        assert [load.failed for load in loads] == [None] * 3 and pair.p.counts["parked_forgotten"] == 2
        refused = pair.d.want("r6", pair.router_ticket(6), 6)
        pair.settle()
        assert why(refused) is Reason.BUSY

    def test_a_parked_claim_for_another_prompt_is_refused_when_p_begins(self, pair: Pair) -> None:
        load = pair.d.want("r", pair.router_ticket(), content=99)
        pair.settle()
        pair.p.begin()
        pair.settle()
        assert why(load) is Reason.CONTENT_MISMATCH

    def test_a_parked_claim_for_another_prompt_is_refused_although_its_ticket_has_expired(self, pair: Pair) -> None:
        """The ticket was judged a second time when P began, and that left the step: an engine's death (seed 900391)."""
        load = pair.d.want("r", pair.router_ticket(expires_unix_s=WALL_S + 5.0), content=99)
        pair.settle()
        pair.lose(Claim, times=99)  # repeated, it would be refused for the ticket
        pair.run(6)
        pair.p.begin()
        pair.settle()
        assert why(load) is Reason.CONTENT_MISMATCH and not pair.p.ledger.producer.leases

    def test_who_waits_behind_one_that_spends_the_lease_hears_that_it_is_over(self, make_pair: Make) -> None:
        """As whoever claims a moment later does; and nothing is said of a lease after its end."""
        pair = make_pair("p", "d", "e")
        first = pair.d.want("r", pair.router_ticket(), content=99)
        pair.settle()
        second = pair.e.want("q", pair.router_ticket())
        pair.settle()
        pair.p.begin()
        pair.settle()
        assert why(first) is why(second) is Reason.CONTENT_MISMATCH
        steps = [mark.step for mark in pair.p.ledger.desk.marks]
        assert steps == [Step.BEGUN, Step.PARKED, Step.CLOSED, Step.RESTED]

    def test_claims_of_a_d_that_left_are_forgotten_and_others_stay(self, make_pair: Make) -> None:
        pair = make_pair("p", "d", "e")
        pair.d.want("r", pair.router_ticket(1), 1)
        pair.e.want("q", pair.router_ticket(2), 2)
        pair.settle()
        pair.d.leave()
        pair.settle()
        waiting = [r.peer.worker for r, each in pair.p.ledger.producer.parked.items() if each.left is None]
        assert waiting == ["e"]

    def test_a_pull_for_what_p_does_not_know_is_not_parked(self, pair: Pair) -> None:
        """Only where D may be earlier than P is there anything to wait for."""
        load = pair.d.want("r", pair.router_ticket(), deferred=False)
        pair.settle()
        assert why(load) is Reason.UNKNOWN_LEASE


class TestTime:
    """Rule 9: renewals keep a lease, up to a hard limit; what ran out is refused."""

    def test_a_renewed_lease_outlives_its_first_term(self, pair: Pair) -> None:
        pair.d.habits.copies = False
        load = pair.d.want("r", pair.p.grant())
        pair.run(29)
        assert pair.p.ledger.producer.leases and not pair.p.counts["leases_expired"]
        pair.d.finish()
        pair.settle()
        assert delivered(load)

    def test_no_renewal_passes_max_hold(self, make_pair: Make) -> None:
        pair = make_pair(settings=Settings(max_hold_s=20.0))
        pair.d.habits.allocates = False
        load = pair.d.want("r", pair.p.grant())
        pair.run(19.9)
        assert pair.p.ledger.producer.leases
        assert min(message.ttl_s for message in pair.said(Renewed)) < 15.0
        pair.run(0.2)
        assert not pair.p.ledger.producer.leases
        pair.run(10)
        assert why(load) is Reason.LEASE_EXPIRED
        assert [message.reason for message in pair.said(RenewRefused)] == [Reason.LEASE_EXPIRED]

    def test_an_early_reader_does_not_shorten_the_time_for_others_to_come(self, make_pair: Make) -> None:
        pair = make_pair("p", "d", "e")
        pair.p.stream(max_readers=2)
        first = pair.d.want("r", pair.router_ticket())
        pair.run(50)
        second = pair.e.want("q", pair.router_ticket())
        pair.settle()
        assert delivered(first) and delivered(second)

    def test_a_lease_that_nobody_claims_expires(self, pair: Pair) -> None:
        pair.p.grant()
        pair.run(14.9)
        assert not pair.done(Unpin)
        pair.run(0.2)
        assert len(pair.done(Unpin)) == 1

    def test_a_deferred_lease_waits_longer_for_its_first_claim(self, pair: Pair) -> None:
        """And has a deadline all the same: seed 000 waited for ever."""
        pair.p.stream()
        pair.run(59.9)
        assert not pair.done(Unpin)
        pair.run(0.2)
        assert len(pair.done(Unpin)) == 1

    def test_a_renewal_of_what_p_never_had_is_refused(self, pair: Pair) -> None:
        pair.pull()
        pair.inject("d", "p", Renew(LeaseId(99), 1, (0,), True))
        assert [message.reason for message in pair.said(RenewRefused)] == [Reason.UNKNOWN_LEASE]

    def test_a_renewal_with_another_number_of_groups_gets_no_blocks(self, pair: Pair) -> None:
        pair.d.want("r", pair.router_ticket())
        source = pair.p.begin()
        pair.p.chunk(source, 1)
        pair.settle()
        said = len(pair.said(Ready))
        pair.inject("d", "p", Renew(source.lease, 1, (0, 0), False))
        assert len(pair.said(Ready)) == said and len(pair.said(Renewed)) == 1


class TestStreaming:
    """Rules 10 and 11: whole blocks, the minimum over all ranks, in hindsight provable."""

    def test_d_reads_behind_the_prefill_chunk_by_chunk(self, pair: Pair) -> None:
        load = pair.d.want("r", pair.router_ticket())
        source = pair.p.begin()
        pair.settle()
        for _ in range(2):
            pair.p.chunk(source, 1)
            pair.settle()
        assert not pair.said(Commit)
        pair.p.chunk(source, 1)
        pair.p.complete(source)
        pair.settle()
        assert delivered(load)
        assert [message.progress for message in pair.said(Ready)] == [whole([1]), whole([2]), whole([3]), whole([3])]
        assert [message.final for message in pair.said(Ready)] == [False, False, False, True]

    def test_a_reader_that_claims_late_is_told_of_later_blocks_only(self, pair: Pair) -> None:
        source = pair.p.begin()
        pair.p.chunk(source, 2)
        load = pair.d.want("r", pair.router_ticket())
        pair.settle()
        pair.p.chunk(source, 1)
        pair.p.complete(source)
        pair.settle()
        assert delivered(load)
        news = [(message.start, [unpack_blocks(ids) for ids in message.blocks]) for message in pair.said(Ready)]
        groups = len(source.blocks)
        assert news == [
            ((2,) * groups, [(ids[2],) for ids in source.blocks]), ((3,) * groups, [()] * groups),
        ]  # fmt: skip

    def test_a_lease_that_is_complete_but_not_computed_is_not_final(self, pair: Pair) -> None:
        load = pair.d.want("r", pair.router_ticket())
        source = pair.p.begin()
        pair.p.chunk(source, 3, ready=False)
        pair.p.complete(source)
        pair.settle()
        assert not pair.said(Ready)
        pair.p.progress(source, whole([3]))
        pair.settle()
        assert delivered(load)

    def test_ready_is_the_minimum_over_all_ranks(self, make_pair: Make) -> None:
        pair = make_pair(shape=Shape(ranks=2))
        load = pair.d.want("r", pair.router_ticket())
        source = pair.p.begin()
        pair.p.chunk(source, 3, ready=False)
        pair.settle()
        pair.p.progress(source, whole([3]), rank=0)
        assert not pair.said(Ready), "rank 1 has nothing yet"
        pair.p.progress(source, whole([2]), rank=1)
        assert [message.progress for message in pair.said(Ready)] == [whole([2])]
        pair.p.complete(source)
        pair.p.progress(source, whole([3]), rank=1)
        pair.settle()
        assert delivered(load) and pair.said(Ready)[-1].final

    def test_layers_are_announced_as_they_are_done(self, pair: Pair) -> None:
        load = pair.d.want("r", pair.router_ticket())
        source = pair.p.begin()
        pair.p.chunk(source, 3, ready=False)
        pair.settle()
        for progress in ((GroupProgress(0, 3, 1),), whole([3])):
            pair.p.progress(source, progress)
            pair.settle()
        pair.p.complete(source)
        pair.settle()
        assert delivered(load)
        assert len(pair.d.counts) and pair.d.counts["copies"] == 2

    def test_a_reader_that_comes_late_is_granted_what_is_ready(self, pair: Pair) -> None:
        source = pair.p.begin()
        pair.p.chunk(source, 2)
        pair.d.want("r", pair.router_ticket())
        pair.settle()
        granted = pair.said(Granted)[0]
        assert (granted.progress, granted.final, len(granted.blocks[0])) == (whole([2]), False, 8)

    def test_a_lost_ready_is_made_good_by_the_next_renewal(self, pair: Pair) -> None:
        load = pair.d.want("r", pair.router_ticket())
        source = pair.p.begin()
        pair.settle()
        pair.lose(Ready, times=2)
        pair.p.chunk(source, 3)
        pair.p.complete(source)
        pair.run(5.1)
        assert delivered(load)

    @pytest.mark.parametrize("reason", [Reason.SOURCE_PREEMPTED, Reason.SOURCE_ABORTED])
    def test_a_source_that_ends_early_tells_its_readers_at_once(self, pair: Pair, reason: Reason) -> None:
        load = pair.d.want("r", pair.router_ticket())
        source = pair.p.begin()
        pair.p.chunk(source, 1)
        pair.settle()
        pair.p.tell(ev.SourceEnded(source.lease, reason))
        pair.settle()
        assert why(load) is reason and len(pair.done(Unpin)) == 1
        assert [message.reason for message in pair.said(SourceLost)] == [reason]

    def test_a_source_that_ended_early_says_so_to_a_renewal(self, pair: Pair) -> None:
        """Its SourceLost was lost, or overtaken: the reader heard that the lease had expired."""
        load = pair.d.want("r", pair.router_ticket())
        source = pair.p.begin()
        pair.p.chunk(source, 1)
        pair.settle()
        pair.lose(SourceLost)
        pair.p.tell(ev.SourceEnded(source.lease, Reason.PINS_FULL))
        pair.p.tell(ev.Discarded(source.handoff))
        pair.run(5.1)
        assert why(load) is Reason.PINS_FULL

    def test_a_source_that_ended_early_says_so_to_an_offer(self, pair: Pair) -> None:
        pair.d.habits.allocates = False
        load = pair.d.want("r", pair.router_ticket(), push=True)
        source = pair.p.begin()
        pair.settle()
        pair.lose(SourceLost)
        pair.p.tell(ev.SourceEnded(source.lease, Reason.PINS_FULL))
        pair.d.allocate("r")
        pair.settle()
        assert why(load) is Reason.PINS_FULL

    def test_a_source_that_ends_tells_nobody_who_has_left(self, make_pair: Make) -> None:
        pair = make_pair("p", "d", "e")
        source = pair.p.begin(max_readers=2)
        pair.d.want("r", pair.router_ticket())
        pair.e.want("q", pair.router_ticket())
        pair.settle()
        pair.e.give_up("q")
        pair.settle()
        pair.p.tell(ev.SourceEnded(source.lease, Reason.SOURCE_PREEMPTED))
        assert len(pair.said(SourceLost)) == 1

    def test_a_request_that_ends_before_its_last_chunk_is_computed_ends_early(self, pair: Pair) -> None:
        """Listed is not ready: an abort may come between the last schedule and the device's last step."""
        load = pair.d.want("r", pair.router_ticket())
        source = pair.p.begin()
        pair.p.chunk(source, 3, ready=False)
        pair.p.complete(source)
        pair.settle()
        pair.p.tell(ev.SourceEnded(source.lease, Reason.SOURCE_ABORTED))
        pair.settle()
        assert why(load) is Reason.SOURCE_ABORTED and len(pair.done(Unpin)) == 1

    def test_the_end_of_a_request_that_is_complete_is_not_early(self, pair: Pair) -> None:
        """P's engine is done with the request; the lease lives on for its readers."""
        pair.d.habits.copies = False
        source = pair.p.stream()
        load = pair.d.want("r", pair.router_ticket())
        pair.settle()
        pair.p.tell(ev.SourceEnded(source.lease, Reason.SOURCE_ABORTED))
        pair.d.finish()
        pair.settle()
        assert delivered(load)


class TestEngineEvents:
    """Events of P's engine that come for a lease which is over, or twice, harm nobody (promise 4)."""

    def test_events_of_a_lease_that_is_over_are_ignored(self, pair: Pair) -> None:
        source = pair.p.begin()
        pair.p.tell(ev.SourceEnded(source.lease, Reason.SOURCE_PREEMPTED))
        before = dict(pair.p.counts)
        pair.p.tell(
            ev.LeaseExtended(source.lease, ((1,),), ((0,),)),
            ev.LeaseProgressed(source.lease, 0, whole([1])),
            ev.LeaseCompleted(source.lease),
            ev.SourceEnded(source.lease, Reason.SOURCE_PREEMPTED),
        )
        assert dict(pair.p.counts) == before and len(pair.done(Unpin)) == 1

    def test_blocks_after_the_last_one_are_the_engine_s_mistake(self, pair: Pair) -> None:
        source = pair.p.stream(deferred=False)
        pair.p.tell(ev.LeaseExtended(source.lease, ((9,),), ((0,),)), ev.LeaseCompleted(source.lease))
        assert pair.p.counts["illegal.lease"] == 2
        assert pair.p.ledger.producer.leases[source.lease].blocks == ([1, 2, 3],)

    def test_the_same_progress_again_is_no_news(self, pair: Pair) -> None:
        pair.d.want("r", pair.router_ticket())
        source = pair.p.begin()
        pair.p.chunk(source, 1)
        pair.settle()
        said = len(pair.said(Ready))
        pair.p.progress(source, whole([1]))
        assert len(pair.said(Ready)) == said

    def test_a_lease_too_many_is_let_go_at_once(self, make_pair: Make) -> None:
        pair = make_pair(settings=Settings(leases_max=1))
        pair.p.grant(1)
        ticket = pair.p.grant(2)
        assert pair.done(Unpin) == [Unpin(LeaseId(2))] and pair.p.counts["lease_refused.busy"] == 1
        load = pair.d.want("r", ticket, 2)
        pair.settle()
        assert why(load) is Reason.BUSY

    def test_a_claim_that_waits_for_a_lease_too_many_is_refused_with_it(self, make_pair: Make) -> None:
        """It waited for `defer_timeout`, for what would never begin (found by the simulator, seed 143)."""
        pair = make_pair(settings=Settings(leases_max=1))
        pair.p.grant(1)
        load = pair.d.want("r", pair.router_ticket(2), 2)
        pair.settle()
        assert len(pair.p.ledger.producer.parked) == 1
        pair.p.begin(2)
        pair.settle()
        assert why(load) is Reason.BUSY and pair.now < Settings().defer_timeout
        assert not pair.p.ledger.producer.parked and len(pair.p.ledger.desk.timers) == 1

    def test_a_claim_that_was_given_up_hears_nothing_of_a_lease_too_many(self, make_pair: Make) -> None:
        pair = make_pair(settings=Settings(leases_max=1))
        pair.p.grant(1)
        pair.d.want("r", pair.router_ticket(2), 2)
        pair.settle()
        pair.give_up()
        pair.p.begin(2)
        pair.settle()
        assert not pair.said(ClaimRefused) and not pair.p.ledger.producer.parked

    def test_a_second_live_use_of_a_transfer_id_is_refused(self, pair: Pair) -> None:
        """Rule 1: each side accepts an id once per attempt."""
        load = pair.d.want("r", pair.router_ticket())
        pair.p.begin(1)
        pair.p.begin(1, content=9)
        assert pair.done(Unpin) == [Unpin(LeaseId(2))] and pair.p.counts["lease_refused.duplicate"] == 1
        pair.settle()
        assert load.found == 1

    def test_a_transfer_id_may_be_tried_again_after_its_end(self, pair: Pair) -> None:
        source = pair.p.begin(1)
        pair.p.tell(ev.SourceEnded(source.lease, Reason.SOURCE_PREEMPTED))
        pair.p.stream(1)
        load = pair.d.want("r", pair.router_ticket())
        pair.settle()
        assert delivered(load)


def test_a_session_that_ends_takes_its_readers_along_and_no_others(make_pair: Make) -> None:
    """Goodbye, and rule 3: everything held for the old life ends."""
    pair = make_pair("p", "d", "e")
    for party in (pair.d, pair.e):
        party.habits.copies = False
    ticket = pair.p.grant(max_readers=2)
    pair.d.want("r", ticket)
    other = pair.e.want("q", ticket)
    pair.settle()
    pair.d.leave()
    pair.settle()
    assert not pair.done(Unpin)
    pair.e.finish()
    pair.settle()
    assert delivered(other) and len(pair.done(Unpin)) == 1


class TestDeparted:
    """The registry says that a worker is gone: what was meant for it alone is let go at once."""

    def test_a_lease_for_a_worker_that_is_gone_is_released(self, pair: Pair) -> None:
        pair.p.stream(1, target="d")
        pair.p.stream(2, target="e")
        pair.p.stream(3)
        pair.p.tell(ev.Departed(WorkerId("d")))
        assert pair.done(Unpin) == [Unpin(LeaseId(1))]
        late = pair.d.want("r", pair.router_ticket())
        pair.settle()
        assert why(late) is Reason.PEER_GONE

    def test_a_lease_that_a_new_life_of_that_worker_reads_is_kept(self, pair: Pair) -> None:
        """Word of the old life's end may come after the new one has claimed."""
        pair.d.habits.copies = False
        pair.p.stream(target="d")
        load = pair.d.want("r", pair.router_ticket())
        pair.settle()
        pair.p.tell(ev.Departed(pair.d.name, Incarnation(12345)))
        assert not pair.done(Unpin)
        pair.d.finish()
        pair.settle()
        assert delivered(load)

    def test_a_lease_for_a_worker_that_lives_on_is_kept(self, pair: Pair) -> None:
        pair.d.want("q", pair.p.grant(2), 2)
        pair.settle()
        pair.p.stream(1, target="d")
        pair.p.tell(ev.Departed(pair.d.name, Incarnation(12345)))
        assert len(pair.done(Unpin)) == 1, "only the one that was read"

    def test_a_worker_that_cannot_be_reached_now_may_come_back(self, pair: Pair) -> None:
        pair.p.stream(target="d")
        pair.p.tell(ev.Departed(pair.d.name, reason=Reason.PEER_UNKNOWN))
        assert not pair.done(Unpin)


def test_reading_for_a_prompt_of_no_blocks_is_delivered(pair: Pair) -> None:
    """Nothing to copy is still judged."""
    load = pair.d.want("r", pair.p.grant(tokens=0), tokens=0)
    pair.settle()
    assert delivered(load) and len(pair.said(Commit)) == 1


def test_a_match_that_fails_is_told_once(pair: Pair) -> None:
    pair.d.want("r", pair.p.grant(), content=99)
    pair.run(60)
    assert len(pair.done(MatchFailed)) == 1 and not pair.done(MatchFound)


class TestTakingBack:
    """Promise 1: ready only grows, and what a replaced cache held is vouched for by nobody."""

    def test_a_rank_s_late_word_on_a_layer_takes_nothing_back(self, pair: Pair) -> None:
        """A rank tells of its layers itself; the engine's word on the whole chunk may overtake it."""
        load = pair.d.want("r", pair.router_ticket())
        source = pair.p.begin()
        pair.p.chunk(source, 3)
        pair.p.progress(source, (GroupProgress(0, 3, 1),) * len(pair.p.shape.group_layers))
        pair.settle()
        pair.p.complete(source)
        pair.settle()
        assert delivered(load)

    def test_a_replaced_cache_ends_its_leases_and_refuses_their_tickets(self, pair: Pair) -> None:
        ticket = pair.p.grant()
        pair.p.tell(ev.CacheReplaced())
        assert pair.done(Unpin) == [Unpin(LeaseId(1))]
        load = pair.d.want("r", ticket)
        pair.settle()
        assert why(load) is Reason.UNKNOWN_LEASE

    def test_a_claim_for_what_a_replaced_cache_was_streaming_is_refused_at_once(self, pair: Pair) -> None:
        """It does not wait until `defer_timeout` for a lease that was begun, and is over."""
        pair.p.stream()
        pair.p.tell(ev.CacheReplaced())
        load = pair.d.want("r", pair.router_ticket())
        pair.settle()
        assert why(load) is Reason.UNKNOWN_LEASE

    def test_a_claim_that_came_before_its_prompt_outlives_a_replaced_cache(self, pair: Pair) -> None:
        """P computes that prompt with the new one."""
        load = pair.d.want("r", pair.router_ticket())
        pair.settle()
        pair.p.tell(ev.CacheReplaced())
        pair.p.stream()
        pair.settle()
        assert delivered(load)

    def test_a_discarded_handoff_stays_so_when_the_cache_is_replaced(self, pair: Pair) -> None:
        pair.p.tell(ev.Discarded(transfer(1)))
        pair.p.tell(ev.CacheReplaced())
        pair.p.stream()
        assert pair.done(Unpin) == [Unpin(LeaseId(1))]

    def test_a_replaced_cache_is_no_other_life(self, pair: Pair) -> None:
        """Rule 3: what it held ends, as with a new incarnation; sessions, and what is leased from then on, do not."""
        before = pair.d.want("before", pair.p.grant())
        pair.settle()
        me, greetings = pair.p.me, len(pair.said(Hello))
        pair.p.tell(ev.CacheReplaced())
        after = pair.d.want("after", pair.p.grant(2), 2)
        pair.settle()
        assert delivered(before) and delivered(after)
        assert pair.p.me == me and len(pair.said(Hello)) == greetings

    def test_a_replaced_cache_wants_nothing_that_was_on_its_way(self, pair: Pair) -> None:
        load = pair.d.want("r", pair.router_ticket())
        pair.settle()
        pair.d.tell(ev.CacheReplaced())
        pair.settle()
        assert why(load) is Reason.ABORTED
