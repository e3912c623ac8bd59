"""An embedded worker's `/metrics`, made from its `/stats` and its flights.

Law: a figure of `/stats` is a metric of its own name, or of another by `RENAMED`, or listed in `NOT_METRICS`; a test
checks this on a real worker.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from kvbaton.observe.metrics import metric_names
from kvbaton.observe.metrics.exposition import Family, Labels, Value, family, render
from kvbaton.observe.metrics.handoff_metrics import HandoffMetrics
from kvbaton.observe.metrics.metric_names import BY_NAME, Metric, Where
from kvbaton.observe.metrics.process_metrics import process_families

RENAMED: Mapping[str, Metric] = {
    "pins": metric_names.PINNED,
    "leases": metric_names.LEASES_HELD,
    "bytes_moved_total": metric_names.BYTES,
    "blocks": metric_names.ENGINE_BLOCKS,
    "free_blocks": metric_names.ENGINE_FREE_BLOCKS,
}
_STATES = ("running", "waiting", "loading")
NOT_METRICS = frozenset(
    {"worker", "role", "incarnation", "planes", "versions", "links", "handoffs_total", "delivered_total", *_STATES}
)
"""Texts, what is told in another form below, and sums of other figures."""


def render_worker(
    stats: Mapping[str, Any], handoffs: HandoffMetrics | None, openmetrics: bool, more: Sequence[Family] = ()
) -> str:
    """The page, each series with the worker's name and role. `stats` may lack figures; what is there is shown."""
    labels = {name: str(stats[name]) for name in ("role", "worker") if stats.get(name)}
    return render([*worker_families(stats, handoffs), *more], openmetrics=openmetrics, labels=labels)


def worker_families(stats: Mapping[str, Any], handoffs: HandoffMetrics | None) -> list[Family]:
    found: dict[str, Family] = {}
    for key, value in stats.items():
        metric = RENAMED.get(key) or BY_NAME.get(f"kvbaton_{key}")
        if metric is not None and key not in NOT_METRICS:
            found[metric.name] = family(metric, samples(metric, value))
    states: dict[Labels, Value] = {(state,): stats[state] for state in _STATES if state in stats}
    links: Counter[Labels] = Counter((str(plane),) for plane in dict(stats.get("links", {})).values())
    found[metric_names.ENGINE_REQUESTS.name] = family(metric_names.ENGINE_REQUESTS, states)
    found[metric_names.LINKS.name] = family(metric_names.LINKS, {**links})
    told = handoffs.families() if handoffs is not None else []
    return [*process_families(Where.WORKER, str(stats.get("worker", ""))), *found.values(), *told]


def samples(metric: Metric, value: Any) -> dict[Labels, Value]:
    """A figure: a number, or numbers by label; a key for two labels has both separated by a colon."""
    if isinstance(value, Mapping):
        count = len(metric.labels)
        return {tuple(str(key).split(":", max(count - 1, 0))): each for key, each in value.items()}
    return {(): value} if isinstance(value, int | float) else {}
