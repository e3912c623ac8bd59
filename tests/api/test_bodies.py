"""Bodies at the door: what passes, and that nothing a client sends raises anything but a refusal."""

from __future__ import annotations

import json
from typing import Any

import pytest

from kvbaton.api.api_errors import ApiError
from kvbaton.api.bodies import PARTS_MAX, BodyKind, parse


@pytest.mark.parametrize(
    ("prompt", "prompts"),
    [
        ("", ("",)),
        ("a", ("a",)),
        (["a", "b"], ("a", "b")),
        ([1, 2], ([1, 2],)),
        ([[1, 2], [3]], ([1, 2], [3])),
    ],
)
def test_a_prompt_comes_in_four_shapes(prompt: Any, prompts: Any) -> None:
    assert parse(BodyKind.COMPLETION, json.dumps({"prompt": prompt}).encode()).prompts == prompts


def test_null_counts_as_absent_and_unknown_fields_pass() -> None:
    fields = {"prompt": "a", "n": None, "stream": None, "max_tokens": None, "temperature": None, "odd": {"x": [1]}}
    body = parse(BodyKind.COMPLETION, json.dumps(fields).encode())
    assert (body.n, body.stream, body.parts, body.fields) == (1, False, 1, fields)


def test_prompts_times_choices_are_bounded() -> None:
    with pytest.raises(ApiError, match="256 together"):
        parse(BodyKind.COMPLETION, json.dumps({"prompt": ["a"] * (PARTS_MAX + 1)}).encode())


def test_deep_nesting_and_huge_numbers_are_refused_or_pass_but_never_raise_otherwise() -> None:
    for data in (b"[" * 100_000, b'{"prompt":' * 5000, b'{"prompt": "a", "seed": 1e400}', b'{"prompt": "", "n": 1e99}'):
        with pytest.raises(ApiError):
            parse(BodyKind.COMPLETION, data)
