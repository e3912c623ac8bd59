"""Small engine layouts for tests, and a memory in which every byte knows what it is."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import product
from math import prod

from kvbaton.protocol.geometry.layout import (
    NULL_BLOCK,
    Cell,
    EngineLayout,
    Group,
    GroupKind,
    Per,
    Place,
    Plane,
    Rank,
    Share,
    cell_axes,
    planes,
    validate,
)

KV = (Cell("kv", 2),)
Slices = Sequence[tuple[int, int]]
Memory = dict[tuple[int, int], list[object]]  # by (rank, region): one entry per byte


def group(
    name: str = "full",
    *,
    layers: int | Sequence[str] = 2,
    heads: int = 4,
    block_tokens: int = 4,
    cells: Sequence[Cell] = KV,
    kind: GroupKind = GroupKind.FULL,
    window: int = 0,
    optional: bool = False,
    dtype: str = "bfloat16",
) -> Group:
    names = tuple(f"{name}.{i}" for i in range(layers)) if isinstance(layers, int) else tuple(layers)
    return Group(name, kind, block_tokens, names, heads, tuple(cells), dtype, window, optional)


def even(heads: int, tp: int) -> Slices:
    """Tensor parallelism as engines do it: split the heads, or replicate them when there are too few."""
    if tp > heads:
        return [(rank * heads // tp, 1) for rank in range(tp)]
    return [(rank * heads // tp, (rank + 1) * heads // tp - rank * heads // tp) for rank in range(tp)]


def engine(
    *groups: Group,
    tp: int | Sequence[Slices] = 1,
    stages: Sequence[Sequence[str]] = (),
    order: str = "HNP",
    arrangement: str = "LB",
    pad: int = 0,
    blocks: int = 8,
    regions: int = 1,
    dcp: int = 1,
) -> EngineLayout:
    """Groups overlay each other. `arrangement`: LB, BL (blocks first) or LHB (heads outside blocks)."""
    slices = [even(one.heads, tp) for one in groups] if isinstance(tp, int) else tp
    stages = stages or [[layer for one in groups for layer in one.layers]]
    ranks = []
    for (pp, names), index, turn in product(enumerate(stages), range(len(slices[0])), range(dcp)):
        mine = [[i for i, layer in enumerate(one.layers) if layer in names] for one in groups]
        rows = -(-max(map(len, mine)) // regions)
        cuts = [cut[index] for cut in slices]
        stride = pad + max(_page(one, cut[1], dcp) for one, cut in zip(groups, cuts, strict=True))
        shares = []
        for one, layers, (start, count) in zip(groups, mine, cuts, strict=True):
            flat = planes(order, one.cells, count, page_tokens(one, dcp))
            row, step = (stride, rows * stride) if arrangement == "BL" else (blocks * stride, stride)
            if arrangement == "LHB":
                step = page_tokens(one, dcp) * one.cells[0].bytes
                flat = (Plane(0, blocks * step, one.cells[0].bytes),)
            at = tuple(Place(layer, i // regions * row, step, i % regions) for i, layer in enumerate(layers))
            shares.append(Share(start, count, blocks, at, flat))
        ranks.append(Rank(pp, index, turn, (rows * blocks * stride,) * regions, tuple(shares)))
    return validate(EngineLayout(tuple(groups), tuple(ranks), dcp))


def wide(
    ranks: int, layers: int, *, heads: int = 8, per: int = 8, step: int = 0, apart: bool = False, order: str = "PHN"
) -> EngineLayout:
    """Ranks that each have `per` heads of all layers, and begin `step` or as many heads after each other.

    `apart`: each layer's blocks are as far apart as no other's.
    """
    cells = (Cell("k", 16), Cell("v", 16))
    one = Group("full", GroupKind.FULL, 16, tuple(f"model.layers.{n}" for n in range(layers)), heads, cells, "bfloat16")
    page = 32 * per * 16
    at = tuple(Place(n, n * page * 1000, page + (8 * n if apart else 0)) for n in range(layers))
    starts = [rank * (step or per) % (heads if not step else heads - per + 1) for rank in range(ranks)]
    shares = [Share(start, per, 900, at, planes(order, cells, per, 16)) for start in starts]
    all_ranks = tuple(Rank(0, number, 0, (1 << 45,), (share,)) for number, share in enumerate(shares))
    return validate(EngineLayout((one,), all_ranks))


def page_tokens(one: Group, dcp: int) -> int:
    return 1 if one.kind is GroupKind.STATE else one.block_tokens // dcp


def _page(one: Group, heads: int, dcp: int) -> int:
    return sum(prod(cell_axes(cell, heads, page_tokens(one, dcp))) for cell in one.cells)


def cells_at(
    layout: EngineLayout, rank: int, index: int, block: int
) -> Iterator[tuple[int, int, tuple[object, ...], int]]:
    """(region, offset, what, token in block) of every byte that a rank has of a block, straight from the law.

    The token is -1 where tokens are not told apart.
    """
    one, here = layout.groups[index], layout.ranks[rank]
    share = here.shares[index]
    for place, (plane, cell) in product(share.places, zip(share.planes, one.cells, strict=True)):
        size, heads, tokens = cell_axes(cell, share.head_count, layout.page_tokens(index))
        for head, token, byte in product(range(heads), range(tokens), range(size)):
            at = place.offset + block * place.block_stride + plane.offset
            at += head * plane.head_stride + token * plane.token_stride + byte
            what = (one.layers[place.layer], cell.name, share.head_start + head, byte, here.dcp)
            yield place.region, at, what, token * layout.dcp + here.dcp if cell.per is Per.TOKEN else -1


def memory(layout: EngineLayout, name: str) -> Memory:
    """Every byte of every rank, filled with something found nowhere else."""
    return {
        (rank, region): [(name, rank, region, at) for at in range(size)]
        for rank, one in enumerate(layout.ranks)
        for region, size in enumerate(one.region_bytes)
    }


def block_tokens(one: Group) -> int:
    """How many positions of the prompt a block is for; a state's list counts states."""
    return 1 if one.kind is GroupKind.STATE else one.block_tokens


def stamp(layout: EngineLayout, into: Memory, index: int, blocks: Sequence[int]) -> None:
    """Write a prompt's KV: each byte says which layer, plane, head, token (or block) of the prompt it is of."""
    size = block_tokens(layout.groups[index])
    for rank, (position, block) in product(range(len(layout.ranks)), enumerate(blocks)):
        if block != NULL_BLOCK:
            for region, at, what, token in cells_at(layout, rank, index, block):
                into[rank, region][at] = (*what, position * size + token if token >= 0 else -1 - position)
