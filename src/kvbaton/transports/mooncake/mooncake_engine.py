"""One Mooncake transfer engine, driven over TCP: the only module that imports the library.

Law: no call here waits for a peer, except `start_read`, which may while it opens the peer's segment (up to 60 s with a
stopped peer, GIL released), and so belongs on its own thread. The library's codes are translated here, once.

Only two of the library's calls are used to move bytes, because only they can tell the outcome of a read: a batch of one
slice is started, and its state is polled. The library's other calls wait inside, spinning, for up to 30 s, and return
-1 both for a read that failed and for one that will land later. A failed slice is reported after its socket was closed,
so a terminal state means that nothing more of it can land.

`close` is the only way to stop reads in flight: it closes every connection and joins the thread that reads from them.
Python destroys the engine with the GIL held, and the engine's handshake thread notices only when its `accept` times
out, after 1 s. `_hasten` shortens that; delete it when the engine can be closed without the GIL.

The location of a rank's memory, as its peers get it: an engine's address and the place of each region.

Law: an endpoint that does not parse, or is impossible, is refused by ValueError before any connection. Mooncake has
neither names nor secrets, so an endpoint also says where this engine keeps its mark, 16 random bytes: a client reads
them first, and does not mistake another process with the same port for its peer.
"""

from __future__ import annotations

import contextlib
import ctypes
import enum
import importlib
import ipaddress
import os
import socket
import stat
import struct
from typing import Any

import msgspec

from kvbaton.protocol.ids import PeerId
from kvbaton.protocol.numbers import Bytes, Number, Port
from kvbaton.transports.core.shared_memory import REGIONS_MAX

PACKAGE = "mooncake-transfer-engine-non-cuda (or -cuda)"
SLICES_MAX = 1024
"""In flight to one peer. The engine queues 1,024 and parks as many for a second; a peer that was once sent more stayed
unreachable for as long as it was watched (reference/transports.md 3.1)."""

ACCEPT_MS = 4
"""About how long closing an engine holds the GIL."""

_SETTINGS = {
    "MC_TCP_ENABLE_CONNECTION_POOL": "1",  # or each slice makes a connection: 0.005 GB/s, and a `connect` that can hang
    "MC_FORCE_TCP": "1",  # or an engine takes any RDMA device it finds; untried, and close may mean less there
}
"""Read from the environment by every new engine of this process, ours or not: the library has no other way."""


class MooncakeMissing(RuntimeError):
    """The library cannot be loaded; the message says what to install."""


class SliceState(enum.Enum):
    """The state of a slice."""

    MOVING = "moving"
    ARRIVED = "arrived"
    FAILED = "failed"


_STATES = {1: SliceState.ARRIVED, -1: SliceState.FAILED}


def load() -> Any:
    """The library's engine module; MooncakeMissing where there is none."""
    settings = {"MC_LOG_LEVEL": os.environ.get("MC_LOG_LEVEL", "ERROR"), **_SETTINGS}
    if not settings.items() <= os.environ.items():  # written once: other threads may be reading
        os.environ.update(settings)
    try:
        return importlib.import_module("mooncake.engine")
    except ImportError as error:
        advice = f"pip install {PACKAGE}"
        if "libibverbs" in str(error):
            advice = "install the system's libibverbs.so.1 (Debian: libibverbs1), which it needs even without RDMA"
        raise MooncakeMissing(f"the mooncake transport cannot load its engine ({error}): {advice}") from error


def address_of(memory: memoryview) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))


class MooncakeEngine:
    """Listens on a free port from the start; `host` is what peers connect to."""

    def __init__(self, host: str) -> None:
        self._engine: Any = load().TransferEngine()
        if self._engine.initialize(host, "P2PHANDSHAKE", "tcp", ""):
            raise OSError(f"mooncake cannot start an engine for {host}; its own log has the cause")
        self.port: int = self._engine.get_rpc_port()

    def register(self, memory: memoryview) -> None:
        """Lets any peer that can reach the engine's port read and write `memory`. The caller keeps it alive."""
        code = self._engine.register_memory(address_of(memory), memory.nbytes)
        if code:
            raise ValueError(f"mooncake refused to register {memory.nbytes} bytes (code {code}); registered twice?")

    def start_read(self, session: str, target: int, source: int, size: int) -> int:
        """Start to read `size` bytes from the peer's address `source`; the slice's number, 0 when it could not start.

        Must be polled with `state` until it is over: only that frees it.
        """
        number: int = self._engine.batch_transfer_async_read(session, [target], [source], [size])
        return number

    def state(self, number: int) -> SliceState:
        """Of a slice that was not over when last polled; once it is over, its number is invalid."""
        return _STATES.get(self._engine.transfer_check_status(number), SliceState.MOVING)

    def close(self) -> None:
        """Close every connection and stop all threads; once this returns nothing lands, nothing is served."""
        if self._engine is not None:
            _hasten(self.port)
            self._engine = None


def _hasten(port: int) -> None:
    """Let the engine's handshake thread notice soon that it is to end; if this fails, closing takes up to 1 s."""
    for fd in map(int, os.listdir("/proc/self/fd")):
        with contextlib.suppress(OSError):  # gone in the meantime
            if stat.S_ISSOCK(os.fstat(fd).st_mode):
                _hasten_one(socket.socket(fileno=os.dup(fd)), port)
    with contextlib.suppress(OSError):
        socket.create_connection(("127.0.0.1", port), 1.0).close()  # ends the pending `accept`


def _hasten_one(found: socket.socket, port: int) -> None:
    with found:
        if found.family not in {socket.AF_INET, socket.AF_INET6} or found.getsockname()[1] != port:
            return
        if found.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
            limit = struct.pack("ll", 0, ACCEPT_MS * 1000)
            found.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
            found.shutdown(socket.SHUT_RDWR)  # otherwise a pending connection would be served, for 5 s
        else:
            found.shutdown(socket.SHUT_RDWR)  # a silent connection would be waited for


ENDPOINT_BYTES_MAX = 16 << 10
MARK_BYTES = 16
ADDRESS_MAX = 1 << 64


class MooncakePlace(msgspec.Struct, frozen=True, array_like=True):
    """Memory in the owner's address space."""

    address: Number
    size_bytes: Bytes


class MooncakeEndpoint(msgspec.Struct, frozen=True, array_like=True, tag="mooncake1"):
    """What a peer needs to read this rank's memory."""

    owner: PeerId
    host: str
    port: Port
    mark_address: Number
    mark: bytes
    regions: dict[Number, MooncakePlace]

    @property
    def session(self) -> str:
        """The peer's name among engines."""
        return f"{self.host}:{self.port}"


def parse(peer: PeerId, endpoint: bytes) -> MooncakeEndpoint:
    """The endpoint of `peer`; ValueError for anything else."""
    if len(endpoint) > ENDPOINT_BYTES_MAX:
        raise ValueError(f"an endpoint has at most {ENDPOINT_BYTES_MAX} bytes, this one {len(endpoint)}")
    try:
        there = msgspec.msgpack.decode(endpoint, type=MooncakeEndpoint)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(f"not an endpoint of mooncake: {error}") from None
    if there.owner != peer:
        raise ValueError(f"the endpoint belongs to {there.owner}, not to {peer}")
    ipaddress.IPv4Address(there.host)
    if not 0 < there.port < 1 << 16 or len(there.mark) != MARK_BYTES:
        raise ValueError("the endpoint has no usable port or mark")
    if len(there.regions) > REGIONS_MAX:
        raise ValueError(f"the endpoint has {len(there.regions)} regions, at most {REGIONS_MAX} are allowed")
    for region, place in [(-1, MooncakePlace(there.mark_address, MARK_BYTES)), *there.regions.items()]:
        if place.address < 1 or place.size_bytes < 1 or place.address + place.size_bytes > ADDRESS_MAX:
            raise ValueError(f"region {region} of the endpoint is not memory: {place}")
    return there
