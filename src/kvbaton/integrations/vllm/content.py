"""What a vLLM request's KV is of, and up to where it is handed over.

Law: P and D compute the digest each from its own request, never from what the other says (rule 2).
"""

from __future__ import annotations

import hashlib
from typing import Any

from kvbaton.protocol.content import Content, digest


def handed_position(prompt_tokens: int, windowed: bool) -> int:
    """How many tokens of a prompt are handed over: all, or one fewer where an attention window slides.

    D always computes the last token again, to have something to sample from. Behind a window that token still looks one
    token further back than the next one does, and vLLM drops that block at the end of a prefill: so D takes over one
    token less, and P pins what the last token needed.
    """
    return prompt_tokens - 1 if windowed and prompt_tokens > 1 else prompt_tokens


def content_digest(request: Any, position: int) -> bytes:
    """16 bytes that name the first `position` tokens' KV of this request, in every process."""
    lora = getattr(request, "lora_request", None)
    return digest(
        Content(
            tokens=request.prompt_token_ids or (),
            position=position,
            lora=lora.lora_name if lora is not None else "",
            multimodal=tuple(_feature(feature) for feature in getattr(request, "mm_features", None) or ()),
            salt=request.cache_salt or "",
            embeddings=_embeddings(getattr(request, "prompt_embeds", None)),
        )
    )


def _feature(feature: Any) -> str:
    place = feature.mm_position
    return f"{feature.modality}:{feature.identifier}@{place.offset}+{place.length}"


def _embeddings(tensor: Any) -> bytes:
    if tensor is None:
        return b""
    import torch

    data = tensor.detach().cpu().contiguous()
    head = f"{tuple(data.shape)} {data.dtype}".encode()
    return hashlib.blake2b(head + data.view(torch.uint8).numpy().tobytes(), digest_size=16).digest()
