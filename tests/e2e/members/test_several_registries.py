"""Two registries, two routers, two prefill and three decode workers under load: each of the first four is killed in
turn, and workers come and go. All workers are started from one configuration and one join token, and make their names
and keys themselves. No answer is wrong, and none is lost but what was inside the router that was killed."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import pytest

from kvbaton.control import keyring as keys
from kvbaton.engines.embedded.embedded_worker import reference_answers
from kvbaton.processes.child_process import free_ports
from tests.e2e.cluster import eventually, get_json, some_prompts

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

CLIENTS = 6
TOKENS = 16
MODES = ("pull", "stream", "push")
ROLES = {"p0": "prefill", "p1": "prefill", "d0": "decode", "d1": "decode", "d2": "decode"}
REGISTRIES = ("registry-a", "registry-b")
ROUTERS = ("router-1", "router-2")
START_S = 120.0
COMMAND = [sys.executable, "-m", "kvbaton.cli.main"]
HELD = ("pins", "leases", "intakes", "running", "waiting", "loading", "faults_total")


@dataclass
class Cluster:
    """Processes that are started by name, each ended by its pid; a name that is started again keeps its port."""

    directory: Path
    ports: dict[str, int]
    processes: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)

    @property
    def keys(self) -> str:
        return str(self.directory / "keys")

    @property
    def registries(self) -> str:
        return ",".join(f"{name}@tcp://127.0.0.1:{self.ports[name]}" for name in REGISTRIES)

    @property
    def doors(self) -> str:
        return ",".join(f"tcp://127.0.0.1:{self.ports[f'{name} join']}" for name in REGISTRIES)

    def url(self, router: str) -> str:
        return f"http://127.0.0.1:{self.ports[router]}"

    def start(self, name: str) -> None:
        common = ("--name", name, "--keys", self.keys)
        if name in REGISTRIES:
            words = (
                "registry",
                *common,
                "--port",
                str(self.ports[name]),
                "--join-port",
                str(self.ports[f"{name} join"]),
            )
        elif name in ROUTERS:
            words = ("router", *common, "--port", str(self.ports[name]), "--registry", self.registries)
        else:
            words = self.worker_words(name)
        with (self.directory / f"{name}.log").open("ab") as out:
            self.processes[name] = subprocess.Popen(
                [*COMMAND, *words],
                stdout=out,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                env={**os.environ, "KVBATON_NAME_BASE": name},
            )

    def worker_words(self, name: str) -> tuple[str, ...]:
        """The same for all of a role: names are made by the workers, and begin with KVBATON_NAME_BASE."""
        return (
            "worker", "--name", "auto", "--role", ROLES[name], "--join-token-file", str(self.directory / "token"),
            "--registry", self.registries, "--join-at", self.doors,
        )  # fmt: skip

    def kill(self, name: str) -> None:
        self.processes[name].kill()
        self.processes[name].wait(10)

    async def listed(self, router: str) -> dict[str, dict[str, Any]]:
        """By the beginning of their names."""
        async with aiohttp.ClientSession() as session:
            found = await get_json(session, f"{self.url(router)}/workers")
        return {each["name"].partition("-")[0]: each for each in found["workers"]}

    async def all_list(self, *names: str) -> None:
        """Every router lists these as serving, and no others."""

        async def look() -> bool:
            with contextlib.suppress(aiohttp.ClientError):
                found = [await self.listed(router) for router in ROUTERS]
                return all(
                    set(each) == set(names) and {worker["state"] for worker in each.values()} == {"serving"}
                    for each in found
                )
            return False

        await eventually(look, START_S)


@contextlib.contextmanager
def cluster_of(directory: Path) -> Iterator[Cluster]:
    fixed = (*REGISTRIES, *ROUTERS)
    listening = (*fixed, *(f"{name} join" for name in REGISTRIES))
    cluster = Cluster(directory, dict(zip(listening, free_ports(len(listening)), strict=True)))
    keys.mint(cluster.keys, ["operator", *fixed])
    made = [
        *COMMAND,
        "keys",
        "token",
        "new",
        cluster.keys,
        "--uses",
        str(len(ROLES)),
        "--out",
        str(directory / "token"),
    ]
    subprocess.run(made, check=True, capture_output=True)
    try:
        for name in (*fixed, "p0", "p1", "d0", "d1"):
            cluster.start(name)
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
    """Clients that prefer one router each, turn to the other when it cannot be reached, compare, and ask again."""

    cluster: Cluster
    prompts: list[str]
    right: list[str]
    served: Counter[str] = field(default_factory=Counter)
    by: Counter[str] = field(default_factory=Counter)
    inside: dict[int, str] = field(default_factory=dict)  # under way: which client, at which router
    lost: list[str] = field(default_factory=list)  # what a killed router had inside
    failures: list[str] = field(default_factory=list)
    doomed: set[int] = field(default_factory=set)  # clients that had a request inside when their router was killed
    stop: asyncio.Event = field(default_factory=asyncio.Event)

    async def client(self, number: int, session: aiohttp.ClientSession) -> None:
        for turn in itertools.count():
            if self.stop.is_set() or self.failures:
                return
            which, mode = (number * 7 + turn) % len(self.prompts), MODES[(number + turn) % len(MODES)]
            routers = ROUTERS if number % 2 else ROUTERS[::-1]
            text = await self._asked(number, session, routers, self.prompts[which], mode)
            if text is None:
                continue
            if text == self.right[which]:
                self.served[mode] += 1
            else:
                self.failures.append(f"{mode} by {routers[0]}: {text!r}")

    async def _asked(
        self, number: int, session: aiohttp.ClientSession, routers: tuple[str, ...], prompt: str, mode: str
    ) -> str | None:
        body = {"model": "kvbaton-tiny", "prompt": prompt, "max_tokens": TOKENS, "temperature": 0}
        for router in routers:
            self.inside[number] = router
            try:
                url = f"{self.cluster.url(router)}/v1/completions"
                async with session.post(url, json=body, headers={"x-kvbaton-mode": mode}) as response:
                    data = await response.read()
            except aiohttp.ClientConnectorError:
                continue  # nothing was sent: what a load balancer does by itself
            except Exception as error:  # noqa: BLE001 - whatever it is, it is a lost request
                if number in self.doomed:
                    self.doomed.discard(number)
                    self.lost.append(f"{type(error).__name__} at {router}")
                    return None
                return f"{type(error).__name__}: {error}"
            finally:
                self.inside.pop(number, None)
            self.by[router] += 1
            if response.status != 200:
                return f"{response.status} {data[:300]!r}"
            return str(msgspec.json.decode(data)["choices"][0]["text"])
        return "no router can be reached"

    async def more(self, count: int) -> None:
        """Until so many further answers have come, in each mode."""
        before = self.served.copy()

        async def enough() -> bool:
            return bool(self.failures) or all(self.served[mode] >= before[mode] + count for mode in MODES)

        await eventually(enough, START_S)
        assert self.failures == []


@contextlib.asynccontextmanager
async def loaded(cluster: Cluster, prompts: list[str], right: list[str]) -> AsyncIterator[Load]:
    load = Load(cluster, prompts, right)
    timeout = aiohttp.ClientTimeout(total=100)
    # A connection for each request: one that was kept could be closed by the kill while nothing was inside.
    connector = aiohttp.TCPConnector(limit=0, force_close=True)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout) as session:
        clients = [asyncio.create_task(load.client(number, session)) for number in range(CLIENTS)]
        try:
            yield load
        finally:
            load.stop.set()
            await asyncio.gather(*clients)


async def drained(cluster: Cluster, name: str) -> dict[str, Any]:
    words = ["drain", name, "--keys", cluster.keys, "--registry", cluster.registries, "--json"]
    asked = await asyncio.create_subprocess_exec(*COMMAND, *words, stdout=asyncio.subprocess.PIPE)
    out, _ = await asyncio.wait_for(asked.communicate(), START_S)
    assert asked.returncode == 0, out
    found: dict[str, Any] = msgspec.json.decode(out)
    return found


def test_registries_and_routers_are_killed_in_turn_under_load(tmp_path: Path) -> None:
    prompts = some_prompts(36, "several")
    right = reference_answers(prompts, TOKENS)
    a, b = REGISTRIES

    async def story(cluster: Cluster) -> None:
        await cluster.all_list("p0", "p1", "d0", "d1")
        async with loaded(cluster, prompts, right) as load:
            await load.more(4)
            cluster.kill(a)
            await load.more(4)
            cluster.kill(b)  # now there is none: what is known serves on, and no one is forgotten
            cluster.start("d2")  # which nobody can learn of yet
            await load.more(8)
            assert set(await cluster.listed(ROUTERS[0])) == {"p0", "p1", "d0", "d1"}
            cluster.start(a)
            await cluster.all_list(*ROLES)
            cluster.start(b)
            await load.more(4)

            load.doomed = {number for number, router in load.inside.items() if router == ROUTERS[0]}
            inside = len(load.doomed)
            cluster.kill(ROUTERS[0])
            await load.more(4)
            assert len(load.lost) <= inside
            load.doomed.clear()
            cluster.start(ROUTERS[0])
            await cluster.all_list(*ROLES)

            for name in ("p1", "d0"):  # down again
                full_name = (await cluster.listed(ROUTERS[1]))[name]["name"]
                assert (await drained(cluster, full_name))["outcome"] == "gone"
                assert await asyncio.to_thread(cluster.processes[name].wait, START_S) == 0
            await cluster.all_list("p0", "d1", "d2")
            await load.more(4)
        assert load.failures == [] and set(load.by) == set(ROUTERS)

        async def at_rest() -> bool:
            async with aiohttp.ClientSession() as session:
                urls = [worker["url"] for worker in (await cluster.listed(ROUTERS[0])).values()]
                stats = [await get_json(session, f"{url}/stats") for url in urls]
            new = [each["delivered_total"] for each in stats if each["worker"].startswith("d2-")]
            return len(stats) == 3 and all(new) and all(each[key] == 0 for each in stats for key in HELD)

        await eventually(at_rest, START_S)

    with cluster_of(tmp_path) as cluster:
        asyncio.run(story(cluster))
    ends = {name: process.returncode for name, process in cluster.processes.items()}
    assert set(ends.values()) == {0}, ends
