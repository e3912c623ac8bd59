"""What `bench store` found, as tables, and what there is to complain of. Pure."""

from __future__ import annotations

import msgspec

from kvbaton.proof.bench.store_moves import Row
from kvbaton.proof.bench.store_ttft import Ttft


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
    lines = [
        "| store | values | put GB/s | get GB/s | put µs/key | get µs/key | exists µs/key | hits | wrong bytes |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for row in report.moves:
        lines.append(
            f"| {row.backend} | {row.shape} | {row.put_gb_s:.2f} | {row.get_gb_s:.2f} | {row.put_us_per_key:.0f} | "
            f"{row.get_us_per_key:.0f} | {row.exists_us_per_key:.1f} | {row.hit_ratio:.0%} | {row.wrong_bytes} |"
        )
    lines += [
        "",
        "| store | prompt tokens | first token, computed | first token, loaded | ratio | wrong answers |",
        "|---|---|---|---|---|---|",
    ]
    for ttft in report.ttft:
        lines.append(
            f"| {ttft.backend} | {ttft.prompt_tokens} | {ttft.cold_ms:.1f} ms | {ttft.hit_ms:.1f} ms | "
            f"{ttft.ratio:.1f} | {ttft.wrong_answers} |"
        )
    return lines


def page(report: Report, verdict: list[str], command: str) -> str:
    """A page for docs/lab."""
    before, after = report.load
    lines = [
        "# What the shared stores reach",
        "",
        f"{report.machine}; load {before:.2f} before and {after:.2f} after. kvbaton {report.version}, "
        f"{report.rounds} rounds of each row, {report.seconds:.0f} s in all; medians over the faster half.",
        "",
        f"    {command}",
        "",
        *tables(report),
        "",
        "One client puts 64 values, another gets them, each through the whole of kvbaton's store: the copy between the "
        "engine's pieces and the store's own memory, sums, and the back end in another process. Every byte that was "
        "got was compared with what was put. First token: the embedded engine, prompts of the same length in turns.",
        "",
        *([f"- {each}" for each in verdict] or ["All bytes and answers were right."]),
    ]
    return "\n".join(lines) + "\n"
