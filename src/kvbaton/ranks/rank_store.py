"""One rank's access to the store, in the process that has the rank's memory. Implements `RankStoreInterface`.

Laws: `RankValues` defines a block's value, and no other memory is touched; only the store's own copies touch it, and
none after the end of the order (`store.interface`, law 3). An invalid order (a block that does not exist) ends as
failed, it does not raise. The caller pins: the pins of the store below are only counted, to prove that none is left.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Protocol

from kvbaton.protocol.errors import Reason
from kvbaton.ranks.rank_values import RankValues
from kvbaton.ranks.store_trust import RankStoreTrust
from kvbaton.store.content_keys import keys, prefix
from kvbaton.store.interface import (
    Backend,
    Get,
    Lookup,
    Order,
    OrderEnded,
    OrderId,
    Pieces,
    Pins,
    Put,
    Store,
    StoreSettings,
)
from kvbaton.store.threaded_store import KeptStore
from kvbaton.store.value_header import StoreTrust

SLOT_BYTES_MAX = 64 << 20
"""What one call moves at most; a store has ten such slots of address space, and uses two unless calls get stuck."""
CLOSE_S = 1.0


class KeepingStore(Store, Protocol):
    @property
    def stuck(self) -> int:
        """Abandoned calls that have not returned."""

    def set_trust(self, trust: StoreTrust) -> None: ...


Keep = Callable[[Backend, Pins, StoreSettings], KeepingStore]
"""Makes the store that a store puts its orders to: `KeptStore`, or what stands in for its threads in a simulation."""


def rank_store_settings(value_bytes: int) -> StoreSettings:
    """The bounds of one rank's store, for values of this size."""
    per_call = max(1, min(64, SLOT_BYTES_MAX // value_bytes))
    return StoreSettings(value_bytes_max=value_bytes, values_per_call_max=per_call, close_s=CLOSE_S)


class PinCount:
    """The pins of a store whose caller holds the real ones. `held` is blocks by order."""

    def __init__(self) -> None:
        self.held: dict[OrderId, int] = {}

    def pin(self, order: OrderId, blocks: Sequence[int]) -> None:
        self.held[order] = len(blocks)

    def unpin(self, order: OrderId) -> None:
        del self.held[order]

    @property
    def blocks(self) -> int:
        return sum(list(self.held.values()))


class LocalRankStore:
    """Values of one rank, through any `Backend`. `owned`: the backend belongs to this rank, and is closed with it.

    Ranks of one process may share a backend: construct all of them before the first order, and close it after them.
    """

    def __init__(
        self,
        backend: Backend,
        values: RankValues,
        regions: Sequence[memoryview],
        settings: StoreSettings | None = None,
        *,
        owned: bool = False,
        keep: Keep | None = None,
    ) -> None:
        self._values = values
        self._regions = regions
        self._front = prefix(values.space)
        self._pins = PinCount()
        settings = settings or rank_store_settings(values.space.value_bytes)
        self._store = (keep or partial(KeptStore, owned=owned))(backend, self._pins, settings)
        self._refused: deque[OrderEnded] = deque()
        self._waker: Callable[[], None] = lambda: None

    @property
    def counters(self) -> Mapping[str, int]:
        """Counters of the store; `pins`: blocks that it reads now; `stuck`: abandoned calls that have not returned."""
        return {**self._store.counters, "pins": self._pins.blocks, "stuck": self._store.stuck}

    def lookup(self, order: OrderId, hashes: Sequence[bytes], timeout_s: float) -> bool:
        return self._submit(order, lambda: Lookup(order, keys(self._front, hashes), timeout_s))

    def get(self, order: OrderId, hashes: Sequence[bytes], blocks: Sequence[int], timeout_s: float) -> bool:
        return self._submit(order, lambda: Get(order, keys(self._front, hashes), self._pieces(blocks), timeout_s))

    def set_trust(self, trust: RankStoreTrust) -> None:
        self._store.set_trust(trust.trust)

    def put(
        self,
        order: OrderId,
        hashes: Sequence[bytes],
        blocks: Sequence[int],
        timeout_s: float,
        origins: tuple[bytes, ...] = (),
    ) -> bool:
        def made() -> Put:
            return Put(order, keys(self._front, hashes), self._pieces(blocks), tuple(blocks), timeout_s, origins)

        return self._submit(order, made)

    def cancel(self, order: OrderId) -> None:
        self._store.cancel(order)

    def drain(self) -> Sequence[OrderEnded]:
        refused = [self._refused.popleft() for _ in range(len(self._refused))]
        return [*refused, *self._store.drain()]

    def set_waker(self, waker: Callable[[], None]) -> None:
        self._waker = waker
        self._store.set_waker(waker)

    def close(self) -> None:
        """End all orders; bounded in time even if the backend hangs. Ends can still be drained."""
        self._store.close()

    def _pieces(self, blocks: Sequence[int]) -> tuple[Pieces, ...]:
        return tuple(self._values.pieces(self._regions, block) for block in blocks)

    def _submit(self, order: OrderId, make: Callable[[], Order]) -> bool:
        try:
            return self._store.submit(make())
        except ValueError as error:
            self._refused.append(OrderEnded(order, 0, Reason.BAD_SPAN, str(error)))
            self._waker()
            return True
