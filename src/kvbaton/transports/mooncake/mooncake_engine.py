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
"""

from __future__ import annotations

import contextlib
import ctypes
import enum
import importlib
import os
import socket
import stat
import struct
from typing import Any

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
