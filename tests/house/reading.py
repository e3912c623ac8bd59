"""The tree as it is: modules, classes and their attributes, read from the source without importing any of it."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "kvbaton"
PROOF = "kvbaton_proof"
PACKAGES = {"": SOURCE, PROOF: ROOT / "packages" / "kvbaton-proof" / "src" / PROOF}
"""The distributions of this repository: the prefix of their modules' names here, and where they lie."""


@dataclass(frozen=True)
class Class:
    """One top-level class: `transports.core.jobs:Jobs`, and how many attributes an instance has."""

    module: str
    name: str
    attributes: int

    @property
    def place(self) -> str:
        return f"{self.module}:{self.name}"


def _below(prefix: str, root: Path, path: Path) -> str:
    return "/".join([*filter(None, [prefix]), *path.relative_to(root).parts]).removesuffix(".py")


@cache
def modules() -> dict[str, Path]:
    """Every module of every distribution, by its dotted name; `kvbaton.` is left out."""
    return {
        _below(prefix, root, path).replace("/", "."): path
        for prefix, root in PACKAGES.items()
        for path in sorted(root.rglob("*.py"))
        if path.stem != "__init__"
    }


@cache
def classes() -> tuple[Class, ...]:
    """One module after the other: to have the trees of all at once takes four times as long."""
    return tuple(each for module, path in modules().items() for each in _classes(module, ast.parse(path.read_text())))


def _classes(module: str, tree: ast.Module) -> list[Class]:
    found = [node for node in tree.body if isinstance(node, ast.ClassDef)]
    return [Class(module, node.name, len(set(_attributes(node)))) for node in found]


def packages() -> list[str]:
    """Every folder with modules in it, as `transports/core` and `kvbaton_proof/sim`."""
    found = {_below(prefix, root, path.parent) for prefix, root in PACKAGES.items() for path in root.rglob("*.py")}
    return sorted(found - {""})


def folder(package: str) -> Path:
    """Where a package of that name lies."""
    root, _, below = package.partition("/")
    return PACKAGES[root] / below if root in PACKAGES else SOURCE / package


def lines_of(module: str) -> int:
    return modules()[module].read_text().count("\n")


def _attributes(node: ast.ClassDef) -> Iterator[str]:
    for each in node.body:
        if isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name) and not _is_constant(each):
            yield each.target.id
    for each in ast.walk(node):
        if isinstance(each, ast.Attribute) and isinstance(each.ctx, ast.Store) and _is_self(each.value):
            yield each.attr


def _is_self(node: ast.expr) -> bool:
    return isinstance(node, ast.Name) and node.id == "self"


def _is_constant(each: ast.AnnAssign) -> bool:
    return "ClassVar" in ast.dump(each.annotation)
