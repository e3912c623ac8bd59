"""Turns at an engine: a request that comes never waits for blocks that idle turns keep."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from kvbaton.engines.side.protocols import Grouping
from kvbaton.engines.side.turns import TurnSide
from kvbaton.node.doorway import Doorway
from kvbaton.protocol.geometry.layout import Cell, EngineLayout, Group, GroupKind
from tests.node.test_doorway import door
from tests.node.test_turn_keeping import BLOCKS, ON, keep, let_go, name


def turns_of(engine: Doorway, free_blocks: int) -> TurnSide:
    group = Group("full", GroupKind.FULL, 16, ("a",), 1, (Cell("kv", 8),), "float32")
    unused: Any = None
    pool: Any = SimpleNamespace(free_blocks=free_blocks)
    grouping = Grouping(EngineLayout((group,), ()), (0,))
    return TurnSide(engine, pool, grouping, unused, unused, ON, blocks_total=BLOCKS, takes=True)


def test_cached_blocks_that_nobody_holds_are_needed_like_new_ones() -> None:
    engine = door()
    side = turns_of(engine, free_blocks=14)
    keep(side.keeper, 1, 4)
    let_go(engine)
    side.match(SimpleNamespace(request_id="a", num_tokens=11 * 16), 8 * 16)
    assert let_go(engine) == [name(1)], "of 14 free blocks it takes 11: 8 that it hits and 3 new ones; 8 are kept free"
