"""`kvbaton up --check`: compares a cluster's answers with a single engine's, in every mode and over every transport.

Law: the verdict is "ok" only if all answers are identical, the KV really moved (the workers' own counters say so), and
nothing is left pinned. So that the comparison can fail, prompts differ in length, share prefixes and repeat.
"""

from __future__ import annotations

import asyncio
import importlib
import random
import time
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from kvbaton.api.http.fetch import fetch
from kvbaton.api.params import Mode
from kvbaton.local_cluster.embedded_cluster import Cluster, ClusterPlan, running
from kvbaton.local_cluster.stream_check import TOKENS, StreamRow, answer_text, long_ones, outlive, stream_texts
from kvbaton.processes.child_process import Say
from kvbaton.processes.operator_control import unless_stopped
from kvbaton.processes.operator_errors import CommandError
from kvbaton.router.openai_api import MODE_HEADER

MAX_TOKENS = 12
REST_S = 20.0
ROW_S = 60.0
DIFFERENCES_SHOWN = 3
_NAMES = {Mode.PULL: "pull", Mode.STREAM: "streaming pull", Mode.PUSH: "push"}
_WORDS = ("ash", "birch", "cedar", "dew", "elm", "fern", "grass", "hill", "ivy", "jay", "kite", "lake", "moss", "nut")


class CheckPrompt(msgspec.Struct, frozen=True):
    """`moves`: its KV cannot be in D's cache yet, so it must be handed over."""

    text: str
    moves: bool


class CheckRow(msgspec.Struct, frozen=True, kw_only=True):
    """One mode over one transport."""

    mode: str
    transport: str
    requests: int
    identical: int
    handoffs: int
    handoffs_needed: int
    bytes_moved: int
    pins: int
    seconds: float
    differences: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        moved = self.handoffs >= self.handoffs_needed and self.bytes_moved > 0
        return self.identical == self.requests and moved and self.pins == 0


class Numbers(msgspec.Struct, frozen=True):
    """The sum of the workers' /stats."""

    handoffs: int  # delivered, as D counts them
    bytes_moved: int
    pins: int


def prompts(block_tokens: int, seed: int = 7) -> list[CheckPrompt]:
    """One byte to several hundred, around block boundaries, with shared prefixes and repeats; the same every time."""
    rng = random.Random(seed)
    edges = [blocks * block_tokens + shift for blocks in (1, 2, 4, 8) for shift in (-1, 0, 1)]
    lengths = [*(tokens - 1 for tokens in edges), 200, 333, 512, 700]  # a prompt has one more token than bytes
    found = [CheckPrompt(_text(rng, length), length >= 2 * block_tokens) for length in lengths]
    beginning = _text(rng, 6 * block_tokens + 3)
    found += [CheckPrompt(beginning + _text(rng, 3 * block_tokens), True) for _ in range(3)]
    found += [CheckPrompt("a", False), CheckPrompt("Zü", False)]
    found += [CheckPrompt(found[at].text, False) for at in (-3, 5, 12)]
    rng.shuffle(found)
    return found


def _text(rng: random.Random, length: int) -> str:
    words = ""
    while len(words) < length:
        words += rng.choice(_WORDS) + " "
    return words[:length]


async def check(
    plans: Mapping[str, ClusterPlan], modes: Sequence[Mode], *, say: Say, show: Say, stop: asyncio.Event
) -> dict[str, Any]:
    """Check one cluster per transport. `show` gets each row when it is done; the verdict has all of them."""
    begun = time.monotonic()
    worker = next(iter(plans.values())).worker
    asked = prompts(worker.block_tokens)
    texts = stream_texts()
    expecting = asyncio.create_task(asyncio.to_thread(_reference, [prompt.text for prompt in asked], worker.seed))
    told = asyncio.create_task(asyncio.to_thread(_reference, texts, worker.seed, TOKENS))
    rows: list[CheckRow] = []
    last = list(plans)[-1]
    try:
        for transport, plan in plans.items():
            decodes = max(plan.decodes, 2) if transport == last else plan.decodes  # for streams, of which one is killed
            async with running(msgspec.structs.replace(plan, decodes=decodes), say, stop) as here:
                expected = await expecting
                for mode in modes:
                    row = await unless_stopped(_row(here, transport, mode, asked, expected), stop)
                    show(_line(row))
                    rows.append(row)
                if transport == last:
                    streams = await unless_stopped(outlive(here, transport, long_ones(texts, await told)), stop)
                    show(streams.line())
    finally:
        expecting.cancel()
        told.cancel()
    return _verdict(rows, streams, time.monotonic() - begun)


def _reference(texts: Sequence[str], seed: int, tokens: int = MAX_TOKENS) -> list[str]:
    """The answers of one engine without handoffs."""
    engine = importlib.import_module("kvbaton.engines.embedded.embedded_worker")
    answers: list[str] = engine.reference_answers(texts, tokens, seed=seed)
    return answers


async def _row(
    cluster: Cluster, transport: str, mode: Mode, asked: Sequence[CheckPrompt], expected: Sequence[str]
) -> CheckRow:
    salt = f"check-{transport}-{mode}"  # separates this row from cache entries of earlier rows
    before = await _numbers(cluster)
    begun = time.monotonic()
    body = {"max_tokens": MAX_TOKENS, "temperature": 0, "cache_salt": salt}
    bodies = [{**body, "prompt": one.text, "stream": at % 2 == 0} for at, one in enumerate(asked)]
    answers = await asyncio.gather(*(answer_text(cluster.front.url, each, {MODE_HEADER: mode}) for each in bodies))
    seconds = time.monotonic() - begun
    after = await _at_rest(cluster)
    wrong = [
        f"{len(one.text)} bytes {one.text[:20]!r}: expected {right!r}, got {got!r}"
        for one, right, got in zip(asked, expected, answers, strict=True)
        if right != got
    ]
    return CheckRow(
        mode=mode, transport=transport, requests=len(asked), identical=len(asked) - len(wrong),
        handoffs=after.handoffs - before.handoffs, handoffs_needed=sum(one.moves for one in asked),
        bytes_moved=after.bytes_moved - before.bytes_moved, pins=after.pins, seconds=round(seconds, 3),
        differences=tuple(wrong[:DIFFERENCES_SHOWN]),
    )  # fmt: skip


async def _numbers(cluster: Cluster) -> Numbers:
    handoffs = bytes_moved = pins = 0
    for worker in cluster.registered():
        stats = msgspec.json.decode((await fetch(f"{worker.url}/stats", ROW_S)).body)
        for key in ("delivered_total", "bytes_moved_total", "pins"):
            if not isinstance(stats.get(key), int):
                raise CommandError(f"worker {worker.name}: /stats has no number {key!r}; is it of this release?")
        handoffs += stats["delivered_total"] if worker.decodes else 0
        bytes_moved += stats["bytes_moved_total"]
        pins += stats["pins"]
    return Numbers(handoffs, bytes_moved, pins)


async def _at_rest(cluster: Cluster) -> Numbers:
    """The numbers once nothing is pinned, or after `REST_S`."""
    deadline = time.monotonic() + REST_S
    while True:
        numbers = await _numbers(cluster)
        if numbers.pins == 0 or time.monotonic() > deadline:
            return numbers
        await asyncio.sleep(0.05)


def _line(row: CheckRow) -> str:
    line = (
        f"{_NAMES[Mode(row.mode)]:<15} {row.transport:<5} identical {row.identical} of {row.requests}   "
        f"{row.handoffs} handoffs   {_size(row.bytes_moved)} moved   {row.pins} pins left   {row.seconds:.2f} s"
    )
    if row.handoffs < row.handoffs_needed:
        line += f"\n  too few handoffs: {row.handoffs_needed} requests needed one"
    return "\n".join([line, *(f"  differs: {each}" for each in row.differences)])


def _verdict(rows: Sequence[CheckRow], streams: StreamRow, seconds: float) -> dict[str, Any]:
    totals = {
        name: sum(getattr(row, name) for row in rows)
        for name in ("requests", "identical", "handoffs", "handoffs_needed", "bytes_moved", "pins")
    }
    told = [{**msgspec.to_builtins(row), "ok": row.ok} for row in rows]
    ok = bool(rows) and all(row.ok for row in rows) and streams.ok
    moved = {**msgspec.to_builtins(streams), "ok": streams.ok}
    return {"ok": ok, **totals, "seconds": round(seconds, 2), "rows": told, "streams": moved}


def summary(verdict: Mapping[str, Any], modes: Sequence[Mode], transports: Sequence[str]) -> str:
    said = " and ".join([", ".join(_NAMES[mode] for mode in modes[:-1]), _NAMES[modes[-1]]][len(modes) == 1 :])
    return "\n".join(
        [
            f"identical answers {verdict['identical']} of {verdict['requests']}, for {said}, "
            f"over {' and over '.join(transports)}; streams whole {verdict['streams']['whole']} of "
            f"{verdict['streams']['streams']} after kill -9 of their D",
            f"{verdict['bytes_moved']} bytes moved in {verdict['handoffs']} handoffs; {verdict['pins']} pins left; "
            f"{verdict['seconds']} s",
        ]
    )


def _size(count: int) -> str:
    return f"{count / (1 << 20):.2f} MiB" if count >= 1 << 20 else f"{count / 1024:.1f} KiB"
