"""What is missing of what was due: few rows are compared by lists, many by arrays, to the same end."""

from __future__ import annotations

from array import array

from hypothesis import given
from hypothesis import strategies as st

from kvbaton.protocol.geometry.spans import Area
from kvbaton.transports.core import loans

ROWS = st.lists(st.tuples(st.integers(0, 60), st.integers(1, 9)), max_size=6)
SHIFTS = st.lists(st.integers(0, 40), min_size=1, max_size=4)
PIECES = st.lists(st.lists(st.tuples(st.integers(0, 100), st.integers(0, 30)), max_size=5), max_size=4)


def flat(pairs: list[tuple[int, int]]) -> array[int]:
    return array("q", [number for pair in pairs for number in pair])


@given(ROWS, SHIFTS, PIECES)
def test_lists_and_arrays_miss_the_same(
    rows: list[tuple[int, int]], shifts: list[int], pieces: list[list[tuple[int, int]]]
) -> None:
    area, record = Area(0, flat(rows), array("q", shifts)), [flat(each) for each in pieces]
    landed = {byte for piece in pieces for start, size in piece for byte in range(start, start + size)}
    due = [(start + shift, size) for shift in shifts for start, size in rows]
    missing = sum(size for start, size in due if not landed.issuperset(range(start, start + size)))
    assert loans._missing_few(area, record) == loans._missing(area, loans.runs_of(record)) == missing
    whole = loans.WriteRecord([area])
    for each in record:
        whole.add(0, each)
    assert whole.missing_bytes() == missing
