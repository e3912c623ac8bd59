"""Finds every number in the types of messages, and what to put there: a new field is tried without being listed."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import msgspec
from msgspec import inspect

MAD: tuple[int | float, ...] = (
    1e-300, 5e-324, math.inf, -math.inf, math.nan, -0.0, 0.5, 1e308, -1e308,
    0, 1, -1, 2, 1 << 31, 1 << 53, (1 << 63) - 1, 1 << 63, (1 << 64) - 1, -(1 << 31), -(1 << 63),
)  # fmt: skip
"""What no honest node says, and the edges of what it may."""

Path = tuple[str | int, ...]
"""From a message to a number in it: names of fields, and 0 for the first of a list, -1 for any key of a map."""


class Number(NamedTuple):
    """A number in a type."""

    path: Path
    kind: inspect.IntType | inspect.FloatType

    @property
    def is_bounded(self) -> bool:
        floor = (self.kind.ge, self.kind.gt) != (None, None)
        return floor and (self.kind.le, self.kind.lt) != (None, None)


def numbers_in(root: Any) -> list[Number]:
    """Every number of a type, however deep."""
    return list(_walk(inspect.type_info(root), (), ()))


def _walk(kind: inspect.Type, path: Path, above: tuple[type, ...]) -> Iterator[Number]:
    match kind:
        case inspect.IntType() | inspect.FloatType():
            yield Number(path, kind)
        case inspect.StructType(cls=cls, fields=fields) if cls not in above:
            for field in fields:
                yield from _walk(field.type, (*path, field.name), (*above, cls))
        case inspect.UnionType(types=types):
            for each in types:
                at = (*path, each.cls.__name__) if isinstance(each, inspect.StructType) and not path else path
                yield from _walk(each, at, above)
        case inspect.VarTupleType(item_type=item) | inspect.ListType(item_type=item) | inspect.SetType(item_type=item):
            yield from _walk(item, (*path, 0), above)
        case inspect.TupleType(item_types=items):
            for index, item in enumerate(items):
                yield from _walk(item, (*path, index), above)
        case inspect.DictType(key_type=key, value_type=value):
            yield from _walk(key, (*path, -1), above)
            yield from _walk(value, (*path, 0), above)
        case _:
            pass


def put(message: Any, path: Sequence[str | int], value: int | float) -> Any:
    """The message as it is encoded, but with that number in that place; None where there is no such place."""
    plain = msgspec.msgpack.decode(msgspec.msgpack.encode(message))
    return plain if _put(message, plain, path, value) else None


def _put(node: Any, plain: Any, path: Sequence[str | int], value: int | float) -> bool:
    step, rest = path[0], path[1:]
    if isinstance(node, msgspec.Struct):
        config = node.__struct_config__
        at: Any = step
        if config.array_like:
            at = node.__struct_fields__.index(str(step)) + (config.tag is not None)
        child = getattr(node, str(step))
    else:
        at = step
        if not node:
            return False
        child = node[step]
    if rest:
        return _put(child, plain[at], rest, value)
    plain[at] = value
    return True
