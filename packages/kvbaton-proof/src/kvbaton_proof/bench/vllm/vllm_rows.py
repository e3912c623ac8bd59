"""The result of one level of load on one target: parsed from the load generator, judged, and compared with others.

Laws: pure. A request has succeeded only if its answer has as many tokens as were asked for: `vllm bench serve` itself
counts a stream that breaks after its first token as completed. A number that is not there is None, never 0.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

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
