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

from kvbaton.proof.chaos.vllm.vllm_client import TOKENS, Prompt, Told
from kvbaton.proof.chaos.vllm.vllm_pair import Pair
from kvbaton.proof.chaos.vllm.vllm_plan import P
from kvbaton.proof.chaos.vllm.vllm_steps import CLIENTS
from kvbaton.proof.gpu_test import gpu_machine, gpu_oracle
from kvbaton.proof.gpu_test.gpu_oracle import Doubt, Right
from kvbaton.proof.gpu_test.servers import GIB

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
    memory: gpu_machine.Used = lambda: None
    p_bytes: int = 0  # that must come back when P is killed
    within_s: float = 0.0
    has_turn: bool = False
    level: int | None = None  # bytes in use while all were up
    freed: list[gpu_machine.Freed] = field(default_factory=list)
    successor_s: float | None = None  # how long the last one took to serve
    fallen: tuple[str, ...] = ()  # died, and there was no time to start them again
    not_run: list[str] = field(default_factory=list)  # titles
    rights: Sequence[Right] = ()
    alone_url: str = ""
    during: str = ""  # the step under way
    crowd: int = CLIENTS  # requests at once in it
    doubts: list[Doubt] = field(default_factory=list)
    more: int = 0  # wrong answers that were not looked into
    opinions: list[asyncio.Task[None]] = field(default_factory=list)  # of this step

    async def take_turn(self) -> None:
        """Before a step that kills, after a meeting."""
        await self.turn.acquire()
        self.has_turn, self.level, self.successor_s = True, self.memory(), None

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
        if names != (P,) or self.level is None or not self.p_bytes:
            return
        found = await gpu_machine.freed(self.memory, self.level, self.p_bytes, self.within_s)
        if found is not None:
            self.freed.append(found)
            self.say(
                f"{self.connector}: of a P that was killed {found.fell / GIB:.1f} GiB came back, by {found.after_s} s"
            )

    def doubt(self, told: Told, number: int) -> None:
        if len(self.doubts) >= gpu_oracle.DOUBTS_MAX:
            self.more += 1
            return
        prompt, right = self.prompts[number], self.rights[number]
        found = gpu_oracle.doubted(self.connector, self.during, number, prompt, told, right)
        self.doubts.append(found)
        self.opinions.append(asyncio.create_task(self._again(found, prompt, right)))

    async def _again(self, found: Doubt, prompt: Prompt, right: Right) -> None:
        others = [each for each in self.prompts if each is not prompt][: self.crowd - 1]
        found.again = await gpu_oracle.again(self.session, self.alone_url, prompt, right, others, TOKENS)

    async def looked_into(self) -> None:
        """Wait for second opinions; they have deadlines."""
        await asyncio.gather(*self.opinions)
        self.opinions.clear()
