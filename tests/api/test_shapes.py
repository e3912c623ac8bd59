"""What costs too much to read is told from its marks; what is only long is not."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest

from kvbaton.api import bodies
from kvbaton.api.api_errors import ApiError
from kvbaton.api.bodies import (
    CONTAINERS_MAX,
    EASY_BYTES,
    HARD_NUMBERS_MAX,
    NESTING_MAX,
    TEXTS_MAX,
    VALUES_MAX,
    BodyKind,
    parse,
    too_costly,
)

BODY_BYTES = 4 << 20


def listed(unit: bytes, count: int) -> bytes:
    return b"[" + b",".join([unit] * count) + b"]"


def named(names: list[bytes]) -> bytes:
    return b"{" + b",".join(b'"%b":1' % name for name in names) + b"}"


# Each is built by its own test: together they are 50 MB, and collecting is no time to make them.
COSTLY: dict[str, tuple[Callable[[], bytes], str]] = {
    "lists": (lambda: listed(b"[]", BODY_BYTES // 3), "lists and objects"),
    "lists of lists": (lambda: listed(b"[[]]", BODY_BYTES // 5), "lists and objects"),
    "just not too deep": (lambda: listed(b"[" * 120 + b"]" * 120, BODY_BYTES // 241), "lists and objects"),
    "objects": (lambda: listed(b"{}", BODY_BYTES // 3), "lists and objects"),
    "depth": (lambda: b"[" * (CONTAINERS_MAX - 1) + b"]" * (CONTAINERS_MAX - 1), "nested deeper than 128"),
    "no ends": (lambda: b"[" * (BODY_BYTES // 2), "lists and objects"),
    "numbers": (lambda: listed(b"1", BODY_BYTES // 2), "values"),
    "truths": (lambda: listed(b"true", BODY_BYTES // 5), "values"),
    "texts": (lambda: listed(b'""', BODY_BYTES // 3), "texts"),
    "texts that end in a backslash": (lambda: listed(b'"\\\\"', BODY_BYTES // 5), "texts"),
    "names": (lambda: named([b"%d" % n for n in range(BODY_BYTES // 12)]), "texts"),
    "one name again and again": (lambda: named([b"a"] * (BODY_BYTES // 6)), "texts"),
    "floats with exponents": (lambda: listed(b"1.5e300", BODY_BYTES // 8), "values"),
    "floats with capital exponents": (lambda: listed(b"1E-300", BODY_BYTES // 7), "values"),
    "few of them": (lambda: listed(b"1.5E+300", 2 * HARD_NUMBERS_MAX), "numbers with an exponent"),
    "long floats": (
        lambda: listed(b"1.2345678901234567890123", BODY_BYTES // 25),
        "numbers with an exponent, or of 20 digits",
    ),
    "long numbers": (lambda: listed(b"9" * 4000, BODY_BYTES // 4001), "of 20 digits"),
}


@pytest.mark.parametrize("name", COSTLY)
def test_a_body_that_costs_more_than_its_length_is_refused_before_it_is_read(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each of these took 0.3 to 18 s of a router's event loop."""
    build, said = COSTLY[name]
    value = build()
    monkeypatch.setattr("kvbaton.api.bodies.msgspec.json.decode", None)
    for field in (b"prompt", b"foo", b"model"):
        with pytest.raises(ApiError, match=f"body: .*{said}") as refused:
            parse(BodyKind.COMPLETION, b'{"a":"x","%b":%b}' % (field, value))
        assert (refused.value.status, refused.value.code, refused.value.param) == (400, "invalid_json", "body")


@pytest.mark.parametrize(
    "text",
    [
        "hello, [world] {code}: 1e5, " * 100_000,
        '"quoted", \\"twice\\", and \\\\' * 100_000,
        "[" * 1_000_000,
        "1e5," * 500_000,
        "\\" * 500_000,
        "\\" * 500_001,
        "é\u2028\n\t" * 100_000,
        "0123456789" * 200_000,
    ],
)
@pytest.mark.parametrize("ascii_only", [True, False])
def test_a_long_text_is_only_long_whatever_stands_in_it(text: str, ascii_only: bool) -> None:
    data = json.dumps({"prompt": text, "n": 1}, ensure_ascii=ascii_only).encode()
    assert too_costly(data) == ""


@pytest.mark.parametrize(
    ("data", "more"),
    [
        (listed(b"7", VALUES_MAX - 1), listed(b"7", VALUES_MAX)),
        (listed(b"[]", CONTAINERS_MAX - 1), listed(b"[]", CONTAINERS_MAX)),
        (listed(b'"x"', TEXTS_MAX), listed(b'"x"', TEXTS_MAX + 1)),
        (named([b"x"] * TEXTS_MAX), named([b"x"] * (TEXTS_MAX + 1))),
        (listed(b"12345678901234567890", HARD_NUMBERS_MAX), listed(b"12345678901234567890", HARD_NUMBERS_MAX + 1)),
        (b"[" * NESTING_MAX + b"]" * NESTING_MAX, b"[" * (NESTING_MAX + 1) + b"]" * (NESTING_MAX + 1)),
        (b'{"a":' * NESTING_MAX + b"}" * NESTING_MAX, b'{"a":' * (NESTING_MAX + 1) + b"}" * (NESTING_MAX + 1)),
    ],
)
def test_what_is_at_a_bound_passes_and_one_more_does_not(data: bytes, more: bytes) -> None:
    assert too_costly(data) == ""
    assert too_costly(more) != ""


def test_a_small_body_is_not_looked_at_but_for_its_depth() -> None:
    assert too_costly(listed(b"1.5e300", EASY_BYTES // 8 - 1)) == ""
    assert too_costly(b"[" * 64 + b'"[[[["' * 10 + b"]" * 64) == ""
    assert too_costly(b"[]" * 5000, nesting_max=1) == ""
    assert too_costly(b"[[]]", nesting_max=1) == "nested deeper than 1"


def test_marks_of_what_is_no_json_do_no_harm() -> None:
    for data in (b'"' * 100_001, b"]" * 100_000, b"\\" * 100_001, b"\xff" * 100_000, b'{"a' + b"[" * 100_000):
        too_costly(data)


def test_a_long_list_is_told_by_its_length_and_a_short_one_as_it_is() -> None:
    for value, told in (
        ([[]] * 1000, "a list of 1000"),
        ({"a": [[1] * 101]}, "an object of 1"),
        ([1, [2]], r"\[1, \[2\]\]"),
    ):
        with pytest.raises(ApiError, match=f"model: got {told}, expected"):
            parse(BodyKind.COMPLETION, json.dumps({"prompt": "a", "model": value}).encode())
    assert bodies.NESTING_MAX == NESTING_MAX
