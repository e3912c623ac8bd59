"""A run of `kvbaton bench store`: every backend in turn, and what it found for reading.

Law: a backend that cannot be measured loses its own rows and no others, and is a failure of the run.

TTFT saved by a store: measured when the prompt is computed, and when it is loaded.

Laws: both are measured in one run, in turns, on the same engine, with prompts of the same length; the answers on loaded
KV must be those of the engine that computed it.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import random
import time
from collections.abc import AsyncIterator, Iterator, Sequence

import msgspec

from kvbaton.control import keyring
from kvbaton.engines.embedded import tokenizer
from kvbaton.engines.embedded.embedded_worker import EmbeddedWorker
from kvbaton.engines.embedded.http_worker import Token
from kvbaton.engines.embedded.server_plan import GenerateRequest
from kvbaton.engines.embedded.worker_options import WorkerOptions
from kvbaton.processes.child_process import Say
from kvbaton_proof.bench.kit.lab_pages import Findings, Table
from kvbaton_proof.bench.kit.run_facts import MOONCAKE, RunFacts
from kvbaton_proof.bench.store import store_moves
from kvbaton_proof.bench.store.store_moves import CLIENTS, Row, Site, settled

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


def measure_ttft(site: Site, prompt_tokens: int, rounds: int) -> Ttft:
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


ROOM_BYTES = 1 << 30
HEAD = (
    "store", "values", "put GB/s", "get GB/s", "put µs/key", "get µs/key", "exists µs/key", "hits", "wrong bytes",
)  # fmt: skip
TTFT_HEAD = ("store", "prompt tokens", "first token, computed", "first token, loaded", "ratio", "wrong answers")
ABOUT = (
    "One client puts 64 values, another gets them, each through the whole of kvbaton's store: the copy between the "
    "engine's pieces and the store's own memory, sums, and the back end in another process. Every byte that was got "
    "was compared with what was put."
)
ABOUT_TTFT = "The embedded engine, prompts of the same length in turns."


class StoreReport(msgspec.Struct, frozen=True, kw_only=True):
    """One run."""

    moves: Sequence[Row]
    ttft: Sequence[Ttft]
    failures: Sequence[str]
    rounds: int


def measure(names: Sequence[str], rounds: int, prompt_tokens: int, say: Say) -> StoreReport:
    moves: list[Row] = []
    ttfts: list[Ttft] = []
    failures: list[str] = []
    parts = len(names) * (len(store_moves.SHAPES) + 1)
    number = itertools.count(1)
    for name in names:
        try:
            with store_moves.site(name, ROOM_BYTES) as site:
                for shape in store_moves.SHAPES:
                    say(f"{next(number)} of {parts}, {name}: {shape}, {rounds} rounds")
                    source, target = (site.clients(client) for client in store_moves.CLIENTS)
                    with _hushed(name):
                        moves.append(store_moves.measure(name, source, target, shape, rounds, site.trusts))
                what = f"time to first token of {prompt_tokens} tokens, recomputed and loaded"
                say(f"{next(number)} of {parts}, {name}: {what}")
                with _hushed(name):
                    ttfts.append(measure_ttft(site, prompt_tokens, rounds))
        except (store_moves.SiteError, RuntimeError) as error:
            failures.append(f"{name}: {error}")
            say(failures[-1])
    return StoreReport(moves=moves, ttft=ttfts, failures=failures, rounds=rounds)


@contextlib.contextmanager
def _hushed(name: str) -> Iterator[None]:
    """Mooncake's library writes to stderr regardless of its settings; nothing else needs stderr meanwhile."""
    if name != MOONCAKE:
        yield
        return
    with open(os.devnull, "wb") as nowhere:
        kept = os.dup(2)
        os.dup2(nowhere.fileno(), 2)
        try:
            yield
        finally:
            os.dup2(kept, 2)
            os.close(kept)


def complaints(report: StoreReport, *, strict: bool) -> list[str]:
    """What is wrong; with `strict` also what is right but slow."""
    wrong = list(report.failures)
    for row in report.moves:
        where = f"{row.backend}, {row.shape}"
        if row.wrong_bytes:
            wrong.append(f"{where}: {row.wrong_bytes} bytes are not those that were put")
        if row.hit_ratio < 1:
            wrong.append(f"{where}: only {row.hit_ratio:.0%} of what was put could be got")
    for ttft in report.ttft:
        if ttft.wrong_answers:
            wrong.append(f"{ttft.backend}: {ttft.wrong_answers} answers on loaded KV differ")
        if strict and ttft.ratio <= 1:
            wrong.append(f"{ttft.backend}: a hit took {ttft.hit_ms:.0f} ms, computing the prompt {ttft.cold_ms:.0f} ms")
    return wrong


def findings(facts: RunFacts, report: StoreReport, *, strict: bool) -> Findings:
    moves = [
        [row.backend, row.shape, f"{row.put_gb_s:.2f}", f"{row.get_gb_s:.2f}", f"{row.put_us_per_key:.0f}",
         f"{row.get_us_per_key:.0f}", f"{row.exists_us_per_key:.1f}", f"{row.hit_ratio:.0%}", str(row.wrong_bytes)]
        for row in report.moves
    ]  # fmt: skip
    firsts = [
        [each.backend, str(each.prompt_tokens), f"{each.cold_ms:.1f} ms", f"{each.hit_ms:.1f} ms", f"{each.ratio:.1f}",
         str(each.wrong_answers)]
        for each in report.ttft
    ]  # fmt: skip
    return Findings(
        title="What the shared stores reach",
        about=f"{facts.machine}; {facts.load_line}. {facts.version_line}. "
        f"{report.rounds} rounds of each row, {facts.seconds:.0f} s in all; medians over the faster half.",
        command=facts.command,
        tables=[Table(HEAD, moves, "Values", ABOUT), Table(TTFT_HEAD, firsts, "Requests", ABOUT_TTFT)],
        wrong=complaints(report, strict=strict),
    )  # fmt: skip
