"""Moves in product form: what the planner weaves, and who is handed a weave."""

from __future__ import annotations

from array import array

import pytest

from kvbaton.protocol.effects import Capabilities, Direction, StartCopy
from kvbaton.protocol.geometry.layout import Cell, EngineLayout, Group, GroupKind, Rank, Share, places, planes
from kvbaton.protocol.geometry.plan import plan
from kvbaton.protocol.geometry.progress import Rect, nothing, whole
from kvbaton.protocol.geometry.spans import BlockLists, Move, SpanSide, Weave, segments
from kvbaton.protocol.ids import Incarnation, PeerId, WorkerId
from kvbaton.protocol.machines.context import Cargo, Identity, LedgerContext, Parts, Route, moves
from kvbaton.protocol.settings import Settings

BLOCKS, PAGE, LAYERS, TOKENS = 8, 64, 3, 4
PEER = PeerId(WorkerId("p"), Incarnation(1))


def layout(blocks_first: bool = False) -> EngineLayout:
    """Layer by layer, or all layers of a block side by side."""
    cell = Cell("kv", PAGE // TOKENS)
    group = Group("full", GroupKind.FULL, TOKENS, tuple(map(str, range(LAYERS))), 1, (cell,), "bytes")
    strides = (PAGE, LAYERS * PAGE) if blocks_first else (BLOCKS * PAGE, PAGE)
    cells = places(range(LAYERS), 0, *strides)
    share = Share(0, 1, BLOCKS, cells, planes("PHN", (cell,), 1, TOKENS))
    return EngineLayout((group,), (Rank(0, 0, 0, (LAYERS * BLOCKS * PAGE,), (share,)),))


def desk(weaves: bool) -> LedgerContext:
    plane = Capabilities("x", True, False, False, True, True, weaves=weaves)
    return LedgerContext(
        Identity(PEER, "host", {}, layout(), (plane,), ()), Settings(), lambda blocks: [0] * len(blocks)
    )


def test_scattered_blocks_of_several_layers_are_one_weave_of_blocks_by_layers() -> None:
    (move,) = segments(
        plan(layout(), layout()),
        SpanSide.TARGET,
        0,
        Rect(0, 0, LAYERS, 0, 3),
        BlockLists([1, 5, 2], [7, 3, 4], 3 * TOKENS),
    )
    assert move.weave is not None and not move.flat
    assert (len(move.weave.column) // 3, len(move.weave.shifts) // 2) == (3, LAYERS)
    assert move.bytes == sum(move.spans[2::3]) == 3 * LAYERS * PAGE


@pytest.mark.parametrize("blocks_first", [False, True])
@pytest.mark.parametrize(
    "lists", [([1, 2, 3, 4], [3, 4, 5, 6]), ([1, 2, 6, 7], [4, 5, 1, 2]), ([5, 3, 1, 2], [1, 3, 6, 4])]
)
def test_pages_side_by_side_are_one_span_or_for_a_plane_that_weaves_stay_a_product(
    lists: tuple[list[int], list[int]], blocks_first: bool
) -> None:
    """A row of many blocks would be too long for one block of a device's grid, and would have to be divided again."""
    mapped, rect = plan(layout(blocks_first), layout(blocks_first)), Rect(0, 0, LAYERS, 0, 4)
    joined, woven = (
        segments(mapped, SpanSide.TARGET, 0, rect, BlockLists(*lists, 4 * TOKENS), join) for join in (True, False)
    )
    assert [move.weave is not None and not move.flat for move in woven] == [True]
    weave = woven[0].weave
    assert weave is not None and (len(weave.column) // 3, len(weave.shifts) // 2) == (4, LAYERS)
    assert set(weave.column[2::3]) == {PAGE}
    assert cells(joined) == cells(woven)
    runs = 4 - sum(
        (b - a, d - c) == (1, 1) for a, b, c, d in zip(*(x for ids in lists for x in (ids, ids[1:])), strict=False)
    )
    assert sum(len(move.spans) // 3 for move in joined) == runs * (1 if blocks_first else LAYERS)


def cells(moves: list[Move]) -> set[tuple[int, int]]:
    """Which byte goes where."""
    spans = [span for move in moves for span in zip(*(move.spans[n::3] for n in range(3)), strict=True)]
    found = [(near + n, far + n) for near, far, size in spans for n in range(size)]
    assert len(set(found)) == len(found)
    return set(found)


def test_only_a_plane_that_weaves_is_handed_a_weave_and_every_other_the_same_spans() -> None:
    weave = Weave(array("q", (0, 8, 4)), array("q", (0, 0, 100, 200)))
    move = Move(0, 0, 0, array("q", (50, 60, 7)), weave)
    for weaves, spans, woven in ((True, move.flat, weave), (False, move.flat + weave.flat(), None)):
        here, parts = desk(weaves), Parts(None)
        here.start(parts, "x", PEER, Direction.READ, 0, [move, Move(0, 0, 0, array("q", (1, 2, 3)))])
        first, second = (effect.copy for effect in here.effects if isinstance(effect, StartCopy))
        assert (first.spans, first.weave) == (spans, woven)
        assert (second.spans, second.weave) == (array("q", (1, 2, 3)), None)
        assert [moving.bytes for moving in parts.moving.values()] == [15, 3]


@pytest.mark.parametrize("weaves", [False, True])
def test_whether_pages_are_joined_is_asked_of_the_plane(weaves: bool) -> None:
    route = Route(plan(layout(), layout()), SpanSide.TARGET, PEER, "x", weaves)
    cargo = Cargo(([1, 2, 3, 4],), ((3, 4, 5, 6),), 4 * TOKENS, 0)
    [(_, [move])] = moves(route, cargo, nothing(1), whole([4]))
    assert move.weave is not None and len(move.weave.column) // 3 == (4 if weaves else 1)
