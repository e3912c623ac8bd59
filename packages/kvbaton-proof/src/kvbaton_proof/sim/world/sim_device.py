"""The steps of one engine on its devices, and their timing: issued now, done later, each rank in its own time.

Laws: a rank does what was issued in the order of issue, and of a step layer after layer; ranks are apart. A step writes
to the blocks that were chosen when it was issued, whoever has them by then: nobody calls a kernel back. It reads the
earlier tokens of a layer when it computes that layer. It is done when every rank is. A stopped process does not stop
its devices; a dead one does.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvbaton.engines.side.protocols import Leaving
from kvbaton_proof.sim.promises import WRONG, Broken
from kvbaton_proof.sim.world.sim_memory import Shape, Words, page_stamp, same_tokens, state_stamp
from kvbaton_proof.sim.world.sim_request import SimRequest
from kvbaton_proof.sim.world.world import World

LAYER_S = (0.0005, 0.002, 0.01)
"""How long a layer may take, by step: small and large batches."""
SLOW, SLOW_LAYER_S = 0.03, 0.15
"""Some steps take much longer: graphs are captured, kernels compiled."""

Tables = Sequence[Sequence[int]]
"""Blocks, per group."""


@dataclass(slots=True)
class Work:
    """A step's part for one request: the KV of tokens `first` to `stop`, to blocks as they were chosen at issue."""

    request: SimRequest
    blocks: tuple[list[int], ...]
    first: int
    stop: int
    turn: int
    leaving: Leaving | None = None  # what it adds to a lease
    is_checked: bool = False  # what it reads is compared with what should be there
    moves_states: bool = False  # it decodes, and leaves other states than it found


@dataclass(slots=True)
class Step:
    """Some requests' next tokens, as issued at once."""

    number: int
    works: Sequence[Work]
    ranks: int
    ranks_left: int

    @property
    def done(self) -> bool:
        """Its output is here."""
        return not self.ranks_left


class Device:
    """All ranks of one engine in one life."""

    def __init__(self, world: World, name: str, shape: Shape, memory: list[bytearray]) -> None:
        self.world = world
        self.name = name
        self.shape = shape
        self.memory = memory
        self.stopped = False
        self.on_layer: Callable[[Step, int, int], None] = lambda step, rank, layer: None
        self.on_done: Callable[[], None] = lambda: None
        self.writing = [0] * shape.blocks  # steps in flight that write there
        self.blank: list[set[int]] = [set() for _ in memory]  # by rank: handed out, and nothing computed there since
        self._free_at = [0.0] * len(memory)

    def handed_out(self, blocks: Sequence[int], group: int) -> None:
        """To hold KV of a group, of which a rank of another pipeline stage computes nothing."""
        for rank, blank in enumerate(self.blank):
            is_here = any(self.shape.group_of[layer] == group for layer in self.shape.own_layers[rank])
            (blank.update if is_here else blank.difference_update)(blocks)

    def check_quiet(self, blocks: Sequence[int]) -> None:
        """Bytes may land in these blocks from now on, ordered with no step: none in flight writes there (rule 32)."""
        for block in blocks:
            if self.writing[block]:
                raise Broken(WRONG, f"{self.name}: block {block} is loaded into, and a step in flight writes it")

    def issue(self, number: int, works: Sequence[Work]) -> Step:
        step = Step(number, works, len(self.memory), len(self.memory))
        self._count_writes(step, 1)
        world, now = self.world, self.world.now
        layer_s = world.rng.choice(LAYER_S)
        if world.chance(SLOW):
            world.faults["slow_step"] += 1
            layer_s = SLOW_LAYER_S
        for rank, free_at in enumerate(self._free_at):
            at = max(now, free_at)
            for layer in self.shape.own_layers[rank]:
                at += layer_s * world.rng.random()
                world.after(at - now, functools.partial(self._compute, step, rank, layer))
            self._free_at[rank] = at
        return step

    def _compute(self, step: Step, rank: int, layer: int) -> None:
        if self.stopped:
            return
        for work in step.works:
            if work.is_checked:
                self.check(work.request.content, work.blocks, work.first, (rank,), (layer,), f"{work.request.id} reads")
            # What D decodes is the same token over and over here, so it leaves the state as it is.
            moves = work.moves_states or work.stop <= work.request.tokens
            if moves or self.shape.group_of[layer] not in self.shape.states:
                self.write(work.request.content, work.blocks, work.first, work.stop, rank, layer)
        self.on_layer(step, rank, layer)
        if layer == self.shape.own_layers[rank][-1]:
            step.ranks_left -= 1
            if not step.ranks_left:
                self._count_writes(step, -1)
                self.on_done()

    def _count_writes(self, step: Step, change: int) -> None:
        tokens = self.shape.block_tokens
        for work in step.works:
            for group, ids in enumerate(work.blocks):
                is_state = group in self.shape.states
                for block in ids if is_state else ids[work.first // tokens : -(-work.stop // tokens)]:
                    self.writing[block] += change

    # --- memory

    def scrub(self) -> None:
        """The cache is another from now on; what was there is not."""
        for memory in self.memory:
            memory[:] = b"\xaa" * len(memory)

    def write(
        self, content: Words, blocks: Sequence[Sequence[int]], first: int, stop: int, rank: int, layer: int
    ) -> None:
        """Put the KV of tokens `first` to `stop` where it belongs; the rest of a block that is begun is nobody's."""
        shape, memory, blank = self.shape, self.memory[rank], self.blank[rank]
        ids, size = blocks[shape.group_of[layer]], shape.block_tokens
        if shape.group_of[layer] in shape.states:
            offset = shape.page(layer, ids[0])
            blank.discard(ids[0])
            memory[offset : offset + shape.page_bytes] = state_stamp(shape, content, layer, rank, stop)
            return
        for index in range(first // size, -(-stop // size)):
            lo, hi = max(first - index * size, 0), min(stop - index * size, size)
            page = page_stamp(shape, content, layer, index, rank, hi)
            offset = shape.page(layer, ids[index])
            blank.discard(ids[index])
            if lo == 0:
                memory[offset : offset + shape.page_bytes] = page
                continue
            lo, hi = shape.slot(rank, lo), shape.slot(rank, hi)
            for cells in shape.cells[lo, hi] if lo < hi else ():
                memory[offset + cells.start : offset + cells.stop] = page[cells]

    def check(
        self,
        content: Words,
        blocks: Tables,
        tokens: int,
        ranks: Sequence[int],
        layers: Sequence[int],
        who: str,
    ) -> None:
        """Of the first `tokens` tokens, those that the next one reads are this prompt's, in every cell."""
        shape, size = self.shape, self.shape.block_tokens
        for layer in layers:
            group = shape.group_of[layer]
            first, ids = shape.needed_from(group, tokens), blocks[group]
            if group in shape.states:
                self._check_state(content, layer, ids[0], tokens, ranks, who)
                continue
            for index in range(first // size, -(-tokens // size)):
                offset, lo, hi = shape.page(layer, ids[index]), max(first - index * size, 0), tokens - index * size
                for rank in ranks:
                    if lo == hi or layer not in shape.own_layers[rank]:
                        continue
                    page = self.memory[rank][offset : offset + shape.page_bytes]
                    expected = page_stamp(shape, content, layer, index, rank, size)
                    if not same_tokens(shape, page, expected, min(hi, size), lo, rank):
                        what = f"rank {rank} layer {layer} block {index} is not this prompt's"
                        raise Broken(WRONG, f"{self.name}: {who}: {what}")

    def _check_state(self, content: Words, layer: int, block: int, tokens: int, ranks: Sequence[int], who: str) -> None:
        offset = self.shape.page(layer, block)
        for rank in ranks:
            if layer in self.shape.own_layers[rank]:
                page = self.memory[rank][offset : offset + self.shape.page_bytes]
                if tokens and page != state_stamp(self.shape, content, layer, rank, tokens):
                    what = f"rank {rank} layer {layer}: the state is not that after {tokens} tokens of this prompt"
                    raise Broken(WRONG, f"{self.name}: {who}: {what}")
