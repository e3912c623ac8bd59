"""The memory layout of the embedded engine's KV in terms of the protocol's geometry, and its content identity."""

from __future__ import annotations

import platform
from collections.abc import Sequence

import numpy as np

from kvbaton.engines.embedded.engine_config import ModelConfig
from kvbaton.engines.embedded.engine_request import EngineRequest
from kvbaton.engines.embedded.memory.kv_memory import ITEM_BYTES, KvGeometry
from kvbaton.protocol.content import Content
from kvbaton.protocol.geometry.layout import Cell, EngineLayout, Group, GroupKind, Place, Rank, Share, planes


def engine_layout(geometry: KvGeometry) -> EngineLayout:
    """The layout that travels in the handshake; a page is K then V, each heads by tokens."""
    model, cache = geometry.model, geometry.cache
    cells = (Cell("k", model.head_dim * ITEM_BYTES), Cell("v", model.head_dim * ITEM_BYTES))
    groups = tuple(
        Group(
            name="full" if group.window_tokens is None else "sliding",
            kind=GroupKind.FULL if group.window_tokens is None else GroupKind.SLIDING,
            block_tokens=cache.block_tokens,
            layers=tuple(f"layer.{layer}" for layer in group.layers),
            heads=model.kv_heads,
            cells=cells,
            dtype="float32",
            window=group.window_tokens or 0,
        )
        for group in model.groups
    )
    interior = planes("PHN", cells, geometry.kv_heads_per_rank, cache.block_tokens)
    ranks = []
    for rank in range(cache.tp):
        heads = geometry.kv_heads(rank)
        shares = tuple(
            Share(
                head_start=heads[0],
                head_count=len(heads),
                block_count=cache.blocks,
                places=tuple(
                    Place(index, geometry.offset(layer, 0), geometry.block_stride_bytes)
                    for index, layer in enumerate(group.layers)
                ),
                planes=interior,
            )
            for group in model.groups
        )
        ranks.append(Rank(pp=0, tp=rank, dcp=0, region_bytes=(geometry.region_bytes,), shares=shares))
    return EngineLayout(groups, tuple(ranks))


def compat_key(model: ModelConfig, version: str) -> dict[str, str]:
    """What must be equal for KV to mean the same; block size, ranks and layout need not be."""
    return {
        "model": "kvbaton-tiny",
        "weights": f"seed {model.seed}",
        "shape": f"{model.layers} layers of {model.d_model}, {model.heads}/{model.kv_heads} heads of {model.head_dim}",
        "sliding": f"{model.sliding_layers} of {model.window_tokens}" if model.sliding_layers else "none",
        "dtype": "float32",
        "numerics": f"numpy {np.__version__} on {platform.machine()}",  # other versions give other bits
        "info.version": version,
    }


def content_of(request: EngineRequest, upto: int, tokens: Sequence[int] | None = None) -> Content:
    """All that shapes the KV of a request's first `upto` tokens; the same in every process.

    `tokens` are prompt and answer, where the answer is part of it.
    """
    tokens = request.prompt if tokens is None else tokens
    return Content(tokens[:upto], upto, salt=request.cache_salt)
