"""The parts of a copy cover exactly its bytes, once, in order."""

from __future__ import annotations

from array import array

from hypothesis import given, settings
from hypothesis import strategies as st

from kvbaton.transports.core.jobs import PAIR_BYTES, cut, from_wire, size_of, to_wire
from kvbaton.transports.core.transport import Spans

TRIPLES = st.lists(st.tuples(st.integers(0, 2**40), st.integers(0, 2**40), st.integers(0, 5000)), max_size=60).map(
    lambda rows: array("q", [number for row in rows for number in row])
)


def stretches(parts: list[Spans]) -> list[tuple[int, int, int]]:
    """The parts as one list of maximal runs, so that two ways of cutting the same bytes compare equal."""
    merged: list[tuple[int, int, int]] = []
    for part in parts:
        for local, remote, size in zip(part[0::3], part[1::3], part[2::3], strict=True):
            if not size:
                continue
            if merged and (local, remote) == (merged[-1][0] + merged[-1][2], merged[-1][1] + merged[-1][2]):
                merged[-1] = (*merged[-1][:2], merged[-1][2] + size)
            else:
                merged.append((local, remote, size))
    return merged


@settings(deadline=None)  # a busy machine is not a failure
@given(TRIPLES, st.integers(1, 4), st.integers(20, 3000), st.integers(0, 20000), st.integers(1, 50))
def test_parts_cover_the_copy_exactly(spans: Spans, hands: int, low: int, more: int, rows_max: int) -> None:
    parts = list(cut(spans, size_of(spans), hands, range(low, low + more + 1), rows_max))
    assert stretches(parts) == stretches([spans])
    assert all(0 < len(part) <= 3 * rows_max and size_of(part) > 0 for part in parts)


@settings(deadline=None)  # a busy machine is not a failure
@given(TRIPLES, st.integers(1, 4), st.integers(20, 3000))
def test_no_part_is_larger_than_two_of_the_largest(spans: Spans, hands: int, largest: int) -> None:
    parts = cut(spans, size_of(spans), hands, range(20, largest + 1), 1000)
    assert all(size_of(part) <= 2 * largest for part in parts)


def test_a_large_copy_is_shared_equally() -> None:
    spans = array("q", [0, 0, 64 << 20])
    sizes = [size_of(part) for part in cut(spans, 64 << 20, 2, range(1 << 20, 16 << 20), 4096)]
    assert sizes == [16 << 20] * 4


def test_a_small_copy_stays_whole() -> None:
    spans = array("q", [0, 0, 100, 200, 200, 100])
    assert list(cut(spans, 200, 2, range(1000, 2000), 10)) == [spans]


def test_nothing_has_no_parts() -> None:
    assert not cut(array("q"), 0, 2, range(1000, 2000), 10)
    assert not cut(array("q", [5, 5, 0]), 0, 2, range(1000, 2000), 10)


@settings(deadline=None)  # a busy machine is not a failure
@given(TRIPLES)
def test_the_remote_half_survives_the_wire(spans: Spans) -> None:
    table = to_wire(spans)
    assert len(table) == PAIR_BYTES * (len(spans) // 3)
    pairs = from_wire(table)
    assert (pairs[0::2], pairs[1::2]) == (spans[1::3], spans[2::3])
