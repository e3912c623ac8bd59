"""The context of an injury: the processes, the network, the moments of workers, the clients and the board.

Law: who is hurt is hurt by one fault at a time, from the fault until it is well again; so are the wires, since they are
healed all at once. Different members may be hurt at the same time.
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
from kvbaton_proof.chaos.board import Board
from kvbaton_proof.chaos.breakpoints import BreakpointServer
from kvbaton_proof.chaos.chaos_load import LATE_S, Load
from kvbaton_proof.chaos.chaos_plan import Step
from kvbaton_proof.chaos.fault_catalogue import Moment
from kvbaton_proof.chaos.fleet import Fleet
from kvbaton_proof.chaos.judged_request import Prompt, Way, ask
from kvbaton_proof.chaos.liars.lies import Tally
from kvbaton_proof.chaos.members import ROUTER
from kvbaton_proof.chaos.network.wires import Network

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
