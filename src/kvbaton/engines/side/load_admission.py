"""Room for second thoughts: a load that fails must find blocks to be computed with, or it bars every load behind it.

vLLM keeps a failed load at the head of its queue and looks no further while blocks for it are missing. Behind a sliding
window, and where layers keep states, computing a prompt takes more blocks at a time than its loaded end does; if loads
that have arrived hold those blocks, none of them is ever looked at, and the engine stands still. So a load begins only
if there is room for it and for all that the loads before it could come to need.

Law: with no load under way one is always admitted (vLLM's own admission has the last word); running requests end and
give their blocks back, so what is not admitted now is admitted later, or its claim runs out.
"""

from __future__ import annotations

from typing import Any

from kvbaton.engines.side.grouping import NULL_BLOCK_ID, Grouping, Tables
from kvbaton.engines.side.protocols import PinPool
from kvbaton.protocol.geometry.layout import Group, GroupKind, needed_blocks


class LoadAdmission:
    """What loads under way could come to need beyond what they hold. KV without a window needs nothing more."""

    def __init__(self, grouping: Grouping, pool: PinPool, tokens_per_step: int) -> None:
        self._grouping = grouping
        self._pool = pool
        self._tokens_per_step = tokens_per_step
        self._varies = grouping.slides or grouping.stateful
        self._extra: dict[str, int] = {}

    def admits(self, request: Any) -> bool:
        """Whether one more load may begin now."""
        if not self._varies or not self._extra:
            return True
        return self._pool.free_blocks >= self._need(request.num_tokens) + sum(self._extra.values())

    def allocated(self, request: Any, tables: Tables, *, loads: bool) -> None:
        """A request got blocks: to be loaded, or, after that, to run."""
        if not loads or not self._varies:
            self._extra.pop(request.request_id, None)
            return
        held = sum(1 for number in set(self._grouping.vllm_groups) for each in tables[number] if each != NULL_BLOCK_ID)
        self._extra[request.request_id] = max(0, self._need(request.num_tokens) - held)

    def left(self, request_id: str) -> None:
        self._extra.pop(request_id, None)

    def _need(self, tokens: int) -> int:
        """Blocks that computing so many tokens takes at most at one time."""
        lists = dict(zip(self._grouping.vllm_groups, self._grouping.layout.groups, strict=True))
        return sum(self._need_of(group, tokens) for group in lists.values())

    def _need_of(self, group: Group, tokens: int) -> int:
        if group.kind is GroupKind.STATE:
            return self._grouping.state_blocks
        computed = min(tokens, group.window + self._tokens_per_step) if group.window else tokens
        return needed_blocks(computed, group.block_tokens) + 1
