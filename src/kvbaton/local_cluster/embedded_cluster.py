"""A cluster on this machine: keys, a router in this process, workers as child processes.

Laws: every child is ended, however this ends, and the keys are removed with it. Nothing is restarted: an exit is
reported with the command that starts the worker again. A worker's command and environment come from its plan.
"""

from __future__ import annotations

import asyncio
import contextlib
import shlex
import shutil
import signal
import sys
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import msgspec

from kvbaton.control import keyring
from kvbaton.control.key_room import key_room
from kvbaton.control.keyring import data_parallel_name, engine_and_rank
from kvbaton.engines.embedded.worker_options import WorkerOptions, argv_of
from kvbaton.local_cluster.restart_orders import offer
from kvbaton.local_cluster.router_front import RouterHandle, Sources, dumping, run_router
from kvbaton.processes import process_logs
from kvbaton.processes.child_process import KVBATON_ARGV, Child, Program, Say, end, ready, start
from kvbaton.protocol.legality import Role
from kvbaton.ranks.store_trust import STORE_NAME
from kvbaton.router.router_settings import RouterSettings
from kvbaton.router.workers.directory import ListedEngine

STORE_ROLE = "store"
"""A name that does not register."""


class Startable(Protocol):
    """The description of a cluster."""

    @property
    def settings(self) -> RouterSettings: ...
    @property
    def host(self) -> str: ...
    @property
    def port(self) -> int: ...
    @property
    def router_processes(self) -> int: ...
    @property
    def start_s(self) -> float:
        """Time within which every worker must register."""

    def names(self) -> list[str]:
        """Names to create keys for: `NAME`, or `NAME:ROLE` for a restricted role."""

    def members(self, directory: str, registry: str) -> list[Program]:
        """The workers, for keys in `directory` and a listening registry."""


class ClusterPlan(msgspec.Struct, frozen=True, kw_only=True):
    """Embedded engines. `worker` has the shared options; name, role, keys and registry are filled in."""

    prefills: int
    decodes: int
    tp_prefill: int
    tp_decode: int
    worker: WorkerOptions
    settings: RouterSettings
    host: str = "127.0.0.1"
    port: int = 0
    router_processes: int = 1
    start_s: float = 60.0
    store_port: int = 0  # of a store to start with them; 0: none

    def names(self) -> list[str]:
        found = places(self.prefills, self.decodes, self.tp_prefill, self.tp_decode)
        both = Role.BOTH if self.worker.turn_s else None  # a P that takes turns reads, and a D that keeps them grants
        names = [f"{place.name}:{both or place.role}" for place in found]
        return [*names, STORE_NAME] if self.store_port else names

    def members(self, directory: str, registry: str) -> list[Program]:
        found = [store_member(directory, self.store_port)] if self.store_port else []
        for place in places(self.prefills, self.decodes, self.tp_prefill, self.tp_decode):
            flights = self.worker.flight_dir or str(Path(directory).parent / "flights")
            own = {"name": place.name, "role": place.role, "tp": place.tp}
            changes = {**own, "keys": directory, "registry": registry, "flight_dir": flights}
            words = ["worker", *argv_of(msgspec.structs.replace(self.worker, **changes))]
            argv = [*KVBATON_ARGV, *words, "--stop-on-eof"]
            command = shlex.join([*shown_command(), *words])
            env = process_logs.current().environment
            found.append(Program(place.name, place.role, argv, command, env, stop=signal.SIGHUP))
        return found


def store_member(directory: str, port: int) -> Program:
    """A `kvbaton store` with the keys of a cluster."""
    words = ["store", "--keys", directory, "--port", str(port)]
    command = shlex.join([*shown_command(), *words])
    env = process_logs.current().environment
    return Program(STORE_NAME, STORE_ROLE, [*KVBATON_ARGV, *words, "--stop-on-eof"], command, env)


class ClusterPlace(msgspec.Struct, frozen=True):
    """A worker's name, what it does, and on how many ranks; vLLM's may be several data-parallel ones."""

    name: str
    role: str
    tp: int
    dp: int = 1

    @property
    def members(self) -> list[str]:
        """Those that register."""
        return [data_parallel_name(self.name, rank) for rank in range(self.dp)] if self.dp > 1 else [self.name]


def places(prefills: int, decodes: int, tp_prefill: int, tp_decode: int) -> list[ClusterPlace]:
    """p0, p1, …, d0, d1, …"""
    both = (("prefill", prefills, tp_prefill), ("decode", decodes, tp_decode))
    return [ClusterPlace(f"{role[0]}{number}", role, tp) for role, count, tp in both for number in range(count)]


@dataclass(slots=True)
class Cluster:
    """A running cluster. `deaths` are children that exited without being told to."""

    front: RouterHandle
    directory: Path
    children: list[Child] = field(default_factory=list)
    deaths: asyncio.Queue[Child] = field(default_factory=asyncio.Queue)

    def registered(self) -> Sequence[ListedEngine]:
        return self.front.directory.snapshot()

    async def restart(self, name: str) -> None:
        """Another life of a worker that has drained, by the same command."""
        for number, child in enumerate(self.children):
            if child.name == name:
                await end([child])
                self.children[number] = await start(child.program, self.directory / f"{name}.log", deaths=self.deaths)


@contextlib.asynccontextmanager
async def running(plan: Startable, say: Say, stop: asyncio.Event) -> AsyncIterator[Cluster]:
    """A cluster whose workers are all registered; after the context its processes and files are gone."""
    with key_room() as directory:
        keyring.mint(directory / "keys", [*keyring.ALWAYS, *plan.names()])
        sources = Sources(keyring=keyring.load(directory / "keys", "router"), registry_bind="tcp://127.0.0.1:0")
        async with (
            run_router(
                sources, plan.settings, host=plan.host, port=plan.port, processes=plan.router_processes
            ) as front,
            dumping(front.app.gathering, "router", str(directory / "flights")),
        ):
            cluster = Cluster(front, directory)
            try:
                for member in plan.members(str(directory / "keys"), front.registry_endpoint):
                    log = directory / f"{member.name}.log"
                    cluster.children.append(await start(member, log, deaths=cluster.deaths))
                await _all_registered(cluster, plan, say, stop)
                offer(directory, [child.name for child in cluster.children if child.program.role != STORE_ROLE])
                yield cluster
            finally:
                await end(cluster.children)


async def _all_registered(cluster: Cluster, plan: Startable, say: Say, stop: asyncio.Event) -> None:
    wanted = {name.partition(":")[0] for name in plan.names()} - {STORE_NAME}
    here: set[str] = set()
    say(f"starting {len(wanted)} workers: {' '.join(sorted(wanted))}")

    def child_of(name: str) -> str:
        rank = engine_and_rank(name)
        return name if rank is None else rank[0]

    async def missing() -> set[str]:
        nonlocal here
        now_here = {str(worker.name) for worker in cluster.registered()}
        if now_here - here:
            say(f"registered {len(now_here)} of {len(wanted)}: {' '.join(sorted(now_here))}")
        here = now_here
        return {child_of(name) for name in wanted - here}

    await ready(missing, cluster.children, plan.start_s, say, stop=stop, verb="register", look_s=0.02)


def shown_command() -> list[str]:
    """This program as the operator called it, if that can be typed again."""
    called = Path(sys.argv[0])
    if called.name == "kvbaton" and called.exists():
        return [sys.argv[0] if shutil.which("kvbaton") != str(called.resolve()) else "kvbaton"]
    return list(KVBATON_ARGV)
