"""Cards with one thing wrong in them: each is refused at pairing, for its reason, and its neighbour that is right not.

Laws: what a layout says of itself and cannot be is `BAD_MESSAGE`; what is sound and cannot be mapped is `INCOMPATIBLE`,
by the name of what differs; another version's needs are `WRONG_VERSION`; no data plane in common is `NO_TRANSPORT`.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import msgspec

from kvbaton.protocol.capabilities import Capabilities
from kvbaton.protocol.errors import ProtocolError, Reason
from kvbaton.protocol.geometry import layout, plan
from kvbaton.protocol.geometry.layout import Cell, EngineLayout, Group, GroupKind, Per, Place, Plane, Rank, Share
from kvbaton.protocol.ids import Incarnation, PeerId, WorkerId
from kvbaton.protocol.machines import pairing_state
from kvbaton.protocol.machines.context import Identity
from kvbaton.protocol.machines.pairing_state import has_fallback, pair_as_source, pair_as_target
from kvbaton.protocol.wire.messages import Card
from kvbaton_proof.sim.questions.exam import Question, lowered, refused, same, taken

_R = Reason
put = msgspec.structs.replace
Lie = tuple[str, Any, Reason | None]
"""What is said, instead of what; and why it is refused, if it is."""

TCP, RDMA, SHM = (
    Capabilities(name, one_sided=True, can_write=True, can_fence=True, cancels=True, same_host=name == "shm")
    for name in ("tcp", "rdma", "shm")
)
BLOCKS, TOKENS, LAYERS, HEADS = 3, 2, 2, 4


def base(shards: int = 2, extra: int = 0) -> EngineLayout:
    """Two groups of two layers on some ranks, side by side in one region, keys and values apart."""
    cells = (Cell("k", 2), Cell("v", 2))
    groups = tuple(
        Group(f"g{n}", GroupKind.FULL if n == 0 else GroupKind.SLIDING, TOKENS, tuple(f"g{n}.{k}" for k in
        range(LAYERS)), HEADS, cells, "u16", 0 if n == 0 else 3)
        for n in range(2)
    )  # fmt: skip
    heads = HEADS // shards
    half = 2 * heads * TOKENS
    page = 2 * half
    planes = (Plane(0, 2 * TOKENS, 2), Plane(half, 2 * TOKENS, 2))
    ranks = []
    for shard in range(shards):
        shares = tuple(
            Share(
                shard * heads,
                heads,
                BLOCKS,
                tuple(Place(k, (n * LAYERS + k) * BLOCKS * page, page) for k in range(LAYERS)),
                planes,
            )
            for n in range(2)
        )
        ranks.append(Rank(0, shard, 0, (2 * LAYERS * BLOCKS * page + extra,), shares))
    return EngineLayout(groups, tuple(ranks))


def identity(of: EngineLayout, transports: tuple[Capabilities, ...] = (SHM, TCP), **more: Any) -> Identity:
    me = PeerId(WorkerId("p0"), Incarnation(1))
    return Identity(me, "here", {"model": "m", "weights": "w", "info.v": "1"}, of, transports, (b"key" * 11,), **more)


def _group(of: EngineLayout, index: int, **fields: Any) -> EngineLayout:
    groups = tuple(put(group, **fields) if n == index else group for n, group in enumerate(of.groups))
    return put(of, groups=groups)


def _rank(of: EngineLayout, index: int, **fields: Any) -> EngineLayout:
    return put(of, ranks=tuple(put(rank, **fields) if n == index else rank for n, rank in enumerate(of.ranks)))


def _share(of: EngineLayout, rank: int, index: int, **fields: Any) -> EngineLayout:
    shares = tuple(put(share, **fields) if n == index else share for n, share in enumerate(of.ranks[rank].shares))
    return _rank(of, rank, shares=shares)


def _places(of: EngineLayout, rank: int, group: int, at: int, **fields: Any) -> EngineLayout:
    places = of.ranks[rank].shares[group].places
    return _share(of, rank, group, places=tuple(put(p, **fields) if n == at else p for n, p in enumerate(places)))


def _planes(of: EngineLayout, rank: int, group: int, at: int, **fields: Any) -> EngineLayout:
    planes = of.ranks[rank].shares[group].planes
    return _share(of, rank, group, planes=tuple(put(p, **fields) if n == at else p for n, p in enumerate(planes)))


def _lies_of_groups(good: EngineLayout, n: int) -> Iterator[Lie]:
    bad = _R.BAD_MESSAGE
    for field, values in {
        "name": ("", "a\nb", "x" * 257), "dtype": ("", "\0", "x" * 257), "block_tokens": (0, (1 << 24) + 1),
        "heads": (0, 1025), "layers": ((), ("a", "a"), ("", "b"), ("a", "b\t"), tuple(map(str, range(1025)))),
        "cells": ((), (Cell("", 2), Cell("v", 2)), (Cell("k", 0), Cell("v", 2)), (Cell("k", 2), Cell("v", 0)),
                  (Cell("k", 2), Cell("", 2)), tuple(Cell(f"c{k}", 1) for k in range(9)), (Cell("k", (1 << 56) + 1),)),
        "window": ((1,) if n == 0 else (0, (1 << 24) + 1)),
    }.items():  # fmt: skip
        for value in values:
            yield f"groups[{n}].{field}", _group(good, n, **{field: value}), bad
    yield "two groups of one name", _group(good, n, name=good.groups[1 - n].name), bad
    yield "dcp that does not divide", put(_group(good, n, block_tokens=3), dcp=2), bad
    for field, value in {
        "heads": HEADS * 2,
        "dtype": "f8",
        "name": "other",
        "layers": ("a", "b"),
        "optional": False,
    }.items():
        yield f"another {field}", _group(good, n, **{field: value}), None if field == "optional" else _R.INCOMPATIBLE
    yield "other cells", _group(good, n, cells=(Cell("k", 2), Cell("w", 2))), _R.INCOMPATIBLE
    yield "one layer less", _fewer_layers(good, n), _R.INCOMPATIBLE
    if n:
        yield "another window", _group(good, n, window=4), _R.INCOMPATIBLE
    yield (
        "another kind",
        _group(good, n, kind=GroupKind.CHUNKED, window=3) if n else _group(good, n, kind=GroupKind.LATENT),
        _R.INCOMPATIBLE,
    )


def _fewer_layers(good: EngineLayout, n: int) -> EngineLayout:
    told = _group(good, n, layers=good.groups[n].layers[:1])
    for rank in range(len(good.ranks)):
        told = _share(told, rank, n, places=good.ranks[rank].shares[n].places[:1])
    return told


def _lies_of_ranks(good: EngineLayout, r: int) -> Iterator[Lie]:
    bad = _R.BAD_MESSAGE
    size = good.ranks[r].region_bytes[0]
    shares = good.ranks[r].shares
    for field, values in {
        "pp": (256, -1), "tp": (256, -1), "dcp": (1, -1),
        "region_bytes": ((), (size - 1,), (-1,), (size,) * 65, ((1 << 56) + 1,)),
        "shares": (shares[:1], (*shares, shares[0]), ()),
    }.items():  # fmt: skip
        for value in values:
            yield f"ranks[{r}].{field}", _rank(good, r, **{field: value}), bad
    yield "coordinates of another", _rank(good, r, tp=1 - r), bad
    yield "another stage's number, as large as may be", _rank(good, r, pp=255), None
    yield "another shard's number, as large as may be", _rank(good, r, tp=255), None
    yield "as many regions as may be", _rank(good, r, region_bytes=(size,) * 64), None
    yield "a region more, of nothing", _rank(good, r, region_bytes=(size, 0)), None


def _lies_of_shares(good: EngineLayout, r: int, n: int) -> Iterator[Lie]:
    bad, share = _R.BAD_MESSAGE, good.ranks[r].shares[n]
    half = 2 * HEADS // len(good.ranks) * TOKENS
    for field, values in {
        "head_start": (HEADS, -1), "head_count": (0, HEADS - share.head_start + 1), "block_count": (0, (1 << 31) + 1),
        "planes": (share.planes[:1], (*share.planes, share.planes[0]), ()),
        "places": ((share.places[0],) * 2,),
    }.items():  # fmt: skip
        for value in values:
            yield f"shares[{n}].{field}", _share(good, r, n, **{field: value}), bad
    last = share.places[-1]
    for at, place in enumerate(share.places):
        yield "a layer that is not", _places(good, r, n, at, layer=LAYERS), bad
        yield "a negative layer", _places(good, r, n, at, layer=-1), bad
        yield "a layer twice", _places(good, r, n, at, layer=1 - at), bad
        yield "a region that is not", _places(good, r, n, at, region=1), bad
        yield "a negative region", _places(good, r, n, at, region=-1), bad
        yield "a negative offset", _places(good, r, n, at, offset=-1), bad
        yield "the place of another", _places(good, r, n, at, offset=share.places[1 - at].offset), bad
        yield "blocks that overlap", _places(good, r, n, at, block_stride=place.block_stride - half - 1), bad
        yield "blocks far apart", _places(good, r, n, at, block_stride=1 << 50), bad
        yield "far from nothing", _share(_places(good, r, n, at, block_stride=(1 << 56) + 1), r, n, block_count=1), bad
    if n == 1:
        yield "a layer that ends beyond its region", _places(good, r, n, LAYERS - 1, offset=last.offset + 1), bad
        yield "a block more than there is room for", _share(good, r, n, block_count=BLOCKS + 1), bad
    for at in range(2):
        yield "a negative plane", _planes(good, r, n, at, offset=-1), bad
        yield "heads that overlap", _planes(good, r, n, at, head_stride=2 * TOKENS - 1), bad
        yield "tokens that overlap", _planes(good, r, n, at, token_stride=1), bad
        yield "heads far apart", _planes(good, r, n, at, head_stride=1 << 50), bad
    yield "heads on no rank", _share(good, r, n, head_count=share.head_count - 1), _R.INCOMPATIBLE
    if share.head_start == 0:
        yield "the first head on no rank", _share(good, r, n, head_start=1, head_count=1), _R.INCOMPATIBLE
    yield "a layer on no rank", _share(good, r, n, places=share.places[:1]), _R.INCOMPATIBLE
    yield "nothing on one rank", _share(good, r, n, places=(), planes=()), _R.INCOMPATIBLE


def _lies_of_layouts(good: EngineLayout) -> Iterator[Lie]:
    bad = _R.BAD_MESSAGE
    yield "no groups", put(good, groups=()), bad
    yield "no ranks", put(good, ranks=()), bad
    for field, values in {"dcp": (0, 65), "dcp_interleave": (0, (1 << 24) + 1)}.items():
        for value in values:
            yield field, put(good, **{field: value}), bad
    yield "the same, dealt out", _dealt(good, 2), _R.INCOMPATIBLE
    yield (
        "a group less",
        put(good, groups=good.groups[:1], ranks=tuple(put(r, shares=r.shares[:1]) for r in good.ranks)),
        _R.INCOMPATIBLE,
    )


def _dealt(good: EngineLayout, dcp: int) -> EngineLayout:
    """Each rank as often as its tokens are dealt out."""
    ranks = tuple(put(rank, dcp=n) for rank in good.ranks for n in range(dcp))
    return put(good, ranks=ranks, dcp=dcp)


def layouts(rng: random.Random) -> None:
    """One lie in one number of a layout."""
    ours, good = identity(base(rng.choice((1, 2)))), base()
    r, n = rng.randrange(2), rng.randrange(2)
    lies = [*_lies_of_groups(good, n), *_lies_of_ranks(good, r), *_lies_of_shares(good, r, n), *_lies_of_layouts(good)]
    for what, told, reason in rng.sample(lies, 24):
        _judged(what, ours, told, reason)


def _judged(what: str, ours: Identity, told: EngineLayout, reason: Reason | None) -> None:
    card = Card(0, 7, "here", ours.compat, told, ("tcp",))
    for pair in (lambda: pair_as_source(ours, card), lambda: pair_as_target(ours, card, "tcp")):
        if reason is None:
            taken(what, pair)
        else:
            refused(what, reason, pair)


def cards(rng: random.Random) -> None:
    """One lie in another field of a card; which data plane a pair takes."""
    ours = identity(base(1), (SHM, RDMA, TCP), required=2)
    good = Card(0, 7, "here", dict(ours.compat), base(), ("tcp", "shm"))
    mapping, plane = taken("a good card", pair_as_source, ours, good)
    same("the best plane of both", plane, SHM)
    same("whose layouts are mapped", (mapping.source, mapping.target), (ours.layout, good.layout))
    same("a plane that was not given up", taken("a card", pair_as_source, ours, good, ("tcp",))[1], TCP)
    same("all were given up", taken("a card", pair_as_source, ours, good, ())[1], SHM)
    away = put(good, host="there")
    same("memory of another host", taken("a card", pair_as_source, ours, away)[1], TCP)
    back = taken("a good card", pair_as_target, ours, good, "tcp")
    same("as a target", (back[0].source, back[0].target, back[1]), (good.layout, ours.layout, TCP))
    refused("a plane that D has not", _R.NO_TRANSPORT, pair_as_target, ours, good, "cuda")
    compat = dict(ours.compat)
    for what, card, reason in (
        ("needs a feature that we have not", put(good, required=16), _R.WRONG_VERSION),
        ("needs what we have", put(good, required=5), None),
        ("lacks what we need", put(good, optional=5), _R.WRONG_VERSION),
        ("another model", put(good, compat={**compat, "model": "x"}), _R.INCOMPATIBLE),
        ("other weights", put(good, compat={**compat, "weights": "x"}), _R.INCOMPATIBLE),
        ("says less", put(good, compat={"model": "m"}), _R.INCOMPATIBLE),
        ("says more", put(good, compat={**compat, "rope": "x"}), _R.INCOMPATIBLE),
        ("another release", put(good, compat={**compat, "info.v": "9"}), None),
        ("a fact without a name", put(good, compat={**compat, "": "x"}), _R.BAD_MESSAGE),
    ):  # fmt: skip
        for pair in (lambda c=card: pair_as_source(ours, c), lambda c=card: pair_as_target(ours, c, "tcp")):
            taken(what, pair) if reason is None else refused(what, reason, pair)
    for names, host in ((("cuda",), "here"), ((), "here"), (("shm",), "there")):
        refused("no plane in common", _R.NO_TRANSPORT, pair_as_source, ours, put(good, transports=names, host=host))
    for card, offered, chosen, expected in (
        (good, ("shm", "tcp"), "shm", True), (good, ("shm", "tcp"), "tcp", True), (good, ("tcp",), "tcp", False),
        (put(good, transports=("tcp",)), ("shm", "tcp"), "tcp", False), (away, ("shm", "tcp"), "tcp", False),
        (good, ("rdma", "tcp"), "tcp", False),
    ):  # fmt: skip
        same(f"another plane than {chosen} of {offered}", has_fallback(ours, card, offered, chosen), expected)
    with lowered(pairing_state, "RANK_PAIRS_MAX", 2):
        taken("as many pairs of ranks as may be", pair_as_source, ours, good)
    with lowered(pairing_state, "RANK_PAIRS_MAX", 1):
        refused("a pair of ranks more", _R.INCOMPATIBLE, pair_as_source, ours, good)


def opaque(rng: random.Random) -> None:
    """Pages, heads and tokens that only the engine knows the inside of go whole, or not at all."""
    one = base(1)
    for per, other, reason in (
        (Per.PAGE, base(2), _R.INCOMPATIBLE), (Per.PAGE, base(1), None), (Per.HEAD, base(2), None),
    ):  # fmt: skip
        here, there = (_opaque(each, per) for each in (one, other))
        _judged(f"cells of a {per}, {len(other.ranks)} ranks", identity(here), there, reason)
        if per is Per.PAGE:
            continue
        smaller = _group(_group(there, 0, block_tokens=1), 1, block_tokens=1)
        _judged(f"cells of a {per} in other blocks", identity(here), smaller, _R.INCOMPATIBLE)
    taken(
        "blocks of another size",
        pair_as_source,
        identity(one),
        Card(0, 7, "here", identity(one).compat, _halved(one), ("tcp",)),
    )
    optional = _group(one, 1, optional=True)
    less = put(one, groups=one.groups[:1], ranks=tuple(put(rank, shares=rank.shares[:1]) for rank in one.ranks))
    same("a group that need not be", plan.compare(optional, less), (0, None))
    same("a group that need not be, of the target", plan.compare(less, optional), (0,))
    dealt = _dealt(_group(_group(one, 0, block_tokens=4), 1, block_tokens=4), 2)
    taken("the same deal", plan.compare, dealt, dealt)
    refused("another deal", _R.INCOMPATIBLE, plan.compare, dealt, put(dealt, dcp_interleave=2))


def _opaque(of: EngineLayout, per: Per) -> EngineLayout:
    """The same bytes, as cells of a head or of a page."""
    cells = tuple(Cell(cell.name, cell.bytes * TOKENS, per) for cell in of.groups[0].cells)
    told = of
    for n in range(2):
        told = _group(told, n, cells=cells)
    return told


def _halved(of: EngineLayout) -> EngineLayout:
    """One token a block: half of the room is used."""
    return _group(_group(of, 0, block_tokens=1), 1, block_tokens=1)


_BOUNDS = (("GROUPS_MAX", 2), ("RANKS_MAX", 2), ("SHARES_MAX", 4), ("LAYERS_IN_ALL_MAX", 4), ("PLACES_MAX", 8),
           ("LAYERS_MAX", 2), ("CELLS_MAX", 2), ("REGIONS_MAX", 1))  # fmt: skip


def bounds(rng: random.Random) -> None:
    """Every bound of a layout met exactly, and passed by one."""
    good = base()
    for name, count in _BOUNDS:
        with lowered(layout, name, count):
            taken(f"{name} met", layout.validate, good)
        with lowered(layout, name, count - 1):
            refused(f"{name} passed", _R.BAD_MESSAGE, layout.validate, good)
    wide = _apart(base(1))
    with lowered(layout, "INNER_STRIDES_MAX", 1):
        taken("heads outside of blocks", layout.validate, wide)
    with lowered(layout, "INNER_STRIDES_MAX", 0):
        taken("heads inside of blocks", layout.validate, good)
        refused("too many distances of blocks", _R.BAD_MESSAGE, layout.validate, wide)
    one, other = base(1), _turned(base(1))
    pieces = _budget("PAGE_PIECES_MAX", one, other)
    with lowered(plan, "PAGE_PIECES_MAX", pieces - 1):
        refused("too many runs a page", _R.INCOMPATIBLE, plan.plan, one, other)
    name = rng.choice(("EFFORT_MAX", "BLOCK_SPANS_MAX"))
    same(f"what a plan costs, of {name}", 0 < _budget(name, one, other) < 1 << 12, True)


def _budget(name: str, one: EngineLayout, other: EngineLayout) -> int:
    """The least bound with which the two can be mapped."""
    low, high = 0, 1 << 12
    while low < high:
        middle = (low + high) // 2
        if _is_mapped(name, middle, one, other):
            high = middle
        else:
            low = middle + 1
    return low


def _is_mapped(name: str, bound: int, one: EngineLayout, other: EngineLayout) -> bool:
    if name == "PAGE_PIECES_MAX":
        with lowered(plan, name, bound):
            return _plans(one, other)
    effort = plan._Effort
    defaults = effort.__init__.__defaults__
    assert defaults is not None
    changed = (bound, defaults[1]) if name == "EFFORT_MAX" else (defaults[0], bound)
    effort.__init__.__defaults__ = changed
    try:
        return _plans(one, other)
    finally:
        effort.__init__.__defaults__ = defaults


def _plans(one: EngineLayout, other: EngineLayout) -> bool:
    try:
        plan.plan(one, other)
    except ProtocolError as error:
        same("why it is not mapped", error.reason, _R.INCOMPATIBLE)
        return False
    return True


def _turned(of: EngineLayout) -> EngineLayout:
    """Tokens before heads."""
    heads = HEADS // len(of.ranks)
    told = of
    for r in range(len(of.ranks)):
        for n in range(2):
            for p in range(2):
                told = _planes(told, r, n, p, head_stride=2, token_stride=2 * heads)
    return told


def _apart(of: EngineLayout) -> EngineLayout:
    """Heads outside of blocks, in the first group of one rank alone."""
    page = 2 * 2 * TOKENS
    planes = (Plane(0, BLOCKS * page, 2), Plane(2 * TOKENS, BLOCKS * page, 2))
    places = tuple(Place(k, k * HEADS * BLOCKS * page, page) for k in range(LAYERS))
    return _share(of, 0, 0, places=places, planes=planes)


BANK: list[Question] = [layouts, layouts, cards, opaque, bounds]
