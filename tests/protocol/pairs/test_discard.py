"""A ticket that the router took back: its lease ends at once, unless somebody reads, whose end it then is (rule 22)."""

from __future__ import annotations

from pair import Make, Pair
from party import transfer

from kvbaton.protocol import events as ev
from kvbaton.protocol.effects import Unpin
from kvbaton.protocol.errors import Reason
from kvbaton.protocol.ids import LeaseId
from kvbaton.protocol.settings import Settings
from kvbaton.protocol.wire.messages import Claim, Granted


def discard(pair: Pair, number: int = 1) -> None:
    pair.p.tell(ev.Discarded(transfer(number)))
    pair.settle()


def test_a_lease_that_nobody_has_claimed_is_released_at_once(pair: Pair) -> None:
    pair.p.grant()
    assert not pair.done(Unpin)
    discard(pair)
    assert pair.done(Unpin) == [Unpin(LeaseId(1))] and pair.now == 0.0
    assert pair.p.counts["leases_discarded"] == 1 and not pair.p.counts["leases_expired"]
    assert len(pair.p.ledger.desk.timers) == 0, "nothing waits for its expiry"


def test_a_claim_with_a_discarded_ticket_is_refused_and_says_why(pair: Pair) -> None:
    ticket = pair.p.grant()
    discard(pair)
    load = pair.d.want("r", ticket)
    pair.settle()
    assert load.failed is not None and load.failed.reason is Reason.DISCARDED
    assert not pair.said(Granted)


def test_a_prompt_that_p_still_computes_is_released_too(pair: Pair) -> None:
    source = pair.p.begin(tokens=40)
    pair.p.chunk(source, 1)
    discard(pair)
    pair.p.chunk(source, 1)
    pair.settle()
    assert len(pair.done(Unpin)) == 1


def test_a_handoff_that_is_being_read_ends_as_its_reader_ends_it(pair: Pair) -> None:
    load = pair.pull(copies=False)
    discard(pair)
    assert not pair.done(Unpin) and pair.p.counts["late.discard"] == 1
    pair.d.finish()
    pair.settle()
    assert load.end is not None and load.end.delivered
    assert len(pair.done(Unpin)) == 1


def test_a_second_place_that_nobody_took_does_not_keep_the_lease(pair: Pair) -> None:
    pair.d.want("r", pair.p.grant(max_readers=2))
    pair.settle()
    assert not pair.done(Unpin), "another reader may come"
    discard(pair)
    assert len(pair.done(Unpin)) == 1


def test_a_discard_that_comes_before_the_lease_prevents_it(pair: Pair) -> None:
    """The router's word may overtake the engine's, which waits in its queue."""
    discard(pair)
    pair.p.grant()
    pair.settle()
    assert pair.done(Unpin) == [Unpin(LeaseId(1))]
    assert pair.p.counts["lease_refused.discarded"] == 1 and not pair.p.counts["leases"]


def test_a_claim_that_waits_for_p_to_begin_is_refused_with_the_discard(pair: Pair) -> None:
    wanted = pair.d.want("r", pair.router_ticket(1), 1)
    other = pair.d.want("other", pair.router_ticket(2), 2)
    pair.settle()
    discard(pair)
    assert wanted.failed is not None and wanted.failed.reason is Reason.DISCARDED
    assert other.failed is None and len(pair.p.ledger.producer.parked) == 1
    pair.p.stream(2)
    pair.settle()
    assert other.end is not None and other.end.delivered


def test_a_discard_that_overtakes_the_claim_has_it_refused(pair: Pair) -> None:
    pair.hold(Claim)
    load = pair.d.want("r", pair.router_ticket())
    pair.settle()
    discard(pair)
    pair.release(Claim)
    assert load.failed is not None and load.failed.reason is Reason.DISCARDED


def test_discarding_twice_or_what_is_over_changes_nothing(pair: Pair) -> None:
    load = pair.pull()
    assert load.end is not None and load.end.delivered
    for _ in range(2):
        discard(pair)
    assert len(pair.done(Unpin)) == 1


def test_a_flood_of_unknown_discards_is_remembered_within_bounds(make_pair: Make) -> None:
    pair = make_pair(settings=Settings(tombstones_max=8))
    for number in range(1, 100):
        discard(pair, number)
    assert len(pair.p.ledger.producer.ended) == 8
    pair.p.grant(1)
    assert pair.p.counts["leases"] == 1, "forgotten: its lease simply runs out"


def test_a_second_place_is_closed_while_the_first_reader_reads(pair: Pair) -> None:
    """Found by simulation (seed 41): the lease outlived its last reader, waiting for one who would never come."""
    pair.d.habits.copies = False
    ticket = pair.p.grant(max_readers=2)
    load = pair.d.want("r", ticket)
    pair.settle()
    discard(pair)
    pair.d.finish()
    pair.settle()
    assert load.end is not None and load.end.delivered
    assert len(pair.done(Unpin)) == 1 and pair.now == 0.0
    late = pair.d.want("late", ticket)
    pair.settle()
    assert late.failed is not None and late.failed.reason is Reason.TICKET_SPENT
