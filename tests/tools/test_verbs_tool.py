"""Mooncake gets libibverbs from nixl's package, by links, where the system has none."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import pytest

from tests.tool_modules import tool_module


@pytest.fixture
def verbs() -> ModuleType:
    return tool_module("verbs")


def folder(site: Path, name: str, *files: str) -> Path:
    made = site / name
    made.mkdir()
    for file in files:
        (made / file).write_text(file)
    return made


LENT = ("libibverbs-1a2b.so.1.14", "libnl-3-3c4d.so.200", "libnl-route-3-5e6f.so.200")


def test_the_library_is_found_by_its_own_name_and_what_it_needs_beside_it(verbs: ModuleType, tmp_path: Path) -> None:
    folder(tmp_path, "nixl_cu13.libs", *LENT, "libucp-77.so.0")
    mine = folder(tmp_path, "mooncake_transfer_engine_non_cuda.libs", "libglog.so.0")
    for _ in range(2):  # again does no harm
        assert verbs.borrow(tmp_path)
        found = {each.name: each.read_text() for each in mine.iterdir()}
        assert found == {"libglog.so.0": "libglog.so.0", "libibverbs.so.1": LENT[0], LENT[1]: LENT[1], LENT[2]: LENT[2]}
    assert not (mine / "libibverbs.so.1").readlink().is_absolute(), "the environment can be moved"


@pytest.mark.parametrize("there", ["nixl_cu13.libs", "mooncake_transfer_engine.libs"])
def test_nothing_is_changed_where_one_of_the_two_is_missing(verbs: ModuleType, tmp_path: Path, there: str) -> None:
    files = LENT if there.startswith("nixl") else ("libglog.so.0",)
    made = folder(tmp_path, there, *files)
    assert not verbs.borrow(tmp_path)
    assert {each.name for each in made.iterdir()} == set(files)


def test_a_failure_names_what_to_install(
    verbs: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(verbs, "WANTED", "libno-such-library.so.1")
    monkeypatch.setattr(verbs, "TRY", "import no_such_module")
    monkeypatch.setattr(verbs.sysconfig, "get_path", lambda name: str(tmp_path))
    assert verbs.main() == 1
    assert "apt-get install libibverbs1" in capsys.readouterr().err
