"""What a metric is made of: name, kind, labels, help, the processes that export it, and counts by size.

Laws: a label's values are a closed list, or counted by something that has a bound; a client cannot create a series.
A histogram is as many numbers as buckets, however much is observed, with the last example of each.

The metrics of a process of the operating system and of Python, by the names that Prometheus' own client gives them.

They are part of the list in `metric_names`, whose laws hold here too. A router of several processes shows them as one.
"""

from __future__ import annotations

import bisect
import enum
from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec

OTHER = "other"
"""Stands for a value that is not on a closed list."""
NONE = "none"
"""Stands for a value not yet decided at the end: Prometheus treats an empty label as absent."""


class MetricError(Exception):
    """A metric that is not listed, or not with these labels, was to be exported. A bug."""


class MetricKind(enum.StrEnum):
    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"
    INFO = "info"


class Where(enum.StrEnum):
    """Processes whose `/metrics` has it."""

    ROUTER = "router"
    WORKER = "worker"  # of the embedded engine
    VLLM = "vllm"
    STORE = "store"
    REGISTRY = "registry"  # in a process of its own; one within a router shows up at the router


class Label(msgspec.Struct, frozen=True):
    name: str
    values: tuple[str, ...] = ()  # (): not a closed list, but bounded where it is counted
    meaning: str = ""


class Metric(msgspec.Struct, frozen=True):
    name: str
    kind: MetricKind
    help: str
    where: tuple[Where, ...]
    labels: tuple[Label, ...] = ()
    buckets: tuple[float, ...] = ()
    from_zero: bool = False  # export all label values from the start: Prometheus misses a series' first increment

    @property
    def unit(self) -> str:
        base = self.name.removesuffix("_total")
        return next((unit for unit in ("seconds", "bytes") if base.endswith(f"_{unit}")), "")

    @property
    def label_names(self) -> tuple[str, ...]:
        return tuple(label.name for label in self.labels)

    @property
    def series(self) -> tuple[str, ...]:
        """The names that a scrape shows."""
        if self.kind is MetricKind.HISTOGRAM:
            return tuple(f"{self.name}_{part}" for part in ("bucket", "sum", "count"))
        return (self.name,)

    def labelled(self, values: tuple[str, ...]) -> tuple[str, ...]:
        """The values as they are exported; MetricError where there are more or fewer than labels."""
        if len(values) != len(self.labels):
            raise MetricError(f"{self.name}: {len(values)} label values, expected {self.label_names}")
        return tuple(_checked(label, value) for label, value in zip(self.labels, values, strict=True))


def _checked(label: Label, value: str) -> str:
    if not label.values or value in label.values or value == NONE:
        return value or NONE
    return OTHER if value else NONE


_OWN = (Where.ROUTER, Where.WORKER, Where.STORE, Where.REGISTRY)  # in vLLM the Prometheus client exports them
_GENERATION = Label("generation", ("0", "1", "2"), "of the garbage collector; 0 has the youngest objects")


def _gauge(name: str, text: str) -> Metric:
    return Metric(f"process_{name}", MetricKind.GAUGE, text, _OWN)


def _collected(name: str, text: str) -> Metric:
    return Metric(f"python_gc_{name}_total", MetricKind.COUNTER, text, _OWN, (_GENERATION,))


STARTED = _gauge("start_time_seconds", "Unix time at which this process started counting.")
CPU = Metric(
    "process_cpu_seconds_total", MetricKind.COUNTER,
    "CPU time, user and system, that this process has used; that of a router's processes is added up.", _OWN,
)  # fmt: skip
RESIDENT = _gauge(
    "resident_memory_bytes", "Memory of this process that is in RAM; that of a router's processes is added up."
)
VIRTUAL = _gauge("virtual_memory_bytes", "Address space of this process; that of a router's processes is added up.")
OPEN_FILES = _gauge(
    "open_fds", "Files and connections that this process has open; of a router's processes, that of the one with most.",
)  # fmt: skip
MAX_FILES = _gauge("max_fds", "Files and connections that this process, or each of a router's, may have open.")
GC_COLLECTIONS = _collected("collections", "Runs of Python's garbage collector.")
GC_COLLECTED = _collected("objects_collected", "Objects that Python's garbage collector freed.")
GC_UNCOLLECTABLE = _collected("objects_uncollectable", "Objects that Python's garbage collector could not free.")
PYTHON = Metric(
    "python_info", MetricKind.INFO, "Always 1; the labels have Python's implementation and version.", _OWN,
    tuple(Label(name) for name in ("implementation", "major", "minor", "patchlevel", "version")),
)  # fmt: skip

OF_PROCESSES = tuple(each for each in list(globals().values()) if isinstance(each, Metric))


class Exemplar(msgspec.Struct, frozen=True):
    """One counted value: it leads from a number to a handoff."""

    transfer: str
    value: float
    at: float  # Unix time


@dataclass(slots=True)
class Histogram:
    bounds: Sequence[float]  # rising; above the last there is one bucket more
    counts: list[int] = field(init=False)
    exemplars: list[Exemplar | None] = field(init=False)
    sum: float = 0.0

    def __post_init__(self) -> None:
        self.counts = [0] * (len(self.bounds) + 1)
        self.exemplars = [None] * (len(self.bounds) + 1)

    @property
    def count(self) -> int:
        return sum(self.counts)

    def observe(self, value: float, transfer: str = "", at: float = 0.0) -> None:
        index = bisect.bisect_left(self.bounds, value)
        self.counts[index] += 1
        self.sum += value
        if transfer:
            self.exemplars[index] = Exemplar(transfer, value, at)

    def add(self, other: Histogram) -> None:
        """Count what another has counted too; of two examples the later one stays."""
        for index, (count, example) in enumerate(zip(other.counts, other.exemplars, strict=True)):
            mine = self.exemplars[index]
            self.counts[index] += count
            self.exemplars[index] = example if mine is None or (example and example.at > mine.at) else mine
        self.sum += other.sum

    def copy(self) -> Histogram:
        other = Histogram(self.bounds)
        other.counts, other.exemplars, other.sum = list(self.counts), list(self.exemplars), self.sum
        return other
