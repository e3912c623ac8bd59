"""The figures of `kvbaton bench vllm` as grids of cells.

Laws: pure. Several rounds are shown as their median, the rate with its lowest and highest as
well, so that a reader sees how much a figure is worth. What was not measured is a dash.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from kvbaton_proof.bench.kit.lab_pages import Grid, number
from kvbaton_proof.bench.vllm.vllm_rows import METRICS, Ratio, Row, levels, median, of, targets

HEAD = (
    "at once", "target", "req/s", "TTFT p50 ms", "TTFT p99 ms", "TPOT p50 ms", "ITL p99 ms", "CPU s/req",
    "router CPU", "failed", "handed over", "same answers", "at rest", "others' cores",
)  # fmt: skip
RATIO_HEAD = ("at once", "target / base", *METRICS)
LEGEND = (
    "CPU s/req: of all engines of a target, per request that succeeded; router CPU likewise. handed over: requests "
    "whose KV D took from P. same answers: as the aggregated engine's, greedy, text by text. others' cores: what "
    "everybody else on this machine used meanwhile, the load generator excluded."
)


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
