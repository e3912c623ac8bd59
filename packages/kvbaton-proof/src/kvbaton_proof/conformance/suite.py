"""The conformance suite as pytest runs it: a test for each case, and one for each seed of interleavings.

Law: a case that was not in time while its process stood still is run again, and nothing else is. What came of each goes
with its report, as figures. `kvbaton conformance vllm` starts it, in vLLM's Python (see `conformance_run`).
"""

from __future__ import annotations

import gc
import itertools
from collections.abc import Callable

import msgspec
import pytest

from kvbaton_proof.conformance import case_registry, interleave
from kvbaton_proof.conformance.case_registry import Case, CaseVerdict
from kvbaton_proof.conformance.conformance_run import VERDICT, wanted_cases, wanted_seeds
from kvbaton_proof.conformance.stalls import unstalled

COLLECT_EVERY = 20
_runs = itertools.count(1)

Note = Callable[[str, object], None]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "case" in metafunc.fixturenames:
        metafunc.parametrize("case", wanted_cases(metafunc.config), ids=lambda case: case.name)
    elif "seed" in metafunc.fixturenames:
        metafunc.parametrize("seed", wanted_seeds(metafunc.config))


@pytest.fixture(autouse=True)
def tidy() -> None:
    """Engines of earlier cases are cyclic garbage, with caches; a full collection takes as long as a case."""
    if next(_runs) % COLLECT_EVERY == 0:
        gc.collect()


def test_case(case: Case, record_property: Note) -> None:
    _judge(unstalled(lambda: case_registry.run_case(case)), record_property)


def test_seed(seed: int, record_property: Note) -> None:
    _judge(unstalled(lambda: interleave.run_seed(seed)), record_property)


def _judge(verdict: CaseVerdict, note: Note) -> None:
    note(VERDICT, msgspec.json.encode(verdict).decode())
    if not verdict.holds:
        pytest.fail(f"{verdict.what}\n{verdict.trace}", pytrace=False)
