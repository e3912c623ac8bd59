"""The store of a rank in another process of this engine: the `RankStoreInterface` that the engine sees for it.

Laws, beyond those of `RankStoreInterface`: an order that touches blocks ends when the rank says so, and not before,
since after its end the blocks may be reused; so while a rank is lost its gets and puts stay open, and a waiter has its
own deadline and keeps the blocks. (vLLM's step waits for the same process: nothing could continue earlier.) A lookup
touches nothing, and ends with the loss. A rank that is back is asked which orders are open; those that it does not know
have ended. When the link is stopped, everything ends. New orders of a lost rank end at once, as failed.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from kvbaton.protocol.errors import Reason
from kvbaton.ranks.rank_store_messages import (
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
    RankStoreOrder,
    RankStorePut,
    ids_of,
    pack_hashes,
    pack_ids,
)
from kvbaton.ranks.store_trust import RankStoreTrust
from kvbaton.store.interface import OrderEnded, OrderId


class RankStoreUplink(Protocol):
    """The connection to one rank, as its store uses it."""

    rank: int

    @property
    def lost(self) -> bool: ...

    def post(self, commands: Sequence[RankStoreCommand]) -> None:
        """Send, in this order, after everything posted before. Never waits."""


class RemoteRankStore:
    """See `RankStoreInterface`. Called by the engine; the link's thread delivers the news."""

    def __init__(self, link: RankStoreUplink) -> None:
        self.orders_max = ORDERS_MAX
        self._link = link
        self._lock = threading.RLock()
        self._open: dict[OrderId, RankStoreOrder] = {}
        self._cancelled: set[OrderId] = set()
        self._ends: list[OrderEnded] = []
        self._own: Counter[str] = Counter()  # busy, lost, forgotten
        self._theirs: dict[str, int] = {}
        self._waker: Callable[[], None] = lambda: None
        self._asks = 0
        self._asked: frozenset[OrderId] = frozenset()  # open when the last query was sent
        self._closed = False

    @property
    def counters(self) -> Mapping[str, int]:
        with self._lock:
            return {**self._theirs, **{f"link.{name}": count for name, count in self._own.items()}}

    @property
    def open_orders(self) -> int:
        return len(self._open)

    def open(self, compat: str) -> None:
        """Tell the rank whose values it puts and gets; once, before any order."""
        self._link.post([RankStoreOpen(compat)])

    def lookup(self, order: OrderId, hashes: Sequence[bytes], timeout_s: float) -> bool:
        return self._submit(RankStoreLookup(order, pack_hashes(hashes), timeout_s))

    def get(self, order: OrderId, hashes: Sequence[bytes], blocks: Sequence[int], timeout_s: float) -> bool:
        return self._submit(RankStoreGet(order, pack_hashes(hashes), _packed(hashes, blocks), timeout_s))

    def set_trust(self, trust: RankStoreTrust) -> None:
        self._link.post([trust])

    def put(
        self,
        order: OrderId,
        hashes: Sequence[bytes],
        blocks: Sequence[int],
        timeout_s: float,
        origins: tuple[bytes, ...] = (),
    ) -> bool:
        return self._submit(RankStorePut(order, pack_hashes(hashes), _packed(hashes, blocks), timeout_s, origins))

    def cancel(self, order: OrderId) -> None:
        with self._lock:
            if order in self._open and order not in self._cancelled:
                self._cancelled.add(order)  # sent once
                self._link.post([RankStoreCancel(order)])

    def drain(self) -> list[OrderEnded]:
        with self._lock:
            ends, self._ends = self._ends, []
        return ends

    def set_waker(self, waker: Callable[[], None]) -> None:
        with self._lock:
            self._waker = waker
            ring = bool(self._ends)
        if ring:
            waker()

    def close(self) -> None:
        """Returns at once: open orders are cancelled, and end when the rank says so or the link is stopped."""
        with self._lock:
            self._closed = True
            for order in list(self._open):
                self.cancel(order)

    def _submit(self, order: RankStoreOrder) -> bool:
        number = OrderId(order.order)
        with self._lock:
            if self._closed or len(self._open) + len(self._ends) >= self.orders_max:
                self._own["busy"] += 1
                return False
            if number in self._open:
                raise ValueError(f"order: {number} is open already; use another")
            if self._link.lost:
                self._own["lost"] += 1
                self._finish(number, Reason.STORE_FAILED, f"rank {self._link.rank} is lost; nothing was started")
            else:
                self._open[number] = order
                self._link.post([order])
                return True
        self._waker()
        return True

    # --- the link's thread

    def take(self, news: RankStoreNews) -> None:
        with self._lock:
            if isinstance(news, RankStoreEnded):
                ring = self._take_end(news)
            elif isinstance(news, RankStoreHas):
                ring = self._take_open(news)
            else:
                assert isinstance(news, RankStoreCounts)
                self._theirs.update(news.counts)
                ring = False
        if ring:
            self._waker()

    def on_lost(self, detail: str) -> None:
        """The rank does not respond. Orders that touch no block are over."""
        with self._lock:
            ended = [order for order, asked in self._open.items() if isinstance(asked, RankStoreLookup)]
            self._own["lost"] += len(ended)
            for order in ended:
                self._finish(order, Reason.STORE_FAILED, detail)
        if ended:
            self._waker()

    def on_back(self) -> None:
        """The rank responds again, but the end of an order may have been in a frame that could not be decoded."""
        with self._lock:
            if self._open:
                self._asks += 1
                self._asked = frozenset(self._open)
                self._link.post([RankStoreAsk(self._asks)])

    def on_stopped(self, detail: str) -> None:
        """Nothing more will arrive from this rank, and its engine is about to stop."""
        with self._lock:
            self._closed = True
            ended = list(self._open)
            for order in ended:
                self._finish(order, Reason.CANCELLED, detail)
        if ended:
            self._waker()

    def _take_end(self, news: RankStoreEnded) -> bool:
        if news.order not in self._open:
            return False  # a look-up that ended with the loss of the rank
        self._close_order(OrderId(news.order))
        self._ends.append(news.end)
        return True

    def _take_open(self, news: RankStoreHas) -> bool:
        if news.ask != self._asks:
            return False
        known = set(ids_of(news.orders))
        gone = [order for order in self._asked if order in self._open and order not in known]
        self._own["forgotten"] += len(gone)
        for order in gone:
            self._finish(order, Reason.STORE_FAILED, f"rank {self._link.rank} has ended it; the result was lost")
        return bool(gone)

    def _finish(self, order: OrderId, reason: Reason, detail: str) -> None:
        self._close_order(order)
        self._ends.append(OrderEnded(order, 0, reason, detail))

    def _close_order(self, order: OrderId) -> None:
        self._open.pop(order, None)
        self._cancelled.discard(order)


def _packed(hashes: Sequence[bytes], blocks: Sequence[int]) -> bytes:
    if len(blocks) != len(hashes):
        raise ValueError(f"blocks: {len(blocks)} for {len(hashes)} hashes; give one each")
    return pack_ids(blocks)
