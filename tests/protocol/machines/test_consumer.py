"""D's role: every want is answered, every load has one report and one drop, every failure one reason (promise 2, 3)."""

from __future__ import annotations

import msgspec
import pytest
from pair import Make, Pair
from party import Load, delivered, transfer, why

from kvbaton.protocol import events as ev
from kvbaton.protocol.effects import CancelCopy, Capabilities, DropHold, MatchFailed, MatchFound, Report, StartCopy
from kvbaton.protocol.errors import Reason
from kvbaton.protocol.geometry.progress import GroupProgress, whole
from kvbaton.protocol.ids import JobId, LeaseId, RequestId, ReservationId, WorkerId
from kvbaton.protocol.machines.context import Moving
from kvbaton.protocol.machines.inbound import IntakeState
from kvbaton.protocol.settings import Settings
from kvbaton.protocol.wire.codec import pack_blocks
from kvbaton.protocol.wire.messages import (
    Abandon,
    Accepted,
    Ack,
    Claim,
    ClaimRefused,
    Commit,
    Committed,
    Feature,
    Granted,
    Hello,
    Offer,
    Quiesced,
    Ready,
    Renew,
    Renewed,
    RenewRefused,
    Revoke,
    SourceLost,
    Stale,
    Written,
)
from kvbaton_proof.sim.world.sim_memory import Shape
from kvbaton_proof.sim.world.sim_transport import CMA, RDMA


def state(pair: Pair) -> IntakeState:
    (intake,) = pair.d.ledger.consumer.by_handoff.values()
    return intake.state


def at(pair: Pair, wanted: IntakeState) -> Load:
    """A handoff that stays in that state until the test moves it."""
    push = wanted in (IntakeState.OFFERED, IntakeState.REVOKING)
    pair.d.habits.copies = pair.p.habits.copies = pair.d.habits.fences = False
    if wanted is IntakeState.GREETING:
        pair.lose(Hello, times=999)
    elif wanted is IntakeState.CLAIMING:
        pair.lose(Claim, times=999)
    elif wanted is IntakeState.GRANTED:
        pair.d.habits.allocates = False
    elif wanted is IntakeState.COMMITTING:
        pair.d.habits.copies = True
        pair.lose(Commit, times=999)
    load = pair.d.want("r", pair.router_ticket(), push=push)
    pair.p.stream()
    pair.settle()
    if wanted in (IntakeState.REVOKING, IntakeState.SETTLING):
        pair.give_up()
    assert state(pair) is wanted
    return load


LIVE = [
    IntakeState.GREETING,
    IntakeState.CLAIMING,
    IntakeState.GRANTED,
    IntakeState.COPYING,
    IntakeState.COMMITTING,
    IntakeState.OFFERED,
]


class TestWanting:
    """Every Wanted is followed by MatchFound or MatchFailed."""

    def test_a_match_is_found_when_p_has_begun(self, pair: Pair) -> None:
        """Rule 12: D holds no blocks for a P that has not begun."""
        pair.d.want("r", pair.router_ticket())
        pair.run(3)
        assert not pair.done(MatchFound)
        pair.p.begin()
        pair.settle()
        assert pair.done(MatchFound) == [MatchFound(RequestId("r"))]

    def test_the_same_handoff_twice_is_refused_while_it_lives(self, pair: Pair) -> None:
        """Rule 1."""
        first = at(pair, IntakeState.COPYING)
        second = pair.d.want("s", pair.router_ticket())
        assert why(second) is Reason.DUPLICATE and first.end is None

    def test_the_same_request_twice_is_refused(self, pair: Pair) -> None:
        pair.d.habits.acknowledges = False
        pair.d.want("r", pair.p.grant())
        pair.d.tell(ev.Wanted(RequestId("r"), pair.p.sources[LeaseId(1)].handoff, pair.p.name, "", b"", 5))
        assert [effect.end.reason for effect in pair.done(MatchFailed)] == [Reason.DUPLICATE]
        pair.d.loads[RequestId("r")].failed = None
        pair.settle()

    def test_more_than_the_bound_is_busy(self, make_pair: Make) -> None:
        pair = make_pair(settings=Settings(intakes_max=1))
        pair.d.want("r", pair.router_ticket(1), 1)
        late = pair.d.want("s", pair.router_ticket(2), 2)
        assert why(late) is Reason.BUSY
        assert late.failed is not None and late.failed.detail == "intakes_max: 1 handoffs are on their way"

    def test_a_handoff_over_an_open_link_is_claimed_at_once(self, pair: Pair) -> None:
        pair.d.want("r", pair.p.grant(1), 1)
        pair.settle()
        pair.d.want("s", pair.p.grant(2), 2)
        assert len(pair.said(Claim)) == 2 and len(pair.said(Hello)) == 1


class TestGivingUp:
    """NotNeeded and GaveUp in every state: one end, everything let go, P told."""

    @pytest.mark.parametrize("wanted", LIVE)
    @pytest.mark.parametrize("event", [ev.NotNeeded, ev.GaveUp])
    def test_a_handoff_that_is_not_wanted_ends_as_aborted(
        self, pair: Pair, wanted: IntakeState, event: type[ev.NotNeeded | ev.GaveUp]
    ) -> None:
        load = at(pair, wanted)
        pair.d.tell(event(RequestId("r")))
        pair.settle()
        assert why(load) is Reason.ABORTED
        loading = wanted in (IntakeState.COPYING, IntakeState.COMMITTING, IntakeState.OFFERED)
        assert len(pair.done(Report)) == int(loading) and len(pair.done(MatchFailed)) == int(not loading)
        told = {IntakeState.GREETING: [], IntakeState.OFFERED: ["Revoke"]}.get(wanted, ["Abandon"])
        said = [*pair.said(Abandon), *pair.said(Revoke)]
        assert [(type(message).__name__, message.reason) for message in said] == [(name, "aborted") for name in told]

    @pytest.mark.parametrize("wanted", [*LIVE, IntakeState.SETTLING, IntakeState.REVOKING])
    def test_giving_up_again_changes_nothing(self, pair: Pair, wanted: IntakeState) -> None:
        at(pair, wanted)
        for _ in range(3):
            pair.d.give_up("r")
            pair.d.not_needed("r")
        assert len(pair.done(Report)) + len(pair.done(MatchFailed)) == 1

    def test_a_request_that_nobody_knows_is_no_news(self, pair: Pair) -> None:
        pair.d.give_up("unknown")
        pair.d.not_needed("unknown")
        assert not pair.log


class TestTimingOut:
    """Promise 2: by its deadline, with what it had waited for as the reason."""

    @pytest.mark.parametrize(
        ("wanted", "seconds", "reason"),
        [
            (IntakeState.GREETING, 10, Reason.HANDSHAKE_TIMEOUT),
            (IntakeState.CLAIMING, 60, Reason.DEFER_TIMEOUT),
            (IntakeState.COPYING, 30, Reason.TRANSFER_TIMEOUT),
            (IntakeState.COMMITTING, 10, Reason.TRANSFER_TIMEOUT),
            (IntakeState.OFFERED, 30, Reason.TRANSFER_TIMEOUT),
            (IntakeState.GRANTED, 60, Reason.DEFER_TIMEOUT),
        ],
    )
    def test_each_state_has_its_own(self, pair: Pair, wanted: IntakeState, seconds: float, reason: Reason) -> None:
        load = at(pair, wanted)
        pair.run(seconds - 0.1)
        assert load.end is None and load.failed is None
        pair.run(0.2)
        assert why(load) is reason

    def test_a_pull_waits_less_long_for_an_answer(self, pair: Pair) -> None:
        pair.lose(Claim, times=999)
        load = pair.d.want("r", pair.p.grant())
        pair.run(10.1)
        assert why(load) is Reason.CLAIM_TIMEOUT
        assert load.failed is not None and load.failed.detail == "waited too long while claiming"

    def test_a_greeting_that_outlasts_the_claim_s_time_is_a_handshake_that_did_not_answer(
        self, make_pair: Make
    ) -> None:
        pair = make_pair()
        pair.lose(Hello, times=999)
        pair.d.want("first", pair.router_ticket(1), 1)
        pair.run(5)
        load = pair.d.want("r", pair.router_ticket(2), 2, deferred=False)
        pair.run(5.1)
        assert why(load) is Reason.HANDSHAKE_TIMEOUT

    def test_progress_keeps_a_copy_alive(self, pair: Pair) -> None:
        load = pair.d.want("r", pair.router_ticket())
        source = pair.p.begin()
        pair.settle()
        for _ in range(3):
            pair.run(25)
            pair.p.chunk(source, 1)
            pair.settle()
        pair.p.complete(source)
        pair.settle()
        assert delivered(load)

    def test_what_p_gets_done_keeps_a_push_alive(self, pair: Pair) -> None:
        load = pair.d.want("r", pair.router_ticket(), push=True)
        source = pair.p.begin()
        pair.settle()
        for _ in range(3):
            pair.run(25)
            pair.p.chunk(source, 1)
            pair.settle()
        pair.p.complete(source)
        pair.settle()
        assert delivered(load)
        assert max(message.work for message in pair.said(Renewed)) >= 2

    def test_no_progress_takes_a_load_past_max_hold(self, make_pair: Make) -> None:
        pair = make_pair("d", settings=Settings(max_hold_s=40.0))
        pair.add("p", settings=Settings(max_hold_s=400.0))
        load = pair.d.want("r", pair.router_ticket())
        source = pair.p.begin(tokens=5)
        pair.settle()
        for _ in range(2):
            pair.run(18)
            pair.p.chunk(source, 1)
        pair.run(4.1)
        assert why(load) is Reason.TRANSFER_TIMEOUT

    def test_claims_are_repeated_until_answered(self, pair: Pair) -> None:
        at(pair, IntakeState.CLAIMING)
        pair.run(5)
        assert len(pair.said(Claim)) == 11


class TestGranted:
    def test_a_grant_that_nobody_waits_for_is_given_back(self, pair: Pair) -> None:
        pair.hold(Granted)
        pair.pull()
        pair.d.not_needed("r")
        pair.lose(Abandon, times=1)
        pair.settle()
        pair.release(Granted)
        assert len(pair.said(Abandon)) == 2 and pair.d.counts["late.granted"] == 1

    def test_a_grant_for_another_handoff_is_ignored(self, pair: Pair) -> None:
        pair.hold(Granted)
        load = pair.pull()
        pair.inject("p", "d", msgspec.structs.replace(pair.said(Granted)[0], handoff=transfer(9)))
        assert load.found == 0 and pair.d.counts["late.granted"] == 1
        pair.release()
        assert delivered(load)

    @pytest.mark.parametrize(
        ("changes", "reason"),
        [
            ({"blocks": ()}, Reason.BAD_MESSAGE),
            ({"progress": ()}, Reason.BAD_MESSAGE),
            ({"blocks": (b"\0" * 5,)}, Reason.BAD_MESSAGE),
            ({"tokens": 6}, Reason.CONTENT_MISMATCH),
            ({"blocks": (pack_blocks([1]),)}, Reason.BAD_MESSAGE),
            ({"progress": whole([2])}, Reason.BAD_MESSAGE),
        ],
    )
    def test_a_grant_that_does_not_fit_fails_the_handoff(
        self, pair: Pair, changes: dict[str, object], reason: Reason
    ) -> None:
        pair.lose(Granted, times=1)
        load = pair.pull()
        pair.inject("p", "d", msgspec.structs.replace(pair.said(Granted)[0], **changes))
        assert why(load) is reason and not pair.done(MatchFound)

    def test_blocks_that_p_has_not_got_fail_the_load(self, pair: Pair) -> None:
        pair.lose(Granted, times=1)
        load = pair.pull()
        pair.inject("p", "d", msgspec.structs.replace(pair.said(Granted)[0], blocks=(pack_blocks([1, 2, 10_000]),)))
        assert why(load) is Reason.BAD_SPAN and load.drops == 1 and not pair.done(StartCopy)

    def test_a_late_refusal_changes_nothing(self, pair: Pair) -> None:
        load = at(pair, IntakeState.COPYING)
        refusal = ClaimRefused(pair.p.sources[LeaseId(1)].handoff, 1, Reason.BUSY, "")
        pair.inject("p", "d", refusal)
        pair.inject("p", "d", msgspec.structs.replace(refusal, attempt=99))
        assert load.end is None and pair.d.counts["late.claim_refused"] == 2


class TestAllocated:
    """Every Allocated has exactly one Report and one DropHold, whenever it comes."""

    @pytest.mark.parametrize("seen", [False, True])
    def test_blocks_for_a_handoff_that_has_ended_meanwhile_are_reported_and_dropped(
        self, pair: Pair, seen: bool
    ) -> None:
        """`seen`: the engine's word that it had seen the failure has come before."""
        load = at(pair, IntakeState.GRANTED)
        pair.d.habits.acknowledges = False
        pair.p.leave()
        pair.settle()
        assert why(load) is Reason.PEER_GONE
        if seen:
            pair.d.not_needed("r")
        load.failed = None  # the engine had not looked yet when it allocated
        pair.d.allocate("r")
        assert load.end is not None and load.drops == 1
        assert load.end.reason is (Reason.ABORTED if seen else Reason.PEER_GONE)

    def test_blocks_for_a_handoff_that_is_not_at_rest_yet_are_let_go_with_it(self, pair: Pair) -> None:
        load = at(pair, IntakeState.SETTLING)
        assert load.end is not None and not load.drops
        pair.d.finish()
        assert load.drops == 1

    @pytest.mark.parametrize("push", [False, True])
    def test_a_second_allocation_of_a_load_is_the_engine_s_mistake(self, pair: Pair, push: bool) -> None:
        load = at(pair, IntakeState.OFFERED if push else IntakeState.COPYING)
        assert load.blocks is not None
        pair.d.tell(ev.Allocated(RequestId("r"), load.blocks, 0))
        assert pair.d.counts["illegal.intake"] == 1 and len(pair.done(Report)) == 0

    def test_a_load_may_begin_behind_what_d_has_already(self, pair: Pair) -> None:
        pair.d.habits.allocates = False
        load = pair.pull()
        pair.d.allocate("r", first_token=2)
        pair.settle()
        assert delivered(load) and load.blocks == ((1, 2),)

    def test_a_push_may_begin_behind_what_d_has_already(self, pair: Pair) -> None:
        pair.d.habits.allocates = False
        load = pair.d.want("r", pair.router_ticket(), push=True)
        pair.p.stream()
        pair.settle()
        pair.d.allocate("r", first_token=4)
        pair.settle()
        assert delivered(load) and pair.said(Offer)[0].first_token == 4


class TestBlocksBeforeTheGrant:
    """An engine may find blocks while the claim of a finished prompt is on its way; rule 12: nothing is read before."""

    @pytest.mark.parametrize("wanted", [IntakeState.GREETING, IntakeState.CLAIMING])
    def test_the_grant_begins_the_copy_and_nobody_is_told_of_a_match(self, pair: Pair, wanted: IntakeState) -> None:
        lost = Hello if wanted is IntakeState.GREETING else Claim
        pair.lose(lost, times=1)
        load = pair.pull()
        assert state(pair) is wanted
        pair.d.allocate("r", first_token=2)
        assert not pair.done(StartCopy)
        pair.run(Settings().retry_s * 3)
        assert delivered(load) and load.drops == 1 and not pair.done(MatchFound)

    def test_a_claim_that_is_refused_then_is_reported_once(self, pair: Pair) -> None:
        pair.lose(Claim, times=1)
        load = pair.d.want("r", pair.p.grant(), tokens=4)
        pair.settle()
        pair.d.allocate("r")
        pair.run(Settings().retry_s * 3)
        assert why(load) is Reason.CONTENT_MISMATCH and load.failed is None and load.drops == 1

    def test_one_that_is_never_answered_ends_by_the_claim_s_deadline(self, pair: Pair) -> None:
        pair.lose(Claim, times=999)
        load = pair.pull()
        pair.d.allocate("r")
        pair.run(Settings().claim_timeout + 1)
        assert why(load) is Reason.CLAIM_TIMEOUT and load.failed is None and load.drops == 1

    def test_blocks_are_not_held_for_it_past_the_limit(self, make_pair: Make) -> None:
        """Found by the simulator: the limit was armed with the answer, which did not come."""
        pair = make_pair("p", "d", settings=Settings(claim_timeout=10.0, lease_s=1.0, max_hold_s=2.0))
        pair.lose(Claim, times=999)
        load = pair.pull()
        pair.d.allocate("r")
        pair.run(2.1)
        assert why(load) is Reason.CLAIM_TIMEOUT and load.drops == 1

    def test_an_engine_that_gives_it_up_gets_its_report(self, pair: Pair) -> None:
        pair.lose(Claim, times=999)
        load = pair.pull()
        pair.d.allocate("r")
        pair.give_up()
        assert why(load) is Reason.ABORTED and load.drops == 1

    def test_a_push_is_offered_with_the_grant(self, pair: Pair) -> None:
        load = pair.d.want("r", pair.router_ticket(), push=True)
        pair.settle()
        pair.d.allocate("r")
        assert not pair.said(Offer)
        pair.p.stream()
        pair.settle()
        assert delivered(load) and pair.said(Offer)


class TestReady:
    """Rule 10 at the reader: lost, doubled and overtaking news of readiness."""

    def reading(self, pair: Pair) -> tuple[Load, object]:
        load = pair.d.want("r", pair.router_ticket())
        source = pair.p.begin()
        pair.settle()
        return load, source

    def test_news_that_were_overtaken_are_ignored(self, pair: Pair) -> None:
        load, source = self.reading(pair)
        pair.hold(Ready)
        pair.p.chunk(source, 1)  # type: ignore[arg-type]
        pair.lose(Ready)  # the second says "from block 1 on", and would leave a gap
        pair.p.chunk(source, 1)  # type: ignore[arg-type]
        pair.run(5)
        pair.release(Ready)
        pair.p.chunk(source, 1)  # type: ignore[arg-type]
        pair.p.complete(source)  # type: ignore[arg-type]
        pair.run(1)
        assert delivered(load)

    def test_a_gap_waits_for_the_next_renewal(self, pair: Pair) -> None:
        load, source = self.reading(pair)
        pair.lose(Ready)
        pair.p.chunk(source, 1)  # type: ignore[arg-type]
        pair.p.chunk(source, 2)  # type: ignore[arg-type]
        pair.settle()
        assert not pair.done(StartCopy)
        pair.p.complete(source)  # type: ignore[arg-type]
        pair.run(5.1)
        assert delivered(load)

    def test_a_doubled_ready_is_copied_once(self, pair: Pair) -> None:
        load, source = self.reading(pair)
        pair.double(Ready, times=9)
        pair.p.chunk(source, 3)  # type: ignore[arg-type]
        pair.p.complete(source)  # type: ignore[arg-type]
        pair.settle()
        assert delivered(load) and pair.d.counts["copies"] == 1

    def test_layers_come_with_loss_and_out_of_order(self, pair: Pair) -> None:
        load, source = self.reading(pair)
        pair.p.chunk(source, 3, ready=False)  # type: ignore[arg-type]
        pair.hold(Ready)
        pair.p.progress(source, (GroupProgress(0, 1, 1),))  # type: ignore[arg-type]
        pair.p.progress(source, (GroupProgress(0, 3, 1),))  # type: ignore[arg-type]
        pair.release(Ready)
        pair.lose(Ready)
        pair.p.progress(source, whole([3]))  # type: ignore[arg-type]
        pair.p.complete(source)  # type: ignore[arg-type]
        pair.run(6)
        assert delivered(load)

    @pytest.mark.parametrize(
        "changes",
        [
            {"blocks": ()},
            {"start": (0, 0)},
            {"progress": ()},
            {"blocks": (b"\0",)},
            {"progress": (GroupProgress(9),)},
            {"progress": (GroupProgress(1, 0, 1),)},
            {"progress": (GroupProgress(1, 1, 77),)},
        ],
    )
    def test_nonsense_about_readiness_fails_the_handoff(self, pair: Pair, changes: dict[str, object]) -> None:
        load, source = self.reading(pair)
        pair.lose(Ready)
        pair.p.chunk(source, 1)  # type: ignore[arg-type]
        pair.inject("p", "d", msgspec.structs.replace(pair.said(Ready)[0], **changes))
        assert why(load) in (Reason.BAD_MESSAGE, Reason.BAD_SPAN)

    def test_blocks_learnt_before_d_has_its_own_are_checked_when_it_reads(self, pair: Pair) -> None:
        pair.d.habits.allocates = False
        load, source = self.reading(pair)
        pair.lose(Ready)
        pair.p.chunk(source, 1)  # type: ignore[arg-type]
        ready = msgspec.structs.replace(pair.said(Ready)[0], blocks=(pack_blocks([10_000]),))
        pair.inject("p", "d", ready)
        assert load.failed is None
        pair.d.allocate("r")
        assert why(load) is Reason.BAD_SPAN

    def test_more_blocks_than_the_prompt_has_are_not_remembered(self, pair: Pair) -> None:
        load, source = self.reading(pair)
        pair.lose(Ready)
        pair.p.chunk(source, 1)  # type: ignore[arg-type]
        ready = msgspec.structs.replace(pair.said(Ready)[0], blocks=(pack_blocks(range(9)),))
        pair.inject("p", "d", ready)
        assert why(load) is Reason.BAD_MESSAGE

    def test_readiness_of_another_lease_or_reader_is_late(self, pair: Pair) -> None:
        load, source = self.reading(pair)
        pair.lose(Ready)
        pair.p.chunk(source, 1)  # type: ignore[arg-type]
        ready = pair.said(Ready)[0]
        pair.inject("p", "d", msgspec.structs.replace(ready, lease=LeaseId(9)))
        pair.inject("p", "d", msgspec.structs.replace(ready, attempt=9))
        assert pair.d.counts["late.ready"] == 2 and not pair.done(StartCopy) and load.end is None

    def test_a_push_learns_of_readiness_without_reading(self, pair: Pair) -> None:
        load = at(pair, IntakeState.OFFERED)
        lease = pair.p.ledger.producer.leases[LeaseId(1)]
        pair.inject("p", "d", Ready(lease.id, 1, (3,), (b"",), whole([3]), True))
        assert not pair.done(StartCopy, "d") and load.end is None


class TestRenewing:
    """D renews from its own loop, never from the engine's step."""

    def test_a_lease_is_renewed_while_d_waits_for_blocks_and_while_it_reads(self, pair: Pair) -> None:
        at(pair, IntakeState.GRANTED)
        pair.run(16)
        assert len(pair.said(Renew)) == 3
        assert all(message.final for message in pair.said(Renew))

    def test_a_reader_of_a_stream_asks_more_often(self, pair: Pair) -> None:
        pair.d.want("r", pair.router_ticket())
        pair.p.begin()
        pair.settle()
        pair.run(8)
        assert len(pair.said(Renew)) > 5 and not any(message.final for message in pair.said(Renew))

    def test_a_lease_that_ran_out_ends_a_handoff_without_blocks(self, pair: Pair) -> None:
        load = at(pair, IntakeState.GRANTED)
        pair.inject("p", "d", RenewRefused(LeaseId(1), 1, Reason.LEASE_EXPIRED))
        assert why(load) is Reason.LEASE_EXPIRED

    @pytest.mark.parametrize("push", [False, True])
    def test_a_lease_that_ran_out_ends_what_still_waits_for_p(self, pair: Pair, push: bool) -> None:
        """Nothing more will be ready or written: why wait for a time-out?"""
        load = pair.d.want("r", pair.router_ticket(), push=push)
        pair.p.begin()
        pair.settle()
        pair.inject("p", "d", RenewRefused(LeaseId(1), 1, Reason.LEASE_EXPIRED))
        assert why(load) is Reason.LEASE_EXPIRED

    def test_d_renews_as_often_as_p_s_terms_ask_for(self, make_pair: Make) -> None:
        """Durations travel: the two sides may be configured differently."""
        pair = make_pair("d")
        pair.add("p", settings=Settings(lease_s=3.0))
        pair.d.habits.copies = False
        load = pair.d.want("r", pair.p.grant())
        pair.run(12.5)
        assert len(pair.said(Renew)) == 12 and not pair.p.counts["leases_expired"]
        pair.d.finish()
        pair.settle()
        assert delivered(load)

    def test_an_offer_does_not_put_off_the_renewal_of_a_short_lease(self, make_pair: Make) -> None:
        """Found by the simulator once a step took longer than a lease: the offer's retry replaced the renewal."""
        pair = make_pair("d")
        pair.add("p", settings=Settings(lease_s=0.3))
        load = pair.d.want("r", pair.router_ticket(), push=True)
        pair.p.begin()
        pair.run(2.0)
        assert pair.said(Offer) and pair.d.ledger.desk.settings.retry_s > 0.3
        assert not pair.p.counts["leases_expired"] and load.end is None

    def test_an_offer_just_before_a_renewal_leaves_it_where_it_was(self, make_pair: Make) -> None:
        """Seed 888: begun anew with the offer, the pause between two renewals was nearly two thirds of the term."""
        pair = make_pair("d")
        pair.add("p", settings=Settings(lease_s=3.0))
        pair.d.habits.allocates = pair.p.habits.copies = False
        pair.d.want("r", pair.p.grant(), push=True)
        pair.run(0.9)
        assert not pair.said(Renew)
        pair.d.allocate("r")
        pair.run(0.2)
        assert pair.said(Offer) and len(pair.said(Renew)) == 1

    @pytest.mark.parametrize("ttl_s", [float("nan"), float("inf"), -1.0, 0.0, 1e300, 5e-324, 1e-300, 0.0009])
    def test_terms_that_are_none_are_not_believed(self, pair: Pair, ttl_s: float) -> None:
        """NaN in a heap of deadlines would be the end of promise 2; 1e-300 s kept D at one instant for ever."""
        pair.d.habits.allocates = False
        pair.lose(Granted)
        load = pair.pull()
        pair.inject("p", "d", msgspec.structs.replace(pair.said(Granted)[0], ttl_s=ttl_s))
        pair.inject("p", "d", Renewed(LeaseId(1), 1, ttl_s, 0))
        assert pair.d.counts["frames_refused.bad_message"] == 2
        pair.run(6.1)
        assert len(pair.said(Renew)) == 1 and load.failed is None

    def test_a_source_with_the_shortest_term_does_not_have_d_talk_without_end(self, pair: Pair) -> None:
        """D decides how often it speaks: 20 times a second at most, whatever P says that its terms are."""
        load = at(pair, IntakeState.COPYING)
        pair.inject("p", "d", Renewed(LeaseId(1), 1, 0.001, 0))
        pair.lose(Renewed, times=1000)
        pair.run(1.0)
        assert len(pair.said(Renew)) <= 20
        pair.d.finish()
        pair.settle()
        assert delivered(load)

    def test_a_lease_that_ran_out_does_not_end_a_copy(self, pair: Pair) -> None:
        """Its commit will be judged by the epochs."""
        load = at(pair, IntakeState.COPYING)
        pair.inject("p", "d", RenewRefused(LeaseId(1), 1, Reason.LEASE_EXPIRED))
        pair.inject("p", "d", RenewRefused(LeaseId(1), 99, Reason.LEASE_EXPIRED))
        assert load.end is None
        pair.d.finish()
        pair.settle()
        assert delivered(load)

    def test_old_news_of_work_do_not_prolong(self, pair: Pair) -> None:
        load = at(pair, IntakeState.OFFERED)
        pair.inject("p", "d", Renewed(LeaseId(1), 1, 15.0, 7))
        pair.run(20)
        pair.inject("p", "d", Renewed(LeaseId(1), 1, 15.0, 7))
        pair.inject("p", "d", Renewed(LeaseId(1), 99, 15.0, 8))
        pair.run(10.5)
        assert why(load) is Reason.TRANSFER_TIMEOUT

    def test_an_offer_is_repeated_until_it_is_accepted(self, pair: Pair) -> None:
        pair.lose(Accepted, times=3)
        at(pair, IntakeState.OFFERED)
        pair.run(10)
        assert len(pair.said(Offer)) == 4


class TestCopying:
    """Rules 17 and 18: the first failure ends it, and D's blocks wait for rest."""

    def test_the_first_failed_rank_ends_the_handoff_and_the_last_rank_at_rest_frees_it(self, make_pair: Make) -> None:
        pair = make_pair(shape=Shape(ranks=2))
        load = at(pair, IntakeState.COPYING)
        first, second = pair.d.copies
        pair.d.finish(first, Reason.TRANSFER_FAILED)
        assert why(load) is Reason.TRANSFER_FAILED and not load.drops
        assert [effect.job for effect in pair.done(CancelCopy)] == [second]
        pair.d.finish(second)
        assert load.drops == 1

    def test_a_copy_that_is_not_at_rest_quarantines_its_blocks(self, pair: Pair) -> None:
        load = at(pair, IntakeState.COPYING)
        pair.d.finish(reason=Reason.TRANSFER_TIMEOUT, at_rest=False)
        pair.run(1000)
        assert why(load) is Reason.TRANSFER_TIMEOUT and not load.drops
        assert pair.d.ledger.consumer.quarantined_blocks == 3
        pair.d.rest()
        assert load.drops == 1 and pair.d.ledger.consumer.quarantined_blocks == 0

    def test_a_full_quarantine_refuses_new_handoffs(self, make_pair: Make) -> None:
        """Rule 18: blocks are never freed early."""
        pair = make_pair(settings=Settings(quarantine_blocks_max=3))
        at(pair, IntakeState.COPYING)
        pair.d.finish(reason=Reason.TRANSFER_TIMEOUT, at_rest=False)
        late = pair.d.want("s", pair.router_ticket(2), 2)
        assert why(late) is Reason.QUARANTINE_FULL
        pair.d.rest()
        again = pair.d.want("t", pair.router_ticket(3), 3)
        pair.p.stream(3)
        pair.d.habits.copies = True
        pair.run(1)
        assert delivered(again)

    def test_a_deadline_ends_a_copy_that_does_not_come_to_rest(self, pair: Pair) -> None:
        load = at(pair, IntakeState.COPYING)
        pair.run(31)
        assert why(load) is Reason.TRANSFER_TIMEOUT and not load.drops and pair.done(CancelCopy)
        pair.d.finish()
        assert load.drops == 1

    def test_a_link_that_is_lost_while_quarantined_changes_nothing(self, pair: Pair) -> None:
        load = at(pair, IntakeState.SETTLING)
        pair.d.tell(ev.Departed(pair.p.name))
        assert not load.drops and len(pair.done(Report)) == 1

    @pytest.mark.parametrize("reason", [Reason.PEER_UNKNOWN, Reason.TRANSFER_FAILED])
    def test_data_planes_that_no_longer_know_each_other_are_paired_anew(self, pair: Pair, reason: Reason) -> None:
        """One of them was fenced or closed: a link that looks up would fail every handoff from now on."""
        load = at(pair, IntakeState.COPYING)
        pair.d.finish(reason=reason)
        pair.settle()
        assert why(load) is reason
        pair.d.habits.copies = True
        again = pair.d.want("s", pair.router_ticket(2), 2)
        pair.p.stream(2)
        pair.run(1)
        assert delivered(again)
        assert len(pair.said(Hello)) == (2 if reason is Reason.PEER_UNKNOWN else 1)

    def test_word_of_a_copy_that_is_over_is_late(self, pair: Pair) -> None:
        load = at(pair, IntakeState.COPYING)
        job = next(iter(pair.d.copies))
        pair.d.finish()
        pair.settle()
        pair.d.tell(ev.CopyEnded(job, Reason.TRANSFER_FAILED), ev.CopyRested(job), ev.CopyRested(job))
        assert delivered(load) and pair.d.counts["late.copy"] == 3

    def test_a_second_end_of_a_copy_that_is_not_at_rest_is_late(self, pair: Pair) -> None:
        load = at(pair, IntakeState.COPYING)
        job = next(iter(pair.d.copies))
        pair.d.finish(reason=Reason.TRANSFER_FAILED, at_rest=False)
        pair.d.tell(ev.CopyEnded(job))
        assert pair.d.counts["late.copy"] == 1 and not load.drops

    def test_mixed_groups_ranks_and_block_sizes_are_read_in_full(self, make_pair: Make) -> None:
        pair = make_pair("p", shape=Shape(ranks=2, heads=4, group_layers=(1, 2), block_tokens=4, order="NHP"))
        pair.add("d", shape=Shape(ranks=4, heads=4, group_layers=(1, 2), block_tokens=2))
        load = pair.d.want("r", pair.p.grant(tokens=11), tokens=11)
        pair.settle()
        assert delivered(load)  # and every byte was checked


class TestCommitting:
    def test_a_committed_that_nobody_waits_for_is_late(self, pair: Pair) -> None:
        load = at(pair, IntakeState.COPYING)
        pair.inject("p", "d", Committed(LeaseId(1), 1))
        pair.inject("p", "d", Committed(LeaseId(1), 99))
        assert load.end is None, "a yes before the question proves nothing"
        assert (pair.d.counts["late.committed"], pair.d.counts["illegal.intake"]) == (2, 1)

    def test_a_stale_that_nobody_waits_for_is_late(self, pair: Pair) -> None:
        load = at(pair, IntakeState.COPYING)
        pair.inject("p", "d", Stale(LeaseId(1), 1, (0,)))
        pair.inject("p", "d", Stale(LeaseId(1), 99, (0,)))
        assert load.end is None and pair.d.counts["late.stale"] == 2

    @pytest.mark.parametrize(("good", "tokens"), [((2,), 4), ((3,), 5), ((99,), 5), ((), 0), ((1, 1), 0)])
    def test_the_good_prefix_is_counted_in_the_source_s_blocks(
        self, pair: Pair, good: tuple[int, ...], tokens: int
    ) -> None:
        """With several groups nothing can be kept; more than the prompt is the prompt."""
        load = at(pair, IntakeState.COMMITTING)
        pair.inject("p", "d", Stale(LeaseId(1), 1, good))
        assert why(load) is Reason.STALE and load.end is not None and load.end.good_tokens == tokens
        assert not pair.said(Abandon), "P has judged: there is nothing to take back"

    def test_a_commit_is_repeated_until_answered(self, pair: Pair) -> None:
        at(pair, IntakeState.COMMITTING)
        pair.run(5)
        assert len(pair.said(Commit)) == 11

    def test_nothing_is_copied_after_the_commit(self, pair: Pair) -> None:
        at(pair, IntakeState.COMMITTING)
        lease = pair.p.ledger.producer.leases[LeaseId(1)]
        copies = len(pair.done(StartCopy))
        pair.inject("p", "d", Ready(lease.id, 1, (3,), (pack_blocks([9]),), whole([4]), True))
        pair.run(5)
        assert len(pair.done(StartCopy)) == copies


class TestSourceLost:
    @pytest.mark.parametrize("wanted", [IntakeState.GRANTED, IntakeState.COPYING, IntakeState.OFFERED])
    def test_a_source_that_ended_early_ends_the_handoff(self, pair: Pair, wanted: IntakeState) -> None:
        load = at(pair, wanted)
        pair.inject("p", "d", SourceLost(LeaseId(1), 1, Reason.SOURCE_PREEMPTED))
        assert why(load) is Reason.SOURCE_PREEMPTED

    @pytest.mark.parametrize("wanted", [IntakeState.COMMITTING, IntakeState.SETTLING])
    def test_it_is_too_late_for_what_is_read_or_over(self, pair: Pair, wanted: IntakeState) -> None:
        at(pair, wanted)
        reports = len(pair.done(Report))
        pair.inject("p", "d", SourceLost(LeaseId(1), 1, Reason.SOURCE_PREEMPTED))
        assert len(pair.done(Report)) == reports


class TestPush:
    def test_a_written_for_another_prompt_fails_the_handoff(self, pair: Pair) -> None:
        """Rule 2."""
        load = at(pair, IntakeState.OFFERED)
        pair.lose(Written, times=99)
        pair.p.finish()
        pair.inject("p", "d", Written(LeaseId(1), 1, ReservationId(1), b"another"))
        assert why(load) is Reason.CONTENT_MISMATCH and load.drops == 1

    @pytest.mark.parametrize("digest", [b"another", None])
    def test_a_written_that_crosses_a_revoke_leaves_nothing_to_wait_for(self, pair: Pair, digest: bytes | None) -> None:
        """Only D's own ranks, which take back what was lent: no time-out of the source's is due any more."""
        load = at(pair, IntakeState.OFFERED)
        (intake,) = pair.d.ledger.consumer.by_handoff.values()
        intake.parts.moving[JobId(99)] = Moving(0, "rdma", 0)  # a loan that is slow to come back
        pair.d.ledger.desk.owners[JobId(99)] = intake.parts
        pair.lose(Written, times=99)
        pair.lose(Revoke, times=99)
        pair.p.finish()
        if digest is None:
            pair.d.give_up(load.request)
        pair.inject("p", "d", Written(LeaseId(1), 1, ReservationId(1), digest or intake.wanted.digest))
        assert intake.state is IntakeState.SETTLING and not len(pair.d.ledger.desk.timers)
        pair.d.tell(ev.CopyEnded(JobId(99)))
        assert load.drops == 1

    @pytest.mark.parametrize(("attempt", "reservation"), [(9, 1), (1, 9)])
    def test_a_written_that_nobody_waits_for_is_acknowledged_and_late(
        self, pair: Pair, attempt: int, reservation: int
    ) -> None:
        load = at(pair, IntakeState.OFFERED)
        pair.inject("p", "d", Written(LeaseId(1), attempt, ReservationId(reservation), b""))
        assert load.end is None and len(pair.said(Ack)) == 1 and pair.d.counts["late.written"] == 1

    def test_word_of_another_source_does_not_touch_a_reservation(self, make_pair: Make) -> None:
        """Rule 14: one writer per reservation."""
        pair = make_pair("p", "d", "q")
        load = at(pair, IntakeState.OFFERED)
        pair.d.want("s", pair.router_ticket(2, source="q"), 2, source="q")
        pair.settle()
        session = pair.d.ledger.consumer.links.by_worker[WorkerId("q")].session
        digest = pair.p.ledger.producer.leases[LeaseId(1)].digest
        for message in (
            Written(LeaseId(1), 1, ReservationId(1), digest),
            Quiesced(ReservationId(1), None),
            Accepted(ReservationId(1)),
        ):
            pair.inject("q", "d", message, session=session)
        assert load.end is None
        assert (pair.d.counts["late.written"], pair.d.counts["late.quiesced"]) == (1, 1)

    def test_a_source_whose_data_plane_does_not_know_d_is_paired_anew(self, pair: Pair) -> None:
        load = at(pair, IntakeState.OFFERED)
        pair.p.finish(reason=Reason.PEER_UNKNOWN)
        pair.settle()
        assert why(load) is Reason.PEER_UNKNOWN and not pair.d.ledger.consumer.links.by_worker

    def test_a_source_that_stops_without_a_reason_has_aborted(self, pair: Pair) -> None:
        load = at(pair, IntakeState.OFFERED)
        pair.p.finish(reason=Reason.TRANSFER_FAILED)
        pair.lose(Quiesced, times=99)
        pair.wire.clear()
        pair.inject("p", "d", Quiesced(ReservationId(1), None))
        assert why(load) is Reason.SOURCE_ABORTED and load.drops == 1

    def test_a_source_that_cannot_push_is_read_from(self, make_pair: Make) -> None:
        """Mixed versions: D asks for push, P lacks it, D copies."""
        pair = make_pair("d")
        pair.add("p", optional=int(Feature.PULL | Feature.STREAM))
        load = pair.d.want("r", pair.router_ticket(), push=True)
        pair.p.stream()
        pair.settle()
        assert delivered(load) and not pair.said(Offer)

    @pytest.mark.parametrize(("transport", "offers"), [(CMA, 0), (RDMA, 1)], ids=["cannot", "can"])
    def test_only_what_can_be_fenced_is_written_by(self, make_pair: Make, transport: Capabilities, offers: int) -> None:
        """Rule 16: from a source that cannot be shut out D reads."""
        pair = make_pair(transports=(transport,))
        load = pair.d.want("r", pair.router_ticket(), push=True)
        pair.p.stream()
        pair.settle()
        assert delivered(load) and len(pair.said(Offer)) == offers

    def test_reservation_numbers_rise(self, pair: Pair) -> None:
        """Rule 13: so that a floor can stand for forgotten ones."""
        for number in (1, 2, 3):
            pair.d.want(f"r{number}", pair.router_ticket(number), number, push=True)
            pair.p.stream(number)
            pair.settle()
        assert [message.reservation for message in pair.said(Offer)] == [1, 2, 3]


@pytest.mark.parametrize("wanted", [*LIVE, IntakeState.REVOKING, IntakeState.SETTLING])
def test_the_one_failure_function_ends_a_handoff_once(pair: Pair, wanted: IntakeState) -> None:
    """Rule 17, at the function itself: whoever comes second, in whatever state, changes nothing."""
    load = at(pair, wanted)
    consumer = pair.d.ledger.consumer
    (intake,) = consumer.by_handoff.values()
    for reason in (Reason.TRANSFER_FAILED, Reason.STALE):
        consumer.fail(intake, reason, "", pair.d.now)
        pair.d.carry_out()
    assert why(load) is (Reason.TRANSFER_FAILED if wanted in LIVE else Reason.ABORTED)
    assert len(pair.done(Report)) + len(pair.done(MatchFailed)) == 1
    assert pair.d.counts["late.failure"] == (1 if wanted in LIVE else 2)


def test_every_claim_is_a_new_reader(pair: Pair) -> None:
    """Rule 5: a reader id names one copy attempt."""
    for number in (1, 2, 3):
        pair.d.want(f"r{number}", pair.p.grant(number), number)
        pair.settle()
    assert [message.attempt for message in pair.said(Claim)] == [1, 2, 3]


def test_a_drop_follows_its_report(pair: Pair) -> None:
    pair.pull()
    order = [type(effect) for effect in pair.done((MatchFound, Report, DropHold))]  # type: ignore[arg-type]
    assert order == [MatchFound, Report, DropHold]
