"""Families as text, read back by the parsers of Prometheus' own client library."""

from __future__ import annotations

import math

import pytest
from prometheus_client import parser
from prometheus_client.openmetrics.parser import text_string_to_metric_families as read_openmetrics

from kvbaton.observe.metrics import metric_names
from kvbaton.observe.metrics.exposition import (
    CLASSIC,
    EXEMPLAR_CHARS_MAX,
    OPENMETRICS,
    Family,
    content_type,
    family,
    render,
    wants_openmetrics,
)
from kvbaton.observe.metrics.metric_names import Metric, MetricError, MetricKind, Where
from kvbaton.observe.metrics.metric_types import Exemplar, Histogram


def some() -> list[Family]:
    times = Histogram(metric_names.STAGE_SECONDS.buckets)
    times.observe(0.003, "t" * 32, 1700000000.25)
    times.observe(500.0, "u" * 32, 1700000001.0)
    times.observe(0.0)
    ends = {("pull", "shm", "delivered"): 7, ("push", "tcp", "stale"): 1}
    exemplars = {("push", "tcp", "stale"): Exemplar("v" * 32, 1.0, 1700000002.0)}
    return [
        Family(metric_names.HANDOFFS, ends, exemplars),
        Family(metric_names.STAGE_SECONDS, {("copy", "pull", "shm"): times}),
        Family(metric_names.PINNED, {(): 3}),
        Family(metric_names.BUILD, {('1.0 "quoted" \\ and\nbroken', "router", "none"): 1}),
        Family(metric_names.LEASES, {}),
    ]


def test_openmetrics_is_read_back_with_its_exemplars() -> None:
    text = render(some(), openmetrics=True)
    found = {each.name: each for each in read_openmetrics(text)}
    assert set(found) == {"kvbaton_handoffs", "kvbaton_stage_seconds", "kvbaton_pinned_blocks", "kvbaton_build"}
    counted = {sample.labels["end"]: sample for sample in found["kvbaton_handoffs"].samples}
    assert (counted["delivered"].value, counted["delivered"].exemplar) == (7, None)
    exemplar = counted["stale"].exemplar
    assert exemplar.labels == {"transfer_id": "v" * 32} and float(exemplar.timestamp) == 1700000002.0
    stage = found["kvbaton_stage_seconds"]
    assert (stage.type, stage.unit) == ("histogram", "seconds")
    buckets = {sample.labels["le"]: sample for sample in stage.samples if sample.name.endswith("_bucket")}
    assert (buckets["0.0005"].value, buckets["0.005"].value, buckets["180.0"].value, buckets["+Inf"].value) == (
        1,
        2,
        2,
        3,
    )
    assert buckets["0.005"].exemplar.value == 0.003 and buckets["+Inf"].exemplar.labels["transfer_id"] == "u" * 32
    (build,) = found["kvbaton_build"].samples
    assert build.labels["version"] == '1.0 "quoted" \\ and\nbroken'


def test_the_classic_format_has_the_same_series_and_no_exemplars() -> None:
    text = render(some(), openmetrics=False)
    classic = {(s.name, *sorted(s.labels.items())): s.value
               for each in parser.text_string_to_metric_families(text) for s in each.samples}  # fmt: skip
    modern = {(s.name, *sorted(s.labels.items())): s.value
              for each in read_openmetrics(render(some(), openmetrics=True)) for s in each.samples}  # fmt: skip
    assert classic == modern and "transfer_id" not in text and "# EOF" not in text


def test_a_page_of_everything_can_be_read() -> None:
    for where in Where:
        families = []
        for metric in metric_names.of(where):
            labels = tuple(label.values[0] if label.values else "x" for label in metric.labels)
            families.append(
                Family(metric, {labels: Histogram(metric.buckets) if metric.kind is MetricKind.HISTOGRAM else 1})
            )
        assert len(list(read_openmetrics(render(families, openmetrics=True)))) == len(families)


def test_what_is_not_on_the_list_is_not_exported() -> None:
    with pytest.raises(MetricError, match="kvbaton_private: no such metric"):
        Family(Metric("kvbaton_private", MetricKind.GAUGE, "Nothing.", (Where.ROUTER,)), {(): 1})
    twin = Metric(metric_names.PINNED.name, MetricKind.GAUGE, "Another.", (Where.ROUTER,))
    with pytest.raises(MetricError, match="no such metric"):
        Family(twin, {(): 1})
    with pytest.raises(MetricError, match="is not within"):
        Family(metric_names.ENDS, {("a reason of tomorrow",): 1})
    with pytest.raises(MetricError, match="label values"):
        Family(metric_names.ENDS, {(): 1})
    with pytest.raises(MetricError, match="a histogram cannot be"):
        Family(metric_names.HANDOFF_SECONDS, {("pull", "shm"): 1.0})
    with pytest.raises(MetricError, match="exported twice"):
        render([Family(metric_names.PINNED, {(): 1}), Family(metric_names.PINNED, {(): 2})], openmetrics=False)


def test_unknown_values_are_added_up_and_known_ones_begin_at_zero() -> None:
    found = family(metric_names.ENDS, {("stale",): 2, ("of tomorrow",): 3, ("of next week",): 4}).samples
    assert (found[("stale",)], found[("other",)], found[("delivered",)]) == (2, 7, 0)
    assert family(metric_names.LEASES_REFUSED, {}).samples == {}


def test_an_exemplar_that_is_too_long_for_the_standard_is_left_out() -> None:
    for size, count in ((EXEMPLAR_CHARS_MAX, 1), (EXEMPLAR_CHARS_MAX + 1, 0)):
        histogram = Histogram(metric_names.HANDOFF_BYTES.buckets)
        histogram.observe(5.0, "x" * size, 1.0)
        text = render([Family(metric_names.HANDOFF_BYTES, {("pull", "shm"): histogram})], openmetrics=True)
        assert text.count("transfer_id") == count
        list(read_openmetrics(text))


def test_the_format_is_the_one_that_the_scraper_asks_for() -> None:
    prometheus = "application/openmetrics-text;version=1.0.0,text/plain;version=0.0.4;q=0.5,*/*;q=0.1"
    assert [wants_openmetrics(accept) for accept in (prometheus, "*/*", "", None)] == [True, False, False, False]
    assert (content_type(True), content_type(False)) == (OPENMETRICS, CLASSIC)


def test_a_histogram_counts_each_value_once_in_the_first_bucket_that_holds_it() -> None:
    histogram = Histogram((1.0, 2.0))
    for value in (0.5, 1.0, 1.5, 2.0, 2.5):
        histogram.observe(value)
    assert histogram.counts == [2, 2, 1] and histogram.count == 5 and math.isclose(histogram.sum, 7.5)
    other = histogram.copy()
    histogram.observe(9.0)
    assert other.counts == [2, 2, 1]
