"""Memory that another process of this host can map: an anonymous memfd, unlinked from birth.

Law: nothing is left behind, however the process dies; the pages live as long as some process maps them. A region can
neither grow nor shrink (sealed), so a peer that maps it can never be killed by SIGBUS, and once `seal_writes` was
called no process can gain a new writable mapping: readers can only read. Memory allocated by other code becomes such a
region by `adopt`, in place.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import mmap
import os

from kvbaton.transports.core import adoption

HUGE_PAGE_BYTES = 2 << 20
REGIONS_MAX = 256  # one per layer and tensor, of a large model

_SIZE_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW
F_SEAL_FUTURE_WRITE = 0x10  # not named by Python 3.11; Linux 5.1

_live: list[Region] = []  # strong references: a view alone would not keep its region findable


class Region:
    """A mapped memfd. `view` is its memory. It lives until it is closed, after the transports that registered it."""

    def __init__(self, fd: int, size_bytes: int, page_bytes: int) -> None:
        self.fd = fd
        self.page_bytes = page_bytes
        self._map = mmap.mmap(fd, 0, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
        self.view = memoryview(self._map)[:size_bytes]
        self._address = _address(self.view)  # of the first byte behind `fd`
        self._extent_bytes = len(self._map)
        _live.append(self)

    def offset_of(self, memory: memoryview) -> int | None:
        """The offset of `memory` in `fd`, or None when it is not wholly inside."""
        if self.fd < 0 or not memory.nbytes:
            return None
        offset = _address(memory) - self._address
        return offset if 0 <= offset <= self._extent_bytes - memory.nbytes else None

    def seal_writes(self) -> None:
        """From now on only existing mappings can write. Cannot be undone."""
        fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, F_SEAL_FUTURE_WRITE)

    def close(self) -> None:
        """Release the memory once no view of it is left. Idempotent."""
        if self.fd < 0:
            return
        _live.remove(self)
        os.close(self.fd)
        self.fd = -1
        with contextlib.suppress(BufferError):  # a slice is still referenced: the last one unmaps
            self.view.release()
            self._map.close()


class AdoptedRegion(Region):
    """Memory of another owner, now behind a memfd. Closing it unmaps nothing: the owner does, by freeing it."""

    def __init__(self, fd: int, address: int, size_bytes: int, extent: range) -> None:
        self.fd = fd
        self.page_bytes = mmap.PAGESIZE
        self.view = adoption.view_of(address, size_bytes)
        self._address = extent.start
        self._extent_bytes = len(extent)
        _live.append(self)

    def overlaps(self, extent: range) -> bool:
        return self._address < extent.stop and extent.start < self._address + self._extent_bytes

    def close(self) -> None:
        """Stop sharing it with new peers; the owner continues as before. Idempotent."""
        if self.fd >= 0:
            _live.remove(self)
            os.close(self.fd)
            self.fd = -1


def allocate(size_bytes: int, *, hugetlb: bool = False) -> Region:
    """A zeroed region of `size_bytes` (the memory behind it is rounded up to whole pages).

    `hugetlb` uses the pool of 2 MiB pages that an operator set aside (about +20 % at 4 and 16 KiB blocks,
    reference/transports.md 1.1) and falls back to ordinary pages when it is too small; `page_bytes` says which.
    """
    if size_bytes < 1:
        raise ValueError(f"a region needs at least one byte, got {size_bytes}")
    if hugetlb:
        with contextlib.suppress(OSError):
            return _create(size_bytes, os.MFD_HUGETLB, HUGE_PAGE_BYTES)
    region = _create(size_bytes, 0, mmap.PAGESIZE)
    with contextlib.suppress(OSError):  # a hint: no effect where shmem_enabled is "never"
        region._map.madvise(mmap.MADV_HUGEPAGE)
    return region


def adopt(address: int, size_bytes: int) -> Region:
    """Make the memory at `address` shareable where it is: same address, same contents, pages now of a memfd.

    For buffers that another library allocated (a tensor's storage). Contents are copied once, except pages that were
    never touched or contain only zeros, which stay uncommitted. ValueError says why memory cannot be adopted. The law
    and the hazards are in `adoption`: in short, before anything else uses the memory, and once.
    """
    extent = adoption.extent_of(address, size_bytes)
    fd = _sealed(len(extent), 0)
    try:
        adoption.fill(fd, extent)
        adoption.remap(fd, extent)
        _forget_adopted(extent)
        return AdoptedRegion(fd, address, size_bytes, extent)
    except BaseException:
        os.close(fd)
        raise


def _forget_adopted(extent: range) -> None:
    """Memory adopted here before was freed by its owner, who does not report it: its memfd must not be given out
    now."""
    for region in tuple(_live):
        if isinstance(region, AdoptedRegion) and region.overlaps(extent):
            region.close()


def region_of(memory: memoryview) -> tuple[Region, int] | None:
    """The live region that backs `memory` and the offset in it; None for memory of any other kind."""
    for region in tuple(_live):
        offset = region.offset_of(memory)
        if offset is not None:
            return region, offset
    return None


def _create(size_bytes: int, flags: int, page_bytes: int) -> Region:
    fd = _sealed(-(-size_bytes // page_bytes) * page_bytes, flags)
    try:
        return Region(fd, size_bytes, page_bytes)
    except BaseException:
        os.close(fd)
        raise


def _sealed(size_bytes: int, flags: int) -> int:
    """A memfd of whole pages that can neither grow nor shrink."""
    fd = os.memfd_create("kvbaton", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING | flags)
    try:
        os.ftruncate(fd, size_bytes)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SIZE_SEALS)
    except BaseException:
        os.close(fd)
        raise
    return fd


def _address(memory: memoryview) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))


class RegisteredMemory:
    """The memory that a transport may touch, by region number."""

    def __init__(self) -> None:
        self._regions: dict[int, memoryview] = {}

    def add(self, region: int, memory: memoryview) -> None:
        """ValueError for memory that cannot be shared, or a number that is out of range or taken."""
        if memory.readonly or not memory.c_contiguous:
            raise ValueError(f"region {region}: memory must be writable and C-contiguous")
        if not 0 <= region < REGIONS_MAX or region in self._regions:
            raise ValueError(f"region {region} is taken, or not one of 0..{REGIONS_MAX - 1}")
        self._regions[region] = memory.cast("B")

    def get(self, region: int) -> memoryview | None:
        return self._regions.get(region)

    def sizes(self) -> dict[int, int]:
        return {region: memory.nbytes for region, memory in self._regions.items()}

    def clear(self) -> None:
        self._regions.clear()
