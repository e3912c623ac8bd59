"""ARCHITECTURE.md is the tree: every folder is in it, and what it names is there."""

from __future__ import annotations

import re
import tomllib

from tests.house.reading import PACKAGES, PROOF, ROOT, SOURCE, folder, packages

PAGE = (ROOT / "ARCHITECTURE.md").read_text()
UNSAID = frozenset({"kvbaton_proof/chaos/network/relay_site"})
"""Folders that are no package of ours: a module that the interpreter of a relayed process looks for by itself."""


def block_under(title: str) -> list[str]:
    after = PAGE.partition(f"## {title}\n")[2]
    return after.partition("```\n")[2].partition("```")[0].splitlines()


def folders_of(lines: list[str]) -> list[str]:
    """A tree drawn by indentation, as paths: `  a/` with `    b/ c/` below it is a, a/b and a/c."""
    found: list[str] = []
    above: dict[int, str] = {}
    for line in lines:
        if not line.startswith(" "):
            above = {0: PROOF} if PROOF in line else {}
            found += above.values()
            continue
        depth = (len(line) - len(line.lstrip())) // 2
        for name in re.findall(r"(?:^|(?<= ))([a-z_]+)/(?= |$)", re.split(r" {2,}", line.strip())[0]):
            path = "/".join([*(above[level] for level in range(depth) if level in above), name])
            above[depth] = name
            found.append(path)
    return found


def test_every_folder_is_in_the_tree_and_no_other() -> None:
    assert sorted(folders_of(block_under("The tree"))) == [each for each in packages() if each not in UNSAID]


def test_the_layers_are_those_that_are_enforced() -> None:
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    enforced = [line.replace("kvbaton.", "") for line in contracts[0]["layers"]]
    assert [line.strip() for line in block_under("Layers")] == enforced


def test_every_folder_of_the_first_floor_has_a_layer() -> None:
    layers = {name.partition(".")[0] for line in block_under("Layers") for name in line.split(" | ")}
    assert layers == {each for each in packages() if "/" not in each} - {PROOF}


def test_every_module_that_is_named_exists() -> None:
    named = re.findall(r"`([a-z_0-9/]+\.py)`", PAGE)
    assert len(named) > 40
    roots = [SOURCE, *(root.parent for root in PACKAGES.values())]
    assert [each for each in named if not any((root / each).exists() for root in roots)] == []


def test_every_package_says_what_it_is() -> None:
    silent = [each for each in packages() if not (folder(each) / "__init__.py").read_text().startswith('"""')]
    assert [each for each in silent if each not in UNSAID] == []
