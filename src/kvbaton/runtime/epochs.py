"""One number per block, raised before the block is handed out again (rule 7).

The engine's scheduler thread raises; any thread may read. No lock: the raise happens before the step that overwrites
the block is dispatched, so an epoch that is unchanged after a copy proves the copy.
"""

from __future__ import annotations


class EpochTable:
    """Epochs of one block pool; grows to the highest block it has seen."""

    def __init__(self, blocks: int) -> None:
        self._epochs = [0] * blocks

    def raise_epoch(self, block: int) -> None:
        """The callback for the pool; must not raise, whatever the block (it runs inside the engine's step)."""
        if block < 0:
            return
        if block >= len(self._epochs):
            self._epochs.extend([0] * (block + 1 - len(self._epochs)))
        self._epochs[block] += 1

    def of(self, block: int) -> int:
        return self._epochs[block] if 0 <= block < len(self._epochs) else 0
