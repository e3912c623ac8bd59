"""Real worker processes with short time-outs that many tests share, and a router of this process before them.

Laws: a worker is started when a test first names it, and again when it was killed; whoever starts a process ends it,
by its own handle. A test gets a router of its own, so that no failure is held against anybody in the next one.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import random
import re
import signal
import subprocess
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import aiohttp
import msgspec

from kvbaton.api.http.http_server import serving
from kvbaton.control import keyring
from kvbaton.control.registry import RegistryServer, RegistrySettings
from kvbaton.engines.embedded.embedded_worker import reference_answers
from kvbaton.protocol.ids import WorkerId
from kvbaton.router.app import Router, router_app
from kvbaton.router.router_settings import RouterSettings
from kvbaton.router.workers.directories import RegistryDirectory
from kvbaton.router.workers.directory import ListedEngine, WorkerListState
from tests.e2e import warm_workers
from tests.e2e.cluster import eventually, get_json, wait_for
from tests.e2e.router.faulty import Door, Seen, open_door, passes
from tests.vllm.forking import Forked

START_S = 90.0
LEASE_S = 3.0
CLAIM_S = 2.0
DEFER_S = 4.0
REST_S = 30.0
"""More than any lease or time-out of these workers, but of the keeper's."""
LONG_S = 300.0
"""Nothing here waits for it."""
EVICT_S = 12.0
"""Far longer than anybody is stopped: whoever is off the list is not told which tickets are for nobody."""
WAITING_MAX = 4
"""Of those who keep what they have: more than the tries that one request leaves behind."""
HELD = ("pins", "leases", "intakes", "running", "waiting", "loading", "quarantined_blocks")
ANSWER_TOKENS = 8
NEXT_S = 60.0

_SHORT = {"--lease-s": LEASE_S, "--claim-timeout": CLAIM_S, "--defer-timeout": DEFER_S, "--transfer-timeout": DEFER_S}
_PATIENT = {"--lease-s": LONG_S, "--claim-timeout": LONG_S, "--defer-timeout": LONG_S, "--waiting-max": WAITING_MAX}
SPECS: Mapping[str, tuple[str, Mapping[str, object]]] = {
    "p0": ("prefill", _SHORT),
    "p1": ("prefill", _SHORT),
    "keeper": ("prefill", _PATIENT),  # what it promised it keeps, unless somebody says that it need not
    "d0": ("decode", _SHORT),
    "d1": ("decode", _PATIENT),  # waits for its KV, until somebody says that it need not
    "strict": ("decode", {**_SHORT, "--policy": "fail"}),
}


class Crew:
    """The processes, and their registry in this one."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        keyring.mint(directory / "keys", ["router", *SPECS])
        self.keyring = keyring.load(directory / "keys", "router")
        settings = RegistrySettings(suspect_s=4.0, evict_s=EVICT_S)
        self.registry = RegistryServer(self.keyring, settings=settings)
        self.registry.start()
        self.prompts = _prompts()
        self._processes: dict[str, Forked] = {}
        self._starts = itertools.count()

    def need(self, *names: str) -> None:
        """Start those that do not run, and wait until each is listed in its latest life."""
        for name in names:
            if not self._runs(name):
                self._start(name)
        for name in names:
            wait_for(partial(self._is_listed, name, self._log(name)), START_S, self._log(name))

    def url(self, name: str) -> str:
        """Where it listens; where it did, while it is dead."""
        match = re.findall(r" serves (http://\S+)", self._log(name).read_text())
        return str(match[-1])

    def signal(self, name: str, number: int) -> None:
        os.kill(self._processes[name].pid, number)

    def kill(self, name: str) -> None:
        """kill -9, and wait until it is gone."""
        self.signal(name, signal.SIGKILL)
        self._processes[name].wait(10)

    @contextlib.contextmanager
    def stopped(self, name: str) -> Iterator[None]:
        """SIGSTOP while the context lasts, unless it is killed within."""
        self.signal(name, signal.SIGSTOP)
        stat = Path(f"/proc/{self._processes[name].pid}/stat")
        wait_for(lambda: stat.read_text().rpartition(")")[2].split()[0] == "T", 10.0)  # a busy machine takes a while
        try:
            yield
        finally:
            if self._runs(name):
                self.signal(name, signal.SIGCONT)

    def wait_ended(self, name: str, within_s: float) -> int:
        return self._processes[name].wait(within_s)

    def running(self, names: Sequence[str]) -> list[str]:
        return [name for name in names if self._runs(name)]

    def close(self) -> list[str]:
        """End all; returns what did not end well."""
        for name in self.running(list(self._processes)):
            self.signal(name, signal.SIGCONT)
            self.signal(name, signal.SIGHUP)
        bad = []
        for name, process in self._processes.items():
            try:
                code = process.wait(60)
            except subprocess.TimeoutExpired:
                process.kill()
                code = process.wait(10)
                bad.append(f"{name} did not end:\n{self._log(name).read_text()[-2000:]}")
            if code not in (0, -signal.SIGKILL):
                bad.append(f"{name} ended with {code}:\n{self._log(name).read_text()[-2000:]}")
        self.registry.close()
        return bad

    def _runs(self, name: str) -> bool:
        return name in self._processes and self._processes[name].poll() is None

    def _log(self, name: str) -> Path:
        return max(self.directory.glob(f"{name}.*.log"), key=lambda path: int(path.suffixes[-2][1:]))

    def _start(self, name: str) -> None:
        role, options = SPECS[name]
        flags = [str(word) for pair in options.items() for word in pair]
        where = ["--keys", str(self.directory / "keys"), "--registry", self.registry.endpoint]
        log = self.directory / f"{name}.{next(self._starts)}.log"
        words = [*warm_workers.MAIN, "worker", "--name", name, "--role", role, *where, *flags]
        self._processes[name] = warm_workers.start(words, log)

    def _is_listed(self, name: str, log: Path) -> bool:
        """Whether the registry lists it in the life that its log tells of."""
        assert self._runs(name), log.read_text()
        match = re.search(rf"^{name} ([0-9a-f]{{16}}) serves ", log.read_text(), re.MULTILINE)
        lives = [each.registration.incarnation for each in self.registry.workers() if each.registration.worker == name]
        return match is not None and lives == [int(match[1], 16)]


@contextlib.contextmanager
def crew_in(directory: Path) -> Iterator[Crew]:
    crew = Crew(directory)
    try:
        yield crew
    finally:
        bad = crew.close()
    assert not bad, "\n".join(bad)


def _prompts() -> Iterator[tuple[str, str]]:
    """Prompts that nobody has seen, each with its one right answer; none of them ends early."""
    rng = random.Random(os.getpid())
    for batch in itertools.count():
        made = [f"{batch} {n} " + "".join(rng.choices("abcdefgh ", k=44)) for n in range(32)]
        for prompt, right in zip(made, reference_answers(made, ANSWER_TOKENS), strict=True):
            if len(right) == ANSWER_TOKENS:
                yield prompt, right


class Listing:
    """The registry's list as this test's router sees it: some workers, in the order given, behind their doors."""

    def __init__(self, crew: Crew, doors: Mapping[str, Door]) -> None:
        self.follows_pings = False  # by default a machine that is slow for a while changes nobody's turn
        self.gone: frozenset[str] = frozenset()
        self.urls: dict[str, str] = {}  # instead of the door's
        self._doors = doors
        self._registered = RegistryDirectory(crew.registry)
        self._workers: tuple[ListedEngine, ...] = ()

    def snapshot(self) -> Sequence[ListedEngine]:
        by_name = {str(worker.name): worker for worker in self._registered.snapshot()}
        here = [name for name in self._doors if name in by_name and name not in self.gone]
        shown = tuple(self._shown(by_name[name]) for name in here)
        if shown != self._workers:  # the router takes a new list for news
            self._workers = shown
        return self._workers

    def _shown(self, worker: ListedEngine) -> ListedEngine:
        name = str(worker.name)
        state = (
            WorkerListState.SERVING
            if worker.state is WorkerListState.SUSPECT and not self.follows_pings
            else worker.state
        )
        return msgspec.structs.replace(worker, url=self.urls.get(name, self._doors[name].url), state=state)


@dataclass(slots=True)
class Got:
    """What a client was told."""

    status: int
    body: Any  # decoded; of a stream its events, "[DONE]" as a text
    headers: Mapping[str, str]
    seconds: float

    @property
    def text(self) -> str:
        if isinstance(self.body, dict):
            return str(self.body["choices"][0]["text"])
        return "".join(each["choices"][0]["text"] for each in self.body if each != "[DONE]" and each["choices"])

    @property
    def fault(self) -> tuple[int, str]:
        return self.status, self.body["error"]["code"]


@dataclass
class Town:
    """A router, the doors of its workers, and a client."""

    crew: Crew
    doors: dict[str, Door]
    listing: Listing
    router: Router
    url: str
    session: aiohttp.ClientSession
    settings: RouterSettings
    discarded: list[tuple[str, str]] = field(default_factory=list)

    def __getitem__(self, name: str) -> Door:
        return self.doors[name]

    async def ask(self, mode: str, prompt: str | Sequence[str], *, stream: bool = False, **more: Any) -> Got:
        """One request, answered or refused before its deadline and a little more."""
        begun = time.monotonic()
        async with asyncio.timeout(self.settings.deadline_s + 5):
            async with self.post(mode, prompt, stream=stream, **more) as response:
                data = await response.read()
        seconds = time.monotonic() - begun
        if response.content_type == "text/event-stream":
            return Got(response.status, decoded(data), response.headers, seconds)
        return Got(response.status, msgspec.json.decode(data), response.headers, seconds)

    def post(self, mode: str, prompt: str | Sequence[str], *, stream: bool = False, **more: Any) -> Any:
        body = {"model": "kvbaton-tiny", "prompt": prompt, "max_tokens": ANSWER_TOKENS, "temperature": 0, **more}
        if stream:
            body["stream"] = True
        return self.session.post(f"{self.url}/v1/completions", json=body, headers={"x-kvbaton-mode": mode})

    async def get(self, path: str) -> Any:
        async with self.session.get(self.url + path) as response:
            return await response.json()

    async def router_stats(self) -> dict[str, Any]:
        return dict(await self.get("/stats"))

    async def counted(self, **wanted: Mapping[str, int]) -> None:
        """What an operator can see of it: these counters, without their `_total`, are exactly so."""
        numbers = await self.router_stats()
        assert {name: numbers[f"{name}_total"] for name in wanted} == wanted

    async def states(self) -> dict[str, str]:
        return {each["name"]: each["state"] for each in (await self.get("/workers"))["workers"]}

    async def stats(self, name: str) -> dict[str, Any]:
        """What a worker says of itself, asked past its door."""
        return dict(await get_json(self.session, f"{self.crew.url(name)}/stats"))

    async def holds(self, name: str, call: asyncio.Task[Got] | None = None, **wanted: int) -> None:
        """Wait until a worker says so; a call that should still be under way then must not have ended."""
        await self._says(name, call, lambda told: all(told[key] == value for key, value in wanted.items()))

    async def computes(self, name: str, call: asyncio.Task[Got]) -> None:
        """The same, until it has begun to compute something."""
        await self._says(name, call, lambda told: told["running"] > 0)

    async def _says(
        self, name: str, call: asyncio.Task[Got] | None, wanted: Callable[[Mapping[str, Any]], bool]
    ) -> None:
        async def look() -> bool:
            assert call is None or not call.done(), f"it ended too early: {call and call.result()}"
            return wanted(await self.stats(name))

        await eventually(look, REST_S)

    async def at_rest(self, within_s: float = REST_S) -> None:
        """Wait until nobody holds anything for anybody: not the router, and no worker that lives."""

        async def look() -> bool:
            listed = (await self.get("/workers"))["workers"]
            if self.router.stats.in_flight or any(each["tokens_under_way"] for each in listed):
                return False
            told = [await self.stats(name) for name in self.crew.running(list(self.doors))]
            assert all(stats["faults_total"] == 0 for stats in told)
            still = all(stats[key] == 0 for stats in told for key in HELD)
            return still and all(stats["free_blocks"] == stats["blocks"] for stats in told)

        await eventually(look, within_s)

    def check_tickets(self) -> None:
        """No ticket is used twice: each went to one D at most, and a minted one to one P at most."""
        for role in ("prefill", "decode"):
            seen = [ticket for name in self.doors if SPECS[name][0] == role for ticket in self.doors[name].tickets]
            assert len(seen) == len(set(seen)), f"a ticket went to two {role} workers, or twice to one"


@contextlib.asynccontextmanager
async def town(crew: Crew, *names: str, settings: RouterSettings) -> AsyncIterator[Town]:
    """A router that knows these workers, in this order: the first pair of them is asked first."""
    async with contextlib.AsyncExitStack() as stack:
        doors: dict[str, Door] = {}
        for name in names:
            doors[name] = await stack.enter_async_context(open_door(name, partial(crew.url, name)))
        listing = Listing(crew, doors)
        discarded: list[tuple[str, str]] = []

        def discard(worker: ListedEngine, ticket: str) -> None:
            discarded.append((str(worker.name), ticket))
            crew.registry.discard(WorkerId(worker.name), worker.incarnation, [ticket])

        router = await stack.enter_async_context(router_app(listing, settings, crew.keyring.ticket_keys[0], discard))
        url = await stack.enter_async_context(serving(router, "127.0.0.1", 0))
        connector = aiohttp.TCPConnector(force_close=True, limit=0)
        session = await stack.enter_async_context(aiohttp.ClientSession(connector=connector))
        yield Town(crew, doors, listing, router, url, session, settings, discarded)


@contextlib.asynccontextmanager
async def row(
    crew: Crew, mode: str, *names: str, settings: RouterSettings, rest_s: float = REST_S
) -> AsyncIterator[Town]:
    """One row of the matrix: whatever happens within, all come to rest, and the next request is answered right."""
    await asyncio.to_thread(crew.need, *names)
    async with town(crew, *names, settings=msgspec.structs.replace(settings)) as made:
        yield made
        await made.at_rest(rest_s)
        await _serves_again(made, mode)
        await made.at_rest(rest_s)
        made.check_tickets()


async def _serves_again(made: Town, mode: str) -> None:
    """The next request has plenty of time: what a row is short of is its own matter."""
    for name in ("deadline_s", "first_byte_s"):
        msgspec.structs.force_setattr(made.settings, name, NEXT_S)
    made.listing.urls.clear()
    made.listing.gone = frozenset()
    for door in made.doors.values():
        door.script = passes
    await asyncio.to_thread(made.crew.need, *made.doors)
    prompt, right = next(made.crew.prompts)
    got = await made.ask(mode, prompt)
    assert got.status == 200, got.body
    assert got.text == right


async def until(condition: Callable[[], object], call: asyncio.Task[Got] | None = None) -> None:
    """Poll `condition` until it holds; a call that should still be under way then must not have ended."""
    deadline = time.monotonic() + REST_S
    while not condition():
        assert call is None or not call.done(), f"it ended too early: {call and call.result()}"
        assert time.monotonic() < deadline, f"not within {REST_S} s"
        await asyncio.sleep(0.005)


def decoded(data: bytes) -> list[Any]:
    texts = [each.removeprefix("data: ") for each in data.decode().split("\n\n") if each]
    return [text if text == "[DONE]" else msgspec.json.decode(text) for text in texts]


def only(seen: Sequence[Seen]) -> Seen:
    (one,) = seen
    return one
