"""Each checker sees the wrong idea that it is for, and says what it saw."""

from __future__ import annotations

import pytest

from kvbaton_proof.sim.looking import look
from kvbaton_proof.sim.mutants import kept, mutating
from kvbaton_proof.sim.mutants.hunting import hunt
from kvbaton_proof.sim.mutants.mutants_successes import SUCCESS_MUTANTS
from kvbaton_proof.sim.promises import NEEDLESS

SEEN = {
    "every_other_grant_fails": (NEEDLESS, "failed for no cause"),
    "every_fifth_claim_is_busy": (NEEDLESS, "failed for no cause"),
    "reasons_forgotten": (NEEDLESS, "failed for no cause"),
    "no_store_hits": (NEEDLESS, "a store finds or brings 0 of"),
    "nothing_brought_from_a_store": (NEEDLESS, "a store finds or brings 0 of"),
    "protocol.machines.pairing_target:Links.on_welcome:forget:3": (NEEDLESS, "failed for no cause"),
    "drain_refuses_what_was_granted": (NEEDLESS, "drains, and refuses a claim"),
    "drain_gives_leases_up": (NEEDLESS, "drains, and gives up lease"),
    "short_first_term": (NEEDLESS, "expired"),
    "first_rank_reads_alone": (NEEDLESS, "failed for no cause"),
}
SLOW = {"every_other_grant_fails", "every_fifth_claim_is_busy", "first_rank_reads_alone"}


def test_every_mutant_without_a_wrong_answer_says_how_it_is_seen():
    assert {mutant.name for mutant in SUCCESS_MUTANTS} <= set(SEEN) <= set(kept.every())


@pytest.mark.usefixtures("worlds_alone")
@pytest.mark.parametrize("name", sorted(set(SEEN) - SLOW))
def test_it_is_seen_by_the_checker_that_is_for_it(name):
    catch = hunt(name, 60)
    promise, words = SEEN[name]
    assert catch.caught
    assert catch.promise == promise
    assert words in catch.what


@pytest.mark.parametrize(
    ("name", "word"),
    [
        ("protocol.machines.claims:Claims._answer_parked:drop:1", "for a lease that there is"),
        ("protocol.machines.producer:Producer.on_progressed:always:3", ""),
        ("protocol.machines.producer:Producer.on_session_ended:once:1", "reads lease"),
    ],
)
def test_the_books_show_what_breaks_no_promise_within_a_world(name: str, word: str) -> None:
    with mutating.switched(name):
        seen = next(filter(None, map(look, range(4))))
    assert word in seen.what


def test_a_timer_that_is_set_for_another_time_is_seen() -> None:
    with mutating.switched("protocol.machines.claims:Claims._park:arithmetic:1"):
        seen = next(filter(None, map(look, range(6))))
    assert "is due in" in seen.what
