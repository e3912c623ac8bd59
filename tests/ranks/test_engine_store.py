"""One engine's store over several ranks: one end for each order, the least of what ranks have, two threads apart."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace

import pytest

from kvbaton.control.keyring import Keyring
from kvbaton.protocol.errors import Reason
from kvbaton.protocol.events import NO_BLOCK, StoreEnded
from kvbaton.protocol.ids import PutId, WorkerId
from kvbaton.protocol.machines.context import Origins, mark_of
from kvbaton.ranks.engine_store import EngineStore, EngineStoreSettings, OrderEnded, OrderId, StoreTold
from kvbaton.ranks.store_trust import RankStoreTrust, bind_store
from kvbaton.store.value_header import writer_id

HASHES = [bytes([number]) * 32 for number in range(6)]
KEYS = tuple(HASHES)
BLOCKS = ((1, 2, 3, 4, 5, 6),)


@dataclass
class FakeRank:
    """Notes what it is asked; ends what the test says."""

    full: bool = False
    raises: bool = False
    orders: list[tuple[object, ...]] = field(default_factory=list)
    cancelled: list[OrderId] = field(default_factory=list)
    ends: list[OrderEnded] = field(default_factory=list)
    closed: int = 0
    threads: set[int] = field(default_factory=set)
    counters: dict[str, int] = field(default_factory=lambda: {"pins": 2})
    waker: Callable[[], None] = lambda: None

    def lookup(self, order: OrderId, hashes: Sequence[bytes], timeout_s: float) -> bool:
        return self._take("lookup", order, len(hashes), timeout_s)

    def get(self, order: OrderId, hashes: Sequence[bytes], blocks: Sequence[int], timeout_s: float) -> bool:
        return self._take("get", order, tuple(blocks), timeout_s)

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
        return self._take("put", order, tuple(blocks), timeout_s)

    def cancel(self, order: OrderId) -> None:
        self.cancelled.append(order)

    def drain(self) -> Sequence[OrderEnded]:
        ends, self.ends = self.ends, []
        return ends

    def set_waker(self, waker: Callable[[], None]) -> None:
        self.waker = waker

    def close(self) -> None:
        self.closed += 1
        if self.raises:
            raise RuntimeError("cannot close")

    def end(self, count: int, reason: Reason | None = None, order: OrderId | None = None) -> None:
        last = self.orders[-1][1] if order is None else order
        self.ends.append(OrderEnded(last, count, reason, "as told" if reason else ""))  # type: ignore[arg-type]

    def _take(self, *order: object) -> bool:
        self.threads.add(threading.get_ident())
        if self.raises:
            raise RuntimeError("broken")
        if not self.full:
            self.orders.append(order)
        return not self.full


def made(ranks: int = 2, **settings: float) -> tuple[EngineStore, list[FakeRank]]:
    fakes = [FakeRank() for _ in range(ranks)]
    return EngineStore(fakes, EngineStoreSettings(**settings)), fakes


def test_a_put_ends_once_when_all_ranks_have_ended_it() -> None:
    shelf, (one, two) = made()
    shelf.put(PutId(7), BLOCKS, KEYS)
    assert one.orders == two.orders == [("put", OrderId(1), BLOCKS[0], 20.0)]
    one.end(6)
    assert shelf.drain() == []
    two.end(6)
    assert shelf.drain() == [StoreEnded(PutId(7))]
    assert shelf.drain() == []
    assert shelf.counters["puts"] == shelf.counters["puts.stored"] == 1


def test_a_put_that_failed_on_one_rank_has_failed() -> None:
    shelf, (one, two) = made()
    shelf.put(PutId(7), BLOCKS, KEYS)
    one.end(6)
    two.end(3, Reason.TRANSFER_TIMEOUT)
    assert shelf.drain() == [StoreEnded(PutId(7), Reason.STORE_FAILED)]
    assert shelf.counters["errors"] == 1
    assert shelf.counters["puts.stored"] == 0


@pytest.mark.parametrize("how", ["full", "raises"])
def test_a_put_that_one_rank_refused_is_taken_back_from_the_others(how: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL)
    shelf, (one, two) = made()
    setattr(two, how, True)
    shelf.put(PutId(7), BLOCKS, KEYS)
    assert one.cancelled == [OrderId(1)]
    assert shelf.drain() == [], "the first rank may still read"
    one.end(0, Reason.CANCELLED)
    assert shelf.drain() == [StoreEnded(PutId(7), Reason.STORE_FAILED)]
    assert shelf.counters["faults"] == (how == "raises")


def test_a_put_that_nobody_took_wakes_the_node_for_its_end() -> None:
    shelf, ranks = made()
    rung: list[int] = []
    shelf.set_waker(lambda: rung.append(1))
    for rank in ranks:
        rank.full = True
    shelf.put(PutId(7), BLOCKS, KEYS)
    assert rung
    assert shelf.drain() == [StoreEnded(PutId(7), Reason.STORE_FAILED)]


@pytest.mark.parametrize("blocks", [(), ((1,),), ((1, 2, 3, 4, 5, NO_BLOCK),), ((1, 2, 3), (4, 5, 6))])
def test_a_put_of_what_is_no_row_of_blocks_fails_and_touches_nothing(blocks: tuple[tuple[int, ...], ...]) -> None:
    shelf, ranks = made()
    shelf.put(PutId(7), blocks, KEYS)
    assert shelf.drain() == [StoreEnded(PutId(7), Reason.STORE_FAILED)]
    assert not any(rank.orders for rank in ranks)


def test_puts_under_way_are_bounded() -> None:
    shelf, (one, two) = made(puts_max=2)
    for number in range(3):
        shelf.put(PutId(number), BLOCKS, KEYS)
    assert shelf.drain() == [StoreEnded(PutId(2), Reason.STORE_FAILED)]
    one.end(6, order=OrderId(1))
    two.end(6, order=OrderId(1))
    shelf.drain()
    shelf.put(PutId(3), BLOCKS, KEYS)
    assert len(one.orders) == 3


def test_a_put_that_is_cancelled_is_cancelled_on_the_ranks_that_have_it() -> None:
    shelf, (one, two) = made()
    shelf.put(PutId(7), BLOCKS, KEYS)
    one.end(6)
    shelf.drain()
    shelf.cancel(PutId(7))
    shelf.cancel(PutId(8))
    assert (one.cancelled, two.cancelled) == ([], [OrderId(1)])
    two.end(0, Reason.CANCELLED)
    assert shelf.drain() == [StoreEnded(PutId(7), Reason.STORE_FAILED)]
    assert shelf.counters["errors"] == 1, "it took too long"


@pytest.mark.parametrize(("counts", "least"), [((6, 6), 6), ((6, 2), 2), ((0, 6), 0)])
def test_the_engine_is_told_the_least_of_what_its_ranks_have(counts: tuple[int, int], least: int) -> None:
    shelf, ranks = made()
    rung: list[int] = []
    shelf.wake_engine = lambda: rung.append(1)
    ask = shelf.lookup(HASHES)
    assert ask is not None and not ranks[0].orders, "only the node's thread talks to ranks"
    shelf.drain()
    assert ranks[0].orders == [("lookup", OrderId(1), 6, 2.0)]
    for rank, count in zip(ranks, counts, strict=True):
        assert shelf.take() == []
        rank.end(count)
        shelf.drain()
    assert rung
    assert shelf.take() == [StoreTold(ask, least)]
    assert shelf.take() == []


def test_a_get_lands_in_its_blocks_and_a_late_rank_makes_it_shorter() -> None:
    shelf, (one, two) = made()
    ask = shelf.get(HASHES, BLOCKS[0])
    assert ask is not None
    shelf.drain()
    assert one.orders == [("get", OrderId(1), BLOCKS[0], 10.0)]
    one.end(6)
    two.end(4, Reason.TRANSFER_TIMEOUT)
    shelf.drain()
    assert shelf.take() == [StoreTold(ask, 4, Reason.TRANSFER_TIMEOUT, "as told")]


def test_a_get_that_one_rank_did_not_begin_brought_nothing() -> None:
    shelf, (one, two) = made()
    two.full = True
    ask = shelf.get(HASHES, BLOCKS[0])
    assert ask is not None
    shelf.drain()
    one.end(6)
    shelf.drain()
    assert [(told.count, told.reason) for told in shelf.take()] == [(0, Reason.BUSY)]


def test_what_is_forgotten_is_cancelled_and_still_told() -> None:
    shelf, (one, two) = made()
    ask = shelf.get(HASHES, BLOCKS[0])
    assert ask is not None
    shelf.drain()
    shelf.forget(ask)
    shelf.drain()
    assert one.cancelled == two.cancelled == [OrderId(1)]
    for rank in (one, two):
        rank.end(1, Reason.CANCELLED)
    shelf.drain()
    assert [told.count for told in shelf.take()] == [1]
    assert shelf.counters["errors"] == 0, "cancelled by ourselves"


def test_questions_are_bounded_and_long_ones_are_cut() -> None:
    shelf, (one, _) = made(asks_max=2, hashes_max=3)
    assert shelf.lookup(HASHES) and shelf.get(HASHES, BLOCKS[0])
    assert shelf.lookup(HASHES) is None
    assert shelf.lookup([]) is None
    shelf.drain()
    assert [order[2] for order in one.orders] == [3, (1, 2, 3)]
    for order in (1, 2):
        for rank in shelf._ranks:
            rank.end(3, order=OrderId(order))  # type: ignore[attr-defined]
    shelf.drain()
    assert len(shelf.take()) == 2
    assert shelf.lookup(HASHES) is not None
    with pytest.raises(ValueError, match="blocks"):
        shelf.get(HASHES, (1,))


def test_closing_ends_everything_once_whatever_ranks_do(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL)
    shelf, (one, two) = made()
    shelf.put(PutId(7), BLOCKS, KEYS)
    asks = [shelf.lookup(HASHES), shelf.get(HASHES, BLOCKS[0])]
    shelf.drain()
    unsent = shelf.lookup(HASHES)
    one.raises = True
    two.end(6, Reason.CANCELLED, OrderId(1))
    shelf.close()
    shelf.close()
    assert two.closed == 2
    assert shelf.drain() == [StoreEnded(PutId(7), Reason.STORE_FAILED)]
    assert [told.ask for told in shelf.take()] == [*asks, unsent]
    assert shelf.lookup(HASHES) is None
    shelf.put(PutId(8), BLOCKS, KEYS)
    assert shelf.drain() == [StoreEnded(PutId(8), Reason.STORE_FAILED)]
    one.end(6, None, OrderId(1))
    assert shelf.drain() == []
    assert shelf.counters["late"] == 1


def test_only_the_nodes_thread_talks_to_ranks() -> None:
    shelf, ranks = made(asks_max=1000)
    stop = threading.Event()

    def node() -> None:
        while not stop.wait(0.001):
            turn()
        turn()
        turn()

    def turn() -> None:
        shelf.drain()
        for rank in ranks:
            rank.ends += [OrderEnded(order[1], 1) for order in rank.orders]  # type: ignore[arg-type]
            rank.orders.clear()

    thread = threading.Thread(target=node)
    thread.start()
    asked = [shelf.lookup(HASHES) for _ in range(300)]
    stop.set()
    thread.join(10)
    assert [told.ask for told in shelf.take()] == asked
    assert ranks[0].threads == {thread.ident}


def test_pins_of_all_ranks_are_summed_and_a_store_needs_ranks() -> None:
    assert made()[0].pins == 4
    with pytest.raises(ValueError, match="ranks"):
        EngineStore([])


class _Member:
    """A node whose keys can be exchanged, and a store that takes whatever trust it is given."""

    def __init__(self, keyring: Keyring) -> None:
        self.keyring = keyring
        self.on_keys: list[Callable[[Keyring], object]] = []
        self.ledger = SimpleNamespace(desk=SimpleNamespace(origins=Origins()))
        self.provenance = SimpleNamespace(on_taken=None)
        self.set_trust = lambda trust: None
        bind_store(self, self)  # type: ignore[arg-type]

    def renew(self, keyring: Keyring) -> None:
        self.keyring = keyring
        for take in self.on_keys:
            take(keyring)

    def takes(self, *named: bytes) -> bool:
        return self.provenance.on_taken(named)  # type: ignore[no-any-return]


def _keys(*names: str, removed: tuple[str, ...] = ()) -> Keyring:
    peers = {WorkerId(name): name[:1] * 40 for name in names}
    return Keyring(
        WorkerId("d0"), "d" * 40, "s" * 40, peers, (bytes(32),), removed_names=frozenset(map(WorkerId, removed))
    )


def test_a_value_that_is_reported_after_its_writer_was_removed_is_not_taken() -> None:
    """A rank checked it in time, and by now no key says whose it is: it was taken, with an origin that nobody knows."""
    member = _Member(_keys("d0", "p0", "q0"))
    theirs, others = (writer_id(f"{name} {name[:1] * 40}") for name in ("p0", "q0"))
    assert member.takes(theirs) and member.takes(others)
    member.renew(_keys("d0", "q0", removed=("p0",)))
    assert not member.takes(theirs) and not member.takes(others, theirs)
    assert member.takes(others) and member.takes(mark_of("left0")), "one that only left is an origin like any other"
    member.renew(_keys("d0", "p0", "q0", removed=("p0",)))
    assert member.takes(theirs), "its key is in use again"


def test_a_writer_that_came_and_went_between_two_reports_is_not_believed() -> None:
    member = _Member(_keys("d0"))
    member.renew(_keys("d0", "p0"))
    member.renew(_keys("d0", removed=("p0",)))
    assert not member.takes(writer_id(f"p0 {'p' * 40}"))


def test_who_wrote_a_value_is_an_origin_of_what_is_computed_on_it() -> None:
    """By the key that it was written with, so that its removal is heard; oneself is none."""
    member = _Member(_keys("d0", "p0"))
    assert member.takes(writer_id(f"p0 {'p' * 40}"), writer_id(f"d0 {'d' * 40}"))
    origins = member.ledger.desk.origins
    assert list(origins.names) == [f"p0 {'p' * 40}"]
