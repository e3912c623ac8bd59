"""The result of one level of load on one target: parsed from the load generator, judged, and compared with others.

Laws: pure. A request has succeeded only if its answer has as many tokens as were asked for: `vllm bench serve` itself
counts a stream that breaks after its first token as completed. A number that is not there is None, never 0.

The figures of `kvbaton bench vllm` for a reader: what was measured, on what, how, and what follows from it.

Laws: pure. Several rounds are shown as their median, the rate with its lowest and highest as well, so that a reader
sees how much a figure is worth. What speaks against kvbaton is told in the same words as what speaks for it.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from kvbaton_proof.bench.kit.lab_pages import Findings, Grid, Table, number
from kvbaton_proof.bench.kit.run_facts import RunFacts, named, unquiet

OURS = "kvbaton-"
BASES = ("nixl", "aggregated")
"""What the kvbaton targets are compared with."""
ERRORS_SHOWN = 3
ERROR_CHARS_MAX = 160


class BadResultError(ValueError):
    """The load generator wrote something else than a result."""


class Level(msgspec.Struct, frozen=True):
    """How many requests, and how many of them at once."""

    concurrency: int
    requests: int


class Told(msgspec.Struct, frozen=True, kw_only=True):
    """The fields of a result file of `vllm bench serve --save-detailed` that are read. A NaN means: nobody finished."""

    duration: float
    completed: int
    request_throughput: float
    total_input_tokens: int
    total_output_tokens: int
    output_lens: list[int]
    errors: list[str]
    generated_texts: list[str]
    p50_ttft_ms: float | None = None
    p99_ttft_ms: float | None = None
    p50_tpot_ms: float | None = None
    p99_tpot_ms: float | None = None
    p50_itl_ms: float | None = None
    p99_itl_ms: float | None = None

    @classmethod
    def parse(cls, value: Any) -> Told:
        try:
            return msgspec.convert(value, cls)
        except msgspec.ValidationError as error:
            raise BadResultError(f"result of vllm bench serve: {error}; is this another version of vLLM?") from None

    def succeeded(self, output_tokens: int) -> int:
        return sum(count == output_tokens for count in self.output_lens)

    def complaints(self, output_tokens: int) -> list[str]:
        """What clients were told, each once, and how many answers ended early."""
        last = [error.strip().splitlines()[-1][:ERROR_CHARS_MAX] for error in self.errors if error.strip()]
        short = sum(0 < count < output_tokens for count in self.output_lens)
        found = list(dict.fromkeys(last))[:ERRORS_SHOWN]
        return found + ([f"{short} answers ended early"] if short else [])


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """One level on one target in one round. CPU is of the measured part alone, warm-up and start excluded."""

    round: int
    target: str
    concurrency: int
    requests: int
    succeeded: int = 0
    hung: bool = False
    seconds: float | None = None
    req_per_s: float | None = None
    input_tokens: int | None = None
    ttft_p50_ms: float | None = None
    ttft_p99_ms: float | None = None
    tpot_p50_ms: float | None = None
    tpot_p99_ms: float | None = None
    itl_p50_ms: float | None = None
    itl_p99_ms: float | None = None
    engine_cpu_s: float | None = None  # of all engines of the target
    router_cpu_s: float | None = None
    others_cores: float | None = None  # what everybody else on this machine used meanwhile
    at_rest: bool = False
    rest_s: float | None = None  # until it was
    handed_over: int | None = None  # requests whose KV D took from P; None for one engine
    ends: dict[str, int] = {}  # of handoffs in D, by how
    same_answers: int | None = None  # as the aggregated engine's; None if that was not measured
    notes: tuple[str, ...] = ()

    @property
    def failed(self) -> int:
        return self.requests - self.succeeded

    @property
    def engine_cpu_per_request_s(self) -> float | None:
        return None if self.engine_cpu_s is None or not self.succeeded else self.engine_cpu_s / self.succeeded

    @property
    def router_cpu_per_request_s(self) -> float | None:
        return None if self.router_cpu_s is None or not self.succeeded else self.router_cpu_s / self.succeeded


METRICS: Mapping[str, Callable[[Row], float | None]] = {
    "req/s": lambda row: row.req_per_s,
    "TTFT p50": lambda row: row.ttft_p50_ms,
    "TTFT p99": lambda row: row.ttft_p99_ms,
    "TPOT p50": lambda row: row.tpot_p50_ms,
    "CPU s/request": lambda row: row.engine_cpu_per_request_s,
}


class Ratio(msgspec.Struct, frozen=True):
    """A kvbaton target beside another at the same level: medians over the rounds, divided."""

    target: str
    base: str
    concurrency: int
    by_metric: dict[str, float | None]


def timings(told: Told) -> dict[str, float | None]:
    """The row's fields that are times and rates."""
    names = [f"{what}_{percentile}_ms" for what in ("ttft", "tpot", "itl") for percentile in ("p50", "p99")]
    found: dict[str, float | None] = {name: _finite(getattr(told, _theirs(name))) for name in names}
    return {**found, "seconds": _finite(told.duration), "req_per_s": _finite(told.request_throughput)}


def _theirs(name: str) -> str:
    what, percentile, unit = name.split("_")
    return f"{percentile}_{what}_{unit}"


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


def same(answers: Sequence[str], reference: Sequence[str] | None) -> int | None:
    """How many answers are the reference's, one by one."""
    if reference is None or len(reference) != len(answers):
        return None
    return sum(ours == theirs for ours, theirs in zip(answers, reference, strict=True))


def median(rows: Sequence[Row], metric: Callable[[Row], float | None]) -> float | None:
    found = [value for row in rows if (value := metric(row)) is not None]
    return statistics.median(found) if found else None


def of(rows: Sequence[Row], target: str, concurrency: int) -> list[Row]:
    """All rounds of one target at one level."""
    return [row for row in rows if row.target == target and row.concurrency == concurrency]


def targets(rows: Sequence[Row]) -> list[str]:
    return list(dict.fromkeys(row.target for row in rows))


def levels(rows: Sequence[Row]) -> list[int]:
    return sorted({row.concurrency for row in rows})


def ratios(rows: Sequence[Row]) -> list[Ratio]:
    """Every kvbaton target beside every base that was measured at the same level."""
    found = []
    for concurrency in levels(rows):
        for target in targets(rows):
            for base in BASES if target.startswith(OURS) else ():
                above, below = of(rows, target, concurrency), of(rows, base, concurrency)
                if above and below:
                    by_metric = {name: _over(above, below, metric) for name, metric in METRICS.items()}
                    found.append(Ratio(target, base, concurrency, by_metric))
    return found


def _over(above: Sequence[Row], below: Sequence[Row], metric: Callable[[Row], float | None]) -> float | None:
    top, bottom = median(above, metric), median(below, metric)
    return None if top is None or not bottom else top / bottom


def complaints(rows: Sequence[Row]) -> list[str]:
    """All that went wrong, a line each; those about kvbaton's targets decide the verdict."""
    found = []
    for row in rows:
        where = f"{row.target} at concurrency {row.concurrency}, round {row.round}"
        if row.hung:
            found.append(f"{where}: not done by the deadline")
        if row.failed:
            found.append(f"{where}: {row.failed} of {row.requests} requests failed")
        if not row.at_rest:
            found.append(f"{where}: blocks still in use or pinned afterwards")
        if row.same_answers is not None and row.same_answers < row.succeeded:
            found.append(f"{where}: {row.succeeded - row.same_answers} answers differ from the aggregated engine's")
        if row.handed_over is not None and row.handed_over < row.succeeded:
            found.append(f"{where}: D computed {row.succeeded - row.handed_over} prompts itself; ends: {row.ends}")
        found += [f"{where}: {note}" for note in row.notes]
    return found


def verdict(rows: Sequence[Row], expected: int) -> bool:
    """Whether all `expected` rows of kvbaton's targets are there, and every one of them is as it must be."""
    ours = [row for row in rows if row.target.startswith(OURS)]
    right = all(row.same_answers is None or row.same_answers == row.requests for row in ours)
    whole = all(not row.failed and not row.hung and row.at_rest for row in ours)
    return len(ours) == expected and right and whole


HEAD = (
    "at once", "target", "req/s", "TTFT p50 ms", "TTFT p99 ms", "TPOT p50 ms", "ITL p99 ms", "CPU s/req",
    "router CPU", "failed", "handed over", "same answers", "at rest", "others' cores",
)  # fmt: skip
RATIO_HEAD = ("at once", "target / base", *METRICS)
LEGEND = (
    "CPU s/req: of all engines of a target, per request that succeeded; router CPU likewise. handed over: requests "
    "whose KV D took from P. same answers: as the aggregated engine's, greedy, text by text. others' cores: what "
    "everybody else on this machine used meanwhile, the load generator excluded. Pairs are behind kvbaton's router "
    "(NIXL by URL, P then D); the aggregated engine is queried directly and uses one core, a pair uses two."
)
RATIO_LEGEND = "kvbaton's figure divided by the other's at the same level. More is better for req/s, less for the rest."
NOISE = 0.1
"""Figures this close are called alike, or as close as two rounds of one target, if those differ more."""
LIMITS = (
    "The model is a four-layer Llama of random weights in fp32 on a CPU, engines and client share one machine, and "
    "bytes go over its own memory or loopback. Nothing here speaks about GPUs, RDMA, real models or several machines: "
    "there the transfer's share of a request is another.",
    "Two engines use two cores, the aggregated one uses one. That disaggregated targets have more requests/s than the "
    "aggregated one at high load, where they do, is mostly that; CPU s/req tells what the second engine costs.",
    "The client and the router compete with the engines for the same cores, in all targets alike.",
    "All disaggregated targets stand behind kvbaton's own router (NIXL by URL, P then D, P's kv_transfer_params passed "
    "on verbatim); the aggregated engine is asked directly, which spares it a hop.",
    "NIXL runs as well as we could make it run here: UCX over tcp on loopback (its shared-memory transport was not "
    "tried), num_threads 0, and a shim that lets its progress thread sleep 1 ms between two looks, without which it "
    "spins on a core per engine. That shim can cost a transfer up to about 1 ms. vLLM's own spinning is calmed in all "
    "targets.",
    "kvbaton's bytes go over shared memory here (its own choice on one host); NIXL's go over TCP. That is what each "
    "does as configured, not a comparison of two data planes over one wire.",
)


class VllmFacts(RunFacts, frozen=True, kw_only=True):
    """And how it was measured."""

    options: Mapping[str, object]
    commands: Mapping[str, str]  # of what was started, by target and name
    idle_cores: Mapping[str, float] = {}  # of a target's engines together, before any load
    failures: Sequence[str] = ()  # targets that could not be measured


def findings(facts: VllmFacts, rows: Sequence[Row]) -> Findings:
    rounds = len({row.round for row in rows})
    tables = [Table(HEAD, grid(rows), legend=LEGEND)]
    if compared := ratio_grid(ratios(rows)):
        tables.append(Table(RATIO_HEAD, compared, "Beside the others", RATIO_LEGEND))
    return Findings(
        title=f"{facts.date}: vLLM with kvbaton, with NIXL, and alone",
        about=f"{facts.machine}. {facts.version_line}. {rounds} round{'s' if rounds != 1 else ''}, each target started "
        f"anew in each, {facts.seconds / 60:.0f} minutes in all. {named(facts.options)}.",
        command=facts.command, tables=tables, wrong=[*facts.failures, *complaints(rows)],
        doubts=[*noise(rows), *idle(facts.idle_cores), *said(rows)], limits=LIMITS, commands=facts.commands,
    )  # fmt: skip


def said(rows: Sequence[Row]) -> list[str]:
    """What the figures say beside NIXL, good and bad."""
    alike = max(NOISE, _spread(rows))
    lines = [_compared(each, alike) for each in ratios(rows) if each.base == "nixl"]
    if complaints(rows):
        return lines
    asked = sum(row.requests for row in rows if row.target.startswith(OURS))
    return [*lines, f"All {asked} requests to kvbaton's targets succeeded, and every engine came to rest each time."]


def _compared(each: Ratio, alike: float) -> str:
    words = []
    for name, value in each.by_metric.items():
        if value is None:
            continue
        if 1 - alike <= value <= 1 + alike:
            words.append(f"{name} alike ({value:.2f})")
        else:
            better = (value > 1) == (name == "req/s")
            words.append(f"{name} {'better' if better else 'WORSE'} ({value:.2f})")
    return f"{each.target} beside NIXL, {each.concurrency} at once: {', '.join(words) or 'nothing to compare'}."


def idle(cores: Mapping[str, float]) -> list[str]:
    """Whether anything spins: then figures on few cores are about that, and not about transfers."""
    if not cores:
        return []
    told = ", ".join(f"{target} {used:.2f}" for target, used in cores.items())
    return [f"Cores used by a target's engines while they had nothing to do: {told}."]


def noise(rows: Sequence[Row]) -> list[str]:
    """How much the figures are worth."""
    lines = []
    if len({row.round for row in rows}) < 2:
        lines.append("Single runs: differences of a tenth mean nothing, and there is no spread to judge the rest by.")
    else:
        lines.append(f"The rate of one target at one level differed between rounds by up to {_spread(rows):.0%}.")
    so = "Wall-clock figures of those are not worth keeping; CPU s/req suffers less."
    return [*lines, *unquiet([row.others_cores for row in rows], "measurements", so)]


def _spread(rows: Sequence[Row]) -> float:
    worst = 0.0
    for target, concurrency in {(row.target, row.concurrency) for row in rows}:
        each = of(rows, target, concurrency)
        rates, middle = [row.req_per_s for row in each if row.req_per_s], median(each, lambda row: row.req_per_s)
        if rates and middle:
            worst = max(worst, (max(rates) - min(rates)) / middle)
    return worst


def grid(rows: Sequence[Row]) -> Grid:
    """A line per level and target."""
    found = []
    for concurrency in levels(rows):
        for target in targets(rows):
            each = of(rows, target, concurrency)
            if each:
                found.append([str(concurrency), target, *_cells(each)])
    return found


def _cells(rows: Sequence[Row]) -> list[str]:
    requests, failed = sum(row.requests for row in rows), sum(row.failed for row in rows)
    resting = [row for row in rows if row.at_rest]
    slowest = max((row.rest_s or 0.0 for row in resting), default=0.0)
    hung = ", hung" if any(row.hung for row in rows) else ""
    return [
        _rate(rows),
        number(median(rows, lambda row: row.ttft_p50_ms), 0),
        number(median(rows, lambda row: row.ttft_p99_ms), 0),
        number(median(rows, lambda row: row.tpot_p50_ms), 1),
        number(median(rows, lambda row: row.itl_p99_ms), 0),
        number(median(rows, lambda row: row.engine_cpu_per_request_s), 3),
        number(median(rows, lambda row: row.router_cpu_per_request_s), 4),
        f"{failed} of {requests}{hung}",
        _share(rows, lambda row: row.handed_over),
        _share(rows, lambda row: row.same_answers),
        f"yes, {slowest:.1f} s" if len(resting) == len(rows) else "NO",
        number(median(rows, lambda row: row.others_cores), 2),
    ]


def _rate(rows: Sequence[Row]) -> str:
    rates = [row.req_per_s for row in rows if row.req_per_s is not None]
    middle = number(median(rows, lambda row: row.req_per_s), 2)
    return middle if len(rates) < 2 else f"{middle} ({min(rates):.2f} to {max(rates):.2f})"


def _share(rows: Sequence[Row], count: Callable[[Row], int | None]) -> str:
    known = [(value, row.requests) for row in rows if (value := count(row)) is not None]
    return f"{sum(value for value, _ in known)} of {sum(asked for _, asked in known)}" if known else "-"


def ratio_grid(found: Sequence[Ratio]) -> Grid:
    """A line per pair of targets and level."""
    return [
        [
            str(each.concurrency),
            f"{each.target} / {each.base}",
            *(number(value, 2) for value in each.by_metric.values()),
        ]
        for each in found
    ]


def short(row: Row) -> str:
    """A row in one line, as it comes."""
    known = dict(zip(HEAD[2:], _cells([row]), strict=True))
    shown = {name: value for name, value in known.items() if value != "-"}
    return f"{row.target} x{row.concurrency}: " + ", ".join(f"{name} {value}" for name, value in shown.items())
