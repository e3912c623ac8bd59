"""`/metrics` of a store and of a registry in a process of its own, made from their counters.

Law: pure; a counter that is missing counts as 0.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from kvbaton.observe.metrics import metric_names
from kvbaton.observe.metrics.exposition import Family, family
from kvbaton.observe.metrics.metric_names import Metric, Where
from kvbaton.observe.metrics.node_metrics import connections
from kvbaton.observe.metrics.process_metrics import process_families

Counts = Mapping[str, int]


def store_families(
    name: str, tiers: Mapping[str, tuple[int, int, int, int]], values: Counts, server: Counts, control: Counts
) -> list[Family]:
    """`tiers`: values, bytes, the most bytes and evictions, of memory and of a disk."""
    of_tiers = (
        metric_names.STORE_SERVER_VALUES,
        metric_names.STORE_SERVER_BYTES,
        metric_names.STORE_SERVER_MAX,
        metric_names.STORE_SERVER_EVICTED,
    )
    refused = {reason: server.get(reason, 0) for reason in ("forbidden", "malformed", "turned_away")}
    moved = {"in": server.get("bytes_in", 0), "out": server.get("bytes_out", 0)}
    lines = server.get("lines", 0)
    return [
        *process_families(Where.STORE, name),
        *(family(each, {(tier,): row[at] for tier, row in tiers.items()}) for at, each in enumerate(of_tiers)),
        _plain(metric_names.STORE_SERVER_HITS, values.get("hits", 0)),
        _plain(metric_names.STORE_SERVER_MISSES, values.get("misses", 0)),
        family(metric_names.STORE_SERVER_MOVED, {(way,): count for way, count in moved.items()}),
        _plain(metric_names.STORE_SERVER_LINES, lines),
        _plain(metric_names.STORE_SERVER_OPEN, server.get("lines_open", 0)),
        family(metric_names.STORE_SERVER_REFUSED, {(reason,): count for reason, count in refused.items()}),
        _plain(metric_names.FAULTS, server.get("faults", 0)),
        *_connections(control),
    ]


def registry_families(
    name: str,
    workers: Mapping[tuple[str, str], int],
    routers: int,
    is_complete: bool,
    counters: Counts,
    control: Counts,
) -> list[Family]:
    """`workers`: how many, by role and state."""
    return [
        *process_families(Where.REGISTRY, name),
        family(metric_names.REGISTRY_WORKERS, {(role, state): count for (role, state), count in workers.items()}),
        _plain(metric_names.REGISTRY_ROUTERS, routers),
        _plain(metric_names.REGISTRY_COMPLETE, int(is_complete)),
        _plain(metric_names.REGISTRY_MESSAGES, counters.get("messages", 0)),
        _plain(metric_names.REGISTRY_BAD, counters.get("bad_messages", 0)),
        *_connections(control),
    ]


def _connections(control: Counts) -> Iterable[Family]:
    return [_plain(metric_names.named(f"kvbaton_{name}"), count) for name, count in connections(control).items()]


def _plain(metric: Metric, value: int) -> Family:
    return family(metric, {(): value})
