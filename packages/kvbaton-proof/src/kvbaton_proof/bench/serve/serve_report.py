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

from kvbaton_proof.bench.kit.lab_pages import Findings, Grid, Table, line_plot, number
from kvbaton_proof.bench.kit.run_facts import AGGREGATED, RunFacts, named, unquiet
from kvbaton_proof.bench.serve.serve_parts import Figures, Part

CHANCE = 0.05
ROUNDS_MIN = 6  # five that agree are chance once in sixteen
REACHED = 0.7  # of the rate: a part ends with its last answer, which costs a short part some of it
TOGETHER = 0.1
LATE_MS = 20.0  # requests that are sent so much after they were due are another load than was asked for
RATES = ("req/s", "out tok/s", "goodput/s")
HEAD = (
    "target", "right", *RATES, "handed over", "same answers", "engine CPU s/req", "router CPU s/req", "others' cores",
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
LOCAL = (
    "Router, engines and the client that measures share one machine's cores, and bytes go over its memory or loopback; "
    "disaggregation is meant for engines that have cores or GPUs of their own. Nothing here speaks about GPUs, RDMA or "
    "real models. Why a target is faster or slower was not measured: engine CPU s/req is the only hint.",
    "The aggregated target has as many engines as the disaggregated ones together, behind the same router, which gives "
    "each request to the engine with the fewest tokens under way; every engine computes prompt and answer itself.",
)
MODELS = {
    "embedded": "The engine is kvbaton's own, a tiny model in numpy for demonstrations and tests: its figures say "
    "nothing about a model worth serving.",
    "vllm": "The model is a four-layer Llama of random weights in fp32 on a CPU; each engine has one thread for its "
    "model.",
}


def _percentile(time: str, percentile: str) -> Callable[[Part], float | None]:
    def read(part: Part) -> float | None:
        known: Figures | None = getattr(part, time)
        return None if known is None else getattr(known, percentile)

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

    def __str__(self) -> str:
        """Only what the rounds decide is called better or worse."""
        known = {name: spread for name, spread in self.by_metric.items() if spread is not None}
        verdicts: dict[str, list[str]] = {"better in": [], "WORSE in": [], "undecided in": []}
        for name, spread in known.items():
            is_better = (spread.median > 1) == (name in RATES)
            verdict = ("better in" if is_better else "WORSE in") if spread.is_decided else "undecided in"
            verdicts[verdict].append(f"{name} ({spread.median:.2f})" if spread.is_decided else name)
        told = [f"{verdict} {', '.join(names)}" for verdict, names in verdicts.items() if names]
        return f"{self.target} beside {self.base}: {'; '.join(told) or 'nothing to compare'}."


class Report(RunFacts, frozen=True, kw_only=True):
    """Everything that a run found."""

    ok: bool
    wrong: Sequence[str]
    notes: Sequence[str]
    stopped: bool  # by the operator, before it was done
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
            kinds = ", ".join(f"{count} × {kind}" for kind, count in each.errors.items())
            found.append(f"{where}: {each.failed} of {each.sent} requests failed: {kinds}")
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


def notes(totals: Sequence[Part], rate: float | None) -> list[str]:
    """What a reader should know before any figure is believed."""
    found = []
    slow = [each for each in totals if rate is not None and rate * REACHED > (each.requests_per_s or 0.0)]
    if slow and rate != float("inf"):
        reached = ", ".join(f"{each.target} {each.requests_per_s or 0.0:.2f}" for each in slow)
        found.append(f"{rate:g} requests/s were asked for and not reached ({reached}): this is overload, and times are "
                     "mostly queueing.")  # fmt: skip
    for each in totals:
        handed_over = each.used.handed_over
        if handed_over is not None and handed_over < each.right:
            found.append(f"{each.target}: {each.right - handed_over} of {each.right} requests were not handed over: "
                         "D had their KV already, or computed it itself.")  # fmt: skip
    shares = {each.target: each.together for each in totals if each.together is not None}
    if max(shares.values(), default=0.0) > TOGETHER:
        told = ", ".join(f"{name} {share:.0%}" for name, share in shares.items())
        found.append(f"Tokens that came in one read with the one before: {told}. Their gaps are shorter than the "
                     "engine's steps, and TPOT and ITL with them; E2E does not suffer.")  # fmt: skip
    late = {each.target: each.held_back_p99_ms for each in totals if each.held_back_p99_ms is not None}
    if max(late.values(), default=0.0) > LATE_MS:
        told = ", ".join(f"{name} {each:.0f} ms" for name, each in late.items())
        found.append(f"Requests were sent after they were due, p99: {told}. The client was too busy, or had to wait "
                     "for others to end.")  # fmt: skip
    return found


def findings(report: Report, picture: str = "") -> Findings:
    """For a reader; what speaks against handing KV over in the same words as what speaks for it."""
    tables = [Table(HEAD, [_line(each) for each in report.targets]),
              Table(TIME_HEAD, _times(report.targets), "Times", LEGEND)]  # fmt: skip
    if report.ratios:
        head = ("target / base", *(f"{each.target} / {each.base}" for each in report.ratios))
        rows = [[name, *(_cell(each.by_metric[name]) for each in report.ratios)] for name in METRICS]
        tables.append(Table(head, rows, "Beside each other", RATIO_LEGEND))
    stopped = ["The run was stopped before it was done."] * report.stopped
    whole = [f"All {sum(each.sent for each in report.parts)} requests were answered in full."] * report.ok
    return Findings(
        title=f"{report.date}: what clients see ({report.engine or 'clusters that were running'})",
        about=f"{report.machine}; {report.load_line}. {report.version_line}. {report.seconds:.0f} s in all. "
        f"{named(report.options)}. Order of the parts: {' '.join(target for _, target in report.order)}.",
        command=report.command, tables=tables, wrong=[*report.wrong, *stopped],
        doubts=[*whole, *report.notes, *map(str, report.ratios), *_noise(report)],
        limits=[*LOCAL, MODELS[report.engine]] if report.engine else [], commands=report.commands, picture=picture,
    )  # fmt: skip


def plot(report: Report) -> str:
    """The share of requests whose first token was there by then."""
    lines = {
        target: [(ms, float(share)) for share, ms in enumerate(times.get("ttft", ()))]
        for target, times in report.quantiles.items()
    }
    return line_plot(lines, "Time to first token by target", "milliseconds", "% of requests", log_x=True)


def _noise(report: Report) -> Sequence[str]:
    rounds = max((each.round for each in report.parts), default=0)
    found = []
    if rounds < ROUNDS_MIN and report.ratios:
        found.append(f"Rounds: {rounds}. Fewer than {ROUNDS_MIN} decide nothing, so nothing is called better or worse.")
    so = "Targets took turns, so that this hits all alike; take the ratios rather than the times."
    return [*found, *unquiet([each.used.others_cores for each in report.parts], "parts", so)]


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
            known: Figures | None = getattr(each, name)
            values = [None] * 5 if known is None else msgspec.structs.astuple(known)[1:]
            lines.append([each.target, name.upper(), *(number(value, 1) for value in values)])
    return lines


def _cell(spread: Spread | None) -> str:
    if spread is None:
        return "-"
    return f"{spread.median:.2f}{'*' if spread.is_decided else ''} ({spread.low:.2f} to {spread.high:.2f})"


def _each(value: float | None, count: int) -> float | None:
    return None if value is None or not count else value / count
