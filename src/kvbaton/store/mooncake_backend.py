"""A backend over Mooncake Store: a master that knows where values are, and processes that lend memory to it.

Laws: everything that can block is done in a call, none at construction, so an engine starts and serves without a
master. Before the library is set up the master's port is probed: without a master it would block for 90 s. A code that
means that the master is unreachable becomes an exception (the store then leaves it alone for a while); any other
concerns only its key. Bytes of a get that timed out in the library land later, when the peer resumes (`lands_late`).

Measured with 0.3.13.post1: a dead master costs 4.3 s a call, a stopped one `rpc_timeout_s`, a stopped owner 30 s.
"""

from __future__ import annotations

import ctypes
import importlib
import os
import socket
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

NOT_FOUND = -704
ALREADY_THERE = -705
UNREACHABLE = frozenset({-900, -901})  # RPC_FAIL, RPC_TIMEOUT
SLICES_MAX = 1024  # of one call: a larger one makes the peer unreachable for good
PACKAGE = "mooncake.store"


class MooncakeError(Exception):
    """The store is unusable now; the message names the next step."""


class MooncakeSettings(msgspec.Struct, frozen=True, kw_only=True):
    """The master's address, and the memory that this process lends to it (none: it only uses the others' memory)."""

    master: str  # host:port
    host: str = "127.0.0.1"  # at which other processes reach this one
    segment_bytes: int = 0
    buffer_bytes: int = 16 << 20
    protocol: str = "tcp"
    devices: str = ""
    metadata: str = "P2PHANDSHAKE"
    rpc_timeout_s: float = 1.0
    connect_timeout_s: float = 1.0


class MooncakeBackend:
    """Implements `Backend`. `library` makes the client object; it is the real one unless a test gives another."""

    lands_late = True

    def __init__(self, settings: MooncakeSettings, library: Callable[[], Any] | None = None) -> None:
        host, _, port = settings.master.rpartition(":")
        if not host or not port.isdecimal():
            raise ValueError(f"master: {settings.master!r}; give host:port of mooncake_master")
        self.counters: Counter[str] = Counter()
        self._settings = settings
        self._address = host, int(port)
        self._library = library or self._real
        self._memories: list[memoryview] = []
        self._setting_up = threading.Lock()
        self._client: Any = None
        self._closed = False

    def register(self, memory: memoryview) -> None:
        self._memories.append(memory)

    def exists(self, keys: Sequence[str]) -> list[bool]:
        codes = self._checked("exists", keys, self._ready().batch_is_exist(list(keys)))
        return [code == 1 for code in codes]

    def put(self, keys: Sequence[str], values: Sequence[memoryview]) -> list[str]:
        client, wrong = self._ready(), []
        for some, lent in _calls(keys, values):
            codes = self._checked("put", some, client.batch_put_from(some, *lent))
            wrong += ["" if code in (0, ALREADY_THERE) else f"mooncake: code {code}" for code in codes]
        return wrong

    def get(self, keys: Sequence[str], into: Sequence[memoryview]) -> list[int]:
        client, sizes = self._ready(), []
        for some, lent in _calls(keys, into):
            codes = self._checked("get", some, client.batch_get_into(some, *lent))
            sizes += [max(0, code) for code in codes]
        return sizes

    def discard(self, keys: Sequence[str]) -> None:
        """By force: a value that was read a moment ago is leased. A concurrent reader sees that it is invalid."""
        self._ready().batch_remove(list(keys), True)

    def close(self) -> None:
        """Return the lent memory. The values in it are lost to all engines."""
        self._closed = True
        client, self._client = self._client, None
        if client is not None:
            client.close()

    def _checked(self, what: str, keys: Sequence[str], codes: Sequence[int]) -> Sequence[int]:
        for code in codes:
            if code < 0 and code != NOT_FOUND:
                self.counters[f"{what}.{code}"] += 1
        if any(code in UNREACHABLE for code in codes):
            raise MooncakeError(f"master {self._settings.master} does not answer ({min(codes)}); is it running?")
        if len(codes) != len(keys):
            raise MooncakeError(f"{what}: {len(codes)} codes for {len(keys)} keys")
        return codes

    def _ready(self) -> Any:
        """The client, set up; MooncakeError when it cannot be now."""
        client = self._client
        if client is not None:
            return client
        if not self._setting_up.acquire(timeout=self._settings.connect_timeout_s):
            raise MooncakeError("another call is setting up the store")
        try:
            if self._client is None:
                self._client = self._set_up()
            return self._client
        finally:
            self._setting_up.release()

    def _set_up(self) -> Any:
        if self._closed:
            raise MooncakeError("this backend was closed")
        settings = self._settings
        try:
            socket.create_connection(self._address, settings.connect_timeout_s).close()
        except OSError as error:
            raise MooncakeError(f"master {settings.master}: {error}; start mooncake_master there") from None
        client = self._library()
        size = settings.segment_bytes, settings.buffer_bytes
        place = settings.protocol, settings.devices, settings.master
        code = client.setup(settings.host, settings.metadata, *size, *place)
        if code:
            raise MooncakeError(f"set-up: code {code} from master {settings.master}")
        for memory in self._memories:
            code = client.register_buffer(_address(memory), memory.nbytes)
            if code:
                client.close()
                raise MooncakeError(f"register_buffer: code {code} for {memory.nbytes} bytes")
        return client

    def _real(self) -> Any:
        # The library reads these when it is loaded, and has no other interface for them (0.3.13).
        os.environ.setdefault("MC_RPC_TIMEOUT_MS", str(int(self._settings.rpc_timeout_s * 1000)))
        os.environ.setdefault("MC_TCP_ENABLE_CONNECTION_POOL", "1")
        try:
            return importlib.import_module(PACKAGE).MooncakeDistributedStore()
        except ImportError as error:
            raise MooncakeError(
                f"{error}; install mooncake-transfer-engine or its -non-cuda build, and the system's libibverbs1"
            ) from None


def _calls(keys: Sequence[str], frames: Sequence[memoryview]) -> list[tuple[list[str], tuple[list[int], list[int]]]]:
    """Keys with the addresses and sizes of their frames, in batches that the library accepts."""
    return [
        (
            list(keys[at : at + SLICES_MAX]),
            (
                [_address(frame) for frame in frames[at : at + SLICES_MAX]],
                [frame.nbytes for frame in frames[at : at + SLICES_MAX]],
            ),
        )
        for at in range(0, len(keys), SLICES_MAX)
    ]


def _address(memory: memoryview) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))
