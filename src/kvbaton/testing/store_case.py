"""A case of the store contract, and helpers that all of them use."""

from __future__ import annotations

import contextlib
import random
import unittest
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TypeAlias

import msgspec

from kvbaton.protocol.content import Content
from kvbaton.store.interface import (
    Get,
    Lookup,
    OrderEnded,
    OrderId,
    Pieces,
    Put,
    Space,
    StoreSettings,
    chain,
    keys,
    prefix,
)
from kvbaton.store.threaded_store import KeptStore
from kvbaton.testing.store_harness import Ends, FaultyBackend, PinBook, StoreHarness
from kvbaton.testing.transport_harness import poll

VALUE_BYTES = 12_000
PIECES = 3
TIMEOUT_S = 20.0  # of orders, and of the calls that they are made of: they are not meant to run out
SOON_S = 0.6  # long enough for a healthy back end on a busy machine, short enough to wait for
FRONT = prefix(Space(compat="5" * 32, block_tokens=4, value_bytes=VALUE_BYTES, layer_stop=PIECES))

Check: TypeAlias = Callable[[StoreHarness], None]


class StoreCase(msgspec.Struct, frozen=True):
    """One law, as a sentence and a function."""

    name: str
    run: Check
    needs: frozenset[str]

    def __str__(self) -> str:
        return self.name

    def __call__(self, harness: StoreHarness) -> None:
        if not self.needs <= harness.offers:
            raise unittest.SkipTest(f"needs {', '.join(sorted(self.needs - harness.offers))}")
        try:
            self.run(harness)
        finally:
            harness.reset()


class StoreCases(list[StoreCase]):
    """The cases of one module, in order."""

    def add(self, *needs: str) -> Callable[[Check], Check]:
        def note(run: Check) -> Check:
            self.append(StoreCase(run.__name__, run, frozenset(needs)))
            return run

        return note


@dataclass(slots=True)
class Engine:
    """One engine's side: its store, what is between, its pins and its memory."""

    store: KeptStore
    faulty: FaultyBackend
    pins: PinBook
    ends: Ends
    last: int = 0
    memories: list[bytearray] = field(default_factory=list)

    def put(self, names: tuple[str, ...], values: tuple[Pieces, ...], timeout_s: float = TIMEOUT_S) -> OrderId:
        blocks = tuple(range(len(names)))
        return self._submit(lambda order: Put(order, names, values, blocks, timeout_s))

    def get(self, names: tuple[str, ...], into: tuple[Pieces, ...], timeout_s: float = TIMEOUT_S) -> OrderId:
        return self._submit(lambda order: Get(order, names, into, timeout_s))

    def lookup(self, names: tuple[str, ...], timeout_s: float = TIMEOUT_S) -> OrderId:
        return self._submit(lambda order: Lookup(order, names, timeout_s))

    def end(self, order: OrderId) -> OrderEnded:
        return self.ends.end(order)

    def kept(self, names: tuple[str, ...], values: tuple[Pieces, ...]) -> None:
        """Put, and have it there; again where a busy machine was too slow for the store's first time-outs."""
        assert poll(lambda: self.end(self.put(names, values)).reason is None, TIMEOUT_S), self.ends.of(self.last)
        assert self.ends.of(self.last) == [OrderEnded(OrderId(self.last), len(names))]

    def _submit(self, make: Callable[[OrderId], Put | Get | Lookup]) -> OrderId:
        self.last += 1
        order = OrderId(self.last)
        assert self.store.submit(make(order)), "refused although there is room"
        return order


@contextlib.contextmanager
def engine(harness: StoreHarness, **changes: float) -> Iterator[Engine]:
    """An engine whose pins are checked when the case is over, and of which no call is left that lands in the next."""
    settings = StoreSettings(value_bytes_max=VALUE_BYTES, values_per_call_max=4, call_timeout_s=TIMEOUT_S)
    settings = msgspec.structs.replace(settings, **changes)
    faulty, pins = FaultyBackend(harness.backend()), PinBook()
    store = KeptStore(faulty, pins, settings)
    try:
        yield Engine(store, faulty, pins, Ends(store))
    finally:
        faulty.go_on()
        store.close()
    begun = store._workers._calls  # one that no thread has taken yet would land later
    assert poll(lambda: begun.empty() and faulty.is_left, TIMEOUT_S * 2), "a call to the back end never came back"
    pins.check()


def names(count: int, seed: int = 0) -> tuple[str, ...]:
    """The keys of a prompt of `count` blocks; another seed is another prompt."""
    tokens = [seed, *range(count * 4)]
    return keys(FRONT, list(chain(Content(tokens, count * 4), 4)))


def values(count: int, seed: int = 0) -> tuple[Pieces, ...]:
    """Random bytes in pieces that do not lie side by side."""
    rng = random.Random(seed + 1)
    size = VALUE_BYTES // PIECES
    memory = memoryview(bytearray(rng.randbytes(2 * VALUE_BYTES * count)))
    places = [2 * size * index for index in range(PIECES * count)]
    rng.shuffle(places)
    return tuple(
        tuple(memory[at : at + size] for at in places[PIECES * index : PIECES * (index + 1)]) for index in range(count)
    )


def blank(count: int) -> tuple[Pieces, ...]:
    """Memory to get into; all zeros."""
    size = VALUE_BYTES // PIECES
    return tuple(tuple(memoryview(bytearray(size)) for _ in range(PIECES)) for _ in range(count))


def data(pieces: tuple[Pieces, ...]) -> list[bytes]:
    return [b"".join(each) for each in pieces]


NOTHING = bytes(VALUE_BYTES)
