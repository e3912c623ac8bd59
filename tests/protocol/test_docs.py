"""docs/protocol.md is what the code says: rules with the places they live in, messages, reasons and machines."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

from kvbaton.protocol.errors import Reason
from kvbaton.sim.mutants import MUTANTS

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def tool() -> ModuleType:
    spec = importlib.util.spec_from_file_location("protocol_docs", ROOT / "tools" / "protocol_docs.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["protocol_docs"] = module
    spec.loader.exec_module(module)
    return module


def test_the_page_is_what_the_generator_prints(tool: ModuleType) -> None:
    assert (ROOT / "docs" / "protocol.md").read_text() == tool.page(), "run `make docs` and review the difference"


def test_every_rule_every_mutant_and_every_reason_is_told(tool: ModuleType) -> None:
    page = tool.page()
    assert [f"**{number}. " in page for number in range(1, 22)] == [True] * 21
    assert [mutant.name for mutant in MUTANTS if f"`{mutant.name}`" not in page] == []
    assert [reason for reason in Reason if f"| `{reason.value}` |" not in page] == []


def test_a_place_that_is_not_in_the_code_fails_the_build(tool: ModuleType) -> None:
    assert tool.place("protocol.lease:judge") == "protocol/lease.py: judge"
    with pytest.raises(SystemExit, match="there is no nothing"):
        tool.place("protocol.lease:Lease.nothing")


def test_a_mutant_of_an_untold_rule_fails_the_build(tool: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tool, "mutants_by_rule", lambda: {"99": ["`x`: y"]})
    with pytest.raises(SystemExit, match="99"):
        tool.page()
