"""`docs/security.md` says what is so: every test that it names is there and runs, every advisory is in it."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from kvbaton.protocol.legality import MAY, Act, Role

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "docs" / "security.md").read_text()
NAMED = sorted(set(re.findall(r"`(tests/[a-z0-9_/]+\.py::[A-Za-z0-9_:]+)`", TEXT)))
ADVISORIES = {
    2024: (50050,),
    2025: (32444, 29783, 47277, 30165, 30202),
    2026: (
        94622, 94623, 94624, 94625, 94626, 94627, 116180, 105754, 24779, 92972, 3059, 3060, 3989, 86793, 93088, 14890,
        15969, 15976, 7304, 26220, 105192, 107204, 107205, 107206, 107207, 103764, 103765, 106037, 96762, 96763, 63767,
        47623, 24254, 24142, 65119, 24269, 65120,
    ),
}  # fmt: skip


def rows() -> list[list[str]]:
    table = TEXT.split("## Published advisories")[1].split("\n\n")[0]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in table.strip().splitlines()[2:]]


def functions(path: Path) -> dict[str, list[str]]:
    """Each test of a file, with its decorators as text."""
    found = {}
    for node in ast.parse(path.read_text()).body:
        inner = [(f"{node.name}::", each) for each in node.body] if isinstance(node, ast.ClassDef) else [("", node)]
        for front, each in inner:
            if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef):
                found[front + each.name] = [ast.unparse(decorator) for decorator in each.decorator_list]
    return found


@pytest.mark.parametrize("name", NAMED)
def test_a_named_test_exists_and_is_not_skipped(name: str) -> None:
    path, _, test = name.partition("::")
    found = functions(ROOT / path)
    assert test in found, f"{path} has no {test}"
    assert not [each for each in found[test] if "skip" in each or "xfail" in each]


def test_every_class_has_a_test_and_every_advisory_a_class() -> None:
    assert len(rows()) >= 17
    for row in rows():
        assert len(row) == 4 and re.search(r"`tests/\S+::\S+`", row[3]), row[0]
    for year, numbers in ADVISORIES.items():
        missing = [number for number in numbers if not re.search(rf"\b{number}\b", TEXT)]
        assert f"CVE-{year}-" in TEXT and not missing


def test_the_table_of_privileges_is_the_one_that_is_enforced() -> None:
    table = TEXT.split("<!-- privileges -->")[1].split("<!-- /privileges -->")[0].strip().splitlines()
    acts = [cell.strip() for cell in table[0].strip("|").split("|")][1:]
    assert acts == [act.value for act in Act]
    told = {}
    for line in table[2:]:
        role, *cells = (cell.strip() for cell in line.strip("|").split("|"))
        told[Role(role)] = {act for act, cell in zip(acts, cells, strict=True) if cell == "yes"}
    assert told == {role: {act.value for act in MAY[role]} for role in Role}


def test_every_role_has_a_row_that_says_what_a_liar_can_do_and_for_how_long() -> None:
    table = TEXT.split("<!-- liars -->")[1].split("<!-- /liars -->")[0].strip().splitlines()[2:]
    told = {cells[0]: cells[1:] for cells in ([cell.strip() for cell in line.strip("|").split("|")] for line in table)}
    assert {str(role) for role in Role} <= set(told)
    for role, cells in told.items():
        assert len(cells) == 4 and all(cells), role
        assert role == "both" or re.search(r"`tests/\S+`", cells[3]), role
