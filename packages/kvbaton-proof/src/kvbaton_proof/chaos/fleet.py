"""The processes of a chaos run: start, hurt, start again, ask for their figures.

Laws: every child is ended by its pid, in bounded time, however the run ends; when the conductor is killed, the kernel
ends them. A process that exits without a fault is a death: counted, reported, and started again.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp

from kvbaton.api import tokens
from kvbaton.control import keyring
from kvbaton.processes.child_process import Child, Program, Say, end, start, tail
from kvbaton_proof.chaos import members
from kvbaton_proof.chaos.members import FALSE_REGISTRY, ROUTER, STORE, Spec, Surroundings
from kvbaton_proof.chaos.network import rooms
from kvbaton_proof.chaos.network.networks import Network

START_S = 180.0
STOP_S = 10.0
POLL_S = 0.1
ASK_S = 5.0
LAST_LINES = 8
REVIVALS_MAX = 3
"""How often a member that dies by itself is started again; then it stays dead, and the run says so."""

PR_SET_PDEATHSIG = 1
_prctl = ctypes.CDLL(None).prctl  # found here: a child between fork and exec should not look for anything


def die_with_conductor() -> None:
    """Between fork and exec of a child: the kernel ends it when the conductor is gone."""
    _prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


class FleetError(RuntimeError):
    """A member could not be started; the message says which and what it said last."""


@dataclass(slots=True)
class Life:
    """One member, and the process that it is now."""

    spec: Spec
    log: Path
    child: Child | None = None
    count: int = 0  # how often it was started
    is_hurt: bool = False  # its end is our doing
    is_stopped: bool = False
    changes: Mapping[str, Any] = field(default_factory=dict)
    watcher: asyncio.Task[None] | None = None

    @property
    def pid(self) -> int:
        return self.child.pid if self.child is not None else 0

    @property
    def runs(self) -> bool:
        return self.child is not None and self.child.is_alive

    def signal(self, number: signal.Signals) -> None:
        if self.child is not None:
            self.child.signal(number)


class Fleet:
    """All members. Of one event loop; use it as an asynchronous context manager."""

    def __init__(self, specs: Mapping[str, Spec], network: Network, around: Surroundings, logs: Path, say: Say) -> None:
        self.specs = specs
        self.network = network
        self.around = around
        self.lives = {name: Life(spec, logs / f"{name}.log") for name, spec in specs.items()}
        self.deaths: list[str] = []
        self.unanswered: dict[str, str] = {}  # by name: why the last question was not answered
        self._say = say
        self._session: aiohttp.ClientSession | None = None
        self._is_closing = False
        self._revivals: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> Fleet:
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, force_close=True), timeout=aiohttp.ClientTimeout(ASK_S)
        )
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    @property
    def engines(self) -> list[str]:
        return [name for name, spec in self.specs.items() if spec.is_engine]

    @property
    def router_url(self) -> str:
        return self.specs[ROUTER].url

    def pid(self, name: str) -> int:
        return self.lives[name].pid

    # --- starting

    async def start_all(self) -> None:
        for name in self.specs:
            await self.start(name)
        for name in self.engines:
            await self.wait_listed(name)

    async def start(self, name: str, changes: Mapping[str, Any] | None = None, *, full_shm: bool = False) -> None:
        """Begin a life of a member that has none; it serves once `wait_listed` says so."""
        life = self.lives[name]
        life.changes = dict(changes or {})
        words = members.argv(life.spec, self.specs, self.around, life.changes, full_shm=full_shm)
        with life.log.open("ab") as out:
            out.write(f"--- life {life.count + 1}\n".encode())
        stop = signal.SIGHUP if life.spec.is_engine else signal.SIGTERM
        program = Program(name, life.spec.role, self.network.command(name, words), stop=stop)
        life.child = await start(program, life.log, preexec_fn=die_with_conductor)
        life.count += 1
        life.is_hurt = life.is_stopped = False
        life.watcher = asyncio.create_task(self._watch(life, life.child))

    async def wait_listed(self, name: str, within_s: float = START_S) -> None:
        """Until the router lists this life of an engine as serving; of others, until they answer."""
        until = asyncio.get_running_loop().time() + within_s
        while not await self._is_listed(name):
            if asyncio.get_running_loop().time() > until:
                raise FleetError(
                    f"{name} does not serve after {within_s:.0f} s{self._why(name)}: {self.last_lines(name)}"
                )
            if not self.lives[name].runs and (self._is_closing or not self._revivals):
                raise FleetError(f"{name} ended before it served: {self.last_lines(name)}")
            await asyncio.sleep(POLL_S)

    def _why(self, name: str) -> str:
        said = [f"{who}: {self.unanswered[who]}" for who in (name, ROUTER) if who in self.unanswered]
        return f" ({'; '.join(said) or 'the router does not list it as serving in this life'})"

    async def _is_listed(self, name: str) -> bool:
        if name in (STORE, FALSE_REGISTRY):
            return self.lives[name].runs
        if name == ROUTER:
            return await self.ask(ROUTER, "/stats") is not None
        stats, listed = await self.ask(name, "/stats"), await self.ask(ROUTER, "/workers")
        if stats is None or listed is None:
            return False
        return any(
            each["name"] == name and each["state"] == "serving" and each["incarnation"] == stats["incarnation"]
            for each in listed["workers"]
        )

    # --- hurting

    async def kill(self, name: str) -> None:
        """kill -9, and wait until it is gone."""
        life = self.lives[name]
        if life.child is None:
            return
        life.is_hurt = True
        life.signal(signal.SIGKILL)
        await asyncio.wait_for(life.child.process.wait(), STOP_S)

    async def drain(self, name: str, within_s: float) -> float:
        """Ask it to end in order, and wait until it has; how long that took. FleetError: too long."""
        life, clock = self.lives[name], asyncio.get_running_loop().time
        if life.child is None:
            return 0.0
        begun_at = clock()
        life.is_hurt = True
        life.signal(signal.SIGTERM)
        try:
            await asyncio.wait_for(life.child.process.wait(), within_s)
        except TimeoutError:
            await self.kill(name)
            raise FleetError(f"{name} did not drain within {within_s:g} s: {self.last_lines(name)}") from None
        return clock() - begun_at

    def stop(self, name: str) -> None:
        self.lives[name].is_stopped = True
        self.lives[name].signal(signal.SIGSTOP)

    def go_on(self, name: str) -> None:
        self.lives[name].is_stopped = False
        self.lives[name].signal(signal.SIGCONT)

    def tell(self, name: str, line: str) -> None:
        """One line to a member that listens at its stdin."""
        child = self.lives[name].child
        if child is None or child.process.stdin is None:
            raise OSError(f"{name} cannot be told anything")
        child.process.stdin.write(line.encode() + b"\n")

    def fill_disk(self) -> str:
        """No byte more fits on the store's disk; how that was done. Never a disk that others use."""
        rooms.allow_no_writes(self.pid(STORE))  # a store at its bound makes room by itself, and would write again
        if self.around.has_rooms:
            return f"{rooms.fill(self.pid(STORE), self.around.disk) >> 10} KiB were left"
        return "no mounts are allowed here: a limit of 0 bytes on what the store may write"

    def on_disk(self) -> frozenset[str]:
        """Names of the files that the store keeps."""
        return frozenset(os.listdir(f"/proc/{self.pid(STORE)}/root{self.around.disk}"))

    def clear_disk(self) -> None:
        rooms.allow_writes(self.pid(STORE))
        if self.around.has_rooms:
            rooms.clear(self.pid(STORE), self.around.disk)

    # --- asking

    async def ask(self, name: str, path: str) -> dict[str, Any] | None:
        """JSON of a member's own door; None when it does not answer."""
        assert self._session is not None
        try:
            async with self._session.get(self.specs[name].url + path) as response:
                told = await response.json(content_type=None) if response.status == 200 else None
        except (aiohttp.ClientError, OSError, TimeoutError, ValueError) as error:
            self.unanswered[name] = f"{path}: {error!r}"
            return None
        if isinstance(told, dict):
            self.unanswered.pop(name, None)
            return told
        self.unanswered[name] = f"{path}: status {response.status}"
        return None

    def pass_for(self, name: str) -> dict[str, str]:
        """Headers that open a member's own door: as its router, the conductor holds the cluster's keys."""
        if not self.specs[name].is_engine:
            return {}
        return {tokens.HEADER: tokens.token(keyring.load(self.around.keys, ROUTER).ticket_keys[0], name)}

    def last_lines(self, name: str, count: int = LAST_LINES) -> str:
        return " | ".join(tail(self.lives[name].log, count))

    def ports(self) -> Sequence[tuple[str, int]]:
        """Every fixed port that somebody listens at."""
        found = []
        for spec in self.specs.values():
            found += [(spec.host, spec.ports.front)] if spec.role != "registry" else []
            found += [(spec.host, spec.ports.back)] if spec.role != "store" else []
        return found

    # --- ending

    async def close(self) -> None:
        """Ask, wait, and then insist. May be called twice."""
        self._is_closing = True
        for task in [*self._revivals, *(life.watcher for life in self.lives.values() if life.watcher)]:
            task.cancel()
        alive = [life for life in self.lives.values() if life.runs]
        for life in alive:
            life.is_hurt = True
            life.signal(signal.SIGCONT)
        await end([life.child for life in alive if life.child is not None], STOP_S / 2)
        if self._session is not None:
            await self._session.close()

    async def _watch(self, life: Life, child: Child) -> None:
        status = await child.process.wait()
        if child.process.stdin is not None:
            child.process.stdin.close()
        if life.is_hurt or self._is_closing:
            return
        name = life.spec.name
        what = f"{name} ended by itself with status {status}: {self.last_lines(name)}"
        self.deaths.append(what)
        self._say(what)
        if sum(each.startswith(f"{name} ") for each in self.deaths) > REVIVALS_MAX:
            return
        revival = asyncio.create_task(self.start(name, life.changes))
        self._revivals.add(revival)
        revival.add_done_callback(self._revivals.discard)
