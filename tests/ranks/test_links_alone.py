"""The engine's end of its rank links alone: pings, losses, progress, and what goes to which rank.

`Modelled` holds one link to a model that only counts, whatever its rank says.
"""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Iterator
from typing import Any, cast

import msgspec
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvbaton.protocol.events import LeaseProgressed
from kvbaton.protocol.geometry.progress import whole
from kvbaton.protocol.ids import Incarnation, JobId, LeaseId, PeerId, WorkerId, rank_peer
from kvbaton.ranks.rank_host import _HERE, RankHost
from kvbaton.ranks.rank_link import RankLink, RankLinks
from kvbaton.ranks.rank_messages import (
    Cancel,
    Open,
    Progressed,
    RankInvitation,
    Rested,
    decode_command,
    encode_command,
    encode_news,
)
from kvbaton.ranks.rank_store_messages import RankStoreEnded
from kvbaton.ranks.rank_stream import Stream, StreamEnvelope

from .rank_stubs import FAKE, Heard, Line, StubCarrier

PING_S = 1.0
KEYS = ("1" * 40, "2" * 40, "3" * 40)
ABLE = {"a": FAKE, "b": FAKE}
ME = PeerId(WorkerId("d0"), Incarnation(1))


def invitation_of(rank: int, has_store: bool = False) -> RankInvitation:
    return RankInvitation(rank, "tcp://127.0.0.1:1", f"{rank}".rjust(40, "k"), *KEYS[1:], ABLE, has_store)


class StubStream:
    """The first letter of a frame says whether it counts as heard; the rest is its body."""

    def __init__(self) -> None:
        self.heard = self.backlog = self.asked = 0
        self.counters: Counter[str] = Counter()
        self.added: list[bytes] = []

    def take(self, frame: bytes, now: float) -> bytes | None:
        self.heard += frame[:1] == b"h"
        if frame[1:] == b"bad":
            raise msgspec.DecodeError("no frame")
        return frame[1:] or None

    def add(self, body: bytes) -> None:
        self.added.append(body)

    def ask(self) -> None:
        self.asked += 1

    def due(self, now: float) -> list[bytes]:
        frames, self.added = self.added, []
        return frames


class Modelled(RuleBasedStateMachine):
    """What is posted is sent in that order. A rank is asked every `ping_s`, and lost when as many pings were left
    unanswered, or when it said what cannot be read; its planes and its store hear of that, each time. It is back when
    it is heard. Of each lease the latest progress is kept, of so many as may be."""

    LEASES = 3

    @initialize(pings_max=st.integers(1, 3), has_store=st.booleans())
    def begin(self, pings_max: int, has_store: bool) -> None:
        self.wakes = self.tells = 0
        self.link = RankLink(
            invitation_of(2, has_store), self.wake, pings_max, PING_S, self.tell, cast(Any, StubCarrier())
        )
        assert list(self.link.transports) == list(ABLE) and (self.link.store is not None) == has_store
        self.stream = StubStream()
        self.parts = {name: Heard() for name in (*ABLE, *(("store",) if has_store else ()))}
        self.link.stream = cast(Stream, self.stream)
        self.link.transports = cast(Any, {name: self.parts[name] for name in ABLE})
        self.link.store = cast(Any, self.parts.get("store"))
        self.link.leases_max = self.LEASES
        self.heard: dict[str, list[Any]] = {name: [] for name in self.parts}
        self.pings_max, self.pings, self.asked, self.ping_at, self.now = pings_max, 0, 0, -math.inf, 0.0
        self.lost = False
        self.outbox: list[bytes] = []
        self.progress: dict[LeaseId, LeaseProgressed] = {}
        self.counters: Counter[str] = Counter()
        self.expected_wakes = self.expected_tells = 0

    def wake(self) -> None:
        self.wakes += 1

    def tell(self) -> None:
        self.tells += 1

    @rule(jobs=st.lists(st.integers(0, 9), max_size=3), backlog=st.integers(0, 4))
    def post(self, jobs: list[int], backlog: int) -> None:
        commands: list[Any] = [Cancel("a", JobId(job)) for job in jobs]
        self.outbox += [encode_command(command) for command in commands]
        self.expected_wakes += 1
        self.link.post(commands)
        self.stream.backlog = backlog
        assert self.link.backlog == len(self.outbox) + backlog

    @rule(leases=st.lists(st.tuples(st.integers(0, 5), st.integers(0, 9)), min_size=1, max_size=5))
    def hear_progress(self, leases: list[tuple[int, int]]) -> None:
        self.hear(encode_news([Progressed(LeaseId(lease), whole([blocks])) for lease, blocks in leases]))
        for number, blocks in leases:
            lease = LeaseId(number)
            self.progress.pop(lease, None)
            if len(self.progress) >= self.LEASES:
                del self.progress[next(iter(self.progress))]
                self.counters["progress_lost"] += 1
            self.progress[lease] = LeaseProgressed(lease, 2, whole([blocks]))
            self.expected_tells += 1

    @rule(who=st.sampled_from(("a", "b", "nobody", "store")), job=st.integers(0, 9))
    def hear_news(self, who: str, job: int) -> None:
        news = RankStoreEnded(job, 1, None, "") if who == "store" else Rested(who, JobId(job))
        self.hear(encode_news([news]))
        if who in self.heard:
            self.heard[who].append(("take", news))

    @rule(body=st.sampled_from((b"bad", b"\xc1")), heard=st.booleans())
    def hear_nonsense(self, body: bytes, heard: bool) -> None:
        self.hear(body, heard)
        self.counters["malformed"] += 1
        self.is_lost("rank 2 sent a message that cannot be decoded")

    @rule(heard=st.booleans())
    def hear_nothing_new(self, heard: bool) -> None:
        self.hear(b"", heard)

    def hear(self, body: bytes, heard: bool = True) -> None:
        if heard and body != b"bad":
            self.pings = 0
            if self.lost:
                self.lost = False
                self.heard.get("store", []).append(("on_back",))
        self.link.take((b"h" if heard and body != b"bad" else b"-") + body, self.now)

    def is_lost(self, detail: str) -> None:
        self.lost = True
        for heard in self.heard.values():
            heard.append(("on_lost", detail))

    @rule(seconds=st.sampled_from((0.0, PING_S / 2, PING_S, PING_S)))
    def send(self, seconds: float) -> None:
        self.now += seconds
        if self.now >= self.ping_at:
            if self.pings >= self.pings_max and not self.lost:
                self.counters["losses"] += 1
                self.is_lost(f"rank 2 did not answer {self.pings} pings; the state of its memory is unknown")
            self.pings, self.ping_at, self.asked = self.pings + 1, self.now + PING_S, self.asked + 1
        sent, self.outbox = self.outbox, []
        assert (self.link.due(self.now), self.link.next_ping) == (sent, self.ping_at)

    @rule()
    def take_progress(self) -> None:
        assert self.link.take_progress() == list(self.progress.values())
        self.progress.clear()

    @precondition(lambda self: hasattr(self, "link"))
    @invariant()
    def the_same_is_seen(self) -> None:
        assert self.link.lost == self.lost and self.stream.asked == self.asked
        assert {name: part.journal for name, part in self.parts.items()} == self.heard
        assert +self.link.counters == +self.counters
        assert (self.wakes, self.tells) == (self.expected_wakes, self.expected_tells)

    def teardown(self) -> None:
        if hasattr(self, "link"):
            self.link.stop("why")
            self.is_lost("why")
            self.heard.get("store", []).append(("on_stopped", "why"))
            self.the_same_is_seen()


TestModelled = Modelled.TestCase
TestModelled.settings = settings(max_examples=60, stateful_step_count=40)


class Linked:
    """Links to ranks elsewhere, and to some whose host is in this process."""

    def __init__(self, far: int = 2, near: int = 0, has_store: bool = False, **options: Any) -> None:
        self.now, self.tells = 0.0, 0
        self.carrier = StubCarrier()
        self.planes = {rank: {name: Heard(drain=list) for name in ABLE} for rank in range(far, far + near)}
        make = (lambda compat: cast(Any, None)) if has_store else None
        self.hosts = {
            rank: RankHost(rank, cast(Any, planes), store=make, carrier=cast(Any, self.carrier))
            for rank, planes in self.planes.items()
        }
        invitations = [invitation_of(rank, has_store) for rank in range(far)]
        self.invitations = [*(host.invitation for host in self.hosts.values()), *invitations]  # in no order
        self.options = {"clock": lambda: self.now, "tell": self.tell, "carrier": self.carrier, **options}

    def open(self) -> RankLinks:
        links = RankLinks(self.invitations, PING_S, **self.options)
        self.lines: Line = self.carrier.lines[-1]
        self.loop = self.carrier.loops[-1]
        return links

    def tell(self) -> None:
        self.tells += 1

    def commands(self) -> list[tuple[int, Any]]:
        sent, self.lines.sent = self.lines.sent, []
        frames = [(rank, msgspec.msgpack.decode(frame, type=StreamEnvelope)) for rank, frame in sent]
        return [(rank, decode_command(frame.body)) for rank, frame in frames if frame.number]


@pytest.fixture(autouse=True)
def forgotten() -> Iterator[None]:
    yield
    _HERE.clear()


@pytest.mark.parametrize("ranks", [(), (1,), (0, 0), (0, 2)])
def test_there_is_one_invitation_for_each_rank(ranks: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="expected one for each rank"):
        RankLinks([invitation_of(rank) for rank in ranks], carrier=cast(Any, StubCarrier()))


@pytest.mark.parametrize(("lost_s", "pings"), [(0.5, 1), (1.0, 1), (1.5, 1), (2.5, 2), (3.0, 2), (4.5, 4)])
def test_a_rank_is_lost_after_the_pings_that_fit_before_it(
    lost_s: float, pings: int, caplog: pytest.LogCaptureFixture
) -> None:
    linked = Linked(far=1, lost_s=lost_s)
    links = linked.open()
    with caplog.at_level(logging.ERROR):
        for turn in range(pings + 1):
            assert not links.is_lost(0)
            assert linked.loop.turn(float(turn)) == turn + 1.0
    assert links.is_lost(0) and links.counters["losses"] == 1
    assert [record.message.split()[0] for record in caplog.records] == ["[rank-lost]"]


def test_each_command_goes_to_its_rank_and_each_frame_comes_from_one() -> None:
    linked = Linked(far=2, me=ME)
    links = linked.open()
    assert len(links) == 2 and linked.carrier.sleepers[-1] is linked.lines
    assert links.transports(1) is not links.transports(0)
    links.transports(1)["b"].fence(ME)
    for rank in range(2):
        session = links._links[rank].stream.session
        news = encode_news([Progressed(LeaseId(4), whole([rank + 1]))])
        linked.lines.inbox.append((rank, msgspec.msgpack.encode(StreamEnvelope(session, 1, 0, False, news))))
    assert linked.loop.turn(0.0) == PING_S
    named = [(rank, Open(name, rank_peer(ME, rank))) for rank in range(2) for name in ABLE]
    sent = linked.commands()
    assert [each for each in sent if isinstance(each[1], Open)] == named
    assert [rank for rank, command in sent if not isinstance(command, Open)] == [1]
    assert links.drain_progress() == [LeaseProgressed(LeaseId(4), rank, whole([rank + 1])) for rank in range(2)]
    assert links.drain_progress() == [] and linked.tells == 2


def test_the_next_turn_is_the_first_ping_that_is_due() -> None:
    linked = Linked(far=2)
    links = linked.open()
    linked.loop.turn(0.0)
    links._links[1]._ping_at = 0.5
    assert linked.loop.turn(0.25) == 0.5


def test_links_start_and_stop_with_their_loop() -> None:
    linked = Linked()
    links = linked.open()
    links.start()
    assert (links.stop(), links.stop(0.5)) == (True, False)
    assert linked.loop.started == 1 and linked.loop.timeouts == [5.0, 0.5]


@pytest.mark.parametrize("has_store", [False, True])
@pytest.mark.parametrize("me", [None, ME])
def test_a_rank_of_this_process_gives_its_planes(has_store: bool, me: PeerId | None) -> None:
    linked = Linked(far=1, near=1, has_store=has_store, me=me)
    links = linked.open()
    assert links.transports(1) == linked.planes[1]
    assert sorted(links._links) == ([0, 1] if has_store else [0])
    assert all((links.store(rank) is not None) == has_store for rank in range(2))
    linked.loop.turn(0.0)
    assert [rank for rank, _ in linked.commands()] == ([0, 0] if me else []), "nothing is sent to it"
    named = [call for plane in linked.planes[1].values() for call in plane.journal if call[0] == "set_identity"]
    assert len(named) <= 2
    linked.hosts[1].progressed(LeaseId(5), whole([1]))
    assert linked.tells == 1
    assert links.drain_progress() == [LeaseProgressed(LeaseId(5), 1, whole([1]))]
    links._links[0].end("gone")
    assert (links.is_lost(0), links.is_lost(1)) == (True, False)


def test_planes_that_another_engine_has_are_reached_over_the_line() -> None:
    linked = Linked(far=0, near=1)
    linked.hosts[0].give(linked.hosts[0].invitation, 1, linked.tell)
    assert linked.open().transports(0) != linked.planes[0]


def test_figures_are_of_all_ranks_together() -> None:
    linked = Linked(far=2, near=1)
    links = linked.open()
    linked.lines.counters["refused_frames"] = 1
    for rank in range(2):
        for name, transport in cast(Any, links.transports(rank)).items():
            transport.mapped_bytes = 1 + rank
            transport.counters["connects_refused"] = name == "b"
            transport.refusals = {"not_trusted": 1}
        links._links[rank].counters["losses"] = links._links[rank].stream.counters["gaps"] = 2
    for plane in linked.planes[2].values():
        plane.refusals = {"not_trusted": 3}  # type: ignore[attr-defined]
    assert links.mapped_bytes() == 6
    assert links.counters == {"refused_frames": 1, "connects_refused": 2, "losses": 4, "gaps": 4}
    refused = links.data_refused()
    assert sum(refused.values()) == 10 and links.data_refused() is refused
    linked.planes[2]["a"].refusals["not_trusted"] += 1  # type: ignore[attr-defined]
    assert sum(links.data_refused().values()) == 11


@pytest.mark.parametrize("breaks", [False, True])
def test_at_the_end_what_is_posted_is_sent_and_the_lines_are_closed(breaks: bool) -> None:
    linked = Linked(far=2, has_store=True)
    links = linked.open()
    for rank in range(2):
        links._links[rank].post([Cancel("a", JobId(rank))])
    if breaks:
        linked.lines.receive = lambda: 1 // 0  # type: ignore[method-assign,assignment,return-value]
        with pytest.raises(ZeroDivisionError):
            linked.loop.finish()
    else:
        linked.loop.finish()
        assert linked.commands() == [(rank, Cancel("a", JobId(rank))) for rank in range(2)]
        assert links.is_lost(0) and links.is_lost(1)
        assert all(links.store(rank)._closed for rank in range(2))  # type: ignore[union-attr]
    assert linked.lines.closed == 1
