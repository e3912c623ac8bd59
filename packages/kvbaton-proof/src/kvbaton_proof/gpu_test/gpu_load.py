"""Part `load`: many requests at once: how many a second, and what D's own streams feel of loads that arrive.

    python -m kvbaton_proof.gpu_test.gpu_load      a `Watched` as JSON on stdin; on stdout a line when all streams are
    under way, then what was seen, as JSON

Laws: what arrives at D was prefilled before and is held by P, so that P computes nothing on the same GPU while D is
watched; the same with P computing is told beside it, and judged by nobody. So is the floor: the same requests with
their prompts in D's own prefix cache, where no connector has anything to do. A gap between two tokens of a stream
counts if it ends while loads arrive: from the first request of a load until the first token of the last. The streams
are watched by a process of their own, so that nothing that this one does looks like a gap: moments are of the machine's
monotonic clock, which all processes share. It is ended with whoever waits for it.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import sys
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import median

import aiohttp
import msgspec

from kvbaton.processes.child_process import Program, end, start
from kvbaton_proof.gpu_test.sizes import Sizes
from kvbaton_proof.gpu_test.timing import ALONE, KVBATON, NIXL
from kvbaton_proof.rig import meters
from kvbaton_proof.rig.client import (
    Answer,
    Prompt,
    Streamed,
    encoded,
    percentile,
    prefilled,
    prompt_of,
    sent,
    streamed,
)
from kvbaton_proof.rig.record import Page, Table
from kvbaton_proof.rig.servers import Group, Say

UNDER_WAY = 4  # tokens of every stream that is watched
BEGIN_S = 60.0
LINE_MAX = 1 << 26
P99_OVER_MEDIAN = 1.2
SETTLE_S = 0.5
SPREAD_S = 2.0  # over which loads arrive one after the other
WATCHED_TOKENS = 32
AT_ONCE, IN_TURN = "all at once", "one after the other"
COMPUTING, CACHED = ", P computing", ", in D's prefix cache"
RATES = ("who", "requests/s", "seconds", "failed", "handed over")
GAPS = (
    "who", "loads arrive", "gaps", "median ms", "p99 ms", "p99 / median", "largest ms", "slowest load ms", "failed",
    "p99 / median before",
)  # fmt: skip


async def run(
    sizes: Sizes, groups: dict[str, Group], session: aiohttp.ClientSession, page: Page, say: Say, judged: bool
) -> None:
    pairs = [groups[name] for name in (KVBATON, NIXL) if name in groups and groups[name].is_up]
    if not any(pair.name == KVBATON for pair in pairs):
        page.verdict("kvbaton served", "no", "yes", False)
        return
    table = page.table(
        f"{sizes.crowd} requests at once of {sizes.crowd_tokens} tokens, {sizes.crowd_answer} answered", RATES
    )
    rates: dict[str, float] = {}
    for pair in pairs:
        rates[pair.name] = await _rated(sizes, pair, session, page, table, say)
    if groups[ALONE].is_up:
        await _alone(sizes, groups[ALONE], session, page, table, say)
    if NIXL in rates:
        ratio = rates[KVBATON] / rates[NIXL] if rates[NIXL] else float("inf")
        page.verdict(
            "requests per second over NixlConnector's", f"{ratio:.2f}", "at least 1", ratio >= 1.0, judged=judged
        )
    gaps = page.table(f"Gaps between tokens of {sizes.watched} streams on D", GAPS)
    for pair in pairs:
        floors = (AT_ONCE + CACHED, IN_TURN + CACHED) if pair.name == KVBATON else ()
        for how in (AT_ONCE, IN_TURN, AT_ONCE + COMPUTING, *floors):
            felt = await _felt(sizes, pair, session, how)
            page.row(gaps, pair.name, how, *felt.cells())
            say(f"{pair.name}: {how}: {' | '.join(felt.cells())}")
            if how in (AT_ONCE, IN_TURN):
                page.verdict(
                    f"{pair.name}: p99 of gaps over their median, loads arrive {how}", f"{felt.ratio:.2f}",
                    f"at most {P99_OVER_MEDIAN}", felt.ratio <= P99_OVER_MEDIAN and not felt.failed,
                    judged=judged and pair.name == KVBATON,
                )  # fmt: skip


async def _rated(
    sizes: Sizes, pair: Group, session: aiohttp.ClientSession, page: Page, table: Table, say: Say
) -> float:
    """Requests a second of the best of two rounds; both legs by this client's hand."""
    best, loop = 0.0, asyncio.get_running_loop()
    for number in range(2):
        prompts = [prompt_of(sizes.crowd_tokens, f"{pair.name} crowd {number} {each}") for each in range(sizes.crowd)]
        before, begun = await meters.delivered(session, pair.d, pair.spec.connector), loop.time()
        answers = await asyncio.gather(*(_both(session, pair, prompt, sizes.crowd_answer) for prompt in prompts))
        seconds = loop.time() - begun
        failed = sum(bool(answer.error) for answer in answers)
        handed = await meters.delivered_since(session, pair.d, before, sizes.crowd, pair.spec.connector)
        page.row(table, pair.name, f"{sizes.crowd / seconds:.1f}", f"{seconds:.2f}", failed, handed)
        say(f"{pair.name}: {sizes.crowd / seconds:.1f} requests/s, {failed} failed, {handed} handed over")
        if pair.name == KVBATON:
            page.verdict(
                f"round {number + 1}: every prompt handed over", f"{handed}, {failed} failed", str(sizes.crowd),
                handed >= sizes.crowd and not failed,
            )  # fmt: skip
        best = max(best, 0.0 if failed else sizes.crowd / seconds)
    return best


async def _alone(
    sizes: Sizes, group: Group, session: aiohttp.ClientSession, page: Page, table: Table, say: Say
) -> None:
    prompts = [prompt_of(sizes.crowd_tokens, f"alone crowd {each}") for each in range(sizes.crowd)]
    begun = asyncio.get_running_loop().time()
    answers = await asyncio.gather(
        *(streamed(session, group.alone.url, prompt, tokens=sizes.crowd_answer) for prompt in prompts)
    )
    seconds = asyncio.get_running_loop().time() - begun
    failed = sum(bool(answer.error) for answer in answers)
    page.row(table, "one engine", f"{sizes.crowd / seconds:.1f}", f"{seconds:.2f}", failed, "-")
    say(f"one engine: {sizes.crowd / seconds:.1f} requests/s")


async def _both(session: aiohttp.ClientSession, pair: Group, prompt: Prompt, tokens: int) -> Streamed:
    first = await prefilled(session, pair.p.url, prompt)
    if first.error:
        return Streamed(error=f"P: {first.error}", begun=asyncio.get_running_loop().time())
    return await streamed(session, pair.d.url, prompt, tokens=tokens, params=first.params)


@dataclass(slots=True)
class Felt:
    """Seconds between tokens of the watched streams while loads arrived."""

    gaps: list[float]
    slowest_s: float
    failed: int
    quiet: list[float] = field(default_factory=list)  # before

    @property
    def ratio(self) -> float:
        return _ratio(self.gaps)

    def cells(self) -> list[str]:
        if not self.gaps:
            return ["0", "-", "-", "-", "-", f"{self.slowest_s * 1000:.0f}", str(self.failed), "-"]
        figures = [median(self.gaps), percentile(self.gaps, 99), self.ratio / 1000, max(self.gaps), self.slowest_s]
        shown = [f"{each * 1000:.2f}" for each in figures]
        return [str(len(self.gaps)), *shown, str(self.failed), f"{_ratio(self.quiet):.2f}"]


def _ratio(gaps: Sequence[float]) -> float:
    return percentile(gaps, 99) / median(gaps) if gaps else float("inf")


def gaps_between(streams: Sequence[Streamed], begun: float, ended: float) -> list[float]:
    """Of all streams, those gaps that end while loads arrive; pure."""
    found = []
    for stream in streams:
        moments = stream.moments
        found += [b - a for a, b in pairwise(moments) if begun <= b and a <= ended]
    return found


async def _felt(sizes: Sizes, pair: Group, session: aiohttp.ClientSession, how: str) -> Felt:
    felt = Felt([], 0.0, 0)
    for number in range(sizes.bursts):
        once = await _burst(sizes, pair, session, how, number)
        felt.gaps += once.gaps
        felt.quiet += once.quiet
        felt.slowest_s = max(felt.slowest_s, once.slowest_s)
        felt.failed += once.failed
    return felt


async def _burst(sizes: Sizes, pair: Group, session: aiohttp.ClientSession, how: str, number: int) -> Felt:
    loop = asyncio.get_running_loop()
    seed = f"{pair.name} {how} {number}"
    prompts = [prompt_of(sizes.crowd_tokens, f"{seed} load {each}") for each in range(sizes.crowd)]
    computing, given, bodies = how.endswith(COMPUTING), list[Answer](), list[bytes]()
    if how.endswith(CACHED):
        bodies = [encoded(prompt, 1) for prompt in prompts]
        await asyncio.gather(*(sent(session, pair.d.url, body) for body in bodies))
    elif not computing:
        given = await asyncio.gather(*(prefilled(session, pair.p.url, prompt) for prompt in prompts))
        bodies = [encoded(prompt, 1, first.params) for prompt, first in zip(prompts, given, strict=True)]
    own = [prompt_of(WATCHED_TOKENS, f"{seed} watched {each}") for each in range(sizes.watched)]
    pause_s = SPREAD_S / sizes.crowd if how.startswith(IN_TURN) else 0.0

    async def arrive(at: int) -> Streamed:
        await asyncio.sleep(at * pause_s)
        if computing:
            return await _both(session, pair, prompts[at], 1)
        return await sent(session, pair.d.url, bodies[at])

    async with watching(Watched(pair.d.url, own, sizes.watched_answer)) as watch:
        await asyncio.sleep(SETTLE_S)
        begun = loop.time()
        loads = await asyncio.gather(*map(arrive, range(sizes.crowd)))
        ended = loop.time()
        streams = await watch.ended()
    failed = sum(bool(each.error) for each in (*loads, *streams)) + sum(bool(each.error) for each in given)
    slowest_s = max(each.first_s if not each.error else 0.0 for each in loads)
    quiet = gaps_between(streams, begun - SETTLE_S, begun)
    return Felt(gaps_between(streams, begun, ended), slowest_s, failed, quiet)


class Watched(msgspec.Struct, frozen=True):
    """Streams that decode while something else happens."""

    url: str
    prompts: list[list[int]]
    tokens: int


class Watch:
    """What the other process sees."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process

    async def ended(self) -> list[Streamed]:
        """Wait for all streams to end; they have deadlines."""
        assert self._process.stdout is not None
        return msgspec.json.decode(await self._process.stdout.readline() or b"[]", type=list[Streamed])


@contextlib.asynccontextmanager
async def watching(watched: Watched) -> AsyncIterator[Watch]:
    """Streams that are under way by now; TimeoutError if they do not get there."""
    program = Program(
        "watching", "client", [sys.executable, "-m", "kvbaton_proof.gpu_test.gpu_load"], stop=signal.SIGKILL
    )
    child = await start(program, None, stdout=asyncio.subprocess.PIPE, limit=LINE_MAX)
    process = child.process
    try:
        assert process.stdin is not None and process.stdout is not None
        process.stdin.write(msgspec.json.encode(watched))
        process.stdin.close()
        await asyncio.wait_for(process.stdout.readline(), BEGIN_S)
        yield Watch(process)
    finally:
        await end([child])


async def _watched(watched: Watched) -> Sequence[Streamed]:
    waiting = dict.fromkeys(range(len(watched.prompts)), UNDER_WAY)
    connections = aiohttp.TCPConnector(limit=0)

    def heard(number: int) -> None:
        if number in waiting:
            waiting[number] -= 1
            if not waiting[number]:
                del waiting[number]
                if not waiting:
                    print("begun", flush=True)

    async with aiohttp.ClientSession(connector=connections, timeout=aiohttp.ClientTimeout(total=None)) as session:

        async def one(number: int, prompt: list[int]) -> Streamed:
            return await streamed(session, watched.url, prompt, tokens=watched.tokens, heard=lambda: heard(number))

        found = await asyncio.gather(*(one(*each) for each in enumerate(watched.prompts)))
    if waiting:  # some stream failed or was too short: nobody waits in vain
        print("begun", flush=True)
    return found


if __name__ == "__main__":
    seen = asyncio.run(_watched(msgspec.json.decode(sys.stdin.buffer.read(), type=Watched)))
    sys.stdout.buffer.write(msgspec.json.encode(seen) + b"\n")
