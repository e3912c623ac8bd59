"""The one module that calls mori (`mori.io`, ROCm only): an engine, its sessions, and the meaning of its statuses.

Laws:
 - Only `MoriError` and `MoriMissing` leave, and ValueError for an invalid description from a peer.
 - A status lives for as long as mori may write to it: mori's threads hold its bare address. So the starter of a batch
   keeps its status until it is over, then hands it to `bury`, which keeps the last `BURIED_MAX`: mori wakes waiters
   *after* it has stored the code that says that it is over.
 - A read that arrived is at rest. One that failed is at rest only where `in_order` holds: one queue pair carries a
   batch, posted as one chain with one signalled tail, so that its error comes after all of it. With several, mori
   reports the first error while the others go on.

Based on mori's sources (August 2026); run on no hardware: docs/transports-mori.md says what to check first. Threads:
`open` (which holds the GIL while it talks to the peer) and `read` belong on the mover's; the rest is quick.
"""

from __future__ import annotations

import enum
import importlib
import logging
import os
from collections import deque
from dataclasses import dataclass
from typing import Any

import msgspec

from kvbaton.protocol.ids import PeerId
from kvbaton_mori.endpoint import MoriEndpoint, is_named_after

log = logging.getLogger(__name__)

ADVICE = "install amd_mori (it needs ROCm and an RDMA device), or remove 'mori' from transport"
BURIED_MAX = 1024
ADDRESS_MAX = 1 << 64
CPU_DEVICE = -1

SUCCESS = 0
ERRORS_ABOVE = 10
RDMA_FAILED = 13
NEVER_BEGUN = frozenset({11, 12, 14})
"""Arguments, not found, bad state: found before anything is posted."""

QUEUE_FULL = "SQ full"
"""Back-pressure has no code of its own, only this text."""

DISORDER = (
    "MORI_IO_QP_PER_TRANSFER",
    "MORI_IO_NUM_WORKER_THREADS",
    "MORI_IO_POST_BATCH_SIZE",
    "MORI_IO_ENABLE_CHUNKING",
    "MORI_IO_ENABLE_NOTIFICATION",
    "MORI_IO_NUM_NICS_PER_TRANSFER",
)
"""mori puts these above what it is configured with; with any of them set, an error proves no rest."""


class MoriMissing(ImportError):
    """mori cannot be loaded; the message says what to do."""


class MoriError(Exception):
    """A call that mori refused."""

    def __init__(self, call: str, problem: object) -> None:
        super().__init__(f"mori: {call}: {problem}")


class MoriOutcome(enum.Enum):
    """The state of a batch."""

    MOVING = "moving"
    ARRIVED = "arrived"
    FULL = "full"  # send queue full: to be retried
    REFUSED = "refused"  # nothing was started
    FAILED = "failed"


class MoriPlace(msgspec.Struct, frozen=True):
    """Memory of this process: of the host, or of the device with that number."""

    address: int
    size: int
    device: int = CPU_DEVICE


@dataclass(frozen=True, slots=True)
class Plot:
    """A region as mori describes it."""

    size: int
    desc: Any


@dataclass(frozen=True, slots=True)
class Far:
    """A peer's engine and its regions, as mori describes them."""

    key: str
    engine: Any
    regions: dict[int, Plot]


def load() -> Any:
    """`mori.io`; MoriMissing where it is unavailable."""
    try:
        return importlib.import_module("mori.io")
    except (ImportError, OSError) as error:  # OSError: the ROCm libraries that it links
        raise MoriMissing(f"the transport 'mori' cannot load mori.io ({error}): {ADVICE}") from error


class MoriEngine:
    """One engine with an RDMA back end. `library` is `mori.io`, or something of its shape."""

    def __init__(self, key: str, host: str, queues: int, dial_s: float, library: Any = None) -> None:
        # The one way to bound `open`, which stops every thread of this process; an operator's own value comes first.
        os.environ.setdefault("MORI_IO_CP_TIMEOUT_MS", str(max(1, round(1000 * dial_s))))
        self._mori: Any = library if library is not None else load()
        self._buried: deque[Any] = deque(maxlen=BURIED_MAX)
        self.key = key
        disorder = [name for name in DISORDER if name in os.environ]
        if disorder:
            log.warning("[mori-unordered] failed reads stay in quarantine for good: %s", ", ".join(disorder))
        self.in_order = queues == 1 and not disorder
        mori = self._mori
        self._rdma = mori.BackendType.RDMA
        self._engine: Any = _ask("engine", mori, "IOEngine", key, mori.IOEngineConfig(host=host, port=0))
        backend = mori.RdmaBackendConfig(
            qp_per_transfer=queues, post_batch_size=-1, num_worker_threads=1, enable_notification=False
        )
        _ask("RDMA back end", self._engine, "create_backend", self._rdma, backend)

    def describe(self) -> bytes:
        return bytes(_ask("description", self._engine.get_engine_desc(), "pack"))

    def register(self, place: MoriPlace) -> Any:
        """For reading and writing, by every peer: mori knows no narrower registration."""
        kinds = self._mori.MemoryLocationType
        kind = kinds.CPU if place.device == CPU_DEVICE else kinds.GPU
        return _ask("register", self._engine, "register_memory", place.address, place.size, place.device, kind)

    def deregister(self, desc: Any) -> None:
        _ask("deregister", self._engine, "deregister_memory", desc)

    def understand(self, peer: PeerId, there: MoriEndpoint) -> Far:
        """The endpoint in mori's own terms; ValueError for one that is not `peer`'s."""
        try:
            engine = _ask("engine of the peer", self._mori.EngineDesc, "unpack", there.engine)
            regions = {
                region: _ask(f"region {region} of the peer", self._mori.MemoryDesc, "unpack", packed)
                for region, packed in there.regions.items()
            }
        except MoriError as error:
            raise ValueError(f"not an endpoint of mori: {error}; do both sides run one mori?") from None
        if there.owner != peer or not is_named_after(engine.key, peer):
            raise ValueError(f"the endpoint belongs to {there.owner} and engine {engine.key!r}, not to {peer}")
        for region, desc in regions.items():
            if desc.engine_key != engine.key:
                raise ValueError(f"the endpoint's region {region} is of engine {desc.engine_key!r}, not {engine.key!r}")
            if desc.size < 1 or not 0 < desc.data <= ADDRESS_MAX - desc.size:
                raise ValueError(f"the endpoint's region {region} is out of bounds: {desc.data}+{desc.size}")
        return Far(engine.key, engine, {region: Plot(desc.size, desc) for region, desc in regions.items()})

    def meet(self, far: Far) -> None:
        """Tell mori how to connect to the peer; connects to nothing."""
        _ask("meet", self._engine, "register_remote_engine", far.engine)

    def part(self, far: Far) -> None:
        """No new session with the peer; its queue pairs stay as they are."""
        _ask("part", self._engine, "deregister_remote_engine", far.engine)

    def open(self, here: Any, there: Any) -> Any:
        """A session between two regions. The first one connects to the peer, with the GIL held, for up to the dial
        time."""
        session = _ask("session", self._engine, "create_session", here, there)
        if session is None:
            raise MoriError("session", "no backend reaches the peer's memory; is its engine still running?")
        return session

    def is_alive(self, session: Any) -> bool:
        return bool(_ask("session", session, "alive"))

    def ticket(self, session: Any) -> int:
        """A number for a batch. A retried one keeps it, since mori picks its queue pairs by it."""
        return int(_ask("number", session, "allocate_transfer_uid"))

    def read(self, session: Any, here: list[int], there: list[int], sizes: list[int], uid: int) -> Any:
        """Start; the status of the batch, which the caller keeps. Waits for up to 5 s in mori if its queue is full."""
        return _ask("read", session, "batch_read", here, there, sizes, uid)

    def look(self, status: Any, posting: bool = False) -> tuple[MoriOutcome, str]:
        """The outcome of a batch, and mori's message for it. `posting`: `read` has only just returned."""
        found = _ask("status", status, "Code")
        code = int(found)
        if code == SUCCESS:
            return MoriOutcome.ARRIVED, ""
        if code <= ERRORS_ABOVE:
            return MoriOutcome.MOVING, ""
        message = str(_ask("status", status, "Message"))
        words = f"mori: {getattr(found, 'name', code)}: {message}".rstrip(": ")
        if posting and code in NEVER_BEGUN:
            return MoriOutcome.REFUSED, words
        if posting and code == RDMA_FAILED and QUEUE_FULL in message:
            return MoriOutcome.FULL, words
        return MoriOutcome.FAILED, words

    def bury(self, status: Any) -> None:
        """Of a batch that is over."""
        self._buried.append(status)

    def close(self) -> None:
        """Destroy every queue pair and registration: after this no read lands, and mori writes to no status."""
        if self._engine is not None:
            _ask("close", self._engine, "remove_backend", self._rdma)
            self._engine = None
            self._buried.clear()


def _ask(call: str, target: Any, name: str, *arguments: Any) -> Any:
    """Every call goes through here, and its errors are translated here: also that mori no longer has such a call."""
    try:
        return getattr(target, name)(*arguments)
    except Exception as error:  # noqa: BLE001 - what C++ throws comes as RuntimeError, TypeError, ValueError and more
        raise MoriError(call, f"{type(error).__name__} {error}".rstrip()) from None
