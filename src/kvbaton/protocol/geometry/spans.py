"""Turns a rectangle of ready blocks into byte spans for one rank's transport.

Law: applied to both memories, the spans of rectangles that tile a handoff fill every cell that the target needs with
the source's, once, and touch nothing but pages of the target's listed blocks. A needed block that the source does not
have is an error, never a gap. No span leaves its regions.

Spans in product form: every row of a column, at every shift. A compact form for caches of many layers.

A handoff of 1,000 scattered blocks in 64 layers is 64,000 spans, or 1,000 rows and 64 shifts. A transport that accepts
it neither waits for the long form to be written, nor checks it, nor carries it.

Law: `flat()` defines its meaning: for each shift, in order, each row of the column with the shift added to its offsets.
"""

from __future__ import annotations

import enum
import sys
from array import array
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain, pairwise
from struct import pack
from typing import NamedTuple, NoReturn

import msgspec

from kvbaton.protocol.errors import ProtocolError, Reason
from kvbaton.protocol.geometry.layout import NULL_BLOCK, Group, GroupKind, needed_blocks
from kvbaton.protocol.geometry.plan import Lane, Part, Plan, Strip
from kvbaton.protocol.geometry.progress import Rect


@dataclass(frozen=True, slots=True)
class Weave:
    """`column`: (local offset, remote offset, bytes) triples; `shifts`: (local offset, remote offset) pairs."""

    column: array[int]
    shifts: array[int]

    @property
    def rows(self) -> int:
        return len(self.column) // 3 * (len(self.shifts) // 2)

    @property
    def bytes(self) -> int:
        sizes = self.column[2::3]
        alike = sizes[:1] * len(sizes) == sizes  # the usual case, and told sooner than added up
        return (sizes[0] * len(sizes) if alike and sizes else sum(sizes)) * (len(self.shifts) // 2)

    def flat(self) -> array[int]:
        """The long form. Offsets are added as two long integers of 64-bit lanes, of which none carries into the next:
        all sums are offsets into memory."""
        count = len(self.column) // 3
        base = int.from_bytes(self.column.tobytes(), sys.byteorder)
        spans = array("q")
        for index in range(0, len(self.shifts), 2):
            shift = array("q", (self.shifts[index], self.shifts[index + 1], 0)).tobytes()
            moved = base + int.from_bytes(shift * count, sys.byteorder)
            spans.frombytes(moved.to_bytes(24 * count, sys.byteorder))
        return spans


class Area(msgspec.Struct, frozen=True):
    """Bytes of one region, in product form: every row, at every shift."""

    region: int
    rows: array[int]  # (offset, bytes) pairs
    shifts: array[int]  # offsets


SPANS_MAX = 1 << 22
"""Per call, so that one does not hold up the loop for seconds; `blocks_per_call` says where to cut."""

LANES_KEPT = 64
"""Of which the shifts are remembered: they are the same for every prompt that is handed over whole."""

Triple = tuple[int, int, int]
"""(source offset, target offset, bytes)."""
Window = tuple[int, int, int]
"""(first token in the source's page, first token in the target's page, tokens)."""
Pairs = tuple[Sequence[int], Sequence[int]]
"""Source and target block ids, item by item."""


class Lanes(NamedTuple):
    """The same, each side as one long integer."""

    source: int
    target: int
    pairs: int


class SpanSide(enum.Enum):
    """Whose memory is local: the target reads (pull), the source writes (push)."""

    SOURCE = "source"
    TARGET = "target"


class BlockLists(msgspec.Struct, frozen=True):
    """One group's block ids on both sides: the source's from token 0, the target's from `target_first_token`.

    Only tokens from there up to `tokens` move. `NULL_BLOCK` stands for a block that is not there.
    """

    source: Sequence[int]
    target: Sequence[int]
    tokens: int
    target_first_token: int = 0


class Move(msgspec.Struct, frozen=True):
    """Copies between one rank and one rank of its peer: (local offset, remote offset, bytes) triples.

    Some of them may be in product form; `spans` has them all, one by one.
    """

    peer_rank: int
    local_region: int
    remote_region: int
    flat: array[int]
    weave: Weave | None = None

    @property
    def spans(self) -> array[int]:
        return self.flat if self.weave is None else self.flat + self.weave.flat()

    @property
    def bytes(self) -> int:
        return sum(self.flat[2::3]) + (0 if self.weave is None else self.weave.bytes)


def segments(plan: Plan, side: SpanSide, rank: int, rect: Rect, lists: BlockLists, join: bool = True) -> list[Move]:
    """The moves of `rank` of `side` for one rectangle: one per peer rank and pair of regions.

    Pages move whole where both sides have the same block size, otherwise exactly the tokens in question. Pages that are
    neighbours on both sides are one span, unless `join` is False: a data plane that takes them in product form would
    only have to divide it again, and rows of all sizes are no product of anything.
    Raises `BAD_SPAN` when the lists do not hold what the rectangle says.
    """
    blocks = rect.block_hi - rect.block_lo
    if blocks > blocks_per_call(plan, side, rank, rect):
        _bad(f"rectangle: {blocks} blocks may make more than {SPANS_MAX} spans; cut it")
    parts = _parts(plan, side, rank, rect)
    if not parts:
        return []
    windows = {window: _laned(*pairs) for window, pairs in _windows(plan, parts[0], rect, lists).items()}
    flat: dict[tuple[int, int, int], array[int]] = defaultdict(lambda: array("q"))
    woven: dict[tuple[int, int, int], Weave] = {}
    for part in parts:
        _check_ids(plan, part, windows.values())
        for lane in part.lanes:
            key = (part.target_rank, lane.source_region, lane.target_region)
            if side is SpanSide.TARGET:
                key = (part.source_rank, lane.target_region, lane.source_region)
            for spans in _lane_spans(part, lane, rect, windows, side, join or len(windows) > 1):
                if isinstance(spans, Weave) and key not in woven:
                    woven[key] = spans
                    flat[key].extend(())
                else:
                    flat[key].extend(spans.flat() if isinstance(spans, Weave) else spans)
    return [Move(*key, spans, woven.get(key)) for key, spans in flat.items() if spans or key in woven]


def blocks_per_call(plan: Plan, side: SpanSide, rank: int, rect: Rect) -> int:
    """How many blocks of such a rectangle one call of `segments` takes; for `Rect.cut`."""
    pieces = sum(part.pieces for part in _parts(plan, side, rank, rect))
    return max(1, SPANS_MAX // max(1, pieces * (rect.layer_hi - rect.layer_lo)))


def _parts(plan: Plan, side: SpanSide, rank: int, rect: Rect) -> list[Part]:
    if not 0 <= rect.group < len(plan.source.groups):
        _bad(f"group {rect.group} does not exist")
    if not 0 <= rect.layer_lo <= rect.layer_hi <= len(plan.source.groups[rect.group].layers):
        _bad(f"layers [{rect.layer_lo}, {rect.layer_hi}) do not exist")
    if not 0 <= rect.block_lo <= rect.block_hi:
        _bad(f"blocks [{rect.block_lo}, {rect.block_hi}) do not exist")
    parts = (part for part in plan.parts if part.group == rect.group)
    return [part for part in parts if rank == (part.target_rank if side is SpanSide.TARGET else part.source_rank)]


def _windows(plan: Plan, part: Part, rect: Rect, lists: BlockLists) -> dict[Window, Pairs]:
    """Which source and target blocks meet in the rectangle, by the tokens of their pages that do."""
    group, near = plan.source.groups[part.group], plan.target.groups[part.target_group].block_tokens
    if group.kind is GroupKind.STATE:  # states go one to one and have nothing to do with tokens
        group, near = msgspec.structs.replace(group, block_tokens=1), 1
        lists = BlockLists(lists.source, lists.target, rect.block_hi)
    far, first = group.block_tokens, lists.target_first_token
    if first < 0 or first % near:
        _bad(f"target_first_token: {first} is not a multiple of the target's block_tokens {near}")
    lo, hi = max(rect.block_lo * far, first), min(rect.block_hi * far, lists.tokens)
    if lo >= hi:
        return {}
    if len(lists.source) < needed_blocks(hi, far):
        _bad(f"source: {len(lists.source)} blocks of group {group.name!r} end before token {hi - 1}")
    if len(lists.target) < needed_blocks(hi - first, near):
        _bad(f"target: {len(lists.target)} blocks of group {group.name!r} end before token {hi - 1}")
    if far == near:
        return {(0, 0, plan.source.page_tokens(part.group)): _paired(group, lists, lo // far, hi)}
    return _meetings(group, lists, near, range(lo, hi))


def _paired(group: Group, lists: BlockLists, begin: int, hi: int) -> Pairs:
    """Equal block sizes: block by block, from index `begin` up to the one that has token `hi - 1`."""
    far = group.block_tokens
    end, shift = needed_blocks(hi, far), lists.target_first_token // far
    source, target = lists.source[begin:end], lists.target[begin - shift : end - shift]
    if NULL_BLOCK not in source and NULL_BLOCK not in target:
        return source, target
    stops = (min((index + 1) * far, lists.tokens) for index in range(begin, end))
    kept = [
        (at, to)
        for at, to, stop in zip(source, target, stops, strict=True)
        if _there(group, at, to, stop, lists.tokens)
    ]
    return [at for at, _ in kept], [to for _, to in kept]


def _meetings(group: Group, lists: BlockLists, near: int, span: range) -> dict[Window, Pairs]:
    """Other block sizes: walk the tokens from one block boundary, on either side, to the next."""
    windows: dict[Window, tuple[list[int], list[int]]] = defaultdict(lambda: ([], []))
    far, lo = group.block_tokens, span.start
    while lo < span.stop:
        stop = min(span.stop, (lo // far + 1) * far, (lo // near + 1) * near)
        at, to = lists.source[lo // far], lists.target[(lo - lists.target_first_token) // near]
        if _there(group, at, to, stop, lists.tokens):
            pairs = windows[lo % far, lo % near, stop - lo]
            pairs[0].append(at)
            pairs[1].append(to)
        lo = stop
    return dict(windows)


def _there(group: Group, at: int, to: int, stop: int, tokens: int) -> bool:
    """Whether both blocks exist. The target may lack any, the source only those that will not be read."""
    if at == NULL_BLOCK != to and stop > group.needed_from(tokens):
        _bad(f"source: the block of token {stop - 1} of group {group.name!r} is needed but was dropped")
    return NULL_BLOCK not in (at, to)


def _check_ids(plan: Plan, part: Part, windows: Iterable[Lanes]) -> None:
    at = plan.source.ranks[part.source_rank].shares[part.group].block_count
    to = plan.target.ranks[part.target_rank].shares[part.target_group].block_count
    for source, target, pairs in windows:
        for name, ids, count in (("source", source, at), ("target", target, to)):
            if not _all_below(ids, pairs, count):
                listed = _apart(ids, pairs)
                _bad(f"{name}: blocks {min(listed)}..{max(listed)} are not all within 0..{count - 1}")


def _lane_spans(
    part: Part, lane: Lane, rect: Rect, windows: dict[Window, Lanes], side: SpanSide, join: bool
) -> list[array[int] | Weave]:
    """The pieces of block 0 for every pair of blocks: a weave for each size of piece."""
    layers, is_whole = lane.layers, rect.layer_lo <= lane.layers[0][0] and lane.layers[-1][0] < rect.layer_hi
    if not is_whole:
        layers = tuple(layer for layer in layers if rect.layer_lo <= layer[0] < rect.layer_hi)
    joinable = len(windows) > 1
    weaves: list[Weave] = []
    for window, lanes in windows.items():
        shifts, is_one_run = (_shifts_of_lane if is_whole else _shifts)(part.strips, layers, window, side, join)
        joinable = joinable and is_one_run  # a page in several runs has no neighbour on both sides
        if lanes.pairs:
            weaves += [Weave(_column(lane, lanes, size, side, join), shift) for size, shift in shifts]
    if not joinable:
        return list(weaves)
    spans = array("q")
    for weave in weaves:
        spans.extend(weave.flat())
    triples = zip(spans[0::3], spans[1::3], spans[2::3], strict=True)
    return [array("q", chain.from_iterable(_coalesce(triples)))]


def _shifts(
    strips: tuple[Strip, ...], layers: tuple[Triple, ...], window: Window, side: SpanSide, join: bool
) -> tuple[list[tuple[int, array[int]]], bool]:
    """By the bytes of a piece, where such pieces of block 0 begin in these layers; and whether its page is one run."""
    inside = _coalesce(piece for strip in strips for piece in strip.pieces(*window))
    pieces = [(at + x, to + y, size) for _, at, to in layers for x, y, size in inside]
    found: dict[int, array[int]] = defaultdict(lambda: array("q"))
    for at, to, size in _coalesce(pieces) if join else pieces:
        found[size].extend((to, at) if side is SpanSide.TARGET else (at, to))
    return list(found.items()), len(inside) == 1


_shifts_of_lane = lru_cache(maxsize=LANES_KEPT)(_shifts)


def _column(lane: Lane, lanes: Lanes, size: int, side: SpanSide, join: bool) -> array[int]:
    """The same piece of every pair of blocks; joined, of blocks that follow each other on both sides in one span."""
    sizes = array("q", (size,)) * lanes.pairs
    if join and size == lane.source_stride == lane.target_stride:
        source, target = (_apart(ids, lanes.pairs) for ids in lanes[:2])
        starts = _starts(source, target)
        if len(starts) < lanes.pairs:
            sizes = array("q", [(end - at) * size for at, end in pairwise((*starts, lanes.pairs))])
            lanes = _laned(*([ids[at] for at in starts] for ids in (source, target)))
    at, to = (
        _apart(lanes.source * lane.source_stride, lanes.pairs),
        _apart(lanes.target * lane.target_stride, lanes.pairs),
    )
    column = array("q", bytes(24 * len(sizes)))
    column[0::3], column[1::3] = (to, at) if side is SpanSide.TARGET else (at, to)
    column[2::3] = sizes
    return column


# What follows treats numbers as one long integer of 64-bit lanes. No lane carries into the next: ids are checked, and
# their products are offsets into memory.


def _laned(source: Sequence[int], target: Sequence[int]) -> Lanes:
    form = f"={len(source)}q"
    return Lanes(_together(pack(form, *source)), _together(pack(form, *target)), len(source))


def _all_below(numbers: int, count: int, limit: int) -> bool:
    """Whether each is within 0..limit - 1: none has its highest bit, and none gets it by what is missing."""
    ones = _ones(count)
    return not (numbers | (numbers + ones * ((1 << 63) - limit))) & (ones << 63)


@lru_cache(maxsize=4)
def _ones(count: int) -> int:
    return _together((1).to_bytes(8, sys.byteorder) * count)


def _starts(source: array[int], target: array[int]) -> Sequence[int]:
    """Where stretches begin that count up on both sides; of scattered blocks, the usual case, that is everywhere."""
    ones = _together((array("q", (1,)) * (len(source) - 1)).tobytes())
    gaps = _apart(_gaps(source.tobytes(), ones) | _gaps(target.tobytes(), ones), len(source) - 1)
    if 0 not in gaps:
        return range(len(source))
    return [0, *(at for at, gap in enumerate(gaps, 1) if gap)]


def _gaps(ids: bytes, ones: int) -> int:
    """Zero where an id follows the one before it."""
    return (_together(ids[:-8]) + ones) ^ _together(ids[8:])


def _together(lanes: bytes) -> int:
    return int.from_bytes(lanes, sys.byteorder)


def _apart(number: int, lanes: int) -> array[int]:
    found = array("q")
    found.frombytes(number.to_bytes(8 * lanes, sys.byteorder))
    return found


def _coalesce(triples: Iterable[Triple]) -> list[Triple]:
    """Join neighbours that are adjacent on both sides."""
    joined: list[Triple] = []
    end_at = end_to = -1
    for at, to, size in sorted(triples):
        if at == end_at and to == end_to:
            joined[-1] = joined[-1][0], joined[-1][1], joined[-1][2] + size
        else:
            joined.append((at, to, size))
        end_at, end_to = at + size, to + size
    return joined


def _bad(detail: str) -> NoReturn:
    raise ProtocolError(Reason.BAD_SPAN, detail)
