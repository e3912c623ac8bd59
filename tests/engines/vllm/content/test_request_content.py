"""What a vLLM request's KV is of, and how much of it is handed over."""

from __future__ import annotations

import time
from itertools import count
from types import SimpleNamespace
from typing import Any

from kvbaton.engines.vllm.content import request_content as content
from kvbaton.engines.vllm.content.request_content import handed_position
from kvbaton.protocol.content import digest as content_digest

numbers = count()


def request(**changes: Any) -> Any:
    base = {
        "request_id": f"r{next(numbers)}",
        "prompt_token_ids": [1, 2, 3],
        "cache_salt": None,
        "lora_request": None,
        "mm_features": [],
        "prompt_embeds": None,
    }
    return SimpleNamespace(**{**base, **changes})


def digest_of(of: Any, position: int = 3) -> bytes:
    """As the hooks get it: asked for until it is known."""
    until = time.monotonic() + 60
    while not content.is_known(of):
        assert time.monotonic() < until
        time.sleep(0.001)
    return content_digest(content.content_of(of, position))


def image(identifier: str, offset: int = 1) -> Any:
    place = SimpleNamespace(offset=offset, length=4)
    return SimpleNamespace(modality="image", identifier=identifier, mm_position=place)


def test_whatever_shapes_the_kv_is_in_the_digest() -> None:
    """Promise 1, rule 2: a genuine ticket with any other content is refused."""
    others = [
        request(prompt_token_ids=[1, 2, 4]),
        request(prompt_token_ids=[1, 2]),
        request(cache_salt="s"),
        request(lora_request=SimpleNamespace(lora_name="l", lora_int_id=1, lora_path="/nowhere/1")),
        request(lora_request=SimpleNamespace(lora_name="l", lora_int_id=2, lora_path="/nowhere/2")),
        request(mm_features=[image("a")]),
        request(mm_features=[image("b")]),
        request(mm_features=[image("a", offset=2)]),
    ]
    digests = [digest_of(each) for each in (request(), *others)] + [digest_of(request(), 2)]
    assert len(set(digests)) == len(digests)
    assert digest_of(request()) == digest_of(request())


def test_a_turn_is_of_the_pictures_in_it_in_whatever_order_they_are_told() -> None:
    """Promise 1: the same words around another picture are another conversation."""
    cat, dog, later = image("cat", 1), image("dog", 1), image("later", 5)
    shown = [[cat], [dog], [cat, later], [later, cat], [later, dog], [later]]
    told = (request(mm_features=each, all_token_ids=[1, 2, 3, 4, 5, 6]) for each in shown)
    found = [content.turn_content(each, 4) for each in told]
    assert found[0] == found[2] == found[3] and found[1] == found[4]
    assert found[2] != found[4] != found[5] != found[0]


def test_behind_a_window_one_token_less_is_handed_over() -> None:
    assert [handed_position(tokens, True) for tokens in (1, 2, 100)] == [1, 1, 99]
    assert [handed_position(tokens, False) for tokens in (1, 2, 100)] == [1, 2, 100]
