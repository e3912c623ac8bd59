"""Conversations of several turns with three clusters at once: D keeps turns, D keeps none, one aggregated engine.

Laws: every cluster is asked the same, turn by turn, in an order that rotates; the time to the first token is the
client's. Answers are compared: greedy, they must be the same. Figures are medians over conversations.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import statistics
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

import aiohttp
import msgspec

from kvbaton.engines.embedded.worker_options import WorkerOptions
from kvbaton.local_cluster.embedded_cluster import ClusterPlan, Startable, places, running
from kvbaton.local_cluster.vllm_cluster import VllmPlan
from kvbaton.local_cluster.vllm_engine import ServerOptions, VllmHandoff
from kvbaton.processes.child_process import Say
from kvbaton.router.router_settings import Fallback, RouterSettings

TARGETS = ("turns", "plain", "aggregated")
KEEP_S = 300.0
REQUEST_S = 300.0
_WORKER = WorkerOptions(name="p0", role="prefill", keys="-", registry="tcp://127.0.0.1:1", blocks=4096)
_WORDS = [
    "a",
    "baton",
    "is",
    "handed",
    "over",
    "by",
    "the",
    "runner",
    "who",
    "has",
    "it",
    "to",
    "the",
    "runner",
    "who",
    "will",
    "have",
    "it",
    "next",
]


class TalkShape(msgspec.Struct, frozen=True):
    """How conversations go, in words or tokens."""

    turns: int = 5
    first: int = 1200  # of the first prompt
    answer: int = 128
    more: int = 64  # that the client adds at each turn
    conversations: int = 5


class TalkReport(msgspec.Struct, kw_only=True):
    """What came of it."""

    engine: str
    shape: TalkShape
    ttft_ms: dict[str, list[float]]  # by target: the median of each turn
    taken_tokens: float | None  # that P did not compute, because D had them
    turns: dict[str, int]  # the router's, of the cluster that keeps them
    wrong: int  # answers that differ from the aggregated engine's

    @property
    def is_right(self) -> bool:
        return self.wrong == 0


def plans(server: ServerOptions | None) -> dict[str, Startable]:
    """The three clusters; without `server` of embedded engines."""
    found: dict[str, Startable] = {}
    for name in TARGETS:
        alone, turn_s = name == "aggregated", KEEP_S if name == "turns" else 0.0
        settings = RouterSettings(turn_s=turn_s, fallback=Fallback.LOCAL if alone else Fallback.STRICT)
        if server is not None:
            handoff = VllmHandoff(name="-", keys="-", registry="-", http_address="-", turn_s=turn_s)
            where = tuple(places(0 if alone else 1, 1, 1, 1))
            found[name] = VllmPlan(places=where, server=server, handoff=handoff, settings=settings)
        else:
            worker = msgspec.structs.replace(_WORKER, turn_s=turn_s)
            found[name] = ClusterPlan(
                prefills=0 if alone else 1, decodes=1, tp_prefill=1, tp_decode=1, worker=worker, settings=settings
            )
    return found


async def measured(
    engine: str, server: ServerOptions | None, shape: TalkShape, say: Say, stop: asyncio.Event
) -> TalkReport:
    async with contextlib.AsyncExitStack() as stack:
        urls, session = {}, await stack.enter_async_context(aiohttp.ClientSession())
        for name, plan in plans(server).items():
            say(f"starting {name}")
            cluster = await stack.enter_async_context(running(plan, say, stop))
            urls[name] = cluster.front.url
        times: dict[str, list[list[float]]] = {name: [[] for _ in range(shape.turns)] for name in TARGETS}
        wrong = 0
        model = server.served_name if server is not None else "kvbaton-tiny"
        for number in range(shape.conversations + 1):  # the first warms all of them up
            talk = _Talk(random.Random(number), shape, server is not None)
            for turn in range(shape.turns):
                said = {}
                for name in (*TARGETS[number % 3 :], *TARGETS[: number % 3]):
                    said[name], seconds = await streamed_turn(session, urls[name], model, talk.prompt, shape.answer)
                    if number:
                        times[name][turn].append(seconds)
                wrong += sum(answer != said["aggregated"] for answer in said.values())
                talk.go_on(said["aggregated"])
            say(f"{number} of {shape.conversations} conversations")
        stats = await _stats(session, urls["turns"])
        taken = None if server is not None else await _taken(session, urls["turns"])
    medians = {name: [round(1e3 * statistics.median(each), 2) for each in of] for name, of in times.items()}
    return TalkReport(engine=engine, shape=shape, ttft_ms=medians, taken_tokens=taken, turns=stats, wrong=wrong)


class _Talk:
    def __init__(self, rng: random.Random, shape: TalkShape, tokens: bool) -> None:
        self._rng = rng
        self._shape = shape
        self._tokens = tokens
        self.prompt: str | list[int] = self._said(shape.first)

    def go_on(self, answer: str | list[int]) -> None:
        self.prompt = self.prompt + answer + self._said(self._shape.more)  # type: ignore[operator]

    def _said(self, count: int) -> str | list[int]:
        if self._tokens:
            return [self._rng.randrange(5, 95) for _ in range(count)]
        words = ""
        while len(words) < count:
            words += self._rng.choice(_WORDS)
        return words[:count]


async def streamed_turn(
    session: aiohttp.ClientSession, url: str, model: str, prompt: str | list[int], answer: int
) -> tuple[str | list[int], float]:
    """The answer, in the kind of the prompt, and the seconds to its first token."""
    tokens = not isinstance(prompt, str)
    body = {
        "model": model,
        "prompt": prompt,
        "max_tokens": answer,
        "temperature": 0,
        "stream": True,
        "ignore_eos": True,
    }
    body |= {"return_token_ids": True} if tokens else {}
    begun, first = time.monotonic(), 0.0
    text = ""
    ids: list[int] = []
    limit = aiohttp.ClientTimeout(total=REQUEST_S)
    async with session.post(f"{url}/v1/completions", json=body, timeout=limit) as got:
        got.raise_for_status()
        async for event in _events(got):
            first = first or time.monotonic() - begun
            for choice in event.get("choices", ()):
                text += choice.get("text") or ""
                ids += choice.get("token_ids") or []
    return (ids if tokens else text), first


async def _events(got: aiohttp.ClientResponse) -> AsyncIterator[dict[str, Any]]:
    async for line in got.content:
        if line.startswith(b"data: {"):
            yield msgspec.json.decode(line[6:])


async def _stats(session: aiohttp.ClientSession, url: str) -> dict[str, int]:
    async with session.get(f"{url}/stats") as got:
        return dict((await got.json())["turns_total"])


async def _taken(session: aiohttp.ClientSession, url: str) -> float:
    async with session.get(f"{url}/workers") as got:
        workers: Sequence[Mapping[str, str]] = (await got.json())["workers"]
    total = 0.0
    for each in workers:
        async with session.get(f"{each['url']}/stats") as got:
            total += (await got.json())["turn_tokens_total"]
    return total
