"""A simulated engine's loads from a store: bytes that land in its own blocks, in pieces, ordered with no step.

Law: the blocks are held until the last piece has landed, also when their request ended before.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

from kvbaton_proof.sim.promises import WRONG, Broken
from kvbaton_proof.sim.world.sim_device import Device
from kvbaton_proof.sim.world.sim_pool import Pool
from kvbaton_proof.sim.world.sim_request import SimRequest
from kvbaton_proof.sim.world.world import World

MISS, PIECE_S, SLOW, SLOW_PIECE_S = 0.1, 0.01, 0.4, 0.5


@dataclass(slots=True, eq=False)
class Fetch:
    """One get."""

    request: SimRequest
    turn: int
    content: int
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
