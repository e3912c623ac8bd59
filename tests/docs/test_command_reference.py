"""The references of commands and settings: what the parsers and the settings classes hold, all of it."""

from __future__ import annotations

import inspect
import re
import tomllib
from types import ModuleType

import msgspec
import pytest
from docs_commands import ROOT
from tests.tool_modules import tool_module

from kvbaton.cli.main import COMMANDS
from kvbaton.cli.settings import layers
from kvbaton.engines.shared.connector_settings import ConnectorSettings
from kvbaton.observe.tracing import export


def loaded(name: str) -> ModuleType:
    return tool_module(f"docs/{name}")


@pytest.fixture(scope="module")
def tool() -> ModuleType:
    return loaded("commands_docs")


def test_the_page_is_what_the_generator_makes(tool: ModuleType) -> None:
    assert tool.PAGE.read_text() == tool.page(), "run: python tools/docs/commands_docs.py"


def test_every_command_and_the_commands_below_it_are_there(tool: ModuleType) -> None:
    titles = [line.removeprefix("### kvbaton ") for line in tool.page().splitlines() if line.startswith("### ")]
    assert set(COMMANDS) <= set(titles)
    assert {"bench transfer", "bench router"} <= set(titles), "also what a command has below it"


def test_a_default_is_in_its_column_and_no_machine_is_in_the_page(tool: ModuleType) -> None:
    page = tool.page()
    assert "(default:" not in page
    assert "| `--port` PORT | port for clients, 0 for a free one | 8000 |" in page
    assert str(ROOT) not in page


def test_the_tables_of_settings_are_what_the_generator_makes() -> None:
    for path, page in loaded("settings_docs").PAGES.items():
        assert path.read_text() == page(path.read_text()), f"{path.name}: run python tools/docs/settings_docs.py"


def test_every_key_of_the_connector_and_every_variable_of_the_product_has_its_row() -> None:
    reference, every = ((ROOT / "docs" / name).read_text() for name in ("vllm.md", "settings.md"))
    for field in msgspec.structs.fields(ConnectorSettings):
        assert f"| `{field.name}` |" in reference and f"| `{field.name}` |" in every
    assert f"| `{layers.variable_of('worker', 'http_access')}` |".split()[1] in every
    product = list((ROOT / "src" / "kvbaton").rglob("*.py"))
    named = set(re.findall(r"\"(KVBATON_[A-Z_]+[A-Z])\"", "".join(path.read_text() for path in product)))
    assert {"KVBATON_JOIN_TOKEN", "KVBATON_API_KEY"} <= named
    internal = {"KVBATON_ENDS_WITH"}  # from a parent to its own child
    assert {name for name in named - internal if f"`{name}`" not in every} == set()


def test_an_extra_that_the_program_names_exists() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    sources = "".join(path.read_text() for part in ("src", "packages") for path in (ROOT / part).rglob("*.py"))
    named = set(re.findall(r"kvbaton\[([\w-]+)\]", sources))
    assert {"serve", "dev"} <= named <= set(project["optional-dependencies"])
    named = set(re.findall(r'"(otel[\w-]*)"', inspect.getsource(export.needed)))
    assert {"otel", "otel-grpc"} == named <= set(project["optional-dependencies"])
