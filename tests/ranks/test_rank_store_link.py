"""A store in another process: orders cross once and end once; what touches blocks ends only when the rank says so."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import msgspec
import pytest

from kvbaton.protocol.errors import Reason
from kvbaton.protocol.ids import PeerId
from kvbaton.ranks.rank_link import RankLink
from kvbaton.ranks.rank_messages import (
    RankInvitation,
    decode_command,
    decode_news,
    encode_command,
    encode_news,
)
from kvbaton.ranks.rank_store_link import RankStoreHost, RemoteRankStore
from kvbaton.ranks.rank_store_messages import (
    KEYS_MAX,
    ORDERS_MAX,
    RankStoreAsk,
    RankStoreCancel,
    RankStoreCommand,
    RankStoreCounts,
    RankStoreEnded,
    RankStoreGet,
    RankStoreHas,
    RankStoreLookup,
    RankStoreNews,
    RankStoreOpen,
    RankStorePut,
    hashes_of,
    ids_of,
    pack_hashes,
    pack_ids,
)
from kvbaton.ranks.rank_stream import StreamEnvelope
from kvbaton.ranks.store_trust import RankStoreTrust
from kvbaton.store.interface import OrderEnded, OrderId
from kvbaton.testing import Side

from .rank_rig import NEAR, Rig, endpoint, until

COMPAT = "ab" * 16
HASHES = tuple(bytes([each]) * 32 for each in range(5))
BLOCKS = (7, 3, 9, 1, 2)
ONE, TWO, THREE, FOUR = map(OrderId, (1, 2, 3, 4))


@dataclass
class FakeRankStore:
    """A rank's store that does as the test says."""

    asked: list[tuple[str, object]] = field(default_factory=list)
    ends: list[OrderEnded] = field(default_factory=list)
    counters: Mapping[str, int] = field(default_factory=dict)
    room: bool = True
    throws: Exception | None = None
    waker: Callable[[], None] = lambda: None
    ends_at_close: list[OrderEnded] = field(default_factory=list)

    def _begin(self, what: str, *told: object) -> bool:
        self.asked.append((what, told))
        if self.throws is not None:
            raise self.throws
        return self.room

    def lookup(self, order: OrderId, hashes: Sequence[bytes], timeout_s: float) -> bool:
        return self._begin("lookup", order, tuple(hashes), timeout_s)

    def get(self, order: OrderId, hashes: Sequence[bytes], blocks: Sequence[int], timeout_s: float) -> bool:
        return self._begin("get", order, tuple(hashes), tuple(blocks), timeout_s)

    def set_trust(self, trust: RankStoreTrust) -> None:
        pass

    def put(
        self,
        order: OrderId,
        hashes: Sequence[bytes],
        blocks: Sequence[int],
        timeout_s: float,
        origins: tuple[bytes, ...] = (),
    ) -> bool:
        return self._begin("put", order, tuple(hashes), tuple(blocks), timeout_s)

    def cancel(self, order: OrderId) -> None:
        self.asked.append(("cancel", order))

    def drain(self) -> Sequence[OrderEnded]:
        ends, self.ends = self.ends, []
        return ends

    def set_waker(self, waker: Callable[[], None]) -> None:
        self.waker = waker

    def close(self) -> None:
        self.asked.append(("close", None))
        self.ends += self.ends_at_close

    def say(self, *ends: OrderEnded) -> None:
        self.ends.extend(ends)
        self.waker()


@dataclass
class Wire:
    """The way to a rank that only remembers what was posted."""

    rank: int = 0
    lost: bool = False
    posted: list[RankStoreCommand] = field(default_factory=list)
    rung: int = 0

    def post(self, commands: Sequence[RankStoreCommand]) -> None:
        self.posted.extend(commands)

    def ring(self) -> None:
        self.rung += 1


@pytest.fixture
def wire() -> Wire:
    return Wire()


@pytest.fixture
def shelf(wire: Wire) -> RemoteRankStore:
    found = RemoteRankStore(wire)
    found.set_waker(wire.ring)
    return found


@pytest.fixture
def rig() -> Iterator[Rig]:
    rig = Rig()
    yield rig
    rig.close()


# --- over a real link


def test_orders_reach_the_rank_as_they_were_given_and_their_ends_come_back(rig: Rig) -> None:
    fake, made = FakeRankStore(counters={"get.keys": 3, "hits": 1}), list[str]()

    def make(compat: str) -> FakeRankStore:
        made.append(compat)
        return fake

    shelf = linked(rig, make)
    shelf.open(COMPAT)
    assert shelf.lookup(ONE, HASHES, 2.0)
    assert shelf.get(TWO, HASHES, BLOCKS, 3.0)
    assert shelf.put(THREE, HASHES, BLOCKS, 4.0)
    shelf.cancel(THREE)
    until(lambda: len(fake.asked) == 4)
    assert made == [COMPAT]
    assert fake.asked == [
        ("lookup", (ONE, HASHES, 2.0)),
        ("get", (TWO, HASHES, BLOCKS, 3.0)),
        ("put", (THREE, HASHES, BLOCKS, 4.0)),
        ("cancel", THREE),
    ]
    ends = [
        OrderEnded(ONE, 4),
        OrderEnded(TWO, 2, Reason.STORE_FAILED, "gone"),
        OrderEnded(THREE, 0, Reason.CANCELLED, "x"),
    ]
    fake.say(*ends)
    assert drained(shelf, 3) == ends
    assert shelf.open_orders == 0
    until(lambda: shelf.counters.get("get.keys") == 3)


def test_a_rank_that_stops_ends_what_it_had(rig: Rig) -> None:
    fake = FakeRankStore(ends_at_close=[OrderEnded(ONE, 0, Reason.CANCELLED, "closed")])
    shelf = linked(rig, lambda compat: fake)
    shelf.open(COMPAT)
    assert shelf.get(ONE, HASHES, BLOCKS, 3.0)
    until(lambda: fake.asked)
    assert rig.hosts[0].stop()
    assert drained(shelf, 1) == [OrderEnded(ONE, 0, Reason.CANCELLED, "closed")]
    assert ("close", None) in fake.asked


def test_a_link_that_is_stopped_ends_everything(rig: Rig) -> None:
    shelf = linked(rig, lambda compat: FakeRankStore())
    shelf.open(COMPAT)
    assert shelf.put(ONE, HASHES, BLOCKS, 3.0)
    assert rig.links[0].stop()
    [end] = shelf.drain()
    assert (end.order, end.reason) == (ONE, Reason.CANCELLED)
    assert not shelf.lookup(TWO, HASHES, 1.0), "nothing is begun any more"


def test_a_rank_without_a_store_opens_none(rig: Rig) -> None:
    host = rig.host(("tcp", rig.direct("tcp", NEAR, rig.memory(4096).view)))
    links = rig.link(host.invitation)
    assert links.store(0) is None


def drained(shelf: RemoteRankStore, count: int) -> list[OrderEnded]:
    came: list[OrderEnded] = []

    def enough() -> bool:
        came.extend(shelf.drain())
        return len(came) >= count

    until(enough)
    return came


def linked(rig: Rig, make: Callable[[str], FakeRankStore]) -> RemoteRankStore:
    from kvbaton.ranks.rank_host import RankHost

    host = rig.keep(RankHost(0, {"tcp": rig.direct("tcp", NEAR, rig.memory(4096).view)}, store=make))
    host.start()
    found = rig.link(host.invitation).store(0)
    assert found is not None
    return found


# --- the engine's end


def test_a_lost_rank_ends_lookups_and_keeps_what_touches_blocks(shelf: RemoteRankStore, wire: Wire) -> None:
    shelf.lookup(ONE, HASHES, 1.0)
    shelf.get(TWO, HASHES, BLOCKS, 1.0)
    shelf.put(THREE, HASHES, BLOCKS, 1.0)
    wire.lost = True
    shelf.on_lost("rank 0 did not answer")
    assert shelf.drain() == [OrderEnded(ONE, 0, Reason.STORE_FAILED, "rank 0 did not answer")]
    assert shelf.open_orders == 2, "their blocks may still be written and read"
    assert wire.rung == 1
    assert shelf.get(FOUR, HASHES, BLOCKS, 1.0)
    [end] = shelf.drain()
    assert (end.order, end.reason) == (FOUR, Reason.STORE_FAILED)
    assert RankStoreGet(FOUR, b"".join(HASHES), pack_ids(BLOCKS), 1.0) not in wire.posted


def test_a_rank_that_is_back_is_asked_and_what_it_does_not_know_has_ended(shelf: RemoteRankStore, wire: Wire) -> None:
    shelf.get(ONE, HASHES, BLOCKS, 1.0)
    shelf.get(TWO, HASHES, BLOCKS, 1.0)
    shelf.on_lost("?")
    shelf.on_back()
    assert wire.posted[-1] == RankStoreAsk(1)
    shelf.put(THREE, HASHES, BLOCKS, 1.0)  # after the question: the answer does not speak of it
    shelf.take(RankStoreHas(0, b""))  # of an earlier question
    assert shelf.drain() == []
    shelf.take(RankStoreHas(1, pack_ids([TWO])))
    [end] = shelf.drain()
    assert (end.order, end.reason) == (ONE, Reason.STORE_FAILED)
    assert shelf.open_orders == 2
    shelf.take(RankStoreEnded(TWO, 5, None, ""))
    assert shelf.drain() == [OrderEnded(TWO, 5)]


def test_the_end_of_a_lookup_that_a_loss_has_ended_is_not_told_twice(shelf: RemoteRankStore) -> None:
    shelf.lookup(ONE, HASHES, 1.0)
    shelf.on_lost("?")
    shelf.take(RankStoreEnded(ONE, 5, None, ""))
    assert [end.reason for end in shelf.drain()] == [Reason.STORE_FAILED]


def test_orders_are_bounded_until_their_ends_are_drained(shelf: RemoteRankStore) -> None:
    for number in range(ORDERS_MAX):
        assert shelf.lookup(OrderId(number), HASHES, 1.0)
    assert not shelf.lookup(OrderId(ORDERS_MAX), HASHES, 1.0)
    shelf.take(RankStoreEnded(0, 5, None, ""))
    assert not shelf.lookup(OrderId(ORDERS_MAX), HASHES, 1.0), "its end is still here"
    shelf.drain()
    assert shelf.lookup(OrderId(ORDERS_MAX), HASHES, 1.0)
    assert shelf.counters["link.busy"] == 2


def test_a_cancel_is_asked_once_and_only_of_what_is_open(shelf: RemoteRankStore, wire: Wire) -> None:
    shelf.get(ONE, HASHES, BLOCKS, 1.0)
    for order in (ONE, ONE, TWO):
        shelf.cancel(order)
    assert [each for each in wire.posted if isinstance(each, RankStoreCancel)] == [RankStoreCancel(ONE)]


def test_closing_cancels_and_begins_nothing_new(shelf: RemoteRankStore, wire: Wire) -> None:
    shelf.get(ONE, HASHES, BLOCKS, 1.0)
    shelf.close()
    shelf.close()
    assert wire.posted[-1] == RankStoreCancel(ONE) and wire.posted.count(RankStoreCancel(ONE)) == 1
    assert not shelf.lookup(TWO, HASHES, 1.0)
    shelf.take(RankStoreEnded(ONE, 1, Reason.CANCELLED, ""))
    assert shelf.drain() == [OrderEnded(ONE, 1, Reason.CANCELLED)]


@pytest.mark.parametrize(
    ("hashes", "blocks", "named"),
    [
        ((), (), "hashes: 0"),
        ((b"x",), (1,), "hashes: one of 1 bytes"),
        (HASHES, (1,), "blocks: 1 for 5"),
        (HASHES[:1], (1 << 64,), "ids"),
        ((HASHES[0],) * (KEYS_MAX + 1), (1,) * (KEYS_MAX + 1), "hashes: 4097"),
    ],
)
def test_what_cannot_cross_is_refused_by_its_field(
    shelf: RemoteRankStore, wire: Wire, hashes: Sequence[bytes], blocks: Sequence[int], named: str
) -> None:
    with pytest.raises(ValueError, match=named):
        shelf.get(ONE, hashes, blocks, 1.0)
    assert not wire.posted and shelf.open_orders == 0


def test_an_order_is_never_used_twice(shelf: RemoteRankStore) -> None:
    shelf.get(ONE, HASHES, BLOCKS, 1.0)
    with pytest.raises(ValueError, match="order: 1 is open"):
        shelf.get(ONE, HASHES, BLOCKS, 1.0)


# --- the link's part


def test_a_frame_that_cannot_be_read_has_the_rank_asked_what_is_open() -> None:
    link = RankLink(invitation(), lambda: None, 3, 1.0)
    assert link.store is not None
    link.store.get(ONE, HASHES, BLOCKS, 1.0)
    sent(link)
    link.take(framed(link, 1, b"\xc1 nonsense"), 0.0)
    assert link.lost and link.store.open_orders == 1
    link.take(framed(link, 2, encode_news([RankStoreCounts({"hits": 2})])), 0.0)
    assert not link.lost
    assert link.store.counters["hits"] == 2
    assert sent(link) == [RankStoreAsk(1)]
    link.take(framed(link, 3, encode_news([RankStoreHas(1, b"")])), 0.0)
    assert [end.order for end in link.store.drain()] == [ONE]


def invitation() -> RankInvitation:
    from kvbaton.transports.tcp import tcp_transport

    return RankInvitation(
        0, "tcp://127.0.0.1:1", "a" * 40, "b" * 40, "c" * 40, {"tcp": tcp_transport.CAPABILITIES}, True
    )


def framed(link: RankLink, number: int, body: bytes) -> bytes:
    return msgspec.msgpack.encode(StreamEnvelope(link.stream.session, number, 0, False, body))


def sent(link: RankLink) -> list[object]:
    frames = [msgspec.msgpack.decode(frame, type=StreamEnvelope) for frame in link.due(0.0)]
    return [decode_command(frame.body) for frame in frames if frame.number]


# --- the rank's end


def test_an_order_before_its_engine_is_known_ends_as_failed() -> None:
    hosted = RankStoreHost(lambda compat: FakeRankStore())
    hosted.carry_out(RankStoreLookup(1, pack_hashes(HASHES), 1.0))
    assert [(end.order, end.reason) for end in ended(hosted)] == [(ONE, Reason.STORE_FAILED)]


def test_a_store_that_cannot_be_made_ends_every_order_with_the_reason() -> None:
    def make(compat: str) -> FakeRankStore:
        raise RuntimeError("no such library")

    hosted = RankStoreHost(make)
    hosted.carry_out(RankStoreOpen(COMPAT))
    hosted.carry_out(RankStorePut(1, pack_hashes(HASHES), pack_ids(BLOCKS), 1.0))
    [end] = ended(hosted)
    assert end.reason is Reason.STORE_FAILED and "no such library" in end.detail
    assert hosted.faults == 1


@pytest.mark.parametrize(
    ("fake", "reason"),
    [
        (FakeRankStore(room=False), Reason.BUSY),
        (FakeRankStore(throws=ValueError("blocks: 9 does not exist")), Reason.BAD_SPAN),
        (FakeRankStore(throws=OSError("broken")), Reason.STORE_FAILED),
    ],
    ids=["no room", "bad block", "throws"],
)
def test_what_the_store_does_not_begin_ends_once(fake: FakeRankStore, reason: Reason) -> None:
    hosted = opened(fake)
    hosted.carry_out(RankStoreGet(1, pack_hashes(HASHES), pack_ids(BLOCKS), 1.0))
    hosted.turn()
    assert [end.reason for end in ended(hosted)] == [reason]


def test_torn_orders_are_refused() -> None:
    hosted = opened(FakeRankStore())
    hosted.carry_out(RankStoreGet(1, pack_hashes(HASHES), pack_ids(BLOCKS[:2]), 1.0))
    hosted.carry_out(RankStoreGet(2, b"x" * 40, pack_ids(BLOCKS[:1]), 1.0))
    hosted.carry_out(RankStoreGet(3, pack_hashes(HASHES), b"x" * 12, 1.0))
    assert [end.reason for end in ended(hosted)] == [Reason.BAD_SPAN] * 3


def test_the_open_orders_are_told_after_the_ends_that_are_known() -> None:
    fake = FakeRankStore()
    hosted = opened(fake)
    for number in (1, 2, 3):
        hosted.carry_out(RankStoreLookup(number, pack_hashes(HASHES), 1.0))
    fake.ends.append(OrderEnded(TWO, 1))
    hosted.carry_out(RankStoreAsk(9))
    news = hosted.take_news()
    assert news == [RankStoreEnded(2, 1, None, ""), RankStoreHas(9, pack_ids([1, 3]))]


def test_an_end_that_nobody_asked_for_is_not_told() -> None:
    fake = FakeRankStore()
    hosted = opened(fake)
    fake.ends.append(OrderEnded(TWO, 1))
    hosted.turn()
    assert ended(hosted) == []


def test_closing_leaves_no_order_open_even_if_the_store_forgets_some() -> None:
    fake = FakeRankStore(ends_at_close=[OrderEnded(ONE, 2)])
    hosted = opened(fake)
    for number in (1, 2):
        hosted.carry_out(RankStoreLookup(number, pack_hashes(HASHES), 1.0))
    hosted.close()
    hosted.close()
    assert [(end.order, end.reason) for end in ended(hosted)] == [(ONE, None), (TWO, Reason.CANCELLED)]
    hosted.carry_out(RankStoreLookup(3, pack_hashes(HASHES), 1.0))
    assert [end.reason for end in ended(hosted)] == [Reason.STORE_FAILED]


def test_counters_are_told_when_they_change() -> None:
    fake = FakeRankStore(counters={"hits": 1, "misses": 0})
    hosted = opened(fake)
    told: list[RankStoreNews] = []
    for number, hits in ((1, 1), (2, 1), (3, 5)):
        fake.counters = {"hits": hits, "misses": 0}
        hosted.carry_out(RankStoreLookup(number, pack_hashes(HASHES), 1.0))
        fake.ends.append(OrderEnded(OrderId(number), 0))
        hosted.turn()
        told += [each for each in hosted.take_news() if isinstance(each, RankStoreCounts)]
    assert told == [RankStoreCounts({"hits": 1, "misses": 0}), RankStoreCounts({"hits": 5})]


def opened(fake: FakeRankStore) -> RankStoreHost:
    hosted = RankStoreHost(lambda compat: fake)
    hosted.carry_out(RankStoreOpen(COMPAT))
    return hosted


def ended(hosted: RankStoreHost) -> list[OrderEnded]:
    return [each.end for each in hosted.take_news() if isinstance(each, RankStoreEnded)]


# --- the messages


@pytest.mark.parametrize(
    "command",
    [
        RankStoreOpen(COMPAT),
        RankStoreLookup(1, pack_hashes(HASHES), 1.0),
        RankStoreGet(1, pack_hashes(HASHES), pack_ids(BLOCKS), 1.0),
        RankStorePut((1 << 63) - 1, pack_hashes(HASHES), pack_ids(BLOCKS), 1.0),
        RankStoreCancel(3),
        RankStoreAsk(1),
    ],
    ids=lambda command: type(command).__name__,
)
def test_commands_cross_whole_and_damaged_ones_raise_one_kind_of_error(command: RankStoreCommand) -> None:
    body = encode_command(command)
    assert decode_command(body) == command
    rng = random.Random(1)
    for _ in range(200):
        damaged = bytearray(body)
        damaged[rng.randrange(len(damaged))] = rng.randrange(256)
        try:
            decode_command(bytes(damaged))
        except (msgspec.MsgspecError, UnicodeDecodeError):
            continue


@pytest.mark.parametrize(
    "command",
    [
        RankStoreOpen("not a digest"),
        RankStoreLookup(-1, pack_hashes(HASHES), 1.0),
        RankStoreLookup(1, b"", 1.0),
        RankStoreLookup(1, b"x" * 32 * (KEYS_MAX + 1), 1.0),
        RankStoreLookup(1, pack_hashes(HASHES), 0.0),
        RankStoreLookup(1, pack_hashes(HASHES), float("inf")),
    ],
    ids=str,
)
def test_commands_beyond_the_bounds_are_refused(command: RankStoreCommand) -> None:
    with pytest.raises(msgspec.ValidationError):
        decode_command(encode_command(command))


def test_news_crosses_whole() -> None:
    news: list[RankStoreNews] = [
        RankStoreEnded(1, 2, Reason.BUSY, "x"),
        RankStoreHas(1, pack_ids([4])),
        RankStoreCounts({"a": 1}),
    ]
    assert decode_news(encode_news(list(news))) == news


def test_hashes_and_ids_are_packed_without_loss() -> None:
    assert hashes_of(pack_hashes(HASHES)) == HASHES
    assert ids_of(pack_ids(BLOCKS)) == BLOCKS


def test_a_peer_is_still_told_whose_it_is(rig: Rig) -> None:
    """Commands for planes and for the store share one stream."""
    assert isinstance(NEAR, PeerId)
    shelf = linked(rig, lambda compat: FakeRankStore())
    shelf.open(COMPAT)
    assert shelf.lookup(ONE, HASHES, 1.0)
    assert endpoint(Side(NEAR, rig.links[0].transports(0)["tcp"], memoryview(b"")), NEAR)
