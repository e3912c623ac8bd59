"""Results of `bench store` as tables, and their problems. Pure."""

from __future__ import annotations

import msgspec

from kvbaton_proof.bench.kit.lab_pages import indented, lab_page
from kvbaton_proof.bench.kit.run_facts import load_line
from kvbaton_proof.bench.kit.text_tables import markdown
from kvbaton_proof.bench.store.store_moves import Row
from kvbaton_proof.bench.store.store_ttft import Ttft

HEAD = (
    "store", "values", "put GB/s", "get GB/s", "put µs/key", "get µs/key", "exists µs/key", "hits", "wrong bytes",
)  # fmt: skip
TTFT_HEAD = ("store", "prompt tokens", "first token, computed", "first token, loaded", "ratio", "wrong answers")


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """One run."""

    moves: tuple[Row, ...]
    ttft: tuple[Ttft, ...]
    failures: tuple[str, ...]
    rounds: int
    seconds: float
    load: tuple[float, float]
    machine: str
    version: str


def complaints(report: Report, *, strict: bool) -> list[str]:
    """What is wrong; with `strict` also what is right but slow."""
    found = []
    for row in report.moves:
        where = f"{row.backend}, {row.shape}"
        if row.wrong_bytes:
            found.append(f"{where}: {row.wrong_bytes} bytes are not those that were put")
        if row.hit_ratio < 1:
            found.append(f"{where}: only {row.hit_ratio:.0%} of what was put could be got")
    for ttft in report.ttft:
        if ttft.wrong_answers:
            found.append(f"{ttft.backend}: {ttft.wrong_answers} answers on loaded KV differ")
        if strict and ttft.ratio <= 1:
            found.append(f"{ttft.backend}: a hit took {ttft.hit_ms:.0f} ms, computing the prompt {ttft.cold_ms:.0f} ms")
    return found


def tables(report: Report) -> list[str]:
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
    return [markdown(HEAD, moves), "", markdown(TTFT_HEAD, firsts)]


def page(report: Report, verdict: list[str], command: str) -> str:
    """A page for docs/lab."""
    return lab_page(
        "What the shared stores reach",
        f"{report.machine}; {load_line(*report.load)}. kvbaton {report.version}, "
        f"{report.rounds} rounds of each row, {report.seconds:.0f} s in all; medians over the faster half.",
        indented(command),
        tables(report),
        [
            "One client puts 64 values, another gets them, each through the whole of kvbaton's store: the copy between "
            "the engine's pieces and the store's own memory, sums, and the back end in another process. Every byte "
            "that was got was compared with what was put. First token: the embedded engine, prompts of the same length "
            "in turns."
        ],
        [f"- {each}" for each in verdict] or ["All bytes and answers were right."],
    )
