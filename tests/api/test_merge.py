"""One body, several requests, one answer."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest

from kvbaton.api.bodies import Body, BodyKind, parse
from kvbaton.api.merge import Joiner, join, read, split


def body(kind: BodyKind = BodyKind.COMPLETION, **fields: Any) -> Body:
    return parse(kind, json.dumps(fields).encode())


def answer(text: str, prompt_tokens: int, cached: int | None = None) -> dict[str, Any]:
    usage: dict[str, Any] = {"prompt_tokens": prompt_tokens, "completion_tokens": len(text), "total_tokens": 0}
    if cached is not None:
        usage["prompt_tokens_details"] = {"cached_tokens": cached}
    return {"id": f"id-{text}", "model": "m", "choices": [{"index": 0, "text": text}], "usage": usage}


def test_a_body_for_one_answer_is_not_touched() -> None:
    one = body(prompt=["only"], n=1, seed=3, odd={"x": 1})
    (part,) = split(one)
    assert part.fields is one.fields


@pytest.mark.parametrize("prompt", [["a", "b"], [[1, 2], [3]]])
def test_every_prompt_and_choice_is_a_request_with_its_own_seed(prompt: list[Any]) -> None:
    parts = split(body(prompt=prompt, n=2, seed=9, odd=1))
    placed = [(part.index, part.prompt_index, part.choice) for part in parts]
    assert placed == [(0, 0, 0), (1, 0, 1), (2, 1, 0), (3, 1, 1)]
    assert [part.fields["prompt"] for part in parts] == [prompt[0], prompt[0], prompt[1], prompt[1]]
    assert [part.fields["seed"] for part in parts] == [9, 10, 9, 10]
    assert all("n" not in part.fields and part.fields["odd"] == 1 for part in parts)


def test_seeds_wrap_and_absent_seeds_stay_absent() -> None:
    top = (1 << 63) - 1
    assert [part.fields["seed"] for part in split(body(prompt="a", n=2, seed=top))] == [top, 0]
    assert [part.fields["seed"] for part in split(body(prompt="a", n=2, seed=-5))] == [-5, -4]
    assert all("seed" not in part.fields for part in split(body(prompt="a", n=2)))


def test_a_chat_is_split_by_choices_alone() -> None:
    chat = body(BodyKind.CHAT, messages=[{"role": "user", "content": "x"}], n=3)
    assert [part.index for part in split(chat)] == [0, 1, 2]


def test_joined_answers_have_openais_indexes_and_count_each_prompt_once() -> None:
    parts = split(body(prompt=["a", "b"], n=2))
    whole = join(parts, [answer("w", 5, 2), answer("xx", 5, 2), answer("y", 7, 0), answer("z", 7, 0)])
    told = [(choice["index"], choice["text"]) for choice in whole["choices"]]
    assert told == [(0, "w"), (1, "xx"), (2, "y"), (3, "z")]
    assert (whole["id"], whole["model"]) == ("id-w", "m")
    assert whole["usage"] == {
        "prompt_tokens": 12, "completion_tokens": 5, "total_tokens": 17, "prompt_tokens_details": {"cached_tokens": 2},
    }  # fmt: skip


def test_chunks_get_their_index_and_one_head_and_usage_waits_for_the_end() -> None:
    parts = split(body(prompt="a", n=2))
    joiner = Joiner()
    first = joiner.chunk(parts[1], {"id": "one", "choices": [{"index": 0, "text": "x"}], "kv_transfer_params": {}})
    second = joiner.chunk(parts[0], {"id": "two", "choices": [{"index": 0, "text": "y"}]})
    assert first == {"id": "one", "choices": [{"index": 1, "text": "x"}]}
    assert second == {"id": "one", "choices": [{"index": 0, "text": "y"}]}
    usage = {"prompt_tokens": 4, "completion_tokens": 1}
    assert joiner.chunk(parts[0], {"id": "two", "choices": [], "usage": usage}) is None
    assert joiner.usage_chunk()["usage"]["total_tokens"] == 5


# --- what workers answered


def test_a_chats_prompt_ids_are_told_with_the_first_chunk_of_each_choice_and_with_no_other() -> None:
    one, other = split(body(BodyKind.CHAT, messages=[{"role": "user", "content": "hi"}], n=2))
    joiner = Joiner()
    first = {"id": "a", "prompt_token_ids": [7], "choices": [{"index": 0, "delta": {}}]}
    later = {"id": "a", "choices": [{"index": 0, "delta": {}, "token_ids": [8]}]}
    told = [joiner.chunk(part, chunk) for part, chunk in ((one, first), (one, later), (other, first), (other, later))]
    assert [(each or {}).get("prompt_token_ids") for each in told] == [[7], None, [7], None]
    whole = {"prompt_token_ids": [7], "choices": [{"index": 0, "token_ids": [8]}]}
    assert join((one, other), [whole, whole])["prompt_token_ids"] == [7]


def test_what_is_joined_is_read_and_the_rest_passes_as_it_came() -> None:
    parts = split(body(prompt="a", n=2))
    odd = (
        b'{"id": "x", "choices": [{"index": 0, "text": "h\\u0069", "logprobs": {"a": [1.50, 2e0]}}],'
        b' "usage": {"completion_tokens": 2}}'
    )
    bare = b'{"choices": [ ], "usage": null}'
    joined = msgspec.json.encode(join(parts, [read(odd), read(bare)]))
    assert b'"text":"h\\u0069","logprobs":{"a": [1.50, 2e0]}' in joined
    assert json.loads(joined)["usage"]["completion_tokens"] == 2
    assert read(b'{"choices": null}')["choices"] is None


@pytest.mark.parametrize(
    "data",
    [
        b'{"choices":[' + b",".join([b"{}"] * 500_000) + b"]}",
        b'{"choices":[{' + b",".join(b'"%d":1' % n for n in range(50_000)) + b"}]}",
        b"{" + b",".join(b'"%d":1' % n for n in range(50_000)) + b"}",
        b'{"usage":[' + b",".join([b"[]"] * 200_000) + b"]}",
        b'{"choices":5}',
        b'{"choices":{}}',
        b"[]",
        b'{"id":"\xf8","choices":[]}',
    ],
)
def test_an_answer_that_is_none_is_not_taken_apart_however_long_it_is(data: bytes) -> None:
    with pytest.raises(ValueError, match=r"Expected|more than|utf-8"):
        read(data)


def test_a_long_answer_is_joined_without_making_objects_of_it() -> None:
    logprobs = b"[" + b",".join([b'{"top":[1.5e-300]}'] * 100_000) + b"]"
    (choice,) = read(b'{"choices":[{"message":{},"logprobs":' + logprobs + b"}]}")["choices"]
    assert bytes(choice["logprobs"]) == logprobs
