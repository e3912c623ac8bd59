"""The result of `kvbaton bench router`: a verdict, and the figures for a reader or a program.

Laws: a run is right only if everything that was to be measured was, no request failed anywhere, and kvbaton's router
met its bounds. What is wrong is told in the same words to readers and to programs.
"""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

import kvbaton_proof.bench.router.router_page as bench_page
import kvbaton_proof.bench.router.router_rows as bench_rows
from kvbaton_proof.bench.kit.run_facts import own_versions
from kvbaton_proof.bench.router.router_page import RouterFacts
from kvbaton_proof.bench.router.router_rows import KVBATON, Row, Streams

PROBE_S = 20.0


class Report:
    """A run, judged."""

    def __init__(self, facts: RouterFacts, rows: Sequence[Row], streams: Sequence[Streams], *, judged: bool) -> None:
        self._facts = facts
        self._rows = rows
        self._streams = streams
        self._judged = judged
        self._bounds = bench_page.bounds(facts, rows, streams)
        self._bound_lines = bench_page.bound_lines(self._bounds)
        self.wrong = [
            *(f"{name} was not measured: vllm-router is not installed; {how}" for name, how in facts.missing.items()),
            *facts.failures,
            *bench_rows.complaints(rows, streams),
            *(line for line in self._bound_lines if line.startswith("NOT")),
        ]

    @property
    def verdict(self) -> str:
        if not self._judged:
            return "none"
        return "NOT ok" if self.wrong else "ok"

    @property
    def status(self) -> int:
        """Without a verdict, whether there are figures of what this is about."""
        if self._judged:
            return 1 if self.wrong else 0
        return 0 if any(row.target == KVBATON and row.answered for row in self._rows) else 1

    def as_text(self) -> str:
        facts, rows = self._facts, self._rows
        load = f"load {facts.load_before[0]:.2f} before, {facts.load_after[0]:.2f} after"
        return "\n".join(
            [
                bench_page.tables(rows), "", bench_page.LEGEND, "", *bench_page.stream_lines(self._streams), "",
                *self._bound_lines, *bench_page.doubts(facts, rows),
                *(line for line in self.wrong if line not in self._bound_lines),
                f"verdict: {self.verdict} ({facts.seconds:.0f} s, {load})",
            ]
        )  # fmt: skip

    def as_object(self) -> dict[str, Any]:
        facts, rows = self._facts, self._rows
        told: dict[str, Any] = {
            "ok": not self.wrong, "verdict": self.verdict, "wrong": self.wrong,
            "targets": {name: self._target(name) for name in facts.targets},
            "ratios": bench_rows.ratios(rows), "bounds": msgspec.to_builtins(self._bounds),
            "machine": {"cores": facts.cores, "what": facts.machine, "load_before": facts.load_before,
                        "load_after": facts.load_after},
            "doubts": bench_page.doubts(facts, rows), "notes": [bench_page.LEGEND, *bench_page.LIMITS],
            "rows": msgspec.to_builtins(rows),
        }  # fmt: skip
        told["targets"] |= {name: {"missing": True, "how": how} for name, how in facts.missing.items()}
        return told | {name: getattr(facts, name) for name in _SAID_AS_THEY_ARE}

    def _target(self, name: str) -> dict[str, Any]:
        mine = [row for row in self._rows if row.target == name]
        return {
            "missing": False,
            "failed": not mine,
            "command": self._facts.commands.get(name),
            "cpu_us": bench_rows.cpu_us(self._rows, name),
            "levels": msgspec.to_builtins(bench_rows.summaries(self._rows, name)),
            "streams": [msgspec.to_builtins(each) for each in self._streams if each.target == name],
            "errors": sum(each.error_count for each in mine),
        }


_SAID_AS_THEY_ARE = ("versions", "date", "command", "window_s", "rounds", "seconds")


def versions(vllm_router: str | None) -> dict[str, str]:
    found = own_versions("uvloop", "aiohttp")
    return found if vllm_router is None else {**found, "vllm-router": _vllm_router_version(vllm_router)}


def _vllm_router_version(program: str) -> str:
    """Of the package in the Python beside the program."""
    python = Path(program).resolve().parent / "python"
    code = "import importlib.metadata as m; print(m.version('vllm-router'))"
    try:
        done = subprocess.run([python, "-c", code], capture_output=True, text=True, timeout=PROBE_S, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return "unknown"
    return done.stdout.strip() or "unknown"
