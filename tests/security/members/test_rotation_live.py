"""Keys are renewed while clients never stop asking: the ones that sign tickets, and each identity in turn.

Every worker is a real one, with its node, its HTTP door and its registration; they share this process, so that a test
can wait for each of them to have loaded the keys again instead of for a time.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp
import pytest

from kvbaton.api.http.http_server import serving
from kvbaton.control import key_room
from kvbaton.control import keyring as keys
from kvbaton.engines.embedded import embedded_worker as engine_worker
from kvbaton.engines.embedded.embedded_worker import EmbeddedWorker, reference_answers
from kvbaton.engines.embedded.http_worker import worker_app
from kvbaton.engines.embedded.worker_draining import Stopping
from kvbaton.engines.embedded.worker_options import WorkerOptions
from kvbaton.local_cluster.router_front import RouterHandle, Sources, run_router
from kvbaton.protocol.ids import WorkerId
from kvbaton.router.router_settings import RouterSettings
from tests.e2e.cluster import some_prompts

pytestmark = pytest.mark.timeout(240)

CLIENTS = 4
TOKENS = 6
MODES = ("pull", "stream", "push")
ROLES = {"p0": "prefill", "p1": "prefill", "d0": "decode", "d1": "decode"}
DEADLINE_S = 60.0


@dataclass
class Town:
    """A router in front of workers, and clients that ask without a pause."""

    directory: Path
    front: RouterHandle
    session: aiohttp.ClientSession
    prompts: list[str]
    right: list[str]
    workers: dict[str, EmbeddedWorker] = field(default_factory=dict)
    stops: dict[str, Stopping] = field(default_factory=dict)
    tasks: dict[str, asyncio.Task[None]] = field(default_factory=dict)
    served: Counter[int] = field(default_factory=Counter)  # by client
    failures: list[str] = field(default_factory=list)

    @property
    def keys(self) -> str:
        return str(self.directory / "keys")

    async def until(self, condition: Callable[[], object]) -> None:
        deadline = time.monotonic() + DEADLINE_S
        while not condition():
            assert time.monotonic() < deadline, f"served {dict(self.served)}, failed {self.failures}"
            await asyncio.sleep(0.02)

    async def start(self, name: str) -> None:
        self.tasks[name] = asyncio.create_task(self._run(name))
        lives = {each.name: each.incarnation for each in self.front.directory.snapshot()}

        def serves() -> bool:
            now = {each.name: each.incarnation for each in self.front.directory.snapshot()}
            return name in now and now[WorkerId(name)] != lives.get(WorkerId(name))

        await self.until(serves)

    async def stop(self, name: str) -> None:
        """Drain it, as SIGTERM does."""
        self.stops[name].ask()
        await asyncio.wait_for(self.tasks.pop(name), DEADLINE_S)
        del self.workers[name]

    async def _run(self, name: str) -> None:
        options = WorkerOptions(
            name=name, role=ROLES[name], keys=self.keys, registry=self.front.registry_endpoint, blocks=512
        )
        worker = self.workers[name] = EmbeddedWorker(options, keys.load(self.keys, name))
        stop = self.stops[name] = Stopping()
        app = worker_app(worker.door, lookup=worker.lookup)
        async with engine_worker._running(worker), serving(app, "127.0.0.1", 0) as url:
            with engine_worker._registered(worker, url, stop) as client:
                await stop.begun.wait()
                await engine_worker._drained(worker, client, None, stop)

    async def asked(self, number: int) -> None:
        """One client's life."""
        for turn in itertools.count():
            which = (number * 5 + turn) % len(self.prompts)
            mode = MODES[(number + turn) % len(MODES)]
            body = {"model": "kvbaton-tiny", "prompt": self.prompts[which], "max_tokens": TOKENS, "temperature": 0}
            async with self.session.post(
                f"{self.front.url}/v1/completions", json=body, headers={"x-kvbaton-mode": mode}
            ) as response:
                said = await response.json()
            if response.status == 200 and said["choices"][0]["text"] == self.right[which]:
                self.served[number] += 1
            else:
                self.failures.append(f"{mode}: {response.status} {said}")
                return

    async def more_served(self) -> None:
        """Whoever asked before this has its answer, and each client has asked again: the new keys were used."""
        enough = {number: self.served[number] + 3 for number in range(CLIENTS)}
        await self.until(lambda: all(self.served[each] >= many for each, many in enough.items()) or self.failures)
        assert self.failures == []

    async def loaded_again(self, change: Callable[[], object]) -> None:
        """Make a change in the key directory, and wait until every worker has it in force, and the router signs so."""
        before = {name: worker.node.control.counters["keys_changed"] for name, worker in self.workers.items()}
        change()
        await self.until(
            lambda: all(
                self.workers[name].node.control.counters["keys_changed"] > count for name, count in before.items()
            )
        )
        sign = keys.load(self.keys, "router").ticket_keys
        await self.until(lambda: all(each.node.doorway.config.ticket_keys == sign for each in self.workers.values()))
        minter = self.front.app._minter
        await self.until(lambda: minter is not None and minter.key == sign[0])
        await self.more_served()

    def recomputed(self) -> int:
        """Handoffs that failed, so that D computed the prompt itself: right answers, but not what was asked for."""
        stats = [worker.stats() for worker in self.workers.values()]
        return sum(each["handoffs_total"] - each["delivered_total"] for each in stats)


@contextlib.asynccontextmanager
async def town(directory: Path) -> AsyncIterator[Town]:
    keys.mint(directory / "keys", ["router", *ROLES])
    prompts = some_prompts(12, "rotation")
    right = reference_answers(prompts, TOKENS)
    sources = Sources(keyring=keys.load(directory / "keys", "router"), registry_bind="tcp://127.0.0.1:0")
    async with (
        run_router(sources, RouterSettings(), host="127.0.0.1", port=0) as front,
        aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=DEADLINE_S)) as session,
    ):
        made = Town(directory, front, session, prompts, right)
        try:
            for name in ROLES:
                await made.start(name)
            yield made
        finally:
            for name, task in made.tasks.items():
                made.stops[name].now()
                await asyncio.wait([task], timeout=DEADLINE_S)


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keys, "LOOK_S", 0.1)


async def test_all_keys_are_renewed_under_load_and_no_request_is_lost(tmp_path: Path) -> None:
    async with town(tmp_path) as made:
        where = made.keys
        clients = [asyncio.create_task(made.asked(number)) for number in range(CLIENTS)]
        try:
            await made.more_served()
            await _tickets(made, where)
            await _worker(made, where, "p0")
            await _router(made, where)
            await _worker(made, where, "d0")
            await made.more_served()
            assert made.recomputed() == 0, [worker.stats()["ends_total"] for worker in made.workers.values()]
        finally:
            for client in clients:
                client.cancel()
            await asyncio.gather(*clients, return_exceptions=True)


async def _tickets(made: Town, where: str) -> None:
    """New keys verify, then sign, then are the only ones."""
    old = keys.load(where, "p0").ticket_keys
    await made.loaded_again(lambda: key_room.prepare_tickets(where))
    await made.loaded_again(lambda: key_room.promote_tickets(where))
    # Every ticket that the old key signed belongs to a request that was answered: nothing is left to wait for.
    await made.loaded_again(lambda: key_room.finish_tickets(where, live_s=0.0))
    new = keys.load(where, "p0").ticket_keys
    assert len(new) == 1 and new != old
    assert all(worker.node.doorway.config.ticket_keys == new for worker in made.workers.values())


async def _router(made: Town, where: str) -> None:
    """The router uses its old secret until it is started again; workers find it under that one."""
    await made.loaded_again(lambda: key_room.rotate(where, "router"))
    assert len(made.front.directory.snapshot()) == len(ROLES), "all are listed still"


async def _worker(made: Town, where: str, name: str) -> None:
    await made.loaded_again(lambda: key_room.rotate(where, name))
    before = made.workers[name].node.control
    await made.stop(name)
    await made.start(name)
    assert made.workers[name].node.control is not before
    await made.loaded_again(lambda: key_room.finish(where, name))


async def test_a_worker_whose_name_was_removed_is_no_longer_listed_nor_heard(tmp_path: Path) -> None:
    async with town(tmp_path) as made:
        await made.until(lambda: len(made.front.directory.snapshot()) == len(ROLES))
        key_room.remove(made.keys, "p1")
        await made.until(lambda: WorkerId("p1") not in [each.name for each in made.front.directory.snapshot()])
        client = asyncio.create_task(made.asked(0))
        await made.until(lambda: made.served[0] >= 6 or made.failures)
        client.cancel()
        await asyncio.gather(client, return_exceptions=True)
        assert made.failures == [], "the others go on"
        links = made.workers["d0"].stats()["links"]
        assert "p1" not in links
