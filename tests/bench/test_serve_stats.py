"""Figures against numpy's, sampling that is even, objectives, and the sums of parts."""

from __future__ import annotations

import random

import numpy as np
import pytest

from kvbaton_proof.bench.serve.serve_meter import ERROR_KINDS_MAX, ERRORS_IN_A_ROW_MAX, Meter, Used, part, together
from kvbaton_proof.bench.serve.serve_stats import Reservoir, Slo, figures, quantiles
from kvbaton_proof.bench.serve.serve_stream import Told


def told(ttft_s: float = 0.1, gaps_s: tuple[float, ...] = (0.02, 0.04), digest: bytes = b"x") -> Told:
    return Told(ttft_s, ttft_s + sum(gaps_s), gaps_s, len(gaps_s) + 1, digest)


def reservoir(values: list[float], size: int = 1 << 17) -> Reservoir:
    found = Reservoir(size)
    for value in values:
        found.add(value)
    return found


def test_figures_are_numpys() -> None:
    rng = random.Random(1)
    values = [rng.lognormvariate(0, 1) for _ in range(5001)]
    found, ms = figures(reservoir(values)), np.array(values) * 1e3
    assert found is not None and found.count == 5001
    assert (found.p50_ms, found.p90_ms, found.p99_ms) == pytest.approx(np.percentile(ms, [50, 90, 99]), abs=1e-3)
    assert (found.mean_ms, found.max_ms) == pytest.approx((ms.mean(), ms.max()), abs=1e-3)
    shares = quantiles(reservoir(values))
    assert shares == pytest.approx(list(np.percentile(ms, range(101))), abs=1e-3) and shares == sorted(shares)


def test_one_value_is_all_its_figures_and_none_has_none() -> None:
    found = figures(reservoir([0.5]))
    assert found is not None and (found.mean_ms, found.p50_ms, found.p99_ms, found.max_ms) == (500, 500, 500, 500)
    assert figures(Reservoir()) is None and quantiles(Reservoir()) == []


def test_a_full_reservoir_stays_in_its_bound_and_keeps_an_even_sample() -> None:
    found = reservoir([float(each) for each in range(50_000)], size=2000)
    assert len(found.kept) == 2000 and found.count == 50_000
    assert np.mean(found.kept) == pytest.approx(25_000, rel=0.05)
    early = sum(value < 5000 for value in found.kept)
    assert 140 <= early <= 260, "a tenth of the sample is of the first tenth"


def test_objectives_are_met_by_whoever_is_within_all_of_them() -> None:
    assert Slo.parse("ttft=0.5,itl=0.05") == Slo(ttft=0.5, itl=0.05)
    assert Slo(ttft=0.1, tpot=0.03, itl=0.04, e2e=0.161).met_by(told())
    assert not Slo(ttft=0.09).met_by(told())
    assert not Slo(tpot=0.029).met_by(told())
    assert not Slo(itl=0.039).met_by(told()), "the longest gap counts"
    assert not Slo(e2e=0.15).met_by(told())
    assert Slo(tpot=0.001, itl=0.001).met_by(told(gaps_s=())), "one token has no gaps"
    assert str(Slo(ttft=0.5, itl=0.05)) == "ttft 0.5 s, itl 0.05 s"


@pytest.mark.parametrize("text", ["", "ttft", "ttft=", "ttft=x", "ttft=0", "ttft=-1", "ttft=inf", "ttft=nan", "p99=1"])
def test_an_objective_that_cannot_be_meant_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="expected"):
        Slo.parse(text)


def test_a_part_tells_rates_goodput_and_errors() -> None:
    meter = Meter(Slo(ttft=0.2))
    meter.sent, meter.planned = 5, 5
    for index, ttft_s in enumerate((0.1, 0.15, 0.3)):
        meter.answered(index, 10, told(ttft_s))
    meter.failed("status 503: no_pair")
    meter.seconds = 2.0
    meter.close()
    found = part(1, "pull", meter, Slo(ttft=0.2), Used(), None)
    assert (found.right, found.failed, found.unfinished, dict(found.errors)) == (3, 1, 1, {"status 503: no_pair": 1})
    assert (found.requests_per_s, found.output_tokens_per_s, found.input_tokens_per_s) == (1.5, 4.5, 15.0)
    assert (found.good, found.goodput_per_s) == (2, 1.0)
    assert found.ttft is not None and found.ttft.p50_ms == 150.0
    assert found.itl is not None and found.itl.count == 6 and found.same_answers is None and found.together == 0.0


def test_nothing_right_has_no_figures_but_its_errors() -> None:
    meter = Meter()
    meter.sent = 1
    meter.failed("no answer in time")
    found = part(1, "pull", meter, None, Used(), None)
    assert found.requests_per_s is None and found.ttft is None and found.good is None and found.failed == 1


def test_answers_are_compared_one_by_one() -> None:
    first, other = Meter(), Meter()
    for index in range(3):
        first.answered(index, 1, told())
    for index, digest in ((1, b"x"), (2, b"y"), (7, b"z")):
        other.answered(index, 1, told(digest=digest))
    found = part(1, "pull", other, None, Used(), first)
    assert (found.same_answers, found.compared_answers) == (1, 2)


def test_rounds_are_summed_and_percentiles_are_over_all_of_them() -> None:
    pool, parts = Meter(), []
    for number, ttft_s in ((1, 0.1), (2, 0.3)):
        meter = Meter()
        meter.sent, meter.planned, meter.seconds = 1, 1, 1.0
        meter.answered(0, 5, told(ttft_s))
        used = Used(handed_over=1, engine_cpu_s=0.5, others_cores=0.2 * number)
        parts.append(part(number, "pull", meter, None, used, None))
        pool.add(meter)
    found = together(parts, pool, None)
    assert (found.round, found.sent, found.planned, found.right, found.seconds) == (0, 2, 2, 2, 2.0)
    assert found.ttft is not None and found.ttft.p50_ms == 200.0
    assert (found.used.handed_over, found.used.engine_cpu_s) == (2, 1.0)
    assert found.used.others_cores == pytest.approx(0.3) and found.used.router_cpu_s is None


def test_kinds_of_errors_are_bounded_and_a_dead_server_is_given_up() -> None:
    meter = Meter()
    for number in range(3 * ERROR_KINDS_MAX):
        meter.failed(f"status {number}")
    assert len(meter.errors) == ERROR_KINDS_MAX + 1 and meter.errors.total() == 3 * ERROR_KINDS_MAX
    for _ in range(ERRORS_IN_A_ROW_MAX):
        meter.failed("no answer in time")
    assert meter.is_hopeless
    meter.answered(0, 1, told())
    assert not meter.is_hopeless
