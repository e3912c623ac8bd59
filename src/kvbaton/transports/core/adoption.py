"""How private memory of this process becomes shared in place: the steps of `shared_memory.adopt`.

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
"""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Iterator
from typing import cast

import msgspec

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
