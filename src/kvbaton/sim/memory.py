"""Stamped memory: every (layer, head, token) cell of every prompt has its own four bytes.

So a copy that took one wrong page, one stale block or one other prompt's head is seen, wherever it came from.
"""

from __future__ import annotations

import functools
import itertools
import struct

import msgspec

from kvbaton.protocol.layout import Cell, EngineLayout, Group, Kind, Rank, Share, places, planes

CELL = Cell("kv", 4)


class Shape(msgspec.Struct, frozen=True, dict=True):
    """How one simulated engine lays its KV out."""

    ranks: int = 1
    blocks: int = 24
    block_tokens: int = 2
    heads: int = 2
    group_layers: tuple[int, ...] = (2,)
    blocks_first: bool = False
    order: str = "HNP"

    @functools.cached_property
    def layers(self) -> int:
        return sum(self.group_layers)

    @functools.cached_property
    def rank_heads(self) -> int:
        return max(1, self.heads // self.ranks)

    @functools.cached_property
    def page_bytes(self) -> int:
        return self.rank_heads * self.block_tokens * CELL.bytes

    @functools.cached_property
    def region_bytes(self) -> int:
        return self.layers * self.blocks * self.page_bytes

    def head_start(self, rank: int) -> int:
        """Ranks beyond the heads hold copies (replicated KV)."""
        return rank * self.rank_heads % self.heads

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
    def cells(self) -> dict[tuple[int, int], tuple[slice, ...]]:
        """Where tokens `lo` to `hi` of a block are in its page."""
        size, heads, tokens = CELL.bytes, self.rank_heads, self.block_tokens
        found = {}
        for lo, hi in itertools.combinations(range(tokens + 1), 2):
            if self.order == "HNP":
                starts = [(head * tokens + lo, head * tokens + hi) for head in range(heads)]
            else:
                starts = [(lo * heads, hi * heads)]
            found[lo, hi] = tuple(slice(start * size, stop * size) for start, stop in starts)
        return found

    def layout(self) -> EngineLayout:
        groups = tuple(
            Group(
                f"g{n}",
                Kind.FULL,
                self.block_tokens,
                tuple(f"g{n}.{k}" for k in range(count)),
                self.heads,
                (CELL,),
                "u32",
            )
            for n, count in enumerate(self.group_layers)
        )
        layer_stride = self.page_bytes if self.blocks_first else self.blocks * self.page_bytes
        block_stride = self.layers * self.page_bytes if self.blocks_first else self.page_bytes
        ranks = tuple(
            Rank(
                0, rank, 0, (self.region_bytes,),
                tuple(
                    Share(
                        self.head_start(rank), self.rank_heads, self.blocks,
                        places(range(count), self.page(self.first_layer(n), 0), layer_stride, block_stride),
                        planes(self.order, (CELL,), self.rank_heads, self.block_tokens),
                    )
                    for n, count in enumerate(self.group_layers)
                ),
            )
            for rank in range(self.ranks)
        )  # fmt: skip
        return EngineLayout(groups, ranks)


@functools.lru_cache(maxsize=65536)
def page_stamp(shape: Shape, content: int, layer: int, index: int, rank: int, valid: int) -> bytes:
    """What a page holds: `valid` tokens of block `index` of a prompt, for the heads of a rank."""
    first = index * shape.block_tokens
    cells = []
    heads = range(shape.head_start(rank), shape.head_start(rank) + shape.rank_heads)
    tokens = range(first, first + shape.block_tokens)
    if shape.order == "HNP":
        listed = [(head, token) for head in heads for token in tokens]
    else:
        listed = [(head, token) for token in tokens for head in heads]
    for head, token in listed:
        cells.append(_stamp(content, layer, head, token) if token - first < valid else 0)
    return struct.pack(f"<{len(cells)}I", *cells)


def _stamp(content: int, layer: int, head: int, token: int) -> int:
    mixed = (content * 2654435761 + layer * 40503 + head * 2246822519 + token * 3266489917 + 1) & 0xFFFFFFFF
    return (mixed ^ (mixed >> 15)) * 2246822519 & 0xFFFFFFFF | 1


def same_tokens(shape: Shape, page: bytes | bytearray, expected: bytes, valid: int) -> bool:
    """Whether the first `valid` tokens of a page are the expected ones."""
    if valid == shape.block_tokens:
        return page == expected
    return all(page[cells] == expected[cells] for cells in shape.cells[0, valid])
