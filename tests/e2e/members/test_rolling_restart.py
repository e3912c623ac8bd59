"""Every worker of a cluster is drained and started again, one after the other, while clients never stop asking."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import pytest

from kvbaton.api import sse
from kvbaton.control import keyring as keys
from kvbaton.engines.embedded.embedded_worker import reference_answers
from tests.e2e.cluster import eventually, get_json, some_prompts, wait_for

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]

CLIENTS = 16
TOKENS = 24
MODES = ("pull", "stream", "push")
ROLES = {"p0": "prefill", "p1": "prefill", "d0": "decode", "d1": "decode"}
SERVED_MIN = 200
START_S, DRAIN_S = 60.0, 60.0
COMMAND = [sys.executable, "-m", "kvbaton.cli.main"]


@dataclass
class Cluster:
    """A router and workers, each a process of its own that is ended by its pid."""

    directory: Path
    url: str = ""
    registry: str = ""
    processes: dict[str, subprocess.Popen[str]] = field(default_factory=dict)

    @property
    def keys(self) -> str:
        return str(self.directory / "keys")

    def start(self, name: str, *words: str) -> Path:
        log = self.directory / f"{name}.log"
        with log.open("a") as out:
            self.processes[name] = subprocess.Popen(
                [*COMMAND, *words], stdout=out, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, text=True
            )
        return log

    def start_router(self) -> None:
        log = self.start("router", "router", "--keys", self.keys, "--port", "0", "--registry-port", "0")
        found = wait_for(lambda: re.search(r"clients (http://\S+)/v1, registry (tcp://\S+)", log.read_text()), START_S)
        self.url, self.registry = found[1], found[2]

    def start_worker(self, name: str) -> None:
        where = ("--keys", self.keys, "--registry", self.registry)
        self.start(name, "worker", "--name", name, "--role", ROLES[name], *where)

    async def listed(self) -> dict[str, tuple[str, str]]:
        """State and life of each worker, as the router sees them."""
        async with aiohttp.ClientSession() as session:
            found = await get_json(session, f"{self.url}/workers")
        return {each["name"]: (each["state"], each["incarnation"]) for each in found["workers"]}

    async def stats(self) -> dict[str, dict[str, Any]]:
        async with aiohttp.ClientSession() as session:
            found = await get_json(session, f"{self.url}/workers")
            return {each["name"]: await get_json(session, f"{each['url']}/stats") for each in found["workers"]}


@contextlib.contextmanager
def cluster_of(directory: Path) -> Iterator[Cluster]:
    cluster = Cluster(directory)
    keys.mint(cluster.keys, ["router", "operator", *ROLES])
    try:
        cluster.start_router()
        for name in ROLES:
            cluster.start_worker(name)
        yield cluster
    finally:
        for process in cluster.processes.values():
            process.send_signal(signal.SIGTERM)
        for process in cluster.processes.values():
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(20)
            process.kill()


@dataclass
class Load:
    """Clients that ask, compare, and ask again."""

    url: str
    prompts: list[str]
    right: list[str]
    served: Counter[str] = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)
    stop: asyncio.Event = field(default_factory=asyncio.Event)

    async def client(self, number: int, session: aiohttp.ClientSession) -> None:
        for turn in itertools.count():
            if self.stop.is_set() or self.failures:
                return
            which = (number * 7 + turn) % len(self.prompts)
            mode, streaming = MODES[(number + turn) % len(MODES)], (number + turn // len(MODES)) % 2 == 0
            begun = time.monotonic()
            try:
                text = await self._ask(session, self.prompts[which], mode, streaming)
            except Exception as error:  # noqa: BLE001 - whatever it is, it is a lost request
                text = f"{type(error).__name__}: {error}"
            if text == self.right[which]:
                self.served[mode] += 1
            else:
                took = time.monotonic() - begun
                self.failures.append(f"{mode}, streaming={streaming}, after {took:.1f} s: {text!r}")

    async def _ask(self, session: aiohttp.ClientSession, prompt: str, mode: str, streaming: bool) -> str:
        body = {"model": "kvbaton-tiny", "prompt": prompt, "max_tokens": TOKENS, "temperature": 0, "stream": streaming}
        headers = {"x-kvbaton-mode": mode}
        async with session.post(f"{self.url}/v1/completions", json=body, headers=headers) as response:
            data = await response.read()
        if response.status != 200:
            return f"{response.status} {data[:300]!r}"
        if not streaming:
            return str(msgspec.json.decode(data)["choices"][0]["text"])
        *events, done = sse.payloads(data)
        assert done == b"[DONE]", data[-300:]
        chunks = [msgspec.json.decode(event) for event in events]
        assert not any("error" in chunk for chunk in chunks), chunks[-1]
        return "".join(chunk["choices"][0]["text"] for chunk in chunks if chunk["choices"])


@contextlib.asynccontextmanager
async def loaded(cluster: Cluster, prompts: list[str], right: list[str]) -> AsyncIterator[Load]:
    load = Load(cluster.url, prompts, right)
    timeout = aiohttp.ClientTimeout(total=100)
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=timeout) as session:
        clients = [asyncio.create_task(load.client(number, session)) for number in range(CLIENTS)]
        try:
            yield load
        finally:
            load.stop.set()
            await asyncio.gather(*clients)


async def restarted(cluster: Cluster, name: str, load: Load, *, by_command: bool) -> None:
    """Drain a worker, wait until its process has ended, start it again, wait until the router uses it."""
    life = (await cluster.listed())[name][1]
    before = sum(load.served.values())
    process = cluster.processes[name]
    if by_command:
        words = ["drain", name, "--keys", cluster.keys, "--registry", cluster.registry, "--json"]
        asked = await asyncio.create_subprocess_exec(*COMMAND, *words, stdout=asyncio.subprocess.PIPE)
        out, _ = await asyncio.wait_for(asked.communicate(), DRAIN_S)
        told = msgspec.json.decode(out)
        assert (asked.returncode, told["outcome"], told["incarnation"]) == (0, "gone", life), told
    else:
        process.send_signal(signal.SIGTERM)
    assert await asyncio.to_thread(process.wait, DRAIN_S) == 0
    cluster.start_worker(name)

    async def is_back() -> bool:
        state, now = (await cluster.listed()).get(name, ("", life))
        return state == "serving" and now != life

    await eventually(is_back, START_S)
    assert sum(load.served.values()) > before, "clients were served meanwhile"


def test_a_rolling_restart_under_load_loses_no_request(tmp_path: Path) -> None:
    prompts = some_prompts(48, "rolling")
    right = reference_answers(prompts, TOKENS)

    async def story(cluster: Cluster) -> None:
        async def all_serve() -> bool:
            found = await cluster.listed()
            return set(found) == set(ROLES) and all(state == "serving" for state, _ in found.values())

        await eventually(all_serve, START_S)
        async with loaded(cluster, prompts, right) as load:
            for name, by_command in (("p0", False), ("d0", True), ("p1", True), ("d1", False)):
                await restarted(cluster, name, load, by_command=by_command)
                assert load.failures == [], name

            async def all_used() -> bool:
                stats = await cluster.stats()
                used = [stats[name]["delivered_total" if name[0] == "d" else "leases_total"] for name in ROLES]
                return bool(load.failures) or (all(used) and sum(load.served.values()) >= SERVED_MIN)

            await eventually(all_used, 60.0)
        assert load.failures == []
        assert set(load.served) == set(MODES)

        async def at_rest() -> bool:
            stats = await cluster.stats()
            held = ("pins", "leases", "intakes", "running", "waiting", "loading", "faults_total")
            return set(stats) == set(ROLES) and all(each[key] == 0 for each in stats.values() for key in held)

        await eventually(at_rest, 60.0)

    with cluster_of(tmp_path) as cluster:
        asyncio.run(story(cluster))
    ends = {name: process.returncode for name, process in cluster.processes.items()}
    assert set(ends.values()) == {0}, ends
