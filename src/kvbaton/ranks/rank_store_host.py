"""A rank's store as its host drives it: commands in, news out.

Laws: the store is opened when the engine has said whose it is, since a rank has its memory before that is known. Every
order gets one end, also one that came too early, could not be decoded, or that the store refused or raised at. No
exception of the store leaves this module.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

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
    hashes_of,
    ids_of,
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
