"""Promise 1: every head of every layer has one source, and what cannot be mapped is refused by name."""

from __future__ import annotations

import operator
from collections.abc import Callable

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from layout_builders import engine, even, group, wide

from kvbaton.protocol.errors import ProtocolError, Reason
from kvbaton.protocol.geometry.layout import Cell, EngineLayout, Group, GroupKind, Per, validate
from kvbaton.protocol.geometry.plan import PAGE_PIECES_MAX, Plan, plan

OPAQUE = (Cell("page", 8, Per.PAGE),)
PER_HEAD = (Cell("kv", 8, Per.HEAD),)


def heads(made: Plan) -> list[tuple[int, int, int, int]]:
    """(target rank, source rank, first head, end)."""
    return [(part.target_rank, part.source_rank, part.head_lo, part.head_hi) for part in made.parts]


@pytest.mark.parametrize(
    ("source_tp", "target_tp", "expected"),
    [
        (1, 1, [(0, 0, 0, 4)]),
        (2, 1, [(0, 0, 0, 2), (0, 1, 2, 4)]),
        (1, 2, [(0, 0, 0, 2), (1, 0, 2, 4)]),
        (2, 4, [(0, 0, 0, 1), (1, 0, 1, 2), (2, 1, 2, 3), (3, 1, 3, 4)]),
        (4, 2, [(0, 0, 0, 1), (0, 1, 1, 2), (1, 2, 2, 3), (1, 3, 3, 4)]),
        (3, 2, [(0, 0, 0, 1), (0, 1, 1, 2), (1, 2, 2, 4)]),  # 1 + 1 + 2 heads against 2 + 2
        (8, 4, [(0, 0, 0, 1), (1, 3, 1, 2), (2, 4, 2, 3), (3, 7, 3, 4)]),  # replicas take turns
        (
            4,
            8,
            [
                (0, 0, 0, 1),
                (1, 0, 0, 1),
                (2, 1, 1, 2),
                (3, 1, 1, 2),
                (4, 2, 2, 3),
                (5, 2, 2, 3),
                (6, 3, 3, 4),
                (7, 3, 3, 4),
            ],
        ),
    ],
)
def test_tensor_parallel_ranks_meet_by_head_ranges(
    source_tp: int, target_tp: int, expected: list[tuple[int, int, int, int]]
) -> None:
    assert heads(plan(engine(group(), tp=source_tp), engine(group(), tp=target_tp))) == expected


def test_a_replicated_latent_is_read_from_one_rank_each_and_spread_over_them() -> None:
    latent = group("mla", kind=GroupKind.LATENT, heads=1)
    made = plan(engine(latent, tp=2), engine(latent, tp=3))
    assert heads(made) == [(0, 0, 0, 1), (1, 1, 0, 1), (2, 0, 0, 1)]


def test_heads_that_one_rank_has_are_read_at_once_though_another_has_some_of_them_too() -> None:
    source = engine(group(), tp=[[(0, 4), (2, 2)]])
    assert heads(plan(source, engine(group()))) == [(0, 0, 0, 4)]


def test_a_replica_that_nobody_needs_is_idle() -> None:
    latent = group("mla", kind=GroupKind.LATENT, heads=1)
    made = plan(engine(latent, tp=8), engine(latent, tp=1))
    assert [(part.source_rank, part.target_rank) for part in made.parts] == [(0, 0)]


def test_pipeline_stages_meet_by_layer_names() -> None:
    one = group(layers=3)
    made = plan(
        engine(one, stages=[["full.0"], ["full.1", "full.2"]]),
        engine(one, stages=[["full.0", "full.1"], ["full.2"]]),
    )
    met = [
        (part.target_rank, part.source_rank, [layer[0] for lane in part.lanes for layer in lane.layers])
        for part in made.parts
    ]
    assert met == [(0, 0, [0]), (0, 1, [1]), (1, 1, [2])]


def test_layers_may_be_listed_in_another_order() -> None:
    made = plan(engine(group(layers=["a", "b"])), engine(group(layers=["b", "a"])))
    page = 4 * 4 * 2
    assert made.parts[0].lanes[0].layers == ((0, 0, 8 * page), (1, 8 * page, 0))


def test_groups_may_be_listed_in_another_order() -> None:
    full, sliding = group(), group("sliding", kind=GroupKind.SLIDING, window=8)
    assert plan(engine(full, sliding), engine(sliding, full)).target_groups == (1, 0)


def test_a_draft_group_may_be_missing_on_either_side() -> None:
    draft = group("draft", optional=True)
    assert plan(engine(draft, group()), engine(group())).target_groups == (None, 0)
    assert plan(engine(group()), engine(draft, group())).target_groups == (1,)
    assert plan(engine(draft, group()), engine(group(), draft)).target_groups == (1, 0)


def test_context_parallel_ranks_meet_their_like() -> None:
    made = plan(engine(group(), dcp=2), engine(group(), tp=2, dcp=2))
    assert heads(made) == [(0, 0, 0, 2), (1, 1, 0, 2), (2, 0, 2, 4), (3, 1, 2, 4)]


def test_heads_of_a_token_opaque_page_can_still_be_dealt_out() -> None:
    one = group(cells=PER_HEAD)
    assert heads(plan(engine(one, tp=2), engine(one, tp=1))) == [(0, 0, 0, 2), (0, 1, 2, 4)]


def test_states_need_no_equal_blocks() -> None:
    source, target = (group("m", kind=GroupKind.STATE, cells=OPAQUE, block_tokens=n) for n in (512, 64))
    assert len(plan(engine(source), engine(target)).parts) == 1


def changed(**how: object) -> EngineLayout:
    return engine(group(**how))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("source", "target", "detail"),
    [
        (engine(group()), engine(group(), dcp=2), "dcp: source has 1, target has 2"),
        (engine(group("a")), engine(group("a"), group("b")), "groups: source has not 'b', target has"),
        (engine(group("a"), group("b")), engine(group("b")), "groups: source has 'a', target has not"),
        (engine(group("a")), engine(group("b")), "groups: source has 'a', target has not"),
        (changed(), changed(kind=GroupKind.LATENT), "group 'full' kind: source has full, target has latent"),
        (
            changed(kind=GroupKind.SLIDING, window=4),
            changed(kind=GroupKind.SLIDING, window=5),
            "group 'full' window: source has 4, target has 5",
        ),
        (changed(layers=2), changed(layers=3), "group 'full' layers: source has 2, target has 3"),
        (
            changed(layers=["a", "b", "c"]),
            changed(layers=["a", "x", "y"]),
            "group 'full' layers: source has 'b', target has not",
        ),
        (changed(heads=4), changed(heads=8), "group 'full' heads: source has 4, target has 8"),
        (changed(dtype="fp8"), changed(), "group 'full' dtype: source has fp8, target has bfloat16"),
        (
            changed(cells=OPAQUE, block_tokens=4),
            changed(cells=OPAQUE, block_tokens=8),
            "group 'full' block_tokens: source has 4, target has 8",
        ),
        (
            changed(cells=PER_HEAD, block_tokens=4),
            changed(block_tokens=8),
            "group 'full' block_tokens: source has 4, target has 8",
        ),
        (
            engine(group(block_tokens=4), dcp=2),
            engine(group(block_tokens=8), dcp=2),
            "group 'full' block_tokens: source has 4, target has 8",
        ),
        (
            changed(cells=(Cell("k", 2), Cell("v", 2))),
            changed(cells=(Cell("kv", 4),)),
            "group 'full' cells: source has k 2 B per token, v 2 B per token, target has kv 4 B per token",
        ),
        (
            engine(group(cells=OPAQUE), tp=2),
            engine(group(cells=OPAQUE), tp=1),
            "group 'full' (first head, heads) of an opaque page: source has (0, 2), target has (0, 4)",
        ),
        (
            engine(group(), tp=[[(0, 2), (3, 1)]]),
            engine(group()),
            "group 'full' ranks: source has head 2 of 'full.0' on none",
        ),
        (
            engine(group()),
            engine(group(), stages=[["full.0"]]),
            "group 'full' ranks: target has head 0 of 'full.1' on none",
        ),
    ],
)
def test_what_cannot_be_mapped_is_refused_by_the_first_differing_field(
    source: EngineLayout, target: EngineLayout, detail: str
) -> None:
    with pytest.raises(ProtocolError) as error:
        plan(source, target)
    assert error.value.reason is Reason.INCOMPATIBLE
    assert error.value.detail == detail


def test_another_interleave_of_context_parallel_ranks_is_refused() -> None:
    source = engine(group(), dcp=2)
    target = EngineLayout(source.groups, source.ranks, dcp=2, dcp_interleave=2)
    with pytest.raises(ProtocolError, match="dcp_interleave: source has 1, target has 2"):
        plan(source, target)


def test_an_order_that_shreds_pages_is_refused() -> None:
    def side(order: str, tokens: int) -> EngineLayout:
        return engine(group(heads=4, block_tokens=tokens), order=order)

    fits = PAGE_PIECES_MAX // 4
    assert plan(side("HNP", fits), side("NHP", fits)).parts[0].pieces == PAGE_PIECES_MAX
    with pytest.raises(ProtocolError, match="planes: source has another order"):
        plan(side("HNP", fits + 1), side("NHP", fits + 1))


@pytest.mark.parametrize(
    ("orders", "sizes", "pieces"),
    [
        (("HNP", "HNP"), (4, 4), 1),  # a page is one run
        (("NHP", "NHP"), (4, 4), 1),
        (("HNP", "NHP"), (4, 4), 16),  # every cell for itself
        (("HNP", "HNP"), (4, 8), 4 * 2),  # a run per head, and a source block meets up to two target blocks
        (("HNP", "HNP"), (8, 4), 4 * 3),
    ],
)
def test_a_part_knows_how_many_spans_a_page_makes(orders: tuple[str, str], sizes: tuple[int, int], pieces: int) -> None:
    source, target = (engine(group(block_tokens=size), order=order) for order, size in zip(orders, sizes, strict=True))
    assert plan(source, target).parts[0].pieces == pieces


@settings(deadline=None, derandomize=True, max_examples=100)
@given(st.integers(1, 12), st.integers(1, 9), st.integers(1, 9))
def test_every_target_rank_gets_each_of_its_heads_once(count: int, source_tp: int, target_tp: int) -> None:
    one: Group = group(heads=count)
    made = plan(engine(one, tp=source_tp), engine(one, tp=target_tp))
    for rank, (start, size) in enumerate(even(count, target_tp)):
        got = [head for at, _, lo, hi in heads(made) if at == rank for head in range(lo, hi)]
        assert got == list(range(start, start + size))


def without(layout: EngineLayout, lack: Callable[[int, int], bool]) -> EngineLayout:
    """The same, but for the layers that a rank lacks."""
    ranks = []
    for number, rank in enumerate(layout.ranks):
        (share,) = rank.shares
        kept = tuple(place for place in share.places if not lack(number, place.layer))
        ranks.append(msgspec.structs.replace(rank, shares=(msgspec.structs.replace(share, places=kept),)))
    return validate(msgspec.structs.replace(layout, ranks=tuple(ranks)))


class TestEffort:
    """One of the two layouts is a peer's, who may have drawn it so that a mapping costs as much as can be."""

    @pytest.mark.parametrize(
        ("ours", "theirs"),
        [
            (wide(16, 128, per=1), wide(16, 128, per=1)),
            (wide(64, 128, per=1), wide(64, 128, per=1)),
            (wide(8, 126, per=1), wide(64, 126, per=1)),
            (wide(48, 128, heads=96, per=2), wide(64, 128, heads=96, per=3)),
            (wide(1, 80), wide(1, 80, order="NHP")),  # another order of axes, which moves in 256 runs a page
        ],
    )
    def test_engines_that_exist_are_mapped(self, ours: EngineLayout, theirs: EngineLayout) -> None:
        assert plan(ours, theirs).parts and plan(theirs, ours).parts

    @pytest.mark.parametrize(
        ("ours", "theirs"),
        [
            (wide(8, 128, per=1), wide(64, 128)),  # each of theirs takes everything from all of ours
            (wide(1, 128), wide(64, 128, apart=True)),  # no two layers in one lane
            (wide(1, 128, heads=96, per=96), without(wide(99, 128, heads=96, per=48, step=1), operator.eq)),
            (wide(8, 1, heads=64), wide(256, 1, heads=64, per=64)),
        ],
    )
    def test_a_layout_that_is_costly_to_map_is_refused(self, ours: EngineLayout, theirs: EngineLayout) -> None:
        with pytest.raises(ProtocolError) as error:
            plan(ours, theirs)
        assert error.value.reason is Reason.INCOMPATIBLE
        assert (
            error.value.detail
            == "ranks: their shares differ in so many ways that a mapping takes more than 32768 steps"
        )

    def test_planes_that_shred_a_block_over_all_ranks_are_refused(self) -> None:
        """Each page alone is within its bound."""
        with pytest.raises(ProtocolError, match="planes: what one block holds on all ranks would move in more than"):
            plan(wide(8, 64, heads=64), wide(8, 64, heads=64, order="NHP"))

    def test_a_plan_counts_runs_not_cells(self) -> None:
        """Keys and values side by side are twice the pieces, and one run."""
        assert plan(wide(64, 128, per=1, order="HNP"), wide(64, 128, per=1, order="HNP")).parts[0].pieces == 32
