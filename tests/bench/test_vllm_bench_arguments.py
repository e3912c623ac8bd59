"""The command line of `kvbaton bench vllm`: what is refused, by name, before anything is started."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvbaton.cli import main as cli
from kvbaton.processes.operator_errors import CommandError
from kvbaton_proof.bench.vllm import vllm_targets
from kvbaton_proof.bench.vllm.vllm_rows import Level
from kvbaton_proof.cli import bench_vllm


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
    assert tuple(vllm_targets.TARGETS) == bench_vllm.TARGETS
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
