"""The simulator of queues: what it must say where arithmetic says it too, and the command beside a measured run."""

from __future__ import annotations

import contextlib
import io
import json
from pathlib import Path

import msgspec
import pytest

from kvbaton.cli.main import main
from kvbaton_proof.bench.load.request_plan import Ask, Piece
from kvbaton_proof.bench.serve import capacity_plan
from kvbaton_proof.bench.serve.capacity_plan import Beside, Speeds
from kvbaton_proof.bench.serve.serve_parts import Slo

SPEEDS = Speeds(
    prefill_tokens_s=1000.0, prefill_s=0.1, handoff_s=0.05, handoff_token_s=0.001, step_s=0.01, step_each_s=0.002
)
SLO = Slo(ttft=1.0, itl_p99=0.05)


def asks(count: int, tokens: int = 100, answer: int = 5) -> list[Ask]:
    return [Ask(at, float(at), (Piece(f"u{at}", tokens),), answer) for at in range(count)]


def test_one_request_takes_what_its_parts_take() -> None:
    (found,) = capacity_plan.played(asks(1), SPEEDS, 1, 1)
    assert found.ttft_s == pytest.approx(0.1 + 0.1 + 0.05 + 0.1 + 0.012)
    assert found.gaps_s == pytest.approx((0.012,) * 4) and found.tokens == 5


def test_a_cached_beginning_costs_p_nothing_and_the_way_all_of_it() -> None:
    shared = Piece("h1", 90)
    pair = [Ask(at, 10.0 * at, (shared, Piece(f"u{at}", 10)), 1) for at in range(2)]
    first, second = capacity_plan.played(pair, SPEEDS, 1, 1)
    assert first.ttft_s - second.ttft_s == pytest.approx(0.09)


def test_prompts_queue_at_p_and_streams_slow_each_other_at_d() -> None:
    at_once = [msgspec.structs.replace(each, due_s=0.0) for each in asks(4, answer=400)]
    alone, *_, last = capacity_plan.played(at_once, SPEEDS, 1, 1)
    assert last.ttft_s - alone.ttft_s == pytest.approx(0.6, abs=0.02), "three prompts before it"
    assert max(last.gaps_s) == pytest.approx(0.01 + 4 * 0.002)
    two_p = capacity_plan.played(at_once, SPEEDS, 2, 1)
    assert max(each.ttft_s for each in two_p) < last.ttft_s - 0.35
    two_d = capacity_plan.played(at_once, SPEEDS, 1, 2)
    assert max(max(each.gaps_s) for each in two_d) == pytest.approx(0.01 + 2 * 0.002)


def test_what_is_short_is_added_and_no_more() -> None:
    found = capacity_plan.needed(asks(60), 12.0, SPEEDS, SLO, 0.9)  # a P serves five a second
    assert found is not None and found.target == "3P1D" and found.share >= 0.9
    long = asks(60, tokens=10, answer=200)
    found = capacity_plan.needed(long, 8.0, SPEEDS, Slo(itl_p99=0.03), 0.9)  # ten at once are the most for a D
    assert found is not None and int(found.target[0]) <= 2 < int(found.target[2:-1])


def test_speeds_are_found_again_from_what_a_client_would_see() -> None:
    ttft = {n: 0.1 + n / 1000 + 0.05 + n * 0.001 + 0.012 for n in (50, 100, 400)}
    found = capacity_plan.fitted(
        ttft, {n: 0.1 + n / 1000 for n in (50, 100, 400)}, {n: 0.01 + 0.002 * n for n in (1, 4, 16)}
    )
    for name in ("prefill_tokens_s", "prefill_s", "handoff_s", "handoff_token_s", "step_s", "step_each_s"):
        assert getattr(found, name) == pytest.approx(getattr(SPEEDS, name), rel=0.01)


@pytest.mark.parametrize(
    ("predicted", "measured", "holds"), [(11.4, 10.0, True), (8.4, 10.0, False), (None, 10.0, False)]
)
def test_a_prediction_holds_within_its_bound_or_not(predicted: float | None, measured: float, holds: bool) -> None:
    assert Beside("stream", 0.9, predicted, measured).holds == holds


def plan(*words: str) -> tuple[int, dict[str, object]]:
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        status = main(["plan", "azure-sample", *words, "--json"])
    return status, json.loads(out.getvalue())


def test_a_prediction_beside_a_measured_run_that_it_misses_is_all_that_is_said(tmp_path: Path) -> None:
    speeds, report = tmp_path / "speeds.json", tmp_path / "small.json"
    speeds.write_bytes(msgspec.json.encode(SPEEDS))
    status, told = plan("--speeds", str(speeds), "--length-scale", "0.01", "--rate", "4")
    assert status == 0 and told["needed"] is not None and told["beside"] is None
    words = [
        "--compare",
        "pull",
        "--rates",
        "20",
        "--requests",
        "12",
        "--slo",
        "ttft=60s,itl=60s",
        "--trace",
        "azure-sample",
    ]
    with contextlib.redirect_stdout(io.StringIO()):
        assert main(["bench", "goodput", *words, "--out", str(tmp_path), "--name", "small"]) == 0
    status, told = plan("--speeds", str(speeds), "--beside", str(report))
    assert status == 1 and told["needed"] is None, "all were good at every rate: there is no capacity to compare"
    assert told["beside"] == {"target": "pull", "share": 0.9, "predicted": None, "measured": None}


def test_speeds_that_are_not_there_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "azure-sample", "--speeds", str(tmp_path / "none.json")]) == 2
    assert "write it with --measure URL" in capsys.readouterr().err
