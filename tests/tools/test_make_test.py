"""`make test` runs every folder of tests, and tells at its end what took the time."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
APART = {"dynamo"}  # needs packages of its own: `make dynamo-test`
FOUND = {path.relative_to(ROOT / "tests").parts[0] for path in (ROOT / "tests").glob("*/**/test_*.py")}
FOLDERS = sorted(FOUND - APART)
TARGETS = ("coverage", "simulated", "fuzzed", "processes", "clusters", "vllm-test")
XML = '<testsuite><testcase classname="tests.a" name="{name}" time="{seconds}"/></testsuite>'


def words_of(target: str) -> set[str]:
    """What a target of the Makefile would run; dry, so that nothing is installed."""
    words = ["make", "-n", "-o", ".venv/.dev", "-o", ".venv/.planes", "-o", ".venv-vllm/.planes", target]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=True)
    return set(re.findall(r"tests/(\w+)", done.stdout))


def test_every_folder_of_tests_is_run() -> None:
    assert sorted(set[str]().union(*map(words_of, TARGETS))) == FOLDERS


def test_both_lanes_are_made_of_these() -> None:
    lanes = dict(re.findall(r"(?m)^(computed|timed): (.+)$", (ROOT / "Makefile").read_text()))
    assert {*TARGETS} - {"vllm-test"} <= {*lanes["computed"].split(), *lanes["timed"].split()}


def test_the_slowest_come_first_and_a_broken_file_costs_its_own_lines(tmp_path: Path) -> None:
    (tmp_path / "one.xml").write_text(XML.format(name="test_quick", seconds=0.5))
    (tmp_path / "two.xml").write_text(XML.format(name="test_slow[x]", seconds=61.2))
    (tmp_path / "broken.xml").write_text("<testsuite>")
    tool = [sys.executable, str(ROOT / "tools" / "slowest_tests.py"), str(tmp_path), "--count", "1"]
    *lines, last = subprocess.run(tool, capture_output=True, text=True, check=True).stdout.splitlines()
    assert last.split() == ["61.2", "s", "tests.a::test_slow[x]"]
    assert any("broken.xml" in line for line in lines) and lines[-1].split()[0] == "2"
