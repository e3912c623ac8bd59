"""Values into a store and out of it again, timed as an engine sees it: from the order to its end.

Laws: one client puts, another gets; every byte that was got is compared with what was put. Keys are new in each round,
so nothing is there before it is put, and are dropped after it.

Stores to measure, each in processes of its own: a `kvbaton store`, or a `mooncake_master` and an owner of memory.

    python -m kvbaton_proof.bench.store.store_moves MASTER BYTES      lends memory to a Mooncake master until its
    input ends

Laws: what was started is gone after the context, by its own handle, and children end with their input. Every wait has
a deadline. A store that is not installed is told by name, with the next step.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import random
import socket
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import msgspec

from kvbaton.control import keyring
from kvbaton.control.key_room import key_room
from kvbaton.processes.child_process import KVBATON_ARGV, free_ports
from kvbaton.protocol.content import Content
from kvbaton.ranks.store_trust import opener, store_place, trust_of
from kvbaton.store.interface import (
    Backend,
    Get,
    Lookup,
    Order,
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
from kvbaton.store.mooncake_backend import MooncakeBackend, MooncakeSettings
from kvbaton.store.threaded_store import KeptStore
from kvbaton.store.value_header import ALONE, StoreTrust
from kvbaton_proof.bench.kit.piped_children import PipedProgram
from kvbaton_proof.bench.kit.run_facts import KVBATON

CLIENTS = ("p0", "d0")
START_S = 30.0


class SiteError(Exception):
    """A store could not be started; the message names the next step."""


class Site(msgspec.Struct, frozen=True):
    """A store that serves: what engines are told, and what makes a way in for each of two clients."""

    name: str
    place: str
    keys: str  # of the cluster that both clients are of
    clients: Callable[[str], Backend]

    @property
    def trusts(self) -> list[StoreTrust]:
        """What each client signs by, and whom it believes."""
        return [trust_of(keyring.load(Path(self.keys), who)).trust for who in CLIENTS]


@contextlib.contextmanager
def site(name: str, bytes_max: int) -> Iterator[Site]:
    """A store with room for `bytes_max` of values."""
    with key_room() as directory:
        keyring.mint(directory / "keys", ["store", *CLIENTS])
        with _served(directory / "keys", bytes_max) if name == KVBATON else _mooncake(bytes_max) as place:
            yield Site(name, place, str(directory / "keys"), lambda who: _client(directory / "keys", place, who))


def _client(directory: Path, place: str, who: str) -> Backend:
    make, _ = opener(store_place(place), keyring.load(directory, who), timeout_s=20.0)
    return make()


@contextlib.contextmanager
def _served(directory: Path, bytes_max: int) -> Iterator[str]:
    words = ["store", "--keys", str(directory), "--port", "0", "--json", "--stop-on-eof", "--bytes", str(bytes_max)]
    with _started("kvbaton store", [*KVBATON_ARGV, *words]) as child:
        yield str(json.loads(child.line(START_S))["endpoint"])


@contextlib.contextmanager
def _mooncake(bytes_max: int) -> Iterator[str]:
    binary = Path(sys.executable).with_name("mooncake_master")
    if not binary.exists():
        raise SiteError(f"{binary} is missing; install mooncake-transfer-engine, or its -non-cuda build, beside it")
    port, metrics = free_ports(2)
    words = [f"--rpc_port={port}", "--rpc_address=127.0.0.1", f"--metrics_port={metrics}"]
    with _started("mooncake_master", [str(binary), *words, "--enable_metric_reporting=false"]) as master:
        _answers(master, port)
        lending = [sys.executable, "-m", __name__, f"127.0.0.1:{port}", str(bytes_max)]
        with _started("the owner of memory", lending) as owner:
            owner.line(START_S)
            yield f"mooncake://127.0.0.1:{port}?lend=0"


def _started(what: str, words: Sequence[str]) -> PipedProgram:
    return PipedProgram(what, words, {"GLOG_minloglevel": "3", "MC_LOG_LEVEL": "error"})


def _answers(child: PipedProgram, port: int) -> None:
    until = time.monotonic() + START_S
    while time.monotonic() < until and child.is_alive:
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                return
        time.sleep(0.02)
    raise child.failed(f"did not serve within {START_S:.0f} s")


def _lend(master: str, segment_bytes: int) -> None:
    backend = MooncakeBackend(MooncakeSettings(master=master, segment_bytes=segment_bytes))
    backend.exists(["any"])  # sets the library up, which lends the memory
    print("lent", flush=True)
    sys.stdin.read()


def is_installed(name: str) -> bool:
    """Whether a store of that kind can be started with this Python."""
    return name == KVBATON or Path(sys.executable).with_name("mooncake_master").exists()


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


if __name__ == "__main__":
    _lend(sys.argv[1], int(sys.argv[2]))
