"""The two interfaces of the shared store: `Store`, used by engines, and `Backend`, which holds the bytes.

Laws of a `Store`, checked on every backend by `kvbaton.testing.check_store`:
 1. `submit`, `cancel`, `drain` never block, and never raise because of a backend.
 2. Every accepted order ends exactly once (`OrderEnded`), by its timeout plus a thread's turn, whatever a backend does:
    a call that hangs is abandoned, and it can only reach the store's own memory.
 3. An engine's memory is touched only by the store's own copies, and not after the order's end: it is always at rest.
 4. A put holds one pin from `submit` until its last byte is copied or it has ended, whichever is first; unpinned once.
 5. A get lands the longest prefix that is present, intact and of writers that are trusted now; the rest is a miss.
 6. A dead store costs misses and counted errors. It is left alone for a while instead of being tried by each order.
 7. Nothing busy-waits: an idle store costs no CPU; `waker` is called (from any thread) when `drain` has news.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NewType, Protocol, TypeAlias

import msgspec

from kvbaton.protocol.errors import Reason

__all__ = [
    "Backend",
    "Get",
    "Lookup",
    "Order",
    "OrderEnded",
    "OrderId",
    "Pieces",
    "Pins",
    "Put",
    "Store",
    "StoreSettings",
]

OrderId = NewType("OrderId", int)
"""One thing asked of a store; minted by whoever asks, never used twice."""

Pieces: TypeAlias = tuple[memoryview, ...]
"""One value as it lies in an engine's memory: contiguous bytes, in an order that all engines of a space share."""


class StoreSettings(msgspec.Struct, frozen=True, kw_only=True):
    """The bounds of one store. `value_bytes_max` is one block of one rank; see `keys.Space`."""

    value_bytes_max: int
    values_per_call_max: int = 64
    keys_max: int = 4096  # of one order: 65,536 tokens in blocks of 16
    orders_max: int = 256  # accepted, end not drained
    stuck_max: int = 4  # abandoned calls that have not returned; beyond it the store counts as dead
    timeout_s_max: float = 30.0
    call_timeout_s: float = 5.0
    retry_s_min: float = 0.5  # back-off after a failure: doubled each time
    retry_s_max: float = 8.0
    close_s: float = 2.0


class Lookup(msgspec.Struct, frozen=True):
    """How many of these keys, from the first on, are in the store?"""

    order: OrderId
    keys: tuple[str, ...]
    timeout_s: float


class Get(msgspec.Struct, frozen=True):
    """Load the longest prefix of these values."""

    order: OrderId
    keys: tuple[str, ...]
    into: tuple[Pieces, ...]
    timeout_s: float


class Put(msgspec.Struct, frozen=True):
    """Store these values, which are in these blocks of the engine."""

    order: OrderId
    keys: tuple[str, ...]
    values: tuple[Pieces, ...]
    blocks: tuple[int, ...]
    timeout_s: float
    origins: tuple[bytes, ...] = ()  # whose KV they may be computed on, as values name them


Order: TypeAlias = Lookup | Get | Put


class OrderEnded(msgspec.Struct, frozen=True):
    """An order has ended. `count`: keys found, values landed, or values now in the store.

    A reason says why there are not more; without one the rest was missing, or, for a put, there is no rest.
    """

    order: OrderId
    count: int
    reason: Reason | None = None
    detail: str = ""
    writers: tuple[bytes, ...] = ()  # of a get: whose values landed, and on whose KV they may be computed


class Pins(Protocol):
    """The engine's promise not to reuse blocks. Never blocks."""

    def pin(self, order: OrderId, blocks: Sequence[int]) -> None:
        """On the thread that submits, within `submit`. Its exceptions propagate from `submit`, and nothing is
        pinned."""

    def unpin(self, order: OrderId) -> None:
        """On any thread, exactly once for each `pin`."""


class Store(Protocol):
    """One engine's access to a shared store."""

    @property
    def counters(self) -> Mapping[str, int]: ...

    def submit(self, order: Order) -> bool:
        """Start; False when the bounded queue is full or the store is closed. ValueError names the invalid field.

        Memory that cannot be a value (not contiguous, too large, read-only) ends the order with `BAD_SPAN`.
        """

    def cancel(self, order: OrderId) -> None:
        """Ask an order to stop; it still ends by one `OrderEnded`. Unknown orders are ignored."""

    def drain(self) -> Sequence[OrderEnded]:
        """Everything that ended since the last call."""

    def set_waker(self, waker: Callable[[], None]) -> None: ...

    def close(self) -> None:
        """End all orders, drop all pins, stop. Idempotent; bounded in time even if the back end hangs."""


class Backend(Protocol):
    """Stores bytes under keys. Its calls may block and raise; they come from several threads at once.

    The memory in `values` and `into` is registered, and belongs to the call until it returns.
    """

    @property
    def lands_late(self) -> bool:
        """Whether bytes of a get may land in `into` after it returned: true for libraries that cannot cancel."""

    def register(self, memory: memoryview) -> None:
        """Memory used by later calls. Called before any of them; must not block."""

    def exists(self, keys: Sequence[str]) -> Sequence[bool]:
        """Which of the keys exist, as far as can be determined without reading them."""

    def put(self, keys: Sequence[str], values: Sequence[memoryview]) -> Sequence[str]:
        """Store each value; per key the error, or "" (also when the key existed already)."""

    def get(self, keys: Sequence[str], into: Sequence[memoryview]) -> Sequence[int]:
        """Per key, how many bytes were written to the start of its buffer; 0 for a miss."""

    def discard(self, keys: Sequence[str]) -> None:
        """Delete these: their contents are damaged."""

    def close(self) -> None: ...
