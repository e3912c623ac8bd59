"""Promise 1: what is told to be ready is told once, completely, and never taken back."""

from __future__ import annotations

from itertools import product

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvbaton.protocol.errors import ProtocolError, Reason
from kvbaton.protocol.geometry.progress import (
    GroupProgress,
    Progress,
    Rect,
    advance,
    complete,
    covers,
    nothing,
    slowest,
    whole,
)

LAYERS, BLOCKS = 4, 6
steps = st.builds(
    lambda done, more, layers: GroupProgress(done, done + more, layers),
    st.integers(0, BLOCKS),
    st.integers(0, BLOCKS),
    st.integers(0, LAYERS),
)


def cells(rects: list[Rect]) -> list[tuple[int, int, int]]:
    return [
        (rect.group, layer, block)
        for rect in rects
        for layer, block in product(range(rect.layer_lo, rect.layer_hi), range(rect.block_lo, rect.block_hi))
    ]


def ready(progress: Progress) -> list[tuple[int, int, int]]:
    return [
        (group, layer, block)
        for group, one in enumerate(progress)
        for layer in range(LAYERS)
        for block in range(one.blocks_ahead if layer < one.layers_ahead else one.blocks_done)
    ]


def test_chunks_come_as_whole_columns() -> None:
    assert advance(nothing(1), whole([5]), [32]) == [Rect(0, 0, 32, 0, 5)]
    assert advance(whole([5]), whole([9]), [32]) == [Rect(0, 0, 32, 5, 9)]


def test_layers_come_one_by_one_within_a_chunk() -> None:
    first, second, last = (GroupProgress(2, 4, 1),), (GroupProgress(2, 4, 3),), whole([4])
    assert advance(whole([2]), first, [4]) == [Rect(0, 0, 1, 2, 4)]
    assert advance(first, second, [4]) == [Rect(0, 1, 3, 2, 4)]
    assert advance(second, last, [4]) == [Rect(0, 3, 4, 2, 4)]


def test_a_step_over_a_chunk_s_end_gives_one_rectangle_per_height() -> None:
    old, new = (GroupProgress(2, 4, 2),), (GroupProgress(4, 6, 1),)
    assert advance(old, new, [4]) == [Rect(0, 0, 1, 4, 6), Rect(0, 2, 4, 2, 4)]


def test_neighbours_of_the_same_height_are_one_rectangle() -> None:
    assert advance((GroupProgress(2, 2, 1),), whole([3]), [4]) == [Rect(0, 0, 4, 2, 3)]


def test_groups_advance_independently() -> None:
    assert advance(whole([1, 1]), whole([1, 3]), [4, 2]) == [Rect(1, 0, 2, 1, 3)]


@settings(deadline=None, derandomize=True, max_examples=300)
@given(st.lists(st.tuples(steps, steps), max_size=6))
def test_the_rectangles_tile_exactly_what_became_ready_or_going_back_is_refused(history: list[Progress]) -> None:
    old, told = nothing(2), []
    for new in history:
        if set(ready(old)) <= set(ready(new)):
            told += cells(advance(old, new, [LAYERS, LAYERS]))
            old = new
        else:
            with pytest.raises(ProtocolError, match="goes back") as error:
                advance(old, new, [LAYERS, LAYERS])
            assert error.value.reason is Reason.BAD_MESSAGE
    assert sorted(told) == ready(old)  # sorted lists, so twice would show


@pytest.mark.parametrize(
    ("new", "field"),
    [
        ((), "progress: 0 groups"),
        ((GroupProgress(), GroupProgress()), "progress: 2 groups"),
        ((GroupProgress(-1),), "progress[0].blocks"),
        ((GroupProgress(1 << 32),), "progress[0].blocks"),
        ((GroupProgress(0, 1 << 32, 1),), "progress[0].blocks"),
        ((GroupProgress(0, 1, 5),), "progress[0].layers_ahead: 5"),
        ((GroupProgress(0, 1, -1),), "progress[0].layers_ahead: -1"),
        ((GroupProgress(3, 2, 1),), "progress[0].blocks_ahead: 2 is behind"),
    ],
)
def test_nonsense_from_a_peer_is_refused_by_field(new: Progress, field: str) -> None:
    with pytest.raises(ProtocolError) as error:
        advance(nothing(1), new, [4])
    assert error.value.reason is Reason.BAD_MESSAGE
    assert error.value.detail.startswith(field)


def test_a_rectangle_can_be_cut_by_blocks() -> None:
    assert Rect(1, 0, 3, 2, 7).cut(2) == [Rect(1, 0, 3, 2, 4), Rect(1, 0, 3, 4, 6), Rect(1, 0, 3, 6, 7)]
    assert Rect(1, 0, 3, 2, 2).cut(2) == []


@settings(deadline=None, derandomize=True)
@given(st.lists(st.tuples(steps), min_size=1, max_size=4))
def test_the_slowest_never_promises_more_than_every_rank(ranks: list[Progress]) -> None:
    common = set.intersection(*(set(ready(rank)) for rank in ranks))
    assert set(ready(slowest(ranks))) <= common


@settings(deadline=None, derandomize=True)
@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, LAYERS)), min_size=1, max_size=4))
def test_the_slowest_is_exact_for_ranks_that_go_through_the_same_chunks(at: list[tuple[int, int]]) -> None:
    chunks = [0, 2, 3, 5, 6]
    ranks = [(GroupProgress(chunks[chunk], chunks[chunk + 1], layers),) for chunk, layers in at]
    common = set.intersection(*(set(ready(rank)) for rank in ranks))
    assert set(ready(slowest(ranks))) == common


def test_progress_survives_the_wire_and_is_bounded() -> None:
    progress = (GroupProgress(1, 2, 3), GroupProgress(4))
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(progress), type=Progress) == progress
    with pytest.raises(msgspec.ValidationError):
        msgspec.msgpack.decode(msgspec.msgpack.encode(nothing(65)), type=Progress)


STEPS = [GroupProgress(*numbers) for numbers in product(range(3), range(3), range(LAYERS + 1))]
SANE = [step for step in STEPS if step.blocks_ahead >= step.blocks_done or not step.layers_ahead]


class TestReadiness:
    """Rule 10: readiness is counted in whole blocks per group and layer, and old news are told from new ones."""

    def test_complete_means_every_layer_of_every_block(self) -> None:
        assert complete(whole([2, 3]), [2, 3])
        assert complete(whole([2, 4]), [2, 3])
        assert not complete(whole([2, 2]), [2, 3])
        assert not complete((GroupProgress(1, 2, LAYERS - 1),), [2])

    def test_covers_is_having_at_least_as_much_of_every_layer(self) -> None:
        for new, old in product(SANE, SANE):
            expected = all(new.ready(layer) >= old.ready(layer) for layer in range(LAYERS + 1))
            assert covers((new,), (old,)) is expected, (new, old)

    def test_one_group_behind_is_behind(self) -> None:
        assert not covers((GroupProgress(3), GroupProgress(1)), (GroupProgress(2), GroupProgress(2)))
