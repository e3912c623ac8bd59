"""The one module that calls CUDA: through the driver API, which comes with every NVIDIA driver.

Law: only `CudaError` leaves. Calls act on the device's primary context, the one that PyTorch uses too; a thread makes
it current by `enter` (our own threads) or temporarily by `with gpu:` (others' threads). No call here busy-waits: events
are created for blocking waits. ctypes releases the GIL during every call except those that only enqueue work on a
stream (`_tell`): they take microseconds, and getting the GIL back from a busy thread takes up to 5 ms.

All kernels of this process on one device run one after the other, whichever transport launched them on whichever
stream, and none has more than its `share` of the multiprocessors: an engine's own kernels have all the others. There is
no stream with a lower priority than the default, which engines use, so priorities do not help here. Every call here is
allowed while another thread captures a CUDA graph, and does not disturb it.

Device events in a form that the gate can wait for asleep.

Law: a CUDA event is never waited for by its own `synchronize`, which busy-waits on a whole core unless it was created
for blocking waits. A stream waits for it, and we sleep until our own event after it is done.
"""

from __future__ import annotations

import ctypes
import logging
import threading
from functools import cached_property
from importlib import resources
from typing import Any, Protocol

from kvbaton.transports.core.transport import DeviceEvent


def quiet_event(event: DeviceEvent, gpu: Gpu) -> DeviceEvent:
    """`event` itself, unless it has a handle of CUDA (as `torch.cuda.Event` has)."""
    handle = getattr(event, "cuda_event", None)
    return event if handle is None else _Quiet(int(handle), event, gpu)


class _Quiet:
    def __init__(self, handle: int, event: DeviceEvent, gpu: Gpu) -> None:
        self._handle = handle
        self._kept = event  # its owner may drop it, and with it the handle
        self._gpu = gpu

    def synchronize(self) -> None:
        if not self._handle:  # created but never recorded: nothing to wait for
            return
        with self._gpu as gpu:
            stream, ours = gpu.stream(), gpu.event()
            try:
                gpu.stream_wait(stream, self._handle)
                gpu.record(ours, stream)
                gpu.wait(ours)
            finally:
                gpu.drop_event(ours)
                gpu.drop_stream(stream)


log = logging.getLogger(__name__)

LIBRARY = "libcuda.so.1"
HANDLE_BYTES = 64
KERNELS = "cuda_move.ptx"  # a file of this package: `cuda_move.cu`, compiled
MOVE, DIGEST = b"kvbaton_move", b"kvbaton_digest"
THREADS = 1024  # of a block, as the kernels are written
SHARE = 1.0
"""Of a device's multiprocessors, for all copies and digests of a process together, one bounded launch at a time.
`bench.device_share` measures what a copy loses by less, and what others lose by more: on an H200 a decode step beside
copies takes 1.011 of its time with all of them, and 1.043 with a quarter, whose copies last longer."""

_RELAXED = 2  # CU_STREAM_CAPTURE_MODE_RELAXED: for this thread's calls, not for others' captures
_MULTIPROCESSORS = 16  # CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT
_BLOCKING, _NO_TIMING = 1, 2
_NON_BLOCKING = 1
_TABLE_BYTES = 64 << 10  # that a copy takes without waiting, whatever memory it is from
_PORTABLE, _MAPPED = 1, 2
_LAZY_PEER_ACCESS = 1
_IPC_SUPPORTED = 125  # CU_DEVICE_ATTRIBUTE_IPC_EVENT_SUPPORTED, which tells whether a device has IPC at all
_PASSING = frozenset({1, 2, 201, 205, 206, 208, 217, 600, 712, 801, 803})
"""Refusals of one call: invalid value, out of memory, handle or mapping refused, not supported. All others stay."""


class CudaError(Exception):
    """A call that CUDA refused. `sticky`: this process can no longer use the device."""

    def __init__(self, call: str, status: int, name: str) -> None:
        super().__init__(f"CUDA: {call}: {name}")
        self.status = status
        self.sticky = status not in _PASSING


class Gpu(Protocol):
    """What the transports need from a device. Addresses, streams and events are plain integers."""

    device: int
    blocks: int
    """Of a grid, at most: each takes a multiprocessor."""
    uuid: str
    """The same in every process of the host, whatever is visible there and in which order."""

    def reaches(self, uuid: str) -> bool | None:
        """Whether this device can read that one's memory; None where it is not visible here, so it cannot be
        determined."""

    def __enter__(self) -> Gpu: ...
    def __exit__(self, *_: object) -> None: ...
    def enter(self) -> None:
        """Make the device current in the calling thread, permanently."""

    def allocate(self, nbytes: int) -> int: ...
    def free(self, address: int) -> None: ...
    def clear(self, address: int, nbytes: int) -> None:
        """Zeroes, in place of what an earlier owner left there."""

    def allocate_pinned(self, nbytes: int) -> int: ...
    def free_pinned(self, address: int) -> None: ...
    def pin(self, address: int, nbytes: int) -> None:
        """Give the device access to host memory that other code has mapped."""

    def unpin(self, address: int) -> None: ...
    def allocation_of(self, address: int) -> tuple[int, int]:
        """The address and size of the allocation around `address`."""

    def export(self, base: int) -> bytes:
        """A handle by which another process of this host can open an allocation."""

    def open(self, handle: bytes) -> int: ...
    def close(self, address: int) -> None: ...
    def stream(self) -> int:
        """One that waits for no other, not even for the default stream."""

    def drop_stream(self, stream: int) -> None: ...
    def event(self) -> int: ...
    def drop_event(self, event: int) -> None: ...
    def record(self, event: int, stream: int) -> None: ...
    def wait(self, event: int) -> None:
        """Sleep until the recorded work is done."""

    def stream_wait(self, stream: int, event: int) -> None: ...
    def copy(self, target: int, source: int, nbytes: int, stream: int) -> None:
        """One contiguous copy, between any two kinds of memory that the device reaches."""

    def move_rows(self, table: int, groups: int, rows: range, stream: int) -> None:
        """One launch over a table that the device reaches, as `cuda_table` writes it: these of all groups' rows."""

    def digest_rows(self, table: int, groups: int, rows: range, stream: int) -> None:
        """As `move_rows`; but each row's digest is written, 8 bytes, to its target (`checksum_device`)."""


class _CopyLane:
    """The kernels of this process on one device: each waits, on the device, for the one before."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.last = 0  # the event of the latest; re-recording it does not move those that wait already
        self.stream = 0  # of the latest: later work on it waits anyway


_lanes: dict[int, _CopyLane] = {}
_lanes_lock = threading.Lock()


class _Handle(ctypes.Structure):
    _fields_ = (("reserved", ctypes.c_ubyte * HANDLE_BYTES),)


class CudaGpu:
    """A real device, by its number among those that are visible."""

    def __init__(self, device: int, share: float = SHARE, ptx: str = "") -> None:
        """ImportError without a driver, CudaError without such a device. `ptx`: other kernels than this package's."""
        check_share(share)
        self._cuda = load()
        self.device = device
        self._ask("cuInit", 0)
        number, context = ctypes.c_int(), ctypes.c_void_p()
        self._ask("cuDeviceGet", ctypes.byref(number), device)
        self._ask("cuDevicePrimaryCtxRetain", ctypes.byref(context), number)
        self._context = context
        self._number = number
        self.uuid = self._uuid(number.value)
        self._modes = threading.local()  # of others' threads, while they are here
        count = ctypes.c_int()
        self._ask("cuDeviceGetAttribute", ctypes.byref(count), _MULTIPROCESSORS, number)
        self.multiprocessors = count.value
        self.blocks = max(1, round(share * count.value))
        log.info(
            "device %d: copies and digests take at most %d of %d multiprocessors", device, self.blocks, count.value
        )
        self._functions: dict[bytes, ctypes.c_void_p] = {}
        with _lanes_lock:
            self._lane = _lanes.setdefault(device, _CopyLane())
        with self:
            module = ctypes.c_void_p()
            self._ask("cuModuleLoadData", ctypes.byref(module), (ptx or kernels()).encode())
            for entry in (MOVE, DIGEST):
                function = self._functions[entry] = ctypes.c_void_p()
                self._ask("cuModuleGetFunction", ctypes.byref(function), module, entry)

    def reaches(self, uuid: str) -> bool | None:
        if uuid == self.uuid:
            return True
        number, can = ctypes.c_int(), ctypes.c_int()
        for device in range(self._count()):
            self._ask("cuDeviceGet", ctypes.byref(number), device)
            if self._uuid(number.value) == uuid:
                self._ask("cuDeviceCanAccessPeer", ctypes.byref(can), self._number, number)
                return bool(can.value)
        return None

    def __enter__(self) -> CudaGpu:
        self._tell("cuCtxPushCurrent_v2", self._context)
        self._modes.__dict__.setdefault("held", []).append(self._exchange_mode(_RELAXED))
        return self

    def __exit__(self, *_: object) -> None:
        self._exchange_mode(self._modes.held.pop())
        self._tell("cuCtxPopCurrent_v2", ctypes.byref(ctypes.c_void_p()))

    def enter(self) -> None:
        self._ask("cuCtxSetCurrent", self._context)
        self._exchange_mode(_RELAXED)

    def _exchange_mode(self, mode: int) -> int:
        """Sets how this thread's calls interact with captures of others; returns the previous mode."""
        value = ctypes.c_int(mode)
        self._tell("cuThreadExchangeStreamCaptureMode", ctypes.byref(value))
        return value.value

    def allocate(self, nbytes: int) -> int:
        return self._make("cuMemAlloc_v2", ctypes.c_size_t(nbytes))

    def free(self, address: int) -> None:
        self._ask("cuMemFree_v2", ctypes.c_uint64(address))

    def clear(self, address: int, nbytes: int) -> None:
        self._ask("cuMemsetD8_v2", ctypes.c_uint64(address), ctypes.c_ubyte(0), ctypes.c_size_t(nbytes))

    def allocate_pinned(self, nbytes: int) -> int:
        return self._make("cuMemHostAlloc", ctypes.c_size_t(nbytes), _PORTABLE | _MAPPED)

    def free_pinned(self, address: int) -> None:
        self._ask("cuMemFreeHost", ctypes.c_void_p(address))

    def pin(self, address: int, nbytes: int) -> None:
        self._ask("cuMemHostRegister_v2", ctypes.c_void_p(address), ctypes.c_size_t(nbytes), _PORTABLE | _MAPPED)

    def unpin(self, address: int) -> None:
        self._ask("cuMemHostUnregister", ctypes.c_void_p(address))

    def allocation_of(self, address: int) -> tuple[int, int]:
        base, size = ctypes.c_uint64(), ctypes.c_size_t()
        self._ask("cuMemGetAddressRange_v2", ctypes.byref(base), ctypes.byref(size), ctypes.c_uint64(address))
        return base.value, size.value

    def export(self, base: int) -> bytes:
        handle = _Handle()
        self._ask("cuIpcGetMemHandle", ctypes.byref(handle), ctypes.c_uint64(base))
        return bytes(handle.reserved)

    def open(self, handle: bytes) -> int:
        return self._make("cuIpcOpenMemHandle_v2", _Handle.from_buffer_copy(handle), _LAZY_PEER_ACCESS)

    def close(self, address: int) -> None:
        self._ask("cuIpcCloseMemHandle", ctypes.c_uint64(address))

    def stream(self) -> int:
        return self._make("cuStreamCreate", _NON_BLOCKING)

    def drop_stream(self, stream: int) -> None:
        with self._lane.lock:
            if stream == self._lane.stream:
                self._lane.stream = 0  # its handle may be reused
        self._ask("cuStreamDestroy_v2", ctypes.c_void_p(stream))

    def event(self) -> int:
        return self._make("cuEventCreate", _BLOCKING | _NO_TIMING)

    def drop_event(self, event: int) -> None:
        self._ask("cuEventDestroy_v2", ctypes.c_void_p(event))

    def record(self, event: int, stream: int) -> None:
        self._tell("cuEventRecord", ctypes.c_void_p(event), ctypes.c_void_p(stream))

    @cached_property
    def _brief(self) -> ctypes.CDLL:
        """The same library, called without releasing the GIL."""
        real = isinstance(self._cuda, ctypes.CDLL)
        return ctypes.PyDLL(LIBRARY, handle=self._cuda._handle) if real else self._cuda

    def wait(self, event: int) -> None:
        self._ask("cuEventSynchronize", ctypes.c_void_p(event))

    def stream_wait(self, stream: int, event: int) -> None:
        self._tell("cuStreamWaitEvent", ctypes.c_void_p(stream), ctypes.c_void_p(event), 0)

    def copy(self, target: int, source: int, nbytes: int, stream: int) -> None:
        call = self._tell if nbytes <= _TABLE_BYTES else self._ask
        size = ctypes.c_size_t(nbytes)
        call("cuMemcpyAsync", ctypes.c_uint64(target), ctypes.c_uint64(source), size, ctypes.c_void_p(stream))

    def move_rows(self, table: int, groups: int, rows: range, stream: int) -> None:
        self._launch(MOVE, table, groups, rows, stream)

    def digest_rows(self, table: int, groups: int, rows: range, stream: int) -> None:
        self._launch(DIGEST, table, groups, rows, stream)

    def _launch(self, entry: bytes, table: int, groups: int, rows: range, stream: int) -> None:
        values = ctypes.c_uint64(table), ctypes.c_int(groups), ctypes.c_uint(rows.start), ctypes.c_uint(rows.stop)
        arguments = (ctypes.c_void_p * len(values))(*(ctypes.addressof(value) for value in values))
        shape = (min(self.blocks, len(rows)), 1, 1, THREADS, 1, 1, 0)
        with self._lane.lock:
            if not self._lane.last:
                self._lane.last = self.event()
            if stream != self._lane.stream:
                self.stream_wait(stream, self._lane.last)
            self._lane.stream = 0  # unknown if the launch fails
            self._tell("cuLaunchKernel", self._functions[entry], *shape, ctypes.c_void_p(stream), arguments, None)
            self.record(self._lane.last, stream)
            self._lane.stream = stream

    def _count(self) -> int:
        count = ctypes.c_int()
        self._ask("cuDeviceGetCount", ctypes.byref(count))
        return count.value

    def _uuid(self, number: int) -> str:
        found = (ctypes.c_ubyte * 16)()
        self._ask("cuDeviceGetUuid_v2", found, number)
        return bytes(found).hex()

    def _make(self, call: str, *arguments: Any) -> int:
        """Calls that give something back through their first argument."""
        made = ctypes.c_uint64()
        self._ask(call, ctypes.byref(made), *arguments)
        return made.value

    def _ask(self, call: str, *arguments: Any) -> None:
        """Every call goes through here, or through `_tell`."""
        _ask(self._cuda, call, *arguments)

    def _tell(self, call: str, *arguments: Any) -> None:
        """A call that waits for nothing: with the GIL held."""
        _check(self._cuda, call, getattr(self._brief, call)(*arguments))


class CudaHost:
    """The visible devices, queried without using any of them."""

    def __init__(self) -> None:
        """ImportError without a driver, CudaError without a device."""
        self._cuda = load()
        _ask(self._cuda, "cuInit", 0)
        self.count = self._int("cuDeviceGetCount")
        self._numbers = [self._int("cuDeviceGet", index) for index in range(self.count)]

    def name(self, device: int) -> str:
        text = ctypes.create_string_buffer(128)
        _ask(self._cuda, "cuDeviceGetName", text, len(text), self._numbers[device])
        return text.value.decode(errors="replace")

    def shares(self, device: int) -> bool:
        """Whether other processes can open its memory."""
        return bool(self._int("cuDeviceGetAttribute", _IPC_SUPPORTED, self._numbers[device]))

    def reaches(self, device: int, other: int) -> bool:
        return bool(self._int("cuDeviceCanAccessPeer", self._numbers[device], self._numbers[other]))

    def _int(self, call: str, *arguments: int) -> int:
        found = ctypes.c_int()
        _ask(self._cuda, call, ctypes.byref(found), *arguments)
        return found.value


def _ask(cuda: ctypes.CDLL, call: str, *arguments: Any) -> None:
    """Errors are translated here."""
    _check(cuda, call, getattr(cuda, call)(*arguments))


def _check(cuda: ctypes.CDLL, call: str, status: int) -> None:
    if status:
        name = ctypes.c_char_p()
        cuda.cuGetErrorName(status, ctypes.byref(name))
        raise CudaError(call, status, (name.value or b"?").decode())


def check_share(share: float) -> None:
    """ValueError unless it is a share of a device."""
    if not 0 < share <= 1:
        raise ValueError(f"share: got {share}, expected above 0 and at most 1: a part of the device's multiprocessors")


def kernels() -> str:
    """The kernels as PTX, which the driver translates for its device: read where there is one, not when imported."""
    return (resources.files(__package__) / KERNELS).read_text()


def load() -> ctypes.CDLL:
    """The driver's library; ImportError says what is missing."""
    try:
        return ctypes.CDLL(LIBRARY)
    except OSError as error:
        raise ImportError(
            f"the transports 'cuda' and 'staged' require an NVIDIA driver with {LIBRARY} on this host: {error}"
        ) from None
