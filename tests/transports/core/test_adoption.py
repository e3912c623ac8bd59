"""Adopted memory keeps its address and contents, is seen by peers as it changes, and costs only what it holds."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import subprocess
import sys
import time
from array import array
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
import pytest

from kvbaton.protocol.ids import JobId
from kvbaton.testing.transport_harness import poll
from kvbaton.transports.core import shared_memory
from kvbaton.transports.core.loans import lend_everything
from kvbaton.transports.core.shared_memory import Region, adopt, allocate, region_of
from kvbaton.transports.core.transport import Copy, CopyEnded, Direction
from kvbaton.transports.shm.shm_transport import ShmTransport
from tests.transports.tcp.blocking import D, P

SIZE = 64 << 20  # beyond glibc's greatest mmap threshold: pages of its own
PAGE = mmap.PAGESIZE
Bytes = npt.NDArray[np.uint8]


def committed(region: Region) -> int:
    return os.fstat(region.fd).st_blocks * 512


@contextlib.contextmanager
def adopted(buffer: Bytes) -> Iterator[Region]:
    region = adopt(buffer.ctypes.data, buffer.nbytes)
    try:
        yield region
    finally:
        region.close()


def test_contents_and_address_stay_and_the_malloc_header_with_them() -> None:
    buffer = np.zeros(SIZE + 12345, np.uint8)
    assert buffer.ctypes.data % PAGE, "a malloc header is in the first page"
    rng = np.random.default_rng(1)
    places = rng.integers(0, buffer.nbytes, 1000)
    buffer[places] = rng.integers(1, 256, 1000, np.uint8)
    marks = buffer[places].copy()
    header = ctypes.string_at(buffer.ctypes.data - 16, 16)
    with adopted(buffer) as region:
        assert ctypes.string_at(buffer.ctypes.data - 16, 16) == header and any(header)
        assert region.view.nbytes == buffer.nbytes and not region.view.readonly
        assert (np.frombuffer(region.view, np.uint8).ctypes.data, len(region.view)) == (
            buffer.ctypes.data,
            SIZE + 12345,
        )
        assert (buffer[places] == marks).all() and int(buffer.sum()) == int(np.frombuffer(region.view, np.uint8).sum())


def test_full_memory_is_copied_exactly() -> None:
    buffer = np.frombuffer(np.random.default_rng(2).bytes(SIZE), np.uint8).copy()
    before = buffer.tobytes()
    with adopted(buffer):
        assert buffer.tobytes() == before


def test_what_is_written_later_through_the_old_pointer_is_in_the_memfd() -> None:
    buffer = np.zeros(SIZE, np.uint8)
    with adopted(buffer) as region:
        offset = region.offset_of(region.view)
        assert offset == buffer.ctypes.data % PAGE
        buffer[1000:1003] = (1, 2, 3)
        assert os.pread(region.fd, 3, offset + 1000) == b"\1\2\3"
        os.pwrite(region.fd, b"\7", offset + SIZE - 1)
        assert buffer[-1] == 7


def test_a_slice_is_found_in_its_region_and_memory_beside_it_is_not() -> None:
    buffer, other = np.zeros(SIZE, np.uint8), np.zeros(SIZE, np.uint8)
    with adopted(buffer) as region:
        base = buffer.ctypes.data % PAGE
        assert region_of(buffer[100:200].data) == (region, base + 100)
        assert region_of(other.data) is None
    assert region_of(buffer.data) is None


def test_memory_that_holds_little_costs_little() -> None:
    """1 GiB of zeros, untouched or written as zeros: no copy, no commitment."""
    for touch in (False, True):
        buffer = np.zeros(1 << 30, np.uint8)
        if touch:
            buffer[: 256 << 20] = 0
        buffer[123_456_789] = 5
        before = time.thread_time()
        with adopted(buffer) as region:
            assert time.thread_time() - before < 0.5
            assert committed(region) <= 2 * shared_memory.PIECE_BYTES
            assert buffer[123_456_789] == 5 and buffer[0] == 0


def test_where_the_page_map_is_hidden_everything_is_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    def hidden(*_: object) -> bytes:
        raise PermissionError("hidden")

    monkeypatch.setattr(shared_memory.os, "pread", hidden)
    buffer = np.zeros(SIZE, np.uint8)
    buffer[77] = 7
    with adopted(buffer) as region:
        assert buffer[77] == 7 and committed(region) <= 2 * shared_memory.PIECE_BYTES


def test_it_can_neither_grow_nor_shrink_and_once_sealed_only_the_owner_writes() -> None:
    buffer = np.zeros(SIZE, np.uint8)
    with adopted(buffer) as region:
        for size in (0, 2 * SIZE):
            with pytest.raises(PermissionError):
                os.ftruncate(region.fd, size)
        region.seal_writes()
        buffer[0] = 1
        with pytest.raises(PermissionError):
            mmap.mmap(region.fd, 0, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)


def test_closing_leaves_the_memory_to_its_owner_who_frees_it() -> None:
    buffer = np.zeros(SIZE, np.uint8)
    region = adopt(buffer.ctypes.data, buffer.nbytes)
    buffer[:] = 3
    region.close()
    region.close()
    assert int(buffer[::4096].sum()) == 3 * len(buffer[::4096])
    address = buffer.ctypes.data // PAGE * PAGE
    assert any(found.start <= address < found.stop for found in shared_memory.mappings())
    del region, buffer
    names = [found.name for found in shared_memory.mappings() if found.start <= address < found.stop]
    assert not any("memfd:kvbaton" in name for name in names), "free() unmaps it"


def test_a_peer_reads_what_the_owner_writes_later() -> None:
    """Over shm, which shares only memfds: the peer maps it, and sees the tensor change."""
    buffer, backing = np.zeros(SIZE, np.uint8), allocate(1 << 20)
    region = adopt(buffer.ctypes.data, buffer.nbytes)
    p, d = ShmTransport(P), ShmTransport(D)
    try:
        p.register(0, region.view)
        d.register(0, backing.view)
        d.connect(P, p.endpoint(D))
        lend_everything(p, D)
        for value in (5, 6):
            buffer[SIZE - 4096 :] = value
            assert d.submit(Copy(JobId(value), P, Direction.READ, 0, 0, array("q", [0, SIZE - 4096, 4096])))
            ends: list[CopyEnded] = []
            assert poll(lambda ends=ends: bool(ends.extend(d.drain()) or ends), 20)  # type: ignore[misc]
            assert ends[0].reason is None and bytes(backing.view[:4096]) == bytes([value]) * 4096
    finally:
        p.close()
        d.close()
        region.close()
        backing.close()


SEES = """
import mmap, sys
with open(sys.argv[1], "rb") as file, mmap.mmap(file.fileno(), 0, mmap.MAP_SHARED, mmap.PROT_READ) as there:
    for line in sys.stdin:
        print(there[int(line)], flush=True)
"""


def test_another_process_sees_writes_as_they_happen() -> None:
    buffer = np.zeros(SIZE, np.uint8)
    with adopted(buffer) as region:
        base = region.offset_of(region.view)
        path = f"/proc/{os.getpid()}/fd/{region.fd}"
        with subprocess.Popen(
            [sys.executable, "-c", SEES, path], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        ) as other:
            assert other.stdin is not None and other.stdout is not None and base is not None
            for value in (1, 2, 3):
                buffer[9999] = value
                other.stdin.write(f"{base + 9999}\n")
                other.stdin.flush()
                assert int(other.stdout.readline()) == value
            other.stdin.close()


class TestRefusals:
    """What cannot be adopted is refused by reason, and left as it was."""

    def test_less_than_a_page(self) -> None:
        with pytest.raises(ValueError, match="is required"):
            adopt(np.zeros(SIZE, np.uint8).ctypes.data, PAGE - 1)

    def test_memory_that_is_shared_already(self) -> None:
        buffer = np.zeros(SIZE, np.uint8)
        with adopted(buffer), pytest.raises(ValueError, match="already shared"):
            adopt(buffer.ctypes.data, buffer.nbytes)

    def test_a_private_mapping_of_a_file(self) -> None:
        with open(sys.executable, "rb") as file:
            mapped = mmap.mmap(file.fileno(), 2 * PAGE, mmap.MAP_PRIVATE, mmap.PROT_READ | mmap.PROT_WRITE)
        with pytest.raises(ValueError, match="it is not anonymous memory"):
            adopt(np.frombuffer(mapped, np.uint8).ctypes.data, 2 * PAGE)

    @pytest.mark.parametrize("name", ["[heap]", "[stack]"])
    def test_the_heap_and_the_stack(self, name: str) -> None:
        found = next(found for found in shared_memory.mappings() if found.name == name)
        with pytest.raises(ValueError, match=name[1:-1]):
            adopt(found.stop - 2 * PAGE, PAGE)

    def test_read_only_memory(self) -> None:
        found = next(found for found in shared_memory.mappings() if found.access.startswith("r-"))
        with pytest.raises(ValueError, match="not read-write"):
            adopt(found.start, PAGE)

    def test_nothing_at_all(self) -> None:
        with pytest.raises(ValueError, match="nothing is mapped"):
            adopt(1 << 20, SIZE)

    def test_a_buffer_that_is_not_usable_to_its_end(self) -> None:
        buffer = mmap.mmap(-1, 4 * PAGE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        address = np.frombuffer(buffer, np.uint8).ctypes.data
        ctypes.CDLL(None).mprotect(ctypes.c_void_p(address + 2 * PAGE), ctypes.c_size_t(PAGE), mmap.PROT_READ)
        with pytest.raises(ValueError, match="not read-write"):
            adopt(address, 2 * PAGE + 1)
        adopt(address, 2 * PAGE).close()


def test_memory_that_was_freed_and_given_out_again_is_not_mistaken_for_what_was_there() -> None:
    """Promise 1: a peer of the new owner must never be handed the memfd of the old one."""
    elsewhere: list[mmap.mmap] = []
    while True:
        old = mmap.mmap(-1, 16 * mmap.PAGESIZE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        address = ctypes.addressof(ctypes.c_char.from_buffer(old))
        first = adopt(address, len(old))
        old[:3] = b"old"
        old.close()  # its owner frees it, and tells nobody
        new = mmap.mmap(-1, 16 * mmap.PAGESIZE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if ctypes.addressof(ctypes.c_char.from_buffer(new)) == address:
            break
        first.close()  # another thread took memory meanwhile, or gave some back: this one proves nothing
        elsewhere.append(new)
        assert len(elsewhere) < 100
    second = adopt(address, len(new))
    new[:3] = b"new"
    found = region_of(second.view)
    assert found is not None and found[0] is second and os.pread(found[0].fd, 3, 0) == b"new"
    assert first.fd == -1
    second.close()
