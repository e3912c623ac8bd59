"""The two requests that one client's request becomes: P's and D's, as copies of the client's.

Laws: P computes the prompt and one token, for one answer, whatever the client wants; D gets the client's request with
one field set. What a client wrote into that field is dropped: it names other engines' memory.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

from kvbaton.api.params import LEASE_FOR_PULL, Mode, pair_params
from kvbaton.observe.codes.reasons import FIELD

ONE = ("max_tokens", "max_completion_tokens", "min_tokens", "n", "best_of")
ALONE = ("prompt_logprobs", "echo", "logprobs", "max_tokens", "prompt_embeds", "use_beam_search", "best_of", "n")
SERVER_ERROR, TOO_MANY = 500, 429
DROPPED = ("stream_options", "stop", "stop_token_ids")


def prefill_request(request: Any, params: Mapping[str, Any]) -> Any:
    """A copy that asks P for the prompt's KV and one token, which nobody reads."""
    copy = request.model_copy(deep=True)
    copy.kv_transfer_params = dict(params)
    copy.max_tokens = 1  # also where the client named no limit
    for field in ONE:
        if getattr(copy, field, None):
            setattr(copy, field, 1)
    for field in DROPPED:
        if getattr(copy, field, None):
            setattr(copy, field, None)
    copy.stream = False
    if hasattr(copy, "ignore_eos"):
        copy.ignore_eos = True
    return copy


def decode_request(request: Any, params: Mapping[str, Any] | None) -> Any:
    """A copy that asks D for the client's answer."""
    copy = request.model_copy(deep=True)
    copy.kv_transfer_params = None if params is None else dict(params)
    return copy


def alone_request(request: Any, word: str) -> Any:
    """A copy that asks D for prompt and answer; its account of prompts is told why (`alone_reasons`)."""
    return decode_request(request, {FIELD: word})


def legs(mode: Mode, unique: str, prefill: str, decode: str) -> tuple[dict[str, Any], dict[str, Any] | None]:
    """What P and D are told; D's is None where it is in P's answer (pull)."""
    if mode is Mode.PULL:
        return dict(LEASE_FOR_PULL), None
    return pair_params(mode, hashlib.sha256(unique.encode()).hexdigest()[:32], prefill, decode)


def is_servers_fault(said: Any) -> bool:
    """Whether what a replica said first is an error, and not the request's own."""
    first = said[0] if isinstance(said, list) and said else said
    error = getattr(first, "error", None)
    return error is not None and (getattr(error, "code", None) or SERVER_ERROR) >= SERVER_ERROR


def word_of_refusal(said: Any) -> str:
    """Why D computes what a P has refused."""
    return "prefill_full" if getattr(getattr(said, "error", None), "code", None) == TOO_MANY else "prefill_failed"


def planned_alone(request: Any) -> str:
    """Why one engine must compute it from the prompt's first token, as the router judges it too; "" if it need not."""
    said = {field: getattr(request, field, None) for field in ALONE}
    if said["prompt_logprobs"] is not None:
        return "prompt_logprobs"
    if said["echo"] and (said["logprobs"] is not None or said["max_tokens"] == 0):
        return "echo"
    if said["prompt_embeds"] is not None:
        return "prompt_embeds"
    return "search" if said["use_beam_search"] or (said["best_of"] or 1) > (said["n"] or 1) else ""


def has_one_prompt(request: Any) -> bool:
    """Whether it is for one prompt and one answer: where both legs go at once, one transfer has one handoff."""
    prompt = getattr(request, "prompt", None)
    many = isinstance(prompt, list) and len(prompt) > 1 and not isinstance(prompt[0], int)
    return not many and (getattr(request, "n", None) or 1) == 1
