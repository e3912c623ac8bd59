"""D's side of cuda: receives a peer's handles, queues the copies that wait for them, and opens the memory.

Laws: memory is opened and closed only by the mover, opened by the first copy that needs it and closed when the last
copy out of it has ended. A region lies wholly inside an allocation that was passed, whose size comes from the driver,
not from the peer. Memory opened here stays allocated after its owner's death, so it is closed as soon as the owner's
lifeline ends (`cuda_listener`), and when nothing has been read from it for a while; the next copy opens it again. A
stopped owner keeps its line: reading continues.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Protocol

import msgspec

from kvbaton.protocol.errors import ProtocolError, Reason
from kvbaton.protocol.ids import PeerId
from kvbaton.transports.core.jobs import CopyJob, Jobs
from kvbaton.transports.cuda.cuda_driver import HANDLE_BYTES, CudaError, Gpu
from kvbaton.transports.cuda.cuda_listener import EXPORTED, TABLE_BYTES_MAX, Allocation, CudaEndpoint, Shared
from kvbaton.transports.local.region_listener import LENGTH, LocalLink, is_empty
from kvbaton.transports.net.connection_handshake import greet
from kvbaton.transports.net.socket_loop import SocketLoop
from kvbaton.transports.net.stream_socket import Script, Wire, take

INVALID_VALUE = 1
OPEN = "cuIpcOpenMemHandle_v2"


class CudaLimits(msgspec.Struct, frozen=True):
    """On the connection to one peer."""

    dial_deadline_s: float
    idle_s: float  # how long unused memory stays open


class Mapped:
    """Bytes of other processes that are open here: their memory cannot be freed before we close it."""

    def __init__(self) -> None:
        self.nbytes = 0
        self._lock = threading.Lock()

    def add(self, nbytes: int) -> None:
        with self._lock:
            self.nbytes += nbytes


class CudaRemote:
    """The memory of one peer, as far as it is known and opened. Once shut it stays shut; see `anew`."""

    def __init__(self, shared: Shared, mapped: Mapped | None = None, is_sample: bool = False) -> None:
        """ValueError for places that lie outside their allocations. `is_sample`: of use to copies of nothing alone."""
        for place in shared.places:
            if not 0 <= place.allocation < len(shared.allocations) or place.size < 1:
                raise ValueError(f"region {place.region} is in no allocation that was passed")
            if not 0 <= place.offset <= shared.allocations[place.allocation].size - place.size:
                raise ValueError(f"region {place.region} is not inside its allocation")
        if any(len(allocation.handle) != HANDLE_BYTES for allocation in shared.allocations):
            raise ValueError(f"a handle has {HANDLE_BYTES} bytes")
        self.is_sample = is_sample
        self._shared = shared
        self._places = {place.region: place for place in shared.places}
        self._mapped = mapped or Mapped()
        self._bases: dict[int, int] = {}
        self._foreign: set[int] = set()  # which of them are mapped: not those of this process
        self._shut = False
        self._lock = threading.Lock()  # otherwise memory opened during a shut would stay open

    @property
    def is_open(self) -> bool:
        return bool(self._bases)

    @property
    def regions(self) -> int:
        return len(self._places)

    def anew(self) -> CudaRemote:
        """The same memory, not opened yet."""
        return CudaRemote(self._shared, self._mapped, self.is_sample)

    def size_of(self, region: int) -> int | None:
        place = self._places.get(region)
        return None if place is None else place.size

    def has_open(self, region: int) -> bool:
        """Whether `address_of` has nothing to open."""
        place = self._places.get(region)
        return place is not None and place.allocation in self._bases

    def address_of(self, region: int, gpu: Gpu) -> int:
        """The address of a known region in this process; opens its allocation. CudaError. By the mover."""
        place = self._places[region]
        base = self._bases.get(place.allocation)
        if base is None:
            base = self._open(place.allocation, gpu)
        return base + place.offset

    def shut(self) -> bool:
        """Nothing more is opened; whether something is, and waits for `close`. By any thread."""
        with self._lock:
            self._shut = True
            return bool(self._bases)

    def close(self, gpu: Gpu) -> None:
        """By the mover, after `shut`, when no copy out of it is in flight. CudaError, after all was tried."""
        problem: CudaError | None = None
        for index in self._foreign:
            try:
                self._unmap(index, self._bases[index], gpu)
            except CudaError as error:
                problem = error
        self._bases, self._foreign = {}, set()
        if problem is not None:
            raise problem

    def _open(self, index: int, gpu: Gpu) -> int:
        """By one thread of the mover's, without the lock: the driver may take a while."""
        if self._shut:  # a copy that has failed had parts to come
            raise CudaError(OPEN, INVALID_VALUE, "the peer is gone")
        allocation = self._shared.allocations[index]
        own = EXPORTED.find(allocation.handle)
        base, size = own or self._map(allocation, gpu)
        # Opened without the lock, so the peer may have been forgotten meanwhile: then nothing else would close it.
        with self._lock:
            if not self._shut and size >= allocation.size:
                self._bases[index] = base
                if own is None:
                    self._foreign.add(index)
                return base
        if own is None:
            self._unmap(index, base, gpu)
        told = "the peer is gone" if self._shut else f"it has {size} bytes, and the peer announced {allocation.size}"
        raise CudaError(OPEN, INVALID_VALUE, told)

    def _map(self, allocation: Allocation, gpu: Gpu) -> tuple[int, int]:
        """Its address here, and its size according to the driver: reading beyond it would cost us the device."""
        try:
            base = gpu.open(allocation.handle)
        except CudaError as error:
            error.sticky = False  # errors for dead or foreign handles vary; a lost device reports again
            raise
        try:
            start, size = gpu.allocation_of(base)
        except CudaError:
            gpu.close(base)
            raise
        self._mapped.add(allocation.size)
        return base, size - (base - start)

    def _unmap(self, index: int, base: int, gpu: Gpu) -> None:
        gpu.close(base)
        self._mapped.add(-self._shared.allocations[index].size)


class Owner(Protocol):
    """The transport that has the copies and the mover. It holds the lock of the jobs when it is called."""

    def on_lost(self, peer: PeerId, attachment: CudaAttachment, detail: str) -> None:
        """The peer's lifeline has ended."""

    def retire(self, remote: CudaRemote) -> None:
        """`remote` is no longer used: close it when no copy reads from it."""


class CudaAttachment(LocalLink[CudaRemote]):
    """One peer's memory, by its handles; the line stays, to detect its end."""

    def __init__(
        self,
        me: PeerId,
        there: CudaEndpoint,
        loop: SocketLoop,
        jobs: Jobs,
        owner: Owner,
        mapped: Mapped,
        limits: CudaLimits,
    ) -> None:
        super().__init__(there, loop, jobs, limits.dial_deadline_s)
        self.there = there
        self.problem = ""  # why nothing can be read there
        self.remote: CudaRemote | None = None
        self._me = me
        self._owner = owner
        self._mapped = mapped
        self._limits = limits
        self._used_at = 0.0

    def use(self, job: CopyJob, then: Callable[[CudaRemote], None]) -> None:
        """Call `then` with the peer's memory, now or on the loop; or fail the job. The caller holds the lock."""
        self._used_at = time.monotonic()
        if self.remote is not None and (not self.remote.is_sample or is_empty(job)):
            self._give(self.remote, job, then)
        else:
            self._waiting.append((job, then))
            self.dial()

    def close(self) -> None:
        """The peer was forgotten. The caller holds the lock."""
        remote, self.remote = self.remote, None
        if remote is not None:
            self._owner.retire(remote)
        self._loop.call(self._hang_up)

    def _closed(self, detail: str, by_peer: bool) -> None:
        super()._closed(detail, by_peer)
        with self._jobs:
            if self.remote is not None:
                self._owner.on_lost(self.there.owner, self, detail)

    def _talk(self, wire: Wire) -> Script:
        """Prove ourselves, receive the handles, perhaps of a sample first; then the line only serves to detect the
        end."""
        yield from greet(wire, self.there.secret, self._me, self.there.owner, 0)
        head = yield from take(LENGTH.size)
        if not LENGTH.unpack(head)[0]:  # nothing was lent to us yet
            head = yield from take(LENGTH.size)
            table = yield from take(min(LENGTH.unpack(head)[0], TABLE_BYTES_MAX))
            self._note_reached(self._opened(table, is_sample=True))
            self._look()
            head = yield from take(LENGTH.size)
        self._done(self._opened((yield from take(min(LENGTH.unpack(head)[0], TABLE_BYTES_MAX)))), "")
        self._look()
        yield from take(1)
        raise ProtocolError(Reason.BAD_MESSAGE, "it sent data on its lifeline")

    def _opened(self, table: bytes | bytearray, is_sample: bool = False) -> CudaRemote:
        try:
            return CudaRemote(msgspec.msgpack.decode(table, type=Shared), self._mapped, is_sample)
        except (msgspec.MsgspecError, ValueError, RecursionError) as error:
            raise ProtocolError(Reason.BAD_MESSAGE, f"regions that cannot be opened: {error}") from None

    def _note_reached(self, sample: CudaRemote) -> None:
        """Copies of nothing find out whether it can be opened; where there is none, the first copy of bytes does."""
        with self._jobs:
            self.remote = sample
            for job, then in self._take_empty():
                self._give(sample, job, then)

    def _give(self, remote: CudaRemote, job: CopyJob, then: Callable[[CudaRemote], None]) -> None:
        if remote.is_sample and not remote.regions:
            self._jobs.settle(job)
        else:
            then(remote)

    def _keep(self, memory: CudaRemote | None) -> None:
        if memory is not None:
            sample, self.remote = self.remote, memory
            if sample is not None:
                self._owner.retire(sample)

    def _look(self) -> None:
        """Close what has not been read from for a while, and check again later."""
        self._cancel_timer()
        with self._jobs:
            remote, idle_s = self.remote, time.monotonic() - self._used_at
            is_idle = idle_s >= self._limits.idle_s and not self._jobs.of_peer(self.there.owner)
            if remote is not None and remote.is_open and is_idle:
                self.remote = remote.anew()
                self._owner.retire(remote)
        self._timer = self._loop.later(self._limits.idle_s, self._look)

    def _hang_up(self) -> None:
        if self._line is not None:
            self._line.close("forgotten")
