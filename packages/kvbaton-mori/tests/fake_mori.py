"""A FAKE of mori.io, AMD's library: its public Python surface, between engines of one process, without its hardware.

For tests of `kvbaton_mori.transport` alone: pass a `FakeMori` as its `library`. Nothing that serves
requests imports this. Each instance is a world of its own; `wire` has what it saw and what is to go wrong.

Law: every name, argument and code is mori's (as of August 2026), and so is what hurts: a status is not kept alive by
its batch, errors stick, a full send queue is ERR_RDMA_OP with a text, nothing can be cancelled, and after an error the
two engines never again have a connection. What it does not imitate: device memory, XGMI and FABRIC, speed.
"""

from __future__ import annotations

import enum
import functools
import os
import socket
import time
from dataclasses import dataclass, field
from typing import Any, ClassVar

import msgspec
from fake_mori_wire import INVALID_ARGS, Row, Wire

POLL_S = 0.001


class BackendType(enum.IntEnum):
    Unknown = 0
    XGMI = 1
    RDMA = 2
    TCP = 3
    FABRIC = 4


class MemoryLocationType(enum.IntEnum):
    Unknown = 0
    CPU = 1
    GPU = 2


class StatusCode(enum.IntEnum):
    SUCCESS = 0
    INIT = 1
    IN_PROGRESS = 2
    ERR_INVALID_ARGS = 11
    ERR_NOT_FOUND = 12
    ERR_RDMA_OP = 13
    ERR_BAD_STATE = 14
    ERR_GPU_OP = 15


class PollCqMode(enum.IntEnum):
    POLLING = 0
    EVENT = 1


@dataclass
class IOEngineConfig:
    host: str = ""
    port: int = 0


@dataclass
class RdmaBackendConfig:
    qp_per_transfer: int = 1
    post_batch_size: int = -1
    num_worker_threads: int = -1
    poll_cq_mode: PollCqMode = PollCqMode.POLLING
    enable_notification: bool = True
    notif_per_qp: int = 1024
    enable_transfer_chunking: bool = False
    chunk_bytes: int = 65536
    max_chunks_per_transfer: int = 64
    num_nics_per_transfer: int = 1


@dataclass
class XgmiBackendConfig:
    num_streams: int = 64
    num_events: int = 64


class EngineDesc(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    key: str
    node_id: str
    hostname: str
    host: str
    port: int
    pid: int

    def pack(self) -> bytes:
        return msgspec.msgpack.encode(self)

    @staticmethod
    def unpack(packed: bytes) -> EngineDesc:
        return msgspec.msgpack.decode(packed, type=EngineDesc)


class MemoryDesc(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """In mori's own order, so that it is as large when packed."""

    engine_key: str
    id: int
    device_id: int
    device_bus_id: str
    data: int
    size: int
    loc: MemoryLocationType
    ipc_handle: bytes = bytes(64)
    numa_node: int = 0
    ipc_offset: int = 0
    fabric_handle: bytes = bytes(64)
    vpod_id: int = -1
    vpod_ppod_id: str = ""
    fabric_offset: int = 0
    fabric_alloc_size: int = 0

    def pack(self) -> bytes:
        return msgspec.msgpack.encode(self)

    @staticmethod
    def unpack(packed: bytes) -> MemoryDesc:
        return msgspec.msgpack.decode(packed, type=MemoryDesc)


class TransferStatus:
    """Makes progress when it is asked."""

    def __init__(self, wire: Wire | None = None) -> None:
        self._wire = wire
        self._code = StatusCode.INIT
        self._message = ""

    def Code(self) -> StatusCode:
        if self._wire is not None and self._code is StatusCode.IN_PROGRESS:
            self._wire.progress(self)
        return self._code

    def Message(self) -> str:
        return self._message

    def Update(self, code: StatusCode, message: str) -> None:
        if self._code < StatusCode.ERR_INVALID_ARGS:  # an error stays
            self._message = message
            self._code = code

    def SetCode(self, code: StatusCode) -> None:
        self._code = code

    def SetMessage(self, message: str) -> None:
        self._message = message

    def Init(self) -> bool:
        return self.Code() is StatusCode.INIT

    def InProgress(self) -> bool:
        return self.Code() is StatusCode.IN_PROGRESS

    def Succeeded(self) -> bool:
        return self.Code() is StatusCode.SUCCESS

    def Failed(self) -> bool:
        return self.Code() >= StatusCode.ERR_INVALID_ARGS

    def Wait(self) -> None:
        self.WaitFor(-1)

    def WaitFor(self, timeout_ms: int = -1) -> StatusCode:
        """For ever when negative, like mori."""
        deadline = time.monotonic() + timeout_ms / 1000
        while self.Code() is StatusCode.IN_PROGRESS and (timeout_ms < 0 or time.monotonic() < deadline):
            time.sleep(POLL_S)
        return self._code

    def _tell(self, code: int, message: str) -> None:
        self.Update(StatusCode(code), message)


class IOEngineSession:
    """Two regions, from engine to engine."""

    def __init__(self, engine: IOEngine, local: MemoryDesc, remote: MemoryDesc) -> None:
        self._engine = engine
        self._local = local
        self._remote = remote

    def allocate_transfer_uid(self) -> int:
        return self._engine.allocate_transfer_uid()

    def read(self, local_offset: int, remote_offset: int, size: int, uid: int) -> TransferStatus:
        return self.batch_read([local_offset], [remote_offset], [size], uid)

    def write(self, local_offset: int, remote_offset: int, size: int, uid: int) -> TransferStatus:
        return self.batch_write([local_offset], [remote_offset], [size], uid)

    def batch_read(self, local: list[int], remote: list[int], sizes: list[int], uid: int) -> TransferStatus:
        return self._begin(local, remote, sizes, uid, reading=True)

    def batch_write(self, local: list[int], remote: list[int], sizes: list[int], uid: int) -> TransferStatus:
        return self._begin(local, remote, sizes, uid, reading=False)

    def alive(self) -> bool:
        return True  # whatever became of it, like mori's

    def _begin(self, local: list[int], remote: list[int], sizes: list[int], uid: int, reading: bool) -> TransferStatus:
        if not all(type(number) is int and number >= 0 for number in (*local, *remote, *sizes, uid)):
            raise TypeError("incompatible function arguments: sizes and offsets are unsigned")
        wire = self._engine._wire
        status = TransferStatus(wire)
        status.SetCode(StatusCode.IN_PROGRESS)
        rows = list(zip(local, remote, sizes, strict=True))
        if any(here + size > self._local.size or there + size > self._remote.size for here, there, size in rows):
            status._tell(INVALID_ARGS, "length out of range")
            return status
        if not rows:
            status.SetCode(StatusCode.SUCCESS)
            return status
        places = [(self._local.data + here, self._remote.data + there, size) for here, there, size in rows]
        moves: list[Row] = places if reading else [(there, here, size) for here, there, size in places]
        code, message = wire.post(
            (self._engine._desc.key, self._remote.engine_key), uid, moves, self._engine._queues, status
        )
        if code >= 0:
            status._tell(code, message)
        elif self._engine._notifies:
            self._engine._fake.inbound.add((self._engine._desc.key, uid))
        return status


class IOEngine:
    """One engine of the fake world."""

    def __init__(self, fake: FakeMori, key: str, config: IOEngineConfig) -> None:
        self._fake = fake
        self._wire = fake.wire
        self._desc = EngineDesc(key, "node", socket.gethostname(), config.host, config.port, os.getpid())
        self._backends: dict[BackendType, Any] = {}
        self._known: dict[str, EngineDesc] = {}
        self._memory: dict[int, MemoryDesc] = {}
        self._memory_ids = 0
        self._uids = 0
        self._queues = 1
        self._notifies = False

    def get_engine_desc(self) -> EngineDesc:
        return self._desc

    def create_backend(self, type: BackendType, config: Any = None) -> None:
        if type not in {BackendType.RDMA, BackendType.XGMI, BackendType.FABRIC}:
            raise NotImplementedError("backend not implemented yet")
        if type is BackendType.RDMA:
            if self._fake.no_device:
                raise RuntimeError("no active RDMA device on this host")
            config = config or RdmaBackendConfig()
            self._queues, self._notifies = config.qp_per_transfer, config.enable_notification
            self._desc = msgspec.structs.replace(self._desc, port=self._desc.port or 40000 + len(self._fake.engines))
            self._fake.engines[self._desc.key] = self
        self._backends[type] = config

    def remove_backend(self, type: BackendType) -> None:
        if self._backends.pop(type, None) is not None and type is BackendType.RDMA:
            self._fake.engines.pop(self._desc.key, None)
            self._wire.forget(self._desc.key)

    def register_remote_engine(self, engine_desc: EngineDesc) -> None:
        self._known[engine_desc.key] = engine_desc

    def deregister_remote_engine(self, engine_desc: EngineDesc) -> None:
        self._known.pop(engine_desc.key, None)

    def register_memory(self, ptr: int, size: int, device_id: int, mem_loc: MemoryLocationType) -> MemoryDesc:
        desc = MemoryDesc(self._desc.key, self._memory_ids, device_id, "", ptr, size, mem_loc)
        self._memory_ids += 1
        self._memory[desc.id] = desc
        return desc

    def register_torch_tensor(self, tensor: Any) -> MemoryDesc:
        if not tensor.is_contiguous():
            raise RuntimeError("input tensor must be contiguous")
        size = tensor.nelement() * tensor.element_size()
        return self.register_memory(tensor.data_ptr(), size, -1, MemoryLocationType.CPU)

    def deregister_memory(self, mem_desc: MemoryDesc) -> None:
        self._memory.pop(mem_desc.id, None)

    def allocate_transfer_uid(self) -> int:
        self._uids += 1
        return self._uids - 1

    def create_session(self, local_mem: MemoryDesc, remote_mem: MemoryDesc) -> IOEngineSession | None:
        """None where no back end reaches the peer; raises where the peer does not answer, or has no such memory."""
        if BackendType.RDMA not in self._backends or remote_mem.engine_key not in self._known:
            return None
        self._fake.dials += 1
        other = self._fake.engines.get(remote_mem.engine_key)
        if other is None or remote_mem.engine_key in self._wire.dead:
            raise RuntimeError("connect: Connection refused")
        found = other._memory.get(remote_mem.id)
        if found is None or found.size != remote_mem.size:
            raise RuntimeError(f"remote MR size mismatch for engine {remote_mem.engine_key}")
        return IOEngineSession(self, local_mem, remote_mem)

    def read(self, local: MemoryDesc, l_off: int, remote: MemoryDesc, r_off: int, size: int, uid: int) -> Any:
        return self.batch_read([local], [[l_off]], [remote], [[r_off]], [[size]], [uid])[0]

    def write(self, local: MemoryDesc, l_off: int, remote: MemoryDesc, r_off: int, size: int, uid: int) -> Any:
        return self.batch_write([local], [[l_off]], [remote], [[r_off]], [[size]], [uid])[0]

    def batch_read(self, *lists: Any) -> list[TransferStatus]:
        return [session.batch_read(*rest) for session, rest in self._sessions(*lists)]

    def batch_write(self, *lists: Any) -> list[TransferStatus]:
        return [session.batch_write(*rest) for session, rest in self._sessions(*lists)]

    def pop_inbound_transfer_status(self, remote_key: str, transfer_uid: int) -> TransferStatus | None:
        if (remote_key, transfer_uid) not in self._fake.inbound:
            return None
        status = TransferStatus()
        status.SetCode(StatusCode.SUCCESS)
        return status

    def wait_all(self, statuses: list[TransferStatus], timeout_ms: int = -1) -> StatusCode:
        """The first error, else in progress if any is, else success."""
        codes = [status.WaitFor(timeout_ms) for status in statuses]
        return max(codes, key=lambda code: (code >= StatusCode.ERR_INVALID_ARGS, code), default=StatusCode.SUCCESS)

    def _sessions(self, local: Any, l_offs: Any, remote: Any, r_offs: Any, sizes: Any, uids: Any) -> Any:
        for here, here_at, there, there_at, size, uid in zip(local, l_offs, remote, r_offs, sizes, uids, strict=True):
            yield IOEngineSession(self, here, there), (here_at, there_at, size, uid)


@dataclass
class FakeMori:
    """Stands where the module `mori.io` would."""

    IS_FAKE: ClassVar[bool] = True
    BackendType: ClassVar[Any] = BackendType
    MemoryLocationType: ClassVar[Any] = MemoryLocationType
    StatusCode: ClassVar[Any] = StatusCode
    PollCqMode: ClassVar[Any] = PollCqMode
    IOEngineConfig: ClassVar[Any] = IOEngineConfig
    RdmaBackendConfig: ClassVar[Any] = RdmaBackendConfig
    XgmiBackendConfig: ClassVar[Any] = XgmiBackendConfig
    EngineDesc: ClassVar[Any] = EngineDesc
    MemoryDesc: ClassVar[Any] = MemoryDesc
    IOEngineSession: ClassVar[Any] = IOEngineSession

    wire: Wire = field(default_factory=Wire)
    engines: dict[str, IOEngine] = field(default_factory=dict)
    inbound: set[tuple[str, int]] = field(default_factory=set)
    no_device: bool = False
    dials: int = 0

    @property
    def IOEngine(self) -> Any:
        return functools.partial(IOEngine, self)

    def set_log_level(self, level: str) -> None:
        pass
