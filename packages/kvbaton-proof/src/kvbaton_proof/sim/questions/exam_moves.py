"""Moves between two drawn engines, applied to their memories: every needed cell arrives once, and nothing else."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from typing import Any

from kvbaton.protocol.errors import Reason
from kvbaton.protocol.geometry import layout, plan, spans
from kvbaton.protocol.geometry.layout import NULL_BLOCK, EngineLayout, GroupKind
from kvbaton.protocol.geometry.pages import pages
from kvbaton.protocol.geometry.progress import (
    GroupProgress,
    Progress,
    Rect,
    advance,
    complete,
    covers,
    nothing,
    slowest,
    whole,
)
from kvbaton.protocol.geometry.spans import BlockLists, segments
from kvbaton.protocol.ids import Incarnation, PeerId, WorkerId
from kvbaton.protocol.machines import movement
from kvbaton.protocol.machines.movement import Cargo, Route, moves
from kvbaton.protocol.machines.quotas import block_bytes, promised_bytes
from kvbaton_proof.sim.questions import exam_layouts as drawing
from kvbaton_proof.sim.questions.exam import Question, lowered, refused, same, taken
from kvbaton_proof.sim.questions.exam_layouts import Drawn, needed_from

_R = Reason
_PEER = PeerId(WorkerId("other"), Incarnation(1))
BLOCKS = 12
Lists = list[list[int]]


class Handover:
    """One prompt between two drawn engines."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.drawn: Drawn = drawing.draw(rng)
        twins = rng.random() < 0.4  # the same engine on both sides
        first, other = random.Random(seed := rng.random()), random.Random(seed if twins else rng.random())
        self.source, self.target = drawing.side(first, self.drawn, BLOCKS), drawing.side(other, self.drawn, BLOCKS)
        for each in (self.source, self.target):
            same("a drawn layout", taken("a drawn layout", layout.validate, each.layout), each.layout)
        self.plan = taken("a plan", plan.plan, self.source.layout, self.target.layout)
        self.tokens = self.drawn.tokens
        sizes = [group.block_tokens for group in self.target.layout.groups if group.kind is not GroupKind.STATE]
        firsts = range(0, self.tokens, math.lcm(*sizes))
        self.first = rng.choice((0, rng.choice(firsts), firsts[len(firsts) // 2]))
        if any(group.kind is GroupKind.STATE for group in self.drawn.groups):
            self.first = 0
        self.states = rng.choice((1, 1, 2, 3))
        self.in_runs = rng.random() < 0.4  # blocks follow each other, on both sides
        self.at = self._lists(self.source.layout, 0, rng.random() < 0.5)
        self.to = self._lists(self.target.layout, self.first, True)

    def _lists(self, of: EngineLayout, first: int, drops: bool) -> Lists:
        """Block ids in any order, none where nobody reads any more and the engine `drops` it."""
        found: Lists = []
        for group in of.groups:
            if group.kind is GroupKind.STATE:
                found.append(self.rng.sample(range(BLOCKS), self.states))
                continue
            count = -(-self.tokens // group.block_tokens) - first // group.block_tokens
            ids = self.rng.sample(range(BLOCKS), count)
            if self.in_runs:
                ids = list(range(start := self.rng.randint(0, BLOCKS - count), start + count))
            dropped = drops * needed_from(group, self.tokens) // group.block_tokens - first // group.block_tokens
            found.append([NULL_BLOCK if n < dropped else block for n, block in enumerate(ids)])
        return found

    def cargo(self) -> Cargo:
        return Cargo(self.at, self.to, self.tokens, self.first)

    def steps(self) -> Iterator[Progress]:
        """How it becomes ready: block by block, or layer by layer of some blocks, until all is."""
        counts = [len(ids) for ids in self.at]
        done = [0] * len(counts)
        if self.first:  # of what the target has already, some alone
            sizes = [group.block_tokens for group in self.source.layout.groups]
            done = [self.rng.randint(0, self.first // size) for size in sizes]
            yield whole(done)
        while done != counts and self.rng.random() < 0.8:
            ahead = [self.rng.randint(had, count) for had, count in zip(done, counts, strict=True)]
            layers = [self.rng.randint(0, len(group.layers)) for group in self.drawn.groups]
            yield tuple(
                GroupProgress(had, has if up else 0, up) for had, has, up in zip(done, ahead, layers, strict=True)
            )
            done = ahead
            yield whole(done)
        yield whole(counts)

    def routes(self) -> Iterator[tuple[Route, spans.SpanSide]]:
        for side in spans.SpanSide:
            weaves = self.rng.random() < 0.5
            yield Route(self.plan, side, _PEER, "tcp", weaves), side

    def moved(self, route: Route, side: spans.SpanSide) -> dict[tuple[int, int, int], tuple[int, int, int]]:
        """(target rank, region, byte) -> (source rank, region, byte); told twice is told wrongly."""
        found: dict[tuple[int, int, int], tuple[int, int, int]] = {}
        before = nothing(len(self.at))
        for after in self.steps():
            for rank, listed in taken("moves", moves, route, self.cargo(), before, after):
                for move in listed:
                    self._note(found, rank, move, side)
                    if not route.weaves:
                        _check_joined(move)
            before = after
        return found

    def _note(self, found: dict[Any, Any], rank: int, move: spans.Move, side: spans.SpanSide) -> None:
        rows = list(zip(move.flat[0::3], move.flat[1::3], move.flat[2::3], strict=True))
        if move.weave is not None:
            column, shifts = move.weave.column, move.weave.shifts
            product = [
                (local + here, remote + there, size)
                for here, there in zip(shifts[0::2], shifts[1::2], strict=True)
                for local, remote, size in zip(column[0::3], column[1::3], column[2::3], strict=True)
            ]
            same("rows of a weave", (move.weave.rows, move.weave.bytes), (len(product), sum(row[2] for row in product)))
            rows += product
        same("a move of nothing", bool(rows), True)
        long = [number for row in rows for number in row]
        same("spans in their long form", list(move.spans), long)
        same("bytes of a move", move.bytes, sum(row[2] for row in rows))
        for local, remote, size in rows:
            for n in range(size):
                here, there = (rank, move.local_region, local + n), (move.peer_rank, move.remote_region, remote + n)
                to, at = (here, there) if side is spans.SpanSide.TARGET else (there, here)
                if to in found:
                    same(f"byte {to} is written", 2, 1)
                found[to] = at


def _check_joined(move: spans.Move) -> None:
    """What follows the piece before it, on both sides, is one with it: the next block's, and within a block."""
    if move.weave is None:
        return
    column, shifts = move.weave.column, move.weave.shifts
    rows = list(zip(column[0::3], column[1::3], column[2::3], strict=True))
    within = [(*pair, min(column[2::3])) for pair in zip(shifts[0::2], shifts[1::2], strict=True)]
    for listed in (rows, within):
        ends = [(here + size, there + size) for here, there, size in listed]
        rests = [row[:2] == end for row, end in zip(listed[1:], ends, strict=False)]
        same("pieces that could be one", any(rests), False)


def handovers(rng: random.Random) -> None:
    """Every cell that the target needs comes from the source's of that name; what else comes is of listed blocks."""
    case = Handover(rng)
    for route, side in case.routes():
        found = case.moved(route, side)
        _check_needed(case, found)
        _check_places(case, found)


def _check_needed(case: Handover, found: dict[Any, Any]) -> None:
    ours = case.target.cells
    for (rank, group, layer, block, plane, head, token), (region, at, size) in ours.items():
        told, state = case.target.layout.groups[group], case.drawn.groups[group].kind is GroupKind.STATE
        if block not in case.to[group]:
            continue
        index = case.to[group].index(block)
        page = case.target.layout.page_tokens(group)
        dealt = case.drawn.dcp > 1 and not state
        number = case.first + index * told.block_tokens + token
        if not dealt and not state and not max(case.first, needed_from(told, case.tokens)) <= number < case.tokens:
            continue
        far = case.source.layout.groups[group].block_tokens
        theirs = case.at[group][index if state else (case.first // far + index if dealt else number // far)]
        inside = token if dealt or state or page == 0 else number % far
        opaque = size != told.cells[plane].bytes or told.cells[plane].per.value != "token"
        inside = token if opaque else inside
        for n in range(size):
            where = found.get((rank, region, at + n))
            if where is None:
                same(f"byte {n} of token {number}, head {head}, layer {layer} of group {group}", where, "what was sent")
            assert where is not None
            cell = case.source.cells[where[0], group, layer, theirs, plane, head, inside]
            same(f"where token {number}, head {head}, layer {layer} comes from", where[1:], (cell[0], cell[1] + n))


def _check_places(case: Handover, found: dict[Any, Any]) -> None:
    """Nothing lands but in cells of listed blocks, and what lands there is of listed blocks."""
    for cells, lists, where in (
        (case.target.cells, case.to, found.keys()),
        (case.source.cells, case.at, found.values()),
    ):
        allowed = {
            (key[0], region, at + n)
            for key, (region, at, size) in cells.items()
            if key[3] in lists[key[1]]
            for n in range(size)
        }
        stray = set(where) - allowed
        same("bytes beside the listed blocks", sorted(stray)[:3], [])


def already_there(rng: random.Random) -> None:
    """What lies before the target's first token is not moved, whatever is ready of it."""
    case = next((case for case in (Handover(rng) for _ in range(20)) if case.first), None)
    if case is None:
        return
    sizes = [group.block_tokens for group in case.source.layout.groups]
    for route, _ in case.routes():
        for tokens in range(case.first + 1):
            ready = whole([tokens // size for size in sizes])
            found = taken("moves", moves, route, case.cargo(), nothing(len(sizes)), ready)
            same(f"what moves of {tokens} tokens, of which none is wanted", [each for _, each in found if each], [])


def bad_lists(rng: random.Random) -> None:
    """Lists that do not hold what they should are refused, never read past."""
    case = Handover(rng)
    route, side = next(case.routes())
    before, after = nothing(len(case.at)), whole([len(ids) for ids in case.at])
    group = rng.randrange(len(case.at))
    listed = case.drawn.groups[group]
    taken("lists that are right", moves, route, case.cargo(), before, after)
    reads = listed.kind is GroupKind.STATE or needed_from(listed, case.tokens) < case.tokens
    for ids in (case.at, case.to) if reads else ():
        kept = list(ids[group])
        last = kept[-1]
        for bad in (kept[:-1], [*kept[:-1], BLOCKS], [*kept[:-1], -2], [*kept[:-1], NULL_BLOCK]):
            ids[group] = bad
            if bad[-1:] == [NULL_BLOCK] and (last == NULL_BLOCK or ids is case.to):
                continue  # nobody reads it, or D has no block to write it to
            refused(
                f"a list that ends in {bad[-2:]} for {kept[-2:]}",
                _R.BAD_SPAN,
                moves,
                route,
                case.cargo(),
                before,
                after,
            )
        ids[group] = [*kept[:-1], last]
    case.first += 1
    sizes = [each.block_tokens for each in case.target.layout.groups if each.kind is not GroupKind.STATE]
    if any(case.first % size for size in sizes) and case.first < case.tokens:
        refused("a first token within a block", _R.BAD_SPAN, moves, route, case.cargo(), before, after)
    case.first -= 1
    if reads:
        with lowered(movement, "SPANS_IN_ALL_MAX", 0):
            refused("more spans than may be", _R.BAD_SPAN, moves, route, case.cargo(), before, after)
    lists = BlockLists(case.at[0], case.to[0], case.tokens, case.first)
    layers = len(case.drawn.groups[0].layers)
    strange = (
        Rect(-1, 0, 1, 0, 1), Rect(len(case.at), 0, 1, 0, 1), Rect(0, -1, 1, 0, 1),
        Rect(0, 0, layers + 1, 0, 1), Rect(0, 1, 0, 0, 1), Rect(0, 0, 1, -1, 1), Rect(0, 0, 1, 1, 0),
    )  # fmt: skip
    for rect in strange:
        refused(f"{rect}", _R.BAD_SPAN, segments, case.plan, side, 0, rect, lists)
    with lowered(spans, "SPANS_MAX", 1):
        if len(case.at[0]) > 1 and segments(case.plan, side, 0, Rect(0, 0, layers, 0, 1), lists):
            refused("more in one call", _R.BAD_SPAN, segments, case.plan, side, 0, Rect(0, 0, layers, 0, 2), lists)


def lent_pages(rng: random.Random) -> None:
    """What is lent of a block has all its bytes, and none of another block of its group."""
    case = drawing.draw(rng)
    one = drawing.side(rng, case, rng.choice((1, 2, 5)))
    for rank in range(len(one.layout.ranks)):
        shares = one.layout.ranks[rank].shares
        lent: dict[tuple[int, int], set[tuple[int, int]]] = {}
        for table in pages(one.layout, rank):
            same("blocks of a table", table.blocks, shares[table.group].block_count)
            starts = [band.start for band in table.bands]
            same("bands in order", starts, sorted(starts))
            for band, after in zip(table.bands, table.bands[1:], strict=False):
                same(
                    "a band reaches into the next",
                    band.start + (table.blocks - 1) * band.stride + band.extent > after.start,
                    False,
                )
            for band in table.bands:
                for block in range(table.blocks):
                    start = band.start + block * band.stride
                    lent.setdefault((table.group, block), set()).update(
                        (table.region, start + n) for n in range(band.extent)
                    )
        for group, share in enumerate(shares):
            owned = {
                block: {(region, at + n) for region, at, size in one.of_block(rank, group, block) for n in range(size)}
                for block in range(share.block_count if share.places else 0)
            }
            for block, mine in owned.items():
                found = lent.get((group, block), set())
                same(f"bytes of block {block} that are not lent", sorted(mine - found)[:3], [])
                for other, theirs in owned.items():
                    if other != block:
                        same(f"bytes of block {other}, lent as of {block}", sorted(theirs & found)[:3], [])


def sizes(rng: random.Random) -> None:
    """What a block, and a prompt, holds over all ranks."""
    case = drawing.draw(rng)
    one = drawing.side(rng, case, BLOCKS)
    counted = tuple(
        sum(size for key, (_, _, size) in one.cells.items() if key[1] == group and key[3] == 0)
        for group in range(len(case.groups))
    )
    same("bytes of a block of each group", block_bytes(one.layout), counted)
    total = 0
    for group, size in zip(one.layout.groups, counted, strict=True):
        needed = range(needed_from(group, case.tokens) // group.block_tokens, -(-case.tokens // group.block_tokens))
        count = 1 if group.kind is GroupKind.STATE else len(needed)
        same(
            f"blocks that {group.kind} needs of {case.tokens}",
            group.needed(case.tokens)[1] - group.needed(case.tokens)[0],
            count,
        )
        total += size * count
    same("bytes of a prompt", promised_bytes(one.layout, counted, case.tokens), total)
    placed = layout.places(range(2, 4), 10, 5, 3, 1)
    same(
        "evenly spaced layers",
        [(p.layer, p.offset, p.block_stride, p.region) for p in placed],
        [(2, 10, 3, 1), (3, 15, 3, 1)],
    )


def _ready(progress: GroupProgress, layers: int) -> set[tuple[int, int]]:
    return {
        (layer, block)
        for layer in range(layers)
        for block in range(progress.blocks_ahead if layer < progress.layers_ahead else progress.blocks_done)
    }


def progresses(rng: random.Random) -> None:
    """What has become ready since is told once and whole; what goes back is refused."""
    layers = rng.randint(1, 4)

    def drawn() -> GroupProgress:
        done, ahead = rng.randint(0, 3), rng.randint(0, layers)
        return GroupProgress(done, done + rng.randint(0, 2) if ahead else rng.randint(0, 2), ahead)

    for _ in range(12):
        old, new = drawn(), drawn()
        had, has = _ready(old, layers), _ready(new, layers)
        same(f"{new} covers {old}", covers((new,), (old,)), _covers(new, old, layers))
        if had <= has:
            rects = taken("progress", advance, (GroupProgress(), old), (GroupProgress(), new), (1, layers))
            cells = [
                (y, x) for r in rects for y in range(r.layer_lo, r.layer_hi) for x in range(r.block_lo, r.block_hi)
            ]
            same(f"what grew from {old} to {new}", sorted(cells), sorted(has - had))
            same("whose progress it is", {rect.group for rect in rects} <= {1}, True)
            ends = {(r.layer_hi, r.block_lo, r.block_hi) for r in rects}
            same("rectangles that could be one", [r for r in rects if (r.layer_lo, r.block_lo, r.block_hi) in ends], [])
        else:
            refused(f"from {old} to {new}", _R.BAD_MESSAGE, advance, (old,), (new,), (layers,))
        ranks = [drawn() for _ in range(rng.randint(1, 3))]
        together = _ready(slowest([(each,) for each in ranks])[0], layers)
        every = set.intersection(*(_ready(each, layers) for each in ranks))
        same(f"what {ranks} have ready is claimed", together <= every, True)
        if len(ranks) == 1:
            same(f"what {ranks} has ready", together, every)
        count = rng.randint(0, 3)
        same("complete", complete((old,), (count,)), old.blocks_done >= count)
    for bad in (
        GroupProgress(-1),
        GroupProgress(0, -1, 1),
        GroupProgress(0, 0, layers + 1),
        GroupProgress(0, 0, -1),
        GroupProgress(2, 1, 1),
    ):
        refused(f"{bad}", _R.BAD_MESSAGE, advance, (GroupProgress(),), (bad,), (layers,))
    for old_, new_, counts in (((), (GroupProgress(),), (1,)), ((GroupProgress(),), (), (1,)), ((), (), (1,))):
        refused("progress of other groups", _R.BAD_MESSAGE, advance, old_, new_, counts)
    limit = rng.randint(1, 3)
    cut = Rect(1, 2, 3, 4, 11).cut(limit)
    same("a rectangle in pieces", [b for r in cut for b in range(r.block_lo, r.block_hi)], list(range(4, 11)))
    same("pieces as large as may be", [r.block_hi - r.block_lo for r in cut[:-1]], [limit] * (len(cut) - 1))
    same("the rest of a piece", {(r.group, r.layer_lo, r.layer_hi) for r in cut}, {(1, 2, 3)})


def _covers(new: GroupProgress, old: GroupProgress, layers: int) -> bool:
    """How many layers there are is not asked: what one more would have to have counts as well."""
    return _ready(old, layers + 1) <= _ready(new, layers + 1)


BANK: list[Question] = [drawing.dense_pages, handovers, handovers, bad_lists, lent_pages, sizes, progresses]
