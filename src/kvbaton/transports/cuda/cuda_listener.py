"""P's side of cuda: a UNIX socket that sends the IPC handles of the registered memory to authenticated peers.

Law: a handle goes only to a process of the same user that has proven the secret minted for it, and whose engine has
been lent something here. CUDA has no read-only handles and cannot revoke them: the holder of one can read and write
that whole allocation for as long as it likes. Who comes before anything is lent to it gets the handle of a sample, an
allocation of zeroes of its own, by which it finds out whether memory of this process can be opened there, and waits
on its line. (Releases before this one take that for a fault, and the pair takes its next transport.)

The connection that carried the handles stays open as a lifeline: nothing is sent on it, and the kernel ends it when
either process dies, so the reader closes a dead owner's memory at once. One line for each peer, a bounded number in
all, on the one loop; a peer that sends on its line, or whose secret is revoked, loses it. (A child that the owner forks
holds its line too, and its memory.)
"""

from __future__ import annotations

import contextlib
import logging
import re
import secrets
import socket
import threading

import msgspec

from kvbaton.protocol.ids import PeerId, owner_of
from kvbaton.protocol.numbers import Bytes, Number
from kvbaton.transports.core.shared_memory import REGIONS_MAX, DeviceMemory
from kvbaton.transports.core.transport import Cause, cause_of
from kvbaton.transports.cuda.cuda_driver import HANDLE_BYTES, CudaError, Gpu
from kvbaton.transports.local.region_listener import LENGTH, LocalEndpoint, LocalListener, local_endpoint, silence
from kvbaton.transports.net.connection_handshake import Admitted
from kvbaton.transports.net.socket_loop import SocketLoop
from kvbaton.transports.net.stream_socket import Bytes as Message
from kvbaton.transports.net.stream_socket import Wire

log = logging.getLogger(__name__)

TABLE_BYTES_MAX = (HANDLE_BYTES + 64) * REGIONS_MAX
LINES_MAX = 512
SAMPLE_BYTES = 2 << 20
"""A handle opens all of what the driver divides; of this size it divides nothing."""
LIFE = secrets.token_bytes(16)
"""Of this process; earlier versions knew by it what was their own."""


class Exported:
    """The allocations whose handles this process has made: CUDA opens none of them here, and there is no need to.

    Law: our own allocations are known from our own records. A peer that sends us our own handle, with an arbitrary
    address and size, gets that allocation and not a byte around it.
    """

    def __init__(self) -> None:
        self._known: dict[bytes, list[tuple[int, int]]] = {}  # once for each listener that sent it
        self._lock = threading.Lock()

    def add(self, handle: bytes, base: int, size: int) -> None:
        with self._lock:
            self._known.setdefault(handle, []).append((base, size))

    def remove(self, handle: bytes) -> None:
        with self._lock:
            told = self._known[handle]
            told.pop()
            if not told:
                del self._known[handle]

    def find(self, handle: bytes) -> tuple[int, int] | None:
        """Where it begins and its bytes, if it is of this process."""
        with self._lock:
            told = self._known.get(handle)
            return told[-1] if told else None


EXPORTED = Exported()


class CudaEndpoint(LocalEndpoint, frozen=True, array_like=True, tag="cuda1"):
    """Of cuda."""

    device: str = ""  # its UUID, as hexadecimal digits


class CudaPlace(msgspec.Struct, frozen=True, array_like=True):
    """A region within one of the allocations that are passed with it."""

    region: Number
    allocation: Number  # which of them
    offset: Bytes
    size: Bytes


class Allocation(msgspec.Struct, frozen=True, array_like=True):
    """What the caching allocator of a framework got in one piece; regions lie somewhere inside."""

    handle: bytes
    base: Number  # of use to its own process alone
    size: Bytes


class Shared(msgspec.Struct, frozen=True, array_like=True):
    """The data sent to an authenticated peer."""

    life: bytes
    allocations: list[Allocation]
    places: list[CudaPlace]


class CudaSample:
    """An allocation that is nobody's KV. Without memory for it there is none, and the first copy finds out."""

    def __init__(self, gpu: Gpu) -> None:
        self._gpu = gpu
        self._made: list[Allocation] | None = None

    def shared(self, places: list[CudaPlace]) -> Shared:
        """The table that says no more than that: each region as one byte of the sample."""
        if self._made is None:
            self._made = self._make()
        seen = [CudaPlace(place.region, 0, 0, 1) for place in places] if self._made else []
        return Shared(LIFE, self._made, seen)

    def close(self) -> None:
        for made in self._made or ():
            EXPORTED.remove(made.handle)
            with self._gpu as gpu, contextlib.suppress(CudaError):  # of a device that is lost
                gpu.free(made.base)
        self._made = []

    def _make(self) -> list[Allocation]:
        try:
            with self._gpu as gpu:
                base = gpu.allocate(SAMPLE_BYTES)
                try:
                    gpu.clear(base, SAMPLE_BYTES)
                    made = Allocation(gpu.export(base), base, SAMPLE_BYTES)
                except CudaError:
                    gpu.free(base)
                    raise
        except CudaError as error:
            log.info("no sample of device memory: %s", error)
            return []
        EXPORTED.add(made.handle, base, SAMPLE_BYTES)
        return [made]


class CudaDoor(LocalListener):
    """Sends handles. Who it hangs up on is to close what it has opened."""

    def __init__(self, me: PeerId, gpu: Gpu, loop: SocketLoop, handshake_s: float) -> None:
        super().__init__(me, loop, handshake_s)
        self._gpu = gpu
        self._lines: dict[PeerId, Wire] = {}  # touched on the loop only, as are the next two
        self._waiting: dict[PeerId, Admitted] = {}  # who of them has a sample only
        self._sample = CudaSample(gpu)
        self._allocations: list[Allocation] = []
        self._places: list[CudaPlace] = []

    def add(self, region: int, memory: DeviceMemory) -> None:
        """Offer `region` from now on. ValueError for memory that has no handle."""
        try:
            with self._gpu as gpu:
                base, size = gpu.allocation_of(memory.address)
                offset = memory.address - base
                if offset + memory.nbytes > size:
                    raise ValueError(f"region {region}: {memory} is not inside the {size} bytes of its allocation")
                index = self._allocation(base, size)
        except CudaError as error:
            raise ValueError(
                f"region {region}: no IPC handle for {memory}: {error}; only memory of cudaMalloc has one, which "
                "PyTorch's allocator uses unless it is told expandable_segments:True"
            ) from None
        self._places.append(CudaPlace(region, index, offset, memory.nbytes))

    def close(self) -> None:
        """The memory may be freed from now on."""
        for allocation in self._allocations:
            EXPORTED.remove(allocation.handle)
        self._allocations = []
        self._sample.close()

    def _allocation(self, base: int, size: int) -> int:
        for index, known in enumerate(self._allocations):
            if known.base == base:
                return index
        handle = self._gpu.export(base)
        EXPORTED.add(handle, base, size)
        self._allocations.append(Allocation(handle, base, size))
        return len(self._allocations) - 1

    def _welcome(self, admitted: Admitted, sock: socket.socket) -> None:
        peer = admitted.peer
        if not self.keyring.still_admits(admitted):
            sock.close()
            return
        self._hang_up(peer)  # it has connected again
        if len(self._lines) >= LINES_MAX:
            self.refusals.add(Cause.FULL)
            sock.close()
            return

        def closed(_detail: str, _by_peer: bool) -> None:
            if self._lines.get(peer) is wire:
                del self._lines[peer]
                self._waiting.pop(peer, None)
            if wire.fault is not None:
                self.refusals.add(cause_of(wire.fault))

        wire = self._lines[peer] = Wire(self._loop, sock, closed)
        if owner_of(peer) in self._admitted:
            wire.out.append(_message(self._shared))
        else:
            self._waiting[peer] = admitted
            wire.out.append(Message(LENGTH.pack(0)))
            wire.out.append(_message(self._sample.shared(self._places)))
        wire.open(silence(peer))

    @property
    def _shared(self) -> Shared:
        return Shared(LIFE, self._allocations, self._places)

    def _admit(self, engine: PeerId) -> None:
        self._admitted.add(engine)
        for peer, admitted in list(self._waiting.items()):
            if owner_of(peer) == engine and self.keyring.still_admits(admitted):
                del self._waiting[peer]
                self._lines[peer].out.append(_message(self._shared))
                self._lines[peer].flush()

    def _hang_up(self, peer: PeerId) -> None:
        line = self._lines.get(peer)
        if line is not None:
            line.close("hung up")


def _message(shared: Shared) -> Message:
    table = msgspec.msgpack.encode(shared)
    return Message(LENGTH.pack(len(table)) + table)


def parse_endpoint(peer: PeerId, endpoint: bytes) -> CudaEndpoint:
    """ValueError says what is wrong with it."""
    there = local_endpoint(CudaEndpoint, "cuda", peer, endpoint)
    if not re.fullmatch("[0-9a-f]{0,32}", there.device):
        raise ValueError("the endpoint names no device: its UUID has 32 hexadecimal digits")
    return there
