"""The course of every world: faults, then none and rest, then probes that must be delivered, then rest again."""

from __future__ import annotations

from kvbaton_proof.sim.checks.checkers import check_at_rest, check_healthy, check_planes, check_recovery, check_steps
from kvbaton_proof.sim.cluster import Cluster
from kvbaton_proof.sim.hardship.world_plan import FAULTY_S, PROBE_S, REST_S
from kvbaton_proof.sim.promises import Broken


def run_course(cluster: Cluster, *, where: str = "", converses: bool = False) -> None:
    """Raise `Broken` if a promise was broken. Where clients converse, turns come and go: less is demanded."""
    world = cluster.world
    try:
        world.run(FAULTY_S)
        cluster.heal()
        world.run(FAULTY_S + REST_S)
        check_at_rest(cluster)
        if not converses:
            check_healthy(cluster)
        before = cluster.delivered()
        probes = cluster.probe()
        world.run(FAULTY_S + REST_S + PROBE_S)
        check_at_rest(cluster)
        check_recovery(cluster, before, probes)
        if not converses:
            check_planes(cluster, FAULTY_S)
            check_steps(cluster)
    except Broken as broken:
        broken.what, broken.story = where + broken.what, list(world.story)
        raise
    finally:
        _end(cluster)


def _end(cluster: Cluster) -> None:
    """Nothing of a world goes on after it: the collector would else run its scripts' last lines within another one."""
    for life in cluster.every_life:
        if life.ranks is not None and life.ranks.store is not None:
            life.ranks.store.abandon()
