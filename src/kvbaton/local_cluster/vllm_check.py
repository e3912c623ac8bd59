"""`kvbaton up --engine vllm --check`: compares a pair's answers with those of a single aggregated vLLM.

Law: the verdict is "ok" only if all answers are the same token by token, D's own counter shows that the prompts' KV was
loaded, and no engine holds KV at the end. The aggregated engine runs first, alone, and is gone before the pair starts.
"""

from __future__ import annotations

import asyncio
import random
import re
import shutil
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from kvbaton.api.http.fetch import fetch
from kvbaton.api.params import Mode
from kvbaton.local_cluster.embedded_cluster import Cluster, ClusterPlace, running
from kvbaton.local_cluster.vllm_engine import HOST, VllmPlan, member, serving
from kvbaton.observe.metrics.exposition import samples, total
from kvbaton.processes.child_process import Say, end, free_ports, start
from kvbaton.processes.operator_control import unless_stopped
from kvbaton.processes.operator_errors import CommandError
from kvbaton.router.openai_api import MODE_HEADER

MAX_TOKENS = 12
ASK_S = 120.0
REST_S = 30.0
AT_ONCE = 6
DIFFERENCES_SHOWN = 3
_MOVED = "vllm:external_prefix_cache_hits_total"
_USED = "vllm:kv_cache_usage_perc"
_WORDS = (
    "what", "is", "the", "lease", "of", "a", "block", "that", "nobody",
    "reads", "who", "ends", "it", "when", "two",
)  # fmt: skip

Answer = tuple[str, ...]
"""The tokens of an answer; or one text that starts with a line break and says what went wrong."""


class VllmCheckPrompt(msgspec.Struct, frozen=True):
    """At least `fresh` tokens are in no cache when it is sent, so their KV must be handed over."""

    prompt: str | list[int]
    fresh: int = 0


class VllmCheckRow(msgspec.Struct, frozen=True, kw_only=True):
    """One mode."""

    mode: str
    requests: int
    identical: int
    tokens_moved: int
    tokens_needed: int
    kv_used: float
    seconds: float
    differences: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        moved = self.tokens_moved >= max(1, self.tokens_needed)
        return self.identical == self.requests and moved and self.kv_used == 0.0


def prompts(block_tokens: int, seed: int = 7) -> list[VllmCheckPrompt]:
    """Around block boundaries, with shared prefixes and repeats; the same every time."""
    rng = random.Random(seed)
    found = []
    for blocks in (1, 2, 4):
        for shift in (-1, 0, 1):
            ids = [rng.randrange(100, 600) for _ in range(blocks * block_tokens + shift)]
            found.append(VllmCheckPrompt(ids, (len(ids) - 1) // block_tokens * block_tokens))
    beginning = _text(rng, 150)
    found += [VllmCheckPrompt(beginning + _text(rng, count)) for count in (5, 40, 90)]
    found += [VllmCheckPrompt(_text(rng, count)) for count in (1, 3, 20, 60, 250)]
    found += [VllmCheckPrompt("Zü"), VllmCheckPrompt(found[-3].prompt), VllmCheckPrompt(found[0].prompt)]
    rng.shuffle(found)
    return found


def _text(rng: random.Random, words: int) -> str:
    return " ".join(rng.choice(_WORDS) for _ in range(words))


async def check(plan: VllmPlan, modes: Sequence[Mode], *, say: Say, show: Say, stop: asyncio.Event) -> dict[str, Any]:
    """Query one engine, then the pair in each mode. `show` gets each row when it is done; the verdict has all."""
    begun = time.monotonic()
    asked, expected = await _alone(plan, say, stop)
    rows: list[VllmCheckRow] = []
    async with running(plan, say, stop) as cluster:
        for mode in modes:
            row = await unless_stopped(_row(cluster, mode, asked, expected), stop)
            show(_line(row))
            rows.append(row)
    told = [{**msgspec.to_builtins(row), "ok": row.ok} for row in rows]
    ok = bool(rows) and all(row.ok for row in rows)
    return {"ok": ok, "seconds": round(time.monotonic() - begun, 1), "rows": told}


async def _alone(plan: VllmPlan, say: Say, stop: asyncio.Event) -> tuple[list[VllmCheckPrompt], list[Answer]]:
    """The answers of one aggregated engine."""
    directory = Path(tempfile.mkdtemp(prefix="kvbaton-"))
    (port,) = free_ports(1)
    url = f"http://{HOST}:{port}"
    argv = plan.server.argv(port)
    child = await start(member(ClusterPlace("alone", "both", 1), argv, plan.server.kv_gib), directory / "alone.log")
    try:
        say("starting a single aggregated engine, for the expected answers")
        await serving(url, child, plan.start_s, say, stop)
        asked = prompts(_block_tokens(await _get(f"{url}/metrics")))
        return asked, await unless_stopped(_ask_all(url, asked, {}, "alone"), stop)
    finally:
        await end([child])
        shutil.rmtree(directory, ignore_errors=True)


async def _row(
    cluster: Cluster, mode: Mode, asked: Sequence[VllmCheckPrompt], expected: Sequence[Answer]
) -> VllmCheckRow:
    before, _ = await _numbers(cluster)
    begun = time.monotonic()
    answers = await _ask_all(cluster.front.url, asked, {MODE_HEADER: mode}, f"check-{mode}")
    seconds = time.monotonic() - begun
    deadline = time.monotonic() + REST_S
    while True:
        after, used = await _numbers(cluster)
        if used == 0.0 or time.monotonic() > deadline:
            break
        await asyncio.sleep(0.2)
    wrong = [
        f"prompt {at}: expected {''.join(right)!r}, got {''.join(got)!r}"
        for at, (right, got) in enumerate(zip(expected, answers, strict=True))
        if right != got
    ]
    return VllmCheckRow(
        mode=mode, requests=len(asked), identical=len(asked) - len(wrong), tokens_moved=int(after - before),
        tokens_needed=sum(one.fresh for one in asked), kv_used=used, seconds=round(seconds, 2),
        differences=tuple(wrong[:DIFFERENCES_SHOWN]),
    )  # fmt: skip


async def _ask_all(url: str, asked: Sequence[VllmCheckPrompt], headers: Mapping[str, str], salt: str) -> list[Answer]:
    turns = asyncio.Semaphore(AT_ONCE)

    async def one(prompt: VllmCheckPrompt) -> Answer:
        async with turns:
            return await _ask(url, prompt, headers, salt)

    return await asyncio.gather(*map(one, asked))


async def _ask(url: str, prompt: VllmCheckPrompt, headers: Mapping[str, str], salt: str) -> Answer:
    body = {"prompt": prompt.prompt, "max_tokens": MAX_TOKENS, "temperature": 0, "logprobs": 1, "cache_salt": salt}
    try:
        answer = await fetch(f"{url}/v1/completions", ASK_S, body, headers)
    except OSError as error:
        return (f"\n{error}",)
    if answer.status != 200:
        return (f"\nstatus {answer.status}: {answer.text[:200]}",)
    return tuple(msgspec.json.decode(answer.body)["choices"][0]["logprobs"]["tokens"])


async def _numbers(cluster: Cluster) -> tuple[float, float]:
    """Tokens loaded by a D so far, and the highest KV cache usage now."""
    moved = used = 0.0
    for url, decodes in {worker.url: worker.decodes for worker in cluster.registered()}.items():
        text = await _get(f"{url}/metrics")
        moved += _metric(text, _MOVED) if decodes else 0.0
        used = max(used, _metric(text, _USED))
    return moved, used


async def _get(url: str) -> str:
    return (await fetch(url, ASK_S)).text


def _metric(text: str, name: str) -> float:
    value = total(samples(text), name)
    if value is None:
        raise CommandError(f"an engine's /metrics has no {name}; is it vLLM 0.32?")
    return value


def _block_tokens(text: str) -> int:
    found = re.search(r'^vllm:cache_config_info{.*\bblock_size="(\d+)"', text, re.MULTILINE)
    return int(found[1]) if found else 128


def _line(row: VllmCheckRow) -> str:
    line = (
        f"{row.mode:<7} identical {row.identical} of {row.requests}   {row.tokens_moved} tokens' KV handed over   "
        f"{row.kv_used:.1%} of KV still held   {row.seconds:.2f} s"
    )
    if row.tokens_moved < row.tokens_needed:
        line += f"\n  too few: {row.tokens_needed} tokens were in no cache"
    return "\n".join([line, *(f"  differs: {each}" for each in row.differences)])
