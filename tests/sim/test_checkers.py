"""Each checker sees the wrong idea that it is for, and says what it saw."""

from __future__ import annotations

import pytest

from kvbaton_proof.sim.mutants.hunting import hunt
from kvbaton_proof.sim.mutants.mutants_checkers import CHECKER_MUTANTS
from kvbaton_proof.sim.promises import DEATH, HANG, LEAK, NEEDLESS, RULE, WRONG

SEEN = {
    "settled_for_the_oldest": (RULE, "and both speak 2"),
    "last_word_in_the_oldest": (RULE, "and both speak 2"),
    "plane_shunned_for_ever": (RULE, "still reads from"),
    "passed_over_unseen": (RULE, "still reads from"),
    "quarantine_without_bound": (LEAK, "takes in a handoff with"),
    "restless_without_bound": (LEAK, "begins to write with"),
    "put_unpinned_when_asked": (WRONG, "a store reads"),
    "put_waits_too_long": (HANG, "past transfer_timeout"),
    "hold_begins_anew": (LEAK, "is held past max_hold_s"),
    "load_without_limit": (HANG, "with blocks, past max_hold_s"),
    "reasons_forgotten": (NEEDLESS, "failed for no cause"),
    "completed_twice": (RULE, "a step that the rules do not know"),
    "one_timer_a_turn": (HANG, "was due, and waits on"),
    "sleeps_on": (HANG, "sleeps until"),
    "goodbye_to_the_first": (RULE, "did not say so to everybody"),
    "drain_forgotten": (RULE, "a claim waits, and it drains"),
    "short_first_term": (NEEDLESS, "lease_expired"),
    "disconnects_one_rank_fewer": (LEAK, "is open to"),
    "lent_over_any_plane": (DEATH, "lends nothing: see its capabilities"),
    "gives_up_early": (NEEDLESS, "ended after"),
    "every_other_grant_fails": (NEEDLESS, "failed for no cause"),
    "every_fifth_claim_is_busy": (NEEDLESS, "failed for no cause"),
    "no_store_hits": (NEEDLESS, "a store finds or brings 0 of"),
    "nothing_brought_from_a_store": (NEEDLESS, "a store finds or brings 0 of"),
    "no_fallback": (NEEDLESS, "failed for no cause"),
    "goodbye_unheard": (RULE, "which said goodbye"),
    "departed_reader_kept": (RULE, "which is said to have gone"),
    "departed_source_kept": (RULE, "which is said to have gone"),
    "drain_refuses_what_was_granted": (NEEDLESS, "drains, and refuses a claim"),
    "drain_gives_leases_up": (NEEDLESS, "drains, and gives up lease"),
    "drain_keeps_turns": (RULE, "drains, and keeps a turn"),
    "no_fence": (LEAK, "references to blocks at rest"),
    "nothing_is_lent": (NEEDLESS, "lease_expired"),
    "first_rank_reads_alone": (NEEDLESS, "failed for no cause"),
}
QUICK = ("settled_for_the_oldest", "quarantine_without_bound", "put_unpinned_when_asked", "hold_begins_anew",
         "reasons_forgotten", "completed_twice", "sleeps_on", "short_first_term", "lent_over_any_plane",
         "no_store_hits", "nothing_brought_from_a_store", "no_fallback", "departed_reader_kept",
         "drain_refuses_what_was_granted", "drain_gives_leases_up")  # fmt: skip


def test_every_mutant_of_a_checker_says_how_it_is_seen():
    assert set(SEEN) == {mutant.name for mutant in CHECKER_MUTANTS}


@pytest.mark.usefixtures("worlds_alone")
@pytest.mark.parametrize("name", QUICK)
def test_it_is_seen_by_the_checker_that_is_for_it(name):
    catch = hunt(name, 60)
    promise, words = SEEN[name]
    assert catch.caught
    assert catch.promise == promise
    assert words in catch.what
