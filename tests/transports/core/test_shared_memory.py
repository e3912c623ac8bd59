"""A region leaves nothing behind, cannot shrink, and once sealed cannot be mapped for writing by anyone."""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator

import numpy as np
import pytest

from kvbaton.transports.core.shared_memory import REGIONS_MAX, Region, RegisteredMemory, allocate, region_of


@pytest.fixture
def region() -> Iterator[Region]:
    region = allocate(10_000)
    yield region
    region.close()


def test_a_region_is_zeroed_and_as_large_as_was_asked(region: Region) -> None:
    assert bytes(region.view) == bytes(10_000)
    region.view[-1] = 7
    assert os.pread(region.fd, 1, 9_999) == b"\7"


def test_a_region_has_no_name_in_the_file_system(region: Region) -> None:
    assert os.fstat(region.fd).st_nlink == 0


def test_a_region_needs_a_size() -> None:
    with pytest.raises(ValueError, match="at least one byte"):
        allocate(0)


def test_a_region_can_neither_grow_nor_shrink(region: Region) -> None:
    for size in (0, 1 << 20):
        with pytest.raises(PermissionError):
            os.ftruncate(region.fd, size)


def test_a_sealed_region_is_written_only_by_those_who_mapped_it_before(region: Region) -> None:
    region.seal_writes()
    region.seal_writes()
    region.view[0] = 1
    for flags in (os.O_RDWR, os.O_RDONLY):
        other = os.open(f"/proc/self/fd/{region.fd}", flags)
        with pytest.raises(PermissionError):
            mmap.mmap(other, 0, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
        with mmap.mmap(other, 0, mmap.MAP_SHARED, mmap.PROT_READ) as reading:
            assert reading[0] == 1
        os.close(other)
    with pytest.raises(PermissionError):
        os.pwrite(region.fd, b"x", 0)


def test_the_region_behind_any_view_of_it_is_found(region: Region) -> None:
    other = allocate(10_000)
    assert region_of(region.view) == (region, 0)
    assert region_of(region.view[100:200]) == (region, 100)
    assert region_of(np.frombuffer(region.view, np.float32)[25:].data) == (region, 100)
    assert region_of(other.view[1:]) == (other, 1)
    other.close()
    assert region_of(memoryview(bytearray(10_000))) is None


def test_closing_twice_and_under_a_view_is_harmless() -> None:
    region = allocate(10_000)
    view = region.view[:10]
    fd = region.fd
    region.close()
    region.close()
    view[0] = 5
    assert view[0] == 5
    with pytest.raises(OSError):
        os.fstat(fd)
    assert region_of(view) is None


def test_huge_pages_are_taken_where_there_are_some_and_not_missed_elsewhere() -> None:
    region = allocate(10_000, hugetlb=True)
    assert region.page_bytes in {mmap.PAGESIZE, 2 << 20}
    region.view[-1] = 1
    region.close()


def test_memory_that_cannot_be_shared_is_refused_by_name() -> None:
    registered = RegisteredMemory()
    with pytest.raises(ValueError, match="writable"):
        registered.add(3, memoryview(b"read-only"))
    with pytest.raises(ValueError, match="contiguous"):
        registered.add(3, memoryview(bytearray(10))[::2])
    registered.add(3, memoryview(bytearray(10)))
    for taken_or_out_of_range in (3, -1, REGIONS_MAX):
        with pytest.raises(ValueError, match="is taken, or not one of"):
            registered.add(taken_or_out_of_range, memoryview(bytearray(10)))
    assert registered.sizes() == {3: 10}
