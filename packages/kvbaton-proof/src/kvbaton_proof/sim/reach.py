"""Lines of the product that simulated worlds reach, and by which seeds: lines never reached cannot be checked.

Needs `coverage` (the `dev` extra). A line outside of functions is reached by importing its module; it counts, as
it does everywhere, and the share within functions is told beside it.
"""

from __future__ import annotations

import ast
import contextlib
import importlib
import inspect
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from kvbaton_proof.sim.mutants.mutation import PACKAGE
from kvbaton_proof.sim.run import run_seed

EXCLUDED = (r"class .*\(Protocol\):", r"if TYPE_CHECKING:")

Lines = dict[str, dict[int, list[int]]]
"""By module and line, the seeds that reach it."""


class NoCoverage(RuntimeError):
    """The tool that sees lines is not installed."""


def tool() -> Any:
    try:
        return importlib.import_module("coverage")
    except ModuleNotFoundError as error:
        raise NoCoverage("coverage is not installed; next step: pip install 'kvbaton[dev]'") from error


def path_of(module: str) -> str:
    return str(Path(inspect.getfile(importlib.import_module(PACKAGE + module))))


def reached_by(modules: Sequence[str], seeds: Iterable[int]) -> Lines:
    """Run these seeds and note for each line which of them came by."""
    paths = {module: path_of(module) for module in modules}
    seen = tool().Coverage(data_file=None, branch=False, config_file=False, include=list(paths.values()))
    seen.start()
    try:
        for seed in seeds:
            seen.switch_context(str(seed))
            with contextlib.suppress(Exception):  # who calls us looks at alarms; this is about lines
                run_seed(seed)
    finally:
        seen.stop()
    data = seen.get_data()
    return {module: _by_line(data, path) for module, path in paths.items()}


def _by_line(data: Any, path: str) -> dict[int, list[int]]:
    by_line = data.contexts_by_lineno(path)
    return {line: sorted(int(name) for name in names if name) for line, names in by_line.items()}


def together(parts: Iterable[Lines]) -> Lines:
    """What several processes saw, as one."""
    whole: dict[str, dict[int, list[int]]] = defaultdict(dict)
    for part in parts:
        for module, lines in part.items():
            for line, seeds in lines.items():
                whole[module][line] = sorted({*whole[module].get(line, []), *seeds})
    return dict(whole)


class Span(msgspec.Struct, frozen=True):
    """A function's statements."""

    name: str
    statements: frozenset[int]


def statements(module: str) -> frozenset[int]:
    """The lines that coverage counts in this module."""
    seen = tool().Coverage(data_file=None, config_file=False)
    for pattern in EXCLUDED:
        seen.exclude(pattern)
    _, lines, _, _, _ = seen.analysis2(path_of(module))
    return frozenset(lines)


def functions(module: str) -> list[Span]:
    """Each function with the statements of its body; nested ones are part of theirs."""
    counted = statements(module)
    tree = ast.parse(Path(path_of(module)).read_text())
    spans: list[Span] = []
    for node in tree.body:
        inner = [(f"{node.name}.", node.body)] if isinstance(node, ast.ClassDef) else [("", [node])]
        for prefix, body in inner:
            for each in body:
                if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef) and each.end_lineno is not None:
                    lines = range(each.body[0].lineno, each.end_lineno + 1)
                    spans.append(Span(prefix + each.name, counted.intersection(lines)))
    return spans
