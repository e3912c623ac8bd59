"""vLLM's KV cache as a rank's memory: where its tensors lie, and how its attention orders a page.

Law: a cache lies in one kind of memory and on one device; anything else is refused at start, by the name of the layer.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from kvbaton.engines.shared.caches import CPU, CUDA, DeviceCache, HostCache
from kvbaton.engines.vllm.content.vllm_compat import cpu_page, device_page, state_page
from kvbaton.engines.vllm.memory.vllm_layout import RankFacts, regions_of
from kvbaton.protocol.geometry.layout import GroupKind

NOTES_A_STEP = 8
"""Layers of a step that are spoken of one by one, at even distances; the last is always among them."""


def cache_of(tensors: Mapping[str, Any]) -> HostCache | DeviceCache:
    """RuntimeError for memory of a kind, or a mix, that is not handed over."""
    where = {str(tensor.device): name for name, tensor in tensors.items()}
    kinds = {tensor.device.type for tensor in tensors.values()}
    if kinds == {CPU}:
        return HostCache(regions_of(tensors))
    if kinds == {CUDA} and len(where) == 1:
        return DeviceCache(regions_of(tensors), next(iter(tensors.values())).device.index or 0)
    found = ", ".join(f"{device} ({name})" for device, name in where.items())
    raise RuntimeError(
        f"kvbaton: the KV cache lies on {found}; expected host memory, or one CUDA device a rank: see docs/vllm.md"
    )


def paged(facts: RankFacts, vllm_config: Any, device: str) -> RankFacts:
    """With what is known of the inside of a page, which P and D must share. `device`: the kind of memory."""
    page = facts.page
    if device == CUDA:
        page = device_page(vllm_config, page)
    elif page != "rows of tokens":
        sizes = {each.block_tokens for each in facts.groups if each.kind is not GroupKind.STATE}
        page = cpu_page(vllm_config, sizes)
    if any(group.kind is GroupKind.STATE for group in facts.groups):
        page += f", {state_page(device)}"
    return msgspec.structs.replace(facts, page=page)


def spoken_of(layers: list[str]) -> dict[str, bool]:
    """Of a step's layers those that are announced, and whether each is the last."""
    stride = -(-len(layers) // NOTES_A_STEP) or 1
    chosen = layers[::-1][::stride]
    return {layer: layer == layers[-1] for layer in reversed(chosen)}
