"""A cluster on this machine: keys, a router in this process, workers as processes of their own.

Laws: every child is ended by its pid, and what it started with it, in bounded time, however this ends; children that
outlive a killed parent see their stdin end and stop, and its keys go with it. Nothing is restarted: a death is told,
with the command that starts the worker again. What a worker runs is its plan's business: this module knows words and
variables.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shlex
import shutil
import signal
import sys
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import msgspec

from kvbaton.cli.arguments import CommandError, StoppedError
from kvbaton.cli.fronting import Front, Sources, dumping, fronted
from kvbaton.cli.keys import ALWAYS
from kvbaton.cli.worker import argv_of
from kvbaton.control import keyring
from kvbaton.control.key_room import key_room
from kvbaton.engines.embedded.worker_options import WorkerOptions
from kvbaton.ranks.store_address import STORE_NAME
from kvbaton.router.router_settings import RouterSettings
from kvbaton.router.workers.directory import Worker

COMMAND: list[str] = [sys.executable, "-m", "kvbaton.cli.main"]
"""Starts a process of this program."""
STOP_S = 5.0
NEWS_S = 15.0
LOG_LINES = 5
LINE_CHARS_MAX = 120

Say = Callable[[str], None]


class Member(msgspec.Struct, frozen=True):
    """One worker to start: what runs it, and what an operator types to run it again."""

    name: str
    role: str
    argv: Sequence[str]
    command: str
    env: Mapping[str, str] = {}  # on top of this process's
    stop: signal.Signals = signal.SIGTERM  # ends it soon; one that would drain on this is told otherwise
    registers: bool = True  # a store does not


class Startable(Protocol):
    """What a cluster is made from."""

    @property
    def settings(self) -> RouterSettings: ...
    @property
    def host(self) -> str: ...
    @property
    def port(self) -> int: ...
    @property
    def start_s(self) -> float:
        """Within which every worker must have registered."""

    def names(self) -> list[str]:
        """Whom to mint keys for: `NAME`, or `NAME:ROLE` of who may not play every part."""

    def members(self, directory: str, registry: str) -> list[Member]:
        """The workers, for keys in `directory` and a registry that listens."""


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """Embedded engines. `worker` holds what all share; name, role, keys and registry are filled in."""

    prefills: int
    decodes: int
    tp_prefill: int
    tp_decode: int
    worker: WorkerOptions
    settings: RouterSettings
    host: str = "127.0.0.1"
    port: int = 0
    start_s: float = 60.0
    store_port: int = 0  # of a store to start beside them; 0: none

    def names(self) -> list[str]:
        found = places(self.prefills, self.decodes, self.tp_prefill, self.tp_decode)
        names = [f"{place.name}:{place.role}" for place in found]
        return [*names, STORE_NAME] if self.store_port else names

    def members(self, directory: str, registry: str) -> list[Member]:
        found = [store_member(directory, self.store_port)] if self.store_port else []
        for place in places(self.prefills, self.decodes, self.tp_prefill, self.tp_decode):
            flights = self.worker.flight_dir or str(Path(directory).parent / "flights")
            changes = {**msgspec.structs.asdict(place), "keys": directory, "registry": registry, "flight_dir": flights}
            words = ["worker", *argv_of(msgspec.structs.replace(self.worker, **changes))]
            argv = [*COMMAND, *words, "--stop-on-eof"]
            command = shlex.join([*shown_command(), *words])
            found.append(Member(place.name, place.role, argv, command, stop=signal.SIGHUP))
        return found


def store_member(directory: str, port: int) -> Member:
    """A `kvbaton store` with the keys of a cluster."""
    words = ["store", "--keys", directory, "--port", str(port)]
    command = shlex.join([*shown_command(), *words])
    return Member(STORE_NAME, "store", [*COMMAND, *words, "--stop-on-eof"], command, registers=False)


class Place(msgspec.Struct, frozen=True):
    """A worker's name, what it does, and on how many ranks."""

    name: str
    role: str
    tp: int


def places(prefills: int, decodes: int, tp_prefill: int, tp_decode: int) -> list[Place]:
    """p0, p1, …, d0, d1, …"""
    both = (("prefill", prefills, tp_prefill), ("decode", decodes, tp_decode))
    return [Place(f"{role[0]}{number}", role, tp) for role, count, tp in both for number in range(count)]


@dataclass(slots=True)
class Child:
    """One worker process."""

    member: Member
    process: asyncio.subprocess.Process
    log: Path
    watcher: asyncio.Task[None] | None = None

    @property
    def name(self) -> str:
        return self.member.name

    @property
    def command(self) -> str:
        """What an operator types to start it again."""
        return self.member.command

    def last_lines(self, count: int = LOG_LINES) -> list[str]:
        with contextlib.suppress(OSError):
            return self.log.read_text(errors="replace").splitlines()[-count:]
        return []


@dataclass(slots=True)
class Cluster:
    """What runs. `deaths` are children that ended though nobody told them to."""

    front: Front
    directory: Path
    children: list[Child] = field(default_factory=list)
    deaths: asyncio.Queue[Child] = field(default_factory=asyncio.Queue)

    def registered(self) -> Sequence[Worker]:
        return self.front.directory.snapshot()


@contextlib.asynccontextmanager
async def running(plan: Startable, say: Say, stop: asyncio.Event) -> AsyncIterator[Cluster]:
    """A cluster whose workers are all registered; gone, with all its processes and files, after the context."""
    with key_room() as directory:
        keyring.mint(directory / "keys", [*ALWAYS, *plan.names()])
        sources = Sources(keyring=keyring.load(directory / "keys", "router"), registry_bind="tcp://127.0.0.1:0")
        async with (
            fronted(sources, plan.settings, host=plan.host, port=plan.port) as front,
            dumping(front.app.gathering, "router", str(directory / "flights")),
        ):
            cluster = Cluster(front, directory)
            try:
                for member in plan.members(str(directory / "keys"), front.registry_endpoint):
                    cluster.children.append(await start(member, directory, cluster.deaths))
                await _all_registered(cluster, plan.start_s, say, stop)
                yield cluster
            finally:
                await end(cluster.children)


async def start(member: Member, directory: Path, deaths: asyncio.Queue[Child]) -> Child:
    """Start a worker whose log goes to `directory`; whoever starts one ends it with `end`."""
    log = directory / f"{member.name}.log"
    with log.open("wb") as output:
        process = await asyncio.create_subprocess_exec(
            *member.argv,
            env={**os.environ, **member.env},
            stdin=asyncio.subprocess.PIPE,
            stdout=output,
            stderr=output,
            start_new_session=True,  # Ctrl-C is for the parent alone, which then ends its children in order
        )
    child = Child(member, process, log)
    child.watcher = asyncio.create_task(_watch(child, deaths))
    return child


async def _watch(child: Child, deaths: asyncio.Queue[Child]) -> None:
    await child.process.wait()
    _end_group(child)
    deaths.put_nowait(child)


async def _all_registered(cluster: Cluster, start_s: float, say: Say, stop: asyncio.Event) -> None:
    wanted = {child.name for child in cluster.children if child.member.registers}
    here: set[str] = set()
    say(f"starting {len(wanted)} workers: {' '.join(sorted(wanted))}")
    begun = told = asyncio.get_running_loop().time()
    while here != wanted:
        now = asyncio.get_running_loop().time()
        if stop.is_set():
            raise StoppedError
        if not cluster.deaths.empty():
            raise CommandError(obituary(cluster.deaths.get_nowait()))
        if now > begun + start_s:
            raise CommandError(_unfinished(cluster, wanted - here, start_s))
        now_here = {str(worker.name) for worker in cluster.registered()}
        if now_here - here:
            say(f"registered {len(now_here)} of {len(wanted)}: {' '.join(sorted(now_here))}")
        elif now > told + NEWS_S:
            told = now
            for child in cluster.children:
                if child.name not in now_here:
                    say(f"{now - begun:.0f} s: {child.name} is starting: {last_line(child)}")
        here = now_here
        await asyncio.sleep(0.02)


def last_line(child: Child) -> str:
    lines = [line for line in child.last_lines() if line.strip()]
    return lines[-1][:LINE_CHARS_MAX] if lines else "nothing in its log yet"


def _unfinished(cluster: Cluster, missing: set[str], start_s: float) -> str:
    said = " | ".join(f"{child.name}: {last_line(child)}" for child in cluster.children if child.name in missing)
    names = " ".join(sorted(missing))
    return f"{names} did not register within {start_s:.0f} s; is this machine very busy? {said}"


def obituary(child: Child) -> str:
    lines = " | ".join(child.last_lines()) or "nothing in its log"
    return f"worker {child.name} {how_it_ended(child)} before it could serve: {lines}"


def how_it_ended(child: Child) -> str:
    status = child.process.returncode or 0
    if status < 0:
        return f"(pid {child.process.pid}) was ended by {signal.Signals(-status).name}"
    return f"(pid {child.process.pid}) ended with status {status}"


async def end(children: Sequence[Child]) -> None:
    """Ask, wait, and then insist."""
    for child in children:
        if child.watcher is not None:
            child.watcher.cancel()
        _signal(child, child.member.stop)
    exits = [asyncio.create_task(child.process.wait()) for child in children]
    if not exits:
        return
    _, late = await asyncio.wait(exits, timeout=STOP_S)
    if late:
        for child in children:
            _signal(child, signal.SIGKILL)
        await asyncio.wait(exits, timeout=STOP_S)
    for child in children:
        _end_group(child)


def _signal(child: Child, number: signal.Signals) -> None:
    if child.process.returncode is None:
        with contextlib.suppress(ProcessLookupError):
            child.process.send_signal(number)


def _end_group(child: Child) -> None:
    """End what a worker's first process left behind when it ended: the rest of the group that it led."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(child.process.pid, signal.SIGKILL)


def shown_command() -> list[str]:
    """This program as the operator called it, where that can be typed again."""
    called = Path(sys.argv[0])
    if called.name == "kvbaton" and called.exists():
        return [sys.argv[0] if shutil.which("kvbaton") != str(called.resolve()) else "kvbaton"]
    return COMMAND
