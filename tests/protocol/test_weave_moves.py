"""Moves in product form: what the planner weaves, and who is handed a weave."""

from __future__ import annotations

from array import array

from kvbaton.protocol.capabilities import Capabilities
from kvbaton.protocol.desk import Desk, Identity, Parts
from kvbaton.protocol.effects import Direction, StartCopy
from kvbaton.protocol.geometry import plan
from kvbaton.protocol.ids import Incarnation, PeerId, WorkerId
from kvbaton.protocol.layout import Cell, EngineLayout, Group, Kind, Rank, Share, places, planes
from kvbaton.protocol.progress import Rect
from kvbaton.protocol.settings import Settings
from kvbaton.protocol.spans import BlockLists, Move, Side, segments
from kvbaton.protocol.weave import Weave

BLOCKS, PAGE, LAYERS, TOKENS = 8, 64, 3, 4
PEER = PeerId(WorkerId("p"), Incarnation(1))


def layout() -> EngineLayout:
    cell = Cell("kv", PAGE // TOKENS)
    group = Group("full", Kind.FULL, TOKENS, tuple(map(str, range(LAYERS))), 1, (cell,), "bytes")
    cells = places(range(LAYERS), 0, BLOCKS * PAGE, PAGE)
    share = Share(0, 1, BLOCKS, cells, planes("PHN", (cell,), 1, TOKENS))
    return EngineLayout((group,), (Rank(0, 0, 0, (LAYERS * BLOCKS * PAGE,), (share,)),))


def desk(weaves: bool) -> Desk:
    plane = Capabilities("x", True, False, False, True, True, weaves=weaves)
    return Desk(Identity(PEER, "host", {}, layout(), (plane,), ()), Settings(), lambda blocks: [0] * len(blocks))


def test_scattered_blocks_of_several_layers_are_one_weave_of_blocks_by_layers() -> None:
    (move,) = segments(
        plan(layout(), layout()), Side.TARGET, 0, Rect(0, 0, LAYERS, 0, 3), BlockLists([1, 5, 2], [7, 3, 4], 3 * TOKENS)
    )
    assert move.weave is not None and not move.flat
    assert (len(move.weave.column) // 3, len(move.weave.shifts) // 2) == (3, LAYERS)
    assert move.bytes == sum(move.spans[2::3]) == 3 * LAYERS * PAGE


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
