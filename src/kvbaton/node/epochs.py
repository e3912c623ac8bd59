"""One number per block, raised before the block is reused (rule 7).

The engine's scheduler thread raises epochs; any thread may read. No lock: the raise happens before the step that
overwrites the block is dispatched, so an epoch that is unchanged after a copy proves the copy. Where the pool may have
missed a reuse, the judge sees an epoch that no pin ever had.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import itemgetter

UNTOLD = -1
"""No block's epoch."""


class EpochTable:
    """Epochs of one block pool; grows to the highest block it has seen."""

    def __init__(self, blocks: int) -> None:
        self._epochs = [0] * blocks
        self.are_told: Callable[[Sequence[int]], bool] = lambda blocks: True
        """Whether a reuse of any of these would have been told here. Asked on any thread; must not raise."""

    def raise_epoch(self, block: int) -> None:
        """The callback for the pool; must not raise, whatever the block (it runs inside the engine's step)."""
        if block < 0:
            return
        if block >= len(self._epochs):
            self._epochs.extend([0] * (block + 1 - len(self._epochs)))
        self._epochs[block] += 1

    def all_of(self, blocks: Sequence[int]) -> list[int]:
        epochs, count = self._epochs, len(self._epochs)
        if len(blocks) > 1 and min(blocks) >= 0 and max(blocks) < count:  # a commit checks a thousand of them
            return list(itemgetter(*blocks)(epochs))
        return [epochs[block] if 0 <= block < count else 0 for block in blocks]

    def all_judged(self, blocks: Sequence[int]) -> list[int]:
        """The epochs, for judging a commit. `told` is read first: pinning a block that was reused unseen raises its
        epoch, and only then is its reuse reported again."""
        if self.are_told(blocks):
            return self.all_of(blocks)
        told = [self.are_told((block,)) for block in blocks]
        return [epoch if is_told else UNTOLD for is_told, epoch in zip(told, self.all_of(blocks), strict=True)]
