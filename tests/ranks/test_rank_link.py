"""Rank links: commands keep their order, bounds hold, a lost rank ends what it had, and strangers get nothing."""

from __future__ import annotations

import contextlib
import random
import socket
import threading
import time
from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
import pytest
import zmq

from kvbaton.protocol.effects import Capabilities, Loan
from kvbaton.protocol.errors import Reason
from kvbaton.protocol.events import LeaseProgressed
from kvbaton.protocol.geometry.progress import whole
from kvbaton.protocol.geometry.spans import SPANS_MAX, Area, Weave
from kvbaton.protocol.ids import Incarnation, JobId, LeaseId, PeerId, WorkerId
from kvbaton.ranks import rank_host, rank_link, rank_stream, rank_transport
from kvbaton.ranks.rank_host import RankHost
from kvbaton.ranks.rank_link import RankLink, RankLinks
from kvbaton.ranks.rank_messages import (
    PART_BYTES_MAX,
    TABLE_BYTES_MAX,
    TABLES_MAX,
    RankEnded,
    RankInvitation,
    RankLend,
    Submit,
    TablePart,
    copy_of,
    encode_news,
    lend_commands,
    loan_of,
    submit_commands,
)
from kvbaton.ranks.rank_planes import HostedPlane
from kvbaton.ranks.rank_stream import Stream
from kvbaton.ranks.rank_transport import COPIES_MAX, RemoteTransport
from kvbaton.testing import Side
from kvbaton.testing.transport_case import READ, WRITE, copy, flat
from kvbaton.transports.core.transport import Copy, CopyEnded, CopyRested, FenceEnded, OpenFailed, TransportEvent
from kvbaton.transports.local.region_listener import ShmEndpoint
from kvbaton.transports.tcp.tcp_transport import CAPABILITIES as TCP
from kvbaton.transports.tcp.tcp_transport import SealedTcpEndpoint, TcpEndpoint

from .rank_rig import FAR, NEAR, Rig, endpoint, join, log_of, until

SIZE = 64 << 10
FAKE = Capabilities("fake", one_sided=False, can_write=True, can_fence=True, cancels=True, same_host=False)
OTHER = PeerId(WorkerId("other"), Incarnation(1))
LOST_S = 6.0
"""A busy machine may keep a rank from answering for seconds; only one that is stopped or killed is lost."""


@dataclass
class FakePlane:
    """A data plane in the rank that does as the test says, and remembers what it was asked to do."""

    capabilities: Capabilities = FAKE
    room: int = 1 << 30
    asked: list[tuple[str, Any]] = field(default_factory=list)
    moving: dict[JobId, Copy] = field(default_factory=dict)
    news: list[TransportEvent] = field(default_factory=list)
    go: threading.Event = field(default_factory=threading.Event)
    throws: str = ""
    waker: Callable[[], None] = lambda: None

    def __post_init__(self) -> None:
        self.go.set()

    def _ask(self, what: str, about: Any) -> None:
        self.asked.append((what, about))
        if what == self.throws:
            raise RuntimeError(f"{what} threw")

    def register(self, region: int, memory: memoryview) -> None: ...

    def endpoint(self, peer: PeerId) -> bytes:
        self._ask("endpoint", peer)
        assert self.go.wait(20)
        return f"endpoint {len(self.asked)}".encode()

    def connect(self, peer: PeerId, endpoint: bytes) -> None:
        self._ask("connect", peer)

    def disconnect(self, peer: PeerId) -> None:
        self._ask("disconnect", peer)

    def submit(self, copy: Copy) -> bool:
        if len(self.moving) >= self.room:
            return False
        self._ask("submit", copy.job)
        self.moving[copy.job] = copy
        return True

    def cancel(self, job: JobId) -> None:
        self._ask("cancel", job)

    def fence(self, peer: PeerId) -> None:
        self._ask("fence", peer)

    def drain(self) -> Sequence[TransportEvent]:
        news, self.news = self.news, []
        return news

    def set_waker(self, waker: Callable[[], None]) -> None:
        self.waker = waker

    def close(self) -> None:
        self._ask("close", None)

    def say(self, *events: TransportEvent) -> None:
        for event in events:
            if isinstance(event, CopyEnded):
                self.moving.pop(event.job, None)
        self.news.extend(events)
        self.waker()


@pytest.fixture
def rig() -> Iterator[Rig]:
    rig = Rig()
    yield rig
    rig.close()


def faked(rig: Rig, plane: FakePlane | None = None, **timing: float) -> tuple[FakePlane, RemoteTransport]:
    plane = plane or FakePlane()
    host = rig.host(("fake", plane))
    return plane, rig.link(host.invitation, **timing).transports(0)["fake"]


def a_copy(job: int, peer: PeerId = FAR, spans: int = 1) -> Copy:
    return Copy(JobId(job), peer, READ, 0, 0, array("q", range(3 * spans)))


def woven(job: int, rows: int = 3, shifts: int = 2, spans: int = 1) -> Copy:
    weave = Weave(array("q", range(3 * rows)), array("q", range(2 * shifts)))
    return msgspec.structs.replace(a_copy(job, spans=spans), weave=weave)


def drained(transport: RemoteTransport, count: int) -> list[TransportEvent]:
    found: list[TransportEvent] = []

    def enough() -> bool:
        found.extend(transport.drain())
        return len(found) >= count

    until(enough)
    return found


class TestInvitation:
    """It holds a secret, and shows it to nobody (promise 5)."""

    def test_it_survives_its_way_and_never_shows_the_secret(self, rig: Rig) -> None:
        invitation = rig.host(("fake", FakePlane())).invitation
        again = RankInvitation.decode(invitation.encode())
        assert again == invitation and again.capabilities == {"fake": FAKE}
        assert invitation.endpoint.startswith("tcp://127.0.0.1:")
        for text in (repr(invitation), str(invitation), f"{[invitation]}", str(list(invitation.__rich_repr__()))):
            assert invitation.engine_secret not in text and "rank" in text

    def test_nonsense_is_refused_without_repeating_it(self, rig: Rig) -> None:
        good = rig.host(("fake", FakePlane())).invitation
        for bad in (
            msgspec.structs.replace(good, endpoint="tcp://0.0.0.0:5"),
            msgspec.structs.replace(good, engine_secret="\n" * 40),
            msgspec.structs.replace(good, rank=-1),
            msgspec.structs.replace(good, capabilities={}),
        ):
            with pytest.raises(ValueError) as caught:
                RankInvitation.decode(bad.encode())
            assert good.engine_secret not in str(caught.value)
        with pytest.raises(ValueError, match="not an invitation"):
            RankInvitation.decode(b"junk")

    def test_all_ranks_are_needed_once(self, rig: Rig) -> None:
        invitation = rig.host(("fake", FakePlane())).invitation
        for given in ([], [invitation, invitation], [msgspec.structs.replace(invitation, rank=1)]):
            with pytest.raises(ValueError, match="one for each rank"):
                RankLinks(given)

    def test_a_rank_listens_only_where_the_engine_can_dial(self) -> None:
        for host in ("0.0.0.0", "localhost", "::"):
            with pytest.raises(ValueError):
                RankHost(0, {"fake": FakePlane()}, host)
        with pytest.raises(ValueError, match="transports"):
            RankHost(0, {})

    def test_ipv6_is_an_address_as_well(self, rig: Rig) -> None:
        rig.keep(RankHost(0, {"fake": FakePlane()}, "::1"))
        rig.hosts[0].start()
        transport = rig.link(rig.hosts[0].invitation).transports(0)["fake"]
        assert endpoint(Side(NEAR, transport, memoryview(b"")), FAR)


class TestStrangers:
    """Only the holder of the invitation is served, and only the first (promise 5)."""

    def test_a_key_that_was_not_minted_here_is_refused(self, rig: Rig) -> None:
        plane = FakePlane()
        host = rig.host(("fake", plane))
        public, secret = zmq.curve_keypair()
        forged = msgspec.structs.replace(host.invitation, engine_public=public.decode(), engine_secret=secret.decode())
        stranger = rig.link(forged).transports(0)["fake"]
        with pytest.raises(TimeoutError):
            stranger.endpoint(FAR)
        until(lambda: host.strangers)
        assert plane.asked == []
        assert endpoint(Side(NEAR, rig.link(host.invitation).transports(0)["fake"], memoryview(b"")), FAR)

    def test_one_who_speaks_another_protocol_is_ignored(self, rig: Rig) -> None:
        host = rig.host(("fake", FakePlane()))
        port = int(host.invitation.endpoint.rpartition(":")[2])
        with socket.create_connection(("127.0.0.1", port), 20) as caller:
            caller.sendall(b"GET / HTTP/1.1\r\n\r\n")
            until(lambda: host.strangers)
        assert endpoint(Side(NEAR, rig.link(host.invitation).transports(0)["fake"], memoryview(b"")), FAR)

    def test_a_second_engine_with_the_same_invitation_gets_nothing(self, rig: Rig) -> None:
        plane = FakePlane()
        host = rig.host(("fake", plane))
        first = Side(NEAR, rig.link(host.invitation).transports(0)["fake"], memoryview(b""))
        assert endpoint(first, FAR)
        second = rig.link(host.invitation).transports(0)["fake"]
        second.disconnect(FAR)
        with pytest.raises(TimeoutError):
            second.endpoint(OTHER)
        until(lambda: host.stream_counters["refused"])
        assert plane.asked == [("endpoint", FAR)]
        first.transport.disconnect(FAR)
        until(lambda: ("disconnect", FAR) in plane.asked)


class TestOrder:
    def test_commands_arrive_in_the_order_in_which_they_were_given(self, rig: Rig) -> None:
        plane, transport = faked(rig)
        expected: list[tuple[str, Any]] = []
        for job in range(200):
            transport.connect(FAR, b"there")
            transport.submit(a_copy(job, spans=1 + job % 7))
            transport.cancel(JobId(job))
            transport.cancel(JobId(job))  # asked once
            transport.disconnect(FAR)
            transport.disconnect(FAR)  # nothing left to forget
            expected += [("connect", FAR), ("submit", job), ("cancel", job), ("disconnect", FAR)]
        until(lambda: len(plane.asked) >= len(expected))
        assert plane.asked == expected

    def test_a_large_table_of_spans_crosses_in_parts_and_whole(self, rig: Rig) -> None:
        plane, transport = faked(rig)
        sent = a_copy(1, spans=400_000)  # 9.6 MB
        assert len(submit_commands("fake", sent)) == 3
        assert transport.submit(sent) and transport.submit(a_copy(2))
        until(lambda: len(plane.moving) == 2)
        assert plane.moving[JobId(1)] == sent and plane.moving[JobId(2)] == a_copy(2)

    def test_a_table_with_a_part_missing_is_never_used(self) -> None:
        """Half of the spans copied and called a success would be a wrong answer (promise 1)."""
        first, last = submit_commands("fake", a_copy(1, spans=PART_BYTES_MAX // 24 + 10))
        assert isinstance(first, TablePart) and isinstance(last, Submit)
        assert copy_of(last, first.table) == a_copy(1, spans=PART_BYTES_MAX // 24 + 10)
        plane = HostedPlane("fake", FakePlane())
        plane.carry_out(last)
        (end,) = plane.take_news()
        assert (end.job, end.reason, end.at_rest) == (1, Reason.BAD_SPAN, True)  # type: ignore[union-attr]

    def test_a_loan_with_a_part_of_its_table_missing_is_never_lent(self) -> None:
        """It ended as if the transport had failed, which puts the blame on a data plane that was never asked."""
        areas = (Area(0, array("q", range(3 * 40)), array("q", [0])),)
        loan = Loan(JobId(1), OTHER, WRITE, ((1, 2),), areas)
        *parts, last = lend_commands("fake", loan, 64)
        assert parts and isinstance(last, RankLend)
        plane = HostedPlane("fake", FakePlane())
        plane.carry_out(last)
        (end,) = plane.take_news()
        assert (end.job, end.reason, end.at_rest) == (1, Reason.BAD_SPAN, True)  # type: ignore[union-attr]
        assert plane.transport.asked == []  # type: ignore[attr-defined]

    def test_a_loan_crosses_whole_in_parts_of_any_size(self) -> None:
        areas = Area(0, array("q", range(8)), array("q", [0, 64])), Area(1, array("q", [5, 6]), array("q", [7]))
        loan = Loan(JobId(1), OTHER, WRITE, ((1, 2), (3,)), areas)
        for part_bytes in (8, 24, 128, 4096):
            *parts, last = lend_commands("fake", loan, part_bytes)
            assert loan_of(last, b"".join(part.table for part in parts)) == loan  # type: ignore[arg-type,union-attr]

    @pytest.mark.parametrize(
        ("due", "why"),
        [
            (((0, 64 + 8, 8), (1, 16, 8)), "an area of 72 bytes"),
            (((0, 64, 12), (1, 16, 12)), "an area of 64 bytes"),
            (((0, 16, 8 * SPANS_MAX), (1, 16, 8)), "received"),
            (((0, 16, 8 * SPANS_MAX + 8), (1, 16, 8)), "an area of 16 bytes"),
            (((0, TABLE_BYTES_MAX, 0),), "received"),
            (((0, TABLE_BYTES_MAX, 0), (0, 16, 0)), "at most"),
            (((0, TABLE_BYTES_MAX // 2, 0), (0, TABLE_BYTES_MAX // 2, 8)), "at most"),
            (((0, 0, 0),) * TABLES_MAX, "received"),
            (((0, 0, 0),) * (TABLES_MAX + 1), "at most"),
        ],
    )
    def test_a_loan_whose_sizes_cannot_be_is_never_lent(self, due: tuple[tuple[int, int, int], ...], why: str) -> None:
        """Whole rows and shifts, no more of them than a table can have, and all that came: else a part is unwatched."""
        areas = Area(0, array("q", range(8)), array("q", [0])), Area(1, array("q", [5, 6]), array("q", [7]))
        (last,) = lend_commands("fake", Loan(JobId(1), OTHER, WRITE, ((1,),), areas))
        with pytest.raises(ValueError, match=why):
            loan_of(msgspec.structs.replace(last, due=due))  # type: ignore[arg-type]


class TestWeaves:
    """A handoff of 1,000 blocks in 64 layers crosses as 1,000 rows and 64 shifts, not as 64,000 spans."""

    def test_a_rank_whose_plane_weaves_is_handed_the_weave(self, rig: Rig) -> None:
        able = msgspec.structs.replace(FAKE, weaves=True)
        plane, transport = faked(rig, FakePlane(able))
        assert transport.capabilities == able
        sent = [woven(1), woven(2, rows=1000, shifts=64, spans=0), woven(3, rows=200_000, spans=200_000), a_copy(4)]
        assert [len(submit_commands("fake", each)) for each in sent] == [1, 1, 3, 1]
        assert all(transport.submit(each) for each in sent)
        until(lambda: len(plane.moving) == len(sent))
        assert list(plane.moving.values()) == sent

    def test_a_torn_weave_is_never_used(self) -> None:
        """Half of a weave copied and called a success would be a wrong answer (promise 1)."""
        (submit,) = submit_commands("fake", woven(1))
        assert isinstance(submit, Submit) and copy_of(submit) == woven(1)
        for torn in (
            {"table": submit.table[:-16]},
            {"table": submit.table + bytes(24)},
            {"column_bytes": 72 - 24},  # more came than was told
            {"column_bytes": 0},
            {"shifts_bytes": 0},
            {"column_bytes": 72 + 8, "shifts_bytes": 32 - 8},  # as many bytes as came, but no whole rows
            {"spans_bytes": 24 + 72, "column_bytes": 0},
        ):
            plane = HostedPlane("fake", FakePlane())
            plane.carry_out(msgspec.structs.replace(submit, **torn))
            (end,) = plane.take_news()
            assert (end.job, end.reason, end.at_rest) == (1, Reason.BAD_SPAN, True), torn  # type: ignore[union-attr]
            assert plane.transport.asked == []  # type: ignore[attr-defined]

    def test_what_no_planner_makes_does_not_cross(self) -> None:
        rows = 1 << 12
        assert submit_commands("fake", woven(1, rows, SPANS_MAX // rows))
        for odd, why in (
            (woven(1, rows, SPANS_MAX // rows + 1), "rows can cross"),
            (woven(1, 0, 2), "whole rows"),
            (woven(1, 2, 0), "whole rows"),
        ):
            with pytest.raises(ValueError, match=why):
                submit_commands("fake", odd)

    def test_a_weave_counts_with_what_crosses_for_it_until_it_has_ended(
        self, rig: Rig, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(rank_transport, "TABLES_QUEUED_BYTES_MAX", 24 * 100)
        plane, transport = faked(rig, FakePlane(msgspec.structs.replace(FAKE, weaves=True)))
        assert transport.submit(woven(1, rows=60)) and not transport.submit(woven(2, rows=60))
        until(lambda: plane.moving)
        plane.say(CopyEnded(JobId(1), Reason.TRANSFER_FAILED, at_rest=False))
        drained(transport, 1)
        assert transport.submit(woven(2, rows=60)) and not transport.submit(a_copy(3, spans=60))
        until(lambda: JobId(2) in plane.moving)
        plane.say(CopyEnded(JobId(2)), CopyRested(JobId(1)))
        drained(transport, 2)
        assert transport.submit(woven(3, rows=95)), "all room is there again"


class TestRefusals:
    def test_what_cannot_cross_is_refused_here(self, rig: Rig) -> None:
        class Event:
            def synchronize(self) -> None: ...

        _, transport = faked(rig)
        with pytest.raises(ValueError, match="device event"):
            transport.submit(msgspec.structs.replace(a_copy(1), after=Event()))
        with pytest.raises(NotImplementedError, match="rank's process"):
            transport.register(0, memoryview(bytearray(8)))
        with pytest.raises(ValueError, match="whole rows"):
            transport.submit(msgspec.structs.replace(a_copy(1), spans=array("q", [1, 2])))
        for nonsense in (b"", bytes(5000)):
            with pytest.raises(ValueError, match="an endpoint of"):
                transport.connect(FAR, nonsense)
        assert transport.submit(a_copy(1))
        with pytest.raises(ValueError, match="already in flight"):
            transport.submit(a_copy(1))

    @pytest.mark.parametrize("kind", [TcpEndpoint, SealedTcpEndpoint])
    def test_a_peer_that_insists_on_encryption_is_reached_as_well(self, rig: Rig, kind: type[TcpEndpoint]) -> None:
        plane, transport = faked(rig, FakePlane(capabilities=TCP))
        transport.connect(FAR, msgspec.msgpack.encode(kind(FAR, "127.0.0.1", 1, b"secret", {})))
        until(lambda: plane.asked == [("connect", FAR)])
        with pytest.raises(ValueError, match="belongs to"):
            transport.connect(OTHER, msgspec.msgpack.encode(kind(FAR, "127.0.0.1", 1, b"secret", {})))

    def test_an_endpoint_that_only_the_rank_can_judge_fails_its_copies(self, rig: Rig) -> None:
        transport = rig.remote("shm", NEAR, rig.memory(SIZE).view)
        elsewhere = ShmEndpoint(FAR, "another host", "name", bytes(32))
        transport.connect(FAR, msgspec.msgpack.encode(elsewhere))
        assert transport.submit(a_copy(1))
        refused, end = drained(transport, 2)
        assert isinstance(refused, OpenFailed) and refused.peer == FAR and "another host" in refused.detail
        assert isinstance(end, CopyEnded) and end.reason is Reason.PEER_UNKNOWN and end.at_rest
        assert rig.links[0].counters["connects_refused"] == 1

    def test_what_a_transport_throws_is_the_end_of_one_copy(self, rig: Rig) -> None:
        plane, transport = faked(rig, FakePlane(throws="submit"))
        assert transport.submit(a_copy(1))
        (end,) = drained(transport, 1)
        assert isinstance(end, CopyEnded) and end.reason is Reason.TRANSFER_FAILED and "submit threw" in end.detail
        plane.throws = "disconnect"
        transport.connect(FAR, b"there")
        transport.disconnect(FAR)
        plane.throws = ""
        transport.connect(FAR, b"there")
        until(lambda: plane.asked[-1] == ("connect", FAR))


class TestBounds:
    def test_copies_are_bounded_and_none_is_lost(self, rig: Rig) -> None:
        plane, transport = faked(rig)
        accepted = 0
        while transport.submit(a_copy(accepted)):
            accepted += 1
        assert accepted == COPIES_MAX
        until(lambda: len(plane.moving) == COPIES_MAX)
        plane.say(*(CopyEnded(job) for job in list(plane.moving)))
        ended = drained(transport, COPIES_MAX)
        assert sorted(event.job for event in ended if isinstance(event, CopyEnded)) == list(range(COPIES_MAX))
        assert transport.submit(a_copy(accepted))

    def test_spans_are_bounded_in_bytes_and_one_copy_always_fits(
        self, rig: Rig, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(rank_transport, "TABLES_QUEUED_BYTES_MAX", 24 * 100)
        plane, transport = faked(rig)
        assert transport.submit(a_copy(1, spans=1000)) and not transport.submit(a_copy(2))
        until(lambda: plane.moving)
        plane.say(CopyEnded(JobId(1)))
        drained(transport, 1)
        assert transport.submit(a_copy(2, spans=60)) and not transport.submit(a_copy(3, spans=60))

    def test_a_full_data_plane_holds_up_nothing_that_could_end_it(self, rig: Rig) -> None:
        plane, transport = faked(rig, FakePlane(room=1))
        for job, peer in ((1, FAR), (2, FAR), (3, OTHER), (4, OTHER), (5, OTHER)):
            assert transport.submit(a_copy(job, peer))
        transport.connect(FAR, b"there")
        transport.disconnect(FAR)  # ends 2, which waits
        transport.cancel(JobId(4))
        ends = [(end.job, end.reason) for end in drained(transport, 2) if isinstance(end, CopyEnded)]
        assert ends == [(2, Reason.PEER_GONE), (4, Reason.CANCELLED)]
        for job in (1, 3, 5):
            until(lambda job=job: job in plane.moving)  # type: ignore[misc]
            plane.say(CopyEnded(JobId(job)))
            drained(transport, 1)
        assert [about for what, about in plane.asked if what == "submit"] == [1, 3, 5]

    def test_new_obligations_wait_while_the_rank_does_not_keep_up(
        self, rig: Rig, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(rank_transport, "COMMANDS_MAX", 3)
        plane, transport = faked(rig)
        plane.go.clear()
        with pytest.raises(TimeoutError):
            transport.endpoint(FAR)
        transport.connect(FAR, b"there")
        transport.connect(OTHER, b"there")
        with pytest.raises(TimeoutError, match="has not acknowledged 3"):
            transport.connect(FAR, b"elsewhere")
        transport.disconnect(FAR)
        plane.go.set()
        until(lambda: ("disconnect", FAR) in plane.asked)


class TestEndpoints:
    def test_an_endpoint_is_kept_until_the_peer_is_forgotten(self, rig: Rig) -> None:
        plane, transport = faked(rig)
        side = Side(NEAR, transport, memoryview(b""))
        first = endpoint(side, FAR)
        assert endpoint(side, FAR) == first and len(plane.asked) == 1
        for forget in (transport.disconnect, transport.fence):
            forget(FAR)
            assert endpoint(side, FAR) != first

    def test_a_late_endpoint_costs_one_wait_and_is_there_for_the_next_call(
        self, rig: Rig, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        plane, transport = faked(rig)
        plane.go.clear()
        with pytest.raises(TimeoutError, match="try again"):
            transport.endpoint(FAR)
        monkeypatch.setattr(rank_transport, "ENDPOINT_WAIT_S", 15.0)
        begun = time.monotonic()
        for peer in (FAR, OTHER, FAR):
            with pytest.raises(TimeoutError):
                transport.endpoint(peer)
        assert time.monotonic() - begun < 15, "only the first question is waited for"
        plane.go.set()
        until(lambda: endpoint(Side(NEAR, transport, memoryview(b"")), OTHER))
        assert transport.endpoint(FAR) == b"endpoint 1" and len(plane.asked) == 2

    def test_an_endpoint_of_before_a_disconnect_is_not_given_out(self, rig: Rig) -> None:
        plane, transport = faked(rig)
        plane.go.clear()
        with pytest.raises(TimeoutError):
            transport.endpoint(FAR)
        transport.disconnect(FAR)
        plane.go.set()
        assert endpoint(Side(NEAR, transport, memoryview(b"")), FAR) == b"endpoint 3"

    def test_a_rank_that_cannot_make_one_says_why(self, rig: Rig) -> None:
        plane, transport = faked(rig, FakePlane(throws="endpoint"))
        with pytest.raises(RuntimeError, match="endpoint threw"):
            endpoint(Side(NEAR, transport, memoryview(b"")), FAR)
        plane.throws = ""
        assert endpoint(Side(NEAR, transport, memoryview(b"")), FAR)


class TestFences:
    def test_a_fence_that_threw_in_its_rank_is_asked_for_again_there(self, rig: Rig) -> None:
        plane, transport = faked(rig, FakePlane(throws="fence"), ping_s=60.0)
        transport.fence(FAR)
        until(lambda: len(plane.asked) > 1)
        plane.throws = ""
        assert {what for what, _ in plane.asked} == {"fence"}

    def test_each_fence_ends_by_itself_and_in_order(self, rig: Rig) -> None:
        """The ledger takes an end for that of the oldest fence: one that is missing would be waited for, for ever."""
        plane, transport = faked(rig)
        transport.fence(FAR)
        transport.fence(FAR)
        endpoint(Side(NEAR, transport, memoryview(b"")), FAR)
        transport.fence(FAR)
        until(lambda: [what for what, _ in plane.asked] == ["fence", "fence", "endpoint", "fence"])
        plane.say(FenceEnded(FAR), CopyEnded(JobId(9)))
        plane.say(FenceEnded(OTHER))
        assert drained(transport, 2) == [FenceEnded(FAR), FenceEnded(OTHER)]
        plane.say(FenceEnded(FAR), FenceEnded(FAR))
        assert drained(transport, 2) == [FenceEnded(FAR), FenceEnded(FAR)]


class TestProgress:
    def test_progress_comes_with_its_rank_and_wakes_the_node(self, rig: Rig) -> None:
        hosts = [rig.host(("fake", FakePlane()), rank=rank) for rank in (0, 1)]
        rung = threading.Event()
        links = rig.link(*(host.invitation for host in reversed(hosts)), tell=rung.set)
        found: list[LeaseProgressed] = []
        for count, (rank, blocks) in enumerate(((1, 3), (0, 4)), 1):
            rung.clear()
            hosts[rank].progressed(LeaseId(5), whole([blocks]))
            assert rung.wait(20)
            until(lambda count=count: found.extend(links.drain_progress()) or len(found) >= count)  # type: ignore[misc]
        assert found == [LeaseProgressed(LeaseId(5), 1, whole([3])), LeaseProgressed(LeaseId(5), 0, whole([4]))]

    def test_only_the_latest_of_a_lease_is_kept_and_leases_are_bounded(
        self, rig: Rig, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(rank_host, "LEASES_MAX", 2)
        monkeypatch.setattr(rank_link, "LEASES_MAX", 1)
        host = rig.keep(RankHost(0, {"fake": FakePlane()}))
        for lease, blocks in ((1, 1), (1, 2), (2, 1), (3, 1), (1, 3)):
            host.progressed(LeaseId(lease), whole([blocks]))
        assert host.counters["progress_lost"] == 1
        host.start()
        links = rig.link(host.invitation)
        until(lambda: links.counters["progress_lost"])
        assert links.drain_progress() == [LeaseProgressed(LeaseId(2), 0, whole([1]))]
        host.stop()
        host.progressed(LeaseId(1), whole([4]))  # after the end: nothing happens


class TestLosing:
    """A rank that is gone takes nothing with it but what it had (promises 2 and 4)."""

    def test_pings_are_counted_and_not_seconds(self) -> None:
        """Nobody may be lost because this process did not run."""
        invitation = RankInvitation(0, "tcp://127.0.0.1:1", "k" * 40, "k" * 40, "k" * 40, {"fake": FAKE})
        link = RankLink(invitation, lambda: None, pings_max=3, ping_s=2.0)
        transport = link.transports["fake"]
        assert transport.submit(a_copy(1))
        for now in (0.0, 1000.0, 2000.0):
            link.due(now)
        assert not link.lost and not transport.drain()
        link.due(3000.0)
        assert link.lost
        (end,) = transport.drain()
        assert isinstance(end, CopyEnded) and not end.at_rest and "rank 0" in end.detail

    def test_news_that_cannot_be_read_end_what_they_may_have_been_about(self) -> None:
        """A copy whose end was garbled must not be waited for (promise 2)."""
        invitation = RankInvitation(0, "tcp://127.0.0.1:1", "k" * 40, "k" * 40, "k" * 40, {"fake": FAKE})
        link = RankLink(invitation, lambda: None, pings_max=3, ping_s=2.0)
        assert link.transports["fake"].submit(a_copy(1))
        rank = Stream(link.stream.session)
        rank.add(b"junk")
        for frame in rank.due(0.0):
            link.take(frame, 0.0)
        (end,) = link.transports["fake"].drain()
        assert isinstance(end, CopyEnded) and not end.at_rest and link.counters["malformed"] == 1
        rank.add(encode_news([RankEnded("fake", JobId(1), Reason.CANCELLED, True, "")]))
        for frame in rank.due(0.0):
            link.take(frame, 0.0)
        assert link.transports["fake"].drain() == [CopyRested(JobId(1))] and not link.lost

    @pytest.mark.slow
    def test_a_stopped_rank_is_lost_and_comes_back(self, rig: Rig) -> None:
        near, far, memory = rig.memory(SIZE), rig.memory(SIZE), random.Random(1).randbytes(SIZE)
        far.view[:] = memory
        process = rig.process("tcp", NEAR, near)
        links = rig.link(process.invitation, ping_s=0.5, lost_s=LOST_S)
        transport = links.transports(0)["tcp"]
        here = Side(NEAR, transport, near.view)
        there = Side(FAR, rig.direct("tcp", FAR, far.view), far.view)
        join(here, there)
        log = log_of(here)
        assert transport.submit(copy(1, there, READ, [(0, 0, SIZE)])) and log.end(1).reason is None
        process.pause()
        assert transport.submit(copy(2, there, READ, [(0, 0, 64)]))
        transport.fence(FAR)
        end = log.end(2)
        assert (end.reason, end.at_rest) == (Reason.TRANSFER_FAILED, False) and "rank 0" in end.detail
        assert links.is_lost(0)
        assert transport.submit(copy(3, there, READ, [(0, 0, 64)]))
        assert (log.end(3).reason, log.end(3).at_rest) == (Reason.TRANSFER_FAILED, True), "it was never started"
        with pytest.raises(ConnectionError):
            transport.connect(FAR, there.transport.endpoint(NEAR))
        with pytest.raises(ConnectionError):
            transport.endpoint(OTHER)
        transport.disconnect(OTHER)
        assert not log.rested(2) and FenceEnded(FAR) not in log.events, "nothing is known of its memory"
        process.resume()
        log.rest(2)
        assert log.wait(lambda: FenceEnded(FAR) in log.events)
        assert not links.is_lost(0)
        join(here, there)
        assert transport.submit(copy(4, there, READ, [(0, 0, SIZE)])) and log.end(4).reason is None
        assert bytes(near.view) == memory and len(log.ends(2)) == 1

    @pytest.mark.slow
    def test_a_killed_rank_is_lost_for_good(self, rig: Rig) -> None:
        near, far = rig.memory(8 << 20), rig.memory(8 << 20)
        process = rig.process("tcp", NEAR, near)
        links = rig.link(process.invitation, ping_s=0.5, lost_s=LOST_S)
        transport = links.transports(0)["tcp"]
        here, there = Side(NEAR, transport, near.view), Side(FAR, rig.direct("tcp", FAR, far.view), far.view)
        join(here, there)
        log = log_of(here)
        assert transport.submit(copy(0, there, WRITE, [(0, 0, 64)])) and log.end(0).reason is None
        process.pause()  # so that none of these ends before the kill
        for job in (1, 2, 3):
            assert transport.submit(copy(job, there, WRITE, [(0, 0, 8 << 20)]))
        process.kill()
        for job in (1, 2, 3):
            assert (log.end(job).reason, log.end(job).at_rest) == (Reason.TRANSFER_FAILED, False)
        begun = time.monotonic()
        transport.close()
        assert links.stop() and time.monotonic() - begun < 10
        assert not any(isinstance(event, CopyRested) for event in log.events)

    @pytest.mark.slow
    def test_a_rank_whose_interpreter_stalls_loses_nothing(self, rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
        """Compilation holds the GIL for seconds; libzmq keeps the connection, and the rank answers afterwards."""
        monkeypatch.setattr(rank_stream, "RESEND_S", 600.0)  # so that what is lost never comes, however late we are
        near, far = rig.memory(SIZE), rig.memory(SIZE)
        far.view[:] = memory = random.Random(1).randbytes(SIZE)
        process = rig.process("shm", NEAR, near)
        links = rig.link(process.invitation, ping_s=0.2)
        transport = links.transports(0)["shm"]
        here, there = Side(NEAR, transport, near.view), Side(FAR, rig.direct("shm", FAR, far.view), far.view)
        join(here, there)
        process.tell("stall 2")
        assert process.hear() == "stalling"
        process.tell("progress 5 3")
        assert transport.submit(copy(1, there, READ, [(0, 0, SIZE)]))
        assert log_of(here).end(1).reason is None and bytes(near.view) == memory
        until(lambda: links.drain_progress() == [LeaseProgressed(LeaseId(5), 0, whole([3]))])
        assert links.counters["losses"] == 0 and links.counters["resent"] == 0

    def test_a_broken_connection_loses_nothing(self, rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
        """What was under way on it is sent again, in order and once."""
        monkeypatch.setattr(rank_stream, "RESEND_S", 0.1)
        plane = FakePlane()
        host = rig.host(("fake", plane))
        proxy = Proxy(host.invitation.endpoint)
        links = rig.link(msgspec.structs.replace(host.invitation, endpoint=proxy.endpoint), ping_s=0.2)
        transport = links.transports(0)["fake"]
        assert endpoint(Side(NEAR, transport, memoryview(b"")), FAR)  # connected
        for start in range(0, 150, 50):
            proxy.swallow()
            for job in range(start, start + 50):
                assert transport.submit(a_copy(job))
            proxy.cut_when_lost("to the rank", 3000)
            until(lambda start=start: len(plane.moving) == start + 50)  # type: ignore[misc]
        ended: list[int] = []
        for start in range(0, 150, 50):
            proxy.swallow()
            plane.say(*(CopyEnded(JobId(job)) for job in range(start, start + 50)))
            proxy.cut_when_lost("to the engine", 500)
            ended += [event.job for event in drained(transport, 50) if isinstance(event, CopyEnded)]
        assert ended == list(range(150))
        assert [about for what, about in plane.asked if what == "submit"] == list(range(150))
        assert links.counters["resent"] and host.stream_counters["resent"]
        assert links.counters["losses"] == 0
        proxy.close()


class Proxy:
    """Passes bytes between the engine and a rank, or swallows them, until told to cut every connection.

    A connection that swallows never passes anything again, and one that was made since passes all: half of a handshake
    would be waited for.
    """

    def __init__(self, endpoint: str) -> None:
        self._lost = {"to the rank": 0, "to the engine": 0}
        self._deaf: set[socket.socket] = set()
        self._to = ("127.0.0.1", int(endpoint.rpartition(":")[2]))
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.endpoint = f"tcp://127.0.0.1:{self._listener.getsockname()[1]}"
        self._open: list[socket.socket] = []
        threading.Thread(target=self._serve, daemon=True).start()

    def swallow(self) -> None:
        """Lose what comes on the connections that there are, from now on."""
        self._lost = dict.fromkeys(self._lost, 0)
        self._deaf |= set(self._open)

    def cut_when_lost(self, way: str, lost_bytes: int) -> None:
        until(lambda: self._lost[way] >= lost_bytes)
        self._cut()

    def close(self) -> None:
        _shut(self._listener)  # wakes its thread
        self._listener.close()
        self._cut()

    def _cut(self) -> None:
        while self._open:
            _shut(self._open.pop())

    def _serve(self) -> None:
        while True:
            try:
                caller, _ = self._listener.accept()
            except OSError:
                return
            other = socket.create_connection(self._to)
            self._open += [caller, other]
            for source, target, way in ((caller, other, "to the rank"), (other, caller, "to the engine")):
                threading.Thread(target=self._pass, args=(source, target, way), daemon=True).start()

    def _pass(self, source: socket.socket, target: socket.socket, way: str) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                if source in self._deaf:
                    self._lost[way] += len(data)
                else:
                    target.sendall(data)
        _shut(source)
        _shut(target)


def _shut(sock: socket.socket) -> None:
    with contextlib.suppress(OSError):
        sock.shutdown(socket.SHUT_RDWR)


def test_one_thread_serves_all_ranks_and_everything_ends_at_a_stop(rig: Rig) -> None:
    def serving() -> set[threading.Thread]:
        return {thread for thread in threading.enumerate() if thread.name == "kvbaton-ranks"}

    planes, before = [FakePlane() for _ in range(8)], serving()
    hosts = [rig.host(("fake", plane), rank=rank) for rank, plane in enumerate(planes)]
    links = rig.link(*(host.invitation for host in hosts))
    assert len(links) == 8
    assert len(serving() - before) == 1
    for rank in range(8):
        assert links.transports(rank)["fake"].submit(a_copy(rank))
        until(lambda rank=rank: rank in planes[rank].moving)  # type: ignore[misc]
    links.transports(0)["fake"].close()
    until(lambda: ("close", None) in planes[0].asked)
    assert not links.transports(0)["fake"].submit(a_copy(99)), "nothing is taken after a close"
    assert links.stop()
    for rank in range(8):
        (end,) = links.transports(rank)["fake"].drain()
        assert isinstance(end, CopyEnded) and (end.job, end.at_rest) == (rank, False)


def test_the_same_spans_arrive_that_were_sent() -> None:
    spans = flat([(1, 2, 3), (2**62, -1, -(2**63))])
    (submit,) = submit_commands("fake", Copy(JobId(1), FAR, WRITE, 3, 4, spans))
    assert isinstance(submit, Submit) and copy_of(submit) == Copy(JobId(1), FAR, WRITE, 3, 4, spans)
