"""Block tables as vLLM gives them, per vLLM group, turned into the lists per group that the protocol knows.

Law: vLLM's null block (id 0, out of a window) is `NO_BLOCK` past this module, and is never touched.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from kvbaton.engines.vllm.block_pool import NULL_BLOCK_ID
from kvbaton.protocol.events import NO_BLOCK, Groups
from kvbaton.protocol.geometry.layout import EngineLayout, GroupKind, needed_blocks

Tables = Sequence[Sequence[int]]
"""Per vLLM group the block ids of a request, in the order of its tokens."""


class Grouping:
    """How the protocol's groups relate to vLLM's."""

    def __init__(self, layout: EngineLayout, vllm_groups: tuple[int, ...]) -> None:
        self.layout = layout
        self.vllm_groups = vllm_groups
        self.count = len(vllm_groups)
        self.block_tokens = tuple(group.block_tokens for group in layout.groups)
        self.windowed = tuple(group.kind in (GroupKind.SLIDING, GroupKind.CHUNKED) for group in layout.groups)
        """Groups whose blocks vLLM drops while a request goes on."""
        self.slides = any(self.windowed)

    def needed(self, tokens: int) -> tuple[int, ...]:
        """How many blocks of each group hold that many tokens."""
        return tuple(needed_blocks(tokens, size) for size in self.block_tokens)

    def whole(self, tokens: int) -> tuple[int, ...]:
        """How many blocks of each group that many tokens fill."""
        return tuple(tokens // size for size in self.block_tokens)

    def cut(self, tables: Tables, first: Sequence[int], last: Sequence[int]) -> Groups:
        """Blocks `first` to `last` of each group. ValueError when a table is too short."""
        found = []
        for group, (number, lo, hi) in enumerate(zip(self.vllm_groups, first, last, strict=True)):
            ids = tables[number]
            if len(ids) < hi:
                raise ValueError(f"group {group}: {len(ids)} blocks in the table, {hi} needed")
            part = tuple(map(int, ids[lo:hi]))
            found.append(
                part
                if NULL_BLOCK_ID not in part
                else tuple(each if each != NULL_BLOCK_ID else NO_BLOCK for each in part)
            )
        return tuple(found)


def real(blocks: Groups) -> tuple[int, ...]:
    """All ids that are blocks."""
    whole = tuple(itertools.chain.from_iterable(blocks))
    return whole if NO_BLOCK not in whole else tuple(each for each in whole if each != NO_BLOCK)
