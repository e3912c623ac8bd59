"""The configuration of an engine: model, cache and scheduling, as frozen values handed down.

The KV depends on `ModelConfig`: two engines can hand KV over only if theirs are equal. `CacheConfig` may differ between
them (block size, layout, ranks): the answer does not depend on it, bit for bit.
"""

from __future__ import annotations

from typing import Literal

import msgspec

TILE_TOKENS = 32
"""Attention is summed in tiles of this many tokens, whatever the block size; see `attention.py`."""

Layout = Literal["LB", "BL"]
"""Order of the outer axes of a rank's bytes: layers then blocks, or blocks then layers."""

FailurePolicy = Literal["recompute", "fail"]
"""What the engine does with a request whose load failed."""


class ModelConfig(msgspec.Struct, frozen=True):
    """Shape and seed of the decoder. The defaults make the tiny model that demo and tests share."""

    seed: int = 7
    layers: int = 3
    d_model: int = 64
    d_hidden: int = 128
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 16
    context_tokens_max: int = 4096
    sliding_layers: tuple[int, ...] = ()
    window_tokens: int = 64

    def __post_init__(self) -> None:
        if self.heads % self.kv_heads:
            raise ValueError(f"heads={self.heads} is not a multiple of kv_heads={self.kv_heads}")
        if self.head_dim % 2:
            raise ValueError(f"head_dim={self.head_dim} must be even: rotary positions turn pairs")
        if any(not 0 <= layer < self.layers for layer in self.sliding_layers):
            raise ValueError(f"sliding_layers={self.sliding_layers} names a layer outside 0..{self.layers - 1}")
        if self.window_tokens < 1:
            raise ValueError(f"window_tokens={self.window_tokens} must be at least 1")

    @property
    def groups(self) -> tuple[KvGroup, ...]:
        """The KV groups in the order of every per-group block list: full attention first, then sliding."""
        full = tuple(layer for layer in range(self.layers) if layer not in self.sliding_layers)
        groups = (KvGroup(full, None), KvGroup(tuple(sorted(self.sliding_layers)), self.window_tokens))
        return tuple(group for group in groups if group.layers)


class KvGroup(msgspec.Struct, frozen=True):
    """Layers whose KV shares one block list per request."""

    layers: tuple[int, ...]
    window_tokens: int | None  # None: every token sees all before it


class CacheConfig(msgspec.Struct, frozen=True):
    """How one engine keeps KV."""

    blocks: int = 256
    block_tokens: int = 16
    tp: int = 1
    layout: Layout = "LB"

    def __post_init__(self) -> None:
        if TILE_TOKENS % self.block_tokens:
            raise ValueError(f"block_tokens={self.block_tokens} must divide {TILE_TOKENS}")
        if self.blocks < 2:
            raise ValueError(f"blocks={self.blocks} must be at least 2: block 0 is the null block")


class EngineConfig(msgspec.Struct, frozen=True):
    """One engine. `on_load_failure` is policy, see `hooks.LoadOutcome`."""

    model: ModelConfig = ModelConfig()
    cache: CacheConfig = CacheConfig()
    seqs_max: int = 32
    step_tokens_max: int = 256
    waiting_max: int = 1024
    prefix_caching: bool = True
    on_load_failure: FailurePolicy = "recompute"

    def __post_init__(self) -> None:
        for field in ("seqs_max", "step_tokens_max", "waiting_max"):
            if getattr(self, field) < 1:
                raise ValueError(f"{field}={getattr(self, field)} must be at least 1")
