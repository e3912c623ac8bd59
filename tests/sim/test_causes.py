"""A failed handoff is judged by what touched it, and by nothing that befell others."""

from __future__ import annotations

import pytest

from kvbaton.protocol.effects import Begun, End
from kvbaton.protocol.errors import Reason
from kvbaton.protocol.ids import HandoffId, RequestId, WorkerId
from kvbaton_proof.sim.checks.causes import CAUSES, LIE, Causes
from kvbaton_proof.sim.checks.tables import check_tables
from kvbaton_proof.sim.cluster import Cluster
from kvbaton_proof.sim.liars.liar_plan import draw
from kvbaton_proof.sim.looking import look
from kvbaton_proof.sim.mutants.hunting import hunt
from kvbaton_proof.sim.mutants.kept import find
from kvbaton_proof.sim.promises import NEEDLESS, RULE, Broken
from kvbaton_proof.sim.world.life import Life
from kvbaton_proof.sim.world.touches import pair
from kvbaton_proof.sim.world.world import World

HANDOFF = HandoffId("00" * 16 + ".0")
WAITED_S = 100.0


@pytest.fixture
def cluster() -> Cluster:
    """One that is roomy, with a P, a D and no liar, at its beginning."""
    for seed in range(100):
        world = World(seed)
        plan = draw(world.rng)
        if plan.profile == "healthy" and plan.prefill != plan.decode:
            return Cluster(world, plan)
    raise AssertionError("no healthy world")


def judge(cluster: Cluster, reason: Reason, source: str = "p0") -> None:
    life: Life = cluster.lives[WorkerId("d0")]
    causes: Causes = cluster.causes
    causes._born.setdefault(HANDOFF, cluster.world.now)
    begun = Begun(HANDOFF, RequestId("r"), WorkerId(source), 4)
    causes._judge(life, begun, End(reason), WAITED_S)


def test_what_touched_nobody_is_needless_for_every_reason(cluster):
    for reason in Reason:
        with pytest.raises(Broken, match="no cause"):
            judge(cluster, reason)


@pytest.mark.parametrize("whom", [HANDOFF, "p0", "d0", pair(WorkerId("p0"), WorkerId("d0"))])
def test_what_touched_it_its_pair_or_one_of_the_two_is_its_cause(cluster, whom):
    cluster.world.touch("lost", whom)
    judge(cluster, Reason.CLAIM_TIMEOUT)


@pytest.mark.parametrize("whom", ["p1", "11" * 16 + ".0", pair(WorkerId("p1"), WorkerId("d0"))])
def test_what_touched_others_excuses_nothing(cluster, whom):
    cluster.world.touch("lost", whom)
    with pytest.raises(Broken, match="no cause"):
        judge(cluster, Reason.CLAIM_TIMEOUT)


def test_what_was_over_before_it_began_excuses_nothing(cluster):
    cluster.world.touch("paused_process", "p0", lasts_s=1.0)
    cluster.world.now = 50.0
    with pytest.raises(Broken, match="no cause"):
        judge(cluster, Reason.CLAIM_TIMEOUT)


def test_a_cause_brings_about_its_own_reasons_alone(cluster):
    cluster.world.touch("lost", HANDOFF)
    with pytest.raises(Broken, match="no cause"):
        judge(cluster, Reason.DISCARDED)


def test_a_lie_excuses_what_the_liar_is_a_party_to(cluster):
    cluster.world.touch(LIE, HANDOFF)
    for reason in Reason:
        judge(cluster, reason)


def test_gets_and_lookups_of_ranks_are_no_faults():
    kinds = {kind for causes in CAUSES.values() for kind in causes}
    assert not kinds & {"rank_gets", "rank_lookups", "gets", "puts"}


@pytest.mark.usefixtures("worlds_alone")
@pytest.mark.parametrize(
    "name",
    [
        "node.turn_keeping:TurnTaker.ask:early:1",
        "node.turn_keeping:TurnKeeper.keep:always:1",
        "protocol.machines.consumer_filling:Pushes.is_possible:early:2",
        "nothing_is_streamed",
    ],
)
def test_a_capability_that_never_happens_is_an_alarm(name):
    """Of 40 worlds of turns none objected while no turn was ever taken, or none ever kept."""
    catch = hunt(name, 80)
    assert catch.caught and catch.promise in (NEEDLESS, RULE)


@pytest.mark.usefixtures("worlds_alone")
def test_what_outlives_its_session_is_seen():
    catch = hunt("protocol.machines.push_writer:Writer._forget_if_over:drop:3", 60)
    assert catch.caught and "Writer.sessions holds" in catch.what


def test_a_table_that_holds_what_is_over_is_a_leak(cluster):
    life = cluster.lives[WorkerId("p0")]
    check_tables(life)
    life.node.ledger.producer.writer._over.add(1)
    with pytest.raises(Broken, match="_over holds 1 at rest, none may be left"):
        check_tables(life)


@pytest.mark.usefixtures("worlds_alone")
def test_most_worlds_object_when_every_other_granted_handoff_fails_for_nothing():
    """None of the worlds that were neither healthy nor of liars did, while a world excused all of its handoffs."""
    seeds = [seed for seed in range(60) if draw(World(seed).rng).profile not in ("healthy", "liars")][:12]
    with find("every_other_grant_fails").switch():
        seen = [look(seed) for seed in seeds]
    assert sum(each is not None and each.promise == NEEDLESS for each in seen) >= 10
