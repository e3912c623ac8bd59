"""The figures of `kvbaton bench router`: a row per round, target and level; medians, ratios, bounds and the verdict.

Laws: pure. What is added is held against the same load straight to D in the same round. Latencies and rates are medians
over the quieter half of the rounds, by what others did to the machine meanwhile; CPU time is over all of them. What was
not measured is None and meets no bound.

The figures of `kvbaton bench router` for a reader and for a program, and what is wrong with them.

Laws: pure. A run is right only if everything that was to be measured was, no request failed anywhere, and kvbaton's
router met its bounds. What is wrong is told in the same words to readers and to programs.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import msgspec

from kvbaton_proof.bench.kit.lab_pages import Check, Findings, Grid, Table, check, number
from kvbaton_proof.bench.kit.run_facts import RunFacts, unquiet
from kvbaton_proof.bench.router.router_backends import EVENTS, WRITES

DIRECT, KVBATON, NIXL, MORIIO, TOY = "direct", "kvbaton", "vllm-router-nixl", "vllm-router-moriio", "toy"
KVBATON_2 = "kvbaton-2"
"""The same with `--processes 2`."""
OURS = (KVBATON, KVBATON_2)
OWNED, PLAIN = "kvbaton-owned", "kvbaton-plain"
"""kvbaton's router before workers that have registered: it owns its streams, or does not; only where they are named."""
TARGETS = (DIRECT, KVBATON, KVBATON_2, NIXL, MORIIO, TOY)
"""In the order in which they are measured in the first round."""
THEIRS = (NIXL, MORIIO)
CPU_US_MAX, CPU_US_AIM = 800.0, 400.0
ADDED_MS_MAX, ADDED_MS_AIM = 1.0, 0.5
RATE_LEAST = 1.0
"""Of `KVBATON_2` at `RATE_LEVEL` requests at once, in parts of vllm-router's faster mode in the same run."""
RATE_LEVEL = 512
MORE_CPU_MOST = 1.1
"""Of `KVBATON_2` there, in parts of the CPU a request of one process."""
CPU_LEVELS = (1, 64)
"""Whose CPU figures the bound is about."""


class Level(msgspec.Struct, frozen=True, order=True):
    """A load: requests at once, or streams."""

    stream: bool
    concurrency: int

    def __str__(self) -> str:
        return f"{self.concurrency} streams" if self.stream else str(self.concurrency)


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """One target under one load in one round."""

    round: int
    target: str
    level: Level
    answered: int  # in the window
    asked: int  # with warm-up and what was under way at the end
    errors: Mapping[str, int] = {}
    seconds: float = 0.0
    p50_ms: float | None = None
    p99_ms: float | None = None
    first_byte_p50_ms: float | None = None
    router_cpu_s: float | None = None
    backends_cpu_s: float | None = None
    client_cpu_s: float | None = None
    others_cores: float | None = None
    handed_over: int | None = None  # requests that reached D with P's ticket, of those asked

    @property
    def req_per_s(self) -> float | None:
        return self.answered / self.seconds if self.seconds and self.answered else None

    @property
    def cpu_us(self) -> float | None:
        """Of the router, for one request."""
        return self._each(self.router_cpu_s)

    @property
    def backends_cpu_us(self) -> float | None:
        return self._each(self.backends_cpu_s)

    @property
    def client_cpu_us(self) -> float | None:
        return self._each(self.client_cpu_s)

    @property
    def error_count(self) -> int:
        return sum(self.errors.values())

    def _each(self, seconds: float | None) -> float | None:
        return None if seconds is None or not self.answered else seconds / self.answered * 1e6


class Streams(msgspec.Struct, frozen=True, kw_only=True):
    """Streams that were to be open all at once, and to end in full."""

    round: int
    target: str
    asked: int
    open_at_once: int
    complete: int
    errors: Mapping[str, int] = {}

    @property
    def is_whole(self) -> bool:
        return self.open_at_once == self.complete == self.asked and not self.errors


class Summary(msgspec.Struct, frozen=True, kw_only=True):
    """One target at one level: medians."""

    concurrency: int
    stream: bool
    requests: int  # all that were asked
    errors: int
    req_per_s: float | None
    p50_ms: float | None
    p99_ms: float | None
    first_byte_p50_ms: float | None
    added_p50_ms: float | None
    added_p99_ms: float | None
    cpu_us: float | None
    backends_cpu_us: float | None
    client_cpu_us: float | None
    others_cores: float | None


def percentile(values: Sequence[float], share: float, scale: float = 1.0) -> float | None:
    """The smallest value that at least this share of all do not exceed, times `scale`."""
    if not values:
        return None
    return sorted(values)[max(0, math.ceil(share * len(values)) - 1)] * scale


def median(rows: Iterable[Row], value: Callable[[Row], float | None]) -> float | None:
    known = [found for row in rows if (found := value(row)) is not None]
    return statistics.median(known) if known else None


def quiet(rows: Sequence[Row]) -> list[Row]:
    """The quieter half."""
    return sorted(rows, key=lambda row: row.others_cores or 0.0)[: -(-len(rows) // 2)]


def levels(rows: Iterable[Row]) -> list[Level]:
    return sorted({row.level for row in rows})


def of(rows: Iterable[Row], target: str, level: Level) -> list[Row]:
    return [row for row in rows if row.target == target and row.level == level]


def added(rows: Sequence[Row], row: Row, value: Callable[[Row], float | None]) -> float | None:
    """What this row has more than the same load straight to D in the same round."""
    base = [each for each in of(rows, DIRECT, row.level) if each.round == row.round]
    own, direct = value(row), median(base, value)
    return None if own is None or direct is None or row.target == DIRECT else own - direct


def summary(rows: Sequence[Row], target: str, level: Level) -> Summary | None:
    mine = of(rows, target, level)
    if not mine:
        return None
    used: dict[str, Callable[[Row], float | None]] = {
        "cpu_us": lambda row: row.cpu_us, "backends_cpu_us": lambda row: row.backends_cpu_us,
        "client_cpu_us": lambda row: row.client_cpu_us,
    }  # fmt: skip
    timed: dict[str, Callable[[Row], float | None]] = {
        "req_per_s": lambda row: row.req_per_s, "p50_ms": lambda row: row.p50_ms, "p99_ms": lambda row: row.p99_ms,
        "first_byte_p50_ms": lambda row: row.first_byte_p50_ms, "others_cores": lambda row: row.others_cores,
        "added_p50_ms": lambda row: added(rows, row, lambda each: each.p50_ms),
        "added_p99_ms": lambda row: added(rows, row, lambda each: each.p99_ms),
    }  # fmt: skip
    return Summary(
        concurrency=level.concurrency,
        stream=level.stream,
        requests=sum(row.asked for row in mine),
        errors=sum(row.error_count for row in mine),
        **{name: _rounded(median(mine, value)) for name, value in used.items()},
        **{name: _rounded(median(quiet(mine), value)) for name, value in timed.items()},
    )


def summaries(rows: Sequence[Row], target: str) -> dict[str, Summary]:
    found = {str(level): summary(rows, target, level) for level in levels(rows)}
    return {level: each for level, each in found.items() if each is not None}


def cpu_us(rows: Sequence[Row], target: str) -> float | None:
    """The one figure for what a request costs: the median over the levels 1 and 64."""
    each = [median(of(rows, target, Level(False, count)), lambda row: row.cpu_us) for count in CPU_LEVELS]
    known = [value for value in each if value is not None]
    return _rounded(statistics.median(known)) if known else None


def ratios(rows: Sequence[Row]) -> dict[str, dict[str, dict[str, float | None]]]:
    """A figure of ours divided by another's at the same level, by target (of one process) or pair, and by figure."""
    found = {}
    pairs = [(KVBATON_2, KVBATON), *((our, their) for their in (*THEIRS, TOY) for our in OURS)]
    for our, their in pairs:
        ours, theirs = summaries(rows, our), summaries(rows, their)
        shared = [level for level in ours if level in theirs]
        if not shared:
            continue
        found[their if our == KVBATON else f"{our} / {their}"] = {
            name: {level: _divided(getattr(ours[level], name), getattr(theirs[level], name)) for level in shared}
            for name in ("cpu_us", "added_p50_ms", "req_per_s")
        }
    return found


def bounds(rows: Sequence[Row], streams: Sequence[Streams]) -> list[Check]:
    """What kvbaton's router has to meet."""
    alone = summary(rows, KVBATON, Level(False, 1))
    added_ms = None if alone is None else alone.added_p50_ms
    mine = [each for each in streams if each.target == KVBATON]
    whole = sum(each.asked for each in mine if each.is_whole) if mine else None
    return [
        check("CPU µs a request, 1 and 64 at once", cpu_us(rows, KVBATON), "<=", CPU_US_MAX, aim=CPU_US_AIM),
        check("ms added to p50, one at once", added_ms, "<=", ADDED_MS_MAX, aim=ADDED_MS_AIM),
        check("streams open at once that ended in full", whole, ">=", sum(each.asked for each in mine)),
        *_bounds_of_two(rows),
    ]


def _bounds_of_two(rows: Sequence[Row]) -> list[Check]:
    """Of two processes beside one, and beside vllm-router; none where they were not measured together."""
    level = Level(False, RATE_LEVEL)
    two, one = summary(rows, KVBATON_2, level), summary(rows, KVBATON, level)
    theirs = [each.req_per_s for name in THEIRS if (each := summary(rows, name, level)) is not None and each.req_per_s]
    found = []
    if two is not None and theirs:
        what = f"req/s of two processes, in parts of vllm-router's best, {RATE_LEVEL} at once"
        found.append(check(what, _divided(two.req_per_s, max(theirs)), ">=", RATE_LEAST))
    if two is not None and one is not None:
        what = f"CPU a request of two processes, in parts of one's, {RATE_LEVEL} at once"
        found.append(check(what, _divided(two.cpu_us, one.cpu_us), "<=", MORE_CPU_MOST))
    return found


def complaints(rows: Sequence[Row], streams: Sequence[Streams]) -> list[str]:
    """What went wrong, a line each."""
    said = []
    for row in rows:
        where = f"{row.target}, {row.level} at once, round {row.round}"
        if row.errors:
            kinds = ", ".join(f"{count} {why}" for why, count in sorted(row.errors.items()))
            said.append(f"{where}: {row.error_count} of {row.asked} requests failed ({kinds})")
        if not row.answered:
            said.append(f"{where}: nothing was answered in the window")
        if row.handed_over is not None and row.handed_over < row.asked - row.error_count:
            said.append(f"{where}: only {row.handed_over} of {row.asked} requests reached D with P's ticket")
    for each in streams:
        if not each.is_whole:
            kinds = "".join(f", {count} {why}" for why, count in sorted(each.errors.items()))
            said.append(
                f"{each.target}, round {each.round}: of {each.asked} streams {each.open_at_once} were open at once and "
                f"{each.complete} ended in full{kinds}"
            )
    return said


def _divided(ours: float | None, theirs: float | None) -> float | None:
    return None if ours is None or theirs is None or theirs <= 0 else round(ours / theirs, 3)


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 4)


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
        return bounds(self.rows, self.streams) if KVBATON in self.targets else []


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
        wrong=[*missing, *measured.failures, *complaints(rows, measured.streams)], doubts=doubts(measured),
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
        "targets": targets, "ratios": ratios(rows), "checks": found.checks, "doubts": found.doubts,
        "notes": [LEGEND, *LIMITS], "rows": rows, "rounds": measured.rounds, "window_s": measured.window_s,
        **msgspec.structs.asdict(facts),
    }  # fmt: skip


def _target(name: str, measured: Measured) -> dict[str, Any]:
    mine = [row for row in measured.rows if row.target == name]
    return {
        "missing": False,
        "failed": not mine,
        "command": measured.commands.get(name),
        "cpu_us": cpu_us(measured.rows, name),
        "levels": summaries(measured.rows, name),
        "streams": [each for each in measured.streams if each.target == name],
        "errors": sum(each.error_count for each in mine),
    }


def grid(rows: Sequence[Row]) -> Grid:
    """A line per level and target."""
    lines = []
    for level in levels(rows):
        for target in TARGETS:
            each = summary(rows, target, level)
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
        for pair, each in ratios(rows).items()
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
