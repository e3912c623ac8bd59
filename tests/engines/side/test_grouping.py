"""An engine's block tables as the protocol's lists."""

from __future__ import annotations

import pytest

from kvbaton.engines.side.protocols import Grouping, real
from kvbaton.protocol.geometry.layout import Cell, EngineLayout, Group, GroupKind


def grouping() -> Grouping:
    groups = (
        Group("0.full", GroupKind.FULL, 16, ("a",), 1, (Cell("kv", 8),), "float32"),
        Group("1.sliding", GroupKind.SLIDING, 8, ("b",), 1, (Cell("kv", 8),), "float32", window=16),
    )
    return Grouping(EngineLayout(groups, ()), (0, 1))


def test_tables_are_cut_per_group_and_null_blocks_are_never_touched() -> None:
    found = grouping()
    assert (found.needed(17), found.whole(17), found.slides) == ((2, 3), (1, 0), True)
    cut = found.cut([[5, 6, 9], [0, 7, 8]], (0, 0), found.needed(17))
    assert cut == ((5, 6), (-1, 7, 8)) and real(cut) == (5, 6, 7, 8)
    with pytest.raises(ValueError, match="group 1: 1 blocks in the table, 3 needed"):
        found.cut([[5, 6], [7]], (0, 0), (2, 3))
