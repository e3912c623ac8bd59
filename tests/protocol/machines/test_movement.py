"""From readiness to copies: every rank's share, cut to size, for D's reads and P's writes alike."""

from __future__ import annotations

import pytest

from kvbaton.protocol.effects import Direction, StartCopy
from kvbaton.protocol.errors import ProtocolError, Reason
from kvbaton.protocol.geometry.layout import EngineLayout
from kvbaton.protocol.geometry.plan import Plan, plan
from kvbaton.protocol.geometry.progress import GroupProgress, nothing, whole
from kvbaton.protocol.geometry.spans import SpanSide
from kvbaton.protocol.ids import Incarnation, PeerId, WorkerId
from kvbaton.protocol.machines import context as movement
from kvbaton.protocol.machines.context import Cargo, Identity, LedgerContext, Parts, Route, moves, start
from kvbaton.protocol.settings import Settings
from kvbaton_proof.sim.world.sim_memory import Shape
from kvbaton_proof.sim.world.sim_transport import TCP

from layout_builders import engine, group  # isort: skip

PEER = PeerId(WorkerId("p"), Incarnation(5))
CARGO = Cargo([[1, 2, 3]], [[4, 5, 6]], 5, 0)


def route(mapping: Plan, side: SpanSide = SpanSide.TARGET) -> Route:
    return Route(mapping, side, PEER, "tcp")


def between(source: Shape, target: Shape) -> Plan:
    return plan(source.layout(), target.layout())


def test_nothing_new_is_no_copy() -> None:
    assert moves(route(between(Shape(), Shape())), CARGO, whole([3]), whole([3])) == []


def test_what_became_ready_is_copied_once() -> None:
    way = route(between(Shape(), Shape()))
    first = moves(way, CARGO, nothing(1), whole([2]))
    second = moves(way, CARGO, whole([2]), whole([3]))
    at_once = moves(way, CARGO, nothing(1), whole([3]))
    count = lambda listed: sum(move.bytes for _, found in listed for move in found)  # noqa: E731
    assert count(first) + count(second) == count(at_once) == 3 * Shape().page_bytes * Shape().layers


@pytest.mark.parametrize(("side", "ranks"), [(SpanSide.TARGET, [0, 1]), (SpanSide.SOURCE, [0, 1, 2, 3])])
def test_every_rank_of_the_side_that_drives_has_its_share(side: SpanSide, ranks: list[int]) -> None:
    mapping = between(Shape(ranks=4, heads=4), Shape(ranks=2, heads=4))
    listed = moves(route(mapping, side), CARGO, nothing(1), whole([3]))
    assert [rank for rank, _ in listed] == ranks
    assert all(found for _, found in listed)


def test_a_group_that_the_target_lacks_is_skipped() -> None:
    """An optional group (a draft model's) may be missing on D."""
    source: EngineLayout = engine(group("full"), group("draft", optional=True))
    target: EngineLayout = engine(group("full"))
    cargo = Cargo([[1], [2]], [[3]], 4, 0)
    listed = moves(route(plan(source, target)), cargo, nothing(2), whole([1, 1]))
    assert len(listed) == 1


def test_a_large_rectangle_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    """One call of `segments` must not hold up the loop for seconds."""
    monkeypatch.setattr(movement, "blocks_per_call", lambda *arguments: 2)
    listed = moves(route(between(Shape(), Shape())), CARGO, nothing(1), whole([3]))
    assert len(listed) == 2


@pytest.mark.parametrize("weaves", [False, True])
def test_what_would_take_more_spans_than_any_engine_needs_is_refused(
    monkeypatch: pytest.MonkeyPatch, weaves: bool
) -> None:
    """Planes that shred every page cost the node memory and time; in product form they cost little."""
    shredded = plan(engine(group(heads=4), order="HNP"), engine(group(heads=4), order="NHP"))
    way = Route(shredded, SpanSide.TARGET, PEER, "tcp", weaves)
    cargo = Cargo([[1, 3, 5]], [[4, 2, 6]], 12, 0)
    monkeypatch.setattr(movement, "SPANS_IN_ALL_MAX", 60)
    if weaves:
        assert moves(way, cargo, nothing(1), whole([3]))
    else:
        with pytest.raises(ProtocolError, match="bad_span: spans: more than 60 between these planes"):
            moves(way, cargo, nothing(1), whole([3]))


def test_lists_that_do_not_hold_what_is_ready_are_refused() -> None:
    way = route(between(Shape(), Shape()))
    with pytest.raises(ProtocolError) as error:
        moves(way, Cargo([[1]], [[4, 5, 6]], 5, 0), nothing(1), whole([3]))
    assert error.value.reason is Reason.BAD_SPAN


def test_progress_that_goes_back_is_refused() -> None:
    with pytest.raises(ProtocolError) as error:
        moves(route(between(Shape(), Shape())), CARGO, whole([3]), (GroupProgress(2),))
    assert error.value.reason is Reason.BAD_MESSAGE


@pytest.mark.parametrize(("side", "direction"), [(SpanSide.TARGET, Direction.READ), (SpanSide.SOURCE, Direction.WRITE)])
def test_the_target_reads_and_the_source_writes(side: SpanSide, direction: Direction) -> None:
    identity = Identity(PEER, "host", {}, Shape().layout(), (TCP,), (b"key",))
    desk, parts = LedgerContext(identity, Settings(), lambda blocks: [0] * len(blocks)), Parts(None)
    way = route(between(Shape(), Shape()), side)
    start(desk, parts, way, moves(way, CARGO, nothing(1), whole([3])))
    assert [effect.copy.direction for effect in desk.effects if isinstance(effect, StartCopy)] == [direction]
    assert len(parts.moving) == 1
