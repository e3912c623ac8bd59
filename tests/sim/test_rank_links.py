"""Rank links under the simulator: the production ends over a seeded channel meet their faults and keep their laws."""

from __future__ import annotations

import gc
import random
import sys
from array import array
from collections import Counter

import pytest

from kvbaton.protocol.errors import Reason
from kvbaton.protocol.geometry.progress import whole
from kvbaton.protocol.ids import Incarnation, JobId, LeaseId, PeerId, WorkerId, rank_peer
from kvbaton.transports.core.transport import Copy, CopyEnded, CopyRested, Direction, FenceEnded, TransportEvent
from kvbaton_proof.sim.checks.rank_checks import check_at_rest, check_step
from kvbaton_proof.sim.hardship.rank_faults import RankLot
from kvbaton_proof.sim.looking import look
from kvbaton_proof.sim.mutants.handwritten import MUTANTS
from kvbaton_proof.sim.mutants.kept import find
from kvbaton_proof.sim.mutants.mutants_ranks import RANK_MUTANTS
from kvbaton_proof.sim.promises import HANG, NEEDLESS, STRANGER, WRONG, Broken
from kvbaton_proof.sim.ranks.rank_links import LinkedRanks, RankTraits
from kvbaton_proof.sim.world.sim_transport import KINDS, Fabric, SimTransport, TransportFaults
from kvbaton_proof.sim.world.world import World

from .seen_seeds import SeenSeeds, plan_of

ME, FAR = (PeerId(WorkerId(name), Incarnation(1)) for name in ("me", "far"))
SPANS = 8
PING_S, LOST_S = 1.0, 4.0


class Bench:
    """An engine with two ranks behind links, and a peer that is reached from rank 0."""

    def __init__(self, kind: str = "rdma", traits: RankTraits | None = None, slow: bool = False) -> None:
        self.world = World(11)
        faults = TransportFaults(slow=1.0, slow_s=2.0) if slow else TransportFaults()
        self.fabric = Fabric(self.world, faults)
        self.planes = [self._plane(rank_peer(ME, rank), kind) for rank in range(2)]
        self.far = self._plane(rank_peer(FAR, 0), kind, b"x")
        given = [{kind: plane} for plane in self.planes]
        traits = traits or RankTraits(ping_s=PING_S, lost_s=LOST_S)
        self.ranks = LinkedRanks(self.world, ME, traits, given, lambda: self.world.now, 1.0, lambda: None)
        self.port = self.ranks.ports[0][kind]
        self.other = self.ranks.ports[1][kind]
        self.events: list[TransportEvent] = []
        self.run(0.1)
        self.port.connect(self.far.me, self.far.endpoint(self.planes[0].me))

    def _plane(self, peer: PeerId, kind: str, fill: bytes = b".") -> SimTransport:
        plane = SimTransport(self.fabric, peer, KINDS[kind])
        plane.register(0, memoryview(bytearray(fill * 64)))
        return plane

    def submit(self, job: int = 1, spans: int = SPANS) -> None:
        rows = array("q", [number for at in range(spans) for number in (8 * at, 8 * at, 8)])
        assert self.port.submit(Copy(JobId(job), self.far.me, Direction.READ, 0, 0, rows))

    def run(self, seconds: float) -> list[TransportEvent]:
        for _ in range(max(1, round(seconds / 0.05))):
            self.world.run(self.world.now + 0.05)
            self.events += self.port.drain()
            check_step(self.ranks)
        return self.events

    @property
    def link(self):
        return self.ranks.links._links[0]


def test_a_copy_crosses_and_ends_once() -> None:
    bench = Bench()
    bench.submit()
    assert bench.run(1.0) == [CopyEnded(JobId(1))]
    assert bytes(bench.planes[0].regions[0]) == b"x" * 64
    bench.run(2 * PING_S)
    check_at_rest(bench.ranks)


def test_a_table_crosses_in_parts_and_one_cut_short_is_never_used() -> None:
    traits = RankTraits(ping_s=PING_S, lost_s=LOST_S, tight=True)
    bench = Bench(traits=traits)
    bench.submit()
    assert bench.run(1.0) == [CopyEnded(JobId(1))] and bytes(bench.planes[0].regions[0]) == b"x" * 64
    bench = Bench(traits=traits)
    for plane in bench.ranks.ranks[0].host._planes.values():
        plane.waiting_max = 0  # no part is kept
    bench.submit()
    (ended,) = bench.run(1.0)
    assert isinstance(ended, CopyEnded) and ended.reason is Reason.BAD_SPAN
    assert bytes(bench.planes[0].regions[0]) == b"." * 64


def test_a_rank_that_dies_takes_its_copies_along_and_none_counts_as_done() -> None:
    bench = Bench(slow=True)
    bench.submit()
    bench.run(0.05)
    assert bench.planes[0]._jobs
    bench.ranks.kill(0)
    (ended,) = bench.run(3 * LOST_S)
    assert isinstance(ended, CopyEnded) and ended.reason is Reason.TRANSFER_FAILED and not ended.at_rest
    assert bench.ranks.links.is_lost(0) and not bench.ranks.links.is_lost(1) and bench.ranks.is_crippled
    bench.submit(2)
    assert bench.run(0.05)[1:] == [
        CopyEnded(JobId(2), Reason.TRANSFER_FAILED, True, "rank 0 is lost; nothing was started")
    ]


@pytest.mark.parametrize(("stall_s", "is_lost"), [(0.5 * LOST_S, False), (2 * LOST_S, True)])
def test_a_rank_that_stalls_loses_nothing_unless_it_stalls_too_long(stall_s: float, is_lost: bool) -> None:
    bench = Bench(slow=True)
    bench.submit()
    bench.run(0.05)
    bench.ranks.stall(0, stall_s)
    bench.run(stall_s + 4 * PING_S)
    if is_lost:
        ended, rested = bench.events
        assert isinstance(ended, CopyEnded) and not ended.at_rest and rested == CopyRested(JobId(1))
    else:
        assert bench.events == [CopyEnded(JobId(1))]
    assert bench.link.counters["losses"] == is_lost and not bench.link.lost
    check_at_rest(bench.ranks)


@pytest.mark.parametrize("frames", range(1, 6))
def test_what_a_broken_connection_loses_comes_again(frames: int) -> None:
    bench = Bench(traits=RankTraits(ping_s=PING_S, lost_s=LOST_S, tight=True, stray=0.5))
    bench.ranks.carrier.channels[0].cut_under(frames, 0.3)
    bench.submit()
    assert bench.run(8.0) == [CopyEnded(JobId(1))]
    assert bench.world.faults["rank_frames_lost"] + bench.world.faults["rank_frame_late"] > 0
    counters = bench.link.stream.counters + bench.ranks.ranks[0].host.stream_counters
    assert counters["resent"], "it was the connection's loss, and somebody noticed"
    check_at_rest(bench.ranks)


def test_another_in_a_ranks_place_gets_nothing_and_the_rank_is_lost() -> None:
    bench = Bench()
    bench.submit()
    bench.run(2 * PING_S)
    bench.ranks.kill(0)
    bench.submit(2)
    bench.ranks.replace(0)
    bench.run(3 * LOST_S)
    assert bench.world.faults["rank_replaced"] == 1 and bench.ranks.links.is_lost(0)
    ended = bench.events[-1]
    assert isinstance(ended, CopyEnded) and ended.job == 2 and ended.reason is Reason.TRANSFER_FAILED


def test_reports_that_come_twice_or_late_end_a_copy_once() -> None:
    bench = Bench(traits=RankTraits(ping_s=PING_S, lost_s=LOST_S, twice=1.0, late=1.0))
    bench.submit()
    bench.run(6.0)
    assert bench.world.faults["rank_reports_twice"] and bench.world.faults["rank_reports_late"]
    assert bench.events == [CopyEnded(JobId(1))]


def test_fences_end_as_often_as_they_were_begun() -> None:
    bench = Bench()
    assert bench.port.endpoint(bench.far.me)
    bench.port.fence(bench.far.me)
    bench.port.fence(bench.far.me)
    with pytest.raises(Broken) as broken:
        bench.port.check_at_rest()
    assert broken.value.promise == HANG
    assert bench.run(3.0) == [FenceEnded(bench.far.me)] * 2
    check_at_rest(bench.ranks)


def test_progress_comes_with_its_rank() -> None:
    bench = Bench()
    bench.ranks.progressed(LeaseId(3), whole([1]), 1)
    bench.run(0.1)
    assert [(each.lease, each.rank) for each in bench.ranks.links.drain_progress()] == [(3, 1)]


class TestTheChecksObject:
    def test_to_a_second_end(self) -> None:
        bench = Bench()
        bench.submit()
        bench.run(1.0)
        bench.link.transports["rdma"]._jobs.loan_ended(CopyEnded(JobId(1)))
        with pytest.raises(Broken) as broken:
            bench.run(0.1)
        assert broken.value.promise == WRONG

    def test_to_what_a_rank_has_not_done(self) -> None:
        bench = Bench(slow=True)
        bench.submit()
        bench.run(0.05)
        transport = bench.link.transports["rdma"]
        transport._jobs.part_ended(transport._jobs.find(JobId(1)))
        with pytest.raises(Broken, match="has not done it"):
            bench.run(0.1)

    def test_to_a_loss_without_a_reason(self) -> None:
        bench = Bench()
        bench.link._lose()
        with pytest.raises(Broken) as broken:
            check_step(bench.ranks)
        assert broken.value.promise == NEEDLESS

    def test_to_a_plane_under_another_name(self) -> None:
        bench = Bench()
        with pytest.raises(Broken) as broken:
            bench.ranks._named(bench.ranks.ranks[0].planes["rdma"])(FAR)
        assert broken.value.promise == STRANGER


class TestWorlds:
    def test_who_is_linked_is_drawn_beside_the_worlds_own_chance(self) -> None:
        rng = random.Random(4)
        before = rng.getstate()
        RankLot(rng, "all")
        assert rng.getstate() == before

    def test_some_engines_are_linked_near_and_far_with_and_without_a_store_and_others_are_not(self) -> None:
        plans = [plan_of(seed) for seed in range(100)]
        found = Counter[str]()
        for each in (each for plan in plans for each in (*plan.prefill, *plan.decode)):
            found["direct" if each.ranks is None else f"{'near' if each.ranks.near else 'far'} {each.ranks.store}"] += 1
        assert set(found) == {"direct", "near True", "near False", "far True", "far False"}
        assert found["direct"] > sum(found.values()) / 3

    def test_their_faults_are_met(self, seen: SeenSeeds) -> None:
        link = {"rank_link_cut", "rank_frames_lost", "rank_frame_late", "rank_frame_doubled"}
        rank = {"rank_stalls", "rank_dies", "rank_reports_twice", "rank_reports_late", "rank_plane_threw"}
        store = {"rank_lookups", "rank_gets", "rank_store_failed", "rank_store_stuck"}
        assert link | rank | store <= set(seen.faults)


def test_a_world_that_is_given_up_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not even an order of the store that goes on when it is collected."""
    left: list[object] = []
    monkeypatch.setattr(sys, "unraisablehook", left.append)
    with find("rank_frame_twice").switch():
        seen = look(7)
    gc.collect()
    assert seen is not None and "carried out twice" in seen.what and not left


def test_all_of_them_are_hunted() -> None:
    assert len(RANK_MUTANTS) >= 12 and set(RANK_MUTANTS) <= set(MUTANTS)
