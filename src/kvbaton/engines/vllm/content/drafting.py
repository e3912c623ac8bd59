"""What speculative decoding adds to a handoff: layers of a drafter, and how far ahead of a token they look.

A drafter of the EAGLE kind computes its KV of position i from token i and from token i + 1; the module number m of
several (MTP) looks m tokens further. So the KV of the last positions of a prompt hangs on tokens that P has guessed:
D takes over what hangs on the prompt alone, and computes the rest, as it does the last token in any case. Where layers
keep a state, P stops earlier and never sees the token after: there it is told which one to answer with.

Law: a drafter with KV of its own is part of the compatibility key, on both sides or on neither: D cannot compute a
drafter's KV without computing the whole prompt, and drafts on KV that was never written would be worth nothing. Nothing
here can make an answer wrong, since the model itself judges each draft. Drafters without KV (n-grams) may differ.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any

LOOKS_AHEAD = ("eagle", "eagle3", "mtp", "dflash", "dspark")
HAS_KV = (*LOOKS_AHEAD, "draft_model")
NAMES_ITS_MODEL = ("eagle", "eagle3", "dflash", "draft_model")
"""Those whose weights are not among the model's own files."""


def lookahead(vllm_config: Any) -> int:
    """How many tokens after a position its drafter's KV hangs on."""
    told = getattr(vllm_config, "num_prefill_lookahead_tokens", None)  # vLLM 0.32
    if isinstance(told, int):
        return told
    return 1 if _method(vllm_config) in LOOKS_AHEAD else 0


def draft_key(vllm_config: Any, weights_of: Callable[[str, str | None], str]) -> dict[str, str]:
    """The field of the compatibility key that a drafter with KV adds; none without one, as in earlier releases."""
    method, config = _method(vllm_config), getattr(vllm_config, "speculative_config", None)
    if method not in HAS_KV:
        return {}
    model = getattr(config, "draft_model_config", None)
    told = [method, str(getattr(config, "kv_cache_dtype", None) or vllm_config.cache_config.cache_dtype)]
    if lookahead(vllm_config) > 1:
        told.append(f"{lookahead(vllm_config)} tokens ahead")
    if model is not None and method in NAMES_ITS_MODEL:
        told.append(_weights(model, weights_of))
    return {"draft": " ".join(told)}


def _weights(model: Any, weights_of: Callable[[str, str | None], str]) -> str:
    """By content; by name where there are no files to look at: a wrong one costs drafts, and no answer."""
    try:
        return weights_of(model.model, getattr(model, "revision", None))
    except ValueError:
        return hashlib.blake2b(str(model.model).encode(), digest_size=8).hexdigest()


def _method(vllm_config: Any) -> str:
    return str(getattr(getattr(vllm_config, "speculative_config", None), "method", None) or "")


def answers_with(request: Any, token: int) -> None:
    """Have vLLM "sample" this token: of a prompt that was shortened it is the one that comes next in truth."""
    sampling = getattr(request, "sampling_params", None)
    if sampling is not None and getattr(request, "structured_output_request", None) is None:
        sampling.allowed_token_ids = [token]
