"""Workers in this process that share a store: a `kvbaton store` process, or a real Mooncake master."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvbaton.control import keyring
from kvbaton.engines.embedded.embedded_worker import EmbeddedWorker
from kvbaton.engines.embedded.worker_options import WorkerOptions
from tests.e2e.pair import generate, idle
from tests.mooncake_store.mooncake_processes import Master

NAMES = ("p0", "d0", "e0")
REST_S = 30.0
PATIENT = {"claim_timeout": 10.0, "lease_s": 20.0, "transfer_timeout": 10.0, "store_timeout": 6.0}
"""A busy machine may stand still for seconds; who wants something to run out says so."""


class StoreProcess:
    """A `kvbaton store`, ended by its own handle."""

    def __init__(self, directory: Path, *flags: str, port: int = 0) -> None:
        words = ["-m", "kvbaton.cli.main", "store", "--keys", str(directory), "--port", str(port), "--json", *flags]
        self.child = subprocess.Popen([sys.executable, *words], stdout=subprocess.PIPE, stdin=subprocess.DEVNULL)
        self.first = self.line()
        self.url = str(self.first["endpoint"])
        self.port = int(self.url.rpartition(":")[2])

    def line(self) -> Any:
        assert self.child.stdout is not None
        said = self.child.stdout.readline()
        assert said, "kvbaton store ended before it said anything"
        return json.loads(said)

    def figures(self) -> Any:
        os.kill(self.child.pid, signal.SIGUSR1)
        return self.line()

    def kill(self) -> None:
        if self.child.poll() is None:
            self.child.kill()
        self.child.wait(20)
        assert self.child.stdout is not None
        self.child.stdout.close()


@dataclass
class House:
    """Workers that run, by name."""

    directory: Path
    workers: dict[str, EmbeddedWorker] = field(default_factory=dict)

    def __getitem__(self, name: str) -> EmbeddedWorker:
        return self.workers[name]

    async def answer(self, name: str, prompt: str, max_tokens: int = 12, params: Any = None) -> str:
        return (await generate(self[name], prompt, max_tokens, params))[0]

    def stat(self, name: str, what: str) -> int:
        return int(self[name].stats()[what])

    async def until(self, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + REST_S
        while not condition():
            assert time.monotonic() < deadline, {name: worker.stats() for name, worker in self.workers.items()}
            await asyncio.sleep(0.01)

    async def at_rest(self) -> None:
        """Nobody holds anything, and no pin is left anywhere."""
        await self.until(lambda: all(idle(worker) for worker in self.workers.values()))
        for worker in self.workers.values():
            worker.engine.validate()
            assert worker.store is not None
            assert worker.stats()["store_pins"] == worker.store.shelf.pins == 0

    async def stop(self, name: str) -> None:
        worker = self.workers.pop(name)
        await asyncio.to_thread(worker.stop)
        assert worker.store is not None
        assert worker.connector.store_pins == worker.store.shelf.pins == 0


def key_directory(tmp_path: Path) -> Path:
    directory = tmp_path / "keys"
    keyring.mint(directory, [*NAMES, "store", "router"])
    return directory


@contextlib.asynccontextmanager
async def house(directory: Path, store: str, *names: str, **options: object) -> AsyncIterator[House]:
    """Workers that know each other and use `store`."""
    found = House(directory)
    base = {"registry": "tcp://127.0.0.1:1", "keys": str(directory), "store": store, "role": "both"}
    base |= {**PATIENT, **options}
    rings = {name: keyring.load(directory, name) for name in names}
    try:
        for name, ring in rings.items():
            found.workers[name] = EmbeddedWorker(WorkerOptions(**{**base, "name": name}), ring)
        entries = {each.node.peer.worker: each.node.address for each in found.workers.values()}
        for worker in found.workers.values():
            worker.start()
            worker.node.know(entries)
        yield found
    finally:
        for name in list(found.workers):
            await found.stop(name)


@contextlib.contextmanager
def some_store(kind: str, directory: Path) -> Iterator[str]:
    """A running store of either kind; gives what workers are told."""
    if kind == "kvbaton":
        served = StoreProcess(directory)
        try:
            yield served.url
        finally:
            served.kill()
    else:
        master = Master(client_ttl_s=60)
        try:
            yield f"mooncake://{master.address}?lend=64MiB"
        finally:
            master.kill()
