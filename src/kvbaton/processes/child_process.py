"""Starting, awaiting and ending the child processes of a command.

Laws: a child leads its own session, so that Ctrl-C reaches only the parent, which then ends its children in order. A
child and its descendants are ended by pid, in bounded time: SIGTERM, wait, SIGKILL. Every wait has a deadline and
reports progress; a child that exits meanwhile ends the wait, with the end of its log. Nothing is restarted. Children
that outlive a killed parent see EOF on stdin and stop.

Free ports for processes that bind them later.

Law: outside the kernel's range for outgoing connections (Linux: ip_local_port_range starts at 32768), so that a port
that is free now is still free when the process that was given it has started.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import random
import resource
import signal
import socket
import sys
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from kvbaton.processes.operator_errors import CommandError, StoppedError


def raise_file_limit() -> None:
    """Raise the soft limit of open files to the hard limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


PORTS = range(12_000, 32_000)
_TRIES = 2_000


def free_ports(count: int, host: str = "127.0.0.1", rng: random.Random | None = None) -> list[int]:
    """Ports that are free now, all different."""
    draw = rng or random.Random()
    found: list[int] = []
    for _ in range(_TRIES):
        port = draw.choice(PORTS)
        if port not in found and is_free(host, port):
            found.append(port)
        if len(found) >= count:
            return found
    raise OSError(f"no {count} free ports between {PORTS.start} and {PORTS.stop} in {_TRIES} tries")


def is_free(host: str, port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind((host, port))
        except OSError as error:
            return error.errno == errno.EADDRNOTAVAIL  # an address of another network namespace, where all are free
    return True


KVBATON_ARGV = (sys.executable, "-m", "kvbaton.cli.main")
"""Starts a process of this program."""
GUARD = (sys.executable, "-m", "kvbaton.local_cluster.vllm_child")
"""Prefix for a command that does not read its stdin: it keeps the pid, and ends with this process."""
STOP_S = 5.0
KILLED_S = 10.0
"""A killed process is gone at once, but on a starved machine its parent hears of it seconds later."""
TIDY_S, TIDY_LOOK_S = 2.0, 0.02
"""How long a child's group has to end by itself when its first process is gone."""
NEWS_S = 15.0
LOG_LINES = 5
LINE_CHARS_MAX = 120

Say = Callable[[str], None]


class ChildError(CommandError):
    """A child exited or was not ready in time; the message names it and quotes the end of its log."""


class Program(msgspec.Struct, frozen=True):
    """A command to start: the program, and what an operator types to run it again."""

    name: str
    role: str
    argv: Sequence[str]
    command: str = ""
    env: Mapping[str, str] = {}  # in addition to this process's
    stop: signal.Signals = signal.SIGTERM  # ends it quickly; one that would drain on SIGTERM gets another


@dataclass(slots=True)
class Child:
    """A started program."""

    program: Program
    process: asyncio.subprocess.Process
    log: Path | None
    watcher: asyncio.Task[None] | None = None

    @property
    def name(self) -> str:
        return self.program.name

    @property
    def command(self) -> str:
        return self.program.command

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def is_alive(self) -> bool:
        return self.process.returncode is None

    def last_lines(self, count: int = LOG_LINES) -> list[str]:
        return [] if self.log is None else tail(self.log, count)

    def last_line(self) -> str:
        lines = [line for line in self.last_lines() if line.strip()]
        return lines[-1][:LINE_CHARS_MAX] if lines else "nothing in its log yet"

    def how_it_ended(self) -> str:
        status = self.process.returncode or 0
        if status < 0:
            return f"(pid {self.pid}) was killed by {signal.Signals(-status).name}"
        return f"(pid {self.pid}) exited with status {status}"

    def signal(self, number: signal.Signals) -> None:
        if self.is_alive:
            with contextlib.suppress(ProcessLookupError):
                self.process.send_signal(number)


def tail(log: Path, count: int) -> list[str]:
    with contextlib.suppress(OSError):
        return log.read_text(errors="replace").splitlines()[-count:]
    return []


async def start(
    program: Program, log: Path | None, *, deaths: asyncio.Queue[Child] | None = None, **more: Any
) -> Child:
    """Start a program whose output is appended to `log`; `more` goes to `create_subprocess_exec`.

    The caller ends it with `end`. `deaths` gets the child if it exits before that.
    """
    with contextlib.ExitStack() as stack:
        output = None if log is None else stack.enter_context(log.open("ab"))
        given = {"stdin": asyncio.subprocess.PIPE, "stdout": output, "stderr": output, "start_new_session": True}
        process = await asyncio.create_subprocess_exec(
            *program.argv, **{"env": {**os.environ, **program.env}, **given, **more}
        )
    child = Child(program, process, log)
    child.watcher = asyncio.create_task(_watch(child, deaths))
    return child


async def _watch(child: Child, deaths: asyncio.Queue[Child] | None) -> None:
    await child.process.wait()
    await _end_rest(child.pid)
    if deaths is not None:
        deaths.put_nowait(child)


async def ready(
    missing: Callable[[], Awaitable[Collection[str]]],
    children: Sequence[Child],
    within_s: float,
    say: Say,
    *,
    stop: asyncio.Event | None = None,
    verb: str = "serve",
    look_s: float = 0.1,
) -> None:
    """Poll until no name is missing. `missing` returns names of children; an OSError means that all still are."""
    loop = asyncio.get_running_loop()
    begun = told = loop.time()
    names: Collection[str] = [child.name for child in children]
    while True:
        with contextlib.suppress(OSError):
            names = await missing()
        if not names:
            return
        now = loop.time()
        late = [child for child in children if child.name in names]
        if stop is not None and stop.is_set():
            raise StoppedError
        for child in children:
            if not child.is_alive:
                lines = " | ".join(child.last_lines()) or "nothing in its log"
                raise ChildError(f"{child.name} {child.how_it_ended()} before it could serve: {lines}")
        if now > begun + within_s:
            lines = " | ".join(f"{child.name}: {child.last_line()}" for child in late)
            raise ChildError(
                f"{' '.join(sorted(names))} did not {verb} within {within_s:.0f} s; is this machine very busy? {lines}"
            )
        if now > told + NEWS_S:
            told = now
            for child in late:
                say(f"{now - begun:.0f} s: {child.name} is starting: {child.last_line()}")
        await asyncio.sleep(look_s)


async def end(children: Sequence[Child], within_s: float = STOP_S) -> None:
    """SIGTERM, wait, then SIGKILL; then the rest of each session. May be called twice."""
    for child in children:
        if child.watcher is not None:
            child.watcher.cancel()
        child.signal(child.program.stop)
    if late := await _alive(children, within_s):
        for child in late:
            child.signal(signal.SIGKILL)
        await _alive(late, max(within_s, KILLED_S))
    try:
        await asyncio.gather(*(_end_rest(child.pid) for child in children))
    except asyncio.CancelledError:
        for child in children:
            end_group(child.pid)
        raise


async def _end_rest(pid: int) -> None:
    """End what a child's first process left. A watcher among it (`GUARD`) does so by itself, and tidies up before."""
    for _ in range(round(TIDY_S / TIDY_LOOK_S)):
        try:
            os.killpg(pid, 0)
        except OSError:
            return
        await asyncio.sleep(TIDY_LOOK_S)
    end_group(pid)


async def _alive(children: Sequence[Child], within_s: float) -> list[Child]:
    exits = [asyncio.create_task(child.process.wait()) for child in children]
    if exits:
        _, late = await asyncio.wait(exits, timeout=within_s)
        for each in late:
            each.cancel()
    return [child for child in children if child.is_alive]


def end_group(pid: int) -> None:
    """End what a child's first process left behind when it exited: the rest of the group that it led."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)
