"""Figures against numpy's, objectives, and the parts of a run with their sums."""

from __future__ import annotations

import random

import numpy as np
import pytest

from kvbaton_proof.bench.load.open_loop import Answer, Record
from kvbaton_proof.bench.load.request_plan import Ask, Piece
from kvbaton_proof.bench.serve.serve_parts import (
    ERROR_KINDS_MAX,
    Slo,
    Turn,
    Used,
    figures,
    part_of,
    quantiles,
    together,
)


def answered(ttft_s: float = 0.1, gaps_s: tuple[float, ...] = (0.02, 0.04), digest: bytes = b"x") -> Answer:
    return Answer(ttft_s, ttft_s + sum(gaps_s), gaps_s, len(gaps_s) + 1, digest)


def record(index: int, answer: Answer | None, error: str = "", tokens: int = 10) -> Record:
    ended_s = None if answer is None and not error else 1.0
    return Record(Ask(index, 0.0, (Piece("u", tokens),), 3), 0.0, ended_s, answer, error)


def turn(*records: Record, number: int = 1, seconds: float = 1.0, used: Used | None = None) -> Turn:
    return Turn(
        round=number, target="pull", records=records, seconds=seconds, planned=len(records), is_timed=False,
        used=used or Used(),
    )  # fmt: skip


def test_figures_are_numpys_and_nothing_has_none() -> None:
    rng = random.Random(1)
    values = [rng.lognormvariate(0, 1) for _ in range(5001)]
    found, ms = figures(values), np.array(values) * 1e3
    assert found is not None and found.count == 5001
    assert (found.p50_ms, found.p90_ms, found.p99_ms) == pytest.approx(np.percentile(ms, [50, 90, 99]), abs=1e-3)
    assert (found.mean_ms, found.max_ms) == pytest.approx((ms.mean(), ms.max()), abs=1e-3)
    assert quantiles(values) == pytest.approx(list(np.percentile(ms, range(101))), abs=1e-3)
    assert figures([]) is None and quantiles([]) == []


def test_objectives_are_met_by_whoever_is_within_all_of_them() -> None:
    assert Slo.parse("ttft=0.5,itl=0.05") == Slo(ttft=0.5, itl=0.05)
    assert Slo(ttft=0.1, tpot=0.03, itl=0.04, e2e=0.161).met_by(answered())
    assert not Slo(ttft=0.09).met_by(answered())
    assert not Slo(tpot=0.029).met_by(answered())
    assert not Slo(itl=0.039).met_by(answered()), "the longest gap counts"
    assert not Slo(e2e=0.15).met_by(answered())
    assert Slo(tpot=0.001, itl=0.001).met_by(answered(gaps_s=())), "one token has no gaps"
    assert str(Slo(ttft=0.5, itl=0.05)) == "ttft 0.5 s, itl 0.05 s"


@pytest.mark.parametrize("text", ["", "ttft", "ttft=", "ttft=x", "ttft=0", "ttft=-1", "ttft=inf", "ttft=nan", "p99=1"])
def test_an_objective_that_cannot_be_meant_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="expected"):
        Slo.parse(text)


def test_a_part_tells_rates_goodput_and_errors() -> None:
    right = [record(index, answered(ttft_s)) for index, ttft_s in enumerate((0.1, 0.15, 0.3))]
    under_way = record(4, None)
    found = part_of(turn(*right, record(3, None, "status 503: no_pair"), under_way, seconds=2.0), Slo(ttft=0.2))
    assert (found.right, found.failed, found.unfinished, dict(found.errors)) == (3, 1, 1, {"status 503: no_pair": 1})
    assert (found.requests_per_s, found.output_tokens_per_s, found.input_tokens_per_s) == (1.5, 4.5, 15.0)
    assert (found.good, found.goodput_per_s) == (2, 1.0)
    assert found.ttft is not None and found.ttft.p50_ms == 150.0
    assert found.itl is not None and found.itl.count == 6 and found.same_answers is None and found.together == 0.0


def test_nothing_right_has_no_figures_but_its_errors() -> None:
    found = part_of(turn(record(0, None, "no answer in time")), None)
    assert found.requests_per_s is None and found.ttft is None and found.good is None and found.failed == 1


def test_kinds_of_errors_are_bounded() -> None:
    found = part_of(turn(*(record(index, None, f"status {index}") for index in range(3 * ERROR_KINDS_MAX))), None)
    assert len(found.errors) == ERROR_KINDS_MAX + 1 and sum(found.errors.values()) == 3 * ERROR_KINDS_MAX


def test_answers_are_compared_one_by_one() -> None:
    first = turn(*(record(index, answered()) for index in range(3)))
    other = turn(*(record(index, answered(digest=digest)) for index, digest in ((1, b"x"), (2, b"y"), (7, b"z"))))
    found = part_of(other, None, first)
    assert (found.same_answers, found.compared_answers) == (1, 2)


def test_rounds_are_summed_and_percentiles_are_over_all_of_them() -> None:
    turns = [
        turn(record(0, answered(ttft_s)), number=number,
             used=Used(handed_over=1, engine_cpu_s=0.5, others_cores=0.2 * number))
        for number, ttft_s in ((1, 0.1), (2, 0.3))
    ]  # fmt: skip
    found = together(turns, [part_of(each, None) for each in turns], None)
    assert (found.round, found.sent, found.planned, found.right, found.seconds) == (0, 2, 2, 2, 2.0)
    assert found.ttft is not None and found.ttft.p50_ms == 200.0
    assert (found.used.handed_over, found.used.engine_cpu_s) == (2, 1.0)
    assert found.used.others_cores == pytest.approx(0.3) and found.used.router_cpu_s is None
