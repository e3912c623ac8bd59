"""vLLM's block pool as kvbaton uses it: `touch` to pin, `unpin_blocks` to let go, and a word before each reuse.

Laws: only the scheduler's thread calls this. Every release goes through `unpin_blocks` with one shared callback, so
that each reuse of a block that was ever pinned raises its epoch before a kernel can overwrite it (rules 7 and 8). Null
blocks never come here. Where `unpin_blocks` is missing, blocks are freed plainly and `exact` is False: the ledger then
believes no commit that comes after the release.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from kvbaton.runtime.epochs import EpochTable

NULL_BLOCK_ID = 0
NEEDED = ("touch", "free_blocks", "blocks", "get_num_free_blocks")


class PinnedPool:
    """The engine's one pool of KV blocks."""

    def __init__(self, block_pool: Any, epochs: EpochTable) -> None:
        missing = [name for name in NEEDED if not hasattr(block_pool, name)]
        if missing:
            raise RuntimeError(f"this vLLM's BlockPool has no {missing[0]}: see docs/vllm.md for supported versions")
        self._pool = block_pool
        self._epochs = epochs
        self.exact = hasattr(block_pool, "unpin_blocks")

    def touch(self, ids: Iterable[int]) -> None:
        self._pool.touch([self._pool.blocks[each] for each in ids])

    def unpin(self, ids: Sequence[int]) -> None:
        """The end of a prompt is reused first: its beginning is what prefix caches and late commits can still use."""
        blocks = [self._pool.blocks[each] for each in reversed(ids)]
        if self.exact:
            self._pool.unpin_blocks(blocks, self._on_reuse)
        else:
            self._pool.free_blocks(blocks)

    @property
    def free_blocks(self) -> int:
        return int(self._pool.get_num_free_blocks())

    def _on_reuse(self, block: Any) -> None:
        """Inside `schedule()`: an exception here would be the engine's death, so this must not be able to raise."""
        self._epochs.raise_epoch(getattr(block, "block_id", -1))
