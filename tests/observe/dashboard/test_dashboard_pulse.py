"""Three minutes in buckets."""

from __future__ import annotations

import itertools
import random

import pytest

from kvbaton.observe.dashboard.pulse import BUCKET_S, BUCKETS, CHUNKS, SAMPLES_MAX, Pulse, Sample, outcome, percentile


def test_percentiles_are_numbers_that_were_there() -> None:
    values = [float(n) for n in range(1, 101)]
    random.Random(1).shuffle(values)
    assert percentile(values, 0.5) == 50.0
    assert percentile(values, 0.95) == 95.0
    assert percentile(values, 1.0) == 100.0
    assert percentile([7.0], 0.99) == 7.0
    assert percentile([], 0.5) is None


def test_a_sample_is_bounded_and_spread_over_all_that_came() -> None:
    sample = Sample()
    for n in range(10_000):
        sample.add(float(n))
    assert sample.count == 10_000
    assert len(sample.kept) == SAMPLES_MAX
    assert min(sample.kept) >= 10_000 - 2 * SAMPLES_MAX  # every place was written to again


def test_what_is_no_time_is_not_taken() -> None:
    sample = Sample()
    for value in (float("nan"), float("inf"), -1.0):
        sample.add(value)
    assert sample.count == 0


def test_rates_are_of_whole_buckets_that_are_past() -> None:
    pulse = Pulse()
    for second in range(100, 120):
        pulse.ended(float(second), 5, 0)
        pulse.moved(float(second), 1000.0)
        pulse.counted(float(second), second + 1.0, {CHUNKS: 3, "2xx": 5, "429": 2})
    assert pulse.rates(120.0) == (5.0, 1000.0, 3.0)
    assert pulse.answers(120.0) == {"2xx": 5.0, "4xx": 2.0, "5xx": 0.0, "gone": 0.0}
    pulse.ended(120.5, 1000, 0)
    assert pulse.rates(121.0)[0] == 5.0


def test_a_rate_of_what_has_just_begun_is_not_thinned_by_the_time_before() -> None:
    pulse = Pulse()
    for second in range(100, 104):
        pulse.ended(float(second), 8, 0)
    assert pulse.rates(104.0)[0] == 8.0


def test_history_has_gaps_before_the_first_and_zeros_after() -> None:
    pulse = Pulse()
    pulse.ended(1000.0, 4, 1)
    pulse.first_byte(1000.0, 0.02)
    history = pulse.history(1006.0)
    assert all(len(values) == BUCKETS - 1 for values in history.values())
    assert history["handoffs"][-3:] == [2.0, 0.0, 0.0]
    assert history["delivered"][-3:] == [0.75, None, None]  # no share of nothing
    assert history["ttft_ms"][-3:] == [20.0, None, None]
    assert history["in_flight"][-3:] == [None, None, None]  # nobody looked
    assert history["handoffs"][-4] is None
    assert Pulse().history(1006.0)["bytes"] == [None] * (BUCKETS - 1)


def test_history_has_failures_that_either_side_saw() -> None:
    pulse = Pulse()
    pulse.ended(1000.0, 4, 1)
    for _ in range(2):
        pulse.lost(1000.0)
    pulse.ended(1002.0, 4, 2)
    pulse.lost(1002.0)
    pulse.lost(1004.0)
    assert [outcome([bucket]) for bucket in pulse._buckets] == [(5, 2), (4, 2), (1, 1)]
    assert pulse.history(1006.0)["delivered"][-3:] == [0.6, 0.5, 0.0]


@pytest.mark.parametrize("step_s", [0.7, 1.3, 4.9])
def test_an_even_flow_is_an_even_line_however_often_somebody_looks(step_s: float) -> None:
    """Looks and buckets do not keep step: a look's count in one bucket made a saw of it, with false peaks."""
    pulse = Pulse()
    looks = [1000.0 + n * step_s for n in range(int(60 / step_s))]
    for since, until in itertools.pairwise(looks):
        pulse.counted(since, until, {CHUNKS: 100 * step_s, "5xx": 10 * step_s})
    history = pulse.history(looks[-1])
    for name, per_s in (("tokens", 100.0), ("errors", 10.0), ("requests", 10.0)):
        known = [value for value in history[name] if value is not None]
        assert len(known) >= 24 and known == [pytest.approx(per_s)] * len(known), name


def test_how_many_are_in_flight_is_what_was_seen_then_and_nothing_where_nobody_looked() -> None:
    pulse = Pulse()
    pulse.ended(1000.0, 1, 0)
    pulse.in_flight(1002.0, 7)
    pulse.in_flight(1002.5, 5)
    assert pulse.history(1008.0)["in_flight"][-5:] == [None, None, 7, None, None]


def test_old_buckets_are_forgotten() -> None:
    pulse = Pulse()
    for number in range(1000):
        pulse.ended(number * BUCKET_S, 1, 0)
        pulse.staged(number * BUCKET_S, {"copy": 0.001, "unheard of": 1.0})
    assert len(pulse._buckets) == BUCKETS
    assert len(pulse.minute(999 * BUCKET_S)) == 30


def test_what_comes_late_counts_for_its_own_time() -> None:
    pulse = Pulse()
    for second in range(100, 110):
        pulse.ended(float(second), 0, 0)
    pulse.staged(103.0, {"copy": 0.5})
    bucket = next(each for each in pulse._buckets if each.number == int(103.0 // BUCKET_S))
    assert bucket.stages["copy"].kept == [0.5]
    pulse.staged(1.0, {"copy": 0.25})  # before everything
    assert pulse._buckets[0].stages["copy"].kept == [0.25]
