"""Tests with a mutant on: `KVBATON_MUTANT=NAME pytest -p kvbaton_proof.sim.mutants.under_test …` says whether they
see it.

Loaded by name alone; nothing of the product knows of it.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Sequence

import msgspec

from kvbaton_proof.sim.mutants.hunting import find

VARIABLE = "KVBATON_MUTANT"
TESTS = ("tests/protocol", "tests/scenarios", "tests/node", "tests/ranks")
PARTS = {"protocol": TESTS[:2], "node": TESTS[2:3], "ranks": TESTS[3:]}
PATIENCE_S = 600.0
PYTEST_FAILED = 1

_on = contextlib.ExitStack()


def pytest_configure() -> None:
    _on.enter_context(find(os.environ[VARIABLE]).switch())


def pytest_unconfigure() -> None:
    _on.close()


class Verdict(msgspec.Struct, frozen=True):
    """What tests make of a mutant."""

    caught: bool
    test: str = ""


def tests_of(name: str) -> tuple[str, ...]:
    """The unit tests of the part of the tree that a mutant is in."""
    return PARTS.get(name.partition(".")[0], TESTS)


def judged(name: str, tests: Sequence[str] = TESTS) -> Verdict:
    """Run tests with this mutant on, in a process of their own, to the first that fails."""
    words = [
        sys.executable,
        "-m",
        "pytest",
        "-x",
        "-q",
        "-p",
        "kvbaton_proof.sim.mutants.under_test",
        "-p",
        "no:cacheprovider",
    ]
    try:
        done = subprocess.run(
            [*words, *tests],
            env={**os.environ, VARIABLE: name},
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return Verdict(True, "they did not come to their end")
    if done.returncode not in (0, PYTEST_FAILED):
        raise RuntimeError(f"pytest could not be run on {', '.join(tests)}: {(done.stdout + done.stderr)[-500:]}")
    failed = [line.split(" ")[1] for line in done.stdout.splitlines() if line.startswith(("FAILED ", "ERROR "))]
    return Verdict(done.returncode == PYTEST_FAILED, failed[0] if failed else "")
