"""A shared store behind rank links: what P puts there, an engine of the same shape gets, rank by rank, as real bytes.

The shelf, the links to the ranks' shelves, `LocalRankStore` with its values and the store's keeper are production code;
threads of the store are turns of the world, and the back end is in memory, slow, failing or stuck now and then.

Laws: what a get brings is the prompt's, in every cell (checked when it is read). Its blocks are held until every rank
has said that its part is at rest, also after their request has ended. Each order ends once. A rank opens its store
once; at rest no order is open and the store pins nothing.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, cast

import msgspec

from kvbaton.protocol.events import Groups
from kvbaton.protocol.geometry.layout import EngineLayout
from kvbaton.ranks.engine_store import AskId, EngineStore, EngineStoreSettings, RankStoreInterface, StoreTold
from kvbaton.ranks.rank_store import LocalRankStore, rank_store_settings, rank_values
from kvbaton.ranks.rank_store_link import MakeRankStore, RemoteRankStore
from kvbaton.ranks.rank_stream import Clock
from kvbaton.ranks.store_trust import RankStoreTrust
from kvbaton.store.interface import Backend, Get, Lookup, Order, OrderEnded, OrderId, Pins, Put, StoreSettings, keys
from kvbaton.store.memory_backend import MemoryBackend
from kvbaton.store.order_scheduler import Keeper
from kvbaton.store.order_scripts import BackendCall, CallAnswer, Task
from kvbaton.store.threaded_store import check, perform
from kvbaton.store.value_header import ALONE, StoreTrust
from kvbaton_proof.sim.promises import DEATH, HANG, LEAK, NEEDLESS, WRONG, Broken
from kvbaton_proof.sim.ranks.rank_channel import SimCarrier, SimProcess
from kvbaton_proof.sim.world.sim_device import Device
from kvbaton_proof.sim.world.sim_memory import Words, word_at
from kvbaton_proof.sim.world.sim_pool import Pool
from kvbaton_proof.sim.world.sim_request import SimRequest
from kvbaton_proof.sim.world.sim_store import Fetch, Fetching
from kvbaton_proof.sim.world.touches import ALWAYS
from kvbaton_proof.sim.world.world import InjectedFault, World

COMPAT = "5" * 32
SETTINGS = EngineStoreSettings(lookup_timeout_s=1.0, get_timeout_s=3.0, put_timeout_s=4.0, asks_max=8, puts_max=4)
CALL_S, SLOW, SLOW_S, STUCK_S = 0.02, 0.1, 0.6, 8.0
BACKOFF_S = 1.0
"""For so long a store that failed is not asked again."""
STORE_CAUSES = {
    "rank_store_threw", "rank_store_stuck", "rank_store_failed", "rank_store_unusable", "rank_stalls", "rank_lost",
    "rank_link_cut", "rank_frame_garbled", "rank_bounded", "paused_process", "paused_loop", "paused_engine",
    "values_doubted",
}  # fmt: skip


class SimKept:
    """`store.kept.KeptStore` with the world's clock for threads: keeps `store.base.Store`."""

    def __init__(
        self,
        carrier: SimCarrier,
        process: SimProcess,
        clock: Clock,
        fails: Callable[[], float],
        backend: Backend,
        pins: Pins,
        settings: StoreSettings,
    ) -> None:
        self._carrier = carrier
        self._process = process
        self._clock = clock
        self._fails = fails
        self._backend = backend
        self._pins = pins
        self._settings = settings
        self._keeper = Keeper(settings)
        self.kinds: dict[OrderId, type[Order]] = {}
        self._news: list[OrderEnded] = []
        self._open = 0
        self.is_closed = False
        self._waker: Callable[[], None] = lambda: None
        self._trust = ALONE  # where nobody is removed, its engines believe each other: its processes are one

    @property
    def counters(self) -> Mapping[str, int]:
        return self._keeper.counters

    @property
    def stuck(self) -> int:
        return self._keeper.stuck

    def set_trust(self, trust: StoreTrust) -> None:
        self._trust = trust

    def submit(self, order: Order) -> bool:
        check(order, self._settings)
        if order.order in self.kinds:
            raise Broken(WRONG, f"{self._carrier.name}: order {order.order} of the store is carried out twice")
        self.kinds[order.order] = type(order)
        self._maybe_throw()
        if self.is_closed or self._open >= self._settings.orders_max:
            return False
        task = Task(order, self._clock() + order.timeout_s, self._settings.values_per_call_max)
        task.begin(self._pins)
        self._open += 1
        self._keeper.take(task, self._clock())
        self._go_on()
        self._carrier.world.after(order.timeout_s / self._carrier.pace + 1e-3, self._look)
        return True

    def cancel(self, order: OrderId) -> None:
        self._keeper.cancel(order, self._clock())
        self._go_on()
        self._maybe_throw()

    def drain(self) -> list[OrderEnded]:
        news, self._news = self._news, []
        self._open -= len(news)
        return news

    def set_waker(self, waker: Callable[[], None]) -> None:
        self._waker = waker

    def close(self) -> None:
        self.is_closed = True
        self._keeper.close(self._clock())
        self._go_on()

    def abandon(self) -> None:
        """The world ends: what is under way is left where it is, and whoever is in the middle of something leaves."""
        for task in [task for lane in self._keeper._lanes.values() for task in lane.tasks]:
            with contextlib.suppress(Exception):  # of a mutant: the world has said what it had to say
                task.script.close()

    @property
    def is_busy(self) -> bool:
        return any(lane.tasks for lane in self._keeper._lanes.values())

    def touches(self, order: OrderId) -> bool:
        """Whether blocks of this order may still be read or written."""
        lanes = self._keeper._lanes
        return self._process.alive and any(
            task.order.order == order for name in ("get", "put") for task in lanes[name].tasks
        )

    def _maybe_throw(self) -> None:
        if self._carrier.chance(self._fails() / 10):
            self._carrier.world.strike("rank_store_threw", self._carrier.name)
            raise InjectedFault("the simulated store threw")

    def _go_on(self) -> None:
        world, rng = self._carrier.world, self._carrier.rng
        for call in self._keeper.calls():
            takes_s = rng.uniform(0, CALL_S)
            kind = rng.random()
            if kind < SLOW:
                takes_s = rng.uniform(0, SLOW_S)
            if rng.random() < self._fails() / 4:
                takes_s = rng.uniform(0, STUCK_S)
                world.strike("rank_store_stuck", self._carrier.name, lasts_s=takes_s)
            world.after(takes_s, partial(self._returned, call))
            world.after(self._settings.call_timeout_s / self._carrier.pace + 1e-3, self._look)
        ends = self._keeper.ends()
        if ends:
            self._news += ends
            self._waker()

    def _returned(self, call: BackendCall) -> None:
        if not self._process.alive:
            return
        if self._process.paused:
            self._carrier.world.after(0.25, partial(self._returned, call))
            return
        outcome: CallAnswer | Exception
        try:
            if self._carrier.chance(self._fails() / 4):
                self._carrier.world.strike("rank_store_failed", self._carrier.name, lasts_s=BACKOFF_S)
                raise InjectedFault("the simulated store failed")
            outcome = perform(self._backend, call, self._trust)
        except InjectedFault as error:
            outcome = error
        self._keeper.returned(call, outcome, self._clock())
        self._go_on()

    def _look(self) -> None:
        """Time has passed."""
        if self._process.runs:
            self._keeper.on_time(self._clock())
            self._go_on()
        elif self._process.alive:
            self._carrier.world.after(0.25, self._look)


class RankStore:
    """What all ranks of one engine in one life need to reach the store."""

    def __init__(self, backend: MemoryBackend, layout: EngineLayout, memory: Sequence[bytearray], fails: float) -> None:
        self.fails = fails
        self.backend = backend
        self._layout = layout
        self._memory = memory
        self.shelves: list[LocalRankStore] = []
        self._of_rank: dict[int, LocalRankStore] = {}
        self.kept: dict[int, SimKept] = {}  # by rank
        self.told: set[int] = set()  # ranks that know whose shelf theirs is

    def maker(self, carrier: SimCarrier, rank: int, process: SimProcess, clock: Clock) -> MakeRankStore:
        def make(compat: str) -> RankStoreInterface:
            self.told.add(rank)
            if carrier.chance(self.fails / 4):
                carrier.world.strike("rank_store_unusable", carrier.name, lasts_s=ALWAYS)
                raise InjectedFault("the simulated store cannot be reached")
            values = rank_values(self._layout, rank, compat)
            settings = msgspec.structs.replace(
                rank_store_settings(values.space.value_bytes),
                values_per_call_max=2,
                orders_max=3,
                stuck_max=2,
                call_timeout_s=1.0,
                retry_s_min=0.05,
                retry_s_max=0.5,
            )
            keep = partial(SimKept, carrier, process, clock, lambda: self.fails)
            shelf = LocalRankStore(self.backend, values, [memoryview(self._memory[rank])], settings, keep=keep)
            assert isinstance(shelf._store, SimKept)
            self.shelves.append(shelf)
            self._of_rank[rank] = shelf
            self.kept[rank] = shelf._store
            return shelf

        return make

    def holds(self, hashes: Sequence[bytes]) -> int:
        """How many of these, from the first on, are there for every rank."""
        if len(self._of_rank) < len(self._memory):
            return 0
        values = self.backend._values  # not asked: who asks for a value makes it the last to be evicted
        wanted = (keys(shelf._front, hashes) for shelf in self._of_rank.values())
        return min(sum(1 for _ in itertools.takewhile(values.__contains__, each)) for each in wanted)

    def abandon(self) -> None:
        for kept in self.kept.values():
            kept.abandon()

    def check_at_rest(self, name: str, ranks: Sequence[RemoteRankStore], shelf: EngineStore) -> None:
        if shelf._open or any(rank.open_orders for rank in ranks):
            raise Broken(HANG, f"{name}: orders of the store are open at rest: {list(shelf._open)[:3]}")
        if len(self.told) < len(ranks):
            raise Broken(NEEDLESS, f"{name}: of {len(ranks)} ranks {sorted(self.told)} know whose store theirs is")
        if len(self.shelves) > len(self._of_rank):
            raise Broken(LEAK, f"{name}: a rank has opened its store twice")
        if shelf.counters["faults"]:
            raise Broken(DEATH, f"{name}: a rank's shelf threw {shelf.counters['faults']} times at its engine")
        if shelf.counters["late"]:
            raise Broken(WRONG, f"{name}: {shelf.counters['late']} orders of the store ended twice")
        if shelf.pins or any(local.counters["pins"] for local in self.shelves):
            raise Broken(LEAK, f"{name}: the store still pins blocks at rest")


class WatchedRankStore:
    """A rank's shelf as the engine drives it: what has ended is at rest in the rank, and ends once."""

    def __init__(self, inner: RemoteRankStore, rank: int, store: RankStore) -> None:
        self._inner = inner
        self._rank = rank
        self._store = store
        self._ended: set[OrderId] = set()
        self._kinds: dict[OrderId, type[Order]] = {}
        self._getting: dict[OrderId, frozenset[int]] = {}  # into which blocks, until the rank says that it has ended

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def lookup(self, order: OrderId, hashes: Sequence[bytes], timeout_s: float) -> bool:
        self._kinds[order] = Lookup
        return self._inner.lookup(order, hashes, timeout_s)

    def get(self, order: OrderId, hashes: Sequence[bytes], blocks: Sequence[int], timeout_s: float) -> bool:
        self._kinds[order] = Get
        accepted = self._inner.get(order, hashes, blocks, timeout_s)
        if accepted:
            self._getting[order] = frozenset(blocks)
        return accepted

    def check_quiet(self, blocks: Sequence[int]) -> None:
        """The engine was told that nothing lands in these any more."""
        if not all(each.isdisjoint(blocks) for each in self._getting.values()):
            raise Broken(WRONG, f"rank {self._rank}: a get is over for its engine, and this rank has not ended it")

    def set_trust(self, trust: RankStoreTrust) -> None:
        self._inner.set_trust(trust)

    def put(
        self,
        order: OrderId,
        hashes: Sequence[bytes],
        blocks: Sequence[int],
        timeout_s: float,
        origins: tuple[bytes, ...] = (),
    ) -> bool:
        self._kinds[order] = Put
        return self._inner.put(order, hashes, blocks, timeout_s, origins)

    def drain(self) -> Sequence[OrderEnded]:
        ends = self._inner.drain()
        kept = self._store.kept.get(self._rank)
        for end in ends:
            if end.order in self._ended:
                raise Broken(WRONG, f"rank {self._rank}: order {end.order} of the store ended twice")
            self._ended.add(end.order)
            self._getting.pop(end.order, None)
            if kept is not None and kept.kinds.get(end.order, self._kinds[end.order]) is not self._kinds[end.order]:
                raise Broken(WRONG, f"rank {self._rank}: order {end.order} was carried out as something else")
            if kept is not None and kept.touches(end.order):
                raise Broken(WRONG, f"rank {self._rank}: order {end.order} has ended, and its rank still moves it")
        return ends


def make_shelf(ranks: Sequence[RemoteRankStore], store: RankStore) -> EngineStore:
    for rank in ranks:
        rank.open(COMPAT)
    return EngineStore(
        [cast(RankStoreInterface, WatchedRankStore(each, number, store)) for number, each in enumerate(ranks)], SETTINGS
    )


def hashes_of(content: Words, count: int, block_tokens: int) -> list[bytes]:
    """What stands for the first `count` blocks of a prompt."""
    ends = [word_at(content, (at + 1) * block_tokens - 1) for at in range(count)]
    named = [b"%d %d %d" % (word, at, block_tokens) for at, word in enumerate(ends)]
    return [hashlib.blake2b(each, digest_size=32).digest() for each in named]


def values_of(block_tokens: int, request: SimRequest, blocks: Groups) -> tuple[Groups, tuple[bytes, ...]]:
    """The whole blocks of a prompt, and what stands for each."""
    count = request.tokens // block_tokens
    return tuple(ids[:count] for ids in blocks), tuple(hashes_of(request.content, count, block_tokens))


class ShelfFetching(Fetching):
    """Gets by way of the shelf: it is asked how much is there, and that is brought."""

    def __init__(
        self,
        world: World,
        pool: Pool,
        device: Device,
        on_end: Callable[[SimRequest, int, int], None],
        shelf: EngineStore,
        store: RankStore,
    ) -> None:
        super().__init__(world, pool, device, on_end)
        self._shelf = shelf
        self._store = store
        self._holds: dict[AskId, tuple[int, int, float]] = {}  # what was there, after how many evictions, and when
        self._asked: dict[AskId, Fetch] = {}
        self._wild: set[AskId] = set()

    def begin(self, request: SimRequest) -> bool:
        tokens = self.device.shape.block_tokens
        most = (request.tokens - 1) // tokens
        if request.computed or not most:
            return False
        hashes = hashes_of(request.content, most, tokens)
        ask = self._noted(self._shelf.lookup(hashes), self._store.holds(hashes))
        if ask is None:
            return False
        self.world.faults["rank_lookups"] += 1
        if self.world.faults["rank_lookups"] % 50 == 1:
            self._ask_wildly()
        blocks = tuple(ids[:most] for ids in request.blocks)
        self._asked[ask] = Fetch(request, request.turn, request.content, blocks, (), 0)
        return True

    def poll(self) -> None:
        for told in self._shelf.take():
            if told.ask in self._wild:
                self._wild.discard(told.ask)
                if told.reason is None or told.count:
                    raise Broken(WRONG, f"{self.device.name}: a store brought what belongs to no block")
                continue
            self._check_hit(told)
            fetch = self._asked.pop(told.ask)
            if fetch in self.open:
                self._landed(fetch, told)
            else:
                self._found(fetch, told)

    def _noted(self, ask: AskId | None, holds: int) -> AskId | None:
        if ask is not None:
            self._holds[ask] = holds, self._store.backend.counters["evicted"], self.world.now
        elif len(self._asked) + len(self._wild) < SETTINGS.asks_max:
            raise Broken(NEEDLESS, f"{self.device.name}: a store is not asked, and {len(self._asked)} wait for it")
        return ask

    def _check_hit(self, told: StoreTold) -> None:
        """What was there for every rank is found, and brought, unless a fault or a bound is in the way."""
        holds, evictions, since = self._holds.pop(told.ask)
        if told.count >= holds or told.reason or evictions != self._store.backend.counters["evicted"]:
            return  # one that was slow or full says so
        touched = self.world.touches.between(self.device.name, since, self.world.now)
        if touched.isdisjoint(STORE_CAUSES):
            what = f"{told.count} of {holds} that it has; touched by {sorted(touched)}"
            raise Broken(NEEDLESS, f"{self.device.name}: a store finds or brings {what}")

    def _ask_wildly(self) -> None:
        """Ask for what cannot be brought: a block that does not exist."""
        ask = self._shelf.get(hashes_of(0, 1, 1), [self.device.shape.blocks])
        if ask is not None:
            self._wild.add(ask)

    def _found(self, fetch: Fetch, told: StoreTold) -> None:
        request, count = fetch.request, told.count
        row = fetch.blocks[0][:count]
        hashes = hashes_of(fetch.content, count, self.device.shape.block_tokens)
        is_wanted = count and request.turn == fetch.turn and request.blocks and not request.aborted
        ask = self._noted(self._shelf.get(hashes, row), self._store.holds(hashes)) if is_wanted else None
        if ask is None:
            self._on_end(request, 0, fetch.turn)
            return
        self.world.faults["gets"] += 1
        self.world.faults["rank_gets"] += 1
        fetch.blocks, fetch.held = (list(row),), tuple(row)
        self.device.check_quiet(fetch.held)
        self.pool.hold(fetch.held)
        self.open.append(fetch)
        self._asked[ask] = fetch
        if self.world.rng.random() < 0.1:
            self._shelf.forget(ask)

    def _landed(self, fetch: Fetch, told: StoreTold) -> None:
        for rank in self._shelf._ranks:
            cast(WatchedRankStore, rank).check_quiet(fetch.held)
        landed = fetch.blocks[0][: told.count]
        for blank in self.device.blank:
            blank.difference_update(landed)
        self.pool.let_go(fetch.held)
        self.open.remove(fetch)
        self._on_end(fetch.request, told.count, fetch.turn)
