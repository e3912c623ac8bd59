"""KV memory: one byte region per tensor-parallel rank, given by the caller, and typed views on it.

A page is the KV of one (layer, block) on one rank: `[K and V, heads of the rank, tokens of a block, head_dim]` float32.
The model computes on these bytes directly, so what a peer copies out of a region is what attention reads; there is no
second copy that could be right while the first is wrong. Groups own disjoint layers and share one space of block ids.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np
import numpy.typing as npt

from kvbaton.engines.embedded.engine_config import CacheConfig, ModelConfig

Floats = npt.NDArray[np.float32]
Ints = npt.NDArray[np.int64]

ITEM_BYTES = 4


class KvGeometry(msgspec.Struct, frozen=True):
    """Pure arithmetic from (rank, layer, block) to bytes; equal on all ranks but for the heads they hold."""

    model: ModelConfig
    cache: CacheConfig

    def __post_init__(self) -> None:
        tp, kv_heads = self.cache.tp, self.model.kv_heads
        if self.model.heads % tp or (kv_heads % tp and tp % kv_heads):
            raise ValueError(f"tp={tp} does not divide heads={self.model.heads} and kv_heads={kv_heads}")

    def query_heads(self, rank: int) -> range:
        share = self.model.heads // self.cache.tp
        return range(rank * share, (rank + 1) * share)

    def kv_heads(self, rank: int) -> range:
        """The heads that a rank holds; with more ranks than heads, several ranks hold the same one."""
        per_kv_head = self.model.heads // self.model.kv_heads
        mine = self.query_heads(rank)
        return range(mine[0] // per_kv_head, mine[-1] // per_kv_head + 1)

    @property
    def kv_heads_per_rank(self) -> int:
        return len(self.kv_heads(0))

    @property
    def page_bytes(self) -> int:
        floats = 2 * self.kv_heads_per_rank * self.cache.block_tokens * self.model.head_dim
        return floats * ITEM_BYTES

    @property
    def layer_stride_bytes(self) -> int:
        return self.page_bytes * (self.cache.blocks if self.cache.layout == "LB" else 1)

    @property
    def block_stride_bytes(self) -> int:
        return self.page_bytes * (1 if self.cache.layout == "LB" else self.model.layers)

    @property
    def region_bytes(self) -> int:
        return self.page_bytes * self.model.layers * self.cache.blocks

    def offset(self, layer: int, block: int) -> int:
        """First byte of a page within a rank's region."""
        return layer * self.layer_stride_bytes + block * self.block_stride_bytes


class KvMemory:
    """Typed views on the regions of all ranks. Holds exported buffers: `close` it before closing shared memory."""

    def __init__(self, geometry: KvGeometry, regions: Sequence[memoryview]) -> None:
        if len(regions) != geometry.cache.tp:
            raise ValueError(f"{len(regions)} regions given for tp={geometry.cache.tp}")
        self.geometry = geometry
        self._pages = [_pages(geometry, region) for region in regions]
        for pages in self._pages:
            pages[:, 0] = 0.0  # the null block is read as padding, never written again

    def pages(self, rank: int) -> Floats:
        """`[layers, blocks, K and V, heads of the rank, tokens of a block, head_dim]`."""
        return self._pages[rank]

    def close(self) -> None:
        """Drop the views; the engine must not step afterwards."""
        self._pages = []


def allocate_regions(geometry: KvGeometry) -> list[memoryview]:
    """Private memory for an engine without handoffs."""
    return [np.zeros(geometry.region_bytes, np.uint8).data for _ in range(geometry.cache.tp)]  # pages come when used


def _pages(geometry: KvGeometry, region: memoryview) -> Floats:
    model, cache = geometry.model, geometry.cache
    if region.nbytes != geometry.region_bytes or region.readonly:
        raise ValueError(f"a region must be {geometry.region_bytes} writable bytes, got {region.nbytes}")
    interior = (2, geometry.kv_heads_per_rank, cache.block_tokens, model.head_dim)
    flat = np.frombuffer(region, dtype=np.float32)
    if cache.layout == "LB":
        return flat.reshape((model.layers, cache.blocks, *interior))
    return flat.reshape((cache.blocks, model.layers, *interior)).swapaxes(0, 1)
