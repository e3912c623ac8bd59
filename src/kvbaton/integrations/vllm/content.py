"""What a vLLM request's KV is of, and up to where it is handed over.

Law: P and D compute the digest each from its own request, never from what the other says (rule 2).
"""

from __future__ import annotations

import functools
import hashlib
import secrets
from pathlib import Path
from typing import Any

from kvbaton.protocol.content import Content, digest

ADAPTERS_MAX = 256


def handed_position(prompt_tokens: int, windowed: bool) -> int:
    """How many tokens of a prompt are handed over: all, or one fewer where an attention window slides.

    D always computes the last token again, to have something to sample from. Behind a window that token still looks one
    token further back than the next one does, and vLLM drops that block at the end of a prefill: so D takes over one
    token less, and P pins what the last token needed.
    """
    return prompt_tokens - 1 if windowed and prompt_tokens > 1 else prompt_tokens


def content_digest(request: Any, position: int) -> bytes:
    """16 bytes that name the first `position` tokens' KV of this request, in every process."""
    return digest(content_of(request, position))


def content_of(request: Any, position: int) -> Content:
    """All that shapes the KV of a request's first `position` tokens: what vLLM's own block hashes cover, and more."""
    lora = getattr(request, "lora_request", None)
    return Content(
        tokens=request.prompt_token_ids or (),
        position=position,
        lora="" if lora is None else f"{lora.lora_name}:{_loaded(lora)}",
        multimodal=tuple(_feature(feature) for feature in getattr(request, "mm_features", None) or ()),
        salt=request.cache_salt or "",
        embeddings=_embeddings(getattr(request, "prompt_embeds", None)),
    )


_seen: dict[tuple[int, str], str] = {}
"""Adapters as they were when first asked for, which is soon after vLLM loaded them; the first `ADAPTERS_MAX`."""
_ONLY_HERE = secrets.token_hex(8)


def _loaded(lora: Any) -> str:
    """What is in an adapter. Files that changed since may or may not be what was loaded: shared with nobody."""
    now, key = _adapter(lora.lora_path), (lora.lora_int_id, lora.lora_path)
    if key not in _seen and len(_seen) >= ADAPTERS_MAX:
        return f"{now}:{_ONLY_HERE}"
    return now if _seen.setdefault(key, now) == now else f"{now}:{_ONLY_HERE}"


def _adapter(path: str) -> str:
    """What is in an adapter's files: P and D may have loaded different ones under one name."""
    place = Path(path)
    if not place.is_dir():
        return path
    files = sorted(each for each in place.iterdir() if each.is_file())
    return _adapter_digest(path, tuple((each.name, each.stat().st_mtime_ns, each.stat().st_size) for each in files))


@functools.lru_cache(maxsize=ADAPTERS_MAX)
def _adapter_digest(path: str, files: tuple[tuple[str, int, int], ...]) -> str:
    state = hashlib.blake2b(digest_size=16)
    for name, _, size in files:
        state.update(f"{name} {size} ".encode())
        with (Path(path) / name).open("rb") as file:
            state.update(hashlib.file_digest(file, "blake2b").digest())
    return state.hexdigest()


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
