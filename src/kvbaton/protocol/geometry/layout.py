"""The memory layout of one engine's KV: groups of layers, and each rank's share of them.

Law: in a layout that `validate` has passed, no block id below `block_count` leads to a byte outside its
rank's regions, and no two (block, head, token) cells of one plane of a layer share a byte. Every cell is at

    place.offset + block * place.block_stride
        + plane.offset + (head - head_start) * plane.head_stride + token * plane.token_stride

so padded pages and every axis order (LBHNC, LBNHC, LHBNC, BLHNC, BHLNC, …) are only other numbers.
Groups may overlay each other: a block id belongs to one group at a time, so an address needs all three of
group, layer and block.

Which bytes of a rank's memory belong to which block: what a transport must know to lend blocks instead of memory.

Law: a byte that `pages` assigns to block `b` of a group is a byte of that group's block `b`, or lies between two such
bytes within that block's own extent (padding, or what other groups keep in the same block). No byte of another block of
that group is in it.
"""

from __future__ import annotations

import enum
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate, chain, product
from typing import Annotated, NoReturn

import msgspec
from msgspec import Meta

from kvbaton.protocol.errors import ProtocolError, Reason
from kvbaton.protocol.numbers import (
    BLOCK_TOKENS_MAX,
    BLOCKS_MAX,
    BYTES_MAX,
    CELLS_MAX,
    DCP_MAX,
    GROUPS_MAX,
    HEADS_MAX,
    LAYERS_MAX,
    RANKS_MAX,
    REGIONS_MAX,
    Blocks,
    BlockTokens,
    Bytes,
    Dcp,
    Heads,
    Layers,
    RankIndex,
    RegionIndex,
)

NULL_BLOCK = -1
"""Stands in a block list for a block that is not there, such as one that left a sliding window."""

LAYERS_IN_ALL_MAX = 4096
SHARES_MAX = 1024
PLACES_MAX = 1 << 14
"""Over all ranks and groups, as layers and shares are. 128 layers on 64 ranks are 8,192 places; what it takes to check
and to map them grows with their number."""
INNER_STRIDES_MAX = 4
"""Of one share: distances of blocks that lie inside what one block spans. Engines have one or none."""
NAME_CHARS_MAX = 256

Name = Annotated[str, Meta(max_length=NAME_CHARS_MAX)]


class GroupKind(enum.StrEnum):
    """The kind of attention of a group's blocks; decides which of them a handed-over position needs."""

    FULL = "full"
    SLIDING = "sliding"  # the last `window` tokens
    CHUNKED = "chunked"  # the current chunk of `window` tokens
    LATENT = "latent"  # MLA: one head, the same on every rank
    STATE = "state"  # Mamba: mutated in place; its blocks are states, not tokens


class Per(enum.StrEnum):
    """The smallest unit of a page that may move on its own."""

    TOKEN = "token"  # one head's bytes of one token
    HEAD = "head"  # one head's bytes of a block; its inner layout is the engine's
    PAGE = "page"  # all bytes that a rank has of a block


class Cell(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One plane of a page (K and V packed, K, V, scales): bytes per (head, token), or per head and block."""

    name: Name
    bytes: Bytes
    per: Per = Per.TOKEN


class Group(msgspec.Struct, frozen=True):
    """Layers that share one block list. An `optional` group (a draft model's) may be missing elsewhere."""

    name: Name
    kind: GroupKind
    block_tokens: BlockTokens
    layers: Annotated[tuple[Name, ...], Meta(max_length=LAYERS_MAX)]
    heads: Heads
    cells: Annotated[tuple[Cell, ...], Meta(max_length=CELLS_MAX)]
    dtype: Name
    window: BlockTokens = 0
    optional: bool = False

    @property
    def splits_tokens(self) -> bool:
        return all(cell.per is Per.TOKEN for cell in self.cells)

    @property
    def splits_heads(self) -> bool:
        return all(cell.per is not Per.PAGE for cell in self.cells)

    def needed_from(self, tokens: int) -> int:
        """The first token whose KV decoding from position `tokens` still reads."""
        if self.kind is GroupKind.SLIDING:
            return _window_start(tokens, self.window)
        return tokens // self.window * self.window if self.kind is GroupKind.CHUNKED else 0

    def needed(self, tokens: int) -> tuple[int, int]:
        """The block indexes [lo, hi) that decoding from position `tokens` reads."""
        if self.kind is GroupKind.STATE:
            return 0, 1
        return self.needed_from(tokens) // self.block_tokens, needed_blocks(tokens, self.block_tokens)


class Plane(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The offset of a cell's first byte in a page, and the strides of heads and tokens."""

    offset: Bytes
    head_stride: Bytes
    token_stride: Bytes


class Place(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The place of block 0 of one layer (by index in its group), and the stride of its blocks."""

    layer: Layers
    offset: Bytes
    block_stride: Bytes
    region: RegionIndex = 0


class Share(msgspec.Struct, frozen=True):
    """One rank's share of one group. No places: none of it (another pipeline stage has the layers)."""

    head_start: Heads = 0
    head_count: Heads = 0
    block_count: Blocks = 0
    places: Annotated[tuple[Place, ...], Meta(max_length=LAYERS_MAX)] = ()
    planes: Annotated[tuple[Plane, ...], Meta(max_length=CELLS_MAX)] = ()


class Rank(msgspec.Struct, frozen=True):
    """One worker of an engine: its coordinates, its registered memory, one share per group."""

    pp: RankIndex
    tp: RankIndex
    dcp: Dcp
    region_bytes: Annotated[tuple[Bytes, ...], Meta(max_length=REGIONS_MAX)]
    shares: Annotated[tuple[Share, ...], Meta(max_length=GROUPS_MAX)]


class EngineLayout(msgspec.Struct, frozen=True):
    """One side of a handoff. With `dcp` > 1 a block's tokens are distributed round-robin over that many ranks."""

    groups: Annotated[tuple[Group, ...], Meta(max_length=GROUPS_MAX)]
    ranks: Annotated[tuple[Rank, ...], Meta(max_length=RANKS_MAX)]
    dcp: Dcp = 1
    dcp_interleave: BlockTokens = 1

    def page_tokens(self, group: int) -> int:
        """The tokens in one page of one rank; a state counts as one."""
        found = self.groups[group]
        return 1 if found.kind is GroupKind.STATE else found.block_tokens // self.dcp


def needed_blocks(tokens: int, block_tokens: int) -> int:
    """How many blocks hold `tokens` tokens."""
    return -(-tokens // block_tokens)


def _window_start(tokens: int, window: int) -> int:
    return max(0, tokens - window + 1)  # the token being decoded is part of its own window


def places(
    layers: Iterable[int], offset: int, layer_stride: int, block_stride: int, region: int = 0
) -> tuple[Place, ...]:
    """Evenly spaced layers, as in vLLM's `KVCacheTensor`."""
    return tuple(Place(at, offset + i * layer_stride, block_stride, region) for i, at in enumerate(layers))


def planes(order: str, cells: Sequence[Cell], heads: int, tokens: int) -> tuple[Plane, ...]:
    """The planes of a dense page, for an order of its axes plane P, head H and token N, outermost first.

    vLLM's …HNC is "HNP" (or one packed cell, in which case P says nothing), …NHC is "NHP"; K and V in two
    halves of the page is "PHN" or "PNH". Cells of different granularity must have P outermost.
    """
    if sorted(order) != ["H", "N", "P"]:
        raise ValueError(f"order {order!r} is not an order of P, H and N")
    if order[0] != "P" and len({cell.per for cell in cells}) > 1:
        raise ValueError(f"order {order!r}: cells of different granularity need P outermost")
    sizes = [cell_axes(cell, heads, tokens) for cell in cells]
    runs = [size[0] for size in sizes]
    offsets, strides = [0] * len(cells), {"H": [0] * len(cells), "N": [0] * len(cells)}
    for axis in reversed(order):
        if axis == "P":
            offsets = list(accumulate(runs, initial=0))[:-1]
            runs = [sum(runs)] * len(cells)
            continue
        strides[axis] = runs
        runs = [run * size[1 if axis == "H" else 2] for run, size in zip(runs, sizes, strict=True)]
    return tuple(map(Plane, offsets, strides["H"], strides["N"]))


def cell_axes(cell: Cell, heads: int, tokens: int) -> tuple[int, int, int]:
    """(bytes that move as one, how many of them side by side as heads, as tokens)."""
    if cell.per is Per.PAGE:
        return cell.bytes * heads, 1, 1
    return cell.bytes, heads, tokens if cell.per is Per.TOKEN else 1


def validate(layout: EngineLayout) -> EngineLayout:
    """The layout, or `BAD_MESSAGE` naming the first field that exceeds a bound: layouts come from peers."""
    validate_groups(layout)
    validate_ranks(layout)
    return layout


def validate_groups(layout: EngineLayout) -> None:
    """The first half: the groups and their sizes; quick, whatever the layout."""
    _within("dcp", layout.dcp, 1, DCP_MAX)
    _within("dcp_interleave", layout.dcp_interleave, 1, BLOCK_TOKENS_MAX)
    _within("groups", len(layout.groups), 1, GROUPS_MAX)
    _within("ranks", len(layout.ranks), 1, RANKS_MAX)
    _within("groups on ranks", len(layout.groups) * len(layout.ranks), 1, SHARES_MAX)
    _within("layers of all groups", sum(len(group.layers) for group in layout.groups), 1, LAYERS_IN_ALL_MAX)
    places_in_all = sum(len(share.places) for rank in layout.ranks for share in rank.shares)
    _within("layers on all ranks", places_in_all, 0, PLACES_MAX)
    _distinct("groups", (group.name for group in layout.groups))
    for index, group in enumerate(layout.groups):
        _validate_group(f"groups[{index}]", group, layout.dcp)


def validate_ranks(layout: EngineLayout) -> None:
    """The second half: the places; of a layout whose groups are valid."""
    _distinct("ranks", ((rank.pp, rank.tp, rank.dcp) for rank in layout.ranks))
    for index, rank in enumerate(layout.ranks):
        _validate_rank(f"ranks[{index}]", rank, layout)


def _validate_group(at: str, group: Group, dcp: int) -> None:
    _name(f"{at}.name", group.name)
    _name(f"{at}.dtype", group.dtype)
    _within(f"{at}.block_tokens", group.block_tokens, 1, BLOCK_TOKENS_MAX)
    if group.kind is not GroupKind.STATE and group.block_tokens % dcp:
        _bad(f"{at}.block_tokens", f"{group.block_tokens} cannot be dealt out to dcp {dcp}")
    windowed = group.kind in (GroupKind.SLIDING, GroupKind.CHUNKED)
    _within(f"{at}.window", group.window, 1 if windowed else 0, BLOCK_TOKENS_MAX if windowed else 0)
    _within(f"{at}.heads", group.heads, 1, HEADS_MAX)
    _within(f"{at}.layers", len(group.layers), 1, LAYERS_MAX)
    _distinct(f"{at}.layers", group.layers)
    for layer in group.layers:
        _name(f"{at}.layers", layer)
    _within(f"{at}.cells", len(group.cells), 1, CELLS_MAX)
    for cell in group.cells:
        _name(f"{at}.cells", cell.name)
        _within(f"{at}.cells", cell.bytes, 1, BYTES_MAX)


def _validate_rank(at: str, rank: Rank, layout: EngineLayout) -> None:
    _within(f"{at}.pp", rank.pp, 0, RANKS_MAX - 1)
    _within(f"{at}.tp", rank.tp, 0, RANKS_MAX - 1)
    _within(f"{at}.dcp", rank.dcp, 0, layout.dcp - 1)
    _within(f"{at}.region_bytes", len(rank.region_bytes), 1, REGIONS_MAX)
    for size in rank.region_bytes:
        _within(f"{at}.region_bytes", size, 0, BYTES_MAX)
    _within(f"{at}.shares", len(rank.shares), len(layout.groups), len(layout.groups))
    for index, share in enumerate(rank.shares):
        if share.places:
            _validate_share(f"{at}.shares[{index}]", share, layout, index, rank.region_bytes)


def _validate_share(at: str, share: Share, layout: EngineLayout, index: int, regions: Sequence[int]) -> None:
    group, tokens = layout.groups[index], layout.page_tokens(index)
    _within(f"{at}.head_start", share.head_start, 0, group.heads - 1)
    _within(f"{at}.head_count", share.head_count, 1, group.heads - share.head_start)
    _within(f"{at}.block_count", share.block_count, 1, BLOCKS_MAX)
    _within(f"{at}.planes", len(share.planes), len(group.cells), len(group.cells))
    # Column by column: a microsecond a place, where a check of each of its numbers takes five.
    layers, offsets, strides, at_regions = zip(*map(msgspec.structs.astuple, share.places), strict=True)
    for number in chain(*map(msgspec.structs.astuple, share.planes), *((min(c), max(c)) for c in (offsets, strides))):
        _within(f"{at}.planes and places", number, 0, BYTES_MAX)
    _distinct(f"{at}.places", layers)
    _distinct(f"{at}.places", zip(at_regions, offsets, strict=True))
    for field, indexes, count in (("layer", layers, len(group.layers)), ("region", at_regions, len(regions))):
        _within(f"{at}.places.{field}", min(indexes), 0, count - 1)
        _within(f"{at}.places.{field}", max(indexes), 0, count - 1)
    sizes = _sizes(at, share, group, tokens, set(strides))
    for layer, offset, stride, region in zip(layers, offsets, strides, at_regions, strict=True):
        end = offset + sizes[stride]
        if end > regions[region]:
            _bad(f"{at}.places", f"layer {layer} ends at {end} of {regions[region]} bytes")


def _sizes(at: str, share: Share, group: Group, tokens: int, strides: set[int]) -> dict[int, int]:
    """How many bytes all blocks occupy from a place on, by their stride."""
    beyond = widest = 0
    listed = []
    for plane, cell in zip(share.planes, group.cells, strict=True):
        size, heads, run = cell_axes(cell, share.head_count, tokens)
        name, axes = f"{at}.planes {cell.name!r}", ((plane.head_stride, heads), (plane.token_stride, run))
        span = _extent(name, size, axes)
        beyond, widest = max(beyond, plane.offset + span), max(widest, span)
        listed.append((name, plane.offset, size, axes))
    sizes = {stride: beyond + stride * (share.block_count - 1) for stride in strides}
    inner = [stride for stride in strides if stride < widest]
    _within(f"{at}.places, strides of blocks below {widest}", len(inner), 0, INNER_STRIDES_MAX)
    for stride in inner:  # heads or tokens lie outside blocks
        blocks = (stride, share.block_count)
        sizes[stride] = max(offset + _extent(name, size, (*axes, blocks)) for name, offset, size, axes in listed)
    return sizes


def _extent(at: str, size: int, axes: Iterable[tuple[int, int]]) -> int:
    """How many bytes cells of `size` occupy along (stride, count) axes; no two of them may overlap."""
    for stride, count in sorted(axis for axis in axes if axis[1] > 1):
        if stride < size:
            _bad(at, f"overlaps itself: {size} bytes, {stride} apart")
        size += stride * (count - 1)
    return size


def _bad(field: str, text: str) -> NoReturn:
    raise ProtocolError(Reason.BAD_MESSAGE, f"{field}: {text}")


def _within(field: str, value: int, low: int, high: int) -> None:
    if not low <= value <= high:
        _bad(field, f"{value} is outside {low}..{high}")


def _distinct(field: str, values: Iterable[object]) -> None:
    listed = list(values)
    if len(set(listed)) < len(listed):
        _bad(field, f"{str(Counter(listed).most_common(1)[0][0])[:NAME_CHARS_MAX]!r} occurs twice")


def _name(field: str, text: str) -> None:
    if not (0 < len(text) <= NAME_CHARS_MAX and text.isprintable()):
        _bad(field, f"{text[:32]!r} is not 1..{NAME_CHARS_MAX} printable characters")


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
