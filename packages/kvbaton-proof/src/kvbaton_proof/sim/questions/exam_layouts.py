"""Layouts drawn by chance, on both sides of a handoff, and every byte of it by hand: cell by cell, in a dictionary.

Laws: an address is what `protocol/geometry/layout.py` says in its first paragraph, computed here from drawn numbers;
which
tokens a window needs, and which rank has what, is said by the drawing. Bytes that move are applied to two memories.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from dataclasses import dataclass, field

from kvbaton.protocol.geometry.layout import (
    Cell,
    EngineLayout,
    Group,
    GroupKind,
    Per,
    Place,
    Plane,
    Rank,
    Share,
    planes,
)
from kvbaton_proof.sim.questions.exam import same

KINDS = (GroupKind.FULL, GroupKind.FULL, GroupKind.SLIDING, GroupKind.CHUNKED, GroupKind.LATENT, GroupKind.STATE)
ORDERS = ("PHN", "PNH", "HPN", "HNP", "NPH", "NHP")


@dataclass(frozen=True)
class Drawn:
    """What both sides have in common."""

    groups: tuple[Group, ...]
    dcp: int
    interleave: int
    opaque: bool  # pages or heads of which only the engine knows the inside
    tokens: int
    ranks_of_heads: int  # if pages are opaque both sides have as many


@dataclass
class Side:
    """One engine: its layout, and where every cell lies."""

    layout: EngineLayout
    cells: dict[tuple[int, int, int, int, int, int, int], tuple[int, int, int]] = field(default_factory=dict)
    """By (rank, group, layer, block, plane, head, token of the page): region, offset, bytes."""

    def of_block(self, rank: int, group: int, block: int) -> Iterator[tuple[int, int, int]]:
        return (at for key, at in self.cells.items() if (key[0], key[1], key[3]) == (rank, group, block))


def draw(rng: random.Random) -> Drawn:
    dcp = rng.choice((1, 1, 1, 2))
    opaque = rng.random() < 0.3
    groups = []
    for number in range(rng.choice((1, 1, 2))):
        kind = rng.choice(KINDS)
        heads = 1 if kind is GroupKind.LATENT else rng.choice((1, 2, 4))
        pers = (Per.TOKEN, Per.HEAD, Per.PAGE) if opaque else (Per.TOKEN,)
        cells = tuple(Cell(f"c{n}", rng.randint(1, 3), rng.choice(pers)) for n in range(rng.choice((1, 1, 2))))
        window = rng.randint(1, 6) if kind in (GroupKind.SLIDING, GroupKind.CHUNKED) else 0
        layers = tuple(f"g{number}.{n}" for n in range(rng.randint(1, 3)))
        groups.append(Group(f"g{number}", kind, dcp * rng.choice((1, 2, 3)), layers, heads, cells, "u8", window))
    return Drawn(tuple(groups), dcp, rng.choice((1, 2)), opaque, rng.randint(1, 9), rng.choice((1, 2, 4)))


def side(rng: random.Random, drawn: Drawn, blocks: int) -> Side:
    """One engine with these groups; its block sizes, ranks, stages, orders, gaps and regions are its own."""
    whole = drawn.opaque or drawn.dcp > 1
    groups = tuple(
        group if whole or group.kind is GroupKind.STATE else _sized(group, rng.choice((1, 2, 3, 4)))
        for group in drawn.groups
    )
    shards = drawn.ranks_of_heads if drawn.opaque else rng.choice((1, 2, 4))
    stages, wide = rng.choice((1, 1, 2)), not drawn.opaque and rng.random() < 0.3
    found = Side(EngineLayout(groups, (), drawn.dcp, drawn.interleave))
    ranks: list[Rank] = []
    for stage, shard, dcp in itertools.product(range(stages), range(shards), range(drawn.dcp)):
        ranks.append(_rank(rng, found, groups, (stage, stages), (shard, shards), dcp, blocks, len(ranks), wide))
    found.layout = EngineLayout(groups, tuple(ranks), drawn.dcp, drawn.interleave)
    return found


def _sized(group: Group, block_tokens: int) -> Group:
    return Group(
        group.name, group.kind, block_tokens, group.layers, group.heads, group.cells, group.dtype, group.window
    )


def _rank(
    rng: random.Random, found: Side, groups: tuple[Group, ...], stage: tuple[int, int], shard: tuple[int, int],
    dcp: int, blocks: int, index: int, wide: bool,
) -> Rank:  # fmt: skip
    sizes = [rng.randint(0, 3)] * rng.choice((1, 2))
    shares = []
    for number, group in enumerate(groups):
        heads = max(1, group.heads // shard[1])
        start = shard[0] * heads % group.heads
        if wide and shard[0] == shard[1] - 1:  # the last of a stage has all heads, whoever else has some
            start, heads = 0, group.heads
        layers = [n for n in range(len(group.layers)) if n * stage[1] // len(group.layers) == stage[0]]
        if not layers:
            shares.append(Share())
            continue
        tokens = 1 if group.kind is GroupKind.STATE else group.block_tokens // found.layout.dcp
        region = rng.randrange(len(sizes))
        shares.append(_share(rng, found, (index, number), group, (start, heads), tokens, layers, blocks, region, sizes))
    return Rank(stage[0], shard[0], dcp, tuple(size + rng.choice((0, 1)) for size in sizes), tuple(shares))


def _share(
    rng: random.Random, found: Side, who: tuple[int, int], group: Group, mine: tuple[int, int], tokens: int,
    layers: list[int], blocks: int, region: int, sizes: list[int],
) -> Share:  # fmt: skip
    """Lay the cells out one after the other, in a drawn order of axes, and read the strides off where they came."""
    start, heads = mine
    mixed = len({cell.per for cell in group.cells}) > 1
    order = rng.choice(ORDERS[:2] if mixed else ORDERS)
    gap, outside = rng.choice((0, 0, 1)), rng.random() < 0.25 and not mixed and group.cells[0].per is Per.TOKEN
    inside = _page(order, group, heads, tokens)
    page = max(at + size for at, size in inside.values()) + gap
    first = sizes[region]
    block_major = rng.random() < 0.5
    far, near = (len(layers) * page, page) if block_major else (page, blocks * page)
    placed = [(layer, first + n * near) for n, layer in enumerate(layers)]
    strides = _strides(inside, group, heads, tokens)
    if outside and heads > 1:  # heads lie outside of blocks
        far, reach = page, blocks * page
        placed = [(layer, first + n * heads * reach) for n, layer in enumerate(layers)]
        strides = [Plane(each.offset, reach, each.token_stride) for each in strides]
    span = len(layers) * blocks * page * (heads if outside else 1)
    sizes[region] += span
    for (layer, at), block in itertools.product(placed, range(blocks)):
        for (plane, head, token), (offset, size) in inside.items():
            where = (
                offset
                if not outside or heads == 1
                else strides[plane].offset + head * strides[plane].head_stride + token * strides[plane].token_stride
            )
            found.cells[(*who, layer, block, plane, start + head, token)] = region, at + block * far + where, size
    places = tuple(Place(layer, at, far, region) for layer, at in placed)
    return Share(start, heads, blocks, places, tuple(strides))


def _page(order: str, group: Group, heads: int, tokens: int) -> dict[tuple[int, int, int], tuple[int, int]]:
    """Where each (plane, head, token) of a dense page is, and how large: counted off in that order of the axes."""
    axes = {"P": range(len(group.cells)), "H": range(heads), "N": range(tokens)}
    found, at = {}, 0
    for values in itertools.product(*(axes[axis] for axis in order)):
        plane, head, token = (values[order.index(axis)] for axis in "PHN")
        cell = group.cells[plane]
        alone = (cell.per is Per.HEAD and token) or (cell.per is Per.PAGE and (head or token))
        if not alone:
            size = cell.bytes * (heads if cell.per is Per.PAGE else 1)
            found[plane, head, token] = at, size
            at += size
    return found


def _strides(inside: dict[tuple[int, int, int], tuple[int, int]], group: Group, heads: int, tokens: int) -> list[Plane]:
    def apart(plane: int, head: int, token: int) -> int:
        there = inside.get((plane, head, token))
        return there[0] - inside[plane, 0, 0][0] if there is not None else 0

    return [Plane(inside[n, 0, 0][0], apart(n, 1, 0), apart(n, 0, 1)) for n in range(len(group.cells))]


def dense_pages(rng: random.Random) -> None:
    """The planes of a dense page, in every order of its axes, and an order that is none."""
    group = draw(rng).groups[0]
    heads, tokens = rng.randint(1, 3), rng.randint(1, 3)
    for order in ORDERS:
        if order[0] != "P" and len({cell.per for cell in group.cells}) > 1:
            continue
        found = planes(order, group.cells, heads, tokens)
        for (plane, head, token), (at, _) in _page(order, group, heads, tokens).items():
            each = found[plane]
            where = each.offset + head * each.head_stride + token * each.token_stride
            same(f"plane {plane}, head {head}, token {token} of {order}", where, at)
    for order, cells in (("HH", group.cells), ("HNPP", group.cells), ("HNP", (Cell("a", 1), Cell("b", 1, Per.HEAD)))):
        try:
            found = planes(order, cells, heads, tokens)
        except ValueError:
            found = ()
        same(f"planes in the order {order} of {len(cells)} cells", found, ())


def needed_from(group: Group, tokens: int) -> int:
    """The first token that the next one reads, by counting."""
    if group.kind is GroupKind.SLIDING:
        return next(token for token in range(tokens + 1) if token == tokens or tokens - token < group.window)
    if group.kind is GroupKind.CHUNKED:
        return next(token for token in range(tokens, -1, -1) if token % group.window == 0)
    return 0
