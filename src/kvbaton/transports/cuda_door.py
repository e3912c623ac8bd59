"""P's side of cuda: a UNIX socket that tells proven peers the IPC handles of the registered memory.

Law: a handle goes only to a process of the same user that has proven the secret minted for it. CUDA knows no read-only
handle and takes none back: who holds one can read and write that whole allocation for as long as it likes. Endpoints
therefore go to authenticated peers only, and those are trusted with the allocations that the registered memory lies in.
"""

from __future__ import annotations

import contextlib
import secrets
import socket

import msgspec

from kvbaton.protocol.ids import PeerId
from kvbaton.protocol.numbers import Bytes, Number
from kvbaton.transports.auth import SECRET_BYTES, Admitted, Keyring
from kvbaton.transports.cuda_driver import HANDLE_BYTES, CudaError, Gpu
from kvbaton.transports.device import DeviceMemory
from kvbaton.transports.loop import Loop
from kvbaton.transports.memory import REGIONS_MAX
from kvbaton.transports.reception import BACKLOG, Reception
from kvbaton.transports.refusals import Refusals
from kvbaton.transports.shm_door import LENGTH, NAME_PREFIX, STRANGERS_MAX, host_identity, same_user

TABLE_BYTES_MAX = (HANDLE_BYTES + 64) * REGIONS_MAX
LIFE = secrets.token_bytes(16)
"""Of this process: CUDA opens no handle in the process that made it, and there is no need to."""


class CudaEndpoint(msgspec.Struct, frozen=True, array_like=True, tag="cuda1"):
    """What a peer needs to reach a door."""

    owner: PeerId
    host: str
    name: str
    secret: bytes


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
    """What a proven peer is told."""

    life: bytes
    allocations: list[Allocation]
    places: list[CudaPlace]


class CudaDoor:
    """One listening socket, and the handles that go with a welcome."""

    def __init__(self, me: PeerId, gpu: Gpu, loop: Loop, handshake_s: float) -> None:
        self._name = NAME_PREFIX + secrets.token_hex(16)
        self._gpu = gpu
        self._allocations: list[Allocation] = []
        self._places: list[CudaPlace] = []
        self._reception = Reception(me, loop, same_user, self._welcome, STRANGERS_MAX, handshake_s)

    @property
    def keyring(self) -> Keyring:
        return self._reception.keyring

    @property
    def refusals(self) -> Refusals:
        return self._reception.refusals

    def add(self, region: int, memory: DeviceMemory) -> None:
        """Tell of `region` from now on. ValueError for memory that has no handle."""
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

    def _allocation(self, base: int, size: int) -> int:
        for index, known in enumerate(self._allocations):
            if known.base == base:
                return index
        self._allocations.append(Allocation(self._gpu.export(base), base, size))
        return len(self._allocations) - 1

    def _create(self) -> socket.socket:
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(self._name)
        listener.listen(BACKLOG)
        return listener

    def _welcome(self, admitted: Admitted, sock: socket.socket) -> None:
        table = msgspec.msgpack.encode(Shared(LIFE, self._allocations, self._places))
        with sock, contextlib.suppress(OSError):  # who left meanwhile, left
            if self.keyring.still_admits(admitted):
                sock.setblocking(True)
                sock.settimeout(1.0)  # 32 KiB at most, into an empty buffer
                sock.sendall(LENGTH.pack(len(table)) + table)


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
    return there
