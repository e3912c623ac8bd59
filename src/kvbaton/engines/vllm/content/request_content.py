"""What a vLLM request's KV is of, and up to where it is handed over.

Laws: P and D compute the digest each from its own request, never from what the other says (rule 2). What takes long to
look at (an adapter's files, prompt embeddings) is looked at on a thread of ours (`Looker`), never in a hook; what is
not known in time, or cannot be known, is named by a text that only this process has: its KV is shared with nobody.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import msgspec

from kvbaton.engines.side.protocols import EndedTurn, Grouping
from kvbaton.engines.vllm import continued_requests
from kvbaton.engines.vllm.content import drafting
from kvbaton.engines.vllm.content.adapters import ONLY_HERE, adapter_text
from kvbaton.engines.vllm.content.background_lookup import Looker
from kvbaton.engines.vllm.content.weights_epoch import salted
from kvbaton.protocol.content import Content


class PromptParts(msgspec.Struct, frozen=True):
    """Of a request, what takes long to look at."""

    lora: str = ""
    embeddings: bytes = b""


UNKNOWN = PromptParts(ONLY_HERE, ONLY_HERE.encode())
"""Of a request whose parts are not known in time."""


def handed_position(prompt_tokens: int, windowed: bool, states: bool = False, lookahead: int = 0) -> int:
    """How many tokens of a prompt are handed over: all, or one fewer where a window slides or a layer keeps a state.

    D always computes the last token again, to have something to sample from. Behind a window that token still looks one
    token further back than the next one does, and vLLM drops that block at the end of a prefill: so D takes over one
    token less, and P pins what the last token needed. A state that has counted that token cannot be used to compute it:
    P stops before it, and of a prompt of one token there is nothing to hand over. Where drafters look `lookahead`
    tokens ahead, D computes as many positions itself (`drafting`).
    """
    if lookahead > 1:
        return max(prompt_tokens - lookahead, 0)
    if states:
        return prompt_tokens - 1
    return prompt_tokens - 1 if windowed and prompt_tokens > 1 else prompt_tokens


def content_of(request: Any, position: int) -> Content:
    """All that shapes the KV of a request's first `position` tokens: what vLLM's own block hashes cover, and more."""
    parts = _parts(request)
    return Content(
        tokens=continued_requests.tokens_of(request),
        position=position,
        lora=parts.lora,
        multimodal=tuple(_feature(feature) for feature in getattr(request, "mm_features", None) or ()),
        salt=salted(request),
        embeddings=parts.embeddings,
    )


def turn_content(request: Any, upto: int) -> Content | None:
    """Of the first `upto` tokens of a prompt and its answer, and of the pictures that begin among them."""
    if request.prompt_token_ids is None:
        return None
    content = content_of(request, upto)
    told = zip(getattr(request, "mm_features", None) or (), content.multimodal, strict=True)
    shown = tuple(text for feature, text in told if feature.mm_position.offset < upto)  # in whatever order they are
    return msgspec.structs.replace(content, tokens=list(request.all_token_ids[:upto]), multimodal=shown)


looker: Looker[PromptParts] = Looker("kvbaton-content")
"""One for the scheduler's process."""


def takes_long(request: Any) -> bool:
    return getattr(request, "lora_request", None) is not None or getattr(request, "prompt_embeds", None) is not None


def is_known(request: Any) -> bool:
    """Whether `content_of` has an answer now, whatever it is; begins to look at the request. Never blocks."""
    return not takes_long(request) or looker.ask(request.request_id, lambda: parts_of(request))


def shorten(request: Any, tokens: int, hash_tokens: int = 0, *, drafts: bool = False) -> None:
    """Let vLLM compute the first `tokens` tokens of a prompt and end, before it has looked at the request.

    `hash_tokens`: how many tokens one of the request's block hashes covers, where that is known. `drafts`: a drafter
    computes the prompt too, and must see which token comes after it.
    """
    if drafts and request.prompt_token_ids is not None:
        drafting.answers_with(request, request.prompt_token_ids[tokens])
    dropped = request.num_prompt_tokens - tokens
    if request.prompt_token_ids is not None:
        request.prompt_token_ids = request.prompt_token_ids[:tokens]
    if getattr(request, "prompt_embeds", None) is not None:
        request.prompt_embeds = request.prompt_embeds[:tokens]
    del request._all_token_ids[len(request._all_token_ids) - dropped :]
    if hash_tokens:
        del request.block_hashes[tokens // hash_tokens :]
    request.num_prompt_tokens = tokens
    request.max_tokens = 1


class VllmRequests:
    """vLLM's requests, as the sides read them."""

    def __init__(self, grouping: Grouping, hash_tokens: int = 0) -> None:
        """`hash_tokens`: how many tokens one of vLLM's block hashes covers."""
        self._grouping = grouping
        self._hash_tokens = hash_tokens

    def handed_tokens(self, request: Any) -> int:
        grouping = self._grouping
        tokens = continued_requests.handed_tokens(request)
        return handed_position(tokens, grouping.slides, grouping.stateful, grouping.lookahead)

    def content(self, request: Any, position: int) -> Content:
        return content_of(request, position)

    def ended_turn(self, request: Any) -> EndedTurn | None:
        params = request.kv_transfer_params
        keep = params.get("keep") if isinstance(params, dict) else None
        if keep is None or request.prompt_token_ids is None:
            return None
        if getattr(request, "resumable", False):  # a session whose prompt grows: what its tokens are changes
            return None
        return EndedTurn(keep, request.num_tokens - 1)

    def turn_content(self, request: Any, upto: int) -> Content | None:
        return turn_content(request, upto)

    def tokens(self, request: Any, first: int, last: int) -> Sequence[int]:
        """With embeddings in the place of tokens none are known."""
        return () if request.prompt_token_ids is None else list(request.all_token_ids[first:last])

    def wants_whole_prompt(self, request: Any) -> bool:
        reads_all = bool(getattr(request, "skip_reading_prefix_cache", False))
        return reads_all or getattr(request, "pooling_params", None) is not None

    def shorten(self, request: Any, tokens: int, *, drafts: bool = False) -> None:
        shorten(request, tokens, self._hash_tokens, drafts=drafts)

    def arrived_at(self, request: Any) -> float | None:
        """When vLLM's front end took the request in: steps that ran meanwhile are part of its wait."""
        at = getattr(request, "arrival_time", None)
        return float(at) if isinstance(at, int | float) else None


def forget(request: Any) -> None:
    """The request is over."""
    looker.forget(request.request_id)


def parts_of(request: Any) -> PromptParts:
    """Reads files and hashes tensors: for a thread of its own."""
    lora = getattr(request, "lora_request", None)
    text = "" if lora is None else f"{lora.lora_name}:{adapter_text(lora.lora_int_id, lora.lora_path)}"
    return PromptParts(text, _embeddings(getattr(request, "prompt_embeds", None)))


def _parts(request: Any) -> PromptParts:
    if not takes_long(request):
        return PromptParts()
    found = looker.found(request.request_id)
    return UNKNOWN if found is None else found


def _feature(feature: Any) -> str:
    place = feature.mm_position
    return f"{feature.modality}:{feature.identifier}@{place.offset}+{place.length}"


def _embeddings(tensor: Any) -> bytes:
    if tensor is None:
        return b""
    import torch

    data = tensor.detach().cpu().contiguous()
    state = hashlib.blake2b(f"{tuple(data.shape)} {data.dtype}".encode(), digest_size=16)
    state.update(memoryview(data.view(torch.uint8).numpy()).cast("B"))  # without a copy, and without the GIL
    return state.digest()
