"""What vLLM's own metrics show of kvbaton, by the names of `observe/metrics/metric_names.py`, with vLLM's labels.

Laws: scheduler and workers cross process borders with plain msgpack data. Counts are told as what was added since the
last time, so that nothing is counted twice and a restart starts at zero. vLLM's front end answers an exception with the
end of the API server: what is taken in there is guarded, and a figure that cannot be read costs itself alone. An
engine looks ten times a second and once before it rests, since a look takes as long as a small step.
"""

from __future__ import annotations

import itertools
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats

import kvbaton
from kvbaton.control.joining.join_client import AUTO
from kvbaton.control.keyring import data_parallel_name
from kvbaton.engines.side import guard
from kvbaton.engines.side.guard import guarded, returns
from kvbaton.engines.vllm import counting
from kvbaton.engines.vllm.counting import RequestStates, Tray
from kvbaton.node.prompt_account import PromptAccount
from kvbaton.observe.flight.flight_records import DELIVERED
from kvbaton.observe.metrics import handoff_metrics as node_figures
from kvbaton.observe.metrics import metric_names
from kvbaton.observe.metrics.metric_names import BY_NAME, Metric, MetricKind, Where

if TYPE_CHECKING:
    from kvbaton.engines.vllm.scheduler_side import SchedulerSide

AS_NIXL = {
    metric_names.LEASES_EXPIRED.name: ("vllm:nixl_num_kv_expired_reqs", "Leases that ran out."),
    metric_names.ENDS.name: (
        "vllm:nixl_num_failed_transfers",
        "Handoffs that failed: kvbaton_ends_total, all but delivered.",
    ),
}
"""Names that dashboards for vLLM know, for what means the same."""
AS_NIXL_HISTOGRAMS = {
    metric_names.STAGE_SECONDS.name: ("vllm:nixl_xfer_time_seconds", "How long copies took.", metric_names.SECONDS),
    metric_names.HANDOFF_BYTES.name: ("vllm:nixl_bytes_transferred", "Bytes of a handoff.", metric_names.SIZES),
}
ROLES = {"kv_producer": "prefill", "kv_consumer": "decode", "kv_both": "both"}
OWN_LABELS = 2
"""Role and name of the worker, after vLLM's own labels."""
UNNAMED = "none"
ROWS_MAX = 8192
EVERY_S = 0.1
"""How often an engine's own figures are looked at."""


class Turn:
    """When the figures are to be looked at. Steps come far more often, and an engine at rest takes none."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._next = 0.0
        self._rests = False
        self._passed = False  # a step has ended since the last look

    def comes(self) -> bool:
        """A step has ended: whether to look now."""
        now = self._clock()
        self._passed = not self._rests and now < self._next
        if not self._passed:
            self._next = now + EVERY_S
        return not self._passed

    def rests(self) -> bool:
        """The engine is about to rest. True: it must take one more step; that, and those still in flight, look."""
        self._rests = True
        return self._passed

    def works(self) -> None:
        self._rests = False


@dataclass(slots=True)
class Reporting:
    """One engine's figures on their way to vLLM: what it was told, and what it is still to be told."""

    turn: Turn = field(default_factory=Turn)
    tray: Tray = field(default_factory=Tray)  # ended handoffs
    prompts: PromptAccount = field(default_factory=PromptAccount)
    states: RequestStates = field(default_factory=RequestStates)
    refused: Counter[str] = field(default_factory=Counter)  # ends that never reached the ledger, by reason
    told: Counter[str] = field(default_factory=Counter)
    gauges_told: dict[str, float] = field(default_factory=dict)
    turn_figures: Callable[[], dict[str, Any]] = dict

    def came(self, request: Any) -> None:
        self.states.came(request)
        counting.came(self.prompts, request)

    def left(self, request_id: str) -> None:
        self.states.left(request_id)
        self.prompts.left(request_id)


@dataclass
class BatonStats(KVConnectorStats):  # type: ignore[misc]
    """What was added since the last time, and how the gauges stand."""

    def __post_init__(self) -> None:
        known = self.data if isinstance(self.data, dict) else {}
        self.reset()
        for part, empty in self.data.items():
            if isinstance(known.get(part), type(empty)):
                self.data[part] = type(empty)(known[part])  # vLLM shows one report to several readers

    def reset(self) -> None:
        self.data: dict[str, Any] = {"counts": {}, "gauges": {}, "rows": [], "worker": ""}

    @classmethod
    def of(cls, side: SchedulerSide) -> BatonStats | None:
        """What is new in this engine; None when nothing is, or it is not the turn."""
        presence, reporting = side.presence, side.reporting
        if presence is None or not reporting.turn.comes():
            return None
        node, ledger = presence.node, presence.node.ledger
        more: dict[str, Any] = {"data_refused_total": presence.links.data_refused(), **reporting.turn_figures()}
        if node.facts.role != "prefill":
            more |= reporting.prompts.figures()
        budget = dict(node.doorway.budget.figures(node.facts.blocks - 1))
        more["pin_refused_total"] = budget.pop("pin_refused_total")
        counts = _flat({**node_figures.counters(ledger, node.control.counters), **side.stored.figures(), **more})
        counts["faults_total"] = sum(guard.faults.values()) + node.loop.faults + sum(node.port_faults.values())
        for reason, count in reporting.refused.items():
            counts[f"ends_total {reason}"] += count
        told = reporting.told  # also what is zero is told once: Prometheus does not see a series' first step
        fresh = {name: count - told[name] for name, count in counts.items() if name not in told or count != told[name]}
        gauges = node_figures.gauges(ledger, time.monotonic(), node.facts.blocks)
        # whole seconds, so that a gauge that only ages does not make news of every step
        gauges["oldest_lease_seconds"] = float(int(gauges["oldest_lease_seconds"]))
        gauges["pinned_blocks"] = node.doorway.pinned_blocks + side.stored.held_blocks
        gauges["pinned_ratio"] = round(gauges["pinned_blocks"] / node.facts.blocks, 4)
        gauges["store_pins"] = node.doorway.put_blocks + side.stored.held_blocks
        gauges |= {**budget, "full": float(presence.is_full()), "turn_blocks": node.doorway.turn_blocks}
        gauges["mapped_bytes"] = presence.links.mapped_bytes()
        rows = reporting.tray.take()
        if not fresh and not rows and gauges == reporting.gauges_told:
            return None
        told.update(fresh)
        reporting.gauges_told = gauges
        return cls({"counts": fresh, "gauges": gauges, "rows": rows, "worker": str(node.peer.worker)})

    @guarded(lambda self, other: self)
    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        counts, more = self.data["counts"], BatonStats(other.data).data
        for name, count in more["counts"].items():
            if isinstance(count, int | float):
                counts[name] = counts.get(name, 0) + count
        self.data["gauges"].update(more["gauges"])
        self.data["worker"] = more["worker"] or self.data["worker"]
        self.data["rows"] = [*self.data["rows"], *more["rows"]][-ROWS_MAX:]
        return self

    def reduce(self) -> dict[str, int | float]:
        return {**self.data["counts"], **self.data["gauges"]}

    def is_empty(self) -> bool:
        return not any(self.data.values())


def _flat(figures: Mapping[str, int | Mapping[str, int]]) -> Counter[str]:
    """Figures by name, and by name and label (of two, with a colon between them) with a blank between them."""
    found: Counter[str] = Counter()
    for name, value in figures.items():
        if isinstance(value, Mapping):
            found.update({f"{name} {label}": count for label, count in value.items()})
        else:
            found[name] = value
    return found


class BatonMetrics(KVConnectorPromMetrics):  # type: ignore[misc]
    """The same, for Prometheus, under vLLM's own /metrics."""

    def __init__(
        self,
        vllm_config: Any,
        metric_types: Any,
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._counter_cls: Any = _without_created(self._counter_cls)
        self._histogram_cls: Any = _without_created(self._histogram_cls)
        self._made = {metric.name: self._make(metric, labelnames) for metric in metric_names.of(Where.VLLM)}
        self._nixl = {
            name: self._counter_cls(theirs, text, labelnames=labelnames) for name, (theirs, text) in AS_NIXL.items()
        }
        self._nixl |= {
            name: self._histogram_cls(theirs, text, buckets=buckets, labelnames=labelnames)
            for name, (theirs, text, buckets) in AS_NIXL_HISTOGRAMS.items()
        }
        config = vllm_config.kv_transfer_config
        self._role = ROLES.get(str(getattr(config, "kv_role", "")), "both")
        self._labels: dict[int, list[str]] = {}  # vLLM's, role and name, by engine
        name = str((config.kv_connector_extra_config or {}).get("name", ""))
        if name not in ("", AUTO):  # else the first report says it
            for engine in per_engine_labelvalues:
                self._begin(engine, data_parallel_name(name, engine) if len(per_engine_labelvalues) > 1 else name)

    def _begin(self, engine: int, worker: str) -> list[str]:
        """Series that are there before anything happened: Prometheus misses the first increment of any other."""
        theirs = [str(value) for value in self.per_engine_labelvalues[engine]]
        labels = self._labels[engine] = [*theirs, self._role, worker]
        build = metric_names.BUILD.labelled((kvbaton.__version__, str(Where.VLLM), worker))
        self._made[metric_names.BUILD.name].labels(*theirs, *build).set(1)
        for metric, own in _from_start():
            self._made[metric.name].labels(*labels, *own)
        return labels

    def _make(self, metric: Metric, labelnames: list[str]) -> Any:
        ours = [] if metric is metric_names.BUILD else ["role", "worker"]
        labels = [*labelnames, *ours, *metric.label_names]
        if metric.kind is MetricKind.COUNTER:
            return self._counter_cls(metric.name, metric.help, labelnames=labels)
        if metric.kind is MetricKind.HISTOGRAM:
            return self._histogram_cls(metric.name, metric.help, buckets=metric.buckets, labelnames=labels)
        return self._gauge_cls(metric.name, metric.help, labelnames=labels, multiprocess_mode="mostrecent")

    @guarded(returns(None))
    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        told = BatonStats(transfer_stats_data).data
        labels = self._labels.get(engine_idx) or self._begin(engine_idx, told["worker"] or UNNAMED)
        for key, count in told["counts"].items():
            self._count(key, count, labels)
        for name, value in told["gauges"].items():
            self._set(name, value, labels)
        for row in told["rows"]:
            self._add(row, labels)

    @guarded(returns(None))
    def _count(self, key: str, count: float, labels: list[str]) -> None:
        name, _, label = key.partition(" ")
        metric = BY_NAME[f"kvbaton_{name}"]
        own = metric.labelled(tuple(label.split(":", len(metric.labels) - 1))) if metric.labels else ()
        self._made[metric.name].labels(*labels, *own).inc(count)
        if metric.name in AS_NIXL and label != DELIVERED:
            self._nixl[metric.name].labels(*labels[:-OWN_LABELS]).inc(count)

    @guarded(returns(None))
    def _set(self, name: str, value: float, labels: list[str]) -> None:
        self._made[f"kvbaton_{name}"].labels(*labels).set(value)

    @guarded(returns(None))
    def _add(self, row: tuple[str, list[str], float], labels: list[str]) -> None:
        name, own, value = row
        metric = BY_NAME[name]
        series = self._made[metric.name].labels(*labels, *own)
        if metric.kind is MetricKind.COUNTER:
            series.inc(value)
            return
        series.observe(value)
        if metric is metric_names.HANDOFF_BYTES or (metric is metric_names.STAGE_SECONDS and own[0] == "copy"):
            self._nixl[metric.name].labels(*labels[:-OWN_LABELS]).observe(value)


def _without_created(kind: Any) -> Any:
    """The same kind of metric without the series `…_created`, which doubles a page and no rule here reads."""
    if not hasattr(kind, "_child_samples"):  # of another system, such as Ray's
        return kind

    def samples(self: Any) -> Any:
        return tuple(each for each in kind._child_samples(self) if each.name != "_created")

    return type(kind.__name__, (kind,), {"_child_samples": samples})


class NoMetrics(KVConnectorPromMetrics):  # type: ignore[misc]
    """In place of a page that could not be made."""

    def __init__(self) -> None:
        """What the base wants to know may be what could not be read."""

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Nobody looks."""


def _from_start() -> Iterator[tuple[Metric, tuple[str, ...]]]:
    """Series that are there before anything happened."""
    for metric in metric_names.of(Where.VLLM):
        if metric.kind in (MetricKind.COUNTER, MetricKind.GAUGE) and (not metric.labels or metric.from_zero):
            yield from ((metric, own) for own in itertools.product(*(label.values for label in metric.labels)))
