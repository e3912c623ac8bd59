"""Families of samples as text for Prometheus: the classic format, or OpenMetrics on request.

Laws: a family is of a metric on the list (`names`), each of its label sets once; anything else raises `MetricError`
before a byte is written. Series are named alike in both formats. Only OpenMetrics has exemplars.

The way back (`samples`) is pure: lines that are not samples are skipped; a missing name has no value, never 0.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from kvbaton.observe.metrics.metric_names import BY_NAME, Metric, MetricError, MetricKind
from kvbaton.observe.metrics.metric_types import Exemplar, Histogram

CLASSIC = "text/plain; version=0.0.4; charset=utf-8"
OPENMETRICS = "application/openmetrics-text; version=1.0.0; charset=utf-8"
EXEMPLAR_LABEL = "transfer_id"
EXEMPLAR_CHARS_MAX = 128 - len(EXEMPLAR_LABEL)
"""By the standard all of an exemplar's labels together have at most 128 characters."""

NO_LABELS: Mapping[str, str] = {}

Labels = tuple[str, ...]
Value = float | Histogram


@dataclass(slots=True)
class Family:
    """One metric's samples, by the values of its labels."""

    metric: Metric
    samples: dict[Labels, Value] = field(default_factory=dict)
    exemplars: Mapping[Labels, Exemplar] = field(default_factory=dict)  # of a counter

    def __post_init__(self) -> None:
        metric = self.metric
        if BY_NAME.get(metric.name) is not metric:
            raise MetricError(f"{metric.name}: no such metric; list it in observe/metrics/metric_names.py")
        for labels, value in self.samples.items():
            if labels != metric.labelled(labels):
                raise MetricError(f"{metric.name}: {labels} is not within {metric.label_names}")
            if isinstance(value, Histogram) is not (metric.kind is MetricKind.HISTOGRAM):
                raise MetricError(f"{metric.name}: a {metric.kind} cannot be {value!r}")


def family(metric: Metric, samples: Mapping[Labels, Value]) -> Family:
    """Samples with unchecked labels: values that are not on a closed list are counted together as `other`."""
    found: dict[Labels, Value] = {}
    if metric.from_zero:
        found = dict.fromkeys(itertools.product(*(label.values for label in metric.labels)), 0)
    for labels, value in samples.items():
        checked = metric.labelled(labels)
        before = found.get(checked)
        if before is not None and isinstance(value, int | float) and isinstance(before, int | float):
            value += before
        found[checked] = value
    return Family(metric, found)


def wants_openmetrics(accept: str | None) -> bool:
    """Whether a scraper's Accept header requests it; all that can read it name it."""
    return accept is not None and "application/openmetrics-text" in accept


def content_type(openmetrics: bool) -> str:
    return OPENMETRICS if openmetrics else CLASSIC


def render(families: Iterable[Family], *, openmetrics: bool, labels: Mapping[str, str] = NO_LABELS) -> str:
    """The whole page. `labels`: of this process, on every series that has none of that name itself."""
    lines: list[str] = []
    seen: set[str] = set()
    for each in families:
        name = each.metric.name
        if name in seen:
            raise MetricError(f"{name}: exported twice")
        seen.add(name)
        if each.samples:
            lines += _heading(each.metric, openmetrics)
            common = [pair for pair in labels.items() if pair[0] not in each.metric.label_names]
            for values, value in sorted(each.samples.items()):
                pairs = [*common, *zip(each.metric.label_names, values, strict=True)]
                if isinstance(value, Histogram):
                    lines += _histogram(name, pairs, value, openmetrics)
                else:
                    tail = _exemplar(each.exemplars.get(values)) if openmetrics else ""
                    lines.append(f"{name}{_labels(pairs)} {_number(value)}{tail}")
    if openmetrics:
        lines.append("# EOF")
    return "\n".join(lines) + "\n"


def _heading(metric: Metric, openmetrics: bool) -> Iterator[str]:
    name, kind = metric.name, metric.kind.value
    if openmetrics:
        name = name.removesuffix("_total" if metric.kind is MetricKind.COUNTER else "_info")
    elif metric.kind is MetricKind.INFO:
        kind = "gauge"
    yield f"# HELP {name} {_escape(metric.help)}" if openmetrics else f"# HELP {name} {_plain(metric.help)}"
    yield f"# TYPE {name} {kind}"
    if openmetrics and metric.unit:
        yield f"# UNIT {name} {metric.unit}"


def _histogram(name: str, pairs: list[tuple[str, str]], value: Histogram, openmetrics: bool) -> Iterator[str]:
    running = 0
    for bound, count, example in zip((*value.bounds, math.inf), value.counts, value.exemplars, strict=True):
        running += count
        tail = _exemplar(example) if openmetrics else ""
        yield f"{name}_bucket{_labels([*pairs, ('le', _number(float(bound)))])} {running}{tail}"
    yield f"{name}_sum{_labels(pairs)} {_number(value.sum)}"
    yield f"{name}_count{_labels(pairs)} {running}"


def _exemplar(example: Exemplar | None) -> str:
    if example is None or len(example.transfer) > EXEMPLAR_CHARS_MAX:
        return ""
    labels = _labels([(EXEMPLAR_LABEL, example.transfer)])
    return f" # {labels} {_number(example.value)} {example.at:.3f}"


def _labels(pairs: list[tuple[str, str]]) -> str:
    return "{" + ",".join(f'{name}="{_escape(value)}"' for name, value in pairs) + "}" if pairs else ""


def _number(value: float) -> str:
    if isinstance(value, bool):
        return str(int(value))
    return "+Inf" if value == math.inf else repr(value)


def _plain(text: str) -> str:
    return text.replace("\\", "\\\\").replace("\n", "\\n")


def _escape(text: str) -> str:
    return _plain(text).replace('"', '\\"')


_SAMPLE = re.compile(r"^([A-Za-z_:][\w:]*)(?:\{(.*)\})? (\S+)$")
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')

Sample = tuple[str, Mapping[str, str], float]


def samples(text: str) -> list[Sample]:
    """Every line of Prometheus text: name, labels, value."""
    lines = map(_SAMPLE.match, text.splitlines())
    return [(found[1], dict(_LABEL.findall(found[2] or "")), float(found[3])) for found in lines if found is not None]


def total(found: Iterable[Sample], name: str) -> float | None:
    """The sum over a name's labels; None if there is no such name."""
    values = [value for each, _, value in found if each == name]
    return sum(values) if values else None


def figures(text: str) -> dict[str, float]:
    """By name, summed over labels, and by `name{labels}` as it is written."""
    found: dict[str, float] = {}
    for line in map(_SAMPLE.match, text.splitlines()):
        if line is not None:
            found[line[1]] = found.get(line[1], 0.0) + float(line[3])
            if line[2]:
                found[f"{line[1]}{{{line[2]}}}"] = float(line[3])
    return found
