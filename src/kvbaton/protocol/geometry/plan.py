"""Which bytes of which source rank go to which bytes of which target rank. Pure arithmetic.

Law: what `plan` accepts is mapped completely: every (layer, head, token) cell that a target rank has comes from exactly
one source rank. Layouts that cannot be mapped are refused at pairing, by the name of the first field that differs. Both
layouts must have passed `layout.validate`; `spans.segments` turns a plan into byte spans. One of them comes from a
peer, and its mapping may cost far more than its size suggests: the effort is counted, and what no real pair needs is
refused before it is spent.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise, product
from math import prod
from operator import itemgetter
from typing import NoReturn

import msgspec

from kvbaton.protocol.errors import ProtocolError, Reason
from kvbaton.protocol.geometry.layout import (
    Cell,
    EngineLayout,
    Group,
    GroupKind,
    Per,
    Place,
    Plane,
    Share,
    cell_axes,
    needed_blocks,
)

PAGE_PIECES_MAX = 1024
"""More copies than this for one page and the handoff would cost more than it saves."""

BLOCK_SPANS_MAX = 1 << 16
"""More than this for one block of every group, in all layers and on all ranks, likewise: 128 layers of keys and values
on 64 ranks, of which each takes from two, are half of it."""

EFFORT_MAX = 1 << 15
"""In layers of parts, about a microsecond each. 128 layers in 8 groups on 64 ranks need half of it."""
_EFFORT_OF_PART = 32
_EFFORT_OF_LANE = 4
_SLICES_PER_EFFORT = 8


Slice = tuple[int, int, tuple[int, ...]]
"""Heads [lo, hi) and the ranks that have all of them."""


class Strip(msgspec.Struct, frozen=True, gc=False):
    """One plane of a part: `bytes` that move as one, times `heads`, times the tokens if it is `per_token`.

    The planes' offsets are those of the part's first head.
    """

    bytes: int
    heads: int
    per_token: bool
    source: Plane
    target: Plane

    def pieces(self, source_token: int, target_token: int, tokens: int) -> list[tuple[int, int, int]]:
        """(source offset, target offset, bytes) in the two pages for a run of tokens."""
        at = self.source.offset + source_token * self.source.token_stride
        to = self.target.offset + target_token * self.target.token_stride
        run, axes = self.runs(tokens)
        pieces = [(at, to, run)]
        for count, far, near in axes:
            pieces = [(at + i * far, to + i * near, run) for at, to, run in pieces for i in range(count)]
        return pieces

    def runs(self, tokens: int) -> tuple[int, list[tuple[int, int, int]]]:
        """The longest run that is contiguous on both sides, and the (count, strides) axes that repeat it."""
        axes = [(self.heads, self.source.head_stride, self.target.head_stride)]
        if self.per_token:
            axes.append((tokens, self.source.token_stride, self.target.token_stride))
        run, outer = self.bytes, []
        for count, far, near in sorted(axes, key=lambda axis: axis[2]):
            if far == near == run:
                run *= count
            elif count > 1:
                outer.append((count, far, near))
        return run, outer


class Lane(msgspec.Struct, frozen=True, gc=False):
    """Layers of a part with equal regions and strides: (source layer index, source offset, target offset)."""

    source_region: int
    target_region: int
    source_stride: int
    target_stride: int
    layers: tuple[tuple[int, int, int], ...]


class Part(msgspec.Struct, frozen=True, gc=False):
    """The share of a group that one target rank takes from one source rank: heads [lo, hi) of some layers."""

    group: int  # in the source's order
    target_group: int
    source_rank: int
    target_rank: int
    head_lo: int
    head_hi: int
    strips: tuple[Strip, ...]
    lanes: tuple[Lane, ...]
    pieces: int  # how many spans one layer of one source block makes at most


class Plan(msgspec.Struct, frozen=True):
    """How a source engine's KV maps onto a target engine's.

    `target_groups` has, per group of the source, the index of the target's; None where it has no such group.
    """

    source: EngineLayout
    target: EngineLayout
    target_groups: tuple[int | None, ...]
    parts: tuple[Part, ...]


@dataclass(slots=True)
class _Effort:
    """The remaining budget of a plan."""

    left: int = EFFORT_MAX
    spans: int = BLOCK_SPANS_MAX

    def spend(self, effort: int, spans: int = 0) -> None:
        self.left -= effort
        self.spans -= spans
        if self.left < 0:
            _refuse(f"ranks: their shares differ in so many ways that a mapping takes more than {EFFORT_MAX} steps")
        if self.spans < 0:
            _refuse(f"planes: what one block holds on all ranks would move in more than {BLOCK_SPANS_MAX} runs")


def compare(source: EngineLayout, target: EngineLayout) -> tuple[int | None, ...]:
    """Per group of the source the index of the target's; `INCOMPATIBLE` names the first field of a group that differs.

    The places need not have been validated yet.
    """
    _same("dcp", source.dcp, target.dcp)
    if source.dcp > 1:
        _same("dcp_interleave", source.dcp_interleave, target.dcp_interleave)
    here, there = ([group.name for group in layout.groups] for layout in (source, target))
    for group in source.groups:
        if group.name not in there and not group.optional:
            _refuse(f"groups: source has {group.name!r}, target has not")
    for group in target.groups:
        if group.name not in here and not group.optional:
            _refuse(f"groups: source has not {group.name!r}, target has")
    target_groups = tuple(there.index(name) if name in there else None for name in here)
    for index, target_index in enumerate(target_groups):
        if target_index is not None:
            _check_groups(source.groups[index], target.groups[target_index], source.dcp)
    return target_groups


def plan(source: EngineLayout, target: EngineLayout) -> Plan:
    """How to hand over from `source` to `target`, or `INCOMPATIBLE` naming the first differing field."""
    target_groups = compare(source, target)
    parts: list[Part] = []
    effort = _Effort()
    for index, target_index in enumerate(target_groups):
        if target_index is not None:
            parts += _parts_of_group(source, target, index, target_index, effort)
    return Plan(source, target, target_groups, tuple(parts))


def _check_groups(source: Group, target: Group, dcp: int) -> None:
    name = f"group {source.name!r}"
    _same(f"{name} kind", source.kind.value, target.kind.value)
    _same(f"{name} window", source.window, target.window)
    _same(f"{name} layers", len(source.layers), len(target.layers))
    there = set(target.layers)
    missing = next((layer for layer in source.layers if layer not in there), None)
    if missing is not None:
        _refuse(f"{name} layers: source has {missing!r}, target has not")
    slices = "heads" if source.kind is not GroupKind.STATE else "slices of a state, one for each tensor-parallel rank"
    _same(f"{name} {slices}", source.heads, target.heads)
    _same(f"{name} dtype", source.dtype, target.dtype)
    if source.kind is not GroupKind.STATE and not (source.splits_tokens and target.splits_tokens and dcp == 1):
        _same(f"{name} block_tokens", source.block_tokens, target.block_tokens)
    _same(f"{name} cells", _told(source.cells), _told(target.cells))


def _parts_of_group(
    source: EngineLayout, target: EngineLayout, index: int, target_index: int, effort: _Effort
) -> list[Part]:
    group = source.groups[index]
    numbers = {layer: number for number, layer in enumerate(group.layers)}
    source_layer = [numbers[layer] for layer in target.groups[target_index].layers]
    sizes = source.page_tokens(index), target.page_tokens(target_index)
    meetings = 1 if sizes[0] == sizes[1] else 1 + needed_blocks(*sizes)
    holdings, ways = _holdings("source", source, index, effort)
    _holdings("target", target, target_index, effort)
    at = [{place.layer: place for place in rank.shares[index].places} for rank in source.ranks]
    runs: dict[tuple[Strip, ...], int] = {}
    parts = []
    of_dcp = [[(layer, holdings[layer, dcp]) for layer in source_layer] for dcp in range(source.dcp)]
    for target_rank, rank in enumerate(target.ranks):
        taker, way_of = rank.shares[target_index], of_dcp[rank.dcp]
        stages: dict[int, list[tuple[int, Place]]] = defaultdict(list)
        for place in taker.places:
            layer, way = way_of[place.layer]
            stages[way].append((layer, place))
        for way, layers in stages.items():
            effort.spend(len(ways[way]) // _SLICES_PER_EFFORT)
            for source_rank, lo, hi in _take(ways[way], taker, target_rank):
                effort.spend(_EFFORT_OF_PART + len(layers))
                strips = _strips(group, source.ranks[source_rank].shares[index], taker, lo, hi)
                pieces = _count_pieces(group, strips, min(sizes)) * meetings
                if strips not in runs:
                    effort.spend(pieces // meetings)
                    runs[strips] = _count_runs(strips, min(sizes)) * meetings
                lanes = _lanes(at[source_rank], layers)
                effort.spend(_EFFORT_OF_LANE * len(lanes), runs[strips] * len(layers))
                parts.append(Part(index, target_index, source_rank, target_rank, lo, hi, strips, lanes, pieces))
    return parts


def _holdings(
    side: str, layout: EngineLayout, index: int, effort: _Effort
) -> tuple[dict[tuple[int, int], int], list[tuple[Slice, ...]]]:
    """Which ranks have which heads: by (layer index, dcp) the way in which they are distributed, and these.

    Refused unless every head of every layer is somewhere.
    """
    group, shares = layout.groups[index], [rank.shares[index] for rank in layout.ranks]
    ranks: dict[tuple[int, int], list[int]] = defaultdict(list)
    for rank_index, rank in enumerate(layout.ranks):
        for place in shares[rank_index].places:
            ranks[place.layer, rank.dcp].append(rank_index)
    known: dict[tuple[int, ...], int] = {}
    ways: list[tuple[Slice, ...]] = []
    holdings = {}
    for key in product(range(len(group.layers)), range(layout.dcp)):
        holders = tuple(ranks[key])
        if holders not in known:
            known[holders] = len(ways)
            ways.append(_slices({rank: shares[rank] for rank in holders}, group.heads, effort))
            for lo, _, having in ways[-1]:
                if not having:
                    _refuse(f"group {group.name!r} ranks: {side} has head {lo} of {group.layers[key[0]]!r} on none")
        holdings[key] = known[holders]
    return holdings, ways


def _slices(shares: dict[int, Share], heads: int, effort: _Effort) -> tuple[Slice, ...]:
    """Cut the heads where any share begins or ends; the ranks that have a whole slice are its replicas."""
    ends = {rank: (share.head_start, share.head_start + share.head_count) for rank, share in shares.items()}
    edges = sorted({0, heads}.union(*ends.values()))
    effort.spend(len(ends) * len(edges) // _SLICES_PER_EFFORT)
    return tuple(
        (lo, hi, tuple(rank for rank, (start, stop) in ends.items() if start <= lo and hi <= stop))
        for lo, hi in pairwise(edges)
    )


def _take(slices: Iterable[Slice], taker: Share, target_rank: int) -> list[tuple[int, int, int]]:
    """(source rank, head lo, head hi) that make up a share; rank indexes spread the readers over replicas."""
    taken: list[tuple[int, int, int]] = []
    for lo, hi, ranks in slices:
        lo, hi = max(lo, taker.head_start), min(hi, taker.head_start + taker.head_count)
        if lo >= hi:
            continue
        rank = ranks[target_rank % len(ranks)]
        if taken and taken[-1][0] == rank:
            lo = taken.pop()[1]
        taken.append((rank, lo, hi))
    return taken


def _strips(group: Group, giver: Share, taker: Share, lo: int, hi: int) -> tuple[Strip, ...]:
    if not group.splits_heads:
        has, wants = ((share.head_start, share.head_count) for share in (giver, taker))
        _same(f"group {group.name!r} (first head, heads) of an opaque page", has, wants)
    strips = []
    for cell, at, to in zip(group.cells, giver.planes, taker.planes, strict=True):
        run, heads, _ = cell_axes(cell, hi - lo, 1)
        ends = _from_head(at, lo, giver), _from_head(to, lo, taker)
        strips.append(Strip(run, heads, cell.per is Per.TOKEN, *ends))
    return tuple(strips)


def _count_pieces(group: Group, strips: Sequence[Strip], tokens: int) -> int:
    pieces = sum(prod(count for count, _, _ in strip.runs(tokens)[1]) for strip in strips)
    if pieces > PAGE_PIECES_MAX:
        _refuse(f"group {group.name!r} planes: source has another order than target has, {pieces} runs a page")
    return pieces


def _count_runs(strips: Sequence[Strip], tokens: int) -> int:
    """The pieces of a page once those are joined that are neighbours on both sides."""
    ends: set[tuple[int, int]] = set()
    pieces = [piece for strip in strips for piece in strip.pieces(0, 0, tokens)]
    ends.update((at + size, to + size) for at, to, size in pieces)
    return sum((at, to) not in ends for at, to, _ in pieces)


def _from_head(plane: Plane, head: int, share: Share) -> Plane:
    return Plane(plane.offset + (head - share.head_start) * plane.head_stride, plane.head_stride, plane.token_stride)


def _lanes(at: Mapping[int, Place], layers: list[tuple[int, Place]]) -> tuple[Lane, ...]:
    """Of a part, whose source has each layer `at` its place."""
    lanes: dict[tuple[int, int, int, int], list[tuple[int, int, int]]] = defaultdict(list)
    for layer, to in sorted(layers, key=_first):
        here = at[layer]
        lanes[here.region, to.region, here.block_stride, to.block_stride].append((layer, here.offset, to.offset))
    return tuple(Lane(*key, layers=tuple(found)) for key, found in lanes.items())


_first = itemgetter(0)


def _told(cells: Sequence[Cell]) -> str:
    return ", ".join(f"{cell.name} {cell.bytes} B per {cell.per.value}" for cell in cells)


def _same(field: str, source: object, target: object) -> None:
    if source != target:
        _refuse(f"{field}: source has {source}, target has {target}")


def _refuse(detail: str) -> NoReturn:
    raise ProtocolError(Reason.INCOMPATIBLE, detail)
