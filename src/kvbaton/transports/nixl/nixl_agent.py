"""The one module that calls nixl: an agent, its handles, and its errors as one of ours.

Law: every handle that is opened here is counted in `handles` until it is released, and only `NixlError` leaves. nixl's
bindings are used instead of its Python class, because that hard-codes `pthrDelay = 0`, with which the progress thread
of an idle agent spins at a whole core (nixl 1.5.1). With a delay that thread sleeps in poll(2) until UCX has something
to do. Return to the class once `nixl_agent_config` takes a delay.

Threads: `register` and `metadata` may be called from any, all else from the mover's alone.

Prepared descriptor lists: a copy's offsets in NIXL's terms.

Law: a list is prepared once for every slot of a region and used by index from then on, as long as spans of one size lie
on one grid, which KV blocks do; other spans get their own list, released as soon as the request was made. At most
`GRIDS_MAX` lists are kept for one side; the least recently used goes first.

For device memory each descriptor is a copy that the CPU starts (2.5 us with cuda_ipc, however few bytes), so spans that
are adjacent on both sides are joined first (`merged`); for host memory they stay on their grid.

The endpoint of a NIXL agent: its metadata, the places of regions, and its process.

Law: nothing of it reaches NIXL before it was parsed here: version, owner, every size bounded. An agent's name contains
its owner's, and the metadata must be of that agent: NIXL identifies agents by name alone, and metadata under another
peer's name would replace that peer's (nixl 1.5.1). It is compressed, since NIXL's metadata repeats itself for every
region (64 regions: 3,200 bytes, 600 compressed).

The process is named so that its death can be proven. NIXL reports a dead peer, a connection that timed out and a broken
network by one and the same error, and only the first means that a WRITE can no longer land.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import secrets
import struct
import zlib
from array import array
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import msgspec
import numpy as np

from kvbaton.protocol.ids import PeerId
from kvbaton.protocol.numbers import Bytes, Number
from kvbaton.transports.core.jobs import Rows
from kvbaton.transports.core.shared_memory import REGIONS_MAX, host_identity
from kvbaton.transports.core.transport import Direction, Spans

VERSION = b"nixl1"
BYTES_MAX = 256 << 10
ADDRESS_MAX = 1 << 63
DEVICES_MAX = 1 << 10
NONCE_BYTES = 8
METADATA_HEAD = b"nixlSerDes|Agent"
"""How NIXL's metadata begins; the name's length, the name and a bar follow."""

DEAD_STATES = "ZX"


class Life(msgspec.Struct, frozen=True, array_like=True):
    """One process, uniquely: pids are reused, a pid with its start time is not."""

    host: str  # this boot and this PID namespace
    pid: Number
    started: Number

    def is_over(self) -> bool:
        """Whether it is known to have died; False if that cannot be known from here."""
        if self.host != host_identity("pid"):
            return False
        try:
            os.kill(self.pid, 0)
        except ProcessLookupError:
            return True
        except PermissionError:
            return False
        found = _stat_of(self.pid)
        return found is not None and (found.started != self.started or found.dead)


class _Stat(msgspec.Struct, frozen=True):
    started: int
    dead: bool  # and none of its threads is still running


class NixlEndpoint(msgspec.Struct, frozen=True, array_like=True):
    """What a peer needs to reach an agent."""

    owner: PeerId
    agent: str
    life: Life
    places: dict[Number, NixlPlace]  # addresses in its process, by region
    metadata: bytes


def this_life() -> Life:
    found = _stat_of(os.getpid())
    return Life(host_identity("pid"), os.getpid(), found.started if found else 0)


def name_agent(owner: PeerId) -> str:
    """A new name, which identifies the owner."""
    return f"{owner.incarnation}.{secrets.token_hex(NONCE_BYTES)}.{owner.worker}"


def pack(endpoint: NixlEndpoint) -> bytes:
    return VERSION + zlib.compress(msgspec.msgpack.encode(endpoint), 9)


def parse(peer: PeerId, data: bytes) -> NixlEndpoint:
    """ValueError for anything but an endpoint of `peer`."""
    if data[: len(VERSION)] != VERSION:
        raise ValueError(f"not an endpoint of nixl: it does not begin with {VERSION!r}; do both sides run one version?")
    try:
        unpacker = zlib.decompressobj()
        plain = unpacker.decompress(data[len(VERSION) :], BYTES_MAX)
        if not unpacker.eof:
            raise ValueError(f"not an endpoint of nixl: cut short, or more than {BYTES_MAX} bytes")
        there = msgspec.msgpack.decode(plain, type=NixlEndpoint)
    except (zlib.error, msgspec.MsgspecError, RecursionError) as error:
        raise ValueError(f"not an endpoint of nixl: {error}") from None
    if there.owner != peer:
        raise ValueError(f"the endpoint belongs to {there.owner}, not to {peer}")
    if not _is_named_after(there.agent, peer):
        raise ValueError(f"the endpoint's agent {there.agent!r} is not one of {peer}")
    name = there.agent.encode()
    if not there.metadata.startswith(METADATA_HEAD + struct.pack("<Q", len(name)) + name + b"|"):
        raise ValueError(f"the endpoint's metadata is not of its agent {there.agent!r}; do both sides run one nixl?")
    for region, place in there.places.items():
        inside = place.size >= 1 and 0 < place.address < ADDRESS_MAX - place.size
        if not 0 <= region < REGIONS_MAX or not inside or not 0 <= (place.device or 0) < DEVICES_MAX:
            raise ValueError(f"the endpoint's region {region} is out of bounds: {place}")
    return there


def _is_named_after(agent: str, owner: PeerId) -> bool:
    incarnation, _, rest = agent.partition(".")
    nonce, _, worker = rest.partition(".")
    return (incarnation, worker) == (str(owner.incarnation), owner.worker) and len(nonce) == 2 * NONCE_BYTES


def _stat_of(pid: int) -> _Stat | None:
    """What /proc says about a process; None when it says nothing."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as stat:
            fields = stat.read().rpartition(b")")[2].split()
    except OSError:
        return None
    state, threads, started = fields[0].decode(), int(fields[17]), int(fields[19])
    return _Stat(started, dead=state in DEAD_STATES and threads <= 1)


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


GRIDS_MAX = 64
SLOTS_MAX = 1 << 31  # NIXL counts in int32


class NixlPlace(msgspec.Struct, frozen=True, array_like=True):
    """The place of a region in its process. `device`: of its memory; None: the host."""

    address: Number
    size: Bytes
    device: Number | None = None


class Grid(msgspec.Struct, frozen=True):
    """Slots of `size` bytes, one after the other, from `first` on."""

    region: int
    first: int
    size: int
    count: int


@dataclass(frozen=True, slots=True)
class ListChoice:
    """The spans of a copy on one side: indices in a grid, or a table of (address, bytes, device)."""

    place: NixlPlace
    grid: Grid | None
    table: np.ndarray[tuple[int, ...], np.dtype[Any]]


def grid_of(region: int, region_bytes: int, offsets: Rows, sizes: Rows) -> Grid | None:
    """The grid that all spans lie on, or None. No span is empty."""
    size = int(sizes[0])
    first = int(offsets[0]) % size
    count = (region_bytes - first) // size
    if count >= SLOTS_MAX or (sizes != size).any() or ((offsets - first) % size).any():
        return None
    return Grid(region, first, size, count)


def without_empty(spans: Spans) -> Spans:
    """Triples without the empty ones: NIXL accepts no such descriptor."""
    rows = np.frombuffer(spans, np.int64).reshape(-1, 3)
    if rows[:, 2].all():
        return spans
    kept = array("q")
    kept.frombytes(rows[rows[:, 2] > 0].tobytes())
    return kept


def merged(spans: Spans) -> Spans:
    """Triples, with those joined that are adjacent on both sides, if that leaves at most half as many."""
    rows = np.frombuffer(spans, np.int64).reshape(-1, 3)
    if len(rows) < 2:
        return spans
    follows = (rows[1:, :2] == rows[:-1, :2] + rows[:-1, 2:]).all(axis=1)
    if 2 * np.count_nonzero(follows) < len(rows):
        return spans
    heads = np.flatnonzero(np.concatenate(([True], ~follows)))
    joined = rows[heads].copy()
    joined[:, 2] = np.add.reduceat(rows[:, 2], heads)
    kept = array("q")
    kept.frombytes(joined.tobytes())
    return kept


class Lists:
    """The lists of one side: this process (`remote` empty) or one agent that NIXL knows."""

    def __init__(self, agent: Agent, remote: str, places: dict[int, NixlPlace]) -> None:
        self._agent = agent
        self._remote = remote
        self._places = places
        self._grids: dict[Grid, int] = {}  # the last one used is last

    def choose(self, region: int, offsets: Rows, sizes: Rows) -> ListChoice:
        """How the spans of a copy are named. Once per copy: it costs more than the rest of a small request."""
        place = self._places[region]
        grid = grid_of(region, place.size, offsets, sizes)
        if grid is None:
            devices = np.full_like(sizes, place.device or 0)
            return ListChoice(place, None, np.stack((offsets + place.address, sizes, devices), axis=1))
        return ListChoice(place, grid, ((offsets - grid.first) // grid.size).astype(np.int32))

    @contextlib.contextmanager
    def select(self, choice: ListChoice, low: int, high: int) -> Iterator[tuple[int, Indices]]:
        """A list and the indices in it of spans `low` to `high`, for the time of making a request."""
        if choice.grid is not None:
            yield self._prepared(choice.grid, choice.place), choice.table[low:high]
            return
        handle = self._agent.prepare(self._remote, choice.table[low:high], choice.place.device)
        try:
            yield handle, np.arange(high - low, dtype=np.int32)
        finally:
            self._agent.drop_list(handle)

    def clear(self) -> None:
        """Release every list: before NIXL forgets the memory that they name, or right after."""
        while self._grids:
            self._agent.drop_list(self._grids.popitem()[1])

    def _prepared(self, grid: Grid, place: NixlPlace) -> int:
        handle = self._grids.pop(grid, None)
        if handle is None:
            if len(self._grids) >= GRIDS_MAX:
                self._agent.drop_list(self._grids.pop(next(iter(self._grids))))
            row = (place.address + grid.first, grid.size, place.device or 0, grid.size, grid.count)
            handle = self._agent.prepare(self._remote, np.array([row], np.int64), place.device)
        self._grids[grid] = handle
        return handle
