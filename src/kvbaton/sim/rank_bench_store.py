"""A rank's way to a shared store on the bench: the engine's end (`rank_store_link`) and its own (`rank_store_host`).

Laws of the models: every order that was accepted ends once, and every one that was not is refused by its return or its
error. Of a lost rank look-ups end at once and the rest stays open; a rank that is back is asked what is open, and what
it then does not know has ended. What a shelf throws at ends as failed and is counted; what it closed with open ends as
cancelled. Counters are told where they have changed, as many as may be.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

from kvbaton.protocol.errors import Reason
from kvbaton.runtime import rank_store_messages as said
from kvbaton.runtime.rank_store_host import HostedShelf
from kvbaton.runtime.rank_store_link import RemoteShelf
from kvbaton.runtime.shelves import RankShelf
from kvbaton.sim.rank_bench import ANYTHING, Raised, outcome, same
from kvbaton.sim.world import InjectedFault
from kvbaton.store.base import OrderEnded, OrderId
from kvbaton.store.keys import HASH_BYTES

STEPS = 60
ORDERS, ORDERS_MAX = 8, 4
COMPAT = "ab" * 16
WHY = "why"
DETAIL, NAME_CHARS = 512, 64
STOPPED = "the rank has stopped"


class _Link:
    rank = 2

    def __init__(self) -> None:
        self.lost = False
        self.posted: list[said.ShelfCommand] = []

    def post(self, commands: Sequence[said.ShelfCommand]) -> None:
        self.posted += commands


def any_order(rng: random.Random, order: int | None = None) -> said.ShelfOrder:
    number = rng.randrange(ORDERS) if order is None else order
    count = rng.randrange(1, 4)
    hashes = said.pack_hashes([rng.randbytes(HASH_BYTES) for _ in range(count)])
    blocks = said.pack_ids([rng.randrange(1 << 40) for _ in range(count)])
    timeout_s = float(rng.randrange(1, 9))
    if rng.random() < 0.4:
        return said.ShelfLookup(number, hashes, timeout_s)
    return rng.choice((said.ShelfGet, said.ShelfPut))(number, hashes, blocks, timeout_s)


def put_to(shelf: RankShelf, order: said.ShelfOrder) -> bool:
    """As its caller does it."""
    number, hashes = OrderId(order.order), said.hashes_of(order.hashes)
    match order:
        case said.ShelfLookup():
            return shelf.lookup(number, hashes, order.timeout_s)
        case said.ShelfGet():
            return shelf.get(number, hashes, said.ids_of(order.blocks), order.timeout_s)
        case _:
            return shelf.put(number, hashes, said.ids_of(order.blocks), order.timeout_s)


# --- the engine's end


class _LinkModel:
    def __init__(self, link: _Link) -> None:
        self.link = link
        self.posted: list[said.ShelfCommand] = []
        self.open: dict[int, said.ShelfOrder] = {}
        self.cancelled: set[int] = set()
        self.ends: list[OrderEnded] = []
        self.counts = {"busy": 0, "lost": 0, "forgotten": 0}
        self.theirs: dict[str, int] = {}
        self.rings = 0
        self.asks = 0
        self.asked: set[int] = set()
        self.closed = False

    def submit(self, order: said.ShelfOrder) -> bool | Raised:
        if self.closed or len(self.open) + len(self.ends) >= ORDERS_MAX:
            self.counts["busy"] += 1
            return False
        if order.order in self.open:
            return Raised("ValueError")
        if self.link.lost:
            self.counts["lost"] += 1
            self.end(order.order, Reason.STORE_FAILED, ANYTHING)
            self.rings += 1
        else:
            self.open[order.order] = order
            self.posted.append(order)
        return True

    def cancel(self, order: int) -> None:
        if order in self.open and order not in self.cancelled:
            self.cancelled.add(order)
            self.posted.append(said.ShelfCancel(order))

    def end(self, order: int, reason: Reason | None, detail: str, count: int = 0) -> None:
        self.open.pop(order, None)
        self.cancelled.discard(order)
        self.ends.append(OrderEnded(OrderId(order), count, reason, detail))

    def end_all(self, orders: Sequence[int], reason: Reason, detail: str) -> None:
        for order in orders:
            self.end(order, reason, detail)
        self.rings += bool(orders)


class _Remote:
    """The two side by side."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.link = _Link()
        self.model = _LinkModel(self.link)
        self.real = RemoteShelf(self.link)
        same("orders of one rank, at most", self.real.orders_max, said.ORDERS_MAX)
        self.real.orders_max = ORDERS_MAX
        self.rings = 0
        self.real.set_waker(self._ring)

    def _ring(self) -> None:
        self.rings += 1

    def submit(self) -> None:
        order = any_order(self.rng)
        found = outcome(lambda: put_to(cast(RankShelf, self.real), order), ValueError)
        same("an order", found, self.model.submit(order))

    def submit_nonsense(self) -> None:
        act = self.rng.choice((self.real.get, self.real.put))
        one = bytes(HASH_BYTES)
        hashes, blocks = self.rng.choice((((one,), (1, 2)), ((one, one), (1,)), ((), ()), ((b"short",), (1,))))
        found = outcome(lambda: act(OrderId(99), hashes, blocks, 1.0), ValueError)
        same("an order that is none", found, Raised("ValueError"))

    def cancel(self) -> None:
        order = OrderId(self.rng.randrange(ORDERS))
        self.model.cancel(order)
        self.real.cancel(order)

    def drain(self) -> None:
        ends, self.model.ends = self.model.ends, []
        found = self.real.drain()
        same("ends of orders", sorted(found, key=_number), sorted(ends, key=_number))

    def wake_another(self) -> None:
        self.model.rings += bool(self.model.ends)
        self.real.set_waker(self._ring)

    def open(self) -> None:
        self.model.posted.append(said.ShelfOpen(COMPAT))
        self.real.open(COMPAT)

    def ended(self) -> None:
        order, count = self.rng.randrange(ORDERS), self.rng.randrange(3)
        reason = self.rng.choice((None, Reason.CANCELLED))
        if order in self.model.open:
            self.model.end(order, reason, WHY, count)
            self.model.rings += 1
        self.real.take(said.ShelfEnded(order, count, reason, WHY))

    def has(self) -> None:
        """An answer to the last question, or to one before."""
        ask = self.model.asks - (self.rng.random() < 0.3)
        known = [order for order in range(ORDERS) if self.rng.random() < 0.5]
        if ask == self.model.asks:
            gone = [order for order in self.model.asked if order in self.model.open and order not in known]
            self.model.counts["forgotten"] += len(gone)
            self.model.end_all(gone, Reason.STORE_FAILED, ANYTHING)
        self.real.take(said.ShelfHas(ask, said.pack_ids(known)))

    def counted(self) -> None:
        counts = {self.rng.choice("ab"): self.rng.randrange(5)}
        self.model.theirs.update(counts)
        self.real.take(said.ShelfCounts(counts))

    def lose(self) -> None:
        self.link.lost = self.rng.random() < 0.5
        if self.link.lost:
            lookups = [order for order, each in self.model.open.items() if isinstance(each, said.ShelfLookup)]
            self.model.counts["lost"] += len(lookups)
            self.model.end_all(lookups, Reason.STORE_FAILED, WHY)
            self.real.on_lost(WHY)

    def be_back(self) -> None:
        self.link.lost = False
        if self.model.open:
            self.model.asks += 1
            self.model.asked = set(self.model.open)
            self.model.posted.append(said.ShelfAsk(self.model.asks))
        self.real.on_back()

    def close(self) -> None:
        self.model.closed = True
        for order in list(self.model.open):
            self.model.cancel(order)
        self.real.close()

    def stop(self) -> None:
        self.model.closed = True
        self.model.end_all(list(self.model.open), Reason.CANCELLED, WHY)
        self.real.on_stopped(WHY)

    def compare(self) -> None:
        same("orders that were posted", self.link.posted, self.model.posted)
        same("how often the engine was woken", self.rings, self.model.rings)
        same("open orders", self.real.open_orders, len(self.model.open))
        same("orders to stop that have ended", self.real._cancelled - set(self.real._open), set())
        own = {f"link.{name}": count for name, count in self.model.counts.items() if count}
        found = {name: count for name, count in self.real.counters.items() if count or name in self.model.theirs}
        same("counters of a rank's shelf", found, {**self.model.theirs, **own})


def _number(end: OrderEnded) -> int:
    return end.order


def bench_store_link(rng: random.Random) -> None:
    both = _Remote(rng)
    steps = (
        *(both.submit,) * 6, both.submit_nonsense, both.cancel, both.cancel, both.drain, both.drain, both.drain,
        both.wake_another, both.open, both.ended, both.ended, both.has, both.has, both.counted, both.lose,
        both.be_back, both.be_back,
    )  # fmt: skip
    for _ in range(STEPS):
        rng.choice(steps)()
        both.compare()
    both.drain()
    both.link.lost = False
    both.submit()
    for last in rng.choice(((both.stop, both.stop), (both.close, both.ended, both.stop))):
        last()
        both.compare()
        both.submit()
        both.compare()
    both.drain()


# --- the rank's end


class ScriptedShelf:
    """A shelf that does what it is told beforehand, and keeps what it was asked."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.throws: dict[str, Exception] = {}
        self.has_room = True
        self.ends: list[OrderEnded] = []
        self.counts: dict[str, int] = {}

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
        error = self._called(type(order).__name__.removeprefix("Shelf").lower(), *asked, order.timeout_s)
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

    def _make(self, compat: str) -> RankShelf:
        same("whose shelf it is", compat, COMPAT)
        if "make" in self.shelf.throws:
            raise self.shelf.throws["make"]
        return cast(RankShelf, self.shelf)

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


def bench_store_host(rng: random.Random) -> None:
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
