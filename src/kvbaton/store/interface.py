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

The keys of KV blocks in a store: a chain of hashes over the tokens, in a space of compatible engines.

Law: equal content gives equal keys in every process; any difference in the tokens up to the block's end, in other
inputs of the KV (adapter, salt, images, embeddings), in the compatibility key or in how the KV is divided into parts
gives different ones. A key is text of bounded length: lower-case letters, digits, '.', '-' and '_'.
"""

from __future__ import annotations

import hashlib
import re
import sys
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NewType, Protocol, TypeAlias

import msgspec

from kvbaton.protocol.content import Content
from kvbaton.protocol.errors import Reason

HASH_BYTES = 32  # keys are shared between tenants: collisions must be infeasible
KEY_CHARS_MAX = 192
RANKS_MAX = 4096
LAYERS_MAX = 65_536
VALUE_BYTES_MAX = 1 << 32

_COMPAT = re.compile(r"[0-9a-f]{32}")
_KEY = re.compile(r"[a-z0-9][a-z0-9._-]{0,191}")
_PERSON = b"kvbaton-store-1"


class Space(msgspec.Struct, frozen=True, kw_only=True):
    """The values of one part of the KV, of all engines for which they are interchangeable, byte by byte."""

    compat: str  # protocol.content.compat_digest of the engines' compatibility key
    block_tokens: int
    value_bytes: int
    ranks: int = 1
    rank: int = 0
    group: str = ""  # of the layout: its name
    layer_start: int = 0
    layer_stop: int
    part: int = 0
    layout: str = ""  # what else determines a byte's place in a value, as text (dtype, order of the planes)


def prefix(space: Space) -> str:
    """The prefix of every key of a space; ValueError names the invalid field."""
    _check(space)
    facts = msgspec.msgpack.encode((space.block_tokens, space.value_bytes, space.group, space.layout))
    shape = hashlib.blake2b(facts, digest_size=8, person=_PERSON).hexdigest()
    return (
        f"kv1-{space.compat}-{shape}-r{space.rank}.{space.ranks}-l{space.layer_start}.{space.layer_stop}-p{space.part}-"
    )


def chain(content: Content, block_tokens: int) -> Iterator[bytes]:
    """The hash of each whole block among the content's first `position` tokens; each covers all before it too."""
    stop = min(content.position, len(content.tokens))
    whole = stop - stop % block_tokens if block_tokens > 0 else 0
    return extend(root(content, block_tokens), content.tokens[:whole], block_tokens)


def root(content: Content, block_tokens: int) -> bytes:
    """What a chain begins with: all that shapes the KV but the tokens."""
    if block_tokens < 1:
        raise ValueError(f"block_tokens: {block_tokens}; a block has at least one token")
    told = (content.lora, content.multimodal, content.salt, content.embeddings, block_tokens)
    return hashlib.blake2b(msgspec.msgpack.encode(told), digest_size=HASH_BYTES, person=_PERSON).digest()


def extend(last: bytes, tokens: Sequence[int], block_tokens: int) -> Iterator[bytes]:
    """The hashes of a chain's next blocks, behind the one whose hash is `last`, or behind its root."""
    for start in range(0, len(tokens) - block_tokens + 1, block_tokens):
        ids = array("q", tokens[start : start + block_tokens])
        if sys.byteorder == "big":  # pragma: no cover
            ids.byteswap()
        last = hashlib.blake2b(last + ids.tobytes(), digest_size=HASH_BYTES, person=_PERSON).digest()
        yield last


def keys(front: str, hashes: Sequence[bytes]) -> tuple[str, ...]:
    """The keys of a chain, or of a part of it, in a space whose `prefix` is `front`."""
    return tuple(front + each.hex() for each in hashes)


def is_key(text: str) -> bool:
    """Whether an external string may be used as a key."""
    return _KEY.fullmatch(text) is not None


def _check(space: Space) -> None:
    if _COMPAT.fullmatch(space.compat) is None:
        raise ValueError(f"compat: {space.compat[:40]!r}; give protocol.content.compat_digest of the compatibility key")
    for field, value, low, high in (
        ("block_tokens", space.block_tokens, 1, 1 << 20),
        ("value_bytes", space.value_bytes, 1, VALUE_BYTES_MAX),
        ("ranks", space.ranks, 1, RANKS_MAX),
        ("rank", space.rank, 0, space.ranks - 1),
        ("layer_start", space.layer_start, 0, LAYERS_MAX),
        ("layer_stop", space.layer_stop, space.layer_start + 1, LAYERS_MAX),
        ("part", space.part, 0, RANKS_MAX),
    ):
        if not low <= value <= high:
            raise ValueError(f"{field}: {value} is outside {low}..{high}")


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
