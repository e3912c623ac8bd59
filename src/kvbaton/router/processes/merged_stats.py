"""Figures of a router's processes as those of one router: counters are summed, histograms merged, gauges summed.

Law: pure. What an ended process counted stays counted; what it had under way does not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import msgspec

from kvbaton.observe.metrics import process_metrics
from kvbaton.observe.metrics.metric_types import Histogram
from kvbaton.observe.metrics.process_metrics import ProcessFigures
from kvbaton.router.processes.process_link import CountedFigures, CountedTimes
from kvbaton.router.processes.shared_counts import summed
from kvbaton.router.router_stats import RouterStats, Waits

_NUMBERS = ("tickets", "discards", "dropped")
_COUNTERS = ("tries", "alone", "ends", "responses", "failures", "retries", "probes")
_OF_THE_ROOM = ("refused", "turned_away")
_OF_THE_WAITS = ("tokens", "legs", "turns", "moves", "moves_failed")


class MergedStats(RouterStats):
    """Of all processes, whenever somebody asks: who counts in time needs figures of now, not of the last page's."""

    def __init__(self, merge_told: Callable[[], None]) -> None:
        super().__init__()
        self._merge_told = merge_told
        self.processes = 0  # that serve
        self.restarts = 0
        self.used = ProcessFigures()

    @property
    def of_processes(self) -> ProcessFigures:
        self._merge_told()
        return self.used

    def as_numbers(self) -> dict[str, Any]:
        self._merge_told()
        return {**super().as_numbers(), "processes": self.processes, "process_restarts_total": self.restarts}


def counted(stats: RouterStats) -> CountedFigures:
    """One process's figures, as they are sent."""
    waits = stats.waits
    return CountedFigures(
        in_flight=stats.in_flight,
        held_bytes=stats.room.bytes,
        waiting=waits.waiting,
        numbers={name: getattr(stats, name) for name in _NUMBERS},
        counters={
            **{name: dict(getattr(stats, name)) for name in _COUNTERS},
            **{name: dict(getattr(stats.room, name)) for name in _OF_THE_ROOM},
            **{name: dict(getattr(waits, name)) for name in _OF_THE_WAITS},
        },
        waits=(waits.sum_s, waits.count),
        times=tuple(
            CountedTimes(each.metric.name, labels, list(found.counts), found.sum, list(found.exemplars))
            for each in waits.histograms
            for labels, found in each.counted().items()
        ),
        process=process_metrics.own(),
    )


def at_rest(figures: CountedFigures) -> CountedFigures:
    """What stays of a process that has ended."""
    rest = process_metrics.at_rest(figures.process)
    return msgspec.structs.replace(figures, in_flight=0, held_bytes=0, waiting=0, process=rest)


def merge(stats: RouterStats, figures: Iterable[CountedFigures]) -> None:
    """Put the sum of all into `stats`."""
    found = list(figures)
    stats.in_flight = sum(each.in_flight for each in found)
    stats.room.bytes = sum(each.held_bytes for each in found)
    for name in _NUMBERS:
        setattr(stats, name, sum(each.numbers.get(name, 0) for each in found))
    for name in _COUNTERS:
        setattr(stats, name, summed(each.counters.get(name, {}) for each in found))
    for name in _OF_THE_ROOM:
        setattr(stats.room, name, summed(each.counters.get(name, {}) for each in found))
    stats.waits = waits = Waits()
    waits.waiting = sum(each.waiting for each in found)
    waits.sum_s = sum(each.waits[0] for each in found)
    waits.count = sum(each.waits[1] for each in found)
    for name in _OF_THE_WAITS:
        setattr(waits, name, summed(each.counters.get(name, {}) for each in found))
    by_name = {each.metric.name: each for each in waits.histograms}
    for told in (times for each in found for times in each.times):
        histogram = Histogram(by_name[told.name].metric.buckets)
        histogram.counts, histogram.exemplars, histogram.sum = told.counts, told.exemplars, told.sum
        by_name[told.name].add(told.labels, histogram)


def together(figures: Iterable[CountedFigures]) -> CountedFigures:
    """Figures of several processes, or lives of one, as one's."""
    found, stats = list(figures), RouterStats()
    merge(stats, found)
    used = process_metrics.together(each.process for each in found)
    return msgspec.structs.replace(counted(stats), process=used)
