"""A vLLM server, or a router before some, as a process that can be hurt: start, wait, signal, ask for its figures, end.

Laws: an engine is its whole session of processes, and everything here acts on all of it, by id. Whatever waits has a
deadline. It ends with the program that started it, however that ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp

from kvbaton.engines.vllm.launch.launching import HOST
from kvbaton.observe.metrics.exposition import figures
from kvbaton.processes.child_process import GUARD
from kvbaton_proof.rig.proc_stat import all_stats

READY_S = 420.0
END_S = 15.0
FIGURES_S = 20.0
LOOK_S = 0.2
TAIL_CHARS = 300

Figures = Mapping[str, float]


class EngineError(Exception):
    """An engine did not start; the message ends with what it logged last."""


@dataclass(slots=True)
class Engine:
    """One server, in one life after the other."""

    name: str
    port: int
    command: Sequence[str]
    variables: Mapping[str, str]
    log: Path
    side_port: int = 0  # where other engines speak to it
    lives: int = 0
    process: subprocess.Popen[bytes] | None = field(default=None)

    @property
    def url(self) -> str:
        return f"http://{HOST}:{self.port}"

    @property
    def is_alive(self) -> bool:
        return self.process is not None and self.process.poll() is None

    def start(self) -> None:
        with self.log.open("ab") as output:
            self.process = subprocess.Popen(
                [*GUARD, *self.command], stdin=subprocess.PIPE, stdout=output, stderr=output,
                env={**os.environ, **self.variables}, start_new_session=True,
            )  # fmt: skip
        self.lives += 1

    def pids(self) -> list[int]:
        """Every process of this life that is there still."""
        if self.process is None:
            return []
        return [pid for pid, each in all_stats().items() if each.session == self.process.pid and each.is_there]

    def send(self, number: signal.Signals) -> None:
        for pid in self.pids():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    def kill(self) -> None:
        """kill -9 of all of it; gone when this returns. Bounded; may be called twice."""
        if self.process is None:
            return
        deadline = time.monotonic() + END_S
        while self.pids() and time.monotonic() < deadline:
            self.send(signal.SIGKILL)
            time.sleep(0.02)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(END_S)
        if self.process.stdin is not None:
            self.process.stdin.close()

    def dismiss(self) -> None:
        """Ask it to end; only `kill` makes sure of it."""
        if self.is_alive and self.process is not None:
            self.process.terminate()

    async def is_well(self, session: aiohttp.ClientSession) -> bool:
        """Whether it runs and says that its engine does. Bounded by FIGURES_S."""
        if not self.is_alive:
            return False
        try:
            async with asyncio.timeout(FIGURES_S), session.get(f"{self.url}/health") as answer:
                return answer.status == 200
        except (aiohttp.ClientError, OSError):
            return False

    async def ready(self, session: aiohttp.ClientSession, within_s: float = READY_S) -> None:
        loop = asyncio.get_running_loop()
        deadline = loop.time() + within_s
        while not await self.is_well(session):
            if not self.is_alive:
                raise EngineError(f"{self.name} ended before it could serve: {self.tail()}")
            if loop.time() > deadline:
                raise EngineError(f"{self.name} did not serve within {within_s:.0f} s: {self.tail()}")
            await asyncio.sleep(LOOK_S)

    async def figures(self, session: aiohttp.ClientSession) -> Figures | None:
        """`/metrics` by name, summed over labels, and by name{labels}; None if it does not say."""
        try:
            async with asyncio.timeout(FIGURES_S), session.get(f"{self.url}/metrics") as answer:
                return figures(await answer.text())
        except (aiohttp.ClientError, OSError, ValueError):
            return None

    def tail(self) -> str:
        with contextlib.suppress(OSError):
            return self.log.read_text(errors="replace")[-TAIL_CHARS:]
        return ""


def end(engines: Iterable[Engine], grace_s: float = 0.0) -> None:
    """End all of them; those that are given time are asked first."""
    every = list(engines)
    if grace_s:
        for engine in every:
            engine.dismiss()
        deadline = time.monotonic() + grace_s
        while any(engine.is_alive for engine in every) and time.monotonic() < deadline:
            time.sleep(0.05)
    for engine in every:
        engine.kill()
