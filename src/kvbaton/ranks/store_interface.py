"""An engine's interface to the shared store: one `RankStoreInterface` per rank, since each has only its own memory.

Blocks are named by id and values by the hash of their content (`store.content_keys.chain`): only the rank knows which
bytes of its memory belong to a block, and which key a hash gets in its space.

Laws: no call waits. Each order ends exactly once (`OrderEnded`), and after its end the store touches no block of it. A
lost rank ends its lookups as failed; its gets and puts end when it is back or its link is stopped (`rank_store_link`),
so a waiter needs its own deadline. Order ids are chosen by the caller and never reused.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from kvbaton.ranks.store_trust import RankStoreTrust
from kvbaton.store.interface import OrderEnded, OrderId

__all__ = ["OrderEnded", "OrderId", "RankStoreInterface"]


class RankStoreInterface(Protocol):
    """One rank's access to the store. Called by one thread of the engine at a time; wakes it from any."""

    @property
    def counters(self) -> Mapping[str, int]: ...

    def lookup(self, order: OrderId, hashes: Sequence[bytes], timeout_s: float) -> bool:
        """How many of these, from the first on, are in the store? False: no room now, and nothing was started."""

    def get(self, order: OrderId, hashes: Sequence[bytes], blocks: Sequence[int], timeout_s: float) -> bool:
        """Load the longest prefix of these into the blocks, one hash each."""

    def set_trust(self, trust: RankStoreTrust) -> None:
        """Who this engine writes as, and whose values count, from now on."""

    def put(
        self,
        order: OrderId,
        hashes: Sequence[bytes],
        blocks: Sequence[int],
        timeout_s: float,
        origins: tuple[bytes, ...] = (),
    ) -> bool:
        """Store the contents of the blocks. The caller has pinned them, and unpins at the end of the order.
        `origins`: on whose KV they may be computed."""

    def cancel(self, order: OrderId) -> None: ...

    def drain(self) -> Sequence[OrderEnded]: ...

    def set_waker(self, waker: Callable[[], None]) -> None: ...

    def close(self) -> None: ...
