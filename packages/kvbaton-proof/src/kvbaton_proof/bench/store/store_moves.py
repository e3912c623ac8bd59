"""Values into a store and out of it again, timed as an engine sees it: from the order to its end.

Laws: one client puts, another gets; every byte that was got is compared with what was put. Keys are new in each round,
so nothing is there before it is put, and are dropped after it.
"""

from __future__ import annotations

import itertools
import os
import random
import statistics
import threading
import time
from collections.abc import Callable, Sequence

import msgspec

from kvbaton.protocol.content import Content
from kvbaton.store.content_keys import Space, chain, keys, prefix
from kvbaton.store.interface import Backend, Get, Lookup, Order, OrderEnded, OrderId, Pieces, Put, StoreSettings
from kvbaton.store.threaded_store import KeptStore
from kvbaton.store.value_header import ALONE, StoreTrust

TIMEOUT_S = 30.0
BLOCK_TOKENS = 4


class Shape(msgspec.Struct, frozen=True):
    """`values` values, each of `pieces` pieces of `piece_bytes` that do not lie side by side."""

    values: int
    pieces: int
    piece_bytes: int

    @property
    def value_bytes(self) -> int:
        return self.pieces * self.piece_bytes

    @property
    def bytes(self) -> int:
        return self.values * self.value_bytes

    def __str__(self) -> str:
        size = f"{self.piece_bytes >> 10} KiB" if self.piece_bytes < 1 << 20 else f"{self.piece_bytes >> 20} MiB"
        return f"{self.values} × {size}" if self.pieces == 1 else f"{self.values} × ({self.pieces} × {size})"


SHAPES = (Shape(64, 1, 256 << 10), Shape(64, 1, 1 << 20), Shape(64, 64, 16 << 10))


class Row(msgspec.Struct, frozen=True):
    """Medians over the faster half of the rounds: what others did to the machine meanwhile is not the store's."""

    backend: str
    shape: str
    put_gb_s: float
    get_gb_s: float
    put_us_per_key: float
    get_us_per_key: float
    exists_us_per_key: float
    hit_ratio: float  # of what was put, how much was got, whole
    wrong_bytes: int


class _NoPins:
    def pin(self, order: OrderId, blocks: Sequence[int]) -> None:
        pass

    def unpin(self, order: OrderId) -> None:
        pass


class Client:
    """One engine's store, used synchronously."""

    def __init__(self, backend: Backend, shape: Shape, trust: StoreTrust = ALONE) -> None:
        settings = StoreSettings(
            value_bytes_max=shape.value_bytes, values_per_call_max=shape.values, call_timeout_s=TIMEOUT_S
        )
        self.backend = backend
        self._store = KeptStore(backend, _NoPins(), settings)
        self._store.set_trust(trust)
        self._news = threading.Event()
        self._store.set_waker(self._news.set)
        self._ids = itertools.count(1)

    def put(self, names: tuple[str, ...], values: tuple[Pieces, ...]) -> tuple[OrderEnded, float]:
        return self._timed(lambda order: Put(order, names, values, (), TIMEOUT_S))

    def get(self, names: tuple[str, ...], into: tuple[Pieces, ...]) -> tuple[OrderEnded, float]:
        return self._timed(lambda order: Get(order, names, into, TIMEOUT_S))

    def lookup(self, names: tuple[str, ...]) -> tuple[OrderEnded, float]:
        return self._timed(lambda order: Lookup(order, names, TIMEOUT_S))

    def close(self) -> None:
        self._store.close()

    def _timed(self, make: Callable[[OrderId], Order]) -> tuple[OrderEnded, float]:
        order = make(OrderId(next(self._ids)))
        begun = time.perf_counter()
        if not self._store.submit(order):
            raise RuntimeError("the store took no order")
        while True:
            self._news.clear()
            ends = self._store.drain()
            if ends:
                return ends[0], time.perf_counter() - begun
            if not self._news.wait(TIMEOUT_S + 10):
                raise RuntimeError("an order did not end")


def measure(
    name: str,
    source: Backend,
    target: Backend,
    shape: Shape,
    rounds: int,
    trusts: Sequence[StoreTrust] = (ALONE, ALONE),
) -> Row:
    """Put by one and got by the other, `rounds` times after one that does not count; each with its own keys."""
    p, d = Client(source, shape, trusts[0]), Client(target, shape, trusts[1])
    try:
        values, into = _memory(shape, fill=True), _memory(shape, fill=False)
        puts, gets, lookups, got, wrong = [], [], [], 0, 0
        for number in range(rounds + 1):
            names = _names(shape)
            end, put_s = p.put(names, values)
            if end.count != shape.values:
                raise RuntimeError(f"{end.count} of {shape.values} values were put: {end.reason}: {end.detail}")
            found, lookup_s = d.lookup(names)
            landed, get_s = d.get(names, into)
            wrong += _wrong_bytes(values, into, landed.count)
            source.discard(names)
            if number:
                puts.append(put_s)
                gets.append(get_s)
                lookups.append(lookup_s)
                got += min(found.count, landed.count)
        put_s, get_s = settled(puts), settled(gets)
        return Row(
            backend=name,
            shape=str(shape),
            put_gb_s=shape.bytes / put_s / 1e9,
            get_gb_s=shape.bytes / get_s / 1e9,
            put_us_per_key=put_s / shape.values * 1e6,
            get_us_per_key=get_s / shape.values * 1e6,
            exists_us_per_key=settled(lookups) / shape.values * 1e6,
            hit_ratio=got / (rounds * shape.values),
            wrong_bytes=wrong,
        )
    finally:
        p.close()
        d.close()


def settled(seconds: Sequence[float]) -> float:
    """The median of the faster half."""
    return statistics.median(sorted(seconds)[: (len(seconds) + 1) // 2])


def _names(shape: Shape) -> tuple[str, ...]:
    front = prefix(
        Space(compat="b" * 32, block_tokens=BLOCK_TOKENS, value_bytes=shape.value_bytes, layer_stop=shape.pieces)
    )
    tokens = [random.getrandbits(40), *range(shape.values * BLOCK_TOKENS)]
    return keys(front, list(chain(Content(tokens, shape.values * BLOCK_TOKENS), BLOCK_TOKENS)))


def _memory(shape: Shape, *, fill: bool) -> tuple[Pieces, ...]:
    """Pieces in a shuffled order, as blocks lie in a cache that has been in use."""
    memory = memoryview(bytearray(shape.bytes))
    for at in range(0, shape.bytes, 1 << 20):
        part = memory[at : at + (1 << 20)]
        part[:] = os.urandom(len(part)) if fill else bytes(len(part))
    places = list(range(0, shape.bytes, shape.piece_bytes))
    random.Random(len(places)).shuffle(places)
    cut = [memory[at : at + shape.piece_bytes] for at in places]
    return tuple(tuple(cut[at : at + shape.pieces]) for at in range(0, len(cut), shape.pieces))


def _wrong_bytes(values: tuple[Pieces, ...], into: tuple[Pieces, ...], count: int) -> int:
    pairs = [pair for value, to in zip(values[:count], into, strict=False) for pair in zip(value, to, strict=True)]
    return sum(piece.nbytes for piece, copy in pairs if piece != copy)
