"""From "this much is ready" to copies on every rank: the same for D's reads and P's writes."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence

import msgspec

from kvbaton.protocol.effects import Direction
from kvbaton.protocol.errors import ProtocolError, Reason
from kvbaton.protocol.geometry.layout import NULL_BLOCK
from kvbaton.protocol.geometry.plan import Plan
from kvbaton.protocol.geometry.progress import Progress, advance, nothing, whole
from kvbaton.protocol.geometry.spans import Area, BlockLists, Move, SpanSide, blocks_per_call, segments
from kvbaton.protocol.ids import Incarnation, PeerId, WorkerId
from kvbaton.protocol.machines.context import LedgerContext, Parts

SPANS_IN_ALL_MAX = 1 << 24
"""Of one step of a handoff, on all ranks: 128,000 tokens of 128 layers, keys and values apart, on 8 ranks. A peer whose
planes are such that it takes more would have the node's memory and time, and gets neither."""


_ANYBODY = PeerId(WorkerId(""), Incarnation(0))


class Route(msgspec.Struct, frozen=True):
    """The two sides, the transport, and which side drives."""

    plan: Plan
    side: SpanSide
    peer: PeerId
    transport: str
    weaves: bool = False  # the transport accepts spans in product form, so that is what they cost


class Cargo(msgspec.Struct, frozen=True):
    """Which blocks of the two sides; lists per group, each in its own side's order of groups."""

    source: Sequence[Sequence[int]]
    target: Sequence[Sequence[int]]
    tokens: int
    first_token: int


def moves(route: Route, cargo: Cargo, before: Progress, after: Progress) -> list[tuple[int, list[Move]]]:
    """The copies of each local rank for what became ready. Raises ProtocolError on lists that do not fit."""
    plan = route.plan
    layout = plan.target if route.side is SpanSide.TARGET else plan.source
    layers = [len(group.layers) for group in plan.source.groups]
    found: list[tuple[int, list[Move]]] = []
    spans = 0
    for rect in advance(before, after, layers):
        target_group = plan.target_groups[rect.group]
        if target_group is None:
            continue
        lists = BlockLists(cargo.source[rect.group], cargo.target[target_group], cargo.tokens, cargo.first_token)
        for rank in range(len(layout.ranks)):
            for part in rect.cut(blocks_per_call(plan, route.side, rank, rect)):
                found.append((rank, segments(plan, route.side, rank, part, lists, not route.weaves)))
                spans += sum(_spans(move, route.weaves) for move in found[-1][1])
                if spans > SPANS_IN_ALL_MAX:
                    raise ProtocolError(Reason.BAD_SPAN, f"spans: more than {SPANS_IN_ALL_MAX} between these planes")
    return found


def due(plan: Plan, blocks: Sequence[Sequence[int]], tokens: int, first_token: int) -> list[tuple[Area, ...]]:
    """By rank of the target, what a push of these tokens must fill. Raises ProtocolError on lists that do not fit.

    As D would read it, except that nothing is known of P's blocks but how many there are.
    """
    needed = [group.needed(tokens) for group in plan.source.groups]
    source = [[NULL_BLOCK] * low + [0] * (high - low) for low, high in needed]
    route = Route(plan, SpanSide.TARGET, _ANYBODY, "", weaves=True)
    everything = whole([high for _, high in needed])
    found: list[list[Area]] = [[] for _ in plan.target.ranks]
    for rank, listed in moves(route, Cargo(source, blocks, tokens, first_token), nothing(len(needed)), everything):
        for move in listed:
            found[rank] += _areas(move)
    return [tuple(areas) for areas in found]


def _areas(move: Move) -> Iterator[Area]:
    if move.flat:
        yield Area(move.local_region, _local(move.flat), array("q", (0,)))
    if move.weave is not None:
        yield Area(move.local_region, _local(move.weave.column), move.weave.shifts[0::2])


def _local(triples: array[int]) -> array[int]:
    pairs = array("q", bytes(16 * (len(triples) // 3)))
    pairs[0::2], pairs[1::2] = triples[0::3], triples[2::3]
    return pairs


def _spans(move: Move, weaves: bool) -> int:
    if move.weave is None:
        return len(move.flat) // 3
    woven = (len(move.weave.column) + len(move.weave.shifts)) // 3 if weaves else move.weave.rows
    return len(move.flat) // 3 + woven


def start(desk: LedgerContext, parts: Parts, route: Route, listed: list[tuple[int, list[Move]]]) -> None:
    """Hand the copies to the ranks, as parts of one handoff."""
    direction = Direction.READ if route.side is SpanSide.TARGET else Direction.WRITE
    for rank, found in listed:
        desk.start(parts, route.transport, route.peer, direction, rank, found)
