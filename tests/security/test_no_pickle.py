"""No bytes become objects or code, and nothing that must not be guessed is drawn from a generator that can be.

Promise 5, and the class of CVE-2025-32444, 29783, 47277, 30165 and their many successors: the way to be safe from
unpickling what a stranger sent is that there is no unpickling.
"""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "kvbaton"
PROOF = ROOT / "packages" / "kvbaton-proof" / "src" / "kvbaton_proof"
MODULES = {"pickle", "cPickle", "_pickle", "dill", "cloudpickle", "marshal", "shelve", "jsonpickle", "joblib"}
CALLS = {"eval", "exec", "compile", "__import__"}
METHODS = {
    "recv_pyobj", "send_pyobj", "recv_serialized", "send_serialized", "read_pickle", "to_pickle", "load_module",
    "unsafe_load", "full_load",
}  # fmt: skip
QUALIFIED = {
    ("torch", "load"), ("yaml", "load"), ("numpy", "load"), ("np", "load"), ("multiprocessing", "Queue"),
    ("multiprocessing", "Pipe"), ("multiprocessing", "SimpleQueue"), ("multiprocessing", "Manager"), ("os", "system"),
}  # fmt: skip
TRUE_KEYWORDS = {"allow_pickle", "shell"}

OWN_BYTES_ONLY = {
    "kvbaton_proof/conformance/conformance_engine.py": {"pickle", "loads", "dumps"},
    "kvbaton_proof/sim/mutants/mutating.py": {"compile"},
}
"""Tools for developers, which no server imports: one does to its own objects what vLLM does between its own processes,
one compiles this package's own source with a change in it."""
RANDOM_NEVER = (
    "api", "control", "engines", "node", "observe", "protocol", "ranks", "router", "security", "store", "transports",
)  # fmt: skip


@functools.cache
def nodes(path: Path) -> tuple[ast.AST, ...]:
    """Those of a file that matter here."""
    kinds = (ast.Import, ast.ImportFrom, ast.Call)
    return tuple(node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, kinds))


def findings(path: Path) -> Iterator[str]:
    """What in a file could turn bytes into objects or code."""
    for node in nodes(path):
        if isinstance(node, ast.Import | ast.ImportFrom):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else [node.module or ""]
            yield from (name for name in names if name.partition(".")[0] in MODULES)
        elif isinstance(node, ast.Call):
            yield from _call(node)


def _call(node: ast.Call) -> Iterator[str]:
    function = node.func
    if isinstance(function, ast.Name) and function.id in CALLS:
        yield function.id
    if isinstance(function, ast.Attribute):
        base = function.value.id if isinstance(function.value, ast.Name) else ""
        if function.attr in METHODS or (base, function.attr) in QUALIFIED or base in MODULES:
            yield function.attr
    for keyword in node.keywords:
        if keyword.arg in TRUE_KEYWORDS and not (
            isinstance(keyword.value, ast.Constant) and keyword.value.value is False
        ):
            yield str(keyword.arg)


def imports(path: Path) -> Iterator[str]:
    for node in nodes(path):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.module or ""


def files() -> dict[str, Path]:
    """The product's by their path below it, the proof's with its name in front."""
    return {
        str(path.relative_to(below)): path
        for below, root in ((SOURCE, SOURCE), (PROOF.parent, PROOF))
        for path in sorted(root.rglob("*.py"))
    }


def users_of(package: str) -> set[str]:
    return {name for name, path in files().items() if any(used.startswith(package) for used in imports(path))}


def test_nothing_unpickles_evaluates_or_runs_a_shell() -> None:
    found = {name: set(findings(path)) for name, path in files().items()}
    assert len(found) > 200
    assert {name: what for name, what in found.items() if what} == OWN_BYTES_ONLY


def test_the_product_imports_nothing_of_its_proof() -> None:
    """Its attack code, the tool that pickles its own objects and the one that compiles mutants are in no engine."""
    assert {name for name in users_of("kvbaton_proof") if not name.startswith("kvbaton_proof/")} == set()


@pytest.mark.parametrize(
    "line",
    [
        "import pickle",
        "from cloudpickle import loads",
        "import torch\ntorch.load('x')",
        "import yaml\nyaml.load('x')",
        "import numpy as np\nnp.load('x')",
        "thing(allow_pickle=True)",
        "thing(allow_pickle=flag)",
        "eval('1')",
        "exec('1')",
        "socket.recv_pyobj()",
        "socket.send_pyobj({})",
        "import multiprocessing\nmultiprocessing.Queue()",
        "run('ls', shell=True)",
        "import marshal",
        "import shelve",
        "import dill",
    ],
)
def test_the_scan_sees_what_it_looks_for(tmp_path: Path, line: str) -> None:
    planted = tmp_path / "planted.py"
    planted.write_text(line)
    assert list(findings(planted))


def test_a_harmless_file_is_harmless(tmp_path: Path) -> None:
    planted = tmp_path / "fine.py"
    planted.write_text("import json\njson.loads('1')\nrun('ls', shell=False)\nopen('x')\n")
    assert list(findings(planted)) == []


def _files(layer: str) -> list[Path]:
    found = sorted((SOURCE / layer).rglob("*.py"))
    assert found, f"no such folder: {layer}"
    return found


def test_ids_nonces_and_keys_come_from_the_operating_system() -> None:
    """`random` is for simulations, tests and load; nothing that serves imports it."""
    users = [
        str(path.relative_to(SOURCE))
        for layer in RANDOM_NEVER
        for path in _files(layer)
        if "random" in set(imports(path))
    ]
    assert users == []
