"""Rule 7: one process-wide number per block, raised before it is handed out again, by a callback that never raises."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from kvbaton.node.epochs import UNTOLD, EpochTable


def test_every_reuse_raises_the_epoch_of_that_block_alone() -> None:
    epochs = EpochTable(4)
    epochs.raise_epoch(2)
    epochs.raise_epoch(2)
    assert epochs.all_of(range(4)) == [0, 0, 2, 0]


@pytest.mark.parametrize("block", [0, 3, 4, 100])
def test_the_table_grows_to_any_block(block: int) -> None:
    epochs = EpochTable(4)
    epochs.raise_epoch(block)
    assert [at for at, epoch in enumerate(epochs.all_of(range(200))) if epoch] == [block]


@pytest.mark.parametrize("size", [0, 4])
@pytest.mark.parametrize("block", [-1, -5])
def test_what_is_no_block_raises_nothing_and_nobody_s_epoch(size: int, block: int) -> None:
    """The callback runs inside the engine's step: an exception would be its death (promise 4)."""
    epochs = EpochTable(size)
    epochs.raise_epoch(block)
    assert epochs.all_of(range(-6, 6)) == [0] * 12


def test_a_block_that_was_never_seen_has_epoch_zero() -> None:
    assert EpochTable(0).all_of([7]) == [0]


def test_epochs_come_in_the_order_in_which_they_are_asked_for() -> None:
    epochs = EpochTable(4)
    for block in (2, 2, 6):
        epochs.raise_epoch(block)
    blocks = [6, -1, 2, 99, 0]
    assert epochs.all_of(blocks) == [1, 0, 2, 0, 0]


def test_a_judge_sees_no_epoch_of_a_block_whose_reuse_would_not_be_told() -> None:
    epochs = EpochTable(4)
    epochs.raise_epoch(2)
    assert epochs.all_judged([1, 2, 3]) == [0, 1, 0]
    epochs.are_told = lambda blocks: 2 not in blocks
    assert epochs.all_judged([1, 2, 3]) == [0, UNTOLD, 0]
    assert epochs.all_judged([1, 3]) == [0, 0]


def test_what_is_told_is_asked_before_the_epoch_is_read() -> None:
    """A pin of a block that was reused unseen raises its epoch before it is told of again; between the two a judge must
    not take the old epoch for proof (promise 1)."""
    epochs = EpochTable(4)

    def pinned_anew(blocks: Sequence[int]) -> bool:
        epochs.raise_epoch(2)
        return len(blocks) == 1

    epochs.are_told = pinned_anew
    assert epochs.all_judged([2, 3]) == [3, 0]
