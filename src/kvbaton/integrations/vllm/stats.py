"""What vLLM's own metrics show of kvbaton: ends, bytes and stale commits, pins and leases, and the time of each stage.

Laws: scheduler and workers cross process borders with plain msgpack data. Counts are told as what was added since the
last time, so that nothing is counted twice and a restart starts at zero.
"""

from __future__ import annotations

import itertools
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats

from kvbaton.integrations.vllm import guard

if TYPE_CHECKING:
    from kvbaton.integrations.vllm.scheduler_side import SchedulerSide

GAUGES = {
    "pinned_blocks": "Blocks that kvbaton holds in this engine's cache, as source or target of handoffs.",
    "leases_held": "Prompts whose blocks are kept for a reader.",
    "intakes": "Prompts whose KV is on its way here, or claimed.",
    "quarantined_blocks": "Blocks of ended handoffs that something may still write to.",
    "oldest_lease_seconds": "How long the oldest lease has been held; max_hold_s ends it.",
    "store_pins": "Of the pinned blocks, those that are on their way to or from the shared store.",
}
COUNTERS = {
    "leases_total": "Leases granted.",
    "leases_expired_total": "Leases that ran out.",
    "commits_stale_total": "Copies that were refused because their source blocks had been reused.",
    "copies_total": "Copies that arrived whole.",
    "bytes_total": "Bytes that arrived whole.",
    "store_lookups_total": "Prompts that the shared store was asked for.",
    "store_gets_total": "Loads from the shared store that were begun.",
    "store_hits_blocks_total": "Blocks that came from the shared store.",
    "store_puts_total": "Prompts, or their ends, that were put into the shared store.",
    "store_errors_total": "Look-ups, loads and puts that failed or took too long; each costs a miss.",
    "second_source_total": "Handoffs that failed and whose prompt came from the shared store, as far as it had it.",
    "faults_total": "Exceptions caught in hooks and ports; each is a bug.",
}
STAGES = ("claim", "queue", "copy", "commit")
"""From asking to the grant, to blocks for it, to all bytes here, to P's word that they were right."""
STAGE_SECONDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30, 60, 180)
SIZES_BYTES = tuple(1 << power for power in range(12, 36, 2))
AS_NIXL = {
    "leases_expired_total": ("vllm:nixl_num_kv_expired_reqs", "Leases that ran out (as kvbaton:leases_expired)."),
    "failed_total": ("vllm:nixl_num_failed_transfers", "Handoffs that failed (as kvbaton:ends, all but delivered)."),
}
"""Names that dashboards for vLLM know, for what means the same."""
PASSAGES_MAX = 512
LABELLED = {
    "ends_total": "Handoffs that ended in this engine as decoder, by how.",
    "links_total": "Pairings that this engine made as decoder, by the data plane they took.",
    "planes_given_up_total": "Data planes that could not be opened to a source, so that another was taken.",
}
_FROM_LEDGER = {
    "leases": "leases_total",
    "leases_expired": "leases_expired_total",
    "commits.stale": "commits_stale_total",
    "copies": "copies_total",
    "bytes_moved": "bytes_total",
}
_ENDS = "ends."
_PLANES = ("links.", "planes_given_up.")


@dataclass
class BatonStats(KVConnectorStats):  # type: ignore[misc]
    """What was added since the last time, and how the gauges stand."""

    def __post_init__(self) -> None:
        if not self.data:
            self.reset()

    def reset(self) -> None:
        self.data: dict[str, Any] = {"counts": {}, "ends": {}, "gauges": {}, "stages": [], "planes": {}}

    @classmethod
    def of(cls, side: SchedulerSide) -> BatonStats | None:
        """What is new in this engine; None when nothing is."""
        presence = side.presence
        if presence is None:
            return None
        ledger = presence.node.ledger
        counts = _totals(dict(ledger.desk.counts), side.refused)
        counts["faults_total"] = sum(guard.faults.values()) + presence.loop.faults + sum(presence.node.faults.values())
        counts.update(side.stored.figures())
        fresh = {name: count - side.told[name] for name, count in counts.items() if count != side.told[name]}
        gauges = {
            "pinned_blocks": presence.doorway.pinned_blocks + side.stored.held_blocks,
            "leases_held": len(ledger.producer.leases),
            "intakes": len(ledger.consumer.by_handoff),
            "quarantined_blocks": ledger.consumer.quarantined_blocks,
            "oldest_lease_seconds": _oldest(ledger),
            "store_pins": presence.doorway.put_blocks + side.stored.held_blocks,
        }
        stages = _stages(ledger.desk.passages)
        if not fresh and not stages and gauges == side.gauges_told:
            return None
        side.told.update(fresh)
        side.gauges_told = gauges
        ends = {name.removeprefix(_ENDS): count for name, count in fresh.items() if name.startswith(_ENDS)}
        planes = {name: count for name, count in fresh.items() if name.startswith(_PLANES)}
        rest = {name: count for name, count in fresh.items() if not name.startswith((_ENDS, *_PLANES))}
        return cls({"counts": rest, "ends": ends, "gauges": gauges, "stages": stages, "planes": planes})

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        for part in ("counts", "ends", "planes"):
            for name, count in other.data.get(part, {}).items():
                self.data.setdefault(part, {})[name] = self.data[part].get(name, 0) + count
        self.data["gauges"].update(other.data.get("gauges", {}))
        self.data["stages"] = [*self.data["stages"], *other.data.get("stages", [])][-PASSAGES_MAX:]
        return self

    def reduce(self) -> dict[str, int | float]:
        ends = {f"ended {name}": count for name, count in self.data["ends"].items()}
        return {**self.data["counts"], **ends, **self.data.get("planes", {}), **self.data["gauges"]}

    def is_empty(self) -> bool:
        return not any(self.data.values())


def _oldest(ledger: Any) -> float:
    """Whole seconds, so that a gauge that only ages does not make news of every step."""
    begun = [lease.hold_until - ledger.desk.settings.max_hold_s for lease in list(ledger.producer.leases.values())]
    return float(int(time.monotonic() - min(begun))) if begun else 0.0


def _stages(passages: Any) -> list[list[float]]:
    """Seconds in each stage, and bytes, of handoffs that were delivered since the last time."""
    found: list[list[float]] = []
    while passages and len(found) < PASSAGES_MAX:
        passage = passages.popleft()
        if passage.end.delivered:
            copied = passage.copied or passage.ended
            edges = (passage.asked, passage.granted, passage.allocated, copied, passage.ended)
            spans = [max(0.0, later - sooner) for sooner, later in itertools.pairwise(edges)]
            found.append([*spans, float(passage.bytes)])
    return found


def _totals(ledger: Mapping[str, int], refused: Mapping[str, int]) -> Counter[str]:
    found: Counter[str] = Counter()
    for name, count in ledger.items():
        if name in _FROM_LEDGER:
            found[_FROM_LEDGER[name]] += count
        elif name.startswith((_ENDS, *_PLANES)):
            found[name] += count
    for reason, count in refused.items():
        found[_ENDS + reason] += count
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
        self._gauges = {
            name: self._gauge_cls(f"kvbaton:{name}", text, labelnames=labelnames, **_most_recent())
            for name, text in GAUGES.items()
        }
        self._counters = {
            name: self._counter_cls(f"kvbaton:{name}", text, labelnames=labelnames) for name, text in COUNTERS.items()
        }
        self._as_nixl = {
            name: self._counter_cls(theirs, text, labelnames=labelnames) for name, (theirs, text) in AS_NIXL.items()
        }
        self._stages = self._histogram_cls(
            "kvbaton:stage_seconds",
            "How long delivered handoffs took, by stage.",
            buckets=STAGE_SECONDS,
            labelnames=[*labelnames, "stage"],
        )
        self._copying = self._histogram_cls(
            "vllm:nixl_xfer_time_seconds",
            "How long copies took (as kvbaton:stage_seconds, copy).",
            buckets=STAGE_SECONDS,
            labelnames=labelnames,
        )
        self._sizes = self._histogram_cls(
            "vllm:nixl_bytes_transferred", "Bytes of a handoff.", buckets=SIZES_BYTES, labelnames=labelnames
        )
        self._ends = self._counter_cls("kvbaton:ends_total", LABELLED["ends_total"], labelnames=[*labelnames, "end"])
        self._planes = {
            front: self._counter_cls(f"kvbaton:{name}", LABELLED[name], labelnames=[*labelnames, "plane"])
            for front, name in zip(_PLANES, ("links_total", "planes_given_up_total"), strict=True)
        }

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        labels = [str(value) for value in self.per_engine_labelvalues[engine_idx]]
        for name, count in transfer_stats_data.get("counts", {}).items():
            if name in self._counters:
                self._counters[name].labels(*labels).inc(count)
            if name in self._as_nixl:
                self._as_nixl[name].labels(*labels).inc(count)
        for name, count in transfer_stats_data.get("ends", {}).items():
            self._ends.labels(*labels, name).inc(count)
            if name != "delivered":
                self._as_nixl["failed_total"].labels(*labels).inc(count)
        for name, count in transfer_stats_data.get("planes", {}).items():
            front = next(each for each in _PLANES if name.startswith(each))
            self._planes[front].labels(*labels, name.removeprefix(front)).inc(count)
        self._observe_stages(transfer_stats_data.get("stages", []), labels)
        for name, value in transfer_stats_data.get("gauges", {}).items():
            if name in self._gauges:
                self._gauges[name].labels(*labels).set(value)

    def _observe_stages(self, passages: list[list[float]], labels: list[str]) -> None:
        for *spans, size in passages:
            for stage, seconds in zip(STAGES, spans, strict=True):
                self._stages.labels(*labels, stage).observe(seconds)
            self._copying.labels(*labels).observe(spans[STAGES.index("copy")])
            self._sizes.labels(*labels).observe(size)


def _most_recent() -> dict[str, str]:
    return {"multiprocess_mode": "mostrecent"}
