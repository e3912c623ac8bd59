"""Generated mutants: every one-place change of the modules that decide something, by a name that lasts, switchable.

A name is module, function, operator and number of that edit within the function, such as
`protocol.machines.lease:judge:guard:1`: an edit of another function renames nothing. Of a state machine's table, each
row is a place too (`protocol.machines.lease:LEASE:row:1`): its transition is forgotten, and the event comes too late.

A mutant is switched on by compiling its module with the one change and giving the running function the new code, so
everybody who has imported it, and every object that has bound it, runs the mutant. Memories of earlier results
(`lru_cache`) are emptied with each switch, but for this tool's own, of the code as it is written and of clean worlds.

Laws: after the switch the original code is back, whatever happened in between. A name that no longer means anything is
an error, never a mutant that does nothing.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import importlib
import inspect
import pkgutil
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import Any, TypeGuard

import msgspec

import kvbaton.protocol
import kvbaton.ranks
from kvbaton.protocol.legality import Table
from kvbaton_proof.sim.mutants.mutation import PACKAGE, forget_results
from kvbaton_proof.sim.mutants.mutation_operators import Edit, Function, Signatures, edits

ROW = "row"
TELLS_ONLY = frozenset({"__repr__", "__str__", "Intake.ended", "Doorway.put_blocks"})
"""Words and figures for whoever watches."""


def core() -> tuple[str, ...]:
    """What decides: the whole protocol, and the three modules that carry it out."""
    found = pkgutil.walk_packages(kvbaton.protocol.__path__, f"{PACKAGE}protocol.")
    protocol = sorted(each.name.removeprefix(PACKAGE) for each in found if not each.ispkg)
    return (*protocol, "node.node", "node.doorway", "node.epochs")


_CARRIED = "sockets and threads, which decide nothing: a world has a carrier of its own in their place"
SOCKETS = {"ranks.rank_stream": _CARRIED}
"""What no world can run, and why; tests/ranks/test_rank_*.py do."""


def ranks() -> tuple[str, ...]:
    """Rank links: what stands between a node and data planes in other processes, but for the sockets themselves."""
    names = sorted(f"ranks.{each.name}" for each in pkgutil.iter_modules(kvbaton.ranks.__path__))
    return tuple(name for name in names if name.startswith("ranks.rank_") and name not in SOCKETS)


class Place(msgspec.Struct, frozen=True):
    """One generated mutant: where it is and what it changes."""

    name: str
    module: str
    function: str
    operator: str
    what: str
    lines: range  # of its statement; none: it is of no function, and every world comes by

    @property
    def where(self) -> str:
        line = f":{self.lines.start}" if self.lines else ""
        return f"{self.module.replace('.', '/')}.py{line} {self.function}"


class Vanished(LookupError):
    """A kept name that the code no longer has."""


def places(module: str) -> list[Place]:
    """All mutants of a module, in the order of its source."""
    return [*(place for place, _ in _found(module, _written(module))), *(place for place, *_ in _rows(module))]


def place_of(name: str, what: str = "") -> Place:
    """The mutant of that name; where `what` is given and has moved within its function, the one it moved to."""
    module, function, operator, _ = _split(name)
    here = [place for place, _ in _found(module, _written(module), function) if place.operator == operator]
    here += [place for place, *_ in _rows(module) if (place.function, place.operator) == (function, operator)]
    named = [place for place in here if place.name == name and what in ("", place.what)]
    same = named or [place for place in here if what and place.what == what]
    if len(same) != 1:
        known = "; ".join(f"{place.name} ({place.what})" for place in here) or "no such place"
        raise Vanished(f"{name}: {what or 'this place'} is no longer there; there is: {known}")
    return same[0]


def is_equivalent(name: str) -> bool:
    """The change compiles to the code that is there: nothing to see."""
    place = place_of(name)
    if place.operator == ROW:
        return False
    return _sense(_mutated_code(place)) == _sense(_target(place).__code__)


@contextlib.contextmanager
def switched(name: str, what: str = "") -> Iterator[None]:
    """Run with this mutant on."""
    place = place_of(name, what)
    if place.operator == ROW:
        with _row_forgotten(place):
            yield
        return
    target, code = _target(place), _mutated_code(place)
    original = target.__code__
    forget_results()
    target.__code__ = code
    try:
        yield
    finally:
        target.__code__ = original
        forget_results()


class Switched:
    """The switch of a generated mutant."""

    def __init__(self, name: str, what: str) -> None:
        self._name, self._what = name, what
        self.modules = (name.partition(":")[0],)

    def __call__(self) -> contextlib.AbstractContextManager[None]:
        return switched(self._name, self._what)


# --- finding


def _split(name: str) -> tuple[str, str, str, int]:
    parts = name.split(":")
    if len(parts) != 4 or not parts[3].isdigit():
        raise Vanished(f"{name}: not the name of a generated mutant (module:function:operator:number)")
    return parts[0], parts[1], parts[2], int(parts[3])


@functools.cache
def _source(module: str) -> tuple[str, str]:
    path = Path(inspect.getfile(_imported(module)))
    return path.read_text(), str(path)


def _imported(module: str) -> ModuleType:
    try:
        return importlib.import_module(PACKAGE + module)
    except ModuleNotFoundError as error:
        raise Vanished(f"{module}: there is no such module") from error


def _parsed(module: str) -> ast.Module:
    """A tree to change."""
    return ast.parse(*_source(module))


@functools.cache
def _written(module: str) -> ast.Module:
    """A tree to look for places in: nobody changes it."""
    return _parsed(module)


def _found(module: str, tree: ast.Module, only: str = "") -> Iterator[tuple[Place, Edit]]:
    """Each place with the edit that makes it, in this very tree."""
    for function, node, owner in _functions(tree):
        if only not in ("", function):
            continue
        numbers: Counter[str] = Counter()
        for edit in edits(node, _signatures(module, owner)):
            numbers[edit.operator] += 1
            name = f"{module}:{function}:{edit.operator}:{numbers[edit.operator]}"
            yield Place(name, module, function, edit.operator, edit.what, edit.lines), edit


def _rows(module: str) -> Iterator[tuple[Place, Table[Any, Any], tuple[Any, Any]]]:
    """Each transition of the tables that a module makes, with what it is a transition of."""
    made = {node.targets[0].id for node in _written(module).body if _makes_a_table(node)}
    for variable in sorted(made):
        table: Table[Any, Any] = vars(_imported(module))[variable]
        for number, (pair, after) in enumerate(table.next.items(), 1):
            what = f"{pair[0].name}, {pair[1].name}: {after.name} -> late"
            yield Place(f"{module}:{variable}:{ROW}:{number}", module, variable, ROW, what, range(0)), table, pair


def _makes_a_table(node: ast.stmt) -> TypeGuard[Any]:
    return isinstance(node, ast.Assign) and isinstance(node.value, ast.Call) and ast.unparse(node.value.func) == "Table"


def _functions(tree: ast.Module) -> Iterator[tuple[str, Function, str]]:
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node.name, node, ""
        elif isinstance(node, ast.ClassDef) and not _is_typing(node):
            for each in node.body:
                if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef) and not (
                    {each.name, f"{node.name}.{each.name}"} & TELLS_ONLY
                ):
                    yield f"{node.name}.{each.name}", each, node.name


def _is_typing(node: ast.ClassDef) -> bool:
    return any(ast.unparse(base).split("[")[0] == "Protocol" for base in node.bases)


def _signatures(module: str, owner: str) -> Signatures:
    """Looks a callee up where the module's own code would: among its globals, and `self` in the class."""
    scope = vars(_imported(module))

    def signature_of(callee: ast.expr) -> inspect.Signature | None:
        try:
            found = _looked_up(callee, scope, owner)
            return inspect.signature(found) if callable(found) else None
        except (LookupError, AttributeError, ValueError, TypeError):
            return None

    return signature_of


def _looked_up(node: ast.expr, scope: dict[str, Any], owner: str) -> Any:
    if isinstance(node, ast.Name):
        return scope[owner if node.id == "self" else node.id]
    if isinstance(node, ast.Attribute):
        return getattr(_looked_up(node.value, scope, owner), node.attr)
    raise LookupError(ast.unparse(node))


# --- switching


def _target(place: Place) -> FunctionType:
    """The running function that a place is in, below whatever wraps it."""
    found: Any = _imported(place.module)
    for part in place.function.split("."):
        found = vars(found)[part]
    if isinstance(found, property):
        found = found.fget
    found = inspect.unwrap(getattr(found, "__func__", found))
    if not isinstance(found, FunctionType):
        raise Vanished(f"{place.name}: {place.function} is not a function any more")
    return found


@contextlib.contextmanager
def _row_forgotten(place: Place) -> Iterator[None]:
    table, pair = next((table, pair) for found, table, pair in _rows(place.module) if found == place)
    after, late = table.next, table.late
    table.next = {key: value for key, value in after.items() if key != pair}
    table.late = late | {pair}
    try:
        yield
    finally:
        table.next, table.late = after, late


def _mutated_code(place: Place) -> CodeType:
    tree = _parsed(place.module)
    owner = place.function.partition(".")[0]
    kept = [each for each in tree.body if isinstance(each, ast.ImportFrom) or getattr(each, "name", "") == owner]
    tree = ast.Module(kept, [])  # what else the module has does not change this code, and takes longer to compile
    next(edit for found, edit in _found(place.module, tree, place.function) if found.name == place.name).make()
    whole = compile(tree, _source(place.module)[1], "exec", dont_inherit=True)
    return next(code for code in _codes(whole) if code.co_qualname == place.function)


def _codes(code: CodeType) -> Iterator[CodeType]:
    for each in code.co_consts:
        if isinstance(each, CodeType):
            yield each
            yield from _codes(each)


def _sense(code: CodeType) -> tuple[Any, ...]:
    """What a code does, without where it was written."""
    consts = tuple(_sense(each) if isinstance(each, CodeType) else (type(each), each) for each in code.co_consts)
    return code.co_code, consts, code.co_names, code.co_varnames
