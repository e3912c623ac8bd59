"""Unit tests with a mutant on: which test fails, if any does.

Tests are collected once in each process, so that pytest and all that they import are there; for each mutant a child is
forked, which imports the tests anew (they hold what the mutant replaces) and ends at the first failure. Law: tests are
in a checkout, and without one nobody is asked.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import os
import sys
from collections.abc import Iterator, Sequence
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from types import ModuleType
from typing import Any

import msgspec

from kvbaton_proof.sim.mutants.kept import find

PARTS = {
    "protocol": ("tests/protocol", "tests/scenarios", "tests/upgrade"),
    "node": ("tests/node", "tests/scenarios", "tests/engines/side"),  # scenarios have doors and loops, sides use them
    "ranks": ("tests/ranks",),
    "transports": ("tests/transports",),
}
"""Nothing else is judged by unit tests: what is wrong in the simulator itself, its worlds must show."""
PATIENCE_S = 300.0
ENDLESS, DIED = "they do not come to their end", "their process died"
WORDS = ("-x", "-q", "-p", "no:cacheprovider", "-m", "not slow", "--ignore=tests/protocol/test_docs.py")
"""A page that reads otherwise is not a test of what a mutant does."""
BAD_CALL = {2, 3, 4, 5}
"""pytest was interrupted, failed itself, was called wrongly, or found no tests."""


class Verdict(msgspec.Struct, frozen=True):
    """What tests make of a mutant."""

    caught: bool
    test: str = ""
    error: str = ""  # why they could not be asked


def is_checkout() -> bool:
    return all(Path(folder).is_dir() for folders in PARTS.values() for folder in folders)


def tests_of(modules: Sequence[str]) -> tuple[str, ...]:
    """The unit tests that a mutant of these modules is judged by: their own first, then those of their parts."""
    parts = dict.fromkeys(module.partition(".")[0] for module in modules)
    folders = [folder for part in parts for folder in PARTS.get(part, ())]
    names = [f"test_{module.rpartition('.')[2]}.py" for module in modules]
    own = [str(path) for name in names for folder in folders for path in sorted(Path(folder).rglob(name))]
    return tuple(dict.fromkeys([*own, *folders]))


def judged(name: str, tests: Sequence[str], patience_s: float = PATIENCE_S) -> Verdict:
    """Run these tests with this mutant on, to the first that fails; it must hold on the clean tree."""
    verdict = _asked(name, tests, patience_s)
    if verdict.test not in ("", ENDLESS, DIED) and not _holds_on_the_clean_tree(verdict.test):
        raise RuntimeError(f"{verdict.test} fails on the clean tree: it proves nothing about {name}")
    return verdict


@functools.cache
def _holds_on_the_clean_tree(test: str) -> bool:
    return not _asked("", [test], PATIENCE_S).caught


def _asked(name: str, tests: Sequence[str], patience_s: float) -> Verdict:
    """With a mutant or, without a name, on the clean tree; in a child."""
    for path in dict.fromkeys(test.partition("::")[0] for test in tests):
        _collected_once(path)
    context = get_context("fork")
    ours, theirs = context.Pipe(duplex=False)
    child = context.Process(target=_run, args=(name, list(tests), theirs))
    child.start()
    theirs.close()
    try:
        if not ours.poll(patience_s):
            return Verdict(True, ENDLESS)
        verdict: Verdict = ours.recv()
    except EOFError:
        return Verdict(True, DIED)
    finally:
        child.kill()
        child.join()
    if verdict.error:
        raise RuntimeError(f"pytest could not be run on {', '.join(tests)}: {verdict.error}")
    return verdict


class _FirstFailure:
    """A plugin of pytest."""

    def __init__(self) -> None:
        self.node = ""

    def pytest_configure(self) -> None:
        """Properties are not made small: that one fails is all that is asked. (Profiles are loaded by now.)"""
        hypothesis = importlib.import_module("hypothesis")
        phases = [hypothesis.Phase.explicit, hypothesis.Phase.generate]
        hypothesis.settings.register_profile("one-failure", hypothesis.settings(), phases=phases)
        hypothesis.settings.load_profile("one-failure")

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.failed and not self.node:
            self.node = report.nodeid

    def pytest_collectreport(self, report: Any) -> None:
        if report.failed and not self.node:
            self.node = report.nodeid


@functools.cache
def _collected_once(path: str) -> None:
    """What this imports is there in every child."""
    with _silently():
        _pytest().main([*WORDS, "--collect-only", path])


def _pytest() -> Any:
    return importlib.import_module("pytest")


def _is_test(module: ModuleType) -> bool:
    tests = str(Path("tests").absolute())
    return (getattr(module, "__file__", None) or "").startswith(tests)


@contextlib.contextmanager
def _silently() -> Iterator[None]:
    """Whatever a test prints, by whatever way."""
    sys.stdout.flush()
    kept = [os.dup(1), os.dup(2)]
    nowhere = os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nowhere, 1)
        os.dup2(nowhere, 2)
        yield
    finally:
        for number, was in enumerate(kept, 1):
            os.dup2(was, number)
            os.close(was)
        os.close(nowhere)


def _run(name: str, tests: list[str], answer: Connection) -> None:
    first = _FirstFailure()
    with _silently():
        for module in [each for each, found in sys.modules.items() if _is_test(found)]:
            del sys.modules[module]
        with find(name).switch() if name else contextlib.nullcontext():
            code = int(_pytest().main([*WORDS, *tests], plugins=[first]))
    error = f"exit code {code}" if code in BAD_CALL and not first.node else ""
    answer.send(Verdict(bool(first.node), first.node, error))
    answer.close()
