"""`tools/upstream_tests.py` on a small checkout of our own: what it finds, swaps, and calls a difference."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

pytestmark = pytest.mark.timeout(300)

ROOT = Path(__file__).parents[3]
THEIRS = """
import pytest
from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory


def look_up(name):
    return KVConnectorFactory.get_connector_class(KVTransferConfig(kv_connector=name, kv_role="kv_both"))


def test_any_connector_will_do():
    assert look_up("ExampleConnector").get_finished_count is not None


def test_only_the_one_that_is_named_will_do():
    assert look_up("ExampleConnector").__name__ == "ExampleConnector"


def test_another_kind():
    assert look_up("OffloadingConnector").__name__ == "OffloadingConnector"


def test_none():
    pass


def test_not_on_this_machine():
    look_up("ExampleConnector")
    pytest.skip("no such device")
"""


def test_a_difference_that_nobody_knows_fails_the_command(vllm_python: str, tmp_path: Path) -> None:
    unit = tmp_path / "tests" / "v1" / "kv_connector" / "unit"
    unit.mkdir(parents=True)
    for folder in (unit, *list(unit.parents)[:3]):
        (folder / "__init__.py").touch()
    (unit / "test_small.py").write_text(THEIRS)
    before = sorted(str(path) for path in tmp_path.rglob("*"))
    words = [vllm_python, str(ROOT / "tools" / "upstream_tests.py"), str(tmp_path), "--json", "--only", "tests/v1"]
    done = subprocess.run(
        words, capture_output=True, text=True, check=False, timeout=280, env={**os.environ, "PYTHONPATH": ""}
    )
    assert done.returncode == 1, done.stdout + done.stderr
    told = json.loads(done.stdout)
    name = "tests/v1/kv_connector/unit/test_small.py::test_"
    found = {line["test"].removeprefix(name): (line["named"], line["ours"], line["verdict"]) for line in told["tests"]}
    assert found == {
        "any_connector_will_do": ("passed", "passed", "same"),
        "only_the_one_that_is_named_will_do": ("passed", "failed", "UNKNOWN"),
        "not_on_this_machine": ("skipped", "skipped", "not here"),
    }
    assert told["looked_at"] == 5 and told["not_collected"] == []
    assert sorted(str(path) for path in tmp_path.rglob("*")) == before, "nothing is written to the checkout"
