"""Messages about the shared store between an engine's process and one of its ranks, as typed, bounded msgpack.

Laws: hashes and block ids cross as one bytes value each, so that an order of thousands of blocks is one small frame and
its items are not handled one by one. Inconsistent fields are refused by name where they are decoded.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Sequence
from typing import Annotated

import msgspec
from msgspec import Meta

from kvbaton.protocol.errors import Reason
from kvbaton.ranks.store_trust import WRITERS_MAX, RankStoreTrust
from kvbaton.store.interface import HASH_BYTES, OrderEnded, OrderId
from kvbaton.store.value_header import WRITER_BYTES

KEYS_MAX = 4096  # of one order, as in `store.base.StoreSettings`
ORDERS_MAX = 256  # of one rank, accepted, end not drained
COUNTERS_MAX = 128
DETAIL_CHARS_MAX = 512
_ID_BYTES = 8

_Order = Annotated[int, Meta(ge=0, le=(1 << 63) - 1)]
_Hashes = Annotated[bytes, Meta(min_length=HASH_BYTES, max_length=KEYS_MAX * HASH_BYTES)]
_Blocks = Annotated[bytes, Meta(min_length=_ID_BYTES, max_length=KEYS_MAX * _ID_BYTES)]
_Orders = Annotated[bytes, Meta(max_length=ORDERS_MAX * _ID_BYTES)]
_Seconds = Annotated[float, Meta(gt=0, le=3600)]
_Detail = Annotated[str, Meta(max_length=DETAIL_CHARS_MAX)]
_Writers = Annotated[tuple[Annotated[bytes, Meta(max_length=WRITER_BYTES)], ...], Meta(max_length=WRITERS_MAX)]
_Counter = Annotated[str, Meta(max_length=64)]


class _Tagged(msgspec.Struct, frozen=True, array_like=True, tag=True):
    pass


# --- commands


class RankStoreOpen(_Tagged, frozen=True):
    """Whose values these are: the digest of the engine's compatibility key. Before any order."""

    compat: Annotated[str, Meta(pattern="^[0-9a-f]{32}$")]


class RankStoreLookup(_Tagged, frozen=True):
    order: _Order
    hashes: _Hashes
    timeout_s: _Seconds


class RankStoreGet(_Tagged, frozen=True):
    order: _Order
    hashes: _Hashes
    blocks: _Blocks
    timeout_s: _Seconds


class RankStorePut(_Tagged, frozen=True):
    order: _Order
    hashes: _Hashes
    blocks: _Blocks
    timeout_s: _Seconds
    origins: _Writers = ()


class RankStoreCancel(_Tagged, frozen=True):
    order: _Order


class RankStoreAsk(_Tagged, frozen=True):
    """Which orders are open? Asked after something may have been lost; answered by `RankStoreHas`."""

    ask: _Order


RankStoreOrder = RankStoreLookup | RankStoreGet | RankStorePut
RankStoreCommand = RankStoreOpen | RankStoreTrust | RankStoreOrder | RankStoreCancel | RankStoreAsk


# --- news


class RankStoreEnded(_Tagged, frozen=True):
    """`store.base.OrderEnded` of one rank."""

    order: _Order
    count: Annotated[int, Meta(ge=0, le=KEYS_MAX)]
    reason: Reason | None
    detail: _Detail
    writers: _Writers = ()

    @classmethod
    def of(cls, ended: OrderEnded) -> RankStoreEnded:
        return cls(ended.order, ended.count, ended.reason, ended.detail[:DETAIL_CHARS_MAX], ended.writers)

    @property
    def end(self) -> OrderEnded:
        return OrderEnded(OrderId(self.order), self.count, self.reason, self.detail, self.writers)


class RankStoreHas(_Tagged, frozen=True):
    """The orders whose end was not reported yet."""

    ask: _Order
    orders: _Orders


class RankStoreCounts(_Tagged, frozen=True):
    """The rank's counters that changed."""

    counts: Annotated[dict[_Counter, int], Meta(max_length=COUNTERS_MAX)]


RankStoreNews = RankStoreEnded | RankStoreHas | RankStoreCounts


# --- packing


def pack_hashes(hashes: Sequence[bytes]) -> bytes:
    """ValueError for none, for too many, and for an invalid hash."""
    if not 0 < len(hashes) <= KEYS_MAX:
        raise ValueError(f"hashes: {len(hashes)}; give 1..{KEYS_MAX}")
    wrong = next((each for each in hashes if len(each) != HASH_BYTES), None)
    if wrong is not None:
        raise ValueError(f"hashes: one of {len(wrong)} bytes; make them with store.keys.chain ({HASH_BYTES} bytes)")
    return b"".join(hashes)


def hashes_of(packed: bytes) -> tuple[bytes, ...]:
    """ValueError when it is not a whole number of hashes."""
    if len(packed) % HASH_BYTES:
        raise ValueError(f"hashes: {len(packed)} bytes; whole hashes of {HASH_BYTES} were expected")
    return tuple(packed[at : at + HASH_BYTES] for at in range(0, len(packed), HASH_BYTES))


def pack_ids(ids: Sequence[int]) -> bytes:
    """ValueError for one that does not fit into 64 bits."""
    try:
        return _little_endian(array("q", ids)).tobytes()
    except (OverflowError, TypeError) as error:
        raise ValueError(f"ids: {error}") from None


def ids_of(packed: bytes) -> tuple[int, ...]:
    """ValueError when it is not a whole number of ids."""
    if len(packed) % _ID_BYTES:
        raise ValueError(f"ids: {len(packed)} bytes; whole ids of {_ID_BYTES} were expected")
    found = array("q")
    found.frombytes(packed)
    return tuple(_little_endian(found))


def _little_endian(ids: array[int]) -> array[int]:
    if sys.byteorder == "big":  # pragma: no cover
        ids.byteswap()
    return ids
