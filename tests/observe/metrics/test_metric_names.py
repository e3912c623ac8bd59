"""The one list of names: it follows Prometheus' conventions, and the pages made of it are as it is."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from kvbaton.observe.metrics import metric_names
from kvbaton.observe.metrics.metric_names import BY_NAME, METRICS, Metric, MetricError, MetricKind, Where

ROOT = Path(__file__).parents[3]
sys.path.insert(0, str(ROOT / "tools" / "docs"))

import grafana_dashboard  # noqa: E402
import metrics_docs  # noqa: E402


def test_no_name_is_used_twice_in_either_format() -> None:
    assert len(BY_NAME) == len(METRICS) > 50
    families = [re.sub(r"_(total|info)$", "", metric.name) for metric in METRICS]
    assert sorted(set(families)) == sorted(families), "OpenMetrics drops the suffix"
    series = [name for metric in METRICS for name in metric.series]
    assert len(set(series)) == len(series)


@pytest.mark.parametrize("metric", METRICS, ids=lambda metric: metric.name)
def test_names_follow_the_conventions(metric: Metric) -> None:
    assert re.fullmatch(r"(kvbaton|process|python)_[a-z]+(_[a-z]+)*", metric.name)
    assert metric.name.endswith("_total") == (metric.kind is MetricKind.COUNTER)
    assert metric.name.endswith("_info") == (metric.kind is MetricKind.INFO)
    assert bool(metric.buckets) == (metric.kind is MetricKind.HISTOGRAM)
    assert list(metric.buckets) == sorted(set(metric.buckets))
    assert metric.kind is not MetricKind.HISTOGRAM or metric.unit
    assert metric.help.endswith(".") and metric.where
    assert not {"le", "quantile", "job", "instance"} & set(metric.label_names)
    if metric.from_zero:
        assert all(label.values for label in metric.labels)


def test_values_that_are_not_on_a_closed_list_are_counted_together() -> None:
    assert metric_names.HANDOFFS.labelled(("pull", "shm", "stale")) == ("pull", "shm", "stale")
    assert metric_names.HANDOFFS.labelled(("", "", "a reason of tomorrow")) == ("none", "none", "other")
    assert metric_names.ROUTER_REQUESTS.labelled(("worker_timeout",)) == ("worker_timeout",)
    with pytest.raises(MetricError, match="1 label values"):
        metric_names.HANDOFFS.labelled(("pull",))


def test_a_name_that_is_not_listed_is_an_error() -> None:
    assert metric_names.named("kvbaton_pinned_blocks") is metric_names.PINNED
    with pytest.raises(MetricError, match="kvbaton_nonsense: no such metric"):
        metric_names.named("kvbaton_nonsense")


def test_every_one_is_told_by_somebody_and_in_one_section_of_the_page() -> None:
    assert {metric.name for where in Where for metric in metric_names.of(where)} == set(BY_NAME)
    reference = metrics_docs.reference()
    assert all(f"\n| `{metric.name}" in reference for metric in METRICS)


def test_the_reference_page_is_as_the_list_is() -> None:
    page = metrics_docs.PAGE.read_text()
    assert page == metrics_docs.page(page), "run: .venv/bin/python tools/docs/metrics_docs.py"
    for metric in METRICS:
        assert f"| `{metric.name}" in page


def test_the_dashboard_is_as_its_tool_makes_it() -> None:
    assert grafana_dashboard.PAGE.read_text() == grafana_dashboard.text(), "run: python tools/docs/grafana_dashboard.py"


def test_no_other_name_is_in_documents_rules_or_code() -> None:
    known = {name for metric in METRICS for name in metric.series} | set(BY_NAME)
    pages = [*(ROOT / "docs").glob("*.md"), *(ROOT / "deploy").rglob("*.yml"), *(ROOT / "deploy").rglob("*.json")]
    wrong = [
        (path.name, name)
        for path in pages
        for name in re.findall(r"\bkvbaton_[a-z_]+_(?:total|seconds|bytes|blocks|info)\b", path.read_text())
        if name not in known
    ]
    assert wrong == []
    assert not [path for path in pages if re.search(r"\bkvbaton:[a-z]+_[a-z]", path.read_text())]
