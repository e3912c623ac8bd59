"""An engine's access to the shared store, over all of its ranks: a value that one rank lacks, the engine lacks.

Laws: two threads use it, and share only two queues. The *engine's* thread puts requests into one and takes results from
the other; only the *node's* thread talks to the ranks, within `drain` and `put`. Nothing waits, nothing raises because
of a backend. Each put ends once (`StoreEnded`), and each accepted request once (`StoreTold`), when every rank has ended
its part: from then on no byte of it moves. Counts are the minimum over the ranks.

An engine's interface to the shared store: one `RankStoreInterface` per rank, since each has only its own memory.

Blocks are named by id and values by the hash of their content (`store.content_keys.chain`): only the rank knows which
bytes of its memory belong to a block, and which key a hash gets in its space.

Laws: no call waits. Each order ends exactly once (`OrderEnded`), and after its end the store touches no block of it. A
lost rank ends its lookups as failed; its gets and puts end when it is back or its link is stopped (`rank_store_link`),
so a waiter needs its own deadline. Order ids are chosen by the caller and never reused.
"""

from __future__ import annotations

import contextlib
import logging
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NewType, Protocol, TypeAlias

import msgspec

from kvbaton.protocol.errors import Reason
from kvbaton.protocol.events import NO_BLOCK, Groups, StoreEnded
from kvbaton.protocol.ids import PutId
from kvbaton.protocol.machines.context import ANYBODY, mark_of
from kvbaton.ranks.store_trust import RankStoreTrust
from kvbaton.store.interface import OrderEnded, OrderId
from kvbaton.store.value_header import ORIGINS_MAX

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


log = logging.getLogger(__name__)

AskId = NewType("AskId", int)
"""One question of the engine; minted by the store."""

Act: TypeAlias = Callable[[RankStoreInterface, OrderId], bool]
FAULTS_LOGGED_MAX = 5
CLOSED = "the store was closed"


class EngineStoreSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Timeouts and bounds. A put's timeout should be below the node's `transfer_timeout`, which cancels it."""

    lookup_timeout_s: float = 2.0
    get_timeout_s: float = 10.0
    put_timeout_s: float = 20.0
    hashes_max: int = 4096  # of one request or put: the rest of a longer prompt is computed
    asks_max: int = 128  # accepted, result not taken
    puts_max: int = 96  # in flight; a put beyond it costs a miss later
    copies_percent: float = 0.0  # of the engine's blocks, on their way at once as copies of answers; 0: none are made


class StoreTold(msgspec.Struct, frozen=True):
    """The result of a request: how many of its hashes are in the store, or have landed in their blocks."""

    ask: AskId
    count: int
    reason: Reason | None = None
    detail: str = ""


class _Lookup(msgspec.Struct, frozen=True):
    ask: AskId
    hashes: tuple[bytes, ...]


class _Get(msgspec.Struct, frozen=True):
    ask: AskId
    hashes: tuple[bytes, ...]
    blocks: tuple[int, ...]


class _Forget(msgspec.Struct, frozen=True):
    ask: AskId


@dataclass(slots=True)
class _Open:
    """One order in flight, on all ranks."""

    of: PutId | AskId
    what: str  # put, lookup, get
    hashes: int
    count: int = 0
    left: set[int] = field(default_factory=set)  # ranks that have not ended it
    reason: Reason | None = None
    detail: str = ""
    writers: dict[bytes, None] = field(default_factory=dict)  # of a get: whose KV has landed

    @property
    def source(self) -> tuple[bool, int]:
        return self.what == "put", self.of

    def fail(self, reason: Reason, detail: str) -> None:
        if self.reason is None:
            self.reason, self.detail = reason, detail


@dataclass(slots=True)
class StoreProvenance:
    """Whether others would take this engine's values, and who is told from whom values came."""

    may_write: bool = True
    on_taken: Callable[[tuple[bytes, ...]], bool] = lambda writers: True
    """On the node's thread, before the engine can cache them; False: not to be used."""


class EngineStore:
    """Implements `ports.StorePort` for the node, and `lookup`, `get`, `take` for the engine."""

    def __init__(self, ranks: Sequence[RankStoreInterface], settings: EngineStoreSettings | None = None) -> None:
        if not ranks:
            raise ValueError("ranks: none given; give one for each rank of the engine")
        self.settings = settings or EngineStoreSettings()
        self.counters: Counter[str] = Counter()
        self.wake_engine: Callable[[], None] = lambda: None
        self._ranks = ranks
        self.provenance = StoreProvenance()
        self._waker: Callable[[], None] = lambda: None
        self._closed = False
        self._asked: deque[_Lookup | _Get | _Forget] = deque()  # engine to node
        self._told: deque[StoreTold] = deque()  # node to engine
        self._asks = 0  # ever; the engine's
        self._last = 0
        self._open: dict[OrderId, _Open] = {}
        self._orders: dict[tuple[bool, int], OrderId] = {}  # by purpose
        self._ended: list[StoreEnded] = []

    @property
    def pins(self) -> int:
        """Blocks that stores of this process are reading now. From any thread."""
        return sum(rank.counters.get("pins", 0) for rank in self._ranks)

    # --- engine's thread

    def lookup(self, hashes: Sequence[bytes]) -> AskId | None:
        """Look up how many of these, from the first on, are in the store. None: no room, or nothing to look up."""
        return self._ask(hashes, lambda ask: _Lookup(ask, tuple(hashes[: self.settings.hashes_max])))

    def get(self, hashes: Sequence[bytes], blocks: Sequence[int]) -> AskId | None:
        """Load the longest prefix of these into the blocks, which belong to the store until `StoreTold`."""
        if len(hashes) != len(blocks):
            raise ValueError(f"blocks: {len(blocks)} for {len(hashes)} hashes")
        most = self.settings.hashes_max
        return self._ask(hashes, lambda ask: _Get(ask, tuple(hashes[:most]), tuple(blocks[:most])))

    def forget(self, ask: AskId) -> None:
        """The result is no longer needed. It still arrives, perhaps sooner."""
        self._asked.append(_Forget(ask))
        self._waker()

    def take(self) -> list[StoreTold]:
        """Results since the last call."""
        told = []
        while self._told:
            told.append(self._told.popleft())
        self.counters["asks_taken"] += len(told)
        return told

    def _ask(self, hashes: Sequence[bytes], make: Callable[[AskId], _Lookup | _Get]) -> AskId | None:
        if not hashes or self._closed or self._asks - self.counters["asks_taken"] >= self.settings.asks_max:
            return None
        self._asks += 1
        ask = AskId(self._asks)
        self._asked.append(make(ask))
        self._waker()
        return ask

    # --- node's thread

    def set_trust(self, trust: RankStoreTrust) -> None:
        """Whose values count from now on, and what the ranks sign theirs with."""
        self.provenance.may_write = bool(trust.private)
        for rank in self._ranks:
            with self._guarded("trust"):
                rank.set_trust(trust)

    def put(self, put: PutId, blocks: Groups, keys: tuple[bytes, ...], origins: tuple[str, ...] = ()) -> None:
        row = blocks[0] if len(blocks) == 1 else ()
        opened = _Open(put, "put", len(keys))
        if not row or len(row) != len(keys) or NO_BLOCK in row:
            opened.fail(Reason.BAD_SPAN, f"{len(keys)} keys for blocks of {[len(each) for each in blocks]}")
        elif sum(is_put for is_put, _ in self._orders) >= self.settings.puts_max:
            opened.fail(Reason.BUSY, f"{self.settings.puts_max} puts are in flight")
        elif not self.provenance.may_write or len(origins) > ORIGINS_MAX or ANYBODY in origins:
            opened.fail(Reason.FORBIDDEN, "nobody would take these values: see docs/security.md")
        most, timeout_s = self.settings.hashes_max, self.settings.put_timeout_s
        names = tuple(map(mark_of, origins)) if opened.reason is None else ()
        self._begin(opened, lambda rank, order: rank.put(order, keys[:most], row[:most], timeout_s, names))

    def cancel(self, put: PutId) -> None:
        """The timeout of a put has passed."""
        order = self._orders.get((True, put))
        if order is not None:
            self._open[order].fail(Reason.TRANSFER_TIMEOUT, "the put was not done in time")
            self._cancel((True, put))

    def drain(self) -> Sequence[StoreEnded]:
        """Hand over the engine's requests, and collect what has ended."""
        self._collect()
        while self._asked:
            self._carry_out(self._asked.popleft())
        ended, self._ended = self._ended, []
        return ended

    def set_waker(self, waker: Callable[[], None]) -> None:
        self._waker = waker
        for rank in self._ranks:
            rank.set_waker(waker)

    def close(self) -> None:
        """End everything; bounded in time. One more `drain` and `take` return the ends. Idempotent."""
        self._closed = True
        for rank in self._ranks:
            with self._guarded("close"):
                rank.close()
        self._collect()
        for order, opened in list(self._open.items()):
            opened.fail(Reason.CANCELLED, CLOSED)
            opened.count = 0
            self._end(order, opened)

    # --- helpers, on the node's thread

    def _carry_out(self, asked: _Lookup | _Get | _Forget) -> None:
        settings = self.settings
        match asked:
            case _Lookup(ask, hashes):
                opened = _Open(ask, "lookup", len(hashes))
                self._begin(opened, lambda rank, order: rank.lookup(order, hashes, settings.lookup_timeout_s))
            case _Get(ask, hashes, blocks):
                opened = _Open(ask, "get", len(hashes))
                self._begin(opened, lambda rank, order: rank.get(order, hashes, blocks, settings.get_timeout_s))
            case _Forget(ask):
                self._cancel((False, ask))

    def _begin(self, opened: _Open, act: Act) -> None:
        """Start on all ranks or on none: if one refuses, the others are cancelled."""
        self._last += 1
        order = OrderId(self._last)
        self._open[order] = opened
        self._orders[opened.source] = order
        opened.count = opened.hashes
        self.counters[f"{opened.what}s"] += 1
        if self._closed:
            opened.fail(Reason.CANCELLED, CLOSED)
        for index, rank in enumerate(self._ranks):
            accepted = False
            if opened.reason is None:
                with self._guarded(opened.what):
                    accepted = act(rank, order)
            if accepted:
                opened.left.add(index)
            else:
                opened.fail(Reason.BUSY, f"rank {index} has no room in its store")
        if opened.reason is not None:
            opened.count = 0
            self._cancel(opened.source)
        if not opened.left:
            self._end(order, opened)
            self._waker()  # a put's end waits for the next drain

    def _cancel(self, source: tuple[bool, int]) -> None:
        order = self._orders.get(source)
        if order is not None:
            for index in sorted(self._open[order].left):
                with self._guarded("cancel"):
                    self._ranks[index].cancel(order)

    def _collect(self) -> None:
        for index, rank in enumerate(self._ranks):
            ends: Sequence[OrderEnded] = ()
            with self._guarded("drain"):
                ends = rank.drain()
            for end in ends:
                self._rank_ended(index, end)

    def _rank_ended(self, index: int, end: OrderEnded) -> None:
        opened = self._open.get(end.order)
        if opened is None or index not in opened.left:
            self.counters["late"] += 1
            return
        opened.left.discard(index)
        opened.count = min(opened.count, end.count)
        opened.writers.update(dict.fromkeys(end.writers))
        if end.reason is not None:
            opened.fail(end.reason, end.detail)
        if not opened.left:
            self._end(end.order, opened)

    def _end(self, order: OrderId, opened: _Open) -> None:
        del self._open[order], self._orders[opened.source]
        failed = opened.reason is not None
        self.counters["errors"] += failed and opened.reason is not Reason.CANCELLED
        if opened.what == "put":
            self.counters["puts.stored"] += not failed
            self._ended.append(StoreEnded(PutId(opened.of), Reason.STORE_FAILED if failed else None))
            return
        if opened.writers and not self.provenance.on_taken(tuple(opened.writers)):
            opened.count = 0
            opened.fail(Reason.ORIGIN_GONE, "the writer was removed meanwhile")
        self._told.append(StoreTold(AskId(opened.of), opened.count, opened.reason, opened.detail))
        self.wake_engine()

    @contextlib.contextmanager
    def _guarded(self, what: str) -> Iterator[None]:
        """An exception of a rank fails the operation only; it is counted."""
        try:
            yield
        except Exception as error:  # an adapter may raise anything
            self.counters["faults"] += 1
            if self.counters["faults"] <= FAULTS_LOGGED_MAX:
                log.error("[rank-store-fault] a rank's store failed (%s)", what, exc_info=error)
