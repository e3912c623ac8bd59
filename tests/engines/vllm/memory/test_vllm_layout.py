"""Where vLLM's KV lies: read from tensors, put together over ranks, refused where it cannot be described."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import product
from math import prod
from typing import Any

import pytest

from kvbaton.engines.vllm.memory.vllm_layout import Parallel, engine_layout, rank_facts, vllm_groups
from kvbaton.protocol.geometry.layout import GroupKind, Per, Plane


@dataclass
class Storage:
    address: int
    size: int

    def data_ptr(self) -> int:
        return self.address

    def nbytes(self) -> int:
        return self.size


@dataclass
class Tensor:
    """As much of a torch tensor as a layout is read from."""

    storage: Storage
    shape: tuple[int, ...]
    offset: int = 0
    item: int = 4
    strides: tuple[int, ...] = ()
    dtype: str = "torch.float32"

    def untyped_storage(self) -> Storage:
        return self.storage

    def data_ptr(self) -> int:
        return self.storage.address + self.offset

    def element_size(self) -> int:
        return self.item

    def stride(self) -> tuple[int, ...]:
        return self.strides or tuple(prod(self.shape[axis + 1 :]) for axis in range(len(self.shape)))


def spec(kind: str = "FullAttentionSpec", block_size: int = 8, **more: Any) -> Any:
    return type(kind, (), {"block_size": block_size, "dtype": "torch.float32", **more})()


@dataclass
class Group:
    layer_names: list[str]
    kv_cache_spec: Any
    enable_kv_transfer: bool = True
    is_eagle_group: bool = False


@dataclass
class Config:
    kv_cache_groups: list[Group]
    num_blocks: int = 10
    extra: dict[str, Any] = field(default_factory=dict)


def llama(heads: int = 2, blocks: int = 10, tokens: int = 8, dim: int = 4) -> dict[str, Tensor]:
    page = heads * tokens * 2 * dim * 4
    storage = Storage(4096, 2 * blocks * page)
    return {
        f"layers.{layer}": Tensor(storage, (blocks, heads, tokens, 2 * dim), layer * blocks * page) for layer in (0, 1)
    }


ONE = Parallel(0, 0, 1, 2)


def test_on_cpu_a_head_of_a_block_is_the_smallest_thing_that_moves() -> None:
    facts = rank_facts(llama(), Config([Group(["layers.0", "layers.1"], spec())]), ONE, opaque_pages=True)
    (group,) = facts.groups
    assert [(cell.name, cell.bytes, cell.per) for cell in group.cells] == [("k", 128, Per.HEAD), ("v", 128, Per.HEAD)]
    assert group.planes == (Plane(0, 256, 0), Plane(128, 256, 0)) and group.places[1].offset == 10 * 512
    layout = engine_layout([facts])
    assert (layout.groups[0].heads, layout.groups[0].splits_heads, layout.groups[0].splits_tokens) == (2, True, False)


def test_elsewhere_rows_of_tokens_move() -> None:
    facts = rank_facts(llama(), Config([Group(["layers.0"], spec())]), ONE, opaque_pages=False)
    assert [(cell.bytes, cell.per) for cell in facts.groups[0].cells] == [(32, Per.TOKEN)]
    assert facts.groups[0].planes == (Plane(0, 256, 32),)


def test_mla_moves_by_rows_on_cpu_too_and_every_rank_has_all_of_it() -> None:
    tensors = {"layers.0": Tensor(Storage(0, 10 * 16 * 4 * 4), (10, 1, 16, 4))}
    config = Config([Group(["layers.0"], spec("MLAAttentionSpec", 16))])
    ranks = [rank_facts(tensors, config, Parallel(0, tp, 2, 1), opaque_pages=True) for tp in (0, 1)]
    layout = engine_layout(ranks)
    assert layout.groups[0].kind is GroupKind.LATENT and layout.groups[0].splits_tokens
    assert [rank.shares[0].head_start for rank in layout.ranks] == [0, 0]


def test_kernel_blocks_within_a_block_are_one_page() -> None:
    tensors = {"layers.0": Tensor(Storage(0, 40 * 4 * 4 * 4), (40, 1, 4, 4))}
    config = Config([Group(["layers.0"], spec("MLAAttentionSpec", 16))])
    facts = rank_facts(tensors, config, ONE, opaque_pages=True)
    assert facts.groups[0].places[0].block_stride == 4 * 4 * 4 * 4


@pytest.mark.parametrize(("tp_size", "total", "starts", "heads"), [(2, 4, [0, 2], 4), (4, 2, [0, 0, 1, 1], 2)])
def test_heads_are_dealt_out_or_shared_between_ranks(tp_size: int, total: int, starts: list[int], heads: int) -> None:
    mine = max(1, total // tp_size)
    config = Config([Group(["layers.0", "layers.1"], spec())])
    ranks = [
        rank_facts(llama(mine), config, Parallel(0, tp, tp_size, total), opaque_pages=True) for tp in range(tp_size)
    ]
    layout = engine_layout(ranks)
    assert layout.groups[0].heads == heads and [rank.shares[0].head_start for rank in layout.ranks] == starts


def test_windows_and_full_attention_are_groups_that_share_memory() -> None:
    tensors = llama()
    config = Config([Group(["layers.0"], spec()), Group(["layers.1"], spec("SlidingWindowSpec", sliding_window=16))])
    facts = rank_facts(tensors, config, ONE, opaque_pages=True)
    layout = engine_layout([facts])
    assert [(group.kind, group.window) for group in layout.groups] == [(GroupKind.FULL, 0), (GroupKind.SLIDING, 16)]
    assert vllm_groups([facts]) == (0, 1) and facts.region_bytes == (tensors["layers.0"].storage.size,)


def test_layers_of_several_page_sizes_in_one_group_become_groups_with_one_block_list() -> None:
    small, large = llama(heads=1), llama(heads=2)
    tensors = {"layers.0": small["layers.0"], "layers.1": large["layers.1"]}
    tensors["layers.1"].storage.address = 1 << 30
    inner = {"layers.0": spec(), "layers.1": spec(num_kv_heads=2)}
    mixed = type("UniformTypeKVCacheSpecs", (), {"kv_cache_specs": inner, "block_size": 8})()
    facts = rank_facts(tensors, Config([Group(["layers.0", "layers.1"], mixed)]), ONE, opaque_pages=True)
    assert vllm_groups([facts]) == (0, 0) and len(engine_layout([facts]).groups) == 2
    assert len(facts.region_bytes) == 2


def test_stages_of_a_pipeline_hold_layers_of_one_group() -> None:
    config = Config([Group(["layers.0", "layers.1"], spec())])
    tensors = llama()
    stages = [
        rank_facts({f"layers.{pp}": tensors[f"layers.{pp}"]}, config, Parallel(pp, 0, 1, 2), opaque_pages=True)
        for pp in (0, 1)
    ]
    layout = engine_layout(stages)
    assert layout.groups[0].layers == ("layers.0", "layers.1")
    assert [[place.layer for place in rank.shares[0].places] for rank in layout.ranks] == [[0], [1]]


@pytest.mark.parametrize(
    ("tensors", "group", "named"),
    [
        ({"layers.0": [1, 2]}, Group(["layers.0"], spec("MambaSpec")), "is a list, not one tensor"),
        (llama(), Group(["layers.0"], spec("CircularBufferSpec")), "CircularBufferSpec"),
        (llama(blocks=7), Group(["layers.0"], spec()), "expected 10 blocks"),
        ({}, Group([], spec()), "none of them"),
        (llama(), Group(["layers.0"], spec(), enable_kv_transfer=False), "none of them"),
    ],
)
def test_what_cannot_be_described_is_refused_by_name(tensors: Any, group: Group, named: str) -> None:
    real = {name: tensor for name, tensor in tensors.items() if isinstance(tensor, Tensor)}
    with pytest.raises(ValueError, match=named):
        rank_facts(tensors if len(real) != len(tensors) else real, Config([group]), ONE, opaque_pages=True)


@pytest.mark.parametrize(("heads", "blocks"), list(product((1, 2, 4), (10, 33))))
def test_no_two_cells_share_a_byte_and_none_is_outside(heads: int, blocks: int) -> None:
    """`engine_layout` validates, so a layout that is returned keeps the law of the geometry."""
    config = Config([Group(["layers.0", "layers.1"], spec())], num_blocks=blocks)
    facts = rank_facts(llama(heads, blocks), config, Parallel(0, 0, 1, heads), opaque_pages=True)
    layout = engine_layout([facts])
    pages = {place.offset for place in layout.ranks[0].shares[0].places}
    assert len(pages) == 2 and layout.ranks[0].region_bytes == (2 * blocks * heads * 8 * 8 * 4,)
