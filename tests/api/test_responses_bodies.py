"""Bodies of `/v1/responses` at the door: what passes untouched, and what is refused by its name."""

from __future__ import annotations

import json
from typing import Any

import pytest

from kvbaton.api.api_errors import ApiError
from kvbaton.api.bodies import MESSAGES_MAX, BodyKind, parse
from kvbaton.api.merge import split


def body_of(**fields: Any) -> bytes:
    return json.dumps({"model": "m", "input": "a", **fields}).encode()


@pytest.mark.parametrize(
    "given",
    [
        "",
        "hello",
        [{"role": "user", "content": "a"}],
        [{"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "a"}]}],
        [{"role": "assistant", "content": [{"type": "output_text", "text": "a"}, {"type": "refusal", "refusal": "b"}]}],
        [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "input_image", "image_url": "x"}]}],
        [{"type": "function_call_output", "call_id": "c", "output": "o"}, {"id": "msg_1"}, {"type": "of_tomorrow"}],
    ],
)
def test_an_input_is_a_text_or_items_of_which_unknown_ones_pass(given: Any) -> None:
    body = parse(BodyKind.RESPONSES, body_of(input=given))
    assert body.fields == {"model": "m", "input": given}
    assert (body.kind, body.prompts, body.n, body.parts, body.stream) == (BodyKind.RESPONSES, (), 1, 1, False)


def test_every_known_field_passes_with_a_good_value_and_unknown_ones_with_any() -> None:
    fields = {
        "model": "m", "input": "a", "instructions": "i", "max_output_tokens": 1, "stream": True, "temperature": 0.5,
        "top_p": 1, "top_logprobs": 20, "include": ["x"], "store": True, "background": False,
        "previous_response_id": "resp_1", "tools": [{"type": "function"}], "parallel_tool_calls": False,
        "text": {"format": {"type": "text"}}, "reasoning": {}, "truncation": "auto", "metadata": {"a": "b"},
        "tool_choice": {"type": "function", "name": "f"}, "n": 7, "max_tokens": "odd", "of_tomorrow": [1],
    }  # fmt: skip
    body = parse(BodyKind.RESPONSES, json.dumps(fields).encode())
    assert body.fields == fields
    assert (body.parts, body.stream, body.include_usage) == (1, True, True)
    (part,) = split(body)
    assert part.fields is body.fields


def test_null_counts_as_absent() -> None:
    nulls = {"instructions": None, "max_output_tokens": None, "background": None, "store": None, "stream": None}
    body = parse(BodyKind.RESPONSES, body_of(**nulls))
    assert body.fields == {"model": "m", "input": "a", **nulls}
    assert not body.stream


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"input": None}, "input"),
        ({"input": []}, "input"),
        ({"input": 5}, "input"),
        ({"input": [{"role": "user"}] * (MESSAGES_MAX + 1)}, "input"),
        ({"input": ["a"]}, "input[0]"),
        ({"input": [{"role": "user"}, {"type": 5}]}, "input[1].type"),
        ({"input": [{"role": "king", "content": "a"}]}, "input[0].role"),
        ({"input": [{"type": "message", "content": "a"}]}, "input[0].role"),
        ({"input": [{"role": "user", "content": 5}]}, "input[0].content"),
        ({"input": [{"role": "user", "content": ["a"]}]}, "input[0].content[0]"),
        ({"input": [{"role": "user", "content": [{"type": "input_text"}]}]}, "input[0].content[0].text"),
        ({"instructions": ["a"]}, "instructions"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"max_output_tokens": True}, "max_output_tokens"),
        ({"stream": "yes"}, "stream"),
        ({"temperature": -1}, "temperature"),
        ({"top_p": 2}, "top_p"),
        ({"top_logprobs": -2}, "top_logprobs"),
        ({"include": "logprobs"}, "include"),
        ({"store": 1}, "store"),
        ({"background": "no"}, "background"),
        ({"previous_response_id": 5}, "previous_response_id"),
        ({"tools": {}}, "tools"),
        ({"parallel_tool_calls": 1}, "parallel_tool_calls"),
        ({"text": "json"}, "text"),
        ({"reasoning": "high"}, "reasoning"),
        ({"truncation": True}, "truncation"),
        ({"metadata": {"a": 1e-7}}, "metadata"),
    ],
)
def test_a_field_that_is_wrong_is_refused_by_its_name(change: dict[str, Any], param: str) -> None:
    with pytest.raises(ApiError) as caught:
        parse(BodyKind.RESPONSES, body_of(**change))
    assert (caught.value.status, caught.value.param) == (400, param)
    assert caught.value.message.startswith(f"{param}: ")


def test_a_response_in_the_background_is_refused_and_told_why() -> None:
    with pytest.raises(ApiError, match=r"background: .* outlive its handoff; remove it") as caught:
        parse(BodyKind.RESPONSES, body_of(background=True))
    assert (caught.value.status, caught.value.param) == (400, "background")
