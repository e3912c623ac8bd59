"""TTFT saved by a store: measured when the prompt is computed, and when it is loaded.

Laws: both are measured in one run, in turns, on the same engine, with prompts of the same length; the answers on loaded
KV must be those of the engine that computed it.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections.abc import AsyncIterator

import msgspec

from kvbaton.control import keyring
from kvbaton.engines.embedded import tokenizer
from kvbaton.engines.embedded.embedded_worker import EmbeddedWorker
from kvbaton.engines.embedded.http_worker import Token
from kvbaton.engines.embedded.server_plan import GenerateRequest
from kvbaton.engines.embedded.worker_options import WorkerOptions
from kvbaton_proof.bench.store.store_moves import settled
from kvbaton_proof.bench.store.store_sites import CLIENTS, Site

WORDS = ("the", "of", "and", "to", "in", "is", "that", "for", "it", "as", "was", "with", "not", "he", "his", "but")
ANSWER_TOKENS = 4
STORED_S = 30.0


class Ttft(msgspec.Struct, frozen=True):
    """Medians over the faster half of the rounds, in milliseconds."""

    backend: str
    prompt_tokens: int
    cold_ms: float
    hit_ms: float
    ratio: float  # cold / hit
    hit_blocks: int
    wrong_answers: int


def measure(site: Site, prompt_tokens: int, rounds: int) -> Ttft:
    return asyncio.run(_measure(site, prompt_tokens, rounds))


async def _measure(site: Site, prompt_tokens: int, rounds: int) -> Ttft:
    cold, hit, wrong = [], [], 0
    async with _worker(site, CLIENTS[0]) as p, _worker(site, CLIENTS[1]) as d:
        for number in range(rounds + 1):  # the first does not count
            known, unknown = _text(2 * number, prompt_tokens), _text(2 * number + 1, prompt_tokens)
            right, _ = await _ask(p, known)
            await _stored(p, number + 1)
            _, cold_s = await _ask(d, unknown)
            answer, hit_s = await _ask(d, known)
            wrong += answer != right
            if number:
                cold.append(cold_s)
                hit.append(hit_s)
        hit_blocks = int(d.stats()["store_hits_blocks_total"])
    cold_ms, hit_ms = settled(cold) * 1e3, settled(hit) * 1e3
    return Ttft(site.name, prompt_tokens, cold_ms, hit_ms, cold_ms / hit_ms, hit_blocks, wrong)


@contextlib.asynccontextmanager
async def _worker(site: Site, name: str) -> AsyncIterator[EmbeddedWorker]:
    options = WorkerOptions(
        name=name, role="both", keys=site.keys, registry="tcp://127.0.0.1:1", store=site.place, blocks=2048
    )
    worker = EmbeddedWorker(options, keyring.load(site.keys, name))
    worker.start()
    try:
        yield worker
    finally:
        await asyncio.to_thread(worker.stop)


async def _ask(worker: EmbeddedWorker, text: str) -> tuple[str, float]:
    """The answer, and how long its first token took."""
    prompt = tuple(tokenizer.encode(text))
    request = GenerateRequest(
        request_id=f"{random.getrandbits(64):x}", prompt=prompt, max_tokens=ANSWER_TOKENS, temperature=0.0
    )
    begun, first_s, said = time.perf_counter(), 0.0, ""
    async for event in worker.backend.generate(request):
        if isinstance(event, Token):
            first_s = first_s or time.perf_counter() - begun
            said += event.text
    return said, first_s


async def _stored(worker: EmbeddedWorker, count: int) -> None:
    until = time.monotonic() + STORED_S
    while worker.stats()["store_puts_total"] < count:
        if time.monotonic() > until:
            raise RuntimeError(f"the prompt was not put within {STORED_S:.0f} s: {dict(worker.stats())}")
        await asyncio.sleep(0.005)


def _text(seed: int, tokens: int) -> str:
    rng = random.Random(seed)
    return " ".join(rng.choice(WORDS) for _ in range(tokens))[:tokens]
