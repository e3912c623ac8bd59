"""Rule 7: one process-wide number per block, raised before it is handed out again, by a callback that never raises."""

from __future__ import annotations

import pytest

from kvbaton.runtime.epochs import EpochTable


def test_every_reuse_raises_the_epoch_of_that_block_alone() -> None:
    epochs = EpochTable(4)
    epochs.raise_epoch(2)
    epochs.raise_epoch(2)
    assert [epochs.of(block) for block in range(4)] == [0, 0, 2, 0]


@pytest.mark.parametrize("block", [0, 3, 4, 100])
def test_the_table_grows_to_any_block(block: int) -> None:
    epochs = EpochTable(4)
    epochs.raise_epoch(block)
    assert epochs.of(block) == 1
    assert sum(epochs.of(other) for other in range(200)) == 1


@pytest.mark.parametrize("size", [0, 4])
@pytest.mark.parametrize("block", [-1, -5])
def test_what_is_no_block_raises_nothing_and_nobody_s_epoch(size: int, block: int) -> None:
    """The callback runs inside the engine's step: an exception would be its death (promise 4)."""
    epochs = EpochTable(size)
    epochs.raise_epoch(block)
    assert [epochs.of(other) for other in range(-6, 6)] == [0] * 12


def test_a_block_that_was_never_seen_has_epoch_zero() -> None:
    assert EpochTable(0).of(7) == 0
