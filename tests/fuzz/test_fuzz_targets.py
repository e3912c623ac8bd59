"""Every target explored, guided by coverage: at least 50,000 inputs, the same ones in every run of `make test`.

`KVBATON_FUZZ=nightly` takes another seed each time and ten times as many inputs; `make fuzz` lets libFuzzer do it.
"""

from __future__ import annotations

import importlib
import os
import runpy
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from fuzzing import NIGHTLY, TIMEOUT_S
from guided import Target, explore, grown_bytes
from targets import CORPUS, CORPUS_BYTES_MAX, CRASHES, TARGETS, close, crashes, kept

pytestmark = pytest.mark.timeout(TIMEOUT_S)
INPUTS_MIN = 50_000
GROWN_BYTES_MAX = 40
"""Per input: less than the smallest object that could be kept for each, a container's slot included."""
REPLAYED = 8
SEED = time.time_ns() if NIGHTLY else 0
TIMES = 10 if NIGHTLY else 1

every_target = pytest.mark.parametrize("target", TARGETS.values(), ids=list(TARGETS))


@pytest.fixture(autouse=True, scope="module")
def _closed() -> Iterator[None]:
    yield
    close()


def test_enough_inputs_are_tried() -> None:
    assert sum(target.inputs for target in TARGETS.values()) >= INPUTS_MIN


@every_target
def test_what_broke_once_holds(target: Target) -> None:
    for data in crashes(target.name).values():
        target.run(data)


@every_target
def test_explored(target: Target) -> None:
    """No input breaks the target's law, and none leaves anything behind."""
    found = explore(target, inputs=TIMES * target.inputs, seed=SEED, kept=kept(target.name))
    assert found.inputs >= TIMES * target.inputs, f"{found.inputs} inputs ran (seed {SEED})"
    step = max(len(found.kept) // REPLAYED, 1)
    grown = grown_bytes(target, found.kept[::step][:REPLAYED])
    assert grown < GROWN_BYTES_MAX, f"each input leaves {grown:.0f} bytes behind"


@every_target
def test_the_tool_for_long_runs_knows_where_each_target_is(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    path = Path(__file__).parents[2] / "tools" / "fuzz.py"
    monkeypatch.setattr(sys, "path", list(sys.path))  # the tool adds to it
    tool = runpy.run_path(str(path))
    assert target in importlib.import_module(tool["module_of"](target.name)).TARGETS


def test_the_kept_inputs_are_few_and_each_belongs_to_a_target() -> None:
    files = [path for folder in (CORPUS, CRASHES) for path in folder.rglob("*") if path.is_file()]
    assert {path.parent.name for path in files} <= set(TARGETS)
    assert sum(path.stat().st_size for path in files) < CORPUS_BYTES_MAX
    assert all(kept(name) for name in TARGETS), "a target has no corpus; run tools/fuzz.py keep"


def test_the_same_seed_gives_the_same_inputs_in_every_process() -> None:
    """Neither the order of sets nor addresses of objects may decide what is news."""
    names = ("codec", "worker_answers")
    script = (
        "from guided import explore; from targets import TARGETS; "
        f"print(*(explore(TARGETS[name], inputs=150).digest for name in {names!r}))"
    )
    here = [explore(TARGETS[name], inputs=150).digest for name in names]
    there = {
        subprocess.run(
            [sys.executable, "-c", script],
            env={**os.environ, "PYTHONHASHSEED": number, "PYTHONPATH": str(Path(__file__).parent)},
            capture_output=True,
            check=True,
            text=True,
            timeout=TIMEOUT_S / 2,
        ).stdout
        for number in ("1", "2")
    }
    assert there == {" ".join(here) + "\n"}
    others = [explore(TARGETS[name], inputs=150, seed=1).digest for name in names]
    assert not set(here) & set(others)
