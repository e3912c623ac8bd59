"""Who is asked answers, and who was answered does not ask again: each law of `proof/sim/checks/dialogue.py` sees what
breaks it."""

from __future__ import annotations

import pytest

from kvbaton_proof.sim.mutants import kept
from kvbaton_proof.sim.mutants.hunting import hunt
from kvbaton_proof.sim.mutants.mutants_target import DIALOGUE_MUTANTS
from kvbaton_proof.sim.promises import HANG, RULE

SEEN = {
    "protocol.machines.consumer_filling:Pushes.on_accepted:early:1": (RULE, "says Offer again, and was answered"),
    "protocol.machines.producer:Producer.on_renew:early:1": (HANG, "does not answer Renew"),
    "protocol.machines.producer:Producer._tell_ready:always:1": (HANG, "is ready than"),
    "asks_again_late": (HANG, "and does not say"),
    "asks_again_soon": (RULE, "again after 0."),
    "commit_answered_once": (HANG, "does not answer Commit"),
    "protocol.machines.push_writer:Writer.on_revoke:drop:4": (HANG, "does not answer Revoke"),
}


def test_every_mutant_says_how_it_is_seen():
    assert {mutant.name for mutant in DIALOGUE_MUTANTS} <= set(SEEN) <= set(kept.every())


@pytest.mark.usefixtures("worlds_alone")
@pytest.mark.parametrize("name", SEEN)
def test_it_is_heard(name: str):
    catch = hunt(name, 60)
    assert (catch.caught, catch.promise) == (True, SEEN[name][0])
    assert SEEN[name][1] in catch.what
