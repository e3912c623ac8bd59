"""`/metrics` of a store and of a registry in a process of its own, made from their counters.

Law: pure; a counter that is missing counts as 0.

An embedded worker's `/metrics`, made from its `/stats` and its flights.

Law: a figure of `/stats` is a metric of its own name, or of another by `RENAMED`, or listed in `NOT_METRICS`; a test
checks this on a real worker.

What this process uses: CPU, memory, open files, and what Python's garbage collector has done.

Law: read from the kernel and the interpreter when asked, in microseconds; several processes can be shown as one.
"""

from __future__ import annotations

import contextlib
import gc
import os
import platform
import resource
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

import kvbaton
from kvbaton.observe.metrics import metric_names
from kvbaton.observe.metrics import metric_types as names
from kvbaton.observe.metrics.exposition import Family, Labels, Value, family, render
from kvbaton.observe.metrics.handoff_metrics import HandoffMetrics, connections
from kvbaton.observe.metrics.metric_names import BY_NAME, Metric, Where

_STARTED = time.time()
_FILES = "/proc/self/fd"
_GC = {
    "collections": names.GC_COLLECTIONS,
    "collected": names.GC_COLLECTED,
    "uncollectable": names.GC_UNCOLLECTABLE,
}


class ProcessFigures(msgspec.Struct, frozen=True):
    """Of one process, or of several as of one."""

    cpu_s: float = 0.0
    resident_bytes: int = 0
    virtual_bytes: int = 0
    open_files: int = 0
    max_files: int = 0
    collections: tuple[int, ...] = (0, 0, 0)  # by generation, as the next two
    collected: tuple[int, ...] = (0, 0, 0)
    uncollectable: tuple[int, ...] = (0, 0, 0)


def own() -> ProcessFigures:
    virtual = resident = open_files = 0
    with contextlib.suppress(OSError):  # without a free descriptor nothing can be opened: the other figures stand
        open_files = os.stat(_FILES).st_size or len(os.listdir(_FILES))  # Linux before 6.2 does not count them
        virtual, resident = map(int, Path("/proc/self/statm").read_text().split()[:2])
    page_bytes = os.sysconf("SC_PAGE_SIZE")
    return ProcessFigures(
        time.process_time(),
        resident * page_bytes,
        virtual * page_bytes,
        open_files,
        resource.getrlimit(resource.RLIMIT_NOFILE)[0],
        **{name: tuple(each[name] for each in gc.get_stats()) for name in _GC},
    )


def together(figures: Iterable[ProcessFigures]) -> ProcessFigures:
    """Of several as of one: sums, and of open files those of the process that is nearest to its limit."""
    found = list(figures)
    return ProcessFigures(
        sum(each.cpu_s for each in found),
        sum(each.resident_bytes for each in found),
        sum(each.virtual_bytes for each in found),
        max(each.open_files for each in found),
        min((each.max_files for each in found if each.max_files), default=0),
        **{name: tuple(map(sum, zip(*(getattr(each, name) for each in found), strict=True))) for name in _GC},
    )


def at_rest(figures: ProcessFigures) -> ProcessFigures:
    """What stays of a process that has ended: what it has used, not what it held."""
    return msgspec.structs.replace(figures, resident_bytes=0, virtual_bytes=0, open_files=0, max_files=0)


def process_families(where: Where, worker: str = "", figures: ProcessFigures | None = None) -> list[Family]:
    """Metrics of every process; by default of this one."""
    found = own() if figures is None else figures
    build = metric_names.BUILD.labelled((kvbaton.__version__, str(where), worker))
    version = platform.python_version_tuple()
    python = (platform.python_implementation(), *version, platform.python_version())
    values = {
        names.STARTED: round(_STARTED, 3),
        names.CPU: found.cpu_s,
        names.RESIDENT: found.resident_bytes,
        names.VIRTUAL: found.virtual_bytes,
        names.OPEN_FILES: found.open_files,
        names.MAX_FILES: found.max_files,
    }
    return [
        Family(metric_names.BUILD, {build: 1}),
        Family(names.PYTHON, {names.PYTHON.labelled(python): 1}),
        *(Family(metric, {(): value}) for metric, value in values.items()),
        *(
            Family(metric, {(str(age),): count for age, count in enumerate(getattr(found, name))})
            for name, metric in _GC.items()
        ),
    ]


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
