"""Memory that another process of this host can map: an anonymous memfd, unlinked from birth.

Law: nothing is left behind, however the process dies; the pages live as long as some process maps them. A region can
neither grow nor shrink (sealed), so a peer that maps it can never be killed by SIGBUS, and once `seal_writes` was
called no process can gain a new writable mapping: readers can only read. Memory allocated by other code becomes such a
region by `adopt`, in place.

How private memory of this process becomes shared in place: the steps of `shared_memory.adopt`.

Law: after `remap` every byte of the extent is what it was, at the same address, and a write through any old pointer is
visible in every mapping of the memfd. Only whole pages can be shared, so the extent is the pages that the buffer
touches: other data in the first and the last of them (malloc's header) is kept, works as before, and can be read by
peers.

Adoptable: ordinary anonymous memory that is private, readable and writable. A large malloc (from 32 MiB on always,
glibc's greatest threshold) has its pages to itself, and `free` unmaps them, shared or not. Refused: files, stacks, the
brk heap (it shrinks and grows over the same pages, which would then be beyond the memfd: SIGBUS), and memory that is
shared already, so nothing is adopted twice and two buffers on one page are adopted together or not at all.

Hazards, which cannot be checked here and the caller must rule out:
 - *Other threads.* Writes to these pages between copy and remap are lost. Adopt before the buffer is in use.
 - *Pins.* A device or NIC that had the pages registered keeps the old ones. Adopt before any such registration.
 - *fork.* A child shares the memory from then on, instead of getting a copy at its first write.
 - *realloc* moves the mapping and grows it beyond the memfd: SIGBUS. Never resize an adopted buffer.
 - *Allocators that keep freed pages* (jemalloc, tcmalloc, thread arenas) rely on MADV_DONTNEED for zeros, and a shared
   page keeps its bytes. Free an adopted buffer only with glibc's malloc, or never.
 - *Huge pages.* Those of private memory are lost; the memfd gets its own only where shmem_enabled allows it.

Device memory as transports know it: its address and size.

Law: the owner keeps memory allocated until the transports that use it are closed. Nothing here touches it.

The identity of this host, from its kernel. Law: the same for processes that can reach each other locally, and for no
others: one boot, and one namespace of it where the local path requires that. Without a boot id a process is on its own
host.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import functools
import mmap
import os
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import cast

import msgspec


class DeviceMemory(msgspec.Struct, frozen=True):
    """A stretch of one device's memory: of a tensor `t`, `DeviceMemory(t.data_ptr(), t.nbytes, t.device.index)`."""

    address: int
    nbytes: int
    device: int = 0

    def __post_init__(self) -> None:
        if self.address <= 0 or self.nbytes < 1 or self.device < 0 or self.address + self.nbytes > 1 << 63:
            raise ValueError(f"{self}: expected an address above 0, at least one byte and a device from 0 on")


def mapped_bytes_of(transport: object) -> int:
    """Device memory of other processes that a transport has mapped; 0 for one that maps none (the attribute is
    optional)."""
    return max(int(getattr(transport, "mapped_bytes", 0)), 0)


class RegisteredDevice:
    """The memory that a transport may touch, by region number: all of one device."""

    def __init__(self, device: int) -> None:
        self._device = device
        self._regions: dict[int, DeviceMemory] = {}

    def add(self, region: int, memory: DeviceMemory) -> None:
        """ValueError for memory of another kind or device, or a number that is out of range or taken."""
        if not isinstance(memory, DeviceMemory):
            raise ValueError(f"region {region}: got a {type(memory).__name__}, expected a DeviceMemory")
        if memory.device != self._device:
            raise ValueError(f"region {region}: memory of device {memory.device}, this transport has {self._device}")
        if not 0 <= region < REGIONS_MAX or region in self._regions:
            raise ValueError(f"region {region} is taken, or not one of 0..{REGIONS_MAX - 1}")
        self._regions[region] = memory

    def get(self, region: int) -> DeviceMemory | None:
        return self._regions.get(region)

    def items(self) -> list[tuple[int, DeviceMemory]]:
        return list(self._regions.items())

    def clear(self) -> None:
        self._regions.clear()


PIECE_BYTES = 64 << 10
"""Compared with zeros, and copied or left out, at once."""

_MAP_FIXED = 0x10
_MAP_FAILED = ctypes.c_void_p(-1).value
_PYBUF_WRITE = 0x200
_MAPPED_OR_SWAPPED = 0b11 << 62  # pagemap: present in memory, or swapped out
_ENTRY_BYTES = 8

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_libc.memcmp.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]
_view_from = ctypes.pythonapi.PyMemoryView_FromMemory
_view_from.restype = ctypes.py_object
_view_from.argtypes = [ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int]


class Mapping(msgspec.Struct, frozen=True):
    """One line of /proc/self/maps."""

    start: int
    stop: int
    access: str
    inode: int
    name: str

    def objection(self) -> str:
        """Why its pages cannot be adopted, or nothing."""
        if self.access[3] != "p":
            return f"it is already shared ({self.name or 'anonymous'})"
        if self.access[:2] != "rw":
            return f"it is mapped {self.access}, not read-write"
        if self.inode or (self.name and not self.name.startswith("[anon")):
            return f"it belongs to {self.name}, it is not anonymous memory"
        return ""


def extent_of(address: int, size_bytes: int) -> range:
    """The whole pages that hold the buffer; ValueError when they cannot be adopted."""
    if size_bytes < mmap.PAGESIZE:
        raise ValueError(f"{size_bytes} bytes cannot be adopted: at least a page, {mmap.PAGESIZE} bytes, is required")
    start = address // mmap.PAGESIZE * mmap.PAGESIZE
    stop = -(-(address + size_bytes) // mmap.PAGESIZE) * mmap.PAGESIZE
    at = start
    for found in mappings():
        if found.stop <= at or at >= stop:
            continue
        if found.start > at:
            break
        objection = found.objection()
        if objection:
            raise ValueError(f"memory at {at:#x} cannot be adopted: {objection}")
        at = found.stop
    if at < stop:
        raise ValueError(f"memory at {at:#x} cannot be adopted: nothing is mapped there")
    return range(start, stop)


def mappings() -> Iterator[Mapping]:
    """All of this process, by address."""
    with open("/proc/self/maps") as lines:
        for line in lines:
            place, access, _offset, _device, inode, *name = line.split(maxsplit=5)
            start, stop = (int(number, 16) for number in place.split("-"))
            yield Mapping(start, stop, access, int(inode), name[0].strip() if name else "")


def fill(fd: int, extent: range) -> None:
    """Copy the extent's contents into the memfd, except pieces that are all zero: a memfd starts as zeros."""
    zeros = ctypes.create_string_buffer(PIECE_BYTES)
    for run in touched(extent):
        for start in range(run.start, run.stop, PIECE_BYTES):
            size = min(PIECE_BYTES, run.stop - start)
            if _libc.memcmp(start, zeros, size):
                _write(fd, view_of(start, size), start - extent.start)


def touched(extent: range) -> Iterator[range]:
    """Which pages the kernel holds for this memory. The rest reads as zeros, and is not even read."""
    import numpy as np  # a tenth of a second, in processes that adopt nothing

    first, count = extent.start // mmap.PAGESIZE, len(extent) // mmap.PAGESIZE
    try:
        with open("/proc/self/pagemap", "rb", buffering=0) as pagemap:
            entries = os.pread(pagemap.fileno(), count * _ENTRY_BYTES, first * _ENTRY_BYTES)
    except OSError:  # hidden in this container: read everything
        entries = b""
    if len(entries) != count * _ENTRY_BYTES:
        yield extent
        return
    held = (np.frombuffer(entries, np.uint64) & np.uint64(_MAPPED_OR_SWAPPED)) != 0
    edges = np.flatnonzero(np.diff(held, prepend=False, append=False)) * mmap.PAGESIZE + extent.start
    for start, stop in edges.reshape(-1, 2).tolist():
        yield range(start, stop)


def remap(fd: int, extent: range) -> None:
    """Put the memfd's pages where the private ones are, in one step of the kernel."""
    access, flags = mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED | _MAP_FIXED
    if _libc.mmap(extent.start, len(extent), access, flags, fd, 0) == _MAP_FAILED:
        code = ctypes.get_errno()
        raise OSError(code, f"the pages at {extent.start:#x} could not be replaced: {os.strerror(code)}")
    _libc.madvise(extent.start, len(extent), mmap.MADV_HUGEPAGE)  # a hint


def view_of(address: int, size_bytes: int) -> memoryview:
    """A writable view of memory that another object keeps alive."""
    return cast(memoryview, _view_from(address, size_bytes, _PYBUF_WRITE))


def _write(fd: int, piece: memoryview, offset: int) -> None:
    while piece:
        done = os.pwrite(fd, piece, offset)
        piece, offset = piece[done:], offset + done


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
        self.view = view_of(address, size_bytes)
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
    extent = extent_of(address, size_bytes)
    fd = _sealed(len(extent), 0)
    try:
        fill(fd, extent)
        remap(fd, extent)
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


_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


@functools.cache
def boot_id() -> str:
    """Processes that may share memory with us: the same kernel."""
    return _BOOT_ID.read_text().strip() if _BOOT_ID.exists() else secrets.token_hex(16)


def host_identity(namespace: str = "net") -> str:
    """One boot, one namespace: `net` for abstract sockets, `pid` for process ids."""
    return f"{boot_id()}/{os.stat(f'/proc/self/ns/{namespace}').st_ino}"
