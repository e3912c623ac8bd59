"""The load generator as a process, played by a stand-in; NIXL's shim, on a stand-in of its bindings."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import sys
import time
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

from kvbaton.engines.vllm.launch import launching
from kvbaton_proof.bench.vllm import vllm_levels
from kvbaton_proof.bench.vllm.vllm_levels import Load, Outcome
from kvbaton_proof.bench.vllm.vllm_rows import Level
from tests.bench.test_vllm_bench_rows import TOLD

LOAD = Load(
    url="http://127.0.0.1:1", model="/m", served_name="tiny", level=Level(2, 3), input_tokens=256, output_tokens=16,
    seed=5, headers={"x-kvbaton-mode": "push"},
)  # fmt: skip
TALKS = """
import json, os, pathlib, sys, time
words = sys.argv[1:]
where = pathlib.Path(words[words.index("--result-dir") + 1], words[words.index("--result-filename") + 1])
pathlib.Path(where.parent, "pid").write_text(str(os.getpid()))
print("Starting main benchmark run...", flush=True)
"""
WRITES = TALKS + f"print('=== Serving Benchmark Result ===', flush=True); where.write_text({json.dumps(TOLD)!r})"


def _run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, code: str, **times: float) -> Outcome[float]:
    monkeypatch.setattr(vllm_levels, "DRIVER", ("-c", code))
    given = {"deadline_s": 60.0, **times}
    running = vllm_levels.run(LOAD, [sys.executable], tmp_path, lambda _pid: time.monotonic(), **given)
    return asyncio.run(running)


def test_the_words_say_what_is_asked_and_end_with_the_header() -> None:
    words = LOAD.words(Path("/x/load.json"))
    assert words[-2:] == ["--header", "x-kvbaton-mode=push"]
    pairs = dict(itertools.pairwise(words))
    assert pairs["--max-concurrency"] == "2" and pairs["--num-prompts"] == "3" and pairs["--seed"] == "5"
    assert pairs["--random-input-len"] == "256" and pairs["--random-output-len"] == "16"
    assert pairs["--temperature"] == "0" and pairs["--metric-percentiles"] == "50,99"


def test_a_load_gives_its_result_and_readings_of_its_beginning_and_end(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    outcome = _run(monkeypatch, tmp_path, WRITES)
    assert outcome.told is not None and outcome.told.completed == 3 and not outcome.hung
    assert outcome.began is not None and outcome.ended is not None and outcome.began <= outcome.ended


def test_a_load_that_hangs_is_ended_by_its_deadline_and_leaves_no_process(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    begun = time.monotonic()
    outcome = _run(monkeypatch, tmp_path, TALKS + "time.sleep(300)", deadline_s=0.5)
    assert outcome.hung and outcome.told is None and time.monotonic() - begun < 60
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "pid").read_text()), 0)


def test_a_load_that_never_begins_is_hung_too(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert _run(monkeypatch, tmp_path, "import time; time.sleep(300)", start_s=0.3).hung


def test_a_load_that_fails_says_what_it_said(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    outcome = _run(monkeypatch, tmp_path, "raise SystemExit('no such dataset')")
    assert outcome.told is None and not outcome.hung and "no such dataset" in outcome.said


def test_an_older_result_is_never_taken_for_this_ones(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "load.json").write_text(json.dumps(TOLD))
    assert _run(monkeypatch, tmp_path, TALKS).told is None


class _Config:
    """As NIXL's bindings have it."""

    def __init__(self) -> None:
        self._delay = 5

    @property
    def pthrDelay(self) -> int:
        return self._delay

    @pthrDelay.setter
    def pthrDelay(self, value: int) -> None:
        self._delay = value


def test_the_shim_keeps_the_delay_whatever_nixls_api_writes() -> None:
    bindings = ModuleType("nixl_cu12._bindings")
    vars(bindings)["nixlAgentConfig"] = _Config
    assert launching.rest(bindings, 1000)
    config = bindings.nixlAgentConfig()
    config.pthrDelay = 0
    assert config.pthrDelay == 1000 and isinstance(config, _Config)


def test_the_shim_leaves_another_nixl_as_it_is() -> None:
    assert not launching.rest(ModuleType("nixl_cu12._bindings"))
    bindings = ModuleType("nixl_cu12._bindings")
    vars(bindings)["nixlAgentConfig"] = SimpleNamespace
    assert not launching.rest(bindings) and bindings.nixlAgentConfig is SimpleNamespace


def test_the_shim_sees_to_the_bindings_when_they_are_imported(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    package = tmp_path / "nixl_cu12"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "_bindings.py").write_text("class nixlAgentConfig:\n    pthrDelay = property(lambda s: s.d, "
                                          "lambda s, v: setattr(s, 'd', v))\n")  # fmt: skip
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    launching.install()
    launching.install()
    try:
        from nixl_cu12 import _bindings

        config = _bindings.nixlAgentConfig()
        config.pthrDelay = 0
        assert config.pthrDelay == launching.DELAY_US
    finally:
        for name in ("nixl_cu12", "nixl_cu12._bindings"):
            sys.modules.pop(name, None)


def test_the_site_directory_holds_what_python_imports_by_itself(tmp_path: Path) -> None:
    site = launching.write_site(tmp_path / "site")
    compile((site / "sitecustomize.py").read_text(), "sitecustomize.py", "exec")
