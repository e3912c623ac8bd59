"""`kvbaton bench store`: figures of real bytes, a verdict that can be bad, and a page."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import msgspec
import pytest

from kvbaton.cli import main as cli
from kvbaton.store.memory_backend import MemoryBackend
from kvbaton.testing.store_harness import FaultyBackend
from kvbaton_proof.bench.kit.run_facts import Stopwatch
from kvbaton_proof.bench.store.store_moves import SHAPES, Shape, measure, settled
from kvbaton_proof.bench.store.store_page import StoreReport, Ttft, complaints, findings

SMALL = Shape(8, 3, 1 << 10)


def test_values_are_put_by_one_and_got_by_another_and_every_byte_is_compared() -> None:
    memory = MemoryBackend(1 << 24)
    row = measure("memory", FaultyBackend(memory), FaultyBackend(memory), SMALL, rounds=2)
    assert (row.backend, row.shape) == ("memory", "8 × (3 × 1 KiB)")
    assert row.put_gb_s > 0 and row.get_gb_s > 0 and row.exists_us_per_key > 0
    assert (row.hit_ratio, row.wrong_bytes) == (1.0, 0)
    assert len(memory) == 0, "what was measured is dropped"


def test_the_shapes_are_named() -> None:
    assert [str(shape) for shape in SHAPES] == ["64 × 256 KiB", "64 × 1 MiB", "64 × (64 × 16 KiB)"]


def test_a_store_that_loses_values_is_seen() -> None:
    memory = MemoryBackend(1 << 24)
    target = FaultyBackend(memory)
    target.spoils = True
    row = measure("memory", FaultyBackend(memory), target, SMALL, rounds=1)
    assert row.hit_ratio == 0.0


class _Forgetful(FaultyBackend):
    def put(self, keys: Sequence[str], values: Sequence[memoryview]) -> Sequence[str]:
        return ["full"] * len(keys)


def test_a_store_that_takes_nothing_is_an_error() -> None:
    memory = MemoryBackend(1 << 24)
    with pytest.raises(RuntimeError, match="0 of 8 values were put"):
        measure("memory", _Forgetful(memory), FaultyBackend(memory), SMALL, rounds=1)


def report(**changes: object) -> StoreReport:
    row = measure("m", *[FaultyBackend(MemoryBackend(1 << 20))] * 2, Shape(2, 1, 64), rounds=1)
    ttft = Ttft("m", 100, 50.0, 5.0, 10.0, 6, 0)
    row = msgspec.structs.replace(row, **{name: value for name, value in changes.items() if hasattr(row, name)})
    ttft = msgspec.structs.replace(ttft, **{name: value for name, value in changes.items() if hasattr(ttft, name)})
    return StoreReport(moves=(row,), ttft=(ttft,), failures=(), rounds=1)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"wrong_bytes": 7}, "7 bytes are not those"),
        ({"hit_ratio": 0.5}, "only 50%"),
        ({"wrong_answers": 1}, "1 answers on loaded KV differ"),
        ({"ratio": 0.9}, "a hit took"),
    ],
)
def test_what_is_wrong_is_complained_of(changes: dict[str, object], said: str) -> None:
    found = complaints(report(**changes), strict=True)
    assert len(found) == 1 and said in found[0]
    facts = Stopwatch().facts("command", {})
    assert complaints(report(), strict=True) == []
    assert said in findings(facts, report(**changes), strict=True).as_page()


def test_slowness_is_no_complaint_where_no_verdict_is_wanted() -> None:
    assert complaints(report(ratio=0.9), strict=False) == []


def test_the_command_measures_a_store_of_another_process(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "page.md"
    words = ["--backends", "kvbaton", "--rounds", "1", "--prompt-tokens", "500", "--json", "--out", str(out)]
    words.append("--no-verdict")  # of what is slow: the machine may be busy
    assert cli.main(["bench", "store", *words]) == 0
    said, progress = capsys.readouterr()
    found = json.loads(said)
    assert found["ok"] and [row["hit_ratio"] for row in found["moves"]] == [1.0] * 3
    assert found["ttft"][0]["wrong_answers"] == 0 and found["ttft"][0]["hit_blocks"] >= 2 * 31
    assert "kvbaton: 64 × 1 MiB" in progress
    assert "| kvbaton | 64 × 256 KiB |" in out.read_text()


def test_a_backend_that_nobody_knows_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["bench", "store", "--backends", "cupboard"])
    assert "expected some of kvbaton, mooncake" in capsys.readouterr().err


@pytest.mark.parametrize(("seconds", "figure"), [([3.0], 3.0), ([9.0, 1.0, 8.0, 2.0, 3.0], 2.0), ([4.0, 1.0], 1.0)])
def test_the_faster_half_counts(seconds: list[float], figure: float) -> None:
    assert settled(seconds) == figure
