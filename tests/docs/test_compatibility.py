"""The compatibility matrix: each row names the tests that prove it, and the page is made of these rows."""

from __future__ import annotations

from types import ModuleType

import msgspec
import pytest
from docs_commands import ROOT
from tests.tool_modules import tool_module


@pytest.fixture(scope="module")
def tool() -> ModuleType:
    return tool_module("docs/compatibility_docs")


def makefile() -> str:
    return (ROOT / "Makefile").read_text()


def test_the_page_is_what_the_generator_makes(tool: ModuleType) -> None:
    assert tool.PAGE.read_text() == tool.page(tool.PAGE.read_text()), "run: python tools/docs/compatibility_docs.py"


def test_each_row_is_proven_by_tests_that_exist_and_are_run(tool: ModuleType) -> None:
    assert list(tool.complaints(tool.matrix(), makefile())) == []


@pytest.mark.parametrize(
    ("proof", "said"),
    [
        ((), "no test proves it"),
        (("conformance::nobody_wrote_this",), "no such case"),
        (("tests/vllm/test_nothing.py::test_a",), "no such file"),
        (("tests/vllm/pairs/test_shapes.py::test_nothing",), "no such test"),
        (("tests/vllm/pairs/test_shapes.py::test_every_answer_is_that_of_one_engine[tp 9 to 7]",), "no parameter"),
        (("tests/vllm/pairs/test_matrix.py::test_nothing",), "no such test"),
        (("tests/docs/test_compatibility.py::makefile",), ""),
        (("tests/vllm/pairs/test_shapes.py::test_every_answer_is_that_of_one_engine[tp 2 to 1]",), ""),
        (("conformance::ranks_differ_between_p_and_d",), ""),
    ],
)
def test_a_row_without_a_proof_is_seen(tool: ModuleType, proof: tuple[str, ...], said: str) -> None:
    row = tool.Row("a feature", "no", "refused", "yes", proof)
    found = list(tool.complaints(tool.Matrix((row,), {}), makefile()))
    assert bool(found) == bool(said) and all(said in each for each in found), found


def test_a_cell_that_says_run_needs_a_test_of_that_engine(tool: ModuleType) -> None:
    """Once a row of checksums on vLLM named a test without checksums, and a case of the scheduler stood for servers."""
    case, server = (
        "conformance::ranks_differ_between_p_and_d",
        "tests/vllm/installed/test_cache_specs.py::test_no_kind_of_cache_is_unknown",
    )

    def said(embedded: str, vllm: str, *proof: str) -> list[str]:
        row = tool.Row("a feature", embedded, vllm, "yes", proof)
        return list(tool.complaints(tool.Matrix((row,), {}), makefile()))

    assert any("vLLM's cell" in each for each in said("no", "run", case))
    assert any("embedded engine's cell" in each for each in said("run", "no", case, server))
    assert said("no", "run", case, server) == said("no", "run against vLLM's scheduler", case) == []


def test_a_row_that_was_not_run_is_seen_and_so_is_a_file_that_nobody_runs(tool: ModuleType) -> None:
    row = msgspec.structs.replace(tool.matrix().row[0], vllm="not run")
    assert any("a row is proven" in each for each in tool.complaints(tool.Matrix((row,), {}), makefile()))
    lonely = makefile().replace("tests/vllm/pairs/test_shapes.py", "")
    assert any("no target" in each for each in tool.complaints(tool.matrix(), lonely))
