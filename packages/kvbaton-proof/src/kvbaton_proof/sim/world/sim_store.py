"""A simulated store, which takes time, refuses, raises, and reads on for a while after it was told to stop; and an
engine's loads from it.

Laws: what it reads, piece by piece, is this prompt's, in blocks that somebody holds, until it says that it has ended.
What it brings lands in an engine's own blocks, in pieces, ordered with no step; the blocks are held until the last
piece has landed, also when their request ended before.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from kvbaton.protocol.errors import Reason
from kvbaton.protocol.events import NO_BLOCK, Groups, StoreEnded
from kvbaton.protocol.ids import PutId
from kvbaton_proof.sim.promises import WRONG, Broken
from kvbaton_proof.sim.world.sim_device import Device
from kvbaton_proof.sim.world.sim_memory import Words
from kvbaton_proof.sim.world.sim_pool import Pool
from kvbaton_proof.sim.world.sim_request import SimRequest
from kvbaton_proof.sim.world.world import InjectedFault, World

MISS, PIECE_S, SLOW, SLOW_PIECE_S = 0.1, 0.01, 0.4, 0.5
PIECES_MAX = 3
READ_ON_S = 2.0

OnRead = Callable[[Groups, tuple[bytes, ...]], None]


@dataclass(slots=True)
class Reading:
    """Looks at what a store reads."""

    pool: Pool
    device: Device
    prompts: Mapping[Groups, SimRequest]  # by what is put

    def __call__(self, blocks: Groups, keys: tuple[bytes, ...]) -> None:
        request, shape = self.prompts[blocks], self.device.shape
        for block in (block for ids in blocks for block in ids):
            if block != NO_BLOCK and not self.pool.refs[block]:
                raise Broken(WRONG, f"{self.device.name}: a store reads block {block}, which nobody holds")
        who = f"{request.id} as put"
        self.device.check(request.content, blocks, request.tokens, range(shape.ranks), range(shape.layers), who)


@dataclass(slots=True)
class SimStore:
    """One life's way to the store."""

    world: World
    fails: float
    reads_on: bool = False
    throws: float = 0.0  # share of stops and looks for news that raise
    ended: list[StoreEnded] = field(default_factory=list)
    waker: Callable[[], None] = lambda: None
    on_read: OnRead = lambda blocks, keys: None
    alive: bool = True
    open: dict[PutId, tuple[Groups, tuple[bytes, ...]]] = field(default_factory=dict)

    def put(self, put: PutId, blocks: Groups, keys: tuple[bytes, ...], origins: tuple[str, ...] = ()) -> None:
        rng = self.world.rng
        kind = rng.random()
        if kind < self.fails / 3:
            self.world.faults["store_threw"] += 1
            raise InjectedFault("the simulated store threw")
        self.open[put] = blocks, keys
        if kind < self.fails * 2 / 3:
            self.world.faults["store_stalled"] += 1
            return
        reason = Reason.STORE_FAILED if kind < self.fails else None
        self._read_and_end(put, reason, rng.uniform(0.001, 0.2), rng.randint(1, PIECES_MAX))

    def cancel(self, put: PutId) -> None:
        self._maybe_throw()
        if self.reads_on and put in self.open:
            self.world.faults["store_read_on"] += 1
            self._read_and_end(put, Reason.CANCELLED, self.world.rng.uniform(0.01, READ_ON_S), PIECES_MAX)
        else:
            self._end(put, Reason.CANCELLED)

    def drain(self) -> Sequence[StoreEnded]:
        if self.ended:
            self._maybe_throw()
        ended, self.ended = self.ended, []
        return ended

    def set_waker(self, waker: Callable[[], None]) -> None:
        self.waker = waker

    def _maybe_throw(self) -> None:
        if self.throws and self.world.chance(self.throws):
            self.world.faults["store_threw_late"] += 1
            raise InjectedFault("the simulated store threw when it should have stopped")

    def _read_and_end(self, put: PutId, reason: Reason | None, lasts_s: float, pieces: int) -> None:
        for piece in range(pieces):
            self.world.after(lasts_s * (piece + 1) / pieces, lambda: self._read(put))
        self.world.after(lasts_s, lambda: self._end(put, reason))

    def _read(self, put: PutId) -> None:
        if put in self.open and self.alive:
            self.on_read(*self.open[put])

    def _end(self, put: PutId, reason: Reason | None) -> None:
        if self.open.pop(put, None) is not None:
            self.ended.append(StoreEnded(put, reason))
            self.waker()


@dataclass(slots=True, eq=False)
class Fetch:
    """One get."""

    request: SimRequest
    turn: int
    content: Words
    blocks: tuple[list[int], ...]
    held: tuple[int, ...]
    pieces_left: int


class Fetching:
    """The gets of one engine in one life."""

    def __init__(
        self, world: World, pool: Pool, device: Device, on_end: Callable[[SimRequest, int, int], None]
    ) -> None:
        self.world = world
        self.pool = pool
        self.device = device
        self.open: list[Fetch] = []
        self._on_end = on_end

    @property
    def held_blocks(self) -> int:
        return sum(len(fetch.held) for fetch in self.open)

    def begin(self, request: SimRequest) -> bool:
        """Bring leading whole blocks of a prompt, unless there are none; at least one token is left to compute."""
        most = (request.tokens - 1) // self.device.shape.block_tokens
        if request.computed or not most:
            return False
        count = self.world.rng.randint(1, most)
        self.world.faults["gets"] += 1
        blocks = tuple(ids[:count] for ids in request.blocks)
        held = tuple(block for ids in blocks for block in ids)
        ranks = len(self.device.memory)
        fetch = Fetch(request, request.turn, request.content, blocks, held, ranks * count)
        self.device.check_quiet(held)
        self.pool.hold(held)
        self.open.append(fetch)
        most_s = SLOW_PIECE_S if self.world.chance(SLOW) else PIECE_S
        for rank in range(ranks):
            for index in range(count):
                self.world.after(self.world.rng.uniform(0, most_s), functools.partial(self._land, fetch, rank, index))
        return True

    def poll(self) -> None:
        """Take what has come; here it comes by itself."""

    def _land(self, fetch: Fetch, rank: int, index: int) -> None:
        if self.device.stopped:
            return
        tokens = self.device.shape.block_tokens
        for ids in fetch.blocks:
            if not self.pool.held[ids[index]]:
                raise Broken(
                    WRONG, f"{self.device.name}: a store's bytes land in block {ids[index]}, which nothing holds"
                )
        for layer in self.device.shape.own_layers[rank]:
            self.device.write(fetch.content, fetch.blocks, index * tokens, (index + 1) * tokens, rank, layer)
        fetch.pieces_left -= 1
        if not fetch.pieces_left:
            self._rest(fetch)

    def _rest(self, fetch: Fetch) -> None:
        self.pool.let_go(fetch.held)
        self.open.remove(fetch)
        self._on_end(fetch.request, 0 if self.world.chance(MISS) else len(fetch.blocks[0]), fetch.turn)
