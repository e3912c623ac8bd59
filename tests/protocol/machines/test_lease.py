"""Promise 1: a commit is judged by epochs, at the time of answering, never by the lease's state (rule 6)."""

from __future__ import annotations

from collections import Counter

import pytest

from kvbaton.protocol.events import NO_BLOCK, LeaseBegun
from kvbaton.protocol.geometry.progress import GroupProgress, whole
from kvbaton.protocol.ids import HandoffId, Incarnation, LeaseId, PeerId, Reader, WorkerId
from kvbaton.protocol.machines.context import EpochsOf
from kvbaton.protocol.machines.lease import Lease, ReaderState, Seat, Term, judge, new_lease, proven_blocks

D = PeerId(WorkerId("d"), Incarnation(1))


def lease(*groups: list[int], ranks: int = 1, max_readers: int = 1, complete: bool = True) -> Lease:
    """Blocks pinned at epoch 0, computed on every rank."""
    begun = LeaseBegun(LeaseId(1), HandoffId("h"), b"digest", 8, len(groups), max_readers)
    made = new_lease(begun, ranks, Term(9.0, 9.0))
    for mine, noted, ids in zip(made.blocks, made.epochs, groups, strict=True):
        mine.extend(ids)
        noted.extend(0 for _ in ids)
    made.ranks = [whole([len(ids) for ids in groups])] * ranks
    made.completed = complete
    return made


def of(epochs: Counter[int] | None = None) -> EpochsOf:
    """Blocks have these epochs now, and all others 0."""
    return lambda blocks: [(epochs or Counter())[block] for block in blocks]


def test_untouched_blocks_are_proven() -> None:
    assert judge(lease([1, 2], [3]), of()) == (True, (2, 1))


@pytest.mark.parametrize(("reused", "good"), [(1, (0, 2)), (2, (1, 2)), (3, (2, 2)), (4, (3, 0)), (5, (3, 1))])
def test_a_reused_block_is_named_per_group(reused: int, good: tuple[int, ...]) -> None:
    epochs = Counter({reused: 1})
    assert judge(lease([1, 2, 3], [4, 5]), of(epochs)) == (False, good)


def test_the_first_reused_block_ends_the_good_prefix() -> None:
    epochs = Counter({2: 1, 4: 5})
    assert proven_blocks(lease([1, 2, 3, 4]), of(epochs)) == (1,)


def test_a_place_without_a_block_cannot_have_been_reused() -> None:
    """Sliding windows pin only the last window (rule 11)."""
    assert judge(lease([NO_BLOCK, NO_BLOCK, 3]), of(Counter({NO_BLOCK: 1}))) == (True, (3,))


def test_nothing_is_proven_before_every_block_is_listed() -> None:
    """Rule 10: a commit before the final Ready is stale, and has no good prefix: partial blocks still grow."""
    assert judge(lease([1, 2], complete=False), of()) == (False, (0,))


def test_nothing_is_proven_before_every_rank_is_done() -> None:
    held = lease([1, 2], ranks=2)
    held.ranks[1] = whole([1])
    assert not held.final
    assert judge(held, of()) == (False, (0,))


def test_progress_is_that_of_the_slowest_rank() -> None:
    held = lease([1, 2], ranks=2)
    held.ranks = [whole([2]), (GroupProgress(0, 2, 1),)]
    assert held.progress == (GroupProgress(0, 2, 1),)


def test_a_lease_is_used_up_when_every_seat_was_taken_and_left() -> None:
    """Rule 4: readers are known by identity, and a ticket is single-use per reader."""
    held = lease([1], max_readers=2)
    first, second = Reader(D, 1), Reader(D, 2)
    assert not held.used_up and held.has_room()
    held.seats[first] = Seat(1, ReaderState.COMMITTED)
    assert not held.used_up and held.has_room()
    held.seats[second] = Seat(1)
    assert not held.used_up and not held.has_room()
    held.seats[second].state = ReaderState.GONE
    assert held.used_up


def test_an_empty_prompt_s_lease_is_final_at_once() -> None:
    assert lease([]).final
