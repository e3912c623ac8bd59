"""The rank's end of its way to a shared store on the bench (`rank_store_host`).

Laws of the model: every order ends once: as failed where there is no shelf, or it throws or has no room; as cancelled
where it was closed with the order open. An end that is known is told before the answer to what is open. Counters are
told where they have changed, as many as may be.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

from kvbaton.protocol.errors import Reason
from kvbaton.ranks import rank_store_host
from kvbaton.ranks import rank_store_messages as said
from kvbaton.ranks.rank_store_host import HostedShelf
from kvbaton.ranks.store_interface import RankStoreInterface
from kvbaton.store.content_keys import HASH_BYTES
from kvbaton.store.interface import OrderEnded, OrderId
from kvbaton_proof.sim.rank_models.rank_bench import ANYTHING, listened, same, worth
from kvbaton_proof.sim.world.world import InjectedFault

STEPS = 60
ORDERS = 8
COMPAT = "ab" * 16
DETAIL, NAME_CHARS = 512, 64
STOPPED = "the rank has stopped"


def any_order(rng: random.Random, order: int | None = None) -> said.ShelfOrder:
    number = rng.randrange(ORDERS) if order is None else order
    count = rng.randrange(1, 4)
    hashes = said.pack_hashes([rng.randbytes(HASH_BYTES) for _ in range(count)])
    blocks = said.pack_ids([rng.randrange(1 << 40) for _ in range(count)])
    timeout_s = float(rng.randrange(1, 9))
    if rng.random() < 0.4:
        return said.ShelfLookup(number, hashes, timeout_s)
    return rng.choice((said.ShelfGet, said.ShelfPut))(number, hashes, blocks, timeout_s)


class ScriptedShelf:
    """A shelf that does what it is told beforehand, and keeps what it was asked."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.throws: dict[str, Exception] = {}
        self.has_room = True
        self.ends: list[OrderEnded] = []
        self.counts: dict[str, int] = {}
        self.journal: list[object] = []

    @property
    def counters(self) -> Mapping[str, int]:
        self._maybe_throw("counters")
        return self.counts

    def drain(self) -> Sequence[OrderEnded]:
        self._called("drain")
        ends, self.ends = self.ends, []
        return ends

    def set_waker(self, waker: Callable[[], None]) -> None:
        waker()

    def __getattr__(self, name: str) -> Any:
        if name in ("lookup", "get", "put", "cancel", "close"):
            return lambda *args: self._called(name, *args)
        raise AttributeError(name)

    def _called(self, *call: Any) -> bool:
        self.calls.append(call)
        self.journal.append(self)
        self._maybe_throw(call[0])
        return self.has_room

    def _maybe_throw(self, name: str) -> None:
        if name in self.throws:
            raise self.throws[name]


class ShelfModel:
    def __init__(self, shelf: ScriptedShelf) -> None:
        self.shelf = shelf
        self.calls: list[tuple[Any, ...]] = []
        self.news: list[said.ShelfNews] = []
        self.open: set[int] = set()
        self.told: dict[str, int] = {}
        self.faults = 0
        self.why: str = ANYTHING  # there is no shelf
        self.is_made = self.closed = False

    def begin(self, order: said.ShelfOrder) -> None:
        hashes = said.hashes_of(order.hashes)
        if not self.is_made or self.closed:
            self._end(order.order, Reason.STORE_FAILED, self.why)
            return
        asked: tuple[Any, ...] = (order.order, hashes)
        if not isinstance(order, said.ShelfLookup):
            blocks = said.ids_of(order.blocks)
            asked += (blocks,)
            if len(blocks) != len(hashes):
                self._end(order.order, Reason.BAD_SPAN)
                return
        last = (order.timeout_s, order.origins) if isinstance(order, said.ShelfPut) else (order.timeout_s,)
        error = self._called(type(order).__name__.removeprefix("Shelf").lower(), *asked, *last)
        if isinstance(error, ValueError):
            self._end(order.order, Reason.BAD_SPAN, _told(error))
        elif error is not None:
            self.faults += 1
            self._end(order.order, Reason.STORE_FAILED, _told(error))
        elif self.shelf.has_room:
            self.open.add(order.order)
        else:
            self._end(order.order, Reason.BUSY)

    def drain(self) -> None:
        if not self.is_made:
            return
        if self._called("drain") is not None:
            self.faults += 1
            return
        for end in self.shelf.ends:
            if end.order in self.open:
                self.open.discard(end.order)
                self.news.append(said.ShelfEnded(end.order, end.count, end.reason, end.detail[:DETAIL]))
        if self.shelf.ends:
            self._tell_counters()

    def _tell_counters(self) -> None:
        if "counters" in self.shelf.throws:
            self.faults += 1
            return
        now = dict(list(self.shelf.counts.items())[: said.COUNTERS_MAX])
        changed = {name[:NAME_CHARS]: count for name, count in now.items() if self.told.get(name) != count}
        self.told = now
        if changed:
            self.news.append(said.ShelfCounts(changed))

    def close(self) -> None:
        if self.closed:
            return
        self.closed = True
        self.why = STOPPED
        if self.is_made:
            self.faults += self._called("close") is not None
            self.drain()
        for order in sorted(self.open):
            self._end(order, Reason.CANCELLED)

    def cancel(self, order: int) -> None:
        if self.is_made:
            self.faults += self._called("cancel", order) is not None

    def ask(self, ask: int) -> None:
        self.drain()
        self.news.append(said.ShelfHas(ask, said.pack_ids(sorted(self.open))))

    def _called(self, *call: Any) -> Exception | None:
        self.calls.append(call)
        return self.shelf.throws.get(call[0])

    def _end(self, order: int, reason: Reason, detail: str = ANYTHING) -> None:
        self.open.discard(order)
        self.news.append(said.ShelfEnded(order, 0, reason, detail))


def _told(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"[:DETAIL]


class _Hosted:
    """The two side by side."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.shelf = ScriptedShelf()
        self.model = ShelfModel(self.shelf)
        self.real = HostedShelf(self._make)
        self.wakes = 0
        self.real.set_waker(self._wake)

    def _wake(self) -> None:
        self.wakes += 1

    def _make(self, compat: str) -> RankStoreInterface:
        same("whose shelf it is", compat, COMPAT)
        if "make" in self.shelf.throws:
            raise self.shelf.throws["make"]
        return cast(RankStoreInterface, self.shelf)

    def script(self) -> None:
        rng, shelf = self.rng, self.shelf
        names = ("make", "lookup", "get", "put", "cancel", "drain", "close", "counters")
        error = rng.choice((ValueError, InjectedFault))("e" * rng.choice((3, 600)))
        shelf.throws = {name: error for name in names if rng.random() < 0.15}
        shelf.has_room = rng.random() < 0.7
        while rng.random() < 0.3:
            name = rng.choice(("a", "b", "n" * (NAME_CHARS + 1)))
            shelf.counts[name] = rng.randrange(3)
        if rng.random() < 0.02:
            shelf.counts.update({f"c{at}": 1 for at in range(said.COUNTERS_MAX + 1)})
        while rng.random() < 0.4:
            order, detail = OrderId(rng.randrange(ORDERS)), "d" * rng.choice((0, 3, 600))
            shelf.ends.append(OrderEnded(order, rng.randrange(3), rng.choice((None, Reason.CANCELLED)), detail))

    def open(self) -> None:
        if self.model.is_made or self.model.closed or "make" in self.shelf.throws:
            self.model.faults += 1
            if not self.model.is_made and not self.model.closed:
                self.model.why = _told(self.shelf.throws["make"])
        else:
            self.model.is_made = True
        self.real.carry_out(said.ShelfOpen(COMPAT))
        same("shelves that know whom to wake", self.wakes, int(self.model.is_made))

    def begin(self) -> None:
        order = any_order(self.rng)
        if not isinstance(order, said.ShelfLookup) and self.rng.random() < 0.1:
            order = type(order)(order.order, order.hashes, order.blocks + bytes(8), order.timeout_s)
        self.model.begin(order)
        self.real.carry_out(order)

    def cancel(self) -> None:
        order = self.rng.randrange(ORDERS)
        self.model.cancel(order)
        self.real.carry_out(said.ShelfCancel(order))

    def ask(self) -> None:
        ask = self.rng.randrange(9)
        self.model.ask(ask)
        self.real.carry_out(said.ShelfAsk(ask))

    def turn(self) -> None:
        self.model.drain()
        self.real.turn()

    def close(self) -> None:
        self.model.close()
        self.real.close()

    def compare(self) -> None:
        same("calls of a shelf", self.shelf.calls, self.model.calls)
        same("news of a shelf", self.real.take_news(), self.model.news)
        same("faults of a shelf", self.real.faults, self.model.faults)
        for done in (self.shelf.calls, self.model.calls, self.model.news):
            cast("list[object]", done).clear()


def _bench_store_host(rng: random.Random) -> int:
    both = _Hosted(rng)
    steps = (*(both.begin,) * 4, both.begin, both.cancel, both.ask, both.turn, both.turn, both.open)
    never = rng.random() < 0.2
    for step in range(STEPS):
        both.script()
        if never and not both.model.closed and "make" not in both.shelf.throws:
            both.shelf.throws["make"] = InjectedFault("e")
        if step == STEPS - 12:
            both.close()
        else:
            rng.choice(steps)()
        both.compare()
    both.close()
    both.compare()
    _many_open(rng)
    return worth(both.model.faults)


bench_store_host = listened(rank_store_host, _bench_store_host)


def _many_open(rng: random.Random) -> None:
    """As many as can be told are told: those that were begun first."""
    both = _Hosted(rng)
    both.open()
    count = said.ORDERS_MAX + rng.randrange(2)
    both.real._open.update(OrderId(number) for number in range(count))
    both.real.carry_out(said.ShelfAsk(1))
    has = both.real.take_news()[-1]
    assert isinstance(has, said.ShelfHas)
    same("orders that are told as open", said.ids_of(has.orders), tuple(range(said.ORDERS_MAX)))
