"""Which bytes are compared, and how a difference is found and named."""

from __future__ import annotations

from array import array

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvbaton.protocol.geometry.spans import Weave
from kvbaton.protocol.ids import Incarnation, JobId, PeerId, WorkerId
from kvbaton.transports.checksum.checksum_memory import (
    DIGEST_BYTES,
    PART_BYTES,
    PIECE_BYTES,
    SAMPLE_EVERY,
    Checksum,
    described,
    difference,
    portions,
)
from kvbaton.transports.core.transport import Copy, Direction, Spans
from kvbaton.transports.net.stream_socket import PAYLOAD_BYTES_MAX, ROWS_MAX

PEER = PeerId(WorkerId("p#0"), Incarnation(1))


def copy_of(sizes: list[int], job: int = 1) -> Copy:
    """Segments of these sizes, one after the other here and in reverse order there."""
    spans, local, remote = array("q"), 0, sum(sizes)
    for size in sizes:
        remote -= size
        spans.extend((local, remote, size))
        local += size
    return Copy(JobId(job), PEER, Direction.READ, 0, 3, spans)


def rows(spans: Spans) -> list[tuple[int, int, int]]:
    return [(spans[at], spans[at + 1], spans[at + 2]) for at in range(0, len(spans), 3)]


def all_rows(copy: Copy, mode: Checksum) -> list[tuple[int, int, int]]:
    return [row for portion in portions(copy, mode) for row in rows(portion)]


SIZES = st.lists(st.one_of(st.integers(0, 64), st.integers(PIECE_BYTES - 1, 5 * PIECE_BYTES)), max_size=60)


@settings(deadline=None)  # a busy machine is not a failure
@given(SIZES)
def test_full_covers_every_byte_once_in_order(sizes: list[int]) -> None:
    copy = copy_of(sizes)
    near, far = 0, {}
    for local, remote, size in all_rows(copy, Checksum.FULL):
        assert local == near and 0 < size <= PIECE_BYTES
        near += size
        far[local] = remote
    assert near == sum(sizes)
    assert all(far[local] == remote for local, remote, size in rows(copy.spans) if size), "a segment begins elsewhere"


@settings(deadline=None)  # a busy machine is not a failure
@given(SIZES, st.integers(0, 1 << 62))
def test_a_sample_is_part_of_the_whole_with_both_its_ends(sizes: list[int], job: int) -> None:
    whole = all_rows(copy_of(sizes, job), Checksum.FULL)
    sample = all_rows(copy_of(sizes, job), Checksum.SAMPLE)
    assert set(sample) <= set(whole) and sample == sorted(sample)
    assert sample[:1] == whole[:1] and sample[-1:] == whole[-1:]
    assert len(sample) <= len(whole) // SAMPLE_EVERY + 3
    assert sample == all_rows(copy_of(sizes, job), Checksum.SAMPLE), "the same job looks elsewhere the second time"


@pytest.mark.parametrize("size", [16 << 10, 3 << 20], ids=["many_segments", "few_large_ones"])
def test_a_sample_is_about_a_sixteenth_of_the_bytes(size: int) -> None:
    copy = copy_of([size] * ((256 << 20) // size))
    sampled = sum(size for _, _, size in all_rows(copy, Checksum.SAMPLE))
    assert 0.9 < sampled / (256 << 20) * SAMPLE_EVERY < 1.2


def test_samples_meet_every_segment_sooner_or_later() -> None:
    """Of the 64 segments of a block, no layer is left out for long: most are met within a job, all within a few."""
    sizes = [4096] * 64 * 64
    for jobs, met in ((1, 50), (16, 64)):
        places = (at for job in range(jobs) for at, _, _ in all_rows(copy_of(sizes, job), Checksum.SAMPLE))
        assert len({(at // 4096) % 64 for at in places}) >= met
    first = copy_of([4096] * 64, 1), copy_of([4096] * 64, 2)
    assert all_rows(first[0], Checksum.SAMPLE) != all_rows(first[1], Checksum.SAMPLE)


@pytest.mark.parametrize("sizes", [[1] * 10_000, [PIECE_BYTES] * 200, [64 << 20], [7, 100 << 20, 1] * 3])
def test_questions_are_bounded_in_rows_and_bytes(sizes: list[int]) -> None:
    found = portions(copy_of(sizes), Checksum.FULL)
    for portion in found:
        assert 0 < len(portion) // 3 <= ROWS_MAX
        assert sum(portion[2::3]) < PART_BYTES + PIECE_BYTES <= PAYLOAD_BYTES_MAX
    assert len(found) <= 1 + len(sizes) // ROWS_MAX + sum(sizes) // PART_BYTES + 1


@pytest.mark.parametrize("mode", Checksum)
def test_there_is_nothing_to_compare_in_nothing(mode: Checksum) -> None:
    assert portions(copy_of([]), mode) == portions(copy_of([0, 0]), mode) == []
    assert bool(portions(copy_of([1]), mode)) is (mode is not Checksum.OFF)


def test_woven_spans_are_those_of_the_long_form() -> None:
    column, shifts = array("q", (0, 10, 5, 100, 7, 3)), array("q", (0, 0, 1000, 50, 5, 5))
    spans, weave = array("q", (7000, 8000, 9)), Weave(column, shifts)
    woven = Copy(JobId(1), PEER, Direction.READ, 0, 3, spans, weave=weave)
    assert all_rows(woven, Checksum.FULL) == rows(spans + weave.flat())
    assert described(woven, portions(woven, Checksum.FULL)[0], 3).startswith(
        "job 1: segment 3 of 7 differs: 5 bytes at 1000"
    )
    none = Copy(JobId(1), PEER, Direction.READ, 0, 3, array("q"), weave=Weave(array("q"), shifts))
    assert portions(none, Checksum.FULL) == []


def test_the_first_difference_is_found() -> None:
    ours = bytes(4 * DIGEST_BYTES)
    assert difference(ours, ours) is None
    for row in range(4):
        theirs = bytearray(ours)
        theirs[row * DIGEST_BYTES + row] ^= 1
        theirs[-1] ^= 1 << 7
        assert difference(ours, bytes(theirs)) == row
    assert difference(ours, ours[:-DIGEST_BYTES]) == 3


def test_what_differs_is_named_by_segment_and_places() -> None:
    copy = copy_of([10, 0, PIECE_BYTES + 5, 20], job=77)
    portion = portions(copy, Checksum.FULL)[0]
    assert [described(copy, portion, row).split(":")[1] for row in range(4)] == [
        " segment 0 of 4 differs",
        " segment 2 of 4 differs",
        " segment 2 of 4 differs",
        " segment 3 of 4 differs",
    ]
    told = described(copy, portion, 2)
    assert told.startswith("job 77: ")
    assert f"5 bytes at {10 + PIECE_BYTES} of region 0 here, {20 + PIECE_BYTES} of region 3 at {PEER}" in told
