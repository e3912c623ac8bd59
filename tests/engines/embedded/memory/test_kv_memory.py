"""The arithmetic that a peer uses to find bytes is the arithmetic of the views that the model computes on."""

from __future__ import annotations

import numpy as np
import pytest

from kvbaton.engines.embedded.engine_config import CacheConfig, Layout, ModelConfig
from kvbaton.engines.embedded.memory.kv_memory import KvGeometry, KvMemory, allocate_regions

MODEL = ModelConfig(layers=3, heads=4, kv_heads=2, head_dim=8)


@pytest.mark.parametrize("layout", ["LB", "BL"])
@pytest.mark.parametrize("tp", [1, 2, 4])
def test_a_page_lies_where_the_offset_says(layout: Layout, tp: int) -> None:
    geometry = KvGeometry(MODEL, CacheConfig(blocks=5, block_tokens=8, tp=tp, layout=layout))
    regions = allocate_regions(geometry)
    memory = KvMemory(geometry, regions)
    for layer in range(3):
        for block in range(1, 5):
            memory.pages(tp - 1)[layer, block] = 10 * layer + block
            at = geometry.offset(layer, block)
            page = np.frombuffer(regions[tp - 1][at : at + geometry.page_bytes], dtype=np.float32)
            assert (page == 10 * layer + block).all()
    assert geometry.offset(2, 4) + geometry.page_bytes == geometry.region_bytes


def test_a_page_is_keys_then_values_then_heads_then_tokens() -> None:
    geometry = KvGeometry(MODEL, CacheConfig(blocks=2, block_tokens=8))
    regions = allocate_regions(geometry)
    KvMemory(geometry, regions).pages(0)[1, 1, 1, 1, 3, 2] = 7.0
    floats = np.frombuffer(regions[0], dtype=np.float32)
    assert np.flatnonzero(floats).tolist() == [geometry.offset(1, 1) // 4 + ((1 * 2 + 1) * 8 + 3) * 8 + 2]


def test_layouts_differ_in_strides_only() -> None:
    layers_first = KvGeometry(MODEL, CacheConfig(blocks=5, block_tokens=8, layout="LB"))
    blocks_first = KvGeometry(MODEL, CacheConfig(blocks=5, block_tokens=8, layout="BL"))
    page = layers_first.page_bytes
    assert page == blocks_first.page_bytes == 2 * 2 * 8 * 8 * 4
    assert (layers_first.layer_stride_bytes, layers_first.block_stride_bytes) == (5 * page, page)
    assert (blocks_first.layer_stride_bytes, blocks_first.block_stride_bytes) == (page, 3 * page)


@pytest.mark.parametrize(
    ("tp", "heads"), [(1, [range(2)]), (2, [range(1), range(1, 2)]), (4, [range(1)] * 2 + [range(1, 2)] * 2)]
)
def test_ranks_share_heads_out_and_repeat_them_when_there_are_too_few(tp: int, heads: list[range]) -> None:
    geometry = KvGeometry(MODEL, CacheConfig(tp=tp))
    assert [geometry.kv_heads(rank) for rank in range(tp)] == heads


def test_ranks_that_heads_cannot_be_shared_among_are_refused() -> None:
    with pytest.raises(ValueError, match="tp=3"):
        KvGeometry(MODEL, CacheConfig(tp=3))


def test_a_region_of_the_wrong_size_is_refused() -> None:
    geometry = KvGeometry(MODEL, CacheConfig(blocks=4))
    with pytest.raises(ValueError, match="writable bytes"):
        KvMemory(geometry, [memoryview(bytearray(geometry.region_bytes - 4))])
    with pytest.raises(ValueError, match="writable bytes"):
        KvMemory(geometry, [memoryview(bytes(geometry.region_bytes))])
    with pytest.raises(ValueError, match="2 regions"):
        KvMemory(geometry, allocate_regions(geometry) * 2)


def test_closing_lets_go_of_the_callers_memory() -> None:
    geometry = KvGeometry(MODEL, CacheConfig(blocks=4))
    buffer = bytearray(geometry.region_bytes)
    region = memoryview(buffer)
    memory = KvMemory(geometry, [region])
    memory.close()
    region.release()
    buffer.extend(b"x")  # BufferError while anything is exported


def test_the_null_block_is_zero_whatever_memory_held() -> None:
    geometry = KvGeometry(MODEL, CacheConfig(blocks=4, layout="BL"))
    region = memoryview(bytearray(b"\xff" * geometry.region_bytes))
    pages = KvMemory(geometry, [region]).pages(0)
    assert (pages[:, 0] == 0.0).all()
    assert np.isnan(pages[:, 1:]).all()
