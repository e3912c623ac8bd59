"""How an engine reaches the shared store: one `RankStoreInterface` for each of its ranks, since each has only its own
memory.

Blocks are named by id and values by the hash of their content (`store.keys.chain`): which bytes of the rank's memory
belong to a block, and which key a hash gets in this rank's space, is the rank's own knowledge.

Laws: no call waits. Each order ends exactly once (`OrderEnded`), and after its end the store touches no block of it. A
rank that is lost ends its look-ups as failed; its gets and puts end when it is back or its link is stopped
(`rank_store_link`), so whoever waits for one has a deadline of his own. Orders are minted by the caller and are never
used twice.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from kvbaton.store.interface import OrderEnded, OrderId

__all__ = ["OrderEnded", "OrderId", "RankStoreInterface"]


class RankStoreInterface(Protocol):
    """One rank's access to the store. Called by one thread of the engine at a time; wakes it from any."""

    @property
    def counters(self) -> Mapping[str, int]: ...

    def lookup(self, order: OrderId, hashes: Sequence[bytes], timeout_s: float) -> bool:
        """How many of these, from the first on, are there? False: no room now, and nothing was begun."""

    def get(self, order: OrderId, hashes: Sequence[bytes], blocks: Sequence[int], timeout_s: float) -> bool:
        """Bring the longest prefix of these into the blocks, one hash each."""

    def put(self, order: OrderId, hashes: Sequence[bytes], blocks: Sequence[int], timeout_s: float) -> bool:
        """Keep what is in the blocks. The caller has pinned them, and drops its pin at the end of the order."""

    def cancel(self, order: OrderId) -> None: ...

    def drain(self) -> Sequence[OrderEnded]: ...

    def set_waker(self, waker: Callable[[], None]) -> None: ...

    def close(self) -> None: ...
