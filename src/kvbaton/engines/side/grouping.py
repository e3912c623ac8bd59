"""Block tables as vLLM gives them, per vLLM group, turned into the lists per group that the protocol knows.

Laws: vLLM's null block (id 0, out of a window) is `NO_BLOCK` past this module, and is never touched. Of a group of
states the list is one block: the state after the tokens in question. One that is not there is an error, never a gap.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from kvbaton.protocol.events import NO_BLOCK, Groups
from kvbaton.protocol.geometry.layout import EngineLayout, GroupKind, needed_blocks

NULL_BLOCK_ID = 0
"""In an engine's table: no block, since no later token looks there."""

Tables = Sequence[Sequence[int]]
"""Per vLLM group the block ids of a request, in the order of its tokens."""


class Grouping:
    """How the protocol's groups relate to vLLM's."""

    def __init__(
        self, layout: EngineLayout, vllm_groups: tuple[int, ...], state_blocks: int = 0, lookahead: int = 0
    ) -> None:
        """`state_blocks`: of a group of states, how many computing a request takes. `lookahead`: of a drafter."""
        self.layout = layout
        self.vllm_groups = vllm_groups
        self.count = len(vllm_groups)
        self.block_tokens = tuple(group.block_tokens for group in layout.groups)
        self.states = tuple(group.kind is GroupKind.STATE for group in layout.groups)
        windowed = (group.kind in (GroupKind.SLIDING, GroupKind.CHUNKED) for group in layout.groups)
        self.at_end = tuple(map(any, zip(windowed, self.states, strict=True)))
        """Groups whose blocks vLLM drops, or overwrites, while a prompt goes on: pinned with its last chunk."""
        self.stateful = any(self.states)
        self.slides = any(late and not state for late, state in zip(self.at_end, self.states, strict=True))
        self.state_blocks = state_blocks
        self.lookahead = lookahead

    def needed(self, tokens: int) -> tuple[int, ...]:
        """How many blocks of each group hold that many tokens."""
        sizes = zip(self.states, self.block_tokens, strict=True)
        return tuple(1 if state else needed_blocks(tokens, size) for state, size in sizes)

    def whole(self, tokens: int) -> tuple[int, ...]:
        """How many blocks of each group that many tokens fill, where that is not the end."""
        sizes = zip(self.at_end, self.block_tokens, strict=True)
        return tuple(0 if late else tokens // size for late, size in sizes)

    def first(self, token: int) -> tuple[int, ...]:
        """The place of that token in each group's list."""
        return tuple(0 if state else token // size for state, size in zip(self.states, self.block_tokens, strict=True))

    def cut(self, tables: Tables, first: Sequence[int], last: Sequence[int], tokens: int = 0) -> Groups:
        """Blocks `first` to `last` of each group, of a request of which `tokens` tokens are computed or loaded.

        ValueError when a table is too short, or has no such state.
        """
        found = []
        for group, (number, lo, hi) in enumerate(zip(self.vllm_groups, first, last, strict=True)):
            ids, state = tables[number], self.states[group] and lo < hi
            if state:
                lo = needed_blocks(tokens, self.block_tokens[group]) - 1
                hi = lo + 1
            if len(ids) < hi:
                raise ValueError(f"group {group}: {len(ids)} blocks in the table, {hi} needed")
            part = tuple(map(int, ids[lo:hi]))
            if NULL_BLOCK_ID in part:
                if state:
                    raise ValueError(f"group {group}: no state after {tokens} tokens in the table")
                part = tuple(each if each != NULL_BLOCK_ID else NO_BLOCK for each in part)
            found.append(part)
        return tuple(found)

    def of_states(self, blocks: Groups) -> tuple[int, ...]:
        """The blocks among these lists that are states."""
        return tuple(each for state, ids in zip(self.states, blocks, strict=True) if state for each in ids)


def real(blocks: Groups) -> tuple[int, ...]:
    """All ids that are blocks."""
    whole = tuple(itertools.chain.from_iterable(blocks))
    return whole if NO_BLOCK not in whole else tuple(each for each in whole if each != NO_BLOCK)
