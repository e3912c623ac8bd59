"""Which bytes of a rank's memory belong to which block: what a transport must know to lend blocks instead of memory.

Law: a byte that `pages` assigns to block `b` of a group is a byte of that group's block `b`, or lies between two such
bytes within that block's own extent (padding, or what other groups keep in the same block). No byte of another block of
that group is in it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from itertools import product
from typing import Annotated

import msgspec
from msgspec import Meta

from kvbaton.protocol.geometry.layout import EngineLayout, Share, cell_axes
from kvbaton.protocol.numbers import BLOCKS_MAX, BYTES_MAX, GROUPS_MAX, REGIONS_MAX

Offset = Annotated[int, Meta(ge=0, le=BYTES_MAX)]
BANDS_MAX = 1 << 16
"""In one table: every layer, plane and head of a large model on its own."""


class Band(msgspec.Struct, frozen=True, array_like=True):
    """Block `b` is the `extent` bytes from `start + b * stride` on."""

    start: Offset
    stride: Annotated[int, Meta(ge=1, le=BYTES_MAX)]
    extent: Annotated[int, Meta(ge=1, le=BYTES_MAX)]

    def end(self, blocks: int) -> int:
        return self.start + (blocks - 1) * self.stride + self.extent


class PageTable(msgspec.Struct, frozen=True, array_like=True):
    """Bands of one group in one region, in the order of their bytes; none reaches into the next."""

    group: Annotated[int, Meta(ge=0, lt=GROUPS_MAX)]
    region: Annotated[int, Meta(ge=0, lt=REGIONS_MAX)]
    blocks: Annotated[int, Meta(ge=1, le=BLOCKS_MAX)]
    bands: Annotated[tuple[Band, ...], Meta(min_length=1, max_length=BANDS_MAX)]


def pages(layout: EngineLayout, rank: int) -> tuple[PageTable, ...]:
    """All tables of a rank: one for each group and region, more where bands of different strides lie in each other."""
    found: list[PageTable] = []
    for group, share in enumerate(layout.ranks[rank].shares):
        by_region: dict[int, list[Band]] = defaultdict(list)
        for region, band in _bands(layout, group, share):
            by_region[region].append(band)
        for region, bands in sorted(by_region.items()):
            tables: list[list[Band]] = []
            for band in _merged(sorted(bands, key=lambda each: (each.start, each.stride))):
                room = next((each for each in tables if each[-1].end(share.block_count) <= band.start), None)
                if room is None:
                    tables.append(room := [])
                room.append(band)
            found += [PageTable(group, region, share.block_count, tuple(each)) for each in tables]
    return tuple(found)


def _bands(layout: EngineLayout, group: int, share: Share) -> Iterator[tuple[int, Band]]:
    """(region, band) of every plane of every layer; axes outside of blocks, such as heads before blocks, make a band
    each."""
    told, tokens = layout.groups[group], layout.page_tokens(group)
    for place in share.places:
        for plane, cell in zip(share.planes, told.cells, strict=True):
            extent, heads, run = cell_axes(cell, share.head_count, tokens)
            alone = share.block_count == 1  # then nothing lies outside of it
            outer: list[range] = []
            for stride, count in ((plane.head_stride, heads), (plane.token_stride, run)):
                if count > 1 and not alone and stride > place.block_stride:
                    outer.append(range(0, stride * count, stride))
                else:
                    extent += stride * (count - 1)
            start = place.offset + plane.offset
            for shift in product(*outer):
                yield place.region, Band(start + sum(shift), extent if alone else place.block_stride, extent)


def _merged(bands: list[Band]) -> Iterator[Band]:
    """Bands of one stride within one extent of a block, as one: K and V of a page, layers of a block."""
    open_: dict[int, Band] = {}  # by stride
    for band in bands:
        first = open_.get(band.stride)
        if first is not None and band.start + band.extent <= first.start + first.stride:
            extent = max(first.extent, band.start + band.extent - first.start)
            open_[band.stride] = Band(first.start, first.stride, extent)
            continue
        yield from open_.values()  # also those of other strides: what lies beyond this one is not of their stretch
        open_ = {band.stride: band}
    yield from open_.values()
