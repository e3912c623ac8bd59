"""The values that a liar puts into a field, derived from the field's type: for every field of every message.

Laws: nothing here is listed by hand, so a field that is added is lied about. A lie is mostly one that the codec takes
(the floor and the ceiling of the type, its neighbour, what another message had there), since what it refuses gets no
further; the rest is just outside of what it takes. Trees are as msgpack has them: structs are lists, or dicts by name.
"""

from __future__ import annotations

import functools
import random
import struct
import typing
from collections import deque
from collections.abc import Mapping
from typing import Any

from msgspec import NODEFAULT, inspect

from kvbaton.protocol.wire import messages as m
from kvbaton.protocol.wire.codec import Envelope

OUTSIDE = 0.15
"""Share of lies that are outside of what the type takes."""
SEEN_MAX = 24
LIST_MAX = 40
"""Entries that a lie adds to a list at most, whatever its type allows: what is larger is for the quotas' own tests."""

Place = tuple[str, str]
"""(message, field): what a lie is about."""

_KINDS: dict[int, type] = {inspect.type_info(kind).tag: kind for kind in typing.get_args(m.Message)}  # type: ignore[attr-defined]
KINDS = tuple(kind for kind in _KINDS.values() if kind is not m.GrantedFrom)
OF_TARGET = (m.Renew, m.Commit, m.Abandon, m.Offer, m.Ack, m.Revoke)
"""What a D says of a lease that it reads."""
OF_SOURCE = (
    m.Granted, m.ClaimRefused, m.Renewed, m.RenewRefused, m.Ready, m.Committed, m.Stale, m.SourceLost, m.Accepted,
    m.Written, m.Quiesced,
)  # fmt: skip
"""What a P answers of one that it gave."""
"""What is drawn from: a grant that names origins is as good a lie as one that does not."""


@functools.cache
def shape_of(kind: type) -> inspect.StructType:
    found = inspect.type_info(kind)
    assert isinstance(found, inspect.StructType)
    return found


def leaves(info: inspect.Type) -> int:
    """How much there is to lie about in a value of that type."""
    if isinstance(info, inspect.StructType):
        return sum(leaves(field.type) for field in info.fields)
    return leaves(info.item_type) if isinstance(info, inspect.VarTupleType | inspect.ListType) else 1


def kind_of(body: list[Any]) -> type:
    return _KINDS[body[0]]


def all_places() -> list[Place]:
    """Every field that there is to lie about, those of the envelope among them."""
    kinds = (*KINDS, Envelope)
    return [(kind.__name__, f.name) for kind in kinds for f in shape_of(kind).fields if f.name != "body"]


class Seen:
    """What a liar has heard and said, by field: the names of other things, to be used in the wrong place."""

    def __init__(self) -> None:
        self._by_field: dict[str, deque[Any]] = {}

    def note(self, body: list[Any]) -> None:
        for field, value in zip(shape_of(kind_of(body)).fields, body[1:], strict=False):
            if field.name not in ("card", "final", "deferred"):
                self.add(field.name, value)

    def add(self, field: str, value: Any) -> None:
        known = self._by_field.setdefault(field, deque(maxlen=SEEN_MAX))
        if value not in known:
            known.append(value)

    def any_of(self, rng: random.Random, field: str) -> Any:
        """A value that was seen in that field; None when there was none."""
        known = self._by_field.get(field)
        return known[rng.randrange(len(known))] if known else None


class Fields:
    """Makes lies, all from one source of chance."""

    def __init__(self, rng: random.Random, seen: Seen) -> None:
        self.rng = rng
        self.seen = seen

    def altered(self, body: list[Any], field: str) -> list[Any]:
        """The message with a lie in that field. Fields that its version does not have are left alone."""
        fields = shape_of(kind_of(body)).fields
        at = next(n for n, each in enumerate(fields, 1) if each.name == field)
        if at >= len(body):
            return body
        return [*body[:at], self.lie(fields[at - 1].type, body[at], field), *body[at + 1 :]]

    def invented(self, kind: type) -> list[Any]:
        """A message that nobody asked for, of values that were seen, or of none."""
        body: list[Any] = [shape_of(kind).tag]
        for field in shape_of(kind).fields:
            value = self.seen.any_of(self.rng, field.name)
            body.append(self._blank(field.type) if value is None else value)
        return body

    def named(self, kind: type, known: Mapping[str, Any]) -> list[Any]:
        """A message about something of others, by numbers that are known: those are no secrets, and prove nothing."""
        body = self.invented(kind)
        for at, field in enumerate(shape_of(kind).fields, 1):
            body[at] = known.get(field.name, self.rng.getrandbits(20) if field.name == "reservation" else body[at])
        return body

    def lie(self, info: inspect.Type, value: Any, name: str) -> Any:
        """Another value than `value` for a field of that type and name."""
        seen = self.seen.any_of(self.rng, name)
        if seen is not None and seen != value and self.rng.random() < 0.4:
            return seen
        return self._changed(info, value, name)

    def _changed(self, info: inspect.Type, value: Any, name: str) -> Any:
        match info:
            case inspect.StructType():
                return self._struct(info, value)
            case inspect.VarTupleType() | inspect.ListType():
                return self._list(info, list(value), name)
            case inspect.DictType():
                return self._dict(info, dict(value))
            case inspect.IntType():
                return self._int(info, value)
            case inspect.FloatType():
                return self._float(info, value)
            case inspect.StrType():
                return self._text(info, value)
            case inspect.BytesType():
                return self._blocks(value) if name == "blocks" else self._bytes(info, value)
            case inspect.BoolType():
                return not value
            case inspect.EnumType():
                return self.rng.choice([*(each.value for each in info.cls), "other"])
            case inspect.UnionType():  # a reason, or none
                return None if value is not None and self.rng.random() < 0.5 else self.rng.choice(("busy", "x" * 64))
        raise TypeError(f"{name}: nothing is known of {info}, add it to the liar's fields")

    def _struct(self, info: inspect.StructType, value: Any) -> Any:
        field = self.rng.choices(info.fields, [leaves(each.type) for each in info.fields])[0]
        if isinstance(value, dict):
            had = value.get(field.name, field.default)
            return {**value, field.name: self._changed(field.type, _plain(had), field.name)}
        at = info.fields.index(field)
        if at >= len(value):
            return value
        return [*value[:at], self._changed(field.type, value[at], field.name), *value[at + 1 :]]

    def _list(self, info: inspect.VarTupleType | inspect.ListType, value: list[Any], name: str) -> Any:
        rng = self.rng
        if value and rng.random() < 0.5:
            at = rng.randrange(len(value))
            return [*value[:at], self._changed(info.item_type, value[at], name), *value[at + 1 :]]
        more = value[-1] if value else self._blank(info.item_type)
        ways = [[], value[:-1], [*value, more], value[::-1], [more] * min(info.max_length or LIST_MAX, LIST_MAX)]
        return rng.choice(ways)

    def _dict(self, info: inspect.DictType, value: dict[Any, Any]) -> Any:
        keys = list(value)
        if not keys or self.rng.random() < 0.3:
            return {**value, self.rng.choice(("model", "other", "")): "other"}
        key = self.rng.choice(keys)
        rest = {other: value[other] for other in keys if other != key}
        return rest if self.rng.random() < 0.5 else {**rest, key: self._changed(info.value_type, value[key], "")}

    def _int(self, info: inspect.IntType, value: int) -> int:
        low, high = info.ge or 0, info.le if info.le is not None else (1 << 63) - 1
        if self.rng.random() < OUTSIDE:
            return self.rng.choice((low - 1, high + 1, -1, -(1 << 63)))
        inside = [low, high, low + 1, high // 2, value + 1, value - 1, value * 2, self.rng.randint(0, 40)]
        return max(low, min(high, self.rng.choice(inside)))

    def _float(self, info: inspect.FloatType, value: float) -> float:
        low, high = float(info.ge or 0.0), float(info.le if info.le is not None else 1e308)
        if self.rng.random() < OUTSIDE:
            return self.rng.choice((low / 2, high * 2, -1.0, 0.0, float("nan"), float("inf"), 1e-300))
        return max(low, min(high, self.rng.choice((low, low, high, value * 2, value / 2, low * 2, high / 2))))

    def _text(self, info: inspect.StrType, value: str) -> str:
        longest = info.max_length or 128
        if self.rng.random() < OUTSIDE:
            return "x" * (longest + 1)
        flip = self.rng.randrange(len(value)) if value else 0
        near = value[:flip] + ("A" if value[flip : flip + 1] != "A" else "B") + value[flip + 1 :]
        return self.rng.choice(("", near, near, value[:-1], "x" * min(longest, 200), "shm", "busy"))[:longest]

    def _bytes(self, info: inspect.BytesType, value: bytes) -> bytes:
        longest = info.max_length or 64
        if self.rng.random() < OUTSIDE:
            return bytes(longest + 1)
        near = bytes([*value[:-1], value[-1] ^ 1]) if value else b"\0"
        return self.rng.choice((b"", near, value[:-1], value + b"0", value[::-1], bytes(min(longest, 64))))[:longest]

    def _blocks(self, value: bytes) -> bytes:
        """Block ids that are not its own, or nobody's; too few, too many, in another order, one of them twice."""
        rng = self.rng
        ids = list(struct.unpack(f"<{len(value) // 4}i", value[: len(value) // 4 * 4]))
        strange = rng.choice((0, -1, -2, (1 << 31) - 1, -(1 << 31), rng.randint(0, 30), rng.randint(0, 400)))
        at = rng.randrange(len(ids)) if ids else 0
        one = [*ids[:at], strange, *ids[at + 1 :]]  # most often: a list of another length is refused sooner
        ways = [
            *[one] * 5,
            [rng.randint(0, 30) for _ in ids],
            ids[:-1],
            [*ids, strange],
            ids[::-1],
            [ids[0]] * len(ids) if ids else [strange],
            [],
        ]
        found = rng.choice(ways)
        packed = struct.pack(f"<{len(found)}i", *found)
        return packed + b"\1" if rng.random() < OUTSIDE / 3 else packed

    def _blank(self, info: inspect.Type) -> Any:
        match info:
            case inspect.StructType():
                return [self._blank(field.type) for field in info.fields]
            case inspect.VarTupleType() | inspect.ListType():
                return []
            case inspect.DictType():
                return {}
            case inspect.StrType() | inspect.EnumType():
                return ""
            case inspect.BytesType():
                return b""
            case inspect.BoolType():
                return self.rng.random() < 0.5
            case inspect.FloatType():
                return info.ge or 0.0
            case inspect.UnionType():
                return None
        return self.rng.randint(0, 8)


def _plain(value: Any) -> Any:
    """A default as msgpack would have it."""
    return 0 if value is NODEFAULT else list(value) if isinstance(value, tuple) else value
