"""Drafters: what of them is in the compatibility key, and how much of a prompt is left to D because of them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from kvbaton.engines.vllm.content.request_content import handed_position, shorten
from kvbaton.engines.vllm.content.vllm_compat import HAS_KV, answers_with, draft_key, lookahead


def config(method: str | None = None, ahead: int | None = None, model: str = "head", **more: Any) -> Any:
    spec = None
    if method is not None:
        drafter = SimpleNamespace(model=model, revision=None)
        spec = SimpleNamespace(method=method, draft_model_config=drafter, kv_cache_dtype=None, **more)
    found = SimpleNamespace(speculative_config=spec, cache_config=SimpleNamespace(cache_dtype="auto"))
    if ahead is not None:
        found.num_prefill_lookahead_tokens = ahead
    return found


def weights(model: str, revision: str | None) -> str:
    if model == "gone":
        raise ValueError("no files")
    return f"<{model}>"


@pytest.mark.parametrize("method", [None, "ngram", "suffix", "medusa"])
def test_a_drafter_without_kv_may_be_on_one_side_alone(method: str | None) -> None:
    assert draft_key(config(method), weights) == {} and lookahead(config(method)) == 0


def test_a_drafter_with_kv_is_in_the_key_by_its_content() -> None:
    keys = [draft_key(config(method), weights)["draft"] for method in HAS_KV]
    assert len(set(keys)) == len(keys)
    assert draft_key(config("eagle", model="other"), weights) != draft_key(config("eagle"), weights)
    assert draft_key(config("mtp", model="anywhere"), weights) == draft_key(config("mtp"), weights), (
        "of the model's files"
    )
    assert draft_key(config("eagle", model="gone"), weights)["draft"].startswith("eagle auto ")
    assert draft_key(config("mtp", ahead=3), weights)["draft"] == "mtp auto 3 tokens ahead"


def test_older_vllms_do_not_say_how_far_a_drafter_looks() -> None:
    assert [lookahead(config(method)) for method in ("eagle", "mtp", "draft_model")] == [1, 1, 0]
    assert lookahead(config("mtp", ahead=3)) == 3


def test_as_many_positions_are_left_to_d_as_hang_on_guesses() -> None:
    """The last is D's in any case."""
    assert [handed_position(100, False, False, ahead) for ahead in (0, 1, 2, 3)] == [100, 100, 98, 97]
    assert [handed_position(100, True, False, ahead) for ahead in (0, 1, 2)] == [99, 99, 98]
    assert [handed_position(100, False, True, ahead) for ahead in (0, 1, 2)] == [99, 99, 98]
    assert [handed_position(tokens, False, False, 3) for tokens in (1, 3, 4)] == [0, 0, 1]


def test_of_a_shortened_prompt_the_drafter_sees_the_token_that_comes_next() -> None:
    def request(**more: Any) -> Any:
        made = {
            "prompt_token_ids": [5, 6, 7, 8],
            "_all_token_ids": [5, 6, 7, 8],
            "num_prompt_tokens": 4,
            "max_tokens": 9,
        }
        sampling = SimpleNamespace(allowed_token_ids=None)
        return SimpleNamespace(**{**made, "block_hashes": [], "sampling_params": sampling, **more})

    plain, drafted = request(), request()
    shorten(plain, 3)
    shorten(drafted, 3, drafts=True)
    assert (plain.sampling_params.allowed_token_ids, drafted.sampling_params.allowed_token_ids) == (None, [8])
    constrained = request(structured_output_request=object())
    answers_with(constrained, 8)
    assert constrained.sampling_params.allowed_token_ids is None, "a grammar may forbid it"
