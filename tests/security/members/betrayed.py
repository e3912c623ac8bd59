"""A cluster with a traitor in it: real processes, two registries of which one may lie, and a thief that takes prompts.

Laws: whoever starts a process ends it, by its own handle. Every answer is compared with what one engine says. A prompt
that reaches the thief is stolen, whatever becomes of it.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import random
import re
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import msgspec

from kvbaton.api.params import Mode
from kvbaton.control import keyring as keys
from kvbaton.control.registry import RegistryServer, RegistrySettings
from kvbaton.engines.embedded.embedded_worker import reference_answers
from kvbaton.engines.embedded.worker_options import WorkerOptions, argv_of
from kvbaton.processes.child_process import free_ports
from kvbaton.protocol.ids import Incarnation, PeerId, WorkerId
from kvbaton_proof.chaos.judged_request import Board, Counts, Prompt, Way, ask
from kvbaton_proof.chaos.liars.false_registry import FalseRegistry
from kvbaton_proof.chaos.liars.liar_http import Door
from tests.e2e import warm_workers
from tests.vllm.forking import Forked
from tests.waiting import until

START_S = 90.0
ANSWER_TOKENS = 8
LATE_S = 30.0
HONEST, FALSE = "registry-a", "registry-b"
FALSE_WORKER = ("-m", "kvbaton_proof.chaos.liars.false_worker")
SETTINGS = RegistrySettings(suspect_s=4.0, evict_s=8.0, settle_s=1.0)
_salts = itertools.count()


@dataclass
class Betrayed:
    """The cluster, and clients before it. `worker` and `router` start processes."""

    directory: Path
    registry: RegistryServer
    traitor: FalseRegistry
    thief: Door
    prompts: list[Prompt]
    ports: dict[str, int]
    transport: str = "tcp"
    texts: dict[str, str] = field(default_factory=dict)  # of each prompt the last answer
    processes: dict[str, Forked] = field(default_factory=dict)
    failed: list[str] = field(default_factory=list)  # what was not right, of all that was asked

    @property
    def keys(self) -> str:
        return str(self.directory / "keys")

    @property
    def registries(self) -> str:
        return f"{FALSE}@{self.traitor.endpoint},{HONEST}@{self.registry.endpoint}"  # the traitor has the first word

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.ports['router']}"

    # --- processes

    def start(self, name: str, words: Sequence[str]) -> None:
        self.processes[name] = warm_workers.start(words, self.directory / f"{name}.log")

    def worker(self, name: str, role: str, lie: str = "", **more: Any) -> None:
        """One that tells this lie, or none."""
        options = WorkerOptions(
            name=name, role=role, keys=self.keys, registry=more.pop("registry", self.registries),  # type: ignore[arg-type]
            transport=more.pop("transport", "tcp"), **more,
        )  # fmt: skip
        if lie:
            self.start(name, [*FALSE_WORKER, lie, msgspec.json.encode(options).decode()])
        else:
            self.start(name, [*warm_workers.MAIN, "worker", *argv_of(options)])

    def router(self, *words: str) -> None:
        told = ["--keys", self.keys, "--port", str(self.ports["router"]), "--show-pair", "--no-same-host"]
        self.start("router", [*warm_workers.MAIN, "router", *told, "--registry", self.registries, *words])

    def store(self, *words: str) -> str:
        """Where it listens."""
        told = ["--keys", self.keys, "--port", str(self.ports["store"]), *words]
        self.start("store", [*warm_workers.MAIN, "store", *told])
        return f"tcp://127.0.0.1:{self.ports['store']}"

    def end(self, name: str, number: int = signal.SIGKILL) -> None:
        process = self.processes.pop(name)
        process.send_signal(number)
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(10)

    def log(self, name: str) -> str:
        return (self.directory / f"{name}.log").read_text()

    def address(self, name: str) -> str:
        """host:port of a worker's HTTP, of its latest life."""
        return re.findall(r" serves http://(\S+)", self.log(name))[-1]

    # --- asking

    def get(self, path: str, at: str = "") -> Any:
        async def story() -> Any:
            timeout = aiohttp.ClientTimeout(total=10)
            async with aiohttp.ClientSession(timeout=timeout) as session, session.get((at or self.url) + path) as told:
                return await told.json(content_type=None)

        with contextlib.suppress(aiohttp.ClientError, OSError, TimeoutError):
            return asyncio.run(story())
        return None

    def states(self) -> dict[str, str]:
        told = self.get("/workers")
        return {} if told is None else {each["name"]: each["state"] for each in told["workers"]}

    def serving(self, *names: str) -> None:
        """Until the router lists these as serving, each in its latest life, and no others."""

        def look() -> bool:
            told = self.get("/workers") or {"workers": []}
            lives = {each["name"]: each["incarnation"] for each in told["workers"] if each["state"] == "serving"}
            return lives == {name: self.life(name) for name in names} and len(told["workers"]) == len(names)

        until(look, START_S)

    def life(self, name: str) -> str:
        found = re.findall(rf"^{name} ([0-9a-f]{{16}}) serves ", self.log(name), re.MULTILINE)
        return found[-1] if found else ""

    def ask(self, count: int, mode: str = "pull", salt: str | None = None, first: int = 0) -> Counts:
        """So many prompts, four at a time; with a salt of its own each, unless one is given."""
        board = Board()

        async def story() -> None:
            timeout = aiohttp.ClientTimeout(total=LATE_S + 5)
            places = asyncio.Semaphore(4)
            async with aiohttp.ClientSession(timeout=timeout) as session:

                async def one(number: int) -> None:
                    async with places:
                        own = f"s{next(_salts)}" if salt is None else salt
                        way = Way(self.url, Mode(mode), salt=own, late_s=LATE_S)
                        prompt = self.prompts[number % len(self.prompts)]
                        self.texts[prompt.text] = (await ask(session, board, prompt, way)).text

                await asyncio.gather(*(one(number) for number in range(first, first + count)))

        asyncio.run(story())
        self.failed += [*board.kinds.elements(), *board.wrongs, *board.lates]
        return board.counts()

    def go_on(self) -> None:
        """From now on prompts are the second turns of conversations that began with those before."""
        asked = [each.text for each in self.prompts if each.text in self.texts]
        texts = [text + self.texts[text] + " and what then?" for text in asked]
        right = reference_answers(texts, ANSWER_TOKENS)
        self.prompts = [Prompt(text, answer, ANSWER_TOKENS) for text, answer in zip(texts, right, strict=True)]

    def remove(self, name: str) -> str:
        """`keys remove`, and until the router knows of it; what the command says."""
        said = self.command("keys", "remove", self.keys, name)
        until(lambda: name not in self.states())
        return said

    def stats(self, name: str) -> dict[str, Any]:
        return dict(self.get("/stats", f"http://{self.address(name)}"))

    def stolen(self) -> int:
        """Prompts that the thief has seen since it was last asked."""
        count = self.thief.prompts
        self.thief.asked.clear()
        return count

    def command(self, *words: str) -> str:
        done = subprocess.run(
            [sys.executable, "-m", "kvbaton.cli.main", *words], capture_output=True, text=True, timeout=60, check=True
        )
        return done.stdout + done.stderr


@contextlib.contextmanager
def betrayed(directory: Path, *names: str) -> Iterator[Betrayed]:
    """Keys for these members, `router`, `operator` and both registries; no process runs yet."""
    folder = directory / "keys"
    keys.mint(folder, ["router", "operator", HONEST, FALSE, *names])
    with contextlib.ExitStack() as stack:
        registry = RegistryServer(keys.load(folder, HONEST), settings=SETTINGS)
        traitor = FalseRegistry(keys.load(folder, FALSE), "tcp://127.0.0.1:0", settings=SETTINGS)
        for each in (registry, traitor):
            stack.callback(each.close)
            each.start()
        key = keys.load(folder, "router").ticket_keys[0]
        thief = Door("127.0.0.1", PeerId(WorkerId("ghost"), Incarnation(7)), key, random.Random(1))
        stack.callback(thief.close)
        thief.answer = "steal"
        traitor.thief = thief.address
        texts = [f"{n} betrayed {random.Random(n).randbytes(150).hex()}" for n in range(12)]
        right = reference_answers(texts, ANSWER_TOKENS)
        prompts = [Prompt(text, answer, ANSWER_TOKENS) for text, answer in zip(texts, right, strict=True)]
        ports = dict(zip(("router", "store"), free_ports(2), strict=True))
        made = Betrayed(directory, registry, traitor, thief, prompts, ports)
        try:
            yield made
        finally:
            for process in made.processes.values():
                process.send_signal(signal.SIGHUP)
                process.send_signal(signal.SIGTERM)
            for name in list(made.processes):
                made.end(name, signal.SIGTERM)
