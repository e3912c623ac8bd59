"""Spans in product form mean what their long form says."""

from __future__ import annotations

from array import array

from kvbaton.protocol.geometry.spans import Weave


def test_a_weave_is_every_row_at_every_shift() -> None:
    weave = Weave(array("q", (1, 2, 3, 10, 20, 30)), array("q", (0, 0, 100, 1000)))
    assert weave.flat() == array("q", (1, 2, 3, 10, 20, 30, 101, 1002, 3, 110, 1020, 30))
    assert (weave.rows, weave.bytes) == (4, 66)


def test_a_weave_without_shifts_or_rows_is_nothing() -> None:
    for weave in (Weave(array("q", (1, 2, 3)), array("q")), Weave(array("q"), array("q", (1, 2)))):
        assert (weave.flat(), weave.rows, weave.bytes) == (array("q"), 0, 0)


def test_large_offsets_do_not_run_into_their_neighbours() -> None:
    high = (1 << 62) - 1
    weave = Weave(array("q", (high, high, high)), array("q", (1, 1, high, high)))
    assert weave.flat() == array("q", (high + 1, high + 1, high, 2 * high, 2 * high, high))
