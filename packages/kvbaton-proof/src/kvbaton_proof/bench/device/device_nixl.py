"""NIXL between two processes on one GPU, driven directly: prepared lists, READ, one request for all segments.

Each setting gets a fresh pair of processes, because UCX reads its environment once. `SETTINGS` is what was tried; the
best of them by the largest size that it finished is what the benchmark reports.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import statistics
import sys
import time
from typing import Any

import msgspec
import numpy as np

from kvbaton.transports.cuda.cuda_driver import CudaGpu
from kvbaton_proof.bench.device.device_world import (
    BLOCK_BYTES,
    DEVICE,
    REGION_BYTES,
    Cache,
    blocks_of,
    pattern,
    spans_of,
)
from kvbaton_proof.bench.kit.piped_children import ChildFailed, Parent, PipedChild

MODULES = ("nixl_cu13", "nixl_cu12", "nixl")
LIMIT_S = 20.0
"""A size that would take longer, by the rate of the one before, is left out."""


class Setting(msgspec.Struct, frozen=True):
    """What UCX is told by its environment, and NIXL's back end by parameters. `whole`: one descriptor for all."""

    name: str
    environment: dict[str, str] = {}
    parameters: dict[str, str] = {}
    whole: bool = False
    progress: bool = True


NO_ERRORS = {"ucx_error_handling_mode": "none"}
ZCOPY = {"UCX_CUDA_IPC_ENABLE_GET_ZCOPY": "on"}
IPC = {**ZCOPY, "UCX_TLS": "cuda_ipc,cuda_copy,sm,self,tcp"}
THREADS = {"num_workers": "4", "num_threads": "4", "split_batch_size": "1024"}
MORE_THREADS = {"num_workers": "8", "num_threads": "8", "split_batch_size": "256"}
SETTINGS = (
    Setting("as installed"),
    Setting("no error handling", {}, NO_ERRORS),
    Setting("no error handling, get_zcopy, cuda_ipc", IPC, NO_ERRORS),
    Setting("the same, no progress thread", IPC, NO_ERRORS, progress=False),
    Setting("the same, 4 workers and threads", IPC, {**NO_ERRORS, **THREADS}),
    Setting("the same, 8 workers and threads", {**IPC, "UCX_CUDA_IPC_MAX_POLL": "1024"}, {**NO_ERRORS, **MORE_THREADS}),
    Setting("the same, one descriptor (contiguous)", IPC, NO_ERRORS, whole=True),
)
"""`NIXL_UCX_SGL_ENABLE` and a longer UCX_TLS were tried too, and changed nothing (docs/lab/2026-11-15-cuda.md)."""


class Reads(msgspec.Struct, frozen=True):
    """What one setting reached: medians by number of blocks, and whether every byte was right."""

    setting: str
    ms: dict[int, float] = {}
    right: bool = False
    problem: str = ""


class Serve(msgspec.Struct, frozen=True):
    """The first question to the prefill side."""


class Told(msgspec.Struct, frozen=True):
    metadata: bytes
    address: int


class Read(msgspec.Struct, frozen=True):
    counts: tuple[int, ...]
    repetitions: int


def installed() -> str:
    """The module to use; empty where there is none."""
    return next((name for name in MODULES if importlib.util.find_spec(name)), "")


def measure(
    counts: tuple[int, ...], repetitions: int, say: Any, settings: tuple[Setting, ...] = SETTINGS
) -> list[Reads]:
    """Every setting, one after the other."""
    found = []
    for setting in settings:
        say(f"NIXL, {setting.name} …")
        try:
            with PipedChild(
                "kvbaton_proof.bench.device.device_nixl", "read", json.dumps(msgspec.to_builtins(setting))
            ) as child:
                found.append(child.ask(Read(counts, repetitions), Reads, 90.0))
        except ChildFailed as error:
            found.append(Reads(setting.name, problem=str(error)[-400:]))
        say(f"  {found[-1]}")
    return found


class Agent:
    """A NIXL agent that has registered one cache."""

    def __init__(self, name: str, setting: Setting) -> None:
        os.environ.update(setting.environment)
        api: Any = importlib.import_module(f"{installed()}._api")
        self.gpu = CudaGpu(DEVICE)
        self.gpu.enter()
        self.cache = Cache(self.gpu)
        self.nixl = api.nixl_agent(name, api.nixl_agent_config(enable_prog_thread=setting.progress, backends=[]))
        self.nixl.create_backend("UCX", setting.parameters)
        self.nixl.register_memory([(self.cache.address, REGION_BYTES, DEVICE, "")], "VRAM")


def serve(setting: Setting) -> None:
    parent = Parent()
    for _question in parent.questions(Serve):
        agent = Agent("bench-p", setting)
        agent.cache.fill(pattern())
        parent.answer(Told(agent.nixl.get_agent_metadata(), agent.cache.address))


def read(setting: Setting) -> None:
    parent = Parent()
    for question in parent.questions(Read):
        with PipedChild(
            "kvbaton_proof.bench.device.device_nixl", "serve", json.dumps(msgspec.to_builtins(setting))
        ) as peer:
            told = peer.ask(Serve(), Told, 60.0)
            parent.answer(_read(Agent("bench-d", setting), setting, told, question))


def _read(agent: Agent, setting: Setting, told: Told, question: Read) -> Reads:
    remote = agent.nixl.add_remote_agent(told.metadata)
    words, ms, right = pattern(), dict[int, float](), True
    for count in question.counts:
        if ms and ms[max(ms)] * count / max(ms) > LIMIT_S * 1000 / 2:
            break
        source, target = blocks_of(1, count), blocks_of(2, count)
        rows = np.frombuffer(spans_of(source, target), np.int64).reshape(-1, 3)
        if setting.whole:
            rows = np.array([[0, 0, count * BLOCK_BYTES]])
        lists = []
        for who, base, column in (("", agent.cache.address, 0), (remote, told.address, 1)):
            table = np.stack((base + rows[:, column], rows[:, 2], np.full(len(rows), DEVICE)), axis=1)
            lists.append(agent.nixl.prep_xfer_dlist(who, table, "VRAM"))
        indices = np.arange(len(rows), dtype=np.int32)
        request = agent.nixl.make_prepped_xfer("READ", lists[0], indices, lists[1], indices)
        agent.cache.wipe()
        took = [_transfer(agent, request)]
        if setting.whole:
            right &= agent.cache.begins_with(words, count * BLOCK_BYTES)
        else:
            right &= agent.cache.holds(words, source, target)
        while len(took) <= question.repetitions and sum(took) + took[-1] < LIMIT_S:
            took.append(_transfer(agent, request))
        ms[count] = round(statistics.median(took[1:] or took) * 1000, 3)
        agent.nixl.release_xfer_handle(request)
    return Reads(setting.name, ms, right)


def _transfer(agent: Agent, request: Any) -> float:
    begun = time.perf_counter()
    state = agent.nixl.transfer(request)
    while state == "PROC":
        state = agent.nixl.check_xfer_state(request)
    if state != "DONE":
        raise RuntimeError(f"NIXL says {state}")
    return time.perf_counter() - begun


if __name__ == "__main__":
    {"serve": serve, "read": read}[sys.argv[1]](msgspec.convert(json.loads(sys.argv[2]), Setting))
