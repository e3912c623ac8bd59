"""From "this much is ready" to copies on every rank: the same for D's reads and P's writes."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from kvbaton.protocol.desk import Desk, Parts
from kvbaton.protocol.effects import Direction
from kvbaton.protocol.geometry import Plan
from kvbaton.protocol.ids import PeerId
from kvbaton.protocol.progress import Progress, advance
from kvbaton.protocol.spans import BlockLists, Move, Side, blocks_per_call, segments


class Route(msgspec.Struct, frozen=True):
    """Between whom, over which data plane, and which side drives."""

    plan: Plan
    side: Side
    peer: PeerId
    transport: str


class Cargo(msgspec.Struct, frozen=True):
    """Which blocks of the two sides; lists per group, each in its own side's order of groups."""

    source: Sequence[Sequence[int]]
    target: Sequence[Sequence[int]]
    tokens: int
    first_token: int


def moves(route: Route, cargo: Cargo, before: Progress, after: Progress) -> list[tuple[int, list[Move]]]:
    """What each local rank must copy for what became ready. Raises ProtocolError on lists that do not fit."""
    plan = route.plan
    layout = plan.target if route.side is Side.TARGET else plan.source
    layers = [len(group.layers) for group in plan.source.groups]
    found: list[tuple[int, list[Move]]] = []
    for whole in advance(before, after, layers):
        target_group = plan.target_groups[whole.group]
        if target_group is None:
            continue
        lists = BlockLists(cargo.source[whole.group], cargo.target[target_group], cargo.tokens, cargo.first_token)
        for rank in range(len(layout.ranks)):
            for rect in whole.cut(blocks_per_call(plan, route.side, rank, whole)):
                found.append((rank, segments(plan, route.side, rank, rect, lists)))
    return found


def start(desk: Desk, parts: Parts, route: Route, listed: list[tuple[int, list[Move]]]) -> None:
    """Hand the copies to the ranks, as parts of one handoff."""
    direction = Direction.READ if route.side is Side.TARGET else Direction.WRITE
    for rank, found in listed:
        desk.start(parts, route.transport, route.peer, direction, rank, found)
