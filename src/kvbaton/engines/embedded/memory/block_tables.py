"""The blocks of a request, per KV group, and how they grow, slide and are found again.

Law: a table has one entry per block of tokens, and an entry is null only where no query at or after the table's next
position can see it. All groups of a request grow together or not at all.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from kvbaton.engines.embedded.engine_config import KvGroup
from kvbaton.engines.embedded.memory.block_cache import NULL_BLOCK, BlockPool

Tables = list[list[int]]
"""Per KV group, the block of each `block_tokens` tokens."""


class Hit(msgspec.Struct, frozen=True):
    """The longest prefix whose KV is at hand: whole blocks, null where no later token looks."""

    tokens: int
    tables: tuple[tuple[int, ...], ...]


class KvCache:
    """Tables of requests over one pool."""

    def __init__(self, pool: BlockPool, groups: Sequence[KvGroup], block_tokens: int) -> None:
        self.pool = pool
        self.groups = tuple(groups)
        self.block_tokens = block_tokens

    def lookup(self, hashes: Sequence[bytes]) -> Hit:
        """Find the longest cached prefix of the blocks named by `hashes`. Takes no reference."""
        found = [[self.pool.find((index, each)) for each in hashes] for index in range(len(self.groups))]
        full = [row for row, group in zip(found, self.groups, strict=True) if group.window_tokens is None]
        longest = min((_run(row) for row in full), default=len(hashes))
        for length in range(longest, 0, -1):
            seen_from = [self._first_seen(group, length * self.block_tokens) for group in self.groups]
            rows = [_ids(row[first:length]) for row, first in zip(found, seen_from, strict=True)]
            if all(len(row) == length - first for row, first in zip(rows, seen_from, strict=True)):
                tables = tuple((NULL_BLOCK,) * first + tuple(row) for row, first in zip(rows, seen_from, strict=True))
                return Hit(length * self.block_tokens, tables)
        return self.no_hit()

    def no_hit(self) -> Hit:
        return Hit(0, tuple(() for _ in self.groups))

    def adopt(self, hit: Hit) -> Tables:
        """Take a reference to each block of a hit."""
        for row in hit.tables:
            self.pool.touch(_real(row))
        return [list(row) for row in hit.tables]

    def grow(self, tables: Tables, tokens: int, next_position: int) -> bool:
        """Cover `tokens` tokens, given that no token before `next_position` will be computed; False: no room."""
        self._slide(tables, next_position)
        wanted = [self._missing(table, group, tokens, next_position) for table, group in self._each(tables)]
        count = sum(sum(row) for row in wanted)
        if count > self.pool.free_blocks:
            return False
        blocks = iter(self.pool.allocate(count))
        for table, row in zip(tables, wanted, strict=True):
            table.extend(next(blocks) if real else NULL_BLOCK for real in row)
        return True

    def missing(self, tables: Tables, tokens: int, next_position: int) -> int:
        """How many more blocks `grow` would take, windows aside that could slide before."""
        return sum(sum(self._missing(table, group, tokens, next_position)) for table, group in self._each(tables))

    def blocks_for(self, tokens: int) -> int:
        """The most blocks a request of `tokens` tokens can need."""
        return self.missing([[] for _ in self.groups], tokens, 0)

    def publish(self, tables: Tables, hashes: Sequence[bytes], first: int = 0) -> None:
        """Make the blocks named by `hashes` (from the `first` on), whose tokens are computed, findable by other
        requests."""
        for group, table in enumerate(tables):
            for index in range(first, len(hashes)):
                if table[index] != NULL_BLOCK:
                    self.pool.publish(table[index], (group, hashes[index]))

    def release(self, tables: Tables) -> None:
        """Drop all references, last blocks first: a prefix is worth more than what follows it."""
        for table in tables:
            self.pool.free(reversed(_real(table)))
            table.clear()

    def _slide(self, tables: Tables, next_position: int) -> None:
        """Release blocks that the window has left behind."""
        for table, group in self._each(tables):
            if group.window_tokens is None:
                continue
            end = min(self._first_seen(group, next_position), len(table))
            left = [index for index in range(end) if table[index] != NULL_BLOCK]
            self.pool.free(table[index] for index in reversed(left))
            for index in left:
                table[index] = NULL_BLOCK

    def _missing(self, table: list[int], group: KvGroup, tokens: int, next_position: int) -> list[bool]:
        """For each entry yet to come: must it be a real block?"""
        first = self._first_seen(group, next_position)
        return [index >= first for index in range(len(table), -(-tokens // self.block_tokens))]

    def _first_seen(self, group: KvGroup, position: int) -> int:
        """The first block that a token at `position` looks at."""
        if group.window_tokens is None:
            return 0
        return max(0, position - group.window_tokens + 1) // self.block_tokens

    def _each(self, tables: Tables) -> zip[tuple[list[int], KvGroup]]:
        return zip(tables, self.groups, strict=True)


def _real(row: Sequence[int]) -> list[int]:
    return [block for block in row if block != NULL_BLOCK]


def _ids(row: Sequence[int | None]) -> list[int]:
    return [block for block in row if block is not None]


def _run(row: Sequence[int | None]) -> int:
    """How many blocks were found before the first that was not."""
    return row.index(None) if None in row else len(row)
