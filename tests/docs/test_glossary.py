"""The glossary: the nouns of ARCHITECTURE.md, one per row."""

from __future__ import annotations

from types import ModuleType

import pytest
from tests.tool_modules import tool_module

TABLE = """\
| noun | what it is | where |
|:---|---|---|
| session, link | one pairing | `a.py`, [b](src/b.py) |
| Epoch | a number | `c.py` |

| other | table | here |
|---|---|---|
| not | a | noun |
"""


@pytest.fixture(scope="module")
def tool() -> ModuleType:
    return tool_module("docs/glossary_docs")


def test_the_page_is_what_the_generator_makes(tool: ModuleType) -> None:
    assert tool.PAGE.read_text() == tool.page(tool.SOURCE.read_text()), "run: python tools/docs/glossary_docs.py"


def test_each_noun_of_a_row_is_found_in_the_alphabet(tool: ModuleType) -> None:
    assert [tuple(noun) for noun in tool.nouns(TABLE)] == [
        ("**Epoch**", "a number", "`c.py`"),
        ("**link** (with session)", "one pairing", "`a.py`, b"),
        ("**session** (with link)", "one pairing", "`a.py`, b"),
    ]


def test_a_page_without_nouns_is_an_error(tool: ModuleType) -> None:
    with pytest.raises(ValueError, match="no table"):
        tool.nouns("# Architecture\n\n| a | b |\n|---|---|\n")
