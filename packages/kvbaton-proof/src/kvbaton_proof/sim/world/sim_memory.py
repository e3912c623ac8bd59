"""Stamped memory: every (layer, head, token) cell of every prompt has its own four bytes.

So a copy that took one wrong page, one stale block or one other prompt's head is seen, wherever it came from. A state
has other bytes after each token, in the one block that a request has of it.
"""

from __future__ import annotations

import bisect
import functools
import itertools
import struct
from itertools import pairwise
from typing import NamedTuple

import msgspec

from kvbaton.protocol.events import NO_BLOCK
from kvbaton.protocol.geometry.layout import Cell, EngineLayout, Group, GroupKind, Per, Place, Rank, Share, planes

CELL_BYTES = 4


class Said(NamedTuple):
    """A prompt and what was answered: for each token of that, what stands for it and for all tokens before it."""

    prompt: int
    tokens: int  # of the prompt
    chain: tuple[int, ...] = ()

    def and_then(self, token: int) -> Said:
        before = self.chain[-1] if self.chain else self.prompt
        return self._replace(chain=(*self.chain, (before * 1000003 + token * 7919 + 1) % (1 << 61)))

    def upto(self, tokens: int) -> Said:
        return self._replace(chain=self.chain[: max(tokens - self.tokens, 0)])


Words = int | Said
"""What prompts are made of: a number for all tokens of one, or prompt and answer."""


def word_at(words: Words, token: int) -> int:
    """What stands for a token and for all before it."""
    if isinstance(words, int):
        return words
    said = token - words.tokens
    return words.prompt if said < 0 else words.chain[said] if said < len(words.chain) else 0


class Shape(msgspec.Struct, frozen=True, dict=True):
    """How one simulated engine lays its KV out."""

    ranks: int = 1  # of all pipeline stages
    stages: int = 1
    blocks: int = 24
    block_tokens: int = 2
    heads: int = 2
    group_layers: tuple[int, ...] = (2,)
    blocks_first: bool = False
    order: str = "HNP"
    kinds: tuple[GroupKind, ...] = ()  # of the groups; FULL where there are none
    window: int = 0  # of the groups that have one, in tokens
    apart: bool = False  # keys and values are two planes
    per: Per = Per.TOKEN
    regions: int = 1  # of a rank: the layers are in one, or each half of them in its own
    optional: int = 0  # so many groups, the last ones or with `front` the first, need not be everywhere
    front: bool = False
    lacks: tuple[int, ...] = ()  # the layers of each group that stands in front elsewhere and that this engine has not
    dcp: int = 1  # a block's tokens are dealt out to so many ranks of a stage, `interleave` at a time
    interleave: int = 1

    @functools.cached_property
    def layers(self) -> int:
        return sum(self.group_layers)

    @functools.cached_property
    def shards(self) -> int:
        """Ranks of one stage."""
        return self.ranks // self.stages

    @functools.cached_property
    def rank_heads(self) -> int:
        return max(1, self.heads // (self.shards // self.dcp))

    @functools.cached_property
    def page_bytes(self) -> int:
        return self.rank_heads * self.page_tokens * CELL_BYTES

    @functools.cached_property
    def page_tokens(self) -> int:
        return self.block_tokens // self.dcp

    @functools.cached_property
    def slots(self) -> tuple[tuple[int, ...], ...]:
        """By a rank's place in its context group, which tokens of a block it has."""
        of_token = [token // self.interleave % self.dcp for token in range(self.block_tokens)]
        return tuple(tuple(token for token, place in enumerate(of_token) if place == each) for each in range(self.dcp))

    def slot(self, rank: int, token: int) -> int:
        """How many tokens of a block, of those before this one, a rank has."""
        return token if self.dcp == 1 else bisect.bisect_left(self.slots[rank % self.dcp], token)

    @functools.cached_property
    def region_bytes(self) -> int:
        return self.layers * self.blocks * self.page_bytes

    @functools.cached_property
    def bases(self) -> tuple[int, ...]:
        """Where each region begins in a rank's memory: with a layer. If there are two, blocks lie inside layers."""
        halves = 0 if self.blocks_first else self.regions - 1
        return (0, *[self.layers // 2 * self.blocks * self.page_bytes] * halves)

    @property
    def edges(self) -> tuple[int, ...]:
        return (*self.bases, self.region_bytes)

    def head_start(self, rank: int) -> int:
        """Ranks beyond the heads hold copies (replicated KV)."""
        return rank % self.shards // self.dcp * self.rank_heads % self.heads

    @functools.cached_property
    def own_layers(self) -> tuple[range, ...]:
        """Of each rank: those of its pipeline stage, through all groups."""
        edges = [self.layers * stage // self.stages for stage in range(self.stages + 1)]
        return tuple(range(*edges[rank // self.shards : rank // self.shards + 2]) for rank in range(self.ranks))

    def page(self, layer: int, block: int) -> int:
        """Byte offset of a page; layers count through all groups."""
        index = block * self.layers + layer if self.blocks_first else layer * self.blocks + block
        return index * self.page_bytes

    def block_at(self, offset: int) -> int:
        """The block that a byte belongs to."""
        index = offset // self.page_bytes
        return index // self.layers if self.blocks_first else index % self.blocks

    def first_layer(self, group: int) -> int:
        return sum(self.group_layers[:group])

    @functools.cached_property
    def group_of(self) -> tuple[int, ...]:
        """Each layer's group."""
        return tuple(group for group, count in enumerate(self.group_layers) for _ in range(count))

    @functools.cached_property
    def groups(self) -> tuple[Group, ...]:
        token = (Cell("k", 2), Cell("v", 2)) if self.apart else (Cell("kv", CELL_BYTES),)
        run = 1 if self.per is Per.TOKEN else self.page_tokens
        cells = tuple(Cell(cell.name, cell.bytes * run, self.per) for cell in token)
        state = (Cell("state", self.block_tokens * CELL_BYTES, Per.PAGE),)
        kinds = self.kinds or (GroupKind.FULL,) * len(self.group_layers)
        spare = range(self.optional) if self.front else range(len(kinds) - self.optional, len(kinds))
        names = [f"g{len(self.lacks) + n}" for n in range(len(kinds))]
        return tuple(
            Group(
                names[n], kind, self.block_tokens, tuple(f"{names[n]}.{k}" for k in range(count)), self.heads,
                state if kind is GroupKind.STATE else cells, "u32",
                self.window if kind in (GroupKind.SLIDING, GroupKind.CHUNKED) else 0, n in spare,
            )
            for n, (kind, count) in enumerate(zip(kinds, self.group_layers, strict=True))
        )  # fmt: skip

    def layer_number(self, layer: int) -> int:
        """The number of a layer in engines that lack none."""
        return sum(self.lacks) + layer

    @functools.cached_property
    def states(self) -> frozenset[int]:
        """Groups of states: one block each, whatever the length of a prompt."""
        return frozenset(group for group, kind in enumerate(self.kinds) if kind is GroupKind.STATE)

    def needed_from(self, group: int, tokens: int) -> int:
        """The first token that the next one reads: what is expected of the core, so not asked of it."""
        kind = self.kinds[group] if self.kinds else GroupKind.FULL
        if kind is GroupKind.SLIDING:
            return max(0, tokens + 1 - self.window)
        return tokens - tokens % self.window if kind is GroupKind.CHUNKED else 0

    def listed(self, group: int, ids: list[int], tokens: int) -> list[int]:
        """A prompt's blocks as they are leased or taken: none where nobody will read any more."""
        if group in self.states:
            return ids[:1]
        dropped = self.needed_from(group, tokens) // self.block_tokens
        return [NO_BLOCK] * min(dropped, len(ids)) + ids[dropped:]

    def table(self, group: int, ids: list[int], tokens: int) -> list[int]:
        """The same as an engine has it: the null block where nobody will read, the one state at each of its places."""
        if group in self.states:
            return ids[:1] * -(-tokens // self.block_tokens)
        return [0 if block == NO_BLOCK else block for block in self.listed(group, ids, tokens)]

    @functools.cached_property
    def cells(self) -> dict[tuple[int, int], tuple[slice, ...]]:
        """Where tokens `lo` to `hi` of a page are in it; `slot` says which these are of a block."""
        heads, tokens = self.rank_heads, self.page_tokens
        halves = 2 if self.order.startswith("P") else 1
        size, found = CELL_BYTES // halves, {}
        for lo, hi in itertools.combinations(range(tokens + 1), 2):
            if self.order.index("H") < self.order.index("N"):
                runs = [(head * tokens + lo, head * tokens + hi) for head in range(heads)]
            else:
                runs = [(lo * heads, hi * heads)]
            shifts = [half * heads * tokens for half in range(halves)]
            found[lo, hi] = tuple(slice((k + lo) * size, (k + hi) * size) for k in shifts for lo, hi in runs)
        return found

    def layout(self) -> EngineLayout:
        layer_stride = self.page_bytes if self.blocks_first else self.blocks * self.page_bytes
        block_stride = self.layers * self.page_bytes if self.blocks_first else self.page_bytes

        def share(rank: int, n: int) -> Share:
            first, group = self.first_layer(n), self.groups[n]
            mine = [layer for layer in self.own_layers[rank] if self.group_of[layer] == n]
            placed = tuple(
                Place(layer - first, layer * layer_stride - base, block_stride, region)
                for layer in mine
                for region, base in [max(each for each in enumerate(self.bases) if each[1] <= layer * layer_stride)]
            )
            inside = planes(self.order, group.cells, self.rank_heads, self.page_tokens)
            return Share(self.head_start(rank), self.rank_heads, self.blocks, placed, inside)

        ranks = tuple(
            Rank(
                rank // self.shards, rank % self.shards, rank % self.dcp,
                tuple(stop - at for at, stop in pairwise(self.edges)),
                tuple(share(rank, n) for n in range(len(self.group_layers))),
            )
            for rank in range(self.ranks)
        )  # fmt: skip
        return EngineLayout(self.groups, ranks, self.dcp, self.interleave)


@functools.lru_cache(maxsize=65536)
def page_stamp(shape: Shape, content: Words, layer: int, index: int, rank: int, valid: int) -> bytes:
    """What a page holds: `valid` tokens of block `index` of a prompt, for the heads of a rank."""
    first = index * shape.block_tokens
    cells = []
    heads = range(shape.head_start(rank), shape.head_start(rank) + shape.rank_heads)
    tokens = [first + token for token in shape.slots[rank % shape.dcp]]
    number = shape.layer_number(layer)
    if shape.order.index("H") < shape.order.index("N"):
        listed = [(head, token) for head in heads for token in tokens]
    else:
        listed = [(head, token) for token in tokens for head in heads]
    for head, token in listed:
        cells.append(_stamp(word_at(content, token), number, head, token) if token - first < valid else 0)
    page = struct.pack(f"<{len(cells)}I", *cells)
    if not shape.order.startswith("P"):
        return page
    halves = struct.unpack(f"<{2 * len(cells)}H", page)
    return struct.pack(f"<{len(halves)}H", *halves[::2], *halves[1::2])


@functools.lru_cache(maxsize=4096)
def state_stamp(shape: Shape, content: Words, layer: int, rank: int, tokens: int) -> bytes:
    """What a page of states holds after so many tokens of a prompt, for the heads of a rank."""
    first, words, number = shape.head_start(rank), shape.block_tokens, shape.layer_number(layer)
    cells = [
        _stamp(word_at(content, tokens - 1), number, (first + k // words) * words + k % words, tokens)
        for k in range(shape.rank_heads * words)
    ]
    return struct.pack(f"<{len(cells)}I", *cells)


def _stamp(content: int, layer: int, head: int, token: int) -> int:
    mixed = (content * 2654435761 + layer * 40503 + head * 2246822519 + token * 3266489917 + 1) & 0xFFFFFFFF
    return (mixed ^ (mixed >> 15)) * 2246822519 & 0xFFFFFFFF | 1


def same_tokens(
    shape: Shape, page: bytes | bytearray, expected: bytes, valid: int, first: int = 0, rank: int = 0
) -> bool:
    """Whether of the first `valid` tokens of a block, from `first` on, those in a rank's page are the expected ones."""
    lo, hi = shape.slot(rank, first), shape.slot(rank, valid)
    if hi - lo == shape.page_tokens:
        return page == expected
    return lo == hi or all(page[cells] == expected[cells] for cells in shape.cells[lo, hi])
