"""What is kept for the next turn of a conversation: a lease that nobody was promised (rule 34)."""

from __future__ import annotations

from pair import Make, Pair

from kvbaton.protocol import events as ev
from kvbaton.protocol.effects import Ended, Step, Unpin
from kvbaton.protocol.errors import Reason
from kvbaton.protocol.ids import LeaseId
from kvbaton.protocol.settings import Settings

KEEP_S = 60.0
SHORT = Settings(lease_s=1.0, max_hold_s=5.0)


def ends(pair: Pair) -> list[Ended]:
    return [mark.what for mark in pair.p.ledger.take_marks() if isinstance(mark.what, Ended)]


def test_a_turn_outlives_the_term_of_a_lease_and_ends_with_its_own(make_pair: Make) -> None:
    pair = make_pair("p", "d", settings=SHORT)
    pair.p.grant(keep_s=KEEP_S)
    pair.run(KEEP_S - 1)
    assert not pair.done(Unpin), "longer than lease_s, and than max_hold_s"
    pair.run(2)
    assert pair.done(Unpin) == [Unpin(LeaseId(1))]
    assert pair.p.counts["turns.kept"] == pair.p.counts["turns.lease_expired"] == 1


def test_a_conversation_that_does_not_go_on_is_no_failure(make_pair: Make) -> None:
    pair = make_pair("p", "d", settings=SHORT)
    pair.p.grant(keep_s=KEEP_S)
    pair.run(KEEP_S + 1)
    assert not pair.p.counts["leases_expired"], "which operators are alarmed by"
    assert [(each.end.reason, each.end.detail) for each in ends(pair)] == [(Reason.DISCARDED, "lease_expired")]


def test_the_next_turn_reads_it_like_any_handoff_and_its_blocks_are_free(make_pair: Make) -> None:
    pair = make_pair("p", "d", settings=SHORT)
    ticket = pair.p.grant(keep_s=KEEP_S)
    pair.run(30.0)
    load = pair.d.want("r", ticket)
    pair.settle()
    assert load.end is not None and load.end.delivered
    assert pair.done(Unpin) == [Unpin(LeaseId(1))] and pair.p.counts["turns.taken"] == 1


def test_a_reader_is_held_to_the_terms_of_a_lease(make_pair: Make) -> None:
    """Promise 3: whoever claims a turn and then is silent keeps its blocks for lease_s, not for turn_s."""
    pair = make_pair("p", "d", settings=SHORT)
    pair.d.habits.copies = False
    pair.d.want("r", pair.p.grant(keep_s=KEEP_S))
    pair.settle()
    pair.cut("d")
    pair.run(2.0)
    assert pair.done(Unpin) == [Unpin(LeaseId(1))] and pair.p.counts["turns.lease_expired"] == 1
    pair.heal()


def test_draining_lets_all_turns_go_and_keeps_no_more(pair: Pair) -> None:
    pair.p.grant(1, keep_s=KEEP_S)
    promised = pair.p.grant(2)
    pair.p.grant(4, keep_s=KEEP_S)
    pair.p.tell(ev.DrainStarted())
    pair.settle()
    assert pair.done(Unpin) == [Unpin(LeaseId(1)), Unpin(LeaseId(3))] and pair.p.counts["turns.discarded"] == 2
    load = pair.d.want("r", promised, 2)
    pair.settle()
    assert load.end is not None and load.end.delivered, "what was promised is handed over"
    pair.p.grant(3, keep_s=KEEP_S)
    pair.settle()
    assert pair.done(Unpin)[-1] == Unpin(LeaseId(4)) and pair.p.counts["lease_refused.draining"] == 1
    assert pair.p.counts["turns.kept"] == 2


def test_a_replaced_cache_takes_all_turns_along(pair: Pair) -> None:
    ticket = pair.p.grant(keep_s=KEEP_S)
    pair.p.tell(ev.CacheReplaced())
    load = pair.d.want("r", ticket)
    pair.settle()
    assert pair.done(Unpin) == [Unpin(LeaseId(1))] and pair.p.counts["turns.unknown_lease"] == 1
    assert load.failed is not None and load.failed.reason is Reason.UNKNOWN_LEASE


def test_the_record_says_what_it_was_kept_for(pair: Pair) -> None:
    pair.p.grant(keep_s=KEEP_S)
    begun = [mark for mark in pair.p.ledger.desk.marks if mark.step is Step.BEGUN]
    assert [mark.detail for mark in begun] == ["kept for the next turn"]
    pair.p.tell(ev.DrainStarted())
    pair.settle()
