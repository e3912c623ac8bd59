"""What a process uses: as Prometheus' own client tells it of this very process, and of several as of one."""

from __future__ import annotations

import gc
import os

import pytest
from prometheus_client import generate_latest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as read

from kvbaton.observe.metrics import metric_names, process_metrics
from kvbaton.observe.metrics.exposition import figures, render
from kvbaton.observe.metrics.metric_names import Where
from kvbaton.observe.metrics.process_metrics import ProcessFigures, process_families, registry_families, store_families


def theirs() -> dict[str, float]:
    return figures(generate_latest().decode())


@pytest.mark.parametrize("where", [Where.ROUTER, Where.WORKER, Where.STORE, Where.REGISTRY])
def test_every_series_that_prometheus_own_client_has_is_there(where: Where) -> None:
    listed = {series for metric in metric_names.of(where) for series in metric.series}
    assert {name for name in theirs() if "{" not in name} <= listed


def test_the_values_are_those_that_prometheus_own_client_tells() -> None:
    gc.collect()
    gc.disable()  # nothing is collected between the two
    try:
        before, mine, after = theirs(), figures(render(process_families(Where.STORE), openmetrics=False)), theirs()
    finally:
        gc.enable()
    assert set(before) <= set(mine), "with the same labels"
    assert before["process_cpu_seconds_total"] <= mine["process_cpu_seconds_total"] + 0.05  # theirs are in ticks
    assert mine["process_cpu_seconds_total"] <= after["process_cpu_seconds_total"] + 0.05
    for name in before:
        if name.startswith("python_") or name == "process_max_fds":
            assert mine[name] == before[name], name
    for name in ("process_resident_memory_bytes", "process_virtual_memory_bytes"):
        assert mine[name] == pytest.approx(before[name], rel=0.1)
    assert abs(mine["process_open_fds"] - before["process_open_fds"]) <= 1  # the one that lists them


def test_files_that_are_opened_are_counted() -> None:
    before = process_metrics.own().open_files
    files = [os.open("/dev/null", os.O_RDONLY) for _ in range(40)]
    try:
        assert process_metrics.own().open_files - before == 40
    finally:
        for each in files:
            os.close(each)


def test_several_processes_are_shown_as_one_and_what_ended_ones_used_stays() -> None:
    one = ProcessFigures(2.0, 100, 200, 30, 1024, (5, 2, 1), (50, 20, 10), (0, 0, 1))
    gone = process_metrics.at_rest(ProcessFigures(7.0, 900, 900, 900, 1024, (1, 1, 1), (1, 1, 1), (0, 0, 0)))
    found = process_metrics.together([one, ProcessFigures(1.0, 50, 60, 40, 2048), gone])
    assert (found.cpu_s, found.resident_bytes, found.virtual_bytes) == (10.0, 150, 260)
    assert (found.open_files, found.max_files) == (40, 1024), "so that their ratio alarms when one is near its limit"
    assert (found.collections, found.collected, found.uncollectable) == ((6, 3, 2), (51, 21, 11), (0, 0, 1))


def test_stores_and_registries_have_them_too() -> None:
    store = render(store_families("s", {}, {}, {}, {}), openmetrics=True)
    registry = render(registry_families("r", {}, 0, True, {}, {}), openmetrics=True)
    for page in (store, registry):
        shown = {sample.name for each in read(page) for sample in each.samples}
        assert {name for name in theirs() if "{" not in name} <= shown
