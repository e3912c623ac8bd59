"""A run of `kvbaton bench store`: every backend in turn, and what it found for reading.

Law: a backend that cannot be measured loses its own rows and no others, and is a failure of the run.
"""

from __future__ import annotations

import contextlib
import itertools
import os
from collections.abc import Iterator, Sequence

import msgspec

from kvbaton.processes.child_process import Say
from kvbaton_proof.bench.kit.bench_peers import MOONCAKE
from kvbaton_proof.bench.kit.lab_pages import Findings, Table
from kvbaton_proof.bench.kit.run_facts import RunFacts
from kvbaton_proof.bench.store import store_moves, store_sites, store_ttft
from kvbaton_proof.bench.store.store_moves import Row
from kvbaton_proof.bench.store.store_ttft import Ttft

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
            with store_sites.site(name, ROOM_BYTES) as site:
                for shape in store_moves.SHAPES:
                    say(f"{next(number)} of {parts}, {name}: {shape}, {rounds} rounds")
                    source, target = (site.clients(client) for client in store_sites.CLIENTS)
                    with _hushed(name):
                        moves.append(store_moves.measure(name, source, target, shape, rounds, site.trusts))
                what = f"time to first token of {prompt_tokens} tokens, recomputed and loaded"
                say(f"{next(number)} of {parts}, {name}: {what}")
                with _hushed(name):
                    ttfts.append(store_ttft.measure(site, prompt_tokens, rounds))
        except (store_sites.SiteError, RuntimeError) as error:
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
