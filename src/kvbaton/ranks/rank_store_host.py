"""A rank's store as its host drives it: commands in, news out.

Laws: the store is opened when the engine has said whose it is, since a rank has its memory before that is known. Every
order gets one end, also one that came too early, could not be decoded, or that the store refused or raised at. No
exception of the store leaves this module.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from kvbaton.observe.codes.saying import worth_saying
from kvbaton.protocol.errors import Reason
from kvbaton.ranks.rank_store_messages import (
    COUNTERS_MAX,
    ORDERS_MAX,
    ShelfAsk,
    ShelfCancel,
    ShelfCommand,
    ShelfCounts,
    ShelfEnded,
    ShelfGet,
    ShelfHas,
    ShelfLookup,
    ShelfNews,
    ShelfOpen,
    ShelfOrder,
    hashes_of,
    ids_of,
    pack_ids,
)
from kvbaton.ranks.store_interface import RankStoreInterface
from kvbaton.ranks.store_trust import ShelfTrust
from kvbaton.store.interface import OrderEnded, OrderId

log = logging.getLogger(__name__)

DETAIL_CHARS_MAX = 512
MakeShelf = Callable[[str], RankStoreInterface]
"""Makes the rank's shelf for the engine whose compatibility key has this digest."""


class HostedShelf:
    """One rank's store, its open orders, and its news. All on the host's thread, except `set_waker`."""

    def __init__(self, make: MakeShelf) -> None:
        self.faults = 0
        self._make = make
        self._shelf: RankStoreInterface | None = None
        self._waker: Callable[[], None] = lambda: None
        self._open: set[OrderId] = set()
        self._news: list[ShelfNews] = []
        self._told: dict[str, int] = {}
        self._why = "the engine has not named the store's owner yet"
        self._closed = False
        self._trust: ShelfTrust | None = None  # it may come before the store is opened

    def set_waker(self, waker: Callable[[], None]) -> None:
        self._waker = waker

    def carry_out(self, command: ShelfCommand) -> None:
        if isinstance(command, ShelfOpen):
            self._open_shelf(command)
        elif isinstance(command, ShelfTrust):
            self._trust = command
            self._guarded(self._pass_trust)
        elif isinstance(command, ShelfCancel):
            self._guarded(lambda: self._shelf.cancel(OrderId(command.order)) if self._shelf is not None else None)
        elif isinstance(command, ShelfAsk):
            self._drain()  # known ends are reported before the answer
            self._news.append(ShelfHas(command.ask, pack_ids(sorted(self._open)[:ORDERS_MAX])))
        else:
            self._begin(command)

    def turn(self) -> None:
        """Collect the orders that have ended."""
        self._drain()

    def take_news(self) -> list[ShelfNews]:
        news, self._news = self._news, []
        return news

    def close(self) -> None:
        """Ends everything; the ends are in the news afterwards. Idempotent."""
        if self._closed:
            return
        self._closed = True
        self._why = "the rank has stopped"
        shelf, waker = self._shelf, self._waker
        self._waker = lambda: None
        if shelf is not None:
            self._guarded(shelf.close)
            self._drain()
        self._waker = waker
        for order in sorted(self._open):  # a store that broke its contract
            self._end(order, Reason.CANCELLED, self._why)

    # --- commands

    def _open_shelf(self, command: ShelfOpen) -> None:
        if self._shelf is not None or self._closed:
            self._fault("the store's owner was named twice")
            return
        try:
            self._shelf = self._make(command.compat)
            self._pass_trust()
            self._shelf.set_waker(self._waker)
        except Exception as error:  # noqa: BLE001 - a library of a back end may throw anything
            self._why = _told(error)
            self._fault(f"the store cannot be used: {self._why}")

    def _begin(self, command: ShelfOrder) -> None:
        order = OrderId(command.order)
        if self._shelf is None or self._closed:
            self._end(order, Reason.STORE_FAILED, self._why)
            return
        try:
            begun = self._submitted(self._shelf, command)
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

    def _submitted(self, shelf: RankStoreInterface, command: ShelfOrder) -> bool:
        order, hashes = OrderId(command.order), hashes_of(command.hashes)
        if isinstance(command, ShelfLookup):
            return shelf.lookup(order, hashes, command.timeout_s)
        blocks = ids_of(command.blocks)
        if len(blocks) != len(hashes):
            raise ValueError(f"blocks: {len(blocks)} for {len(hashes)} hashes")
        if isinstance(command, ShelfGet):
            return shelf.get(order, hashes, blocks, command.timeout_s)
        return shelf.put(order, hashes, blocks, command.timeout_s, command.origins)

    def _pass_trust(self) -> None:
        if self._shelf is not None and self._trust is not None:
            self._shelf.set_trust(self._trust)

    # --- news

    def _drain(self) -> None:
        if self._shelf is not None:
            self._guarded(self._collect)

    def _collect(self) -> None:
        assert self._shelf is not None
        ended = self._shelf.drain()
        for each in ended:
            if each.order in self._open:
                self._open.discard(each.order)
                self._news.append(ShelfEnded.of(each))
        if ended:
            self._tell_counters()

    def _tell_counters(self) -> None:
        assert self._shelf is not None
        now = dict(list(self._shelf.counters.items())[:COUNTERS_MAX])
        changed = {name[:64]: count for name, count in now.items() if self._told.get(name) != count}
        self._told = now
        if changed:
            self._news.append(ShelfCounts(changed))

    def _end(self, order: OrderId, reason: Reason, detail: str) -> None:
        self._open.discard(order)
        self._news.append(ShelfEnded.of(OrderEnded(order, 0, reason, detail)))

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
