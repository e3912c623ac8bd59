"""One-place changes of a function, found in its syntax tree: what a tired hand gets wrong.

A guard is dropped, a condition always or never holds, a comparison is turned or is off by one, a field is forgotten, a
loop ends after its first pass, a call is left out, a bound is not kept, an error is not caught, a function returns at
once. What is only told and decides nothing
(logging, counters, marks, the words of an error) is left alone, and so are `assert` and `__init__`, whose mistakes
every test sees.

Laws: the same source gives the same edits in the same order. An edit changes one place of the tree that it was found
in, once, and says in words what was there and what is there now.
"""

from __future__ import annotations

import ast
import copy
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import msgspec

TEXT_MAX = 90
TOLD = frozenset({"count", "mark", "_mark", "say", "debug", "info", "warning", "error", "exception", "_report_fault"})
"""Calls that only tell somebody something."""
COUNTED = (".counts", ".counters", ".faults")
"""Tables of figures, and a figure, for whoever watches: nothing that generated mutants are drawn from asks them."""
WORDS = frozenset({"detail", "trace"})
"""Arguments that only tell somebody something."""
ENDS_BLOCK = (ast.Return, ast.Raise, ast.Continue, ast.Break)

_EDGE: dict[type[ast.cmpop], type[ast.cmpop]] = {ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt}
_TURNED: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Eq: ast.NotEq, ast.NotEq: ast.Eq, ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In,
    ast.Lt: ast.GtE, ast.LtE: ast.Gt, ast.Gt: ast.LtE, ast.GtE: ast.Lt,
}  # fmt: skip
_OTHER_CALL = {"min": "max", "max": "min", "any": "all", "all": "any"}

Function = ast.FunctionDef | ast.AsyncFunctionDef
Signatures = Callable[[ast.expr], inspect.Signature | None]
"""What a called expression takes, where that can be said."""


class Edit(msgspec.Struct, frozen=True):
    """One change that can be made, once, to the tree that it was found in; `lines`: of the statement it is in."""

    operator: str
    what: str
    lines: range
    make: Callable[[], None]


class Slot(msgspec.Struct, frozen=True):
    """Where a node hangs in its tree."""

    parent: Any
    field: str
    index: int | None = None

    def put(self, node: Any) -> None:
        if self.index is None:
            setattr(self.parent, self.field, node)
        else:
            getattr(self.parent, self.field)[self.index] = node


def edits(function: Function, signature_of: Signatures = lambda call: None) -> Iterator[Edit]:
    """Every change of this function's body, in the order of its source."""
    if function.name == "__init__":
        return
    start = 1 if ast.get_docstring(function, clean=False) is not None else 0
    yield from _early(function, start)
    collector = _Collector(signature_of, _says(function.returns) == "bool")
    for index in range(start, len(function.body)):
        for edit in collector.visit(function.body[index], Slot(function, "body", index)):
            yield msgspec.structs.replace(edit, lines=collector.lines)


def _edit(operator: str, old: ast.AST, new: ast.AST | str, slot: Slot, put: Any = None) -> Edit:
    """Put `new` (or `put`, where `new` is only how it reads) in the place of `old`."""
    made = new if put is None else put
    text = new if isinstance(new, str) else _says(new)
    assert isinstance(made, ast.AST)

    def make() -> None:
        slot.put(ast.copy_location(made, old))
        ast.fix_missing_locations(made)

    return Edit(operator, f"{_says(old)} -> {text}", range(0), make)


def _header(node: ast.stmt) -> range:
    """A statement's own lines, without those of the statements in it."""
    inner = [each.lineno for each in ast.walk(node) if isinstance(each, ast.stmt) and each is not node]
    return range(node.lineno, max(min(inner, default=(node.end_lineno or node.lineno) + 1), node.lineno + 1))


def _says(node: ast.AST | None) -> str:
    text = "" if node is None else ast.unparse(node)
    head = text.splitlines()[0] if text else ""
    return head if len(head) <= TEXT_MAX else head[: TEXT_MAX - 1] + "…"


def _early(function: Function, start: int) -> Iterator[Edit]:
    """The function does nothing and says the simplest thing that its type allows."""
    says = _says(function.returns)
    values = {"None": (None,), "bool": (True, False)}.get(says, (None,) if says.endswith("| None") else ())
    if len(function.body) - start < 2:  # what one statement does, other edits leave out
        return
    first = function.body[start]
    for value in values:
        back = ast.Return(None if says == "None" else ast.Constant(value))

        def make(back: ast.Return = back) -> None:
            function.body.insert(start, ast.copy_location(back, first))
            ast.fix_missing_locations(back)

        yield Edit("early", f"{function.name}: {_says(back)} at once", range(first.lineno, first.lineno + 1), make)


class _Collector:
    """Walks one function; yields a node's own edits before those of its children."""

    def __init__(self, signature_of: Signatures, answers_bool: bool) -> None:
        self._signature_of = signature_of
        self._answers_bool = answers_bool
        self.lines = range(0)

    def visit(self, node: ast.AST, slot: Slot) -> Iterator[Edit]:
        if isinstance(node, ast.stmt):
            self.lines = _header(node)
        if isinstance(node, ast.Assert | ast.JoinedStr | ast.Pass) or _is_telling(node):
            return
        own = getattr(self, f"_on_{type(node).__name__}", None)
        if own is not None:
            yield from own(node, slot)
        if not isinstance(node, ast.Raise):
            yield from self._children(node)

    def _children(self, node: ast.AST) -> Iterator[Edit]:
        for field, value in ast.iter_fields(node):
            if field in ("annotation", "returns", "decorator_list", "args") and not isinstance(node, ast.Call):
                continue
            if isinstance(value, ast.AST):
                yield from self.visit(value, Slot(node, field))
            elif isinstance(value, list):
                for index, each in enumerate(value):
                    if isinstance(each, ast.AST):
                        yield from self.visit(each, Slot(node, field, index))

    # --- statements

    def _on_If(self, node: ast.If, slot: Slot) -> Iterator[Edit]:
        test = Slot(node, "test")
        if isinstance(node.body[-1], ENDS_BLOCK) and not node.orelse:
            yield _edit("guard", node, f"nothing ({_says(node.body[-1])} skipped)", slot, ast.Pass())
        else:
            yield _edit("never", node.test, ast.Constant(False), test)
        yield _edit("always", node.test, ast.Constant(True), test)

    def _on_While(self, node: ast.While, slot: Slot) -> Iterator[Edit]:
        yield _edit("never", node.test, ast.Constant(False), Slot(node, "test"))
        if not isinstance(node.body[-1], ENDS_BLOCK):
            yield _edit("once", node, f"{_says(node)} once", slot, _ended_after_first(node))

    def _on_For(self, node: ast.For, slot: Slot) -> Iterator[Edit]:
        yield _once(node.iter, Slot(node, "iter"))

    def _on_comprehension(self, node: ast.comprehension, slot: Slot) -> Iterator[Edit]:
        yield _once(node.iter, Slot(node, "iter"))
        for index, test in enumerate(node.ifs):
            yield _edit("always", test, ast.Constant(True), Slot(node, "ifs", index))

    def _on_Assign(self, node: ast.Assign, slot: Slot) -> Iterator[Edit]:
        yield from _forgotten(node, node.targets, slot)

    def _on_AnnAssign(self, node: ast.AnnAssign, slot: Slot) -> Iterator[Edit]:
        yield from _forgotten(node, [node.target], slot)

    def _on_AugAssign(self, node: ast.AugAssign, slot: Slot) -> Iterator[Edit]:
        yield _edit("forget", node, "nothing", slot, ast.Pass())

    def _on_Delete(self, node: ast.Delete, slot: Slot) -> Iterator[Edit]:
        yield _edit("forget", node, "nothing", slot, ast.Pass())

    def _on_Expr(self, node: ast.Expr, slot: Slot) -> Iterator[Edit]:
        if isinstance(node.value, ast.Call):
            yield _edit("drop", node, "nothing", slot, ast.Pass())

    def _on_ExceptHandler(self, node: ast.ExceptHandler, slot: Slot) -> Iterator[Edit]:
        if not isinstance(node.body[-1], ast.Raise):
            through = ast.ExceptHandler(node.type, node.name, [ast.Raise()])
            yield _edit("uncaught", node, "raise", slot, through)

    def _on_Raise(self, node: ast.Raise, slot: Slot) -> Iterator[Edit]:
        if not (isinstance(slot.parent, ast.If) and len(slot.parent.body) == 1):  # else the guard is dropped
            yield _edit("drop", node, "nothing", slot, ast.Pass())

    def _on_Return(self, node: ast.Return, slot: Slot) -> Iterator[Edit]:
        turned = isinstance(node.value, ast.Constant | ast.Compare) or _is_not(node.value)
        if self._answers_bool and node.value is not None and not turned:
            yield _edit("turn", node.value, ast.UnaryOp(ast.Not(), copy.deepcopy(node.value)), Slot(node, "value"))

    # --- expressions

    def _on_IfExp(self, node: ast.IfExp, slot: Slot) -> Iterator[Edit]:
        if isinstance(node.body, ast.JoinedStr) or isinstance(node.orelse, ast.JoinedStr):
            return  # words
        yield _edit("always", node, node.body, slot)
        yield _edit("never", node, node.orelse, slot)

    def _on_Compare(self, node: ast.Compare, slot: Slot) -> Iterator[Edit]:
        for index, operator in enumerate(node.ops):
            for name, others in (("edge", _EDGE), ("turn", _TURNED)):
                if type(operator) in others:
                    other = copy.copy(node)
                    other.ops = [*node.ops[:index], others[type(operator)](), *node.ops[index + 1 :]]
                    yield _edit(name, node, other, slot)

    def _on_BoolOp(self, node: ast.BoolOp, slot: Slot) -> Iterator[Edit]:
        other = copy.copy(node)
        other.op = ast.Or() if isinstance(node.op, ast.And) else ast.And()
        yield _edit("logic", node, other, slot)
        for index in range(len(node.values)):
            rest = [*node.values[:index], *node.values[index + 1 :]]
            kept = rest[0] if len(rest) == 1 else ast.BoolOp(node.op, rest)
            yield _edit("operand", node, kept, slot)

    def _on_UnaryOp(self, node: ast.UnaryOp, slot: Slot) -> Iterator[Edit]:
        if isinstance(node.op, ast.Not):
            yield _edit("turn", node, node.operand, slot)

    def _on_Constant(self, node: ast.Constant, slot: Slot) -> Iterator[Edit]:
        if isinstance(node.value, bool):
            yield _edit("turn", node, ast.Constant(not node.value), slot)
        elif isinstance(node.value, int):
            yield _edit("off_up", node, ast.Constant(node.value + 1), slot)
            if node.value:
                yield _edit("off_down", node, ast.Constant(node.value - 1), slot)

    def _on_Slice(self, node: ast.Slice, slot: Slot) -> Iterator[Edit]:
        if _says(node.upper).endswith("CHARS_MAX"):
            return  # how much of a text is told; the codec refuses what is too long
        for field in ("lower", "upper"):
            yield from _shifted(getattr(node, field), Slot(node, field))

    def _on_BinOp(self, node: ast.BinOp, slot: Slot) -> Iterator[Edit]:
        other: ast.operator | None = None
        if isinstance(node.op, ast.Add | ast.Sub):
            other = ast.Sub() if isinstance(node.op, ast.Add) else ast.Add()
        elif isinstance(node.op, ast.BitAnd):
            other = ast.BitOr()
        if other is not None:
            yield _edit("arithmetic", node, ast.BinOp(node.left, other, node.right), slot)
        if isinstance(node.op, ast.FloorDiv):
            up = ast.UnaryOp(ast.USub(), ast.BinOp(ast.UnaryOp(ast.USub(), node.left), ast.FloorDiv(), node.right))
            yield _edit("off_up", node, up, slot)

    def _on_Call(self, node: ast.Call, slot: Slot) -> Iterator[Edit]:
        if isinstance(node.func, ast.Name):
            if node.func.id in _OTHER_CALL:
                yield _edit("other", node.func, ast.Name(_OTHER_CALL[node.func.id], ast.Load()), Slot(node, "func"))
            if node.func.id in ("min", "max") and len(node.args) == 2:
                for value in node.args:
                    yield _edit("bound", node, value, slot)
            if node.func.id == "range" and node.args:
                last = len(node.args[:2]) - 1
                yield from _shifted(node.args[last], Slot(node, "args", last))
        yield from self._defaults(node, slot)

    def _defaults(self, node: ast.Call, slot: Slot) -> Iterator[Edit]:
        """An argument is forgotten: its default stands, or None where it has none."""
        signature = self._signature_of(node.func)
        for index, keyword in enumerate(node.keywords):
            if keyword.arg is None or keyword.arg in WORDS:
                continue
            rest = [*node.keywords[:index], *node.keywords[index + 1 :]]
            if _says(node.func).endswith("replace") or _has_default(signature, keyword.arg):
                said = f"without {keyword.arg}"
                yield _edit("default", node, said, slot, ast.Call(node.func, node.args, rest))
            elif not isinstance(keyword.value, ast.Constant):
                put = ast.keyword(keyword.arg, ast.Constant(None))
                yield _edit("default", keyword, f"{keyword.arg}=None", Slot(node, "keywords", index), put)
        if signature is not None and node.args and not isinstance(node.args[-1], ast.Starred) and not node.keywords:
            names = [name for name in signature.parameters if name != "self"]
            if len(node.args) <= len(names) and _has_default(signature, names[len(node.args) - 1]):
                said = f"without {names[len(node.args) - 1]}"
                yield _edit("default", node, said, slot, ast.Call(node.func, node.args[:-1], []))


def _has_default(signature: inspect.Signature | None, name: str) -> bool:
    if signature is None or name not in signature.parameters:
        return False
    return signature.parameters[name].default is not inspect.Parameter.empty


def _once(values: ast.expr, slot: Slot) -> Edit:
    first = ast.Subscript(
        ast.Call(ast.Name("tuple", ast.Load()), [values], []), ast.Slice(None, ast.Constant(1)), ast.Load()
    )
    return _edit("once", values, f"only the first of {_says(values)}", slot, first)


def _ended_after_first(node: ast.While) -> ast.While:
    return ast.While(node.test, [*node.body, ast.Break()], node.orelse)


def _forgotten(node: ast.stmt, targets: list[ast.expr], slot: Slot) -> Iterator[Edit]:
    if all(isinstance(target, ast.Attribute | ast.Subscript) for target in targets):
        yield _edit("forget", node, "nothing", slot, ast.Pass())


def _shifted(bound: ast.expr | None, slot: Slot) -> Iterator[Edit]:
    if bound is not None and not isinstance(bound, ast.Constant | ast.UnaryOp):
        yield _edit("off_up", bound, ast.BinOp(bound, ast.Add(), ast.Constant(1)), slot)
        yield _edit("off_down", bound, ast.BinOp(bound, ast.Sub(), ast.Constant(1)), slot)


def _is_not(node: ast.expr | None) -> bool:
    return isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not)


def _is_telling(node: ast.AST) -> bool:
    if isinstance(node, ast.AugAssign):
        return ast.unparse(node.target).partition("[")[0].endswith(COUNTED)
    call = node.value if isinstance(node, ast.Expr) else node
    if not isinstance(call, ast.Call):
        return False
    name = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
    return name in TOLD or name.endswith("Error")
