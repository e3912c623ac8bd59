"""Promise 5: a layout that passes the door names no byte outside its memory; the rest is refused by field."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from layout_builders import cells_at, engine, even, group, memory

from kvbaton.protocol.errors import ProtocolError, Reason
from kvbaton.protocol.geometry import layout as layout_module
from kvbaton.protocol.geometry.layout import (
    Cell,
    EngineLayout,
    GroupKind,
    Per,
    Place,
    Plane,
    needed_blocks,
    places,
    planes,
    validate,
)

replace = msgspec.structs.replace


def changed(layout: EngineLayout, path: str, value: object) -> EngineLayout:
    """The layout with one field replaced: `ranks.0.shares.0.head_count`."""

    def put(node: Any, steps: list[str]) -> Any:
        if not steps:
            return value
        step, rest = steps[0], steps[1:]
        if step.isdigit():
            items = list(node)
            items[int(step)] = put(items[int(step)], rest)
            return tuple(items)
        return replace(node, **{step: put(getattr(node, step), rest)})

    return put(layout, path.split("."))  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("order", "expected"),
    [
        ("HNP", (Plane(0, 4096, 128),)),  # LBHNC: byte strides (16384, 4096, 128, 2), as measured in vLLM
        ("NHP", (Plane(0, 128, 512),)),  # LBNHC: byte strides (16384, 128, 512, 2)
    ],
)
def test_a_packed_page_has_vllms_strides(order: str, expected: tuple[Plane, ...]) -> None:
    assert planes(order, (Cell("kv", 128),), heads=4, tokens=32) == expected


@pytest.mark.parametrize(
    ("order", "expected"),
    [
        ("PHN", (Plane(0, 12, 4), Plane(24, 6, 2))),  # all of K, then all of V
        ("PNH", (Plane(0, 4, 8), Plane(24, 2, 4))),
        ("HPN", (Plane(0, 18, 4), Plane(12, 18, 2))),
        ("HNP", (Plane(0, 18, 6), Plane(4, 18, 6))),
        ("NPH", (Plane(0, 4, 12), Plane(8, 2, 12))),
        ("NHP", (Plane(0, 6, 12), Plane(4, 6, 12))),
    ],
)
def test_k_and_v_of_different_size_lie_where_the_order_says(order: str, expected: tuple[Plane, ...]) -> None:
    assert planes(order, (Cell("k", 4), Cell("v", 2)), heads=2, tokens=3) == expected


def test_scales_per_head_follow_the_tokens_in_their_page() -> None:
    cells = (Cell("kv", 4), Cell("scale", 2, Per.HEAD))
    assert planes("PHN", cells, heads=2, tokens=3) == (Plane(0, 12, 4), Plane(24, 2, 2))


def test_planes_of_different_granularity_cannot_be_interleaved() -> None:
    with pytest.raises(ValueError, match="P outermost"):
        planes("HNP", (Cell("kv", 4), Cell("scale", 2, Per.HEAD)), heads=2, tokens=3)


@pytest.mark.parametrize("order", ["HN", "HNC", "HNPP", ""])
def test_an_order_must_name_every_axis_once(order: str) -> None:
    with pytest.raises(ValueError, match="not an order"):
        planes(order, (Cell("kv", 4),), heads=2, tokens=3)


def test_places_follow_vllms_address_formula() -> None:
    assert places([3, 5], offset=10, layer_stride=100, block_stride=7, region=1) == (
        Place(3, 10, 7, 1),
        Place(5, 110, 7, 1),
    )


@settings(deadline=None, derandomize=True, max_examples=60)
@given(
    tp=st.integers(1, 5),
    heads=st.integers(1, 4),
    order=st.sampled_from(["HNP", "NHP", "PHN", "PNH", "HPN", "NPH"]),
    arrangement=st.sampled_from(["LB", "BL"]),
    pad=st.integers(0, 3),
    regions=st.integers(1, 2),
    per=st.sampled_from(Per),
)
def test_no_two_cells_of_a_valid_layout_share_a_byte_and_none_is_outside(per: Per, heads: int, **how: Any) -> None:
    layout = engine(group(heads=heads, cells=(Cell("k", 2, per), Cell("v", 1, per))), blocks=3, **how)
    for rank in range(len(layout.ranks)):
        seen = set()
        for block in range(3):
            for region, at, _, _ in cells_at(layout, rank, 0, block):
                assert (region, at) not in seen
                assert 0 <= at < len(memory(layout, "m")[rank, region])
                seen.add((region, at))


def test_a_layout_survives_the_wire() -> None:
    layout = engine(group(), group("state", kind=GroupKind.STATE, cells=(Cell("h", 3, Per.PAGE),)), tp=2)
    wire = msgspec.msgpack.encode(layout)
    assert validate(msgspec.msgpack.decode(wire, type=EngineLayout)) == layout


def test_the_stride_of_a_single_head_or_block_says_nothing() -> None:
    layout = changed(engine(group(heads=1), blocks=1), "ranks.0.shares.0.planes.0.head_stride", 0)
    assert validate(changed(layout, "ranks.0.shares.0.places.0.block_stride", 0))


def test_a_rank_may_have_nothing_of_a_group() -> None:
    layout = engine(group(layers=2), stages=[["full.0"], ["full.1"]])
    assert validate(changed(layout, "ranks.0.shares.0.places", ())).ranks[0].shares[0].places == ()


GOOD = engine(group(), group("sliding", kind=GroupKind.SLIDING, window=5), tp=2, regions=2)


@pytest.mark.parametrize(
    ("path", "value", "field"),
    [
        ("dcp", 0, "dcp"),
        ("dcp", 65, "dcp"),
        ("dcp_interleave", 0, "dcp_interleave"),
        ("groups", (), "groups"),
        ("groups", GOOD.groups * 33, "groups"),
        ("groups", GOOD.groups[:1] * 2, "groups"),
        ("ranks", (), "ranks"),
        ("ranks", GOOD.ranks * 2, "ranks"),
        ("groups.0.name", "", "groups[0].name"),
        ("groups.0.name", "a\nb", "groups[0].name"),
        ("groups.0.dtype", "x" * 257, "groups[0].dtype"),
        ("groups.0.block_tokens", 0, "groups[0].block_tokens"),
        ("groups.0.block_tokens", 1 << 25, "groups[0].block_tokens"),
        ("groups.0.window", 1, "groups[0].window"),
        ("groups.1.window", 0, "groups[1].window"),
        ("groups.0.heads", 0, "groups[0].heads"),
        ("groups.0.layers", (), "groups[0].layers"),
        ("groups.0.layers", ("a", "a"), "groups[0].layers"),
        ("groups.0.layers", ("a", ""), "groups[0].layers"),
        ("groups.0.layers", tuple(map(str, range(1025))), "groups[0].layers"),
        ("groups.0.cells", (), "groups[0].cells"),
        ("groups.0.cells.0.name", "", "groups[0].cells"),
        ("groups.0.cells.0.bytes", 0, "groups[0].cells"),
        ("groups", tuple(group(str(n), layers=821) for n in range(5)), "layers of all groups"),
        ("ranks.0.pp", -1, "ranks[0].pp"),
        ("ranks.1.tp", 256, "ranks[1].tp"),
        ("ranks.0.dcp", 1, "ranks[0].dcp"),
        ("ranks.0.region_bytes", (), "ranks[0].region_bytes"),
        ("ranks.0.region_bytes.1", -1, "ranks[0].region_bytes"),
        ("ranks.0.region_bytes.1", 1, "ranks[0].shares[0].places"),
        ("ranks.0.shares", GOOD.ranks[0].shares[:1], "ranks[0].shares"),
        ("ranks.0.shares.0.head_start", -1, "ranks[0].shares[0].head_start"),
        ("ranks.0.shares.0.head_count", 5, "ranks[0].shares[0].head_count"),
        ("ranks.0.shares.0.head_count", 0, "ranks[0].shares[0].head_count"),
        ("ranks.0.shares.0.block_count", 0, "ranks[0].shares[0].block_count"),
        ("ranks.0.shares.0.block_count", 9, "ranks[0].shares[0].places"),
        ("ranks.0.shares.0.planes", (), "ranks[0].shares[0].planes"),
        ("ranks.0.shares.0.planes.0.offset", -1, "ranks[0].shares[0].planes and places"),
        ("ranks.0.shares.0.planes.0.head_stride", 1 << 57, "ranks[0].shares[0].planes and places"),
        ("ranks.0.shares.0.planes.0.token_stride", 1, "ranks[0].shares[0].planes 'kv'"),
        ("ranks.0.shares.0.places.0.block_stride", 0, "ranks[0].shares[0].planes 'kv'"),
        ("ranks.0.shares.0.places.0.layer", 2, "ranks[0].shares[0].places.layer"),
        ("ranks.0.shares.0.places.0.layer", 1, "ranks[0].shares[0].places"),
        ("ranks.0.shares.0.places.0.region", 1, "ranks[0].shares[0].places"),
        ("ranks.0.shares.0.places.1.region", 2, "ranks[0].shares[0].places.region"),
        ("ranks.0.shares.0.places.0.offset", -1, "ranks[0].shares[0].planes and places"),
        ("ranks.0.shares.0.places.1.offset", 1 << 57, "ranks[0].shares[0].planes and places"),
        ("ranks.0.shares.0.places.1.block_stride", 1 << 57, "ranks[0].shares[0].planes and places"),
    ],
)
def test_a_broken_bound_is_refused_by_field(path: str, value: object, field: str) -> None:
    with pytest.raises(ProtocolError) as error:
        validate(changed(GOOD, path, value))
    assert error.value.reason is Reason.BAD_MESSAGE
    assert error.value.detail.split(": ")[0] == field


def test_what_a_layout_has_in_all_is_bounded() -> None:
    """Each of its lists may be within its own bound: it is their product that takes time."""
    with pytest.raises(ProtocolError, match=r"layers on all ranks: 20000 is outside 0..16384"):
        engine(group(layers=100), tp=200, blocks=1)
    with pytest.raises(ProtocolError, match=r"groups on ranks: 1040 is outside 1..1024"):
        engine(*(group(str(n), layers=1) for n in range(5)), tp=208, blocks=1)


def test_blocks_inside_blocks_are_few_distances_apart() -> None:
    """Each takes a calculation of its own; engines that keep heads outside blocks have one."""
    layout = engine(group(layers=5, heads=2), arrangement="LHB", blocks=8)
    assert validate(layout)
    for layer in range(1, 5):
        at = f"ranks.0.shares.0.places.{layer}.block_stride"
        layout = changed(layout, at, layout.ranks[0].shares[0].places[0].block_stride + layer)
    roomy = changed(layout, "ranks.0.region_bytes", (1 << 30,))
    with pytest.raises(ProtocolError, match=r"strides of blocks below \d+: 5 is outside 0..4"):
        validate(roomy)


def test_a_block_must_be_divisible_among_the_ranks_that_share_its_tokens() -> None:
    layout = engine(group(block_tokens=4), dcp=2)
    with pytest.raises(ProtocolError, match="cannot be dealt out"):
        validate(changed(layout, "groups.0.block_tokens", 5))


def test_a_state_counts_as_one_token_whatever_its_block_says() -> None:
    state = group("state", kind=GroupKind.STATE, block_tokens=1 << 20, cells=(Cell("h", 3, Per.PAGE),))
    assert engine(state, dcp=2).page_tokens(0) == 1
    assert engine(group(block_tokens=6), dcp=2).page_tokens(0) == 3


def test_a_message_shows_only_the_beginning_of_an_endless_name() -> None:
    with pytest.raises(ProtocolError) as error:
        validate(changed(GOOD, "groups.0.name", "x" * 100_000))
    assert len(error.value.detail) < 200


@pytest.mark.parametrize(("tokens", "blocks"), [(0, 0), (1, 1), (16, 1), (17, 2), (33, 3)])
def test_the_last_block_may_be_partial(tokens: int, blocks: int) -> None:
    assert needed_blocks(tokens, 16) == blocks


@pytest.mark.parametrize(
    ("tokens", "window", "expected"),
    [
        (100, 32, (4, 7)),  # tokens 69..99
        (100, 1000, (0, 7)),
        (96, 1, (6, 6)),  # a token that sees only itself needs nothing
        (96, 17, (5, 6)),
        (96, 18, (4, 6)),
        (0, 4, (0, 0)),
    ],
)
def test_a_sliding_window_needs_its_last_blocks_only(tokens: int, window: int, expected: tuple[int, int]) -> None:
    assert group(kind=GroupKind.SLIDING, window=window, block_tokens=16).needed(tokens) == expected


@pytest.mark.parametrize(
    ("kind", "expected"),
    [(GroupKind.FULL, (0, 7)), (GroupKind.LATENT, (0, 7)), (GroupKind.CHUNKED, (4, 7)), (GroupKind.STATE, (0, 1))],
)
def test_what_a_position_needs_depends_on_the_kind(kind: GroupKind, expected: tuple[int, int]) -> None:
    window = 64 if kind is GroupKind.CHUNKED else 0
    assert group(kind=kind, window=window, block_tokens=16).needed(100) == expected


@pytest.mark.parametrize(
    ("per", "tokens", "heads"), [(Per.TOKEN, True, True), (Per.HEAD, False, True), (Per.PAGE, False, False)]
)
def test_a_group_can_be_cut_no_finer_than_its_coarsest_cell(per: Per, tokens: bool, heads: bool) -> None:
    mixed = group(cells=(Cell("kv", 2), Cell("x", 2, per)))
    assert (mixed.splits_tokens, mixed.splits_heads) == (tokens, heads)


def test_even_slices_are_what_engines_do() -> None:
    assert even(8, 2) == [(0, 4), (4, 4)]
    assert even(2, 4) == [(0, 1), (0, 1), (1, 1), (1, 1)]
    assert even(3, 2) == [(0, 1), (1, 2)]


def test_bounds_keep_every_sum_within_a_signed_64_bit_number() -> None:
    assert layout_module.BYTES_MAX * 4 < 1 << 63
