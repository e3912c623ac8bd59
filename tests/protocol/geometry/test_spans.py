"""Promise 1: the bytes that reach the target are this prompt's, each in its place. Against a brute-force oracle."""

from __future__ import annotations

import time
from array import array
from collections.abc import Sequence
from itertools import product
from typing import NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from layout_builders import (
    Memory,
    block_tokens,
    cells_at,
    engine,
    even,
    group,
    memory,
    stamp,
)

from kvbaton.protocol.errors import ProtocolError, Reason
from kvbaton.protocol.geometry import spans as spans_module
from kvbaton.protocol.geometry.layout import NULL_BLOCK, Cell, EngineLayout, GroupKind, Per, needed_blocks
from kvbaton.protocol.geometry.plan import plan
from kvbaton.protocol.geometry.progress import GroupProgress, Rect, advance, nothing, whole
from kvbaton.protocol.geometry.spans import BlockLists, Move, SpanSide, blocks_per_call, segments

TOKENS_MAX = 11
BLOCKS = 2 * TOKENS_MAX  # two groups of one token per block


class Case(NamedTuple):
    source: EngineLayout
    target: EngineLayout
    lists: list[BlockLists]  # per group of the source
    rects: list[Rect]


# --- the oracle


def is_inside(layout: EngineLayout, rank: int, region: int, offsets: array[int], sizes: array[int]) -> bool:
    whole = layout.ranks[rank].region_bytes[region]
    return all(0 <= at < at + size <= whole for at, size in zip(offsets, sizes, strict=True))


def carry_out(case: Case, side: SpanSide, join: bool = True) -> Memory:
    """Apply what `side`'s ranks would copy to memories in which every byte is known; nothing may land twice."""
    made = plan(case.source, case.target)
    from_memory, to_memory = memory(case.source, "s"), memory(case.target, "t")
    for index, lists in enumerate(case.lists):
        stamp(case.source, from_memory, index, lists.source)
    local = case.target if side is SpanSide.TARGET else case.source
    remote = case.source if side is SpanSide.TARGET else case.target
    for rect, rank in product(case.rects, range(len(local.ranks))):
        for move in segments(made, side, rank, rect, case.lists[rect.group], join):
            assert is_inside(local, rank, move.local_region, move.spans[0::3], move.spans[2::3])
            assert is_inside(remote, move.peer_rank, move.remote_region, move.spans[1::3], move.spans[2::3])
            here, there = (rank, move.local_region), (move.peer_rank, move.remote_region)
            for near, far, size in triples(move):
                if side is SpanSide.TARGET:
                    copy(from_memory[there], far, to_memory[here], near, size)
                else:
                    copy(from_memory[here], near, to_memory[there], far, size)
    return to_memory


def copy(source: list[object], at: int, target: list[object], to: int, size: int) -> None:
    for i in range(size):
        assert target[to + i][0] == "t", "a byte of the target was written twice"  # type: ignore[index]
        target[to + i] = source[at + i]


def expectation(case: Case) -> Memory:
    """What the target must hold afterwards, cell by cell from the law in layout.py."""
    to_memory = memory(case.target, "t")
    for index, lists in enumerate(case.lists):
        here, there = case.source.groups[index], plan(case.source, case.target).target_groups[index]
        if there is None:
            continue
        far, near = block_tokens(here), block_tokens(case.target.groups[there])
        state = here.kind is GroupKind.STATE
        tokens = len(lists.source) if state else lists.tokens
        first = 0 if state else lists.target_first_token
        for rank, (position, block) in product(range(len(case.target.ranks)), enumerate(lists.target)):
            start = first + position * near
            if block == NULL_BLOCK or start >= tokens:
                continue
            for region, at, what, token in cells_at(case.target, rank, there, block):
                moved = start + max(token, 0)
                if lists.source[min(moved, tokens - 1) // far] == NULL_BLOCK:
                    continue
                if moved < tokens or far == near:
                    told = moved if token >= 0 else -1 - start // near
                    to_memory[rank, region][at] = (*what, told)
    return to_memory


def triples(move: Move) -> list[tuple[int, int, int]]:
    return list(zip(move.spans[0::3], move.spans[1::3], move.spans[2::3], strict=True))


# --- random engines


@st.composite
def tensor_parallel(draw: st.DrawFn, heads: int, ranks: int) -> list[tuple[int, int]]:
    """Any slices that cover the heads: even, uneven, replicated or overlapping."""
    if draw(st.booleans()):
        return list(even(heads, ranks))
    slices = [(0, heads)]
    for _ in range(ranks - 1):
        start = draw(st.integers(0, heads - 1))
        slices.append((start, draw(st.integers(1, heads - start))))
    return draw(st.permutations(slices))


@st.composite
def cases(draw: st.DrawFn) -> Case:
    dcp = draw(st.sampled_from([1, 1, 1, 2]))
    per = draw(st.sampled_from([Per.TOKEN, Per.TOKEN, Per.TOKEN, Per.HEAD, Per.PAGE]))
    kinds = draw(
        st.lists(
            st.sampled_from([GroupKind.FULL, GroupKind.SLIDING, GroupKind.CHUNKED, GroupKind.STATE]),
            min_size=1,
            max_size=2,
        )
    )
    cells = [Cell(f"c{i}", draw(st.integers(1, 3)), per) for i in range(draw(st.integers(1, 2)))]
    heads = [draw(st.integers(1, 4)) for _ in kinds]
    layers = [[f"g{g}.{i}" for i in range(draw(st.integers(1, 3)))] for g in range(len(kinds))]
    windows = [draw(st.integers(1, 9)) if kind in (GroupKind.SLIDING, GroupKind.CHUNKED) else 0 for kind in kinds]
    sizes = [draw(st.integers(1, 4)) * dcp for _ in kinds]
    opaque_slices = [even(count, 2) for count in heads]
    sides = []
    for _ in range(2):
        other = per is Per.TOKEN and dcp == 1
        groups = [
            group(
                f"g{g}",
                kind=kind,
                layers=draw(st.permutations(layers[g])),
                heads=heads[g],
                cells=cells,
                window=windows[g],
                block_tokens=draw(st.integers(1, 4)) if other else sizes[g],
            )
            for g, kind in enumerate(kinds)
        ]
        ranks = draw(st.integers(1, 4))
        slices = opaque_slices if per is Per.PAGE else [draw(tensor_parallel(count, ranks)) for count in heads]
        names = [name for one in layers for name in one]
        cut = draw(st.integers(0, len(names)))
        arrangements = ["LB", "BL"]
        if per is Per.TOKEN and len(cells) == len(kinds) == 1:
            arrangements.append("LHB")
        sides.append(
            engine(
                *groups,
                tp=slices,
                stages=[stage for stage in (names[:cut], names[cut:]) if stage],
                order=draw(st.sampled_from(["HNP", "NHP", "PHN", "PNH", "HPN", "NPH"])),
                arrangement=draw(st.sampled_from(arrangements)),
                pad=draw(st.integers(0, 2)),
                blocks=BLOCKS,
                regions=draw(st.integers(1, 2)),
                dcp=dcp,
            )
        )
    source, target = sides
    tokens = draw(st.integers(1, TOKENS_MAX))
    lists = draw(block_lists(source, target, tokens))
    return Case(source, target, lists, draw(rectangles(source, lists)))


@st.composite
def block_lists(draw: st.DrawFn, source: EngineLayout, target: EngineLayout, tokens: int) -> list[BlockLists]:
    """Ids never shared between groups of a side, since groups overlay; what no window reads may be dropped."""
    ids = [iter(draw(st.permutations(range(BLOCKS)))) if draw(st.booleans()) else iter(range(BLOCKS)) for _ in range(2)]
    lists = []
    for here, there in zip(source.groups, target.groups, strict=True):
        far, near = block_tokens(here), block_tokens(there)
        first = draw(st.integers(0, tokens // near)) * near
        counts = (needed_blocks(tokens, far), needed_blocks(tokens - first, near))
        if here.kind is GroupKind.STATE:
            first, counts = 0, (1, 1)
        source_ids = [next(ids[0]) for _ in range(counts[0])]
        target_ids = [next(ids[1]) if draw(st.integers(0, 9)) else NULL_BLOCK for _ in range(counts[1])]
        for index in range(counts[0]):
            if here.kind is not GroupKind.STATE and min((index + 1) * far, tokens) <= here.needed_from(tokens):
                source_ids[index] = NULL_BLOCK if draw(st.booleans()) else source_ids[index]
        lists.append(BlockLists(source_ids, target_ids, tokens, first))
    return lists


@st.composite
def rectangles(draw: st.DrawFn, source: EngineLayout, lists: Sequence[BlockLists]) -> list[Rect]:
    """The rectangles of a stream: chunks and layers in any rhythm, up to everything."""
    counts = [len(one.source) for one in lists]
    layer_counts = [len(one.layers) for one in source.groups]
    old, rects = nothing(len(counts)), []
    for _ in range(draw(st.integers(0, 3))):
        new = []
        for before, count, layers in zip(old, counts, layer_counts, strict=True):
            done = draw(st.integers(before.ready(0), count))
            new.append(GroupProgress(done, draw(st.integers(done, count)), draw(st.integers(0, layers))))
        rects += advance(old, tuple(new), layer_counts)
        old = tuple(new)
    return rects + advance(old, whole(counts), layer_counts)


@settings(deadline=None, derandomize=True, max_examples=300)
@given(cases())
def test_every_cell_of_the_target_gets_the_sources_and_nothing_else_changes(case: Case) -> None:
    expected = expectation(case)
    assert carry_out(case, SpanSide.TARGET) == expected
    assert carry_out(case, SpanSide.SOURCE) == expected
    assert carry_out(case, SpanSide.TARGET, join=False) == expected
    assert carry_out(case, SpanSide.SOURCE, join=False) == expected


# --- named examples. A page of the default group: 4 heads x 4 tokens x 2 bytes = 32 bytes, 8 blocks, 2 layers.


def pull(source: EngineLayout, target: EngineLayout, rect: Rect, lists: BlockLists, rank: int = 0) -> list[Move]:
    return segments(plan(source, target), SpanSide.TARGET, rank, rect, lists)


def test_neighbouring_blocks_become_one_span() -> None:
    same = engine(group())
    (move,) = pull(same, same, Rect(0, 0, 2, 0, 4), BlockLists([1, 2, 5, 6], [3, 4, 5, 0], 16))
    assert triples(move) == [
        (96, 32, 64),  # blocks 1, 2 -> 3, 4
        (160, 160, 32),  # 5 -> 5
        (0, 192, 32),  # 6 -> 0: a neighbour on one side only
        (352, 288, 64),
        (416, 416, 32),
        (256, 448, 32),
    ]
    assert move.bytes == 256


def test_padding_is_not_moved_and_parts_neighbours() -> None:
    padded = engine(group(layers=1), pad=8)
    (move,) = pull(padded, padded, Rect(0, 0, 1, 0, 2), BlockLists([1, 2], [3, 4], 8))
    assert triples(move) == [(120, 40, 32), (160, 80, 32)]


def test_with_blocks_first_all_layers_of_a_block_are_one_span() -> None:
    same = engine(group(), arrangement="BL")
    (move,) = pull(same, same, Rect(0, 0, 2, 0, 2), BlockLists([1, 4], [2, 3], 8))
    assert triples(move) == [(128, 64, 64), (192, 256, 64)]
    (move,) = pull(same, same, Rect(0, 1, 2, 0, 1), BlockLists([1, 4], [2, 3], 8))
    assert triples(move) == [(160, 96, 32)]


def test_push_is_pull_seen_from_the_other_side() -> None:
    source, target = engine(group(), tp=2), engine(group())
    rect, lists = Rect(0, 0, 2, 0, 2), BlockLists([1, 4], [2, 3], 8)
    pulled = pull(source, target, rect, lists)
    assert [move.peer_rank for move in pulled] == [0, 1]
    for rank, move in enumerate(pulled):
        (pushed,) = segments(plan(source, target), SpanSide.SOURCE, rank, rect, lists)
        assert pushed.peer_rank == 0
        assert sorted(triples(pushed)) == sorted((far, near, size) for near, far, size in triples(move))


def test_a_head_slice_of_a_token_major_page_is_one_run_per_token() -> None:
    source, target = engine(group(layers=1), order="NHP"), engine(group(layers=1), order="NHP", tp=2)
    (move,) = pull(source, target, Rect(0, 0, 1, 0, 1), BlockLists([0], [0], 4), rank=1)
    assert triples(move) == [(0, 4, 4), (4, 12, 4), (8, 20, 4), (12, 28, 4)]


def test_k_and_v_described_apart_but_lying_together_move_as_one() -> None:
    same = engine(group(layers=1, cells=(Cell("k", 2), Cell("v", 2))), order="HNP")
    (move,) = pull(same, same, Rect(0, 0, 1, 0, 1), BlockLists([3], [0], 4))
    assert triples(move) == [(0, 3 * 64, 64)]


def test_what_the_target_has_cached_is_not_copied() -> None:
    same = engine(group(layers=1))
    lists = BlockLists([1, 2, 3], [6], 12, target_first_token=8)
    (move,) = pull(same, same, Rect(0, 0, 1, 0, 3), lists)
    assert triples(move) == [(192, 96, 32)]
    assert pull(same, same, Rect(0, 0, 1, 0, 2), lists) == []


def test_the_last_partial_block_moves_as_a_whole_page() -> None:
    same = engine(group(layers=1))
    (move,) = pull(same, same, Rect(0, 0, 1, 0, 2), BlockLists([1, 2], [1, 2], 5))
    assert move.bytes == 64


def test_blocks_past_the_handed_over_position_stay_behind() -> None:
    same = engine(group(layers=1))
    (move,) = pull(same, same, Rect(0, 0, 1, 0, 3), BlockLists([1, 2, 3], [1], 4))
    assert move.bytes == 32


def test_with_other_block_sizes_exactly_the_tokens_move() -> None:
    source, target = engine(group(layers=1, heads=1)), engine(group(layers=1, heads=1, block_tokens=8))
    (move,) = pull(source, target, Rect(0, 0, 1, 0, 3), BlockLists([1, 2, 5], [0, 1], 11))
    assert triples(move) == [(0, 8, 16), (16, 40, 6)]  # blocks 1, 2 are neighbours and fill block 0


def test_regions_that_differ_are_separate_moves() -> None:
    source, target = engine(group(), regions=2), engine(group())
    moves = pull(source, target, Rect(0, 0, 2, 0, 1), BlockLists([1], [1], 4))
    assert [(move.local_region, move.remote_region) for move in moves] == [(0, 0), (0, 1)]
    moves = segments(plan(target, source), SpanSide.SOURCE, 0, Rect(0, 0, 2, 0, 1), BlockLists([1], [1], 4))
    assert [(move.local_region, move.remote_region) for move in moves] == [(0, 0), (0, 1)]


def test_a_rank_with_nothing_to_do_has_no_moves() -> None:
    latent = group(kind=GroupKind.LATENT, heads=1)
    source, target = engine(latent, tp=2), engine(latent)
    assert segments(plan(source, target), SpanSide.SOURCE, 1, Rect(0, 0, 2, 0, 1), BlockLists([1], [1], 4)) == []


def test_a_group_that_the_target_lacks_is_passed_over() -> None:
    source, target = engine(group("draft", optional=True), group()), engine(group())
    assert pull(source, target, Rect(0, 0, 2, 0, 1), BlockLists([1], [], 4)) == []


def test_an_empty_rectangle_moves_nothing() -> None:
    same = engine(group())
    assert pull(same, same, Rect(0, 1, 1, 0, 1), BlockLists([1], [1], 4)) == []
    assert pull(same, same, Rect(0, 0, 2, 1, 1), BlockLists([1], [1], 4)) == []


def test_a_state_goes_block_by_block_whatever_the_tokens() -> None:
    state = group("state", kind=GroupKind.STATE, layers=1, cells=(Cell("h", 8, Per.PAGE),), block_tokens=512)
    same = engine(state)
    (move,) = pull(same, same, Rect(0, 0, 1, 0, 1), BlockLists([5], [2], 7, target_first_token=4))
    assert triples(move) == [(64, 160, 32)]
    (move,) = pull(same, same, Rect(0, 0, 1, 1, 2), BlockLists([5, 6], [2, 3], 7, target_first_token=4))
    assert triples(move) == [(96, 192, 32)], "also the second of them, far before its number of tokens"


def test_blocks_that_left_the_window_are_skipped() -> None:
    same = engine(group(kind=GroupKind.SLIDING, window=5, layers=1))
    (move,) = pull(same, same, Rect(0, 0, 1, 0, 4), BlockLists([-1, -1, 2, 3], [-1, 5, 6, -1], 16))
    assert triples(move) == [(192, 64, 32)]


def test_where_every_block_has_left_the_window_nothing_moves() -> None:
    same = engine(group(kind=GroupKind.SLIDING, window=5, layers=1))
    assert pull(same, same, Rect(0, 0, 1, 0, 2), BlockLists([-1, -1, 2, 3], [-1, -1, 6, 7], 16)) == []


@pytest.mark.parametrize(
    ("how", "source", "tokens"),
    [
        ({}, [1, NULL_BLOCK, 2], 12),
        ({"kind": GroupKind.SLIDING, "window": 6}, [NULL_BLOCK, NULL_BLOCK, 2], 12),  # needs tokens 7..11
        ({"kind": GroupKind.CHUNKED, "window": 8}, [1, 2, NULL_BLOCK], 12),
    ],
)
@pytest.mark.parametrize("target_size", [4, 8])
def test_a_needed_block_that_the_source_dropped_is_an_error_not_a_gap(
    how: dict[str, object], source: list[int], tokens: int, target_size: int
) -> None:
    one = group(layers=1, **how)  # type: ignore[arg-type]
    other = group(layers=1, block_tokens=target_size, **how)  # type: ignore[arg-type]
    with pytest.raises(ProtocolError, match="is needed but was dropped") as error:
        pull(engine(one), engine(other), Rect(0, 0, 1, 0, 3), BlockLists(source, [1, 2, 3], tokens))
    assert error.value.reason is Reason.BAD_SPAN


@pytest.mark.parametrize(
    ("rect", "lists", "detail"),
    [
        (Rect(1, 0, 2, 0, 1), BlockLists([1], [1], 4), "group 1 does not exist"),
        (Rect(-1, 0, 2, 0, 1), BlockLists([1], [1], 4), "group -1 does not exist"),
        (Rect(0, 0, 3, 0, 1), BlockLists([1], [1], 4), "layers [0, 3) do not exist"),
        (Rect(0, 2, 1, 0, 1), BlockLists([1], [1], 4), "layers [2, 1) do not exist"),
        (Rect(0, 0, 2, 2, 1), BlockLists([1], [1], 4), "blocks [2, 1) do not exist"),
        (Rect(0, 0, 2, 0, 2), BlockLists([1], [1, 2], 8), "source: 1 blocks of group 'full' end before token 7"),
        (Rect(0, 0, 2, 0, 2), BlockLists([1, 2], [1], 8), "target: 1 blocks of group 'full' end before token 7"),
        (Rect(0, 0, 2, 0, 1), BlockLists([8], [1], 4), "source: blocks 8..8 are not all within 0..7"),
        (Rect(0, 0, 2, 0, 1), BlockLists([1], [-2], 4), "target: blocks -2..-2 are not all within 0..7"),
        (
            Rect(0, 0, 2, 0, 1),
            BlockLists([1], [1], 8, 3),
            "target_first_token: 3 is not a multiple of the target's block_tokens 4",
        ),
        (
            Rect(0, 0, 2, 0, 1),
            BlockLists([1], [1], 8, -4),
            "target_first_token: -4 is not a multiple of the target's block_tokens 4",
        ),
    ],
)
def test_lists_that_do_not_hold_the_rectangle_are_refused(rect: Rect, lists: BlockLists, detail: str) -> None:
    same = engine(group())
    with pytest.raises(ProtocolError) as error:
        pull(same, same, rect, lists)
    assert error.value.reason is Reason.BAD_SPAN
    assert error.value.detail == detail


def test_a_rectangle_of_too_many_spans_must_be_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spans_module, "SPANS_MAX", 6)
    same, rect, lists = engine(group()), Rect(0, 0, 2, 0, 4), BlockLists([1, 3, 5, 7], [1, 2, 3, 4], 16)
    with pytest.raises(ProtocolError, match="rectangle: 4 blocks may make more than 6 spans; cut it"):
        pull(same, same, rect, lists)
    pieces = rect.cut(blocks_per_call(plan(same, same), SpanSide.TARGET, 0, rect))
    assert [one.block_hi - one.block_lo for one in pieces] == [3, 1]
    assert sum(move.bytes for one in pieces for move in pull(same, same, one, lists)) == 256


def test_a_rank_that_takes_no_part_may_ask_for_any_number_of_blocks() -> None:
    same = engine(group())
    assert blocks_per_call(plan(same, same), SpanSide.TARGET, 7, Rect(0, 0, 2, 0, 4)) == spans_module.SPANS_MAX


def test_a_thousand_scattered_blocks_of_64_layers_take_milliseconds() -> None:
    same = engine(group(layers=64, heads=8, block_tokens=16), blocks=4096)
    lists = BlockLists([7 * i % 4093 for i in range(1000)], [11 * i % 4093 for i in range(1000)], 16_000)
    mapped, took = plan(same, same), []
    for _ in range(5):
        began = time.perf_counter()
        (move,) = segments(mapped, SpanSide.TARGET, 0, Rect(0, 0, 64, 0, 1000), lists)
        took.append(time.perf_counter() - began)
    assert len(move.spans) == 3 * 64_000
    assert min(took) < 0.1  # 6 ms on one core of an Arm server; the slack is for a busy test machine
