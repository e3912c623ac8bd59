"""The context of an injury: the processes, the network, the moments of workers, the clients and the board.

Law: who is hurt is hurt by one fault at a time, from the fault until it is well again; so are the wires, since they are
healed all at once. Different members may be hurt at the same time.

Steady clients: all modes, streamed and whole, shared prefixes and new prompts.

Law: every answer is compared; no client sends faster than the cluster answers, and after an error it waits a little.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import random
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from kvbaton.api.params import Mode
from kvbaton.engines.embedded.embedded_worker import reference_answers
from kvbaton_proof.chaos.breakpoints import BreakpointServer
from kvbaton_proof.chaos.chaos_plan import Step
from kvbaton_proof.chaos.fault_catalogue import Moment
from kvbaton_proof.chaos.fleet import Fleet
from kvbaton_proof.chaos.judged_request import Board, Prompt, Verdict, Way, ask
from kvbaton_proof.chaos.liars.lies import Tally
from kvbaton_proof.chaos.members import DEADLINE_S, ROUTER
from kvbaton_proof.chaos.network.networks import Network
from kvbaton_proof.chaos.streams.stream_load import StreamLoad

CLIENTS = 12
THINK_S = 0.02
AFTER_ERROR_S = 0.5
SLACK_S = 6.0
"""Beyond the router's own deadline: a router that is stopped for some seconds, and a busy machine."""
LATE_S = DEADLINE_S + SLACK_S
MAX_TOKENS = 8
LENGTHS = (17, 20, 31, 32, 33, 47, 63, 64, 65, 90, 130)
LONG = (300, 420, 640)
"""More than an engine computes in one step (256 tokens): these are handed over in pieces."""
FRESH = 0.7
"""Share of requests whose KV nobody has."""
SALTS = ("", "one", "two")
FLOWING_PART, FLOWING_S = 4, 15.0
"""A quarter of all streams, or as many as there are then."""
_WORDS = ("amber", "basil", "clove", "dune", "ember", "frost", "gale", "harp", "iris", "jade", "knoll", "loam")


def make_prompts(rng: random.Random, count: int) -> list[Prompt]:
    """Prompts with their answers, as one engine that hands nothing over gives them."""
    stems = [_text(rng, 160) for _ in range(4)]
    texts = []
    for number in range(count):
        length = rng.choice(LONG) if number % 12 == 0 else rng.choice(LENGTHS)
        stem = rng.choice(stems)[: length // 2] if number % 3 == 0 else ""
        texts.append(f"{stem}{number} {_text(rng, length)}"[:length])
    answers = reference_answers(texts, MAX_TOKENS)
    return [Prompt(text, right, MAX_TOKENS) for text, right in zip(texts, answers, strict=True)]


def _text(rng: random.Random, length: int) -> str:
    words = ""
    while len(words) < length:
        words += rng.choice(_WORDS) + " "
    return words[:length]


def stream_text(rng: random.Random, number: int, tokens: int) -> str:
    """A prompt of a long stream; a byte is a token, and one more begins it."""
    return f"{number} {_text(rng, tokens)}"[: tokens - 1]


class Load:
    """The clients. `pause` waits until nothing is under way."""

    def __init__(
        self, url: str, prompts: Sequence[Prompt], board: Board, rng: random.Random, clients: int = CLIENTS,
        late_s: float = LATE_S,
    ) -> None:  # fmt: skip
        self._url = url
        self._clients = clients
        self._late_s = late_s
        self.streams: StreamLoad | None = None  # long ones, beside these
        self._prompts = prompts
        self._board = board
        self._rng = rng
        self._may = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []
        self._under_way = 0
        self._idle = asyncio.Event()
        self._idle.set()
        self._number = 0

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Clients, paused at first; gone after the context."""
        rngs = [random.Random(self._rng.random()) for _ in range(self._clients)]
        self._tasks = [asyncio.create_task(self._client(rng)) for rng in rngs]
        try:
            yield
        finally:
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)

    def resume(self) -> None:
        self._may.set()

    async def pause(self) -> None:
        """No new requests; returns when those under way are over, which each is within `LATE_S`."""
        self._may.clear()
        await self._idle.wait()

    def prompt(self, rng: random.Random) -> tuple[Prompt, str]:
        """One to ask, with its salt."""
        self._number += 1
        salt = f"n{self._number}" if rng.random() < FRESH else rng.choice(SALTS)
        return rng.choice(self._prompts), salt

    def longest(self, count: int) -> list[Prompt]:
        return sorted(self._prompts, key=lambda prompt: -len(prompt.text))[:count]

    async def _client(self, rng: random.Random) -> None:
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(None)) as session:
            while True:
                await self._may.wait()
                prompt, salt = self.prompt(rng)
                way = Way(self._url, rng.choice(list(Mode)), rng.random() < 0.5, salt, self._late_s)
                self._under_way += 1
                self._idle.clear()
                try:
                    found = await ask(session, self._board, prompt, way)
                finally:
                    self._under_way -= 1
                    if not self._under_way:
                        self._idle.set()
                await asyncio.sleep(rng.uniform(0, 2 * THINK_S) if found.verdict is Verdict.RIGHT else AFTER_ERROR_S)


REACH_S = 30.0
"""How long a moment is looked for, while others may be dead; then the fault is done at any, which is a problem."""
WIRES = "wires"


@dataclass(slots=True)
class Scene:
    """One run's."""

    fleet: Fleet
    network: Network
    breakpoints: BreakpointServer
    load: Load
    board: Board
    session: aiohttp.ClientSession
    rng: random.Random
    answers: Sequence[Prompt]  # with long answers
    say: Callable[[str], None] = lambda _: None
    locks: dict[str, asyncio.Lock] = field(default_factory=lambda: defaultdict(asyncio.Lock))
    problems: list[str] = field(default_factory=list)
    numbers: itertools.count[int] = field(default_factory=itertools.count)
    lies: Tally = field(default_factory=Tally)
    moments: dict[str, int] = field(default_factory=lambda: {"reached": 0, "missed": 0})

    async def cut(self, name: str) -> str:
        """Somebody is hurt from now on; how many streams that cuts, in words."""
        if self.load.streams is None or self.fleet.specs[name].role != "decode":
            return ""
        others = [each for each in self.fleet.engines if self.fleet.specs[each].role == "decode" and each != name]
        return f"{self.load.streams.board.hurt(name, others)} streams cut"

    async def flowing(self, name: str) -> None:
        """Wait, bounded, until a good part of the streams is at this D."""
        if self.load.streams is not None and self.fleet.specs[name].role == "decode":
            await self.load.streams.flowing(name, self.load.streams.count // FLOWING_PART, FLOWING_S)

    def now(self) -> float:
        return asyncio.get_running_loop().time()

    def way(self, name: str, mode: Mode | None, *, stream: bool = False, salt: str = "", more: Any = None) -> Way:
        """How to ask at a member's own door, with KV that nobody has unless a salt is given."""
        salt = salt or f"w{next(self.numbers)}"
        spec = self.fleet.specs[name]
        return Way(spec.url, mode, stream, salt, LATE_S, more or {}, self.fleet.pass_for(name))

    async def ask_all(self, asked: Sequence[tuple[Prompt, Way]]) -> str:
        """All at once; how they ended, in words."""
        found = await asyncio.gather(*(ask(self.session, self.board, prompt, way) for prompt, way in asked))
        verdicts = [each.verdict.value for each in found]
        counted = [f"{verdicts.count(each)} {each}" for each in dict.fromkeys(sorted(verdicts))]
        return f"{len(found)} asked: {', '.join(counted)}"

    @contextlib.asynccontextmanager
    async def at(self, step: Step) -> AsyncIterator[str]:
        """The step's moment: whoever is there waits while the context lasts."""
        if step.moment is Moment.ANY:
            yield ""
            return
        who = "" if step.target == ROUTER else step.target  # a router has part in every handoff
        async with self.breakpoints.caught(step.moment, who, REACH_S) as reached:
            if reached is None:
                self.moments["missed"] += 1
                self.problems.append(f"{step.title()}: done at another moment, since {step.moment} was not reached")
                yield f"{step.moment} was not reached within {REACH_S:g} s"
            else:
                self.moments["reached"] += 1
                yield f"at {reached.what}"
