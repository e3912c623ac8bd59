"""A rank in the engine's own process: its data planes are taken from its host, by one engine, and never lost."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator

import msgspec
import pytest
import zmq

from kvbaton.protocol.errors import Reason
from kvbaton.protocol.events import LeaseProgressed
from kvbaton.protocol.geometry.progress import whole
from kvbaton.protocol.ids import JobId, LeaseId, rank_peer
from kvbaton.ranks import rank_host
from kvbaton.ranks.rank_host import RankHost, host_of
from kvbaton.ranks.rank_transport import RemoteTransport
from kvbaton.store.interface import OrderId
from kvbaton.testing import Side
from kvbaton.transports.core.transport import CopyEnded
from kvbaton.transports.core.wrapped import UnnamedTransport
from kvbaton.transports.tcp import tcp_transport
from kvbaton.transports.tcp.tcp_transport import TcpTransport

from .rank_rig import FAR, NEAR, Rig, endpoint, until
from .test_rank_link import FakePlane, a_copy
from .test_rank_store_link import BLOCKS, COMPAT, HASHES, FakeRankStore


@pytest.fixture
def rig() -> Iterator[Rig]:
    rig = Rig(near=True)
    yield rig
    rig.close()


def test_the_node_is_handed_the_data_planes_themselves(rig: Rig) -> None:
    planes = [FakePlane(), FakePlane()]
    hosts = [rig.host(("fake", plane), rank=rank) for rank, plane in enumerate(planes)]
    links = rig.link(*(host.invitation for host in hosts))
    assert [links.transports(rank)["fake"] for rank in range(len(links))] == planes
    assert links.transports(0)["fake"] is planes[0] and not links.is_lost(0) and links.store(0) is None
    sent = a_copy(1)
    assert links.transports(1)["fake"].submit(sent)
    assert planes[1].moving[JobId(1)] is sent


def test_ranks_near_and_far_are_of_one_engine(rig: Rig) -> None:
    near, far = FakePlane(), FakePlane()
    hosts = [rig.host(("fake", plane), rank=rank) for rank, plane in enumerate((near, far))]
    del rank_host._HERE[hosts[1].invitation.rank_public]
    links = rig.link(*(host.invitation for host in hosts))
    assert links.transports(0)["fake"] is near and isinstance(links.transports(1)["fake"], RemoteTransport)
    for rank in (0, 1):
        assert links.transports(rank)["fake"].submit(a_copy(rank))
        hosts[rank].progressed(LeaseId(rank), whole([rank]))
    until(lambda: far.moving)
    found: list[LeaseProgressed] = []
    until(lambda: found.extend(links.drain_progress()) or len(found) >= 2)
    assert found == [LeaseProgressed(LeaseId(rank), rank, whole([rank])) for rank in (0, 1)]


def test_planes_are_told_whose_they_are_before_anything_else(rig: Rig) -> None:
    names = []

    def make(me: object) -> TcpTransport:
        names.append(me)
        return TcpTransport(me)  # type: ignore[arg-type]

    unnamed = UnnamedTransport(tcp_transport.CAPABILITIES, make)
    host = rig.host(("tcp", unnamed), ("named", FakePlane()))
    links = rig.link(host.invitation, me=NEAR)
    assert names == [rank_peer(NEAR, 0)] and links.transports(0)["tcp"] is unnamed
    assert unnamed.endpoint(FAR)


class TestStrangers:
    """Who lives here must hold the keys as everybody else, and comes first or not at all (promise 5)."""

    def test_other_keys_than_were_minted_are_not_enough(self, rig: Rig) -> None:
        plane = FakePlane()
        host = rig.host(("fake", plane))
        public, secret = (key.decode() for key in zmq.curve_keypair())
        forged = msgspec.structs.replace(host.invitation, engine_public=public, engine_secret=secret)
        stranger = rig.link(forged).transports(0)["fake"]
        with pytest.raises(TimeoutError):
            stranger.endpoint(FAR)
        until(lambda: host.strangers)
        assert plane.asked == [] and rig.link(host.invitation).transports(0)["fake"] is plane

    def test_a_second_engine_gets_nothing_by_either_way(self, rig: Rig) -> None:
        plane = FakePlane()
        host = rig.host(("fake", plane))
        assert rig.link(host.invitation).transports(0)["fake"] is plane
        second = rig.link(host.invitation).transports(0)["fake"]
        with pytest.raises(TimeoutError):
            second.endpoint(FAR)
        until(lambda: host.stream_counters["refused"])
        assert plane.asked == []

    def test_nor_does_one_that_comes_after_an_engine_elsewhere(self, rig: Rig) -> None:
        plane = FakePlane()
        host = rig.host(("fake", plane))
        del rank_host._HERE[host.invitation.rank_public]
        first = rig.link(host.invitation).transports(0)["fake"]
        assert endpoint(Side(NEAR, first, memoryview(b"")), FAR)
        rank_host._HERE[host.invitation.rank_public] = host
        assert rig.link(host.invitation).transports(0)["fake"] is not plane

    def test_a_child_of_this_process_does_not_take_them_for_its_own(self, rig: Rig) -> None:
        host = rig.host(("fake", FakePlane()))
        assert host_of(host.invitation) is host
        child = os.fork()
        if not child:
            os._exit(0 if host_of(host.invitation) is None else 1)
        assert os.waitpid(child, 0)[1] == 0


class TestProgress:
    def test_it_comes_with_its_rank_and_tells_the_node(self, rig: Rig) -> None:
        host = rig.host(("fake", FakePlane()))
        host.progressed(LeaseId(4), whole([1]))  # before there is an engine
        rung = threading.Event()
        links = rig.link(host.invitation, tell=rung.set)
        assert links.drain_progress() == [LeaseProgressed(LeaseId(4), 0, whole([1]))]
        for blocks in (2, 3):
            host.progressed(LeaseId(5), whole([blocks]))
        assert rung.is_set()
        assert links.drain_progress() == [LeaseProgressed(LeaseId(5), 0, whole([3]))]
        assert links.drain_progress() == []

    def test_it_is_bounded(self, rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(rank_host, "LEASES_MAX", 2)
        host = rig.host(("fake", FakePlane()))
        links = rig.link(host.invitation)
        for lease in (1, 2, 3, 1):
            host.progressed(LeaseId(lease), whole([lease]))
        assert [each.lease for each in links.drain_progress()] == [1, 2] and host.counters["progress_lost"] == 1


def test_the_store_of_a_near_rank_is_reached_over_the_sockets(rig: Rig) -> None:
    plane, made = FakePlane(), []

    def make(compat: str) -> FakeRankStore:
        made.append((compat, FakeRankStore()))
        return made[-1][1]

    host = rig.keep(RankHost(0, {"fake": plane}, store=make))
    host.start()
    links = rig.link(host.invitation, ping_s=0.05)
    shelf = links.store(0)
    assert shelf is not None and links.transports(0)["fake"] is plane
    shelf.open(COMPAT)
    assert shelf.put(OrderId(1), HASHES, BLOCKS, 3.0)
    until(lambda: made and made[0][1].asked)
    assert made[0][0] == COMPAT and not links.is_lost(0)
    assert links.stop()
    [end] = shelf.drain()
    assert end.reason is Reason.CANCELLED
    assert plane.asked == [], "its planes are the node's"


class TestEnds:
    def test_a_host_that_stops_closes_them_and_leaves_their_ends_to_the_node(self, rig: Rig) -> None:
        plane = FakePlane()
        host = rig.host(("fake", plane))
        transport = rig.link(host.invitation).transports(0)["fake"]
        assert transport.submit(a_copy(1))
        plane.say(CopyEnded(JobId(1)))
        assert host.stop()
        assert plane.asked[-1] == ("close", None)
        assert transport.drain() == [CopyEnded(JobId(1))]

    def test_a_host_that_has_stopped_gives_nothing(self, rig: Rig) -> None:
        plane = FakePlane()
        host = rig.host(("fake", plane))
        assert host.stop()
        assert rig.link(host.invitation).transports(0)["fake"] is not plane

    def test_links_that_stop_leave_the_planes_to_the_node(self, rig: Rig) -> None:
        plane = FakePlane()
        links = rig.link(rig.host(("fake", plane)).invitation)
        assert links.stop() and plane.asked == []

    def test_a_host_started_late_leaves_them_alone(self, rig: Rig) -> None:
        plane = FakePlane()
        host = rig.keep(RankHost(0, {"fake": plane}))
        transport = rig.link(host.invitation).transports(0)["fake"]
        rung = threading.Event()
        transport.set_waker(rung.set)
        host.start()
        plane.say(CopyEnded(JobId(7)))
        assert rung.is_set() and transport.drain() == [CopyEnded(JobId(7))]


def test_who_was_turned_away_is_told(rig: Rig) -> None:
    plane = FakePlane()
    plane.refusals = {"left": 0}  # type: ignore[attr-defined]
    links = rig.link(rig.host(("fake", plane)).invitation)
    assert links.data_refused() == {"fake:left": 0} and links.data_refused() is links.data_refused()
    plane.refusals["left"] = 2  # type: ignore[attr-defined]
    assert links.data_refused() == {"fake:left": 2}
