"""The engine's end of a rank's way to a shared store on the bench (`rank_store_link`).

Laws of the model: every order that was accepted ends once, and every one that was not is refused by its return or its
error. Of a lost rank look-ups end at once and the rest stays open; a rank that is back is asked what is open, and what
it then does not know has ended.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import cast

from kvbaton.protocol.errors import Reason
from kvbaton.ranks import rank_store_messages as said
from kvbaton.ranks.rank_store_link import RemoteShelf
from kvbaton.ranks.store_interface import RankStoreInterface
from kvbaton.store.content_keys import HASH_BYTES
from kvbaton.store.interface import OrderEnded, OrderId
from kvbaton_proof.sim.rank_models.rank_bench import ANYTHING, Raised, outcome, same
from kvbaton_proof.sim.rank_models.rank_bench_store import COMPAT, ORDERS, any_order

STEPS = 60
ORDERS_MAX = 4
WHY = "why"


class _Link:
    rank = 2

    def __init__(self) -> None:
        self.lost = False
        self.posted: list[said.ShelfCommand] = []

    def post(self, commands: Sequence[said.ShelfCommand]) -> None:
        self.posted += commands


def put_to(shelf: RankStoreInterface, order: said.ShelfOrder) -> bool:
    """As its caller does it."""
    number, hashes = OrderId(order.order), said.hashes_of(order.hashes)
    match order:
        case said.ShelfLookup():
            return shelf.lookup(number, hashes, order.timeout_s)
        case said.ShelfGet():
            return shelf.get(number, hashes, said.ids_of(order.blocks), order.timeout_s)
        case _:
            return shelf.put(number, hashes, said.ids_of(order.blocks), order.timeout_s)


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
        found = outcome(lambda: put_to(cast(RankStoreInterface, self.real), order), ValueError)
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
