"""The store of a rank in another process of this engine: the `RankStoreInterface` that the engine sees for it.

Laws, beyond those of `RankStoreInterface`: an order that touches blocks ends when the rank says so, and not before,
since after its end the blocks may be reused; so while a rank is lost its gets and puts stay open, and a waiter has its
own deadline and keeps the blocks. (vLLM's step waits for the same process: nothing could continue earlier.) A lookup
touches nothing, and ends with the loss. A rank that is back is asked which orders are open; those that it does not know
have ended. When the link is stopped, everything ends. New orders of a lost rank end at once, as failed.

A rank's store as its host drives it: commands in, news out.

Laws: the store is opened when the engine has said whose it is, since a rank has its memory before that is known. Every
order gets one end, also one that came too early, could not be decoded, or that the store refused or raised at. No
exception of the store leaves this module.
"""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from kvbaton.observe.codes.entry import worth_saying
from kvbaton.protocol.errors import Reason
from kvbaton.ranks.engine_store import RankStoreInterface
from kvbaton.ranks.rank_store_messages import (
    COUNTERS_MAX,
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
    hashes_of,
    ids_of,
    pack_hashes,
    pack_ids,
)
from kvbaton.ranks.store_trust import RankStoreTrust
from kvbaton.store.interface import OrderEnded, OrderId

log = logging.getLogger(__name__)

DETAIL_CHARS_MAX = 512
MakeRankStore = Callable[[str], RankStoreInterface]
"""Makes the rank's store for the engine whose compatibility key has this digest."""


class RankStoreHost:
    """One rank's store, its open orders, and its news. All on the host's thread, except `set_waker`."""

    def __init__(self, make: MakeRankStore) -> None:
        self.faults = 0
        self._make = make
        self._store: RankStoreInterface | None = None
        self._waker: Callable[[], None] = lambda: None
        self._open: set[OrderId] = set()
        self._news: list[RankStoreNews] = []
        self._told: dict[str, int] = {}
        self._why = "the engine has not named the store's owner yet"
        self._closed = False
        self._trust: RankStoreTrust | None = None  # it may come before the store is opened

    def set_waker(self, waker: Callable[[], None]) -> None:
        self._waker = waker

    def carry_out(self, command: RankStoreCommand) -> None:
        if isinstance(command, RankStoreOpen):
            self._open_store(command)
        elif isinstance(command, RankStoreTrust):
            self._trust = command
            self._guarded(self._pass_trust)
        elif isinstance(command, RankStoreCancel):
            self._guarded(lambda: self._store.cancel(OrderId(command.order)) if self._store is not None else None)
        elif isinstance(command, RankStoreAsk):
            self._drain()  # known ends are reported before the answer
            self._news.append(RankStoreHas(command.ask, pack_ids(sorted(self._open)[:ORDERS_MAX])))
        else:
            self._begin(command)

    def turn(self) -> None:
        """Collect the orders that have ended."""
        self._drain()

    def take_news(self) -> list[RankStoreNews]:
        news, self._news = self._news, []
        return news

    def close(self) -> None:
        """Ends everything; the ends are in the news afterwards. Idempotent."""
        if self._closed:
            return
        self._closed = True
        self._why = "the rank has stopped"
        store, waker = self._store, self._waker
        self._waker = lambda: None
        if store is not None:
            self._guarded(store.close)
            self._drain()
        self._waker = waker
        for order in sorted(self._open):  # a store that broke its contract
            self._end(order, Reason.CANCELLED, self._why)

    # --- commands

    def _open_store(self, command: RankStoreOpen) -> None:
        if self._store is not None or self._closed:
            self._fault("the store's owner was named twice")
            return
        try:
            self._store = self._make(command.compat)
            self._pass_trust()
            self._store.set_waker(self._waker)
        except Exception as error:  # noqa: BLE001 - a library of a back end may throw anything
            self._why = _told(error)
            self._fault(f"the store cannot be used: {self._why}")

    def _begin(self, command: RankStoreOrder) -> None:
        order = OrderId(command.order)
        if self._store is None or self._closed:
            self._end(order, Reason.STORE_FAILED, self._why)
            return
        try:
            begun = self._submitted(self._store, command)
        except ValueError as error:
            self._end(order, Reason.BAD_SPAN, _told(error))
        except Exception as error:  # noqa: BLE001 - an adapter may throw anything
            self._fault(_told(error))
            self._end(order, Reason.STORE_FAILED, _told(error))
        else:
            if begun:
                self._open.add(order)
            else:
                self._end(order, Reason.BUSY, "the rank's store has no room for more orders")

    def _submitted(self, store: RankStoreInterface, command: RankStoreOrder) -> bool:
        order, hashes = OrderId(command.order), hashes_of(command.hashes)
        if isinstance(command, RankStoreLookup):
            return store.lookup(order, hashes, command.timeout_s)
        blocks = ids_of(command.blocks)
        if len(blocks) != len(hashes):
            raise ValueError(f"blocks: {len(blocks)} for {len(hashes)} hashes")
        if isinstance(command, RankStoreGet):
            return store.get(order, hashes, blocks, command.timeout_s)
        return store.put(order, hashes, blocks, command.timeout_s, command.origins)

    def _pass_trust(self) -> None:
        if self._store is not None and self._trust is not None:
            self._store.set_trust(self._trust)

    # --- news

    def _drain(self) -> None:
        if self._store is not None:
            self._guarded(self._collect)

    def _collect(self) -> None:
        assert self._store is not None
        ended = self._store.drain()
        for each in ended:
            if each.order in self._open:
                self._open.discard(each.order)
                self._news.append(RankStoreEnded.of(each))
        if ended:
            self._tell_counters()

    def _tell_counters(self) -> None:
        assert self._store is not None
        now = dict(list(self._store.counters.items())[:COUNTERS_MAX])
        changed = {name[:64]: count for name, count in now.items() if self._told.get(name) != count}
        self._told = now
        if changed:
            self._news.append(RankStoreCounts(changed))

    def _end(self, order: OrderId, reason: Reason, detail: str) -> None:
        self._open.discard(order)
        self._news.append(RankStoreEnded.of(OrderEnded(order, 0, reason, detail)))

    def _guarded(self, action: Callable[[], object]) -> None:
        try:
            action()
        except Exception as error:  # noqa: BLE001 - an adapter may throw anything
            self._fault(_told(error))

    def _fault(self, detail: str) -> None:
        self.faults += 1
        if worth_saying(self.faults):
            log.error("[rank-store-fault] store: %s (fault %d)", detail, self.faults)


def _told(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"[:DETAIL_CHARS_MAX]


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
