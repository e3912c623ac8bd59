"""A pair whose dead are looked at: what they leave of the GPU's memory, and what was wrong in what they answered.

Laws: nobody kills or starts an engine while another's memory is watched: a change of it then has one cause. So before a
kill all pairs meet, with nobody starting; they kill and watch in turn, and meet again before anybody starts a
successor. Then all start at once: a start costs more than everything else. One who is done for does not keep others
waiting.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from kvbaton_proof.chaos.vllm.vllm_pair import Pair
from kvbaton_proof.chaos.vllm.vllm_steps import CLIENTS
from kvbaton_proof.gpu_test.gpu_machine import MemoryWatch
from kvbaton_proof.rig.client import TOKENS, Answer
from kvbaton_proof.rig.connectors import P
from kvbaton_proof.rig.oracle import Doubts, Right
from kvbaton_proof.rig.servers import GIB

START_S = 75.0
"""What the start of a server takes on an H200 whose driver and files are warm, as others start beside it."""


class Meeting:
    """Where pairs wait for each other, again and again; what they wait for has deadlines."""

    def __init__(self, parties: int) -> None:
        self._parties = parties
        self._waiting: list[tuple[int, asyncio.Future[float]]] = []

    async def meet(self, rank: int) -> float:
        """Wait for all others; they go on by rank. When that was, the same for all: they decide alike."""
        loop = asyncio.get_running_loop()
        mine = loop.create_future()
        self._waiting.append((rank, mine))
        loop.call_soon(self._look)  # not now: who comes last would go on before the others
        return float(await mine)

    def leave(self) -> None:
        self._parties -= 1
        self._look()

    def _look(self) -> None:
        if len(self._waiting) < self._parties:
            return
        waiting, self._waiting = sorted(self._waiting, key=lambda each: each[0]), []
        now = time.monotonic()
        for _, one in waiting:
            if not one.done():
                one.set_result(now)


@dataclass(slots=True)
class WatchedPair(Pair):
    """`turn` and `meeting` are shared by all pairs on this GPU."""

    turn: asyncio.Lock = field(default_factory=asyncio.Lock)
    meeting: Meeting = field(default_factory=lambda: Meeting(1))
    rank: int = 0  # who kills first: what an earlier one left mapped must not be counted as a later one's
    until: float = float("inf")  # by when all has to be over
    memory: MemoryWatch = field(default_factory=MemoryWatch)  # of a P that is killed
    has_turn: bool = False
    successor_s: float | None = None  # how long the last one took to serve
    fallen: tuple[str, ...] = ()  # died, and there was no time to start them again
    not_run: list[str] = field(default_factory=list)  # titles
    rights: Sequence[Right] = ()
    during: str = ""  # the step under way
    crowd: int = CLIENTS  # requests at once in it
    doubts: Doubts | None = None  # None: nobody looks into wrong answers
    opinions: list[asyncio.Task[None]] = field(default_factory=list)  # of this step

    async def take_turn(self) -> None:
        """Before a step that kills, after a meeting."""
        await self.turn.acquire()
        self.has_turn, self.memory.level, self.successor_s = True, self.memory.used(), None

    async def end_turn(self) -> None:
        """Nobody is watched any more when this returns. May be called twice."""
        if self.has_turn:
            self.has_turn = False
            self.turn.release()
            await self.meeting.meet(self.rank)

    async def restart(self, *names: str) -> None:
        """Who died of something, and would not be up in time, stays dead."""
        if self.has_turn:
            for name in names:
                self.engines[name].kill()
            await self.died(*names)
            await self.end_turn()
            begun = time.monotonic()
            for name in names:
                self.engines[name].start()
            await self.ready(*names)
            self.successor_s = time.monotonic() - begun
        elif names and time.monotonic() + START_S > self.until:
            self.fallen = names
        else:
            await Pair.restart(self, *names)

    async def died(self, *names: str) -> None:
        found = await self.memory.died() if names == (P,) else None
        if found is not None:
            self.say(
                f"{self.connector}: of a P that was killed {found.fell / GIB:.1f} GiB came back, by {found.after_s} s"
            )

    def doubt(self, answer: Answer, number: int) -> None:
        if self.doubts is not None:
            prompt = self.prompts[number]
            others = [each for each in self.prompts if each is not prompt][: self.crowd - 1]
            opinion = self.doubts.look_into(self.during, number, prompt, answer, self.rights[number], others, TOKENS)
            self.opinions.append(asyncio.create_task(opinion))

    async def looked_into(self) -> None:
        """Wait for second opinions; they have deadlines."""
        await asyncio.gather(*self.opinions)
        self.opinions.clear()
