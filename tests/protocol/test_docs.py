"""docs/protocol.md is what the code says: rules with the places they live in, messages, reasons and machines."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import pytest
from tests.tool_modules import tool_module

from kvbaton.protocol.errors import Reason
from kvbaton_proof.sim.mutants.handwritten import MUTANTS
from kvbaton_proof.sim.mutants.mutation import Mutant

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def tool() -> ModuleType:
    return tool_module("docs/protocol_docs")


def test_the_page_is_what_the_generator_prints(tool: ModuleType) -> None:
    assert (ROOT / "docs" / "protocol.md").read_text() == tool.page(), "run `make docs` and review the difference"


def test_every_rule_every_mutant_and_every_reason_is_told(tool: ModuleType) -> None:
    page = tool.page()
    assert [number for number in tool.numbers() if number.isdigit() and f"**{number}. " not in page] == []
    assert tool.numbers() == [*map(str, range(1, len(tool.numbers()))), "store"] and len(tool.numbers()) >= 33
    assert [mutant.name for mutant in MUTANTS if f"`{mutant.name}`" not in page] == []
    assert [reason for reason in Reason if f"| `{reason.value}` |" not in page] == []


OF_STREAMS = ("37", "38", "39")
"""Scenarios are what engines' nodes say to each other. Of a stream that goes on they say nothing: its rules are about
the router and the client, and their tests and the simulator's worlds show them."""


def test_no_rule_is_without_a_mutant_a_scenario_and_a_test(tool: ModuleType) -> None:
    shown = {"mutant": tool.mutants_by_rule(), "scenario": tool.scenarios_by_rule(), "test": tool.tests_by_rule()}
    lacks = [(number, kind) for number in tool.numbers() for kind, found in shown.items() if not found.get(number)]
    assert lacks == [(number, "scenario") for number in OF_STREAMS]


def test_a_rule_is_named_in_words(tool: ModuleType) -> None:
    found = tool.named_rules("(rules 9 and 12), rule 3, Rules 13 to 16; no ruler 7")
    assert found == ["9", "12", "3", "13", "14", "15", "16"]
    assert tool.named_rules("a put holds one pin (promise 3, rule store)") == ["store"]
    tree = tool.ast.parse('"""Rule 7."""\nclass A:\n    def test_b(self):\n        """Rule 8."""\n')
    assert [name for name, said in tool.docstrings(tree) if said] == [(), ("A", "test_b")]


def test_mutants_that_were_generated_are_told_by_name_alone(tool: ModuleType) -> None:
    by_hand, made = (Mutant(name, "1", "a story", MUTANTS[0].switch) for name in ("idea", "protocol.ids:PeerId:drop:1"))
    text = tool.rule_text(
        tool.Rule("1", "T", "says", "w", ["protocol.machines.lease:judge"]), [by_hand, made], ["a.txt"], []
    )
    assert text.splitlines()[3:] == [
        "- *Mutant* `idea`: a story", "- *Generated mutants*: `protocol.ids:PeerId:drop:1`", "- *Scenarios*: `a.txt`",
    ]  # fmt: skip


def test_a_place_that_is_not_in_the_code_fails_the_build(tool: ModuleType) -> None:
    assert tool.place("protocol.machines.lease:judge") == "protocol/machines/lease.py: judge"
    with pytest.raises(SystemExit, match="there is no nothing"):
        tool.place("protocol.machines.lease:Lease.nothing")


def test_a_mutant_of_an_untold_rule_fails_the_build(tool: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tool, "mutants_by_rule", lambda: {"99": [MUTANTS[0]]})
    with pytest.raises(SystemExit, match="99"):
        tool.page()
