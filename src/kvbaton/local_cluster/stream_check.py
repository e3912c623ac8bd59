"""The part of `kvbaton up --check` about streams: the D that most of them are at is killed, and each must be whole.

Law: the row is "ok" only if every client got the one right text, and the router says that some were moved for it: those
that had ended before the kill would prove nothing.
"""

from __future__ import annotations

import asyncio
import random
import signal
import time
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from kvbaton.api import sse
from kvbaton.api.bodies import BodyKind
from kvbaton.api.http.fetch import NO_HEADERS, fetch
from kvbaton.local_cluster.embedded_cluster import Cluster

STREAMS, TRIED = 6, 18
TOKENS, TOKENS_MIN = 400, 300
"""A model of random weights ends some answers early: those are not asked for."""
UNDER_WAY_S = 15.0
TOLD_BLOCKS = 2  # of tokens, for each stream: then a client has some of them, however fast or slow this machine is
STREAM_S = 60.0
_WORDS = ("oak", "pine", "quartz", "reed", "sand", "thorn", "umber", "vale", "wren", "yew")


class StreamPrompt(msgspec.Struct, frozen=True):
    """A prompt and the right answer to it."""

    text: str
    right: str


class StreamRow(msgspec.Struct, frozen=True, kw_only=True):
    """What became of streams whose D was killed."""

    transport: str
    killed: str
    streams: int
    whole: int
    moved: int
    seconds: float
    differences: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        return self.whole == self.streams > 0 and self.moved > 0

    def line(self) -> str:
        name = "streams"
        line = (
            f"{name:<15} {self.transport:<5} whole {self.whole} of {self.streams}   kill -9 of {self.killed}   "
            f"{self.moved} went on at another D   {self.seconds:.2f} s"
        )
        return "\n".join([line, *(f"  differs: {each}" for each in self.differences)])


def stream_texts(seed: int = 11) -> list[str]:
    """More than are asked for; the same every time."""
    rng = random.Random(seed)
    return [f"{number} " + " ".join(rng.choices(_WORDS, k=12)) for number in range(TRIED)]


def long_ones(texts: Sequence[str], answers: Sequence[str]) -> list[StreamPrompt]:
    found = [StreamPrompt(*pair) for pair in zip(texts, answers, strict=True) if len(pair[1]) >= TOKENS_MIN]
    return found[:STREAMS]


async def outlive(cluster: Cluster, transport: str, asked: Sequence[StreamPrompt]) -> StreamRow:
    """Ask for all at once, kill a D while they flow, and compare."""
    begun = time.monotonic()
    body = {"max_tokens": TOKENS, "temperature": 0, "stream": True}
    calls = [asyncio.create_task(answer_text(cluster.front.url, {"prompt": each.text, **body})) for each in asked]
    killed = await _busiest(cluster, min(2, len(asked)))
    for child in cluster.children:
        if child.name == killed:
            child.signal(signal.SIGKILL)
    answers = await asyncio.gather(*calls)
    told = msgspec.json.decode((await fetch(f"{cluster.front.url}/stats", STREAM_S)).body)
    wrong = [
        f"{each.text[:20]!r}: expected {each.right[-40:]!r} at the end, got {got[-40:]!r}"
        for each, got in zip(asked, answers, strict=True)
        if got != each.right
    ]
    return StreamRow(
        transport=transport,
        killed=killed,
        streams=len(asked),
        whole=len(asked) - len(wrong),
        moved=sum(told["moves_total"].values()),
        seconds=round(time.monotonic() - begun, 3),
        differences=tuple(wrong[:3]),
    )


async def _busiest(cluster: Cluster, least: int) -> str:
    """The D that computes most of them, once it has told some tokens of so many; if none has in time, whichever has
    most."""
    decodes = [worker for worker in cluster.registered() if worker.decodes]
    until = time.monotonic() + UNDER_WAY_S
    begun: dict[str, int] = {}  # blocks that were free when a D was first seen with so many
    while True:
        running, told = {}, {}
        for worker in decodes:
            name = str(worker.name)
            stats = msgspec.json.decode((await fetch(f"{worker.url}/stats", STREAM_S)).body)
            running[name] = stats["running"]
            if stats["running"] >= least:
                told[name] = begun.setdefault(name, stats["free_blocks"]) - stats["free_blocks"]
        name = max(running, key=lambda each: running[each])
        if told.get(name, 0) >= TOLD_BLOCKS * least or time.monotonic() > until:
            return name
        await asyncio.sleep(0.02)


async def answer_text(url: str, body: Mapping[str, Any], headers: Mapping[str, str] = NO_HEADERS) -> str:
    """The text of an answer, in one piece or streamed; or what went wrong, as a text that no answer can be."""
    try:
        answer = await fetch(url + BodyKind.COMPLETION.value, STREAM_S, body, headers)
    except OSError as error:
        return f"\n{error}"
    if answer.status != 200:
        return f"\nstatus {answer.status}: {answer.text[:200]}"
    if not body["stream"]:
        return str(msgspec.json.decode(answer.body)["choices"][0]["text"])
    got = ""
    for payload in sse.payloads(answer.body):
        if payload == b"[DONE]":
            return got
        chunk = msgspec.json.decode(payload)
        if "error" in chunk:
            return f"{got}\n{chunk['error']}"
        got += "".join(choice["text"] for choice in chunk["choices"])
    return f"{got}\nthe stream did not end"
