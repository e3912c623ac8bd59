"""P's side of cuda: a UNIX socket that sends the IPC handles of the registered memory to authenticated peers.

Law: a handle goes only to a process of the same user that has proven the secret minted for it. CUDA has no read-only
handles and cannot revoke them: the holder of one can read and write that whole allocation for as long as it likes.
Endpoints therefore go to authenticated peers only, and those are trusted with the allocations that contain the
registered memory.

The connection that carried the handles stays open as a lifeline: nothing is sent on it, and the kernel ends it when
either process dies, so the reader closes a dead owner's memory at once. One line for each peer, a bounded number in
all, on the one loop; a peer that sends on its line, or whose secret is revoked, loses it. (A child that the owner forks
holds its line too, and its memory.)
"""

from __future__ import annotations

import re
import secrets
import socket
import threading

import msgspec

from kvbaton.protocol.ids import PeerId
from kvbaton.protocol.numbers import Bytes, Number
from kvbaton.security.handshake import SECRET_BYTES
from kvbaton.transports.core.device_memory import DeviceMemory
from kvbaton.transports.core.host_identity import host_identity
from kvbaton.transports.core.refusals import Cause, Refusals, Refused, cause_of
from kvbaton.transports.core.shared_memory import REGIONS_MAX
from kvbaton.transports.cuda.cuda_driver import HANDLE_BYTES, CudaError, Gpu
from kvbaton.transports.local.region_listener import LENGTH, NAME_PREFIX, STRANGERS_MAX, same_user
from kvbaton.transports.net.connection_handshake import Admitted, SecretRing
from kvbaton.transports.net.reception import BACKLOG, Reception
from kvbaton.transports.net.socket_loop import SocketLoop
from kvbaton.transports.net.stream_socket import Bytes as Message
from kvbaton.transports.net.stream_socket import Script, Wire, take

TABLE_BYTES_MAX = (HANDLE_BYTES + 64) * REGIONS_MAX
LINES_MAX = 512
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


class CudaEndpoint(msgspec.Struct, frozen=True, array_like=True, tag="cuda1"):
    """A peer's way to a listener."""

    owner: PeerId
    host: str
    name: str
    secret: bytes
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


class CudaDoor:
    """One listening socket, and the handles that it sends."""

    def __init__(self, me: PeerId, gpu: Gpu, loop: SocketLoop, handshake_s: float) -> None:
        self._name = NAME_PREFIX + secrets.token_hex(16)
        self._gpu = gpu
        self._loop = loop
        self._lines: dict[PeerId, Wire] = {}  # touched on the loop only
        self._allocations: list[Allocation] = []
        self._places: list[CudaPlace] = []
        self._reception = Reception(me, loop, same_user, self._welcome, STRANGERS_MAX, handshake_s)

    @property
    def keyring(self) -> SecretRing:
        return self._reception.keyring

    @property
    def refusals(self) -> Refusals:
        return self._reception.refusals

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

    def listen(self) -> str:
        """Accept from now on; the name to dial."""
        self._reception.listen(self._create)
        return self._name[1:]

    def close(self) -> None:
        """The memory may be freed from now on."""
        for allocation in self._allocations:
            EXPORTED.remove(allocation.handle)
        self._allocations = []

    def revoke(self, peer: PeerId) -> None:
        """Send `peer` nothing new, and end its line: it is to close what it has opened."""
        self.keyring.revoke(peer)
        self._loop.call(lambda: self._hang_up(peer))

    def _allocation(self, base: int, size: int) -> int:
        for index, known in enumerate(self._allocations):
            if known.base == base:
                return index
        handle = self._gpu.export(base)
        EXPORTED.add(handle, base, size)
        self._allocations.append(Allocation(handle, base, size))
        return len(self._allocations) - 1

    def _create(self) -> socket.socket:
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(self._name)
        listener.listen(BACKLOG)
        return listener

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
            if wire.fault is not None:
                self.refusals.add(cause_of(wire.fault))

        wire = self._lines[peer] = Wire(self._loop, sock, closed)
        table = msgspec.msgpack.encode(Shared(LIFE, self._allocations, self._places))
        wire.out.append(Message(LENGTH.pack(len(table)) + table))
        wire.open(_silence(peer))

    def _hang_up(self, peer: PeerId) -> None:
        line = self._lines.get(peer)
        if line is not None:
            line.close("hung up")


def _silence(peer: PeerId) -> Script:
    yield from take(1)
    raise Refused(Cause.BAD_MESSAGE, f"{peer} sent data on its lifeline")


def parse_endpoint(peer: PeerId, endpoint: bytes) -> CudaEndpoint:
    """ValueError says what is wrong with it."""
    try:
        there = msgspec.msgpack.decode(endpoint, type=CudaEndpoint)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise ValueError(f"not an endpoint of cuda: {error}") from None
    if there.owner != peer:
        raise ValueError(f"the endpoint belongs to {there.owner}, not to {peer}")
    if there.host != host_identity():
        raise ValueError(f"{peer} is on another host or in another network namespace; cuda reaches only this one")
    if len(there.secret) != SECRET_BYTES or not there.name:
        raise ValueError("the endpoint has no usable name or secret")
    if not re.fullmatch("[0-9a-f]{0,32}", there.device):
        raise ValueError("the endpoint names no device: its UUID has 32 hexadecimal digits")
    return there
