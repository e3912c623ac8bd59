"""Every kind of cache that vLLM describes: what it is in the protocol's geometry, or why it is refused at start.

Laws: a kind is known by the name of its spec's class; a subclass that is not listed keeps other things in its pages,
and is refused. `tests/vllm` compares the table with the classes of the installed vLLM. Nothing of vLLM is imported
here.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvbaton.protocol.geometry.layout import GroupKind

HANDED_OVER: Mapping[str, GroupKind] = {
    "FullAttentionSpec": GroupKind.FULL,
    "RSWASpec": GroupKind.FULL,  # its window is over generated tokens; the prompt stays whole
    "MLAAttentionSpec": GroupKind.LATENT,
    "SlidingWindowSpec": GroupKind.SLIDING,
    "SlidingWindowMLASpec": GroupKind.SLIDING,
    "ChunkedLocalAttentionSpec": GroupKind.CHUNKED,
    "MambaSpec": GroupKind.STATE,
}
ONE_LATENT = frozenset({"MLAAttentionSpec", "SlidingWindowMLASpec"})
"""One head of rows, the same on every tensor-parallel rank."""

REFUSED: Mapping[str, str] = {
    "SinkFullAttentionSpec": "its sinks lie in blocks that no request's list names",
    "CircularBufferSpec": "it is a ring of keys to be compressed, and where the ring begins is not in the cache",
    "HiddenStateCacheSpec": "hidden states are extracted by the engine that computed them",
    "CrossAttentionSpec": "it is of an encoder's output, which is not the prompt's",
    "EncoderOnlyAttentionSpec": "an encoder alone has no KV that a decoder could go on from",
    "HiSparseHotSpec": "it holds copies of pages in host memory, which no other engine can find again",
    "HiSparseResidentSpec": "it holds pages that belong to host memory, and come and go",
}
CONTAINERS = frozenset({"KVCacheSpec", "AttentionSpec", "UniformTypeKVCacheSpecs"})
"""No kinds of their own: bases, and a group of layers that have a spec each."""


def kind_of(layer: str, spec: Any) -> GroupKind:
    """ValueError names the layer, the spec and the reason."""
    name = type(spec).__name__
    kind = HANDED_OVER.get(name)
    why = REFUSED.get(name, "this version does not know what is in its pages")
    if kind is not None:
        why = _oddity(spec)
    if kind is None or why:
        raise ValueError(f"layer {layer}: caches of kind {name} are not handed over: {why}")
    return kind


def window_of(spec: Any, kind: GroupKind) -> int:
    """How many tokens back a layer looks; 0: all. What it keeps beyond for drafts is part of it."""
    if kind is GroupKind.SLIDING:
        return int(spec.sliding_window) + int(getattr(spec, "extra_retained_tokens", 0))
    return int(spec.attention_chunk_size) if kind is GroupKind.CHUNKED else 0


def _oddity(spec: Any) -> str:
    """Why a spec of a kind that is handed over is not, after all."""
    if getattr(spec, "bounded_replay", False):
        return "bounded_replay: its window is computed again after a hit, and not kept"
    covered = getattr(spec, "tokens_per_state", 1)
    if type(spec).__name__ != "MambaSpec" and covered != 1:
        return f"tokens_per_state: {covered}: a row of it is not of one token"
    return ""


def stateful(kv_cache_config: Any) -> bool:
    """Whether a model has layers with states."""
    return any(type(spec).__name__ == "MambaSpec" for spec in layer_specs(kv_cache_config))


def state_blocks(kv_cache_config: Any) -> int:
    """Blocks of a state group that computing a request takes at most at one time."""
    found = [spec for spec in layer_specs(kv_cache_config) if type(spec).__name__ == "MambaSpec"]
    extra = ("num_speculative_blocks", "num_prefill_checkpoint_blocks")
    return max((2 + sum(getattr(spec, name, 0) for name in extra) for spec in found), default=0)


def layer_specs(kv_cache_config: Any) -> list[Any]:
    """Of all groups that are handed over; a group may hold layers of several shapes."""
    found = []
    for group in kv_cache_config.kv_cache_groups:
        inner = getattr(group.kv_cache_spec, "kv_cache_specs", None)
        if getattr(group, "enable_kv_transfer", True):
            found += [group.kv_cache_spec] if inner is None else list(inner.values())
    return found
