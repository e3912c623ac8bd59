"""Long streams on real vLLM, whose D's are killed, stopped and drained: `kvbaton chaos --engine vllm --plan streams`.

One P and two D's behind kvbaton's router, on this machine's CPU. What is right of a stream is what D answers alone.

Laws: one D at a time is hurt, and serves again before the next is. All processes are gone when this returns.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp
import msgspec

from kvbaton.api import tokens
from kvbaton.control import keyring
from kvbaton.engines.vllm.launch import launching
from kvbaton.local_cluster.embedded_cluster import Cluster, places, running
from kvbaton.local_cluster.vllm_engine import ServerOptions, VllmHandoff, VllmPlan
from kvbaton.processes.child_process import KVBATON_ARGV, Child, Say, end, start
from kvbaton.router.router_settings import RouterSettings
from kvbaton.router.workers.directory import WorkerListState
from kvbaton_proof.chaos.chaos_plan import Plan, Step
from kvbaton_proof.chaos.draw import Size, draw_streams
from kvbaton_proof.chaos.fault_catalogue import KNOWN
from kvbaton_proof.chaos.injuries import DRAIN_S_MAX
from kvbaton_proof.chaos.judged_request import Board
from kvbaton_proof.chaos.outcome import Outcome, Row
from kvbaton_proof.chaos.streams.stream_load import VLLM, StreamLoad, learned, moves_of
from kvbaton_proof.rig.oracle import MARGIN

DECODES = 2
TRIED, TEXTS, TOKENS = 24, 4, 160
"""The prompts whose answers can be compared furthest before two tokens are nearly as likely."""
WORDS, PROMPT_WORDS = ("what", "is", "the", "lease", "of", "a", "block", "that", "nobody", "reads"), 60
LATE_S = 240.0
STALL_S = 4.0
BACK_S = 600.0
FLOWING_S = 60.0
SEATS = 64
START_COMMAND_S = 5.0
"""Of a Python process on a busy machine, before it asks."""
STREAM_FAULTS = ("kill", "stop", "drain")


def plan_of(seed: int, minutes: float, streams: int, faults: Sequence[str] | None) -> Plan:
    """As on embedded engines, without a P that dies too: there is one."""
    chosen = STREAM_FAULTS if faults is None else faults
    plan = draw_streams(seed, 60 * minutes, Size(1, DECODES), streams, chosen)
    steps = tuple(msgspec.structs.replace(step, detail="") for step in plan.steps)
    return msgspec.structs.replace(plan, engine="vllm", steps=steps)


async def carried_out(plan: Plan, python: str, logs: Path, say: Say) -> Outcome:
    model = launching.tiny_model(python, "llama", 1)
    server = ServerOptions(python=python, model=str(model), served_name="tiny-llama", max_num_seqs=SEATS)
    settings = RouterSettings(
        show_pair=True, same_host=False, streams_continue=plan.streams_continue, stall_s=STALL_S, deadline_s=LATE_S
    )
    handoff = VllmHandoff(name="-", keys="-", registry="-", http_address="-")
    cluster_plan = VllmPlan(places=tuple(places(1, DECODES, 1, 1)), server=server, handoff=handoff, settings=settings)
    begun = time.monotonic()
    stop = asyncio.Event()
    async with running(cluster_plan, say, stop) as cluster, _asking() as session:
        try:
            run = _VllmStreams(plan, cluster, session, say)
            return await run.go(begun)
        finally:
            for log in cluster.directory.glob("*.log"):
                (logs / log.name).write_bytes(log.read_bytes())


@contextlib.asynccontextmanager
async def _asking() -> AsyncIterator[aiohttp.ClientSession]:
    timeout = aiohttp.ClientTimeout(None)
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=timeout) as session:
        yield session


@dataclass(slots=True)
class _VllmStreams:
    plan: Plan
    cluster: Cluster
    session: aiohttp.ClientSession
    say: Say
    board: Board = field(default_factory=Board)
    rows: list[Row] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    hurt: int = 0  # the life that was ended last

    async def go(self, begun: float) -> Outcome:
        load = await self._load()
        up = time.monotonic()
        async with load.running():
            for step in self.plan.steps:
                self.rows.append(await self._hurt(load, step, up))
        counts = load.board.counts(await self._moves())
        requests = self.board.counts()
        return Outcome(
            plan=self.plan.name, seed=self.plan.seed, engine="vllm", connector="kvbaton",
            seconds=round(time.monotonic() - begun, 1), requests=requests.requests, right=requests.right,
            errors=requests.errors, wrong=requests.wrong, late=requests.late, dead=0, left_over=0,
            rows=tuple(self.rows), problems=(*self.problems, *load.board.said),
            errors_by_kind=dict(self.board.kinds), streams=counts, network="loopback",
        )  # fmt: skip

    async def _load(self) -> StreamLoad:
        rng = random.Random(self.plan.seed)
        tried = [f"{number} " + " ".join(rng.choices(WORDS, k=PROMPT_WORDS)) for number in range(TRIED)]
        alone = next(worker for worker in self.cluster.registered() if str(worker.name) == "d0")
        keys = keyring.load(self.cluster.directory / "keys", "router")
        headers = {tokens.HEADER: tokens.token(keys.ticket_keys[0], "d0")}
        self.say(f"d0 alone answers {TRIED} prompts, and {TEXTS} of them in {len(VLLM)} ways")
        found = await learned(self.session, alone.url, headers, VLLM[:1], tried, TOKENS, MARGIN)
        surest = sorted(range(TRIED), key=lambda number: -(found[number].right.sure_chars or 0))
        texts = [tried[number] for number in surest[:TEXTS]]
        asked = await learned(self.session, alone.url, headers, VLLM, texts, TOKENS, MARGIN)
        sure = sum(each.right.sure_chars or 0 for each in asked)
        said = sum(len(each.right.choices[0].text) for each in asked)
        self.say(f"compared up to the first near tie: {sure} of {said} characters")
        return StreamLoad(self.cluster.front.url, asked, self.plan.streams, self.board, LATE_S, rng)

    async def _hurt(self, load: StreamLoad, step: Step, up: float) -> Row:
        """Do it, wait until it is undone, and count what ended meanwhile."""
        clock = asyncio.get_running_loop().time
        at_s, began_at = time.monotonic() - up, clock()
        self.say(f"{at_s:6.1f} s  {step.title()}")
        await load.flowing(step.target, load.count // 3, FLOWING_S)
        (other,) = [name for name in ("d0", "d1") if name != step.target]
        cut = load.board.hurt(step.target, [other])
        note, recover_s = f"{cut} streams cut", 0.0
        try:
            note += await self._do(step)
            await self._back(step.target)
        except (OSError, RuntimeError, TimeoutError) as error:
            self.problems.append(f"{step.title()}: {error}")
        counts = self.board.between(began_at, clock())
        self.say(f"{time.monotonic() - up:6.1f} s  {note}; {counts.right} right, {counts.errors} errors meanwhile")
        return Row(
            at_s=round(at_s, 1), title=step.title(), fault=step.fault, promises=KNOWN[step.fault].promises,
            requests=counts.requests, right=counts.right, errors=counts.errors, wrong=counts.wrong, late=counts.late,
            recover_s=recover_s, note=note, seconds=round(clock() - began_at, 1),
        )  # fmt: skip

    async def _do(self, step: Step) -> str:
        child = self._child(step.target)
        self.hurt = 0 if step.fault == "stop" else self._life(step.target)
        if step.fault == "kill":
            os.killpg(child.pid, signal.SIGKILL)
            await child.process.wait()
            return ""
        if step.fault == "stop":
            os.killpg(child.pid, signal.SIGSTOP)
            try:
                await asyncio.sleep(STALL_S + step.seconds)
            finally:
                os.killpg(child.pid, signal.SIGCONT)
            return ""
        return f", drained in {await self._drain(step.target):.1f} s"

    def _life(self, name: str) -> int:
        return next((int(each.incarnation) for each in self.cluster.registered() if each.name == name), 0)

    async def _drain(self, name: str) -> float:
        """As an operator does it; the engine is idle after it, and ended."""
        words = ["drain", name, "--keys", str(self.cluster.directory / "keys"), "--registry",
                 self.cluster.front.registry_endpoint, "--timeout-s", "60", "--force"]  # fmt: skip
        begun = time.monotonic()
        command = await asyncio.create_subprocess_exec(
            *KVBATON_ARGV, *words, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
        )
        said, _ = await command.communicate()
        seconds = time.monotonic() - begun
        if command.returncode or seconds > DRAIN_S_MAX + START_COMMAND_S:
            raise RuntimeError(f"status {command.returncode} after {seconds:.1f} s: {said.decode()[-400:]}")
        await end([self._child(name)])
        return seconds

    def _child(self, name: str) -> Child:
        return next(child for child in self.cluster.children if child.name == name)

    async def _back(self, name: str) -> None:
        """The same command again, where it has ended; until the registry lists it and it serves."""
        number = next(n for n, child in enumerate(self.cluster.children) if child.name == name)
        child = self.cluster.children[number]
        if not child.is_alive:
            log = self.cluster.directory / f"{name}.log"
            self.cluster.children[number] = await start(child.program, log, deaths=self.cluster.deaths)
        async with asyncio.timeout(BACK_S):
            while not await self._serves(name):
                await asyncio.sleep(0.5)

    async def _serves(self, name: str) -> bool:
        listed = [each for each in self.cluster.registered() if each.name == name]
        if not listed or listed[0].state is not WorkerListState.SERVING or listed[0].incarnation == self.hurt:
            return False
        url = listed[0].url
        with contextlib.suppress(aiohttp.ClientError, OSError, TimeoutError):
            async with asyncio.timeout(5.0), self.session.get(f"{url}/health") as response:
                return response.status == 200
        return False

    async def _moves(self) -> dict[str, int]:
        async with self.session.get(f"{self.cluster.front.url}/stats") as response:
            return moves_of(await response.json())
