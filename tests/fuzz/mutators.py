"""Ways to change an input: bytes here and there, or one value of the msgpack or JSON that it holds.

Law: all chance comes from the `rng` that is given; whatever the input is, the answer is bytes.
"""

from __future__ import annotations

import enum
import random
import struct
from collections.abc import Callable, Sequence
from typing import Any

import msgspec


class Shape(enum.Enum):
    """What an input is meant to be; it need not be."""

    BYTES = "bytes"
    MSGPACK = "msgpack"
    JSON = "json"
    TEXT = "text"


NODES_MAX = 400
DEEP = (2, 40, 200, 1100)
INTS = (0, 1, -1, 2, 63, 64, 127, 128, 255, 256, 4095, 4096, 65_535, 65_536, (1 << 31) - 1, 1 << 31, (1 << 32) - 1,
        1 << 32, (1 << 53) + 1, (1 << 63) - 1, 1 << 63, (1 << 64) - 1, -(1 << 31), -(1 << 63))  # fmt: skip
WORDS = ("", "0", "-1", "a", ":", "/", "..", "%", "___", "\0", "\n", "é", "\ud7ff", "\u2028", "x" * 70, "x" * 600,
         "null", "127.0.0.1", "::1", "[::1]:1",
         "tcp://10.0.0.1:5000", "nan", "9" * 40, "f" * 32, "P", "D", "READ")  # fmt: skip
FLOATS = (0.0, -0.0, 1.5, -1.0, 1e308, float("inf"), float("-inf"), float("nan"))
ODD_JSON = (b"1e999", b"-1e999", b"9" * 40, b"9" * 5000, b'"\\ud800"', b'"\\u0000"', b"[" * 1100, b'{"a":' * 300,
            b"\xff", b"\xef\xbb\xbf", b"null", b"{}", b"[]", b"-0", b"1E400", b"true")  # fmt: skip


def mutated(rng: random.Random, shape: Shape, data: bytes, others: Sequence[bytes]) -> bytes:
    """The input after one to four changes."""
    for _ in range(rng.choice((1, 1, 1, 2, 2, 4))):
        data = _once(rng, shape, data, others)
    return data


def _once(rng: random.Random, shape: Shape, data: bytes, others: Sequence[bytes]) -> bytes:
    if shape in (Shape.MSGPACK, Shape.JSON) and rng.random() < 0.75:
        changed = _tree_changed(rng, shape, data, others)
        if changed is not None:
            return changed
    if shape is Shape.JSON and rng.random() < 0.3:
        return _put(rng, data, rng.choice(ODD_JSON))
    if shape is Shape.TEXT and rng.random() < 0.5:
        return _put(rng, data, rng.choice(WORDS).encode(errors="surrogatepass"))
    return rng.choice(_BYTE_WAYS)(rng, data, others)


# --- bytes


def _put(rng: random.Random, data: bytes, more: bytes) -> bytes:
    at = rng.randint(0, len(data))
    return data[:at] + more + data[at + rng.choice((0, 0, 1, len(more))) :]


def _flip(rng: random.Random, data: bytes, others: Sequence[bytes]) -> bytes:
    if not data:
        return rng.randbytes(4)
    at = rng.randrange(len(data))
    return data[:at] + bytes([data[at] ^ 1 << rng.randrange(8)]) + data[at + 1 :]


def _byte(rng: random.Random, data: bytes, others: Sequence[bytes]) -> bytes:
    return _put(rng, data, bytes([rng.choice((0, 1, 0x7F, 0x80, 0xFF, rng.randrange(256)))]))


def _number(rng: random.Random, data: bytes, others: Sequence[bytes]) -> bytes:
    width = rng.choice((1, 2, 4, 8))
    value = rng.choice(INTS) & ((1 << 8 * width) - 1)
    return _put(rng, data, value.to_bytes(width, rng.choice(("little", "big"))))


def _cut(rng: random.Random, data: bytes, others: Sequence[bytes]) -> bytes:
    at = rng.randint(0, len(data))
    return data[:at] + data[at + rng.choice((1, 2, 4, 16, len(data))) :]


def _again(rng: random.Random, data: bytes, others: Sequence[bytes]) -> bytes:
    at, size = rng.randint(0, len(data)), rng.choice((1, 4, 16, 64))
    return data[: at + size] + data[at : at + size] * rng.choice((1, 1, 8)) + data[at + size :]


def _spliced(rng: random.Random, data: bytes, others: Sequence[bytes]) -> bytes:
    other = rng.choice(others)
    return data[: rng.randint(0, len(data))] + other[rng.randint(0, len(other)) :]


def _nested(rng: random.Random, data: bytes, others: Sequence[bytes]) -> bytes:
    return _put(rng, data, rng.choice((b"\x91", b"\x81\xa1x", b"[", b'{"a":')) * rng.choice(DEEP))


def _noise(rng: random.Random, data: bytes, others: Sequence[bytes]) -> bytes:
    return _put(rng, data, rng.randbytes(rng.choice((1, 2, 4, 8, 32))))


_BYTE_WAYS: tuple[Callable[[random.Random, bytes, Sequence[bytes]], bytes], ...] = (
    _flip, _flip, _byte, _byte, _number, _number, _cut, _again, _spliced, _nested, _noise,
)  # fmt: skip


# --- values


def _load(shape: Shape, data: bytes) -> Any:
    return msgspec.msgpack.decode(data) if shape is Shape.MSGPACK else msgspec.json.decode(data)


def _tree_changed(rng: random.Random, shape: Shape, data: bytes, others: Sequence[bytes]) -> bytes | None:
    """None when the input, or what would become of it, is not of its shape."""
    try:
        root = [_load(shape, data)]
        spots = _spots(root)
        holder, key = spots[rng.randrange(len(spots))]
        _change(rng, shape, holder, key, others)
        return msgspec.msgpack.encode(root[0]) if shape is Shape.MSGPACK else msgspec.json.encode(root[0])
    except (ValueError, TypeError, RecursionError, OverflowError, IndexError, KeyError, struct.error):
        return None


def _spots(root: list[Any]) -> list[tuple[Any, Any]]:
    """Every (container, key) of the tree, in its order."""
    found: list[tuple[Any, Any]] = []
    todo: list[Any] = [root]
    while todo and len(found) < NODES_MAX:
        holder = todo.pop()
        keys = list(holder) if isinstance(holder, dict) else range(len(holder))
        found += [(holder, key) for key in keys]
        todo += [holder[key] for key in keys if isinstance(holder[key], dict | list)]
    return found[:NODES_MAX]


def _change(rng: random.Random, shape: Shape, holder: Any, key: Any, others: Sequence[bytes]) -> None:
    value = holder[key]
    way = rng.random()
    if way < 0.5:
        if isinstance(value, list | dict):
            holder[key] = _regrouped(rng, shape, value)
        else:
            holder[key] = _near(rng, shape, value)
    elif way < 0.65:
        holder[key] = _anything(rng, shape)
    elif way < 0.75:
        del holder[key]
    elif way < 0.83:
        holder[key] = _graft(rng, shape, others)
    elif way < 0.88:
        holder[key] = _wrapped(rng, shape, value)
    elif isinstance(holder, list):
        holder.insert(rng.randint(0, len(holder)), value)
    else:
        holder[rng.choice(WORDS)] = value


def _regrouped(rng: random.Random, shape: Shape, value: Any) -> Any:
    """A list or map with none, more, or other neighbours within."""
    way = rng.randrange(4)
    more = _wrapped(rng, shape, 0) if way == 0 else _anything(rng, shape)
    if isinstance(value, dict):
        return {} if way == 1 else {**value, rng.choice(WORDS): more}
    if way == 1:
        return []
    if way == 2:
        return value * rng.choice((2, 3, 70))
    return rng.sample([*value, more], len(value) + 1) if way == 3 else [*value, more]


def _wrapped(rng: random.Random, shape: Shape, value: Any) -> Any:
    """The value within lists or maps, perhaps more of them than an interpreter's stack has room for."""
    depth = rng.choice(DEEP)
    if shape is Shape.MSGPACK:
        return msgspec.Raw(rng.choice((b"\x91", b"\x81\xa1x")) * depth + msgspec.msgpack.encode(value))
    opening, closing = rng.choice(((b"[", b"]"), (b'{"x":', b"}")))
    return msgspec.Raw(opening * depth + msgspec.json.encode(value) + closing * depth)


def _graft(rng: random.Random, shape: Shape, others: Sequence[bytes]) -> Any:
    spots = _spots([_load(shape, rng.choice(others))])
    holder, key = rng.choice(spots)
    return holder[key]


def _anything(rng: random.Random, shape: Shape) -> Any:
    """Of another type, most likely."""
    choices: list[Any] = [None, True, False, [], {}, rng.choice(INTS), rng.choice(WORDS), rng.choice(FLOATS)]
    if shape is Shape.MSGPACK:
        choices += [rng.randbytes(rng.choice((0, 4, 32))), msgspec.msgpack.Ext(rng.randrange(-128, 128), b"x")]
    return rng.choice(choices)


def _near(rng: random.Random, shape: Shape, value: Any) -> Any:
    """Of the same type."""
    match value:
        case bool():
            return not value
        case int():
            return rng.choice((value + 1, value - 1, value ^ 1 << rng.randrange(64), *rng.sample(INTS, 3)))
        case float():
            return rng.choice((value + 1, value * 1e6, -value, rng.choice(FLOATS)))
        case str():
            at = rng.randint(0, len(value))
            put = rng.choice((*WORDS, chr(rng.randrange(32, 127)), str(rng.choice(INTS))))
            return value[:at] + put + value[at + rng.choice((0, 1, len(put), len(value))) :]
        case bytes():
            found = _json_within(rng, value) if b"{" in value and rng.random() < 0.6 else None
            return rng.choice(_BYTE_WAYS)(rng, value, (value,)) if found is None else found
        case _:
            return _anything(rng, shape)


def _json_within(rng: random.Random, value: bytes) -> bytes | None:
    """One line's JSON object changed, in an answer or a stream of events."""
    lines = value.split(b"\n")
    index = rng.choice([number for number, line in enumerate(lines) if b"{" in line])
    head, brace, rest = lines[index].partition(b"{")
    changed = _tree_changed(rng, Shape.JSON, brace + rest, (brace + rest,))
    if changed is None:
        return None
    lines[index] = head + changed
    return b"\n".join(lines)
