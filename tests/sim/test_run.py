"""The simulator itself: it repeats itself exactly, it sees what it should, and it heals."""

from __future__ import annotations

import os
import subprocess
import sys

from kvbaton_proof.sim.hardship.world_plan import PROFILES
from kvbaton_proof.sim.liars.liar_plan import LIARS
from kvbaton_proof.sim.mutants.handwritten import MUTANTS
from kvbaton_proof.sim.run import run_seed


def test_the_same_seed_gives_the_same_trace_in_any_process(seen):
    script = "from kvbaton_proof.sim.run import run_seed; r = run_seed(5); print(r.trace_hash, r.events, r.handoffs)"
    here = run_seed(5)
    said = {f"{here.trace_hash} {here.events} {here.handoffs}\n"}
    for hash_seed in ("1", "12345"):
        env = {**os.environ, "PYTHONHASHSEED": hash_seed}
        done = subprocess.run([sys.executable, "-c", script], env=env, check=True, capture_output=True, text=True)
        said.add(done.stdout)
    assert len(said) == 1
    assert here.trace_hash != seen.results[6].trace_hash


def test_every_profile_is_drawn_and_most_reasons_are_met(seen):
    assert {result.profile for result in seen.results} == {*PROFILES, LIARS}
    assert sum(result.delivered for result in seen.results) > sum(result.handoffs for result in seen.results) // 3
    assert {"stale", "lease_expired", "transfer_timeout", "content_mismatch", "ticket_spent"} <= set(seen.ends)
    faults = {"lost", "doubled", "delayed", "garbled", "crashed", "paused_process", "partitions", "stalled_copy"}
    assert faults | {"slow_copy", "failed_copy", "preempted", "aborted", "port_threw"} <= set(seen.faults)


def test_a_mutant_is_gone_when_it_is_switched_off():
    mutant = next(each for each in MUTANTS if each.name == "reported_twice")
    with mutant.switch():
        assert not run_seed(0).holds
    assert run_seed(0).holds


def test_mutants_have_names_of_their_own():
    assert len({mutant.name for mutant in MUTANTS}) == len(MUTANTS) >= 40
