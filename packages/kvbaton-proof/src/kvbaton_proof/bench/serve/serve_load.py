"""A load on one target: requests that are sent when they are due, streamed, timed and judged.

    due      by the plan (a rate or a trace), else at once
    slots    at most so many under way; who is due and finds none waits, and how long is told (`held_back`)
    time     counts from when a request is sent, as `vllm bench serve` counts it

Laws: every request that was sent ends within its time, as right or as an error by name. A part ends by its deadline,
whatever the server does; whoever cancels it finds in the meter what was measured until then.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Mapping

import aiohttp
import msgspec

from kvbaton.api.bodies import BodyKind
from kvbaton_proof.bench.serve.serve_meter import Meter
from kvbaton_proof.bench.serve.serve_plan import Ask, Piece, prompt
from kvbaton_proof.bench.serve.serve_stream import Stream, Told, refusal

CONNECT_S = 10.0
REFUSAL_BYTES_MAX = 64 << 10
UNDER_WAY_MAX = 2048
WARMUP_TOKENS, WARMUP_ANSWER_TOKENS = 32, 2
LATE, CUT_OFF = "no answer in time", "deadline of the part"
_encode = msgspec.json.Encoder().encode

Clock = Callable[[], float]


class Aim(msgspec.Struct, frozen=True, kw_only=True):
    """Where requests go, and what all of them say."""

    url: str
    headers: Mapping[str, str] = {}
    model: str | None = None
    salt: str = ""  # of caches: what another salt left there is not found
    in_prompt: bool = False  # the salt is in the prompt's beginning, for servers that know no `cache_salt`
    seed: int = 0
    timeout_s: float = 120.0


class Pace(msgspec.Struct, frozen=True, kw_only=True):
    """How a part goes."""

    concurrency: int = UNDER_WAY_MAX
    seconds: float | None = None  # ask no more after these
    deadline_s: float = 600.0
    timed: bool = False  # requests have a time at which they are due


def body_of(ask: Ask, aim: Aim) -> bytes:
    """Greedy, streamed, and of exactly as many tokens as the plan says."""
    body = {
        "prompt": prompt(ask, aim.seed, aim.salt if aim.in_prompt else ""), "max_tokens": ask.output_tokens,
        "temperature": 0, "ignore_eos": True, "stream": True, "stream_options": {"include_usage": True},
    }  # fmt: skip
    if aim.model is not None:
        body["model"] = aim.model
    if aim.salt and not aim.in_prompt:
        body["cache_salt"] = aim.salt
    return bytes(_encode(body))


def session(aim: Aim) -> aiohttp.ClientSession:
    """Connections for one part; whoever has it closes it."""
    timeout = aiohttp.ClientTimeout(total=aim.timeout_s, sock_connect=CONNECT_S)
    headers = {"Content-Type": "application/json", **aim.headers}
    return aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=timeout, headers=headers)


async def answer(
    client: aiohttp.ClientSession,
    url: str,
    body: bytes,
    wanted: int,
    clock: Clock = time.perf_counter,
    seen: Callable[[int], None] = lambda _: None,
) -> Told | str:
    """What one request came to. `seen` hears how many tokens there are, whenever some came."""
    stream = Stream(clock())
    try:
        async with client.post(url + BodyKind.COMPLETION.value, data=body) as response:
            if response.status != 200:
                return refusal(response.status, await response.content.read(REFUSAL_BYTES_MAX))
            async for data in response.content.iter_any():
                stream.feed(data, clock())
                seen(stream.events)
    except TimeoutError:
        return LATE
    except (aiohttp.ClientError, OSError) as error:
        return f"connection: {type(error).__name__}"
    return stream.told(wanted)


class Load:
    """One part. `on_end` hears of every request that ended, `on_sent` when each was sent, in seconds."""

    def __init__(
        self,
        aim: Aim,
        pace: Pace,
        meter: Meter,
        *,
        on_end: Callable[[], None] = lambda: None,
        on_sent: Callable[[Ask, float], None] = lambda *_: None,
        clock: Clock = time.perf_counter,
    ) -> None:
        self._aim = aim
        self._pace = pace
        self._meter = meter
        self._on_end = on_end
        self._on_sent = on_sent
        self._clock = clock
        self._slots = asyncio.Semaphore(pace.concurrency)
        self._under_way: set[asyncio.Task[None]] = set()
        self._begun = 0.0

    async def run(self, asks: Iterable[Ask]) -> None:
        """Send the plan, and wait for what it brings."""
        async with session(self._aim) as client:
            self._begun = self._clock()
            try:
                async with asyncio.timeout(self._pace.deadline_s):
                    await self._send_all(client, asks)
                    if self._under_way:
                        await asyncio.wait(self._under_way)
            except TimeoutError:
                await self._cut_off()
                for _ in range(self._meter.unfinished):
                    self._meter.failed(CUT_OFF)
            finally:
                await self._cut_off()

    async def _send_all(self, client: aiohttp.ClientSession, asks: Iterable[Ask]) -> None:
        until = float("inf") if self._pace.seconds is None else self._pace.seconds
        for ask in asks:
            body = body_of(ask, self._aim)
            if not await self._until(min(ask.due_s, until)) or ask.due_s >= until:
                return
            await self._slots.acquire()
            now = self._clock() - self._begun
            if now >= until or self._meter.is_hopeless:
                return
            if self._pace.timed:
                self._meter.held_back.add(max(0.0, now - ask.due_s))
            self._meter.sent += 1
            self._on_sent(ask, now)
            task = asyncio.create_task(self._one(client, ask, body))
            self._under_way.add(task)
            task.add_done_callback(self._under_way.discard)

    async def _until(self, due_s: float) -> bool:
        """False if nothing will come of it any more."""
        left = self._begun + due_s - self._clock()
        if left > 0:
            await asyncio.sleep(left)
        return not self._meter.is_hopeless

    async def _one(self, client: aiohttp.ClientSession, ask: Ask, body: bytes) -> None:
        meter = self._meter
        try:
            told = await answer(client, self._aim.url, body, ask.output_tokens, self._clock)
        finally:
            self._slots.release()
            meter.seconds = self._clock() - self._begun
        if isinstance(told, str):
            meter.failed(told)
        else:
            meter.answered(ask.index, ask.input_tokens, told)
        self._on_end()

    async def _cut_off(self) -> None:
        tasks = list(self._under_way)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._meter.close()


async def warm_up(aim: Aim, count: int) -> None:
    """Requests that nobody counts: code paths, connections and handshakes of engines come into being."""
    asks = [Ask(number, 0.0, (Piece(f"w{number}", WARMUP_TOKENS),), WARMUP_ANSWER_TOKENS) for number in range(count)]
    async with session(aim) as client:
        await asyncio.gather(*(answer(client, aim.url, body_of(ask, aim), ask.output_tokens) for ask in asks))
