"""The figures of `kvbaton bench router` for a reader and for a program, and what is wrong with them.

Laws: pure. A run is right only if everything that was to be measured was, no request failed anywhere, and kvbaton's
router met its bounds. What is wrong is told in the same words to readers and to programs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

import kvbaton_proof.bench.router.router_rows as of_rows
from kvbaton_proof.bench.kit.lab_pages import Check, Findings, Grid, Table, number
from kvbaton_proof.bench.kit.run_facts import RunFacts, unquiet
from kvbaton_proof.bench.router.router_backends import EVENTS, WRITES
from kvbaton_proof.bench.router.router_rows import KVBATON, KVBATON_2, TARGETS, TOY, Row, Streams

HEAD = (
    "at once", "target", "req/s", "p50 ms", "p99 ms", "added p50 ms", "added p99 ms", "CPU µs/req", "backends µs",
    "client µs", "errors", "others' cores",
)  # fmt: skip
RATIO_HEAD = ("at once", "target / base", "CPU", "added p50", "req/s")
LEGEND = (
    "CPU µs/req: user and system time of the router with all its threads and children, per request answered in the "
    "window; backends and client likewise (two backend requests for each, one for direct). added: beyond the same load "
    "straight to D. From 64 at once on, p50 is queueing, that is at once / req/s, and says nothing that req/s does "
    "not. Medians over the rounds; of latencies and rates over the quieter half of them."
)
RATIO_LEGEND = (
    "The first figure divided by the second at the same level. Less is better for CPU and added p50, more for req/s."
)
COARSE_S = 2.0
LIMITS = (
    "Backends answer at once with fixed bytes, and client, backends and router share one machine's cores over "
    "loopback: req/s is a lower bound for a router that has a core for itself. CPU µs/req is the figure to compare.",
    f"{TOY} stands in for the toy proxies of vLLM's examples: their shape (P, then D, a new client session for each), "
    "our code on aiohttp. It is not theirs.",
    "vllm-router runs with round_robin and log level error: once with URLs (nixl), once with discovery (moriio READ), "
    "the fastest of its disaggregated modes that we know. kvbaton's router runs as its defaults are, with URLs; "
    f"{KVBATON_2} is the same with --processes 2. vllm-router has as many threads as the machine has cores.",
)


class Measured(msgspec.Struct, kw_only=True):
    """What was to be measured, and what was so far."""

    targets: Sequence[str]  # that could be found
    missing: Mapping[str, str] = {}  # how to get what could not be measured, by target
    rounds: int
    window_s: float
    rows: list[Row] = []
    streams: list[Streams] = []
    failures: list[str] = []
    commands: dict[str, str] = {}

    @property
    def checks(self) -> list[Check]:
        """None where kvbaton's router was not to be measured."""
        return of_rows.bounds(self.rows, self.streams) if KVBATON in self.targets else []


def findings(facts: RunFacts, measured: Measured) -> Findings:
    rows = measured.rows
    tables = [Table(HEAD, grid(rows), legend=LEGEND)]
    if ratios := ratio_grid(rows):
        tables.append(Table(RATIO_HEAD, ratios, "Beside the others", RATIO_LEGEND))
    missing = [
        f"{name} was not measured: vllm-router is not installed; {how}" for name, how in measured.missing.items()
    ]
    return Findings(
        title=f"{facts.date}: what a router costs: kvbaton's beside vllm-router and a toy proxy",
        about=f"{facts.machine}; {facts.load_line}. {facts.version_line}. {measured.rounds} "
        f"round{'s' if measured.rounds != 1 else ''}, each target started anew in each, windows of "
        f"{measured.window_s:g} s, {facts.seconds:.0f} s in all. Completions of 2.1 kB; streams have {EVENTS} events "
        f"in {WRITES} writes.",
        command=facts.command, tables=tables, lines=stream_lines(measured.streams), checks=measured.checks,
        wrong=[*missing, *measured.failures, *of_rows.complaints(rows, measured.streams)], doubts=doubts(measured),
        limits=LIMITS, commands=measured.commands,
    )  # fmt: skip


def as_object(facts: RunFacts, measured: Measured, found: Findings, verdict: str) -> dict[str, Any]:
    """What `--json` prints."""
    rows = measured.rows
    targets: dict[str, Any] = {name: _target(name, measured) for name in measured.targets}
    targets |= {name: {"missing": True, "how": how} for name, how in measured.missing.items()}
    return {
        "ok": found.ok, "verdict": verdict,
        "wrong": [*found.wrong, *(str(each) for each in found.checks if not each.ok)],
        "targets": targets, "ratios": of_rows.ratios(rows), "checks": found.checks, "doubts": found.doubts,
        "notes": [LEGEND, *LIMITS], "rows": rows, "rounds": measured.rounds, "window_s": measured.window_s,
        **msgspec.structs.asdict(facts),
    }  # fmt: skip


def _target(name: str, measured: Measured) -> dict[str, Any]:
    mine = [row for row in measured.rows if row.target == name]
    return {
        "missing": False,
        "failed": not mine,
        "command": measured.commands.get(name),
        "cpu_us": of_rows.cpu_us(measured.rows, name),
        "levels": of_rows.summaries(measured.rows, name),
        "streams": [each for each in measured.streams if each.target == name],
        "errors": sum(each.error_count for each in mine),
    }


def grid(rows: Sequence[Row]) -> Grid:
    """A line per level and target."""
    lines = []
    for level in of_rows.levels(rows):
        for target in TARGETS:
            each = of_rows.summary(rows, target, level)
            if each is not None:
                cells = [
                    number(each.req_per_s, 0), number(each.p50_ms, 3), number(each.p99_ms, 2),
                    number(each.added_p50_ms, 3), number(each.added_p99_ms, 2), number(each.cpu_us, 0),
                    number(each.backends_cpu_us, 0), number(each.client_cpu_us, 0),
                    f"{each.errors} of {each.requests}", number(each.others_cores, 2),
                ]  # fmt: skip
                lines.append([str(level), target, *cells])
    return lines


def ratio_grid(rows: Sequence[Row]) -> Grid:
    """Figures of ours divided by another's, a line per level and pair."""
    return [
        [level, pair if " / " in pair else f"{KVBATON} / {pair}", *(number(each[name][level], 2) for name in each)]
        for pair, each in of_rows.ratios(rows).items()
        for level in each["cpu_us"]
    ]


def stream_lines(streams: Sequence[Streams]) -> list[str]:
    """Per target: all rounds together."""
    lines = []
    for target in TARGETS:
        mine = [each for each in streams if each.target == target]
        if mine:
            asked, complete = sum(each.asked for each in mine), sum(each.complete for each in mine)
            at_once = min(each.open_at_once for each in mine)
            lines.append(
                f"{target}: {at_once} of {mine[0].asked} streams open at the same moment, "
                f"{complete} of {asked} ended in full"
            )
    return lines


def doubts(measured: Measured) -> list[str]:
    """How much the figures are worth."""
    window_s, lines = measured.window_s, []
    if window_s < COARSE_S:
        lines.append(f"Windows of {window_s:g} s: CPU time comes in ticks of 10 ms, so these figures are coarse.")
    if measured.rounds < 2:
        lines.append("A single round: there is no spread to judge differences by.")
    so = "Latencies and rates suffer from that, CPU less."
    return [*lines, *unquiet([row.others_cores for row in measured.rows], "windows", so)]
