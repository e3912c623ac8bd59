"""A whole run of `kvbaton bench serve`: one object for programs, tables for readers, and the verdict.

Laws: pure. A ratio is taken within each round, where both had the same machine, and told as the median of the rounds
with the lowest and the highest; it is decided only if the rounds agree on its side of 1 more than chance would. The
verdict is about answers, never about speed: every request was answered, in full, and, where engines are exact, as the
first target answered it.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from kvbaton_proof.bench.kit.run_facts import RunFacts
from kvbaton_proof.bench.kit.text_tables import Grid, markdown, number, plain
from kvbaton_proof.bench.serve.serve_meter import Part
from kvbaton_proof.bench.serve.serve_plan import AGGREGATED
from kvbaton_proof.bench.serve.serve_stats import Figures

CHANCE = 0.05
HEAD = (
    "target", "right", "req/s", "out tok/s", "goodput/s", "handed over", "same answers", "engine CPU s/req",
    "router CPU s/req", "others' cores",
)  # fmt: skip
TIME_HEAD = ("target", "ms", "mean", "p50", "p90", "p99", "max")
LEGEND = (
    "TTFT: from sending a request to its first token. TPOT: a request's mean time for each further token. ITL: every "
    "gap between two tokens. E2E: to the last token. Percentiles are over all requests of all rounds. handed over: "
    "requests whose KV a D took from a P. same answers: as the first target's in the same round. others' cores: what "
    "everybody else on this machine used meanwhile."
)
RATIO_LEGEND = (
    "Median over the rounds of the ratio within a round, with the lowest and the highest in brackets. More is better "
    "for rates, less for times. * : so many rounds are on one side of 1 that chance alone would do this less than once "
    "in twenty (a sign test, which needs six rounds or more); the rest is undecided."
)


def _percentile(time: str, percentile: str) -> Callable[[Part], float | None]:
    def read(part: Part) -> float | None:
        found: Figures | None = getattr(part, time)
        return None if found is None else getattr(found, percentile)

    return read


METRICS: Mapping[str, Callable[[Part], float | None]] = {
    "req/s": lambda part: part.requests_per_s,
    "out tok/s": lambda part: part.output_tokens_per_s,
    "goodput/s": lambda part: part.goodput_per_s,
    "TTFT p50": _percentile("ttft", "p50_ms"),
    "TTFT p99": _percentile("ttft", "p99_ms"),
    "TPOT p50": _percentile("tpot", "p50_ms"),
    "ITL p99": _percentile("itl", "p99_ms"),
    "E2E p50": _percentile("e2e", "p50_ms"),
}


class Spread(msgspec.Struct, frozen=True):
    """A ratio over the rounds."""

    median: float
    low: float
    high: float
    rounds: int
    above: int  # rounds in which it was above 1
    below: int

    @property
    def is_decided(self) -> bool:
        """Whether chance alone would have rounds agree so far less than once in twenty (sign test, both sides)."""
        count = self.above + self.below
        tail = sum(math.comb(count, each) for each in range(min(self.above, self.below) + 1))
        return count > 0 and 2 * tail / 2**count < CHANCE


class Ratio(msgspec.Struct, frozen=True):
    """One target beside another, by metric; None where one of them has no such figure."""

    target: str
    base: str
    by_metric: Mapping[str, Spread | None]


class Report(RunFacts, frozen=True, kw_only=True):
    """Everything that a run found."""

    ok: bool
    wrong: Sequence[str]
    notes: Sequence[str]
    stopped: bool  # by the operator, before it was done
    load: tuple[float, float]  # of the machine, before and after
    engine: str  # of engines that were started here; "" where others were asked
    options: Mapping[str, Any]
    order: Sequence[tuple[int, str]]  # in which parts were measured: round, target
    targets: Sequence[Part]  # all rounds together
    parts: Sequence[Part]
    ratios: Sequence[Ratio]
    quantiles: Mapping[str, Mapping[str, Sequence[float]]]  # of each target and time: 0, 1 … 100 %, in milliseconds
    commands: Mapping[str, str] = {}  # of what was started


def base_of(targets: Sequence[str]) -> str:
    """With what others are compared: the aggregated engines, else whoever comes first."""
    return AGGREGATED if AGGREGATED in targets else targets[0]


def ratios(parts: Sequence[Part], targets: Sequence[str]) -> list[Ratio]:
    """Every other target beside the base."""
    if not targets:
        return []
    base = base_of(targets)
    rounds = {(each.target, each.round): each for each in parts}
    found = []
    for target in targets:
        pairs = [
            (rounds[target, number], rounds[base, number])
            for number in sorted({each.round for each in parts})
            if (target, number) in rounds and (base, number) in rounds
        ]
        if target != base and pairs:
            found.append(Ratio(target, base, {name: _spread(pairs, read) for name, read in METRICS.items()}))
    return found


def _spread(pairs: Sequence[tuple[Part, Part]], read: Callable[[Part], float | None]) -> Spread | None:
    values = []
    for above, below in pairs:
        top, bottom = read(above), read(below)
        if top is not None and bottom:
            values.append(top / bottom)
    if not values:
        return None
    return Spread(
        median=round(statistics.median(values), 3), low=round(min(values), 3), high=round(max(values), 3),
        rounds=len(values), above=sum(each > 1 for each in values), below=sum(each < 1 for each in values),
    )  # fmt: skip


def complaints(parts: Sequence[Part], *, exact: bool, stopped: bool = False) -> list[str]:
    """All that is wrong with the answers, a line each. `exact`: engines must agree to the last character."""
    found = []
    for each in parts:
        where = f"{each.target}, round {each.round}"
        if each.errors:
            told = ", ".join(f"{count} × {kind}" for kind, count in each.errors.items())
            found.append(f"{where}: {each.failed} of {each.sent} requests failed: {told}")
        if each.planned is not None and each.sent < each.planned and not stopped:
            found.append(f"{where}: only {each.sent} of {each.planned} requests were sent")
        if not each.sent:
            found.append(f"{where}: nothing was sent")
        compared, same = each.compared_answers or 0, each.same_answers or 0
        if exact and same < compared:
            found.append(f"{where}: {compared - same} of {compared} answers are not the first target's")
        if not each.unfinished:  # whoever was cut off may hold what it needs for a while
            found += [f"{where}: {line}" for line in each.used.held]
    return found


def tables(report: Report, *, as_markdown: bool = False) -> list[str]:
    """Answers and rates, times, ratios."""
    draw = markdown if as_markdown else plain
    found = [draw(HEAD, [_line(each) for each in report.targets]), draw(TIME_HEAD, _times(report.targets))]
    if report.ratios:
        head = ["target / base", *(f"{each.target} / {each.base}" for each in report.ratios)]
        found.append(draw(head, [[name, *(_cell(each.by_metric[name]) for each in report.ratios)] for name in METRICS]))
    return found


def _line(each: Part) -> list[str]:
    used = each.used
    return [
        each.target, f"{each.right} of {each.sent}", number(each.requests_per_s, 2),
        number(each.output_tokens_per_s, 1), number(each.goodput_per_s, 2),
        "-" if used.handed_over is None else str(used.handed_over),
        "-" if each.same_answers is None else f"{each.same_answers} of {each.compared_answers}",
        number(_each(used.engine_cpu_s, each.right), 4), number(_each(used.router_cpu_s, each.right), 4),
        number(used.others_cores, 2),
    ]  # fmt: skip


def _times(parts: Sequence[Part]) -> Grid:
    lines = []
    for name in ("ttft", "tpot", "itl", "e2e"):
        for each in parts:
            found: Figures | None = getattr(each, name)
            cells = ["-"] * 5
            if found is not None:
                cells = [f"{x:.1f}" for x in (found.mean_ms, found.p50_ms, found.p90_ms, found.p99_ms, found.max_ms)]
            lines.append([each.target, name.upper(), *cells])
    return lines


def _cell(found: Spread | None) -> str:
    if found is None:
        return "-"
    return f"{found.median:.2f}{'*' if found.is_decided else ''} ({found.low:.2f} to {found.high:.2f})"


def _each(value: float | None, count: int) -> float | None:
    return None if value is None or not count else value / count
