"""A rank's block as a value of the store (`rank_values`), and the store that moves it (`rank_store`), on the bench.

Laws of the model: a value is the bytes of the rank's cells of a block, layer by layer, within a layer as they lie in
memory; in as few pieces as they lie apart. Two ranks have the same space if and only if that means the same to both:
what is kept of (kind, type, heads, cells, layers, their order, tokens), not where it lies. What cannot be a value is
refused. A shelf puts exactly that to its store, and what cannot be an order has ended, as failed.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, cast

import msgspec

from kvbaton.protocol.errors import Reason
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
    cell_axes,
)
from kvbaton.ranks import rank_store, rank_values
from kvbaton.ranks.rank_values import NotStorable, RankValues
from kvbaton.store.content_keys import HASH_BYTES, VALUE_BYTES_MAX, prefix
from kvbaton.store.interface import Backend, Get, Lookup, Order, OrderEnded, OrderId, Pins, Put, StoreSettings
from kvbaton_proof.sim.rank_models.rank_bench import ANYTHING, Raised, outcome, replaced, same

COMPAT = "cd" * 16
BLOCKS = 3
SLOT_BYTES = 64 << 20
STEPS = 14
REFUSED = Raised("NotStorable")

Piece = tuple[int, int, int, int]
"""region, offset of block 0, distance of blocks, bytes"""


class _Spec(msgspec.Struct):
    """One rank's part of a layout."""

    group: Group
    share: Share
    dcp: int = 1
    interleave: int = 1
    at: int = 0  # which of the ranks that share a block's tokens

    def layout(self) -> EngineLayout:
        rank = Rank(0, 0, self.at, (1 << 20, 1 << 20), (self.share,))
        return EngineLayout((self.group,), (rank,), self.dcp, self.interleave)


def _drawn(rng: random.Random) -> _Spec:
    heads, head_start = rng.randrange(1, 4), rng.randrange(3)
    dcp = rng.choice((1, 1, 2))
    tokens = rng.randrange(1, 4) * dcp
    cells = tuple(Cell(name, rng.choice((1, 2, 4)), rng.choice(list(Per))) for name in "kv"[: rng.randrange(1, 3)])
    if rng.random() < 0.4:
        cells = tuple(Cell(name, cells[0].bytes, cells[0].per) for name in "kv")
    layers = tuple(f"layer{at}" for at in range(rng.randrange(1, 5)))
    group = Group(
        "full", rng.choice((GroupKind.FULL, GroupKind.LATENT)), tokens, layers, head_start + heads, cells, "bf16"
    )
    page = rng.random() < 0.5
    planes = _dense(rng, cells, heads, tokens // dcp) if page else _loose(rng, cells)
    size = rng.choice((40, 64, 200))
    held = sorted(rng.sample(range(len(layers)), rng.randrange(1, len(layers) + 1)))
    rng.shuffle(held)
    step = _extent(cells, planes, heads, tokens // dcp) if page else size
    region = partial(rng.choice, (0, 0, 0, 1))
    places = tuple(
        Place(layer, step * at + rng.choice((0, 0, 0, 9)), len(held) * size + rng.choice((0, 0, 8)), region())
        for at, layer in enumerate(held)
    )
    return _Spec(group, Share(head_start, heads, BLOCKS, places, planes), dcp, rng.randrange(1, 3), rng.randrange(dcp))


def _dense(rng: random.Random, cells: Sequence[Cell], heads: int, tokens: int) -> tuple[Plane, ...]:
    """One plane after the other, with or without space between; heads or tokens outermost."""
    found, offset = [], rng.choice((0, 0, 3))
    for cell in cells:
        size, rows, columns = cell_axes(cell, heads, tokens)
        outer = rng.random() < 0.5
        strides = (size * columns, size) if outer else (size, size * rows)
        found.append(Plane(offset, *strides))
        offset += size * rows * columns + rng.choice((0, 0, 1))
    return tuple(found)


def _loose(rng: random.Random, cells: Sequence[Cell]) -> tuple[Plane, ...]:
    """Anywhere: some of these overlap."""
    return tuple(Plane(rng.randrange(16), rng.randrange(1, 12), rng.randrange(1, 12)) for _ in cells)


def _cells_of(group: Group, share: Share, tokens: int) -> list[tuple[int, int, tuple[int, int, int]]]:
    """(offset within a page, bytes, which) of each, as they lie in memory."""
    found = []
    for index, cell in enumerate(group.cells):
        size, heads, columns = cell_axes(cell, share.head_count, tokens)
        plane = share.planes[index]
        for head in range(heads):
            for token in range(columns):
                at = plane.offset + head * plane.head_stride + token * plane.token_stride
                found.append((at, size, (index, head, token)))
    return sorted(found)


def _extent(cells: Sequence[Cell], planes: Sequence[Plane], heads: int, tokens: int) -> int:
    share = Share(0, heads, 1, (), tuple(planes))
    group = Group("full", GroupKind.FULL, tokens, (), heads, tuple(cells), "bf16")
    return max(at + size for at, size, _ in _cells_of(group, share, tokens))


def _modelled(spec: _Spec) -> list[Piece] | None:
    """The pieces of block 0; None where bytes belong to two cells."""
    cells = _cells_of(spec.group, spec.share, spec.group.block_tokens // spec.dcp)
    ends = [at + size for at, size, _ in cells]
    if any(end > cells[at + 1][0] for at, end in enumerate(ends[:-1])):
        return None
    pieces: list[Piece] = []
    for place in sorted(spec.share.places, key=lambda place: place.layer):
        for at, size, _ in cells:
            last = pieces[-1] if pieces else (-1, 0, 0, 0)
            if last[0] == place.region and last[2] == place.block_stride and last[1] + last[3] == place.offset + at:
                pieces[-1] = (*last[:3], last[3] + size)
            else:
                pieces.append((place.region, place.offset + at, place.block_stride, size))
    return pieces


def bench_values(rng: random.Random) -> None:
    for _ in range(4):
        spec = _drawn(rng)
        pieces = _modelled(spec)
        found = _values(spec)
        if pieces is None:
            same("planes that overlap", found, REFUSED)
            continue
        runs = [(run.region, run.offset, run.block_stride, run.bytes) for run in found.runs]
        same("the pieces of a value", runs, pieces)
        _space(spec, found, sum(piece[3] for piece in pieces))
        _moved(rng, spec, found)
        _otherwise(rng, spec, found)
        _blocks(rng, found)
    _refused(rng)


def _values(spec: _Spec) -> Any:
    return outcome(lambda: rank_values.rank_values(spec.layout(), 0, COMPAT), NotStorable)


def _space(spec: _Spec, found: RankValues, size: int) -> None:
    held = sorted(place.layer for place in spec.share.places)
    space = found.space
    facts = space.compat, space.block_tokens, space.value_bytes, space.group, space.part
    same("what a value is of", facts, (COMPAT, spec.group.block_tokens, size, "full", spec.share.head_start))
    same("the layers of a value", (space.layer_start, space.layer_stop), (held[0], held[-1] + 1))
    same("how many blocks have a value", found.block_count, spec.share.block_count)


def _moved(rng: random.Random, spec: _Spec, found: RankValues) -> None:
    """The same, elsewhere in memory."""
    places = tuple(Place(each.layer, each.offset + 5000, each.block_stride + 1, 1) for each in spec.share.places)
    planes = tuple(Plane(each.offset + 7, each.head_stride, each.token_stride) for each in spec.share.planes)
    share = msgspec.structs.replace(spec.share, places=places, planes=planes, block_count=rng.randrange(1, 9))
    interleave = spec.interleave + (spec.dcp == 1)  # who has all tokens of a block deals none out
    moved = msgspec.structs.replace(spec, share=share, interleave=interleave)
    same("the space of what lies elsewhere", _values(moved).space, found.space)


def _otherwise(rng: random.Random, spec: _Spec, found: RankValues) -> None:
    """Something else, whose bytes lie in the same places."""
    group, share = spec.group, spec.share
    other = rng.choice([place.layer for place in share.places])
    layers = tuple("other" if at == other else name for at, name in enumerate(group.layers))
    last = group.cells[-1]
    cells = (*group.cells[:-1], Cell(last.name + "2", last.bytes, last.per))
    replace = partial(msgspec.structs.replace, group)
    kind = GroupKind.LATENT if group.kind is GroupKind.FULL else GroupKind.FULL
    groups = [replace(name="other"), replace(dtype="f8"), replace(layers=layers), replace(cells=cells)]
    groups += [replace(kind=kind), replace(heads=group.heads + 1)]
    changed = [msgspec.structs.replace(spec, group=each) for each in groups]
    later = msgspec.structs.replace(share, head_start=share.head_start + 1)
    changed.append(msgspec.structs.replace(spec, share=later))
    if spec.dcp > 1:
        changed.append(msgspec.structs.replace(spec, at=1 - spec.at))
        changed.append(msgspec.structs.replace(spec, interleave=spec.interleave + 1))
    turned = _turned(spec)
    if turned is not None:
        changed.append(turned)
    if len(group.cells) > 1 and len({(cell.bytes, cell.per) for cell in group.cells}) == 1:
        swapped = msgspec.structs.replace(share, planes=share.planes[::-1])
        changed.append(msgspec.structs.replace(spec, share=swapped))
    if len(share.places) > 1:
        fewer = msgspec.structs.replace(share, places=share.places[:-1])
        changed.append(msgspec.structs.replace(spec, share=fewer))
    spaces = [_values(each).space for each in changed]
    same("spaces of other values", [each for each in spaces if each == found.space], [])


def _turned(spec: _Spec) -> _Spec | None:
    """The same bytes, of heads and tokens in another order."""
    tokens, share = spec.group.block_tokens // spec.dcp, spec.share
    axes = [cell_axes(cell, share.head_count, tokens) for cell in spec.group.cells]
    if len(axes) > 1 or axes[0][1] < 2 or axes[0][2] < 2:
        return None
    size, heads, columns = axes[0]
    dense = {(size * columns, size): (size, size * heads), (size, size * heads): (size * columns, size)}
    plane = share.planes[0]
    strides = dense.get((plane.head_stride, plane.token_stride))
    if strides is None:
        return None
    turned = msgspec.structs.replace(share, planes=(Plane(plane.offset, *strides),))
    return msgspec.structs.replace(spec, share=turned)


def _blocks(rng: random.Random, found: RankValues) -> None:
    """Bytes of any block, and of none that does not exist."""
    reach = max(run.offset + BLOCKS * run.block_stride + run.bytes for run in found.runs)
    regions = [memoryview(rng.randbytes(reach)) for _ in range(2)]
    for block in range(-1, BLOCKS + 2):
        if not 0 <= block < found.block_count:
            raised = outcome(partial(found.pieces, regions, block), ValueError)
            same("a block that does not exist", raised, Raised("ValueError"))
            continue
        expected = []
        for run in found.runs:
            at = run.offset + block * run.block_stride
            expected.append(bytes(regions[run.region])[at : at + run.bytes])
        same("the bytes of a block", [bytes(each) for each in found.pieces(regions, block)], expected)


def _refused(rng: random.Random) -> None:
    """What cannot be a value, and what just can."""
    cell = Cell("k", 1)
    group = Group("full", GroupKind.FULL, 2, ("a", "b", "c"), 2, (cell,), "bf16")
    apart = tuple(Place(at, 100 * at, 1000) for at in range(3))
    share = Share(0, 2, BLOCKS, apart, (Plane(0, 8, 4),))  # four cells apart from each other, three times
    spec = _Spec(group, share)
    for kind in (GroupKind.SLIDING, GroupKind.CHUNKED, GroupKind.STATE):
        window = msgspec.structs.replace(group, kind=kind, window=4)
        same(f"a group that is {kind}", _values(msgspec.structs.replace(spec, group=window)), REFUSED)
    nothing = msgspec.structs.replace(spec, share=msgspec.structs.replace(share, places=()))
    same("a rank without layers", _values(nothing), REFUSED)
    layout = spec.layout()
    two = msgspec.structs.replace(layout, groups=(group, msgspec.structs.replace(group, name="more")))
    same("two groups", outcome(lambda: rank_values.rank_values(two, 0, COMPAT), NotStorable), REFUSED)
    for name, needed in (("CELLS_MAX", 4), ("PIECES_MAX", 12)):
        bound = needed - rng.randrange(2)
        with replaced(rank_values, **{name: bound}):
            same(f"a value at {name}", _values(spec) == REFUSED, bound < needed)
    more = rng.randrange(2)
    cells = (
        Cell("k", VALUE_BYTES_MAX // 3),
        Cell("v", VALUE_BYTES_MAX // 3),
        Cell("x", VALUE_BYTES_MAX // 3 + 1 + more),
    )
    planes = tuple(Plane(at * VALUE_BYTES_MAX, 1, 1) for at in range(3))
    group = Group("full", GroupKind.FULL, 1, ("a",), 1, cells, "bf16")
    large = _Spec(group, Share(0, 1, BLOCKS, apart[:1], planes))
    same("a value of very many bytes", _values(large) == REFUSED, bool(more))
    two_cells = _Spec(
        Group("full", GroupKind.FULL, 2, ("a",), 1, (cell, cell), "bf16"),
        Share(0, 1, BLOCKS, apart[:1], (Plane(0, 4, 4), Plane(1, 4, 4))),
    )
    bound = 4 - rng.randrange(2)
    with replaced(rank_values, CELLS_MAX=bound):
        same("cells of two planes at CELLS_MAX", _values(two_cells) == REFUSED, bound < 4)


# --- the shelf


class _Kept:
    """Stands in for the store: keeps what it was asked."""

    def __init__(self, backend: Backend, pins: Pins, settings: StoreSettings, owned: bool | None = None) -> None:
        self.made = backend, settings, owned
        self.pins = pins
        self.calls: list[tuple[Any, ...]] = []
        self.has_room = True
        self.ends: list[OrderEnded] = []
        self.counters = {"hits": 3}
        self.stuck = 2
        self.wakers: list[Callable[[], None]] = []

    def submit(self, order: Order) -> bool:
        self.calls.append(("submit", order))
        return self.has_room

    def cancel(self, order: OrderId) -> None:
        self.calls.append(("cancel", order))

    def close(self) -> None:
        self.calls.append(("close",))

    def drain(self) -> list[OrderEnded]:
        ends, self.ends = self.ends, []
        return ends

    def set_waker(self, waker: Callable[[], None]) -> None:
        self.wakers.append(waker)


def bench_shelf(rng: random.Random) -> None:
    spec = _drawn(rng)
    while _modelled(spec) is None:
        spec = _drawn(rng)
    values: RankValues = _values(spec)
    reach = max(run.offset + BLOCKS * run.block_stride + run.bytes for run in values.runs)
    regions = [memoryview(bytearray(rng.randbytes(reach))) for _ in range(2)]
    shelf, kept = _made(rng, values, regions)
    front, rings = prefix(values.space), []
    shelf.set_waker(lambda: rings.append(1))
    kept.wakers[0]()
    refused: list[OrderEnded] = []
    for number in range(STEPS):
        order, kept.has_room = OrderId(number), rng.random() < 0.7
        hashes = [rng.randbytes(HASH_BYTES) for _ in range(rng.randrange(1, 4))]
        keys = tuple(front + each.hex() for each in hashes)
        blocks = [rng.randrange(BLOCKS + (rng.random() < 0.3)) for _ in hashes]
        kept.calls.clear()
        fits = max(blocks) < BLOCKS
        pieces = tuple(values.pieces(regions, block) for block in blocks) if fits else ()
        kind = rng.randrange(3)
        acts: tuple[tuple[Callable[[], bool], Order], ...] = (
            (partial(shelf.lookup, order, hashes, 2.0), Lookup(order, keys, 2.0)),
            (partial(shelf.get, order, hashes, blocks, 2.0), Get(order, keys, pieces, 2.0)),
            (partial(shelf.put, order, hashes, blocks, 2.0), Put(order, keys, pieces, tuple(blocks), 2.0)),
        )
        act, expected = acts[kind]
        accepted = act()
        if fits or kind == 0:
            same("what a shelf puts to its store", (kept.calls, accepted), ([("submit", expected)], kept.has_room))
        else:
            refused.append(OrderEnded(order, 0, Reason.BAD_SPAN, ANYTHING))
            same("an order of no block", (kept.calls, accepted), ([], True))
        if rng.random() < 0.4:
            kept.ends = [OrderEnded(OrderId(99), number)]
            ends = list(shelf.drain())
            same("ends of a shelf", ends, [*refused, OrderEnded(OrderId(99), number)])
            same("orders refused without a word", [end for end in ends if end.reason and not end.detail], [])
            same("who was woken for a refused order", len(rings) - 1, len(refused) if refused else len(rings) - 1)
            refused.clear()
            rings[1:] = []
    _rest_of_shelf(rng, shelf, kept)


def _made(rng: random.Random, values: RankValues, regions: Sequence[memoryview]) -> tuple[rank_store.LocalShelf, _Kept]:
    backend = cast(Backend, object())
    settings = StoreSettings(value_bytes_max=1) if rng.random() < 0.3 else None
    expected = settings if settings is not None else _settings(values.space.value_bytes)
    owned = rng.random() < 0.5
    made: list[_Kept] = []

    def keep(*args: Any, **more: Any) -> _Kept:
        made.append(_Kept(*args, **more))
        return made[-1]

    if rng.random() < 0.5:
        shelf = rank_store.LocalShelf(backend, values, regions, settings, owned=owned, keep=cast(Any, keep))
        same("a store that others make", made[0].made, (backend, expected, None))
    else:
        with replaced(rank_store, KeptStore=keep):
            shelf = rank_store.LocalShelf(backend, values, regions, settings, owned=owned)
        same("the store of a shelf", made[0].made, (backend, expected, owned))
    size = rng.choice((1, SLOT_BYTES // 64, SLOT_BYTES // 64 + 1, SLOT_BYTES // 3, SLOT_BYTES, SLOT_BYTES + 1))
    same("the bounds of a shelf", rank_store.shelf_settings(size), _settings(size))
    return shelf, made[0]


def _settings(size: int) -> StoreSettings:
    """As many values in one call as fit into a slot, but one at least and 64 at most."""
    fit = next((count for count in range(64, 1, -1) if count * size <= SLOT_BYTES), 1)
    return StoreSettings(value_bytes_max=size, values_per_call_max=fit, close_s=1.0)


def _rest_of_shelf(rng: random.Random, shelf: rank_store.LocalShelf, kept: _Kept) -> None:
    kept.calls.clear()
    order = OrderId(rng.randrange(9))
    shelf.cancel(order)
    shelf.close()
    same("what else is asked of a store", kept.calls, [("cancel", order), ("close",)])
    kept.pins.pin(OrderId(1), [4, 5])
    kept.pins.pin(OrderId(2), [6])
    same("counters of a shelf", shelf.counters, {"hits": 3, "pins": 3, "stuck": 2})
    kept.pins.unpin(OrderId(1))
    same("pins of a shelf", shelf.counters["pins"], 1)
