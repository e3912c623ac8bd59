"""NIXL driven directly, as fast as we know how, and by kvbaton in the same configuration.

Law: what is measured of NIXL is NIXL: its bindings, descriptor lists prepared once, indices ready before the clock
starts, one request for the whole copy (several were no faster). Its own Python class is passed over because its
progress thread spins (see `transports/nixl/nixl_agent.py`), which halves its speed on two cores.
"""

from __future__ import annotations

import threading
import time
from typing import Any

import msgspec
import numpy as np

from kvbaton.transports.core.transport import Spans
from kvbaton.transports.nixl.nixl_agent import BACKEND, WAKE_US, load_bindings
from kvbaton.transports.nixl.nixl_transport import UCX, NixlConfig, NixlTransport
from kvbaton_proof.bench.transfer.workload import COPY_DEADLINE_S, Driven, P, reader_id

TCP = {**UCX, "TLS": "tcp"}
POLL_S = 0.0002  # polling without a pause takes the core that moves the bytes


class Setup(msgspec.Struct, frozen=True):
    """One configuration of NIXL. A side without a progress thread drives NIXL by polling it, without a pause."""

    ucx: dict[str, str]
    parameters: dict[str, str] = {}
    thread: bool = True
    far_thread: bool = True


SETUPS = {
    "nixl": Setup(UCX),
    "nixl_2_threads": Setup(UCX, {"num_threads": "2"}),
    "nixl_no_thread": Setup(UCX, thread=False),
    "nixl_tcp": Setup(TCP),
    "nixl_tcp_spin": Setup(TCP, thread=False, far_thread=False),
}
DRIVEN = {"kvbaton_nixl": UCX, "kvbaton_nixl_tcp": TCP}


class At(msgspec.Struct, frozen=True):
    """Where the source's memory is, for one agent."""

    address: int
    metadata: bytes


class _Agent:
    """A NIXL agent with all of one memory registered."""

    def __init__(self, name: str, setup: Setup, thread: bool, memory: memoryview) -> None:
        self._nixl: Any = load_bindings()
        config = self._nixl.nixlAgentConfig()
        config.useProgThread = thread
        config.useListenThread = False
        config.pthrDelay = WAKE_US
        config.syncMode = self._nixl.NIXL_THREAD_SYNC_RW
        options = ",".join(f"{key}={value}" for key, value in setup.ucx.items())
        self.agent: Any = self._nixl.nixlAgent(name, config)
        self._backend = [self.agent.createBackend(BACKEND, {"engine_config": options, **setup.parameters})]
        self.address = np.frombuffer(memory, np.uint8).ctypes.data
        listed = self._nixl.nixlRegDList(self._nixl.DRAM_SEG, [(self.address, memory.nbytes, 0, "")])
        self.agent.registerMem(listed, self._backend)

    def prepare(self, who: str, address: int, segment_bytes: int, count: int) -> int:
        """A list of every segment of a memory; of our own where `who` is empty."""
        table = np.array([[address, segment_bytes, 0, segment_bytes, count]], np.uint64)
        who = who or self._nixl.NIXL_INIT_AGENT
        return int(self.agent.prepXferDlist(who, self._nixl.DRAM_SEG, table, self._backend))

    def read(self, lists: tuple[int, int], here: Any, there: Any, poll_s: float) -> None:
        deadline = time.monotonic() + COPY_DEADLINE_S
        sides = lists[0], here, lists[1], there
        request = self.agent.makeXferReq(self._nixl.NIXL_READ, *sides, "", self._backend, False)
        state = self.agent.postXferReq(request, "")
        while state != self._nixl.NIXL_SUCCESS:
            if time.monotonic() > deadline:
                raise RuntimeError(f"NIXL delivered nothing within {COPY_DEADLINE_S:.0f} s")
            if poll_s:
                time.sleep(poll_s)
            state = self.agent.getXferStatus(request)
        self.agent.releaseXferReq(request)


class Source:
    """P: one agent for each configuration, and kvbaton's transports."""

    def __init__(self, memory: memoryview) -> None:
        self._agents = {name: _Agent(f"p-{name}", setup, setup.far_thread, memory) for name, setup in SETUPS.items()}
        self._transports = {name: NixlTransport(P, NixlConfig(ucx=ucx)) for name, ucx in DRIVEN.items()}
        for transport in self._transports.values():
            transport.register(0, memory)
        self._spins = ""
        self._told = threading.Event()
        threading.Thread(target=self._spin, daemon=True).start()

    def offer(self) -> dict[str, bytes]:
        direct = {
            name: msgspec.msgpack.encode(At(each.address, bytes(each.agent.getLocalMD())))
            for name, each in self._agents.items()
        }
        return direct | {name: each.endpoint(reader_id(name)) for name, each in self._transports.items()}

    def spin(self, way: str) -> None:
        """Drive the agent of `way` by polling, from now on; of no way: none."""
        self._spins = way
        self._told.set()

    def close(self) -> None:
        for transport in self._transports.values():
            transport.close()

    def _spin(self) -> None:
        while True:
            if way := self._spins:
                self._agents[way].agent.getNotifs({}, [])
            else:
                self._told.wait()
                self._told.clear()


class Reader:
    """D: an agent for each configuration, and kvbaton's transports."""

    spins = frozenset(name for name, setup in SETUPS.items() if not setup.far_thread)
    ways = (*SETUPS, *DRIVEN)

    def __init__(self, memory: memoryview, offer: dict[str, bytes]) -> None:
        self._size_bytes = memory.nbytes
        self._agents: dict[str, tuple[_Agent, At, str]] = {}
        for name, setup in SETUPS.items():
            agent = _Agent(f"d-{name}", setup, setup.thread, memory)
            there = msgspec.msgpack.decode(offer[name], type=At)
            self._agents[name] = agent, there, str(agent.agent.loadRemoteMD(there.metadata), "utf-8")
        self._driven = {
            name: Driven(name, NixlTransport(reader_id(name), NixlConfig(ucx=ucx)), memory, offer[name])
            for name, ucx in DRIVEN.items()
        }
        self._lists: dict[tuple[str, int], tuple[int, int]] = {}
        self._segment_bytes = 0

    def prepare(self, segment_bytes: int, spans: Spans) -> None:
        self._segment_bytes, self._spans = segment_bytes, spans
        rows = (np.frombuffer(spans, np.int64).reshape(-1, 3) // segment_bytes).astype(np.int32)
        self._here, self._there = rows[:, 0].copy(), rows[:, 1].copy()
        count = self._size_bytes // segment_bytes
        for name, (agent, there, who) in self._agents.items():
            mine = agent.prepare("", agent.address, segment_bytes, count)
            self._lists[name, segment_bytes] = mine, agent.prepare(who, there.address, segment_bytes, count)

    def moved(self, way: str) -> Spans:
        return self._spans

    def run(self, way: str) -> None:
        if way in self._driven:
            self._driven[way].read(self._spans)
            return
        poll_s = POLL_S if SETUPS[way].thread else 0.0
        self._agents[way][0].read(self._lists[way, self._segment_bytes], self._here, self._there, poll_s)

    def close(self) -> None:
        for driven in self._driven.values():
            driven.close()
