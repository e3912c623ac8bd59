"""What no engine's memory can be, said here again in the plainest way: the card of a peer that claims it is refused.

Addresses are counted one by one where there are few, so that nothing here resembles how the product validates.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise, product

from kvbaton.protocol.geometry.layout import Cell, EngineLayout, Group, GroupKind, Per, Plane, Rank, Share

COUNTED_MAX = 2_000
"""Cells of a page that are counted one by one; a larger page is taken by its corners alone."""
_WINDOWED = (GroupKind.SLIDING, GroupKind.CHUNKED)


def absurdity(layout: EngineLayout) -> str:
    """The first thing about a layout that cannot be; nothing if all of it can."""
    return next(_absurdities(layout), "")


def _absurdities(layout: EngineLayout) -> Iterator[str]:
    if not layout.groups or not layout.ranks or min(layout.dcp, layout.dcp_interleave) < 1:
        yield "no groups, no ranks, or tokens that are dealt out to nobody"
    if _repeats([group.name for group in layout.groups]):
        yield "two groups of one name"
    if _repeats([(rank.pp, rank.tp, rank.dcp) for rank in layout.ranks]):
        yield "two ranks in one place"
    for group in layout.groups:
        if min(group.block_tokens, group.heads, len(group.layers), len(group.cells)) < 1 or not group.name:
            yield f"group {group.name!r} of nothing"
        if any(cell.bytes < 1 for cell in group.cells) or _repeats(group.layers):
            yield f"group {group.name!r}: empty cells, or a layer twice"
        if (group.window > 0) != (group.kind in _WINDOWED):
            yield f"group {group.name!r} is {group.kind} and has a window of {group.window}"
        if group.kind is not GroupKind.STATE and group.block_tokens % max(layout.dcp, 1):
            yield f"group {group.name!r}: {group.block_tokens} tokens for {layout.dcp} ranks"
    for rank in layout.ranks:
        if len(rank.shares) != len(layout.groups) or rank.dcp >= layout.dcp or not rank.region_bytes:
            yield f"rank {rank.pp}.{rank.tp} has {len(rank.shares)} shares of {len(layout.groups)} groups, or no memory"
            continue
        for index, share in enumerate(rank.shares):
            yield from _of_share(rank, layout.groups[index], share, layout.page_tokens(index))


def _of_share(rank: Rank, group: Group, share: Share, tokens: int) -> Iterator[str]:
    if not share.places:
        return
    who = f"rank {rank.pp}.{rank.tp}, group {group.name!r}"
    if share.head_count < 1 or share.head_start + share.head_count > group.heads or share.block_count < 1:
        yield f"{who}: heads or blocks that there are not"
    if len(share.planes) != len(group.cells):
        yield f"{who}: {len(share.planes)} planes of {len(group.cells)} cells"
        return
    if _repeats([place.layer for place in share.places]) or _repeats([(p.region, p.offset) for p in share.places]):
        yield f"{who}: two places of one layer, or at one address"
    planes = [
        list(_cells(cell, plane, share.head_count, tokens))
        for plane, cell in zip(share.planes, group.cells, strict=True)
    ]
    for place in share.places:
        if place.layer >= len(group.layers) or place.region >= len(rank.region_bytes):
            yield f"{who}: a place of layer {place.layer} in region {place.region}"
            continue
        last = place.offset + place.block_stride * (share.block_count - 1)
        if max(last + at + size for page in planes for at, size in page) > rank.region_bytes[place.region]:
            yield f"{who}: layer {place.layer} ends beyond its region"
        if any(_overlap(page, place.block_stride if share.block_count > 1 else None) for page in planes):
            yield f"{who}: two cells of layer {place.layer} lie in one place"


def _cells(cell: Cell, plane: Plane, heads: int, tokens: int) -> Iterator[tuple[int, int]]:
    """Address and size of each thing in a page that moves as one, or of its corners."""
    size = cell.bytes * heads if cell.per is Per.PAGE else cell.bytes
    heads = 1 if cell.per is Per.PAGE else heads
    run = tokens if cell.per is Per.TOKEN else 1
    few = heads * run <= COUNTED_MAX
    for head, token in product(range(heads), range(run)) if few else {*product((0, heads - 1), (0, run - 1))}:
        yield plane.offset + head * plane.head_stride + token * plane.token_stride, size


def _overlap(page: list[tuple[int, int]], stride: int | None) -> bool:
    """Whether two things of one plane share a byte, in a block or between it and the next one."""
    both = sorted(page if stride is None else [*page, *((at + stride, size) for at, size in page)])
    return any(one + size > other for (one, size), (other, _) in pairwise(both))


def _repeats(values: Sequence[object]) -> bool:
    return len(set(values)) < len(values)
