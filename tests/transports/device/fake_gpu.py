"""A device made of host memory: every call of `Gpu`, done at once. Its "IPC handles" name a memfd of the process.

So both device planes run, in one process or in two, where there is no GPU. What it cannot show: streams, real handles,
the kernel itself. The same harness runs on the real one: `python -m tests.transports.device.cuda_check`.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import struct
from collections.abc import Iterator

from kvbaton.transports.checksum.checksum_device import digest_of
from kvbaton.transports.core.shared_memory import Region, allocate
from kvbaton.transports.cuda.cuda_driver import HANDLE_BYTES, CudaError
from kvbaton.transports.cuda.cuda_runner import TABLE_NUMBERS_MAX

_HANDLE = struct.Struct("<qqq")


def address_of(memory: memoryview | mmap.mmap) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))


class FakeGpu:
    def __init__(self, device: int = 0) -> None:
        self.device = device
        self.blocks = 4
        self.uuid = f"{device:032x}"
        self.peers: dict[str, bool] = {self.uuid: True}  # that are visible, and whether their memory can be read
        self.refusals: dict[str, CudaError] = {}  # by name of the call
        self.calls: list[str] = []
        self.regions: dict[int, Region] = {}
        self.opened: dict[int, mmap.mmap] = {}
        self.pinned: set[int] = set()
        self._hosts: dict[int, ctypes.Array[ctypes.c_char]] = {}
        self._names = iter(range(1, 1 << 30))
        self.live: set[int] = set()  # streams and events

    def _called(self, name: str) -> None:
        self.calls.append(name)
        if name in self.refusals:
            raise self.refusals[name]

    def reaches(self, uuid: str) -> bool | None:
        self._called("reaches")
        return self.peers.get(uuid)

    def __enter__(self) -> FakeGpu:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def enter(self) -> None:
        self._called("enter")

    def allocate(self, nbytes: int) -> int:
        self._called("allocate")
        region = allocate(nbytes)
        address = address_of(region.view)
        self.regions[address] = region
        return address

    def free(self, address: int) -> None:
        self._called("free")
        self.regions.pop(address).close()

    def clear(self, address: int, nbytes: int) -> None:
        self._called("clear")
        ctypes.memset(address, 0, nbytes)

    def allocate_pinned(self, nbytes: int) -> int:
        self._called("allocate_pinned")
        held = ctypes.create_string_buffer(nbytes)
        self._hosts[ctypes.addressof(held)] = held
        return ctypes.addressof(held)

    def free_pinned(self, address: int) -> None:
        del self._hosts[address]

    def pin(self, address: int, nbytes: int) -> None:
        self._called("pin")
        self.pinned.add(address)

    def unpin(self, address: int) -> None:
        self.pinned.remove(address)

    def allocation_of(self, address: int) -> tuple[int, int]:
        self._called("allocation_of")
        for base, region in self.regions.items():
            if base <= address < base + len(region.view):
                return base, len(region.view)
        for base, mapped in self.opened.items():
            if base <= address < base + len(mapped):
                return base, len(mapped)
        raise CudaError("cuMemGetAddressRange_v2", 1, "CUDA_ERROR_INVALID_VALUE")

    def export(self, base: int) -> bytes:
        self._called("export")
        region = self.regions[base]
        return _HANDLE.pack(os.getpid(), region.fd, len(region.view)).ljust(HANDLE_BYTES, b"\0")

    def open(self, handle: bytes) -> int:
        self._called("open")
        pid, number, size = _HANDLE.unpack(handle[: _HANDLE.size])
        try:
            fd = os.open(f"/proc/{pid}/fd/{number}", os.O_RDWR | os.O_CLOEXEC)
        except OSError:
            raise CudaError("cuIpcOpenMemHandle_v2", 201, "CUDA_ERROR_INVALID_CONTEXT") from None
        mapped = mmap.mmap(fd, size)
        os.close(fd)
        self.opened[address_of(mapped)] = mapped
        return address_of(mapped)

    def close(self, address: int) -> None:
        self._called("close")
        del self.opened[address]

    def stream(self) -> int:
        self._called("stream")
        return self._name()

    def event(self) -> int:
        self._called("event")
        return self._name()

    def _name(self) -> int:
        name = next(self._names)
        self.live.add(name)
        return name

    def drop_stream(self, stream: int) -> None:
        self.live.remove(stream)

    def drop_event(self, event: int) -> None:
        self.live.remove(event)

    def record(self, event: int, stream: int) -> None:
        self._called("record")

    def wait(self, event: int) -> None:
        self._called("wait")

    def stream_wait(self, stream: int, event: int) -> None:
        self._called("stream_wait")

    def copy(self, target: int, source: int, nbytes: int, stream: int) -> None:
        self._called("copy")
        ctypes.memmove(target, source, nbytes)

    def move_rows(self, table: int, groups: int, rows: range, stream: int) -> None:
        self._called("move_rows")
        for target, source, nbytes in self._rows(table, groups, rows):
            ctypes.memmove(target, source, nbytes)

    def digest_rows(self, table: int, groups: int, rows: range, stream: int) -> None:
        self._called("digest_rows")
        for target, source, nbytes in self._rows(table, groups, rows):
            ctypes.c_uint64.from_address(target).value = digest_of(ctypes.string_at(source, nbytes))

    def _rows(self, table: int, groups: int, rows: range) -> Iterator[tuple[int, int, int]]:
        """(target, source, bytes) as the kernels find them."""
        numbers = (ctypes.c_int64 * TABLE_NUMBERS_MAX).from_address(table)
        heads = [tuple(numbers[6 * group : 6 * group + 6]) for group in range(groups)]
        for row in rows:
            first, target, source, column, count, shifts = next(head for head in reversed(heads) if head[0] <= row)
            shift, line = divmod(row - first, count)
            to, at, nbytes = numbers[column + 3 * line : column + 3 * line + 3]
            more_to, more_at = numbers[shifts + 2 * shift : shifts + 2 * shift + 2]
            yield target + to + more_to, source + at + more_at, nbytes
