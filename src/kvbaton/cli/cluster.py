"""A cluster on this machine: keys, a router in this process, workers as processes of their own.

Laws: every child is ended by its pid, in bounded time, however this ends; children that outlive a killed parent see
their stdin end and stop. Nothing is restarted: a death is told, with the command that starts the worker again.
"""

from __future__ import annotations

import asyncio
import contextlib
import shlex
import shutil
import signal
import sys
import tempfile
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from kvbaton.cli.arguments import CommandError, StoppedError
from kvbaton.cli.fronting import Front, fronted
from kvbaton.cli.worker import argv_of
from kvbaton.control import keys
from kvbaton.engine.options import WorkerOptions
from kvbaton.router.directory import Worker
from kvbaton.router.settings import RouterSettings

COMMAND: list[str] = [sys.executable, "-m", "kvbaton.cli.main"]
"""Starts a process of this program."""
STOP_S = 5.0
START_S = 60.0
LOG_LINES = 5

Say = Callable[[str], None]


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """What to start. `worker` holds what all workers share; name, role, keys and registry are filled in."""

    prefills: int
    decodes: int
    tp_prefill: int
    tp_decode: int
    worker: WorkerOptions
    settings: RouterSettings
    host: str = "127.0.0.1"
    port: int = 0

    def members(self, directory: str, registry: str) -> list[WorkerOptions]:
        found = []
        for role, count, tp in (
            ("prefill", self.prefills, self.tp_prefill), ("decode", self.decodes, self.tp_decode),
        ):  # fmt: skip
            for number in range(count):
                name = f"{role[0]}{number}"
                changes = {"name": name, "role": role, "keys": directory, "registry": registry, "tp": tp}
                found.append(msgspec.structs.replace(self.worker, **changes))
        return found


@dataclass(slots=True)
class Child:
    """One worker process."""

    options: WorkerOptions
    process: asyncio.subprocess.Process
    log: Path
    watcher: asyncio.Task[None] | None = None

    @property
    def name(self) -> str:
        return self.options.name

    @property
    def command(self) -> str:
        """What an operator types to start it again."""
        return shlex.join([*_shown_command(), "worker", *argv_of(self.options)])

    def last_lines(self) -> list[str]:
        with contextlib.suppress(OSError):
            return self.log.read_text(errors="replace").splitlines()[-LOG_LINES:]
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
async def running(plan: Plan, say: Say, stop: asyncio.Event) -> AsyncIterator[Cluster]:
    """A cluster whose workers are all registered; gone, with all its processes and files, after the context."""
    directory = Path(tempfile.mkdtemp(prefix="kvbaton-"))
    try:
        names = [options.name for options in plan.members("-", "tcp://-:1")]
        keys.mint(directory / "keys", ["router", *names])
        keyring = keys.load(directory / "keys", "router")
        bind = "tcp://127.0.0.1:0"
        async with fronted(keyring, plan.settings, host=plan.host, port=plan.port, registry_bind=bind) as front:
            cluster = Cluster(front, directory)
            try:
                for options in plan.members(str(directory / "keys"), front.registry_endpoint):
                    cluster.children.append(await _start(cluster, options))
                await _all_registered(cluster, say, stop)
                yield cluster
            finally:
                await _stop(cluster.children)
    finally:
        shutil.rmtree(directory, ignore_errors=True)


async def _start(cluster: Cluster, options: WorkerOptions) -> Child:
    log = cluster.directory / f"{options.name}.log"
    with log.open("wb") as output:
        process = await asyncio.create_subprocess_exec(
            *COMMAND,
            "worker",
            *argv_of(options),
            "--stop-on-eof",
            stdin=asyncio.subprocess.PIPE,
            stdout=output,
            stderr=output,
            start_new_session=True,  # Ctrl-C is for the parent alone, which then ends its children in order
        )
    child = Child(options, process, log)
    child.watcher = asyncio.create_task(_watch(child, cluster.deaths))
    return child


async def _watch(child: Child, deaths: asyncio.Queue[Child]) -> None:
    await child.process.wait()
    deaths.put_nowait(child)


async def _all_registered(cluster: Cluster, say: Say, stop: asyncio.Event) -> None:
    wanted = {child.name for child in cluster.children}
    here: set[str] = set()
    say(f"starting {len(wanted)} workers: {' '.join(sorted(wanted))}")
    deadline = asyncio.get_running_loop().time() + START_S
    while here != wanted:
        if stop.is_set():
            raise StoppedError
        if not cluster.deaths.empty():
            raise CommandError(_obituary(cluster.deaths.get_nowait()))
        if asyncio.get_running_loop().time() > deadline:
            missing = " ".join(sorted(wanted - here))
            raise CommandError(f"{missing} did not register within {START_S:.0f} s; is this machine very busy?")
        now_here = {str(worker.name) for worker in cluster.registered()}
        if now_here - here:
            say(f"registered {len(now_here)} of {len(wanted)}: {' '.join(sorted(now_here))}")
        here = now_here
        await asyncio.sleep(0.02)


def _obituary(child: Child) -> str:
    lines = " | ".join(child.last_lines()) or "nothing in its log"
    return f"worker {child.name} {how_it_ended(child)} before it could serve: {lines}"


def how_it_ended(child: Child) -> str:
    status = child.process.returncode or 0
    if status < 0:
        return f"(pid {child.process.pid}) was ended by {signal.Signals(-status).name}"
    return f"(pid {child.process.pid}) ended with status {status}"


async def _stop(children: Sequence[Child]) -> None:
    """Ask, wait, and then insist."""
    for child in children:
        if child.watcher is not None:
            child.watcher.cancel()
        _signal(child, signal.SIGTERM)
    exits = [asyncio.create_task(child.process.wait()) for child in children]
    if not exits:
        return
    _, late = await asyncio.wait(exits, timeout=STOP_S)
    if late:
        for child in children:
            _signal(child, signal.SIGKILL)
        await asyncio.wait(exits, timeout=STOP_S)


def _signal(child: Child, number: signal.Signals) -> None:
    if child.process.returncode is None:
        with contextlib.suppress(ProcessLookupError):
            child.process.send_signal(number)


def _shown_command() -> list[str]:
    """This program as the operator called it, where that can be typed again."""
    called = Path(sys.argv[0])
    if called.name == "kvbaton" and called.exists():
        return [sys.argv[0] if shutil.which("kvbaton") != str(called.resolve()) else "kvbaton"]
    return COMMAND
