"""Which bytes of a rank are a block's value, and who shares values with whom."""

from __future__ import annotations

import os

import msgspec
import pytest

from kvbaton.engines.embedded.engine_config import CacheConfig, ModelConfig
from kvbaton.engines.embedded.memory.kv_layout import engine_layout
from kvbaton.engines.embedded.memory.kv_memory import KvGeometry
from kvbaton.protocol.geometry.layout import (
    Cell,
    EngineLayout,
    Group,
    GroupKind,
    Place,
    Plane,
    Rank,
    Share,
    planes,
    validate,
)
from kvbaton.ranks.rank_store import NotStorable, RankValues, rank_values
from kvbaton.store.interface import prefix

COMPAT = "a" * 32
MODEL = ModelConfig()


def values(rank: int = 0, model: ModelConfig = MODEL, compat: str = COMPAT, **cache: object) -> RankValues:
    geometry = KvGeometry(model, CacheConfig(**{"blocks": 8, **cache}))
    return rank_values(engine_layout(geometry), rank, compat)


def one_group(group: Group, *shares: Share, region_bytes: int = 1 << 16) -> EngineLayout:
    ranks = tuple(Rank(0, index, 0, (region_bytes,), (share,)) for index, share in enumerate(shares))
    return validate(EngineLayout((group,), ranks))


@pytest.mark.parametrize("layout", ["LB", "BL"])
@pytest.mark.parametrize("tp", [1, 2])
def test_the_pieces_of_a_block_are_its_pages_layer_by_layer(layout: str, tp: int) -> None:
    geometry = KvGeometry(MODEL, CacheConfig(blocks=8, tp=tp, layout=layout))
    region = memoryview(os.urandom(geometry.region_bytes))
    found = rank_values(engine_layout(geometry), tp - 1, COMPAT)
    for block in (0, 3, 7):
        pages = [geometry.offset(layer, block) for layer in range(MODEL.layers)]
        right = b"".join(region[at : at + geometry.page_bytes] for at in pages)
        assert b"".join(found.pieces([region], block)) == right
        assert len(right) == found.space.value_bytes
    assert len(found.runs) == (MODEL.layers if layout == "LB" else 1), "blocks first: one piece holds it all"


def test_engines_whose_blocks_lie_differently_share_values_and_others_do_not() -> None:
    front = prefix(values().space)
    assert prefix(values(layout="BL", blocks=64).space) == front
    others = [
        values(compat="b" * 32),
        values(block_tokens=8),
        values(0, tp=2),
        values(1, tp=2),
        values(model=ModelConfig(layers=2)),
    ]
    assert len({front, *(prefix(each.space) for each in others)}) == 1 + len(others)


def test_ranks_that_hold_the_same_heads_share_values() -> None:
    """Two KV heads on four ranks: the first two have one head, the last two the other."""
    fronts = [prefix(values(rank, tp=4).space) for rank in range(4)]
    assert fronts[0] == fronts[1] != fronts[2] == fronts[3]
    assert fronts[0] == prefix(values(0, tp=2).space)


def test_the_order_of_cells_in_a_page_is_part_of_the_space_and_strides_are_not() -> None:
    group = Group("g", GroupKind.FULL, 4, ("l0",), 2, (Cell("k", 2), Cell("v", 2)), "float16")

    def share(order: str) -> Share:
        return Share(0, 2, 4, (Place(0, 0, 32),), planes(order, group.cells, 2, 4))

    spaces = [rank_values(one_group(group, share(order)), 0, COMPAT).space for order in ("PHN", "HNP", "NHP", "PNH")]
    assert len({prefix(space) for space in spaces}) == 4
    packed = Group("g", GroupKind.FULL, 4, ("l0",), 2, (Cell("kv", 4),), "float16")
    near = Share(0, 2, 4, (Place(0, 0, 32),), (Plane(0, 16, 4),))
    far = Share(0, 2, 4, (Place(0, 0, 16),), (Plane(0, 64, 4),))  # heads outside blocks
    padded = Share(0, 2, 4, (Place(0, 0, 64),), (Plane(0, 32, 4),))
    found = [rank_values(one_group(packed, each), 0, COMPAT) for each in (near, far, padded)]
    assert len({prefix(each.space) for each in found}) == 1
    assert [[run.bytes for run in each.runs] for each in found] == [[32], [16, 16], [16, 16]]


def test_values_outlive_the_release_that_wrote_them() -> None:
    """A golden name: another would miss all that a store has, or worse, find what means something else."""
    group = Group("g", GroupKind.FULL, 4, ("l0", "l1"), 2, (Cell("k", 2), Cell("v", 2)), "float16")
    share = Share(1, 1, 4, (Place(1, 128, 16), Place(0, 0, 16)), planes("PHN", group.cells, 1, 4))
    dealt = EngineLayout((group,), tuple(Rank(0, 0, each, (256,), (share,)) for each in (0, 1)), 2, 2)
    whole = one_group(group, share, msgspec.structs.replace(share, head_start=0))
    found = [prefix(rank_values(whole, 0, COMPAT).space), prefix(rank_values(dealt, 1, COMPAT).space)]
    assert found == [f"kv1-{COMPAT}-d459ea1efd5cbc32-r0.1-l0.2-p1-", f"kv1-{COMPAT}-27088c7a0bed9751-r0.1-l0.2-p1-"]


def test_latent_kv_is_one_value_for_all_ranks() -> None:
    group = Group("mla", GroupKind.LATENT, 4, ("l0", "l1"), 1, (Cell("c", 8),), "bfloat16")
    share = Share(0, 1, 4, (Place(0, 0, 32), Place(1, 128, 32)), (Plane(0, 0, 8),))
    layout = one_group(group, share, share)
    assert rank_values(layout, 0, COMPAT) == rank_values(layout, 1, COMPAT)


def test_stages_have_values_of_their_own() -> None:
    group = Group("g", GroupKind.FULL, 4, ("l0", "l1"), 1, (Cell("kv", 4),), "float16")
    first, last = (Share(0, 1, 4, (Place(layer, 0, 16),), (Plane(0, 0, 4),)) for layer in (0, 1))
    layout = one_group(group, first, last)
    assert prefix(rank_values(layout, 0, COMPAT).space) != prefix(rank_values(layout, 1, COMPAT).space)


@pytest.mark.parametrize(("kind", "window"), [(GroupKind.SLIDING, 8), (GroupKind.CHUNKED, 8), (GroupKind.STATE, 0)])
def test_kv_without_whole_prefixes_is_refused_by_name(kind: GroupKind, window: int) -> None:
    group = Group("odd", kind, 4, ("l0",), 1, (Cell("kv", 4),), "float16", window)
    layout = one_group(group, Share(0, 1, 4, (Place(0, 0, 16),), (Plane(0, 0, 4),)))
    with pytest.raises(NotStorable, match=f"'odd' is {kind}"):
        rank_values(layout, 0, COMPAT)


def test_several_groups_and_absent_layers_are_refused_by_name() -> None:
    group = Group("a", GroupKind.FULL, 4, ("l0",), 1, (Cell("kv", 4),), "float16")
    share = Share(0, 1, 4, (Place(0, 0, 16),), (Plane(0, 0, 4),))
    other = msgspec.structs.replace(group, name="b", layers=("l1",))
    two = validate(EngineLayout((group, other), (Rank(0, 0, 0, (1 << 10,), (share, share)),)))
    with pytest.raises(NotStorable, match="'a', 'b'"):
        rank_values(two, 0, COMPAT)
    with pytest.raises(NotStorable, match="rank 1 has none"):
        rank_values(one_group(group, share, Share()), 1, COMPAT)


def test_planes_that_overlap_and_values_in_too_many_pieces_are_refused() -> None:
    group = Group("g", GroupKind.FULL, 4, ("l0",), 1, (Cell("k", 4), Cell("v", 4)), "float16")
    overlapping = Share(0, 1, 4, (Place(0, 0, 64),), (Plane(0, 0, 4), Plane(8, 0, 4)))
    with pytest.raises(NotStorable, match="overlap"):
        rank_values(one_group(group, overlapping), 0, COMPAT)
    holes = Group("g", GroupKind.FULL, 8192, ("l0",), 1, (Cell("kv", 1),), "int8")
    share = Share(0, 1, 1, (Place(0, 0, 1 << 15),), (Plane(0, 0, 2),))
    with pytest.raises(NotStorable, match="8192 pieces"):
        rank_values(one_group(holes, share), 0, COMPAT)


@pytest.mark.parametrize("block", [-1, 8])
def test_a_block_that_does_not_exist_has_no_pieces(block: int) -> None:
    with pytest.raises(ValueError, match=f"block {block}"):
        values().pieces([memoryview(b"")], block)
