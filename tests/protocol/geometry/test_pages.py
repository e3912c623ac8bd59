"""Which bytes belong to which block: told from the layout alone, and never a byte of another block."""

from __future__ import annotations

import random

import pytest

from kvbaton.protocol.geometry.layout import (
    Band,
    Cell,
    EngineLayout,
    Group,
    GroupKind,
    PageTable,
    Place,
    Plane,
    Rank,
    Share,
    _merged,
    pages,
    places,
    planes,
    validate,
)

BLOCKS, TOKENS, HEADS, BYTES = 5, 4, 2, 8
PAGE = 2 * TOKENS * HEADS * BYTES
CELLS = (Cell("k", BYTES), Cell("v", BYTES))


def layout(places_: tuple[Place, ...], planes_: tuple[Plane, ...], size: int, layers: int = 2) -> EngineLayout:
    group = Group("g", GroupKind.FULL, TOKENS, tuple(map(str, range(layers))), HEADS, CELLS, "int8")
    return validate(EngineLayout((group,), (Rank(0, 0, 0, (size,), (Share(0, HEADS, BLOCKS, places_, planes_),)),)))


def cells(found: EngineLayout, block: int) -> set[int]:
    """Every byte of a block, cell by cell, as the head of `layout` defines it."""
    share, group = found.ranks[0].shares[0], found.groups[0]
    return {
        start + head * plane.head_stride + token * plane.token_stride + byte
        for place in share.places
        for plane, cell in zip(share.planes, group.cells, strict=True)
        for start in (place.offset + block * place.block_stride + plane.offset,)
        for head in range(HEADS)
        for token in range(TOKENS)
        for byte in range(cell.bytes)
    }  # fmt: skip


def bytes_of(tables: tuple[PageTable, ...], block: int) -> set[int]:
    return {
        at
        for table in tables
        for band in table.bands
        for at in range(band.start + block * band.stride, band.start + block * band.stride + band.extent)
    }


SHAPES = {
    "layers, blocks, a page of both": (places(range(2), 0, BLOCKS * PAGE, PAGE), planes("PHN", CELLS, HEADS, TOKENS)),
    "tokens before heads": (places(range(2), 0, BLOCKS * PAGE, PAGE), planes("NHP", CELLS, HEADS, TOKENS)),
    "padded pages": (places(range(2), 32, BLOCKS * (PAGE + 16), PAGE + 16), planes("PHN", CELLS, HEADS, TOKENS)),
    "all layers in a block": (places(range(2), 0, PAGE, 2 * PAGE), planes("PHN", CELLS, HEADS, TOKENS)),
    "K and V in two halves": (
        places(range(2), 0, BLOCKS * PAGE, PAGE // 2),
        (Plane(0, TOKENS * BYTES, BYTES), Plane(BLOCKS * PAGE // 2, TOKENS * BYTES, BYTES)),
    ),
    "heads outside of blocks": (
        places(range(2), 0, BLOCKS * PAGE, TOKENS * BYTES * 2),
        (Plane(0, BLOCKS * TOKENS * BYTES * 2, BYTES), Plane(TOKENS * BYTES, BLOCKS * TOKENS * BYTES * 2, BYTES)),
    ),
}


@pytest.mark.parametrize("name", SHAPES)
def test_a_block_has_all_its_bytes_and_none_of_another(name: str) -> None:
    found = layout(*SHAPES[name], size=4 * BLOCKS * (PAGE + 64))
    tables = pages(found, 0)
    every = [cells(found, block) for block in range(BLOCKS)]
    for block in range(BLOCKS):
        mine = bytes_of(tables, block)
        assert every[block] <= mine
        assert all(mine.isdisjoint(other) for number, other in enumerate(every) if number != block)


@pytest.mark.parametrize("name", SHAPES)
def test_bands_of_a_table_are_in_order_and_apart(name: str) -> None:
    for table in pages(layout(*SHAPES[name], size=4 * BLOCKS * (PAGE + 64)), 0):
        ends = [band.end(table.blocks) for band in table.bands]
        assert all(end <= band.start for end, band in zip(ends, table.bands[1:], strict=False))


def test_k_and_v_of_a_page_and_layers_of_a_block_are_one_band() -> None:
    (table,) = pages(layout(*SHAPES["all layers in a block"], size=BLOCKS * 2 * PAGE), 0)
    assert table.bands == (Band(0, 2 * PAGE, 2 * PAGE),)


def test_layers_of_other_strides_in_one_stretch_get_tables_of_their_own() -> None:
    inner = planes("PHN", CELLS, HEADS, TOKENS)
    odd = (Place(0, 0, 2 * PAGE), Place(1, PAGE, 3 * PAGE))
    assert len(pages(layout(odd, inner, 16 * PAGE), 0)) == 2


def test_bands_are_not_joined_across_one_of_another_stride() -> None:
    mixed = [Band(0, 100, 10), Band(20, 200, 10), Band(50, 100, 10)]
    assert list(_merged(mixed)) == mixed


def test_a_single_block_is_whole_whatever_its_strides() -> None:
    group = Group("g", GroupKind.FULL, TOKENS, ("0",), HEADS, CELLS, "int8")
    share = Share(0, HEADS, 1, (Place(0, 8, 0),), planes("PHN", CELLS, HEADS, TOKENS))
    found = validate(EngineLayout((group,), (Rank(0, 0, 0, (PAGE + 8,), (share,)),)))
    (table,) = pages(found, 0)
    assert bytes_of((table,), 0) == set(range(8, 8 + PAGE))


def test_a_rank_without_layers_of_a_group_has_no_table_of_it() -> None:
    group = Group("g", GroupKind.FULL, TOKENS, ("0",), HEADS, CELLS, "int8")
    has = Share(0, HEADS, BLOCKS, (Place(0, 0, PAGE),), planes("PHN", CELLS, HEADS, TOKENS))
    both = (Rank(0, 0, 0, (BLOCKS * PAGE,), (has,)), Rank(1, 0, 0, (8,), (Share(),)))
    found = validate(EngineLayout((group,), both))
    assert pages(found, 0) and not pages(found, 1)


def test_random_dense_orders_hold_too() -> None:
    rng = random.Random(3)
    for _ in range(20):
        order = "".join(rng.sample("PHN", 3))
        name = (places(range(2), rng.randrange(0, 64, 8), BLOCKS * PAGE, PAGE), planes(order, CELLS, HEADS, TOKENS))
        found = layout(*name, size=3 * BLOCKS * PAGE)
        assert all(bytes_of(pages(found, 0), block) == cells(found, block) for block in range(BLOCKS))
