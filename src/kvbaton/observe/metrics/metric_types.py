"""What a metric is made of: name, kind, labels, help, and the processes that export it.

Laws: a label's values are a closed list, or counted by something that has a bound; a client cannot create a series.
"""

from __future__ import annotations

import enum

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
