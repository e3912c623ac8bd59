"""The cost of parsing a JSON text, estimated from its bytes, so that no body can block an event loop.

Law: what passes here is parsed, walked and written again within tens of milliseconds, whatever its shape. Nothing here
makes an object of a value: a text is filtered down to its marks by the speed of `bytes.translate`.
"""

from __future__ import annotations

import itertools

from kvbaton.api.api_errors import ApiError

NESTING_MAX = 128
"""Of lists and objects within each other."""
VALUES_MAX = 1 << 18
"""Of all kinds: a prompt of so many token ids costs 50 ms."""
CONTAINERS_MAX = 1 << 15
"""Lists and objects: each costs ten numbers."""
TEXTS_MAX = 1 << 16
"""Names of fields are among them: each that is new costs 1 us."""
HARD_NUMBERS_MAX = 1024
"""Of 20 digits or more, or with an exponent: `1.5e300` takes the parser 30 us, 1,000 times what `1.5` takes."""
EASY_BYTES = 16 << 10
"""A text of no more than this is cheap whatever it holds, but for its depth."""

_LONG = b"0" * 20
_KEPT = b'"[]{},:'
_DIGITS = b"0123456789"
_STEPS = {ord("["): 1, ord("{"): 1, ord("]"): -1, ord("}"): -1}
_TABLE = bytes.maketrans(_DIGITS + b"E", b"0" * 10 + b"e")
_REST = bytes(each for each in range(256) if each not in _KEPT + _DIGITS + b"eE")


def too_costly(data: bytes, nesting_max: int = NESTING_MAX) -> str:
    """What there is too much of, "" if it may be parsed. Of a text that is no JSON whatever is true of its marks."""
    if len(data) <= EASY_BYTES and data.count(b"[") + data.count(b"{") <= nesting_max:
        return ""
    if b"\\" in data:  # no quote ends a text but those that are left
        data = data.replace(b"\\\\", b"__").replace(b'\\"', b"__")
    marks = data.translate(_TABLE, _REST)
    if marks.count(b'"') > 2 * TEXTS_MAX:
        return f"more than {TEXTS_MAX} texts"
    outside = b"".join(marks.split(b'"')[::2])
    containers = outside.count(b"[") + outside.count(b"{")
    if containers > CONTAINERS_MAX:
        return f"more than {CONTAINERS_MAX} lists and objects"
    if outside.count(b",") + containers >= VALUES_MAX:
        return f"more than {VALUES_MAX} values"
    if outside.count(_LONG) + outside.count(b"0e") > HARD_NUMBERS_MAX:
        return f"more than {HARD_NUMBERS_MAX} numbers with an exponent, or of {len(_LONG)} digits"
    return f"nested deeper than {nesting_max}" if _is_deep(outside, nesting_max) else ""


def check(data: bytes, nesting_max: int = NESTING_MAX) -> None:
    """Refuse a client's body that is not worth its time."""
    found = too_costly(data, nesting_max)
    if found:
        raise ApiError(400, f"body: {found}; send less in one request", param="body", code="invalid_json")


def _is_deep(marks: bytes, nesting_max: int) -> bool:
    brackets = marks.translate(None, b",:0e")
    return max(itertools.accumulate(map(_STEPS.__getitem__, brackets)), default=0) > nesting_max
