"""The one module that calls nixl: an agent, its handles, and its errors as one of ours.

Law: every handle that is opened here is counted in `handles` until it is released, and only `NixlError` leaves. nixl's
bindings are used instead of its Python class, because that hard-codes `pthrDelay = 0`, with which the progress thread
of an idle agent spins at a whole core (nixl 1.5.1). With a delay that thread sleeps in poll(2) until UCX has something
to do. Return to the class once `nixl_agent_config` takes a delay.

Threads: `register` and `metadata` may be called from any, all else from the mover's alone.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from types import ModuleType
from typing import Any

import numpy as np

from kvbaton.transports.core.span_tables import Rows
from kvbaton.transports.core.transport import Direction

BACKEND = "UCX"
MODULES = ("nixl", "nixl_cu13", "nixl_cu12")
"""The package picks the build that fits the CUDA at hand; either build can also be installed alone."""

WAKE_US = 100_000
"""How long the progress thread sleeps when nothing wakes it; events do (a read over TCP takes 0.1 ms)."""

Indices = np.ndarray[tuple[int, ...], np.dtype[np.int32]]


class NixlError(Exception):
    """A call that nixl refused or that failed. `disconnected`: NIXL has given up the connection, with everything on
    it."""

    def __init__(self, call: str, error: BaseException) -> None:
        super().__init__(f"nixl: {call}: {type(error).__name__} {error}".rstrip())
        self.disconnected = type(error).__name__ == "nixlRemoteDisconnectError"


def load_bindings() -> ModuleType:
    """nixl, imported when first needed; ImportError says how to get it."""
    for name in MODULES:
        try:
            importlib.import_module(name)
            return importlib.import_module(f"{name}._bindings")
        except ModuleNotFoundError as error:
            if error.name not in MODULES:
                raise
    raise ImportError("the transport 'nixl' requires the package nixl: pip install nixl")


class Agent:
    """One NIXL agent with a UCX back end and an event-driven progress thread."""

    def __init__(self, name: str, ucx: dict[str, str], parameters: dict[str, str] | None = None) -> None:
        """`parameters` are those of NIXL's back end, such as `num_threads`."""
        self._nixl: Any = load_bindings()
        self.name = name
        self.handles = 0
        config = self._nixl.nixlAgentConfig()
        config.useProgThread = True
        config.useListenThread = False
        config.pthrDelay = WAKE_US
        config.syncMode = self._nixl.NIXL_THREAD_SYNC_RW
        options = ",".join(f"{key}={value}" for key, value in ucx.items())
        self._agent: Any = _ask("agent", self._nixl.nixlAgent, name, config)
        told = {"engine_config": options, **(parameters or {})}
        self._backend = [_ask(f"UCX {told}", self._agent.createBackend, BACKEND, told)]
        self._operation = {Direction.READ: self._nixl.NIXL_READ, Direction.WRITE: self._nixl.NIXL_WRITE}

    def register(self, address: int, size: int, device: int | None = None) -> None:
        """For reads and for writes: NIXL has no other kind of registration. `device`: the memory's device; None: the
        host."""
        listed = self._nixl.nixlRegDList(self._kind(device), [(address, size, device or 0, "")])
        _ask("register", self._agent.registerMem, listed, self._backend)

    def metadata(self) -> bytes:
        """How to reach this agent and what it has registered."""
        return bytes(_ask("metadata", self._agent.getLocalMD))

    def add_remote(self, metadata: bytes) -> str:
        """The name of the agent that `metadata` describes. Connects to nothing yet."""
        return str(_ask("metadata of the peer", self._agent.loadRemoteMD, metadata), "utf-8", "replace")

    def remove_remote(self, name: str) -> None:
        """Close the connection. Lists prepared for it must not be used again: they point into memory that is freed
        here."""
        _ask("disconnect", self._agent.invalidateRemoteMD, name)

    def prepare(self, remote: str, table: Rows, device: int | None = None) -> int:
        """A list of (address, bytes, device), or of (address, bytes, device, stride, count). Without `remote`: of own
        memory."""
        who, kind = remote or self._nixl.NIXL_INIT_AGENT, self._kind(device)
        if table.shape[1] == 5:
            handle = _ask("prepare", self._agent.prepXferDlist, who, kind, table.astype(np.uint64), self._backend)
        else:
            listed = self._nixl.nixlXferDList(kind, table)
            handle = _ask("prepare", self._agent.prepXferDlist, who, listed, self._backend)
        self.handles += 1
        return int(handle)

    def drop_list(self, handle: int) -> None:
        _ask("release of a list", self._agent.releasedDlistH, handle)
        self.handles -= 1

    def request(self, way: Direction, local: int, here: Indices, remote: int, there: Indices) -> int:
        """Not started; neither list is needed for it any more."""
        sides = local, here, remote, there
        request = _ask("request", self._agent.makeXferReq, self._operation[way], *sides, "", self._backend, False)
        self.handles += 1
        return int(request)

    def post(self, request: int) -> bool:
        """Start it; whether it is over. On one host the bytes are copied inside this call, without the GIL."""
        return bool(_ask("post", self._agent.postXferReq, request, "") == self._nixl.NIXL_SUCCESS)

    def is_over(self, request: int) -> bool:
        return bool(_ask("status", self._agent.getXferStatus, request) == self._nixl.NIXL_SUCCESS)

    def release(self, request: int) -> None:
        """Forget a request. One that is not over is *not* stopped by this: its bytes still land."""
        _ask("release", self._agent.releaseXferReq, request)
        self.handles -= 1

    def _kind(self, device: int | None) -> Any:
        return self._nixl.DRAM_SEG if device is None else self._nixl.VRAM_SEG

    def close(self) -> None:
        """End NIXL's thread and its sockets: after this it touches no memory here (measured: 0 bytes came late)."""
        self._agent = None


def _ask(call: str, function: Callable[..., Any], *arguments: Any) -> Any:
    """Every call goes through here, and its errors are translated here."""
    try:
        return function(*arguments)
    except Exception as error:  # noqa: BLE001 - pybind11 makes each of NIXL's errors a class of its own, without a base
        raise NixlError(call, error) from None
