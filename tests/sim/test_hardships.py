"""What makes worlds hard is met in them: counted over seeds, and by what only such worlds can show."""

from __future__ import annotations

import random

import pytest

from kvbaton.protocol.geometry.layout import GroupKind, Per
from kvbaton.protocol.ids import PutId
from kvbaton_proof.sim.hardship import hardships
from kvbaton_proof.sim.hardship.world_plan import Plan
from kvbaton_proof.sim.promises import Broken
from kvbaton_proof.sim.world.sim_device import Device
from kvbaton_proof.sim.world.sim_memory import Shape, page_stamp, same_tokens
from kvbaton_proof.sim.world.sim_pool import Pool
from kvbaton_proof.sim.world.sim_store import SimStore
from kvbaton_proof.sim.world.world import World

from .seen_seeds import SeenSeeds, plan_of

PLANS = range(400)


@pytest.fixture(scope="module")
def plans() -> list[Plan]:
    return [plan_of(seed) for seed in PLANS]


def test_they_hold(seen: SeenSeeds) -> None:
    assert [(result.seed, result.what) for result in seen.results if not result.holds] == []
    assert all(result.handoffs for result in seen.results)


@pytest.mark.parametrize("how", ["with a good first block", "with one group good and one not", "partly, in one group"])
def test_commits_are_partly_stale(seen: SeenSeeds, how: str) -> None:
    assert seen.stale[how] > 0


@pytest.mark.parametrize(
    "fault",
    ["nibbled", "early_blocks", "store_read_on", "cache_replaced", "port_threw_late", "store_threw_late",
     "receive_threw", "ticket_of_nobody", "plane_shut", "lost", "pins_waited", "pins_refused"],
)  # fmt: skip
def test_it_is_met(seen: SeenSeeds, fault: str) -> None:
    assert seen.faults[fault] > 0


def test_frames_are_lost_where_every_handoff_is_demanded(seen: SeenSeeds) -> None:
    lossy = [each for each in seen.results if each.profile == "healthy" and each.faults.get("lost")]
    assert lossy and all(each.holds for each in lossy), "no handoff of these may fail (`check_healthy`)"


@pytest.mark.parametrize("reason", ["busy", "quarantine_full", "stale", "peer_unknown", "unreachable"])
def test_ends_that_bounds_and_hardships_bring(seen: SeenSeeds, reason: str) -> None:
    assert any(result.ends.get(reason) for result in seen.results)


def test_worlds_of_every_shape_are_drawn(plans: list[Plan]) -> None:
    shapes = [each.shape for plan in plans for each in (*plan.prefill, *plan.decode)]
    assert {kind for shape in shapes for kind in shape.kinds} >= {
        GroupKind.FULL,
        GroupKind.LATENT,
        GroupKind.SLIDING,
        GroupKind.CHUNKED,
        GroupKind.STATE,
    }
    assert {shape.per for shape in shapes} == set(Per)
    assert {shape.stages for shape in shapes} == {1, 2} == {shape.regions for shape in shapes}
    assert {shape.order for shape in shapes} == {"HNP", "NHP", "PHN", "PNH"}
    sizes = {(p.shape.block_tokens, d.shape.block_tokens) for plan in plans for p in plan.prefill for d in plan.decode}
    assert any(p < d for p, d in sizes) and any(p > d for p, d in sizes) and (4, 6) in sizes
    assert any(len(plan.prefill[0].shape.group_layers) > len(plan.decode[0].shape.group_layers) for plan in plans)


def test_other_worlds_are_drawn_too(plans: list[Plan]) -> None:
    hard = [plan.hardships for plan in plans]
    assert {each.epochs for each in hard} == {"exact", "none", "stolen"}
    assert any(len({*plan.prefill, *plan.decode}) == 8 for plan in plans)
    assert any(plan.decode[0].settings.seats_per_peer_max == 2 for plan in plans)
    assert any(plan.prefill[0].transports == ("cma",) and plan.profile == "writes" for plan in plans)
    plain = [each for plan in plans for each in plan.prefill if each.shape.stages == 1 and not each.shape.window]
    assert len(plain) > len(plans) / 2, "the old worlds are still there"


def test_a_hardship_changes_nothing_else_of_a_world() -> None:
    rng = random.Random(4)
    before = rng.getstate()
    one, other = hardships.beside(rng, "one").random(), hardships.beside(rng, "other").random()
    hardships.draw(rng, "all")
    assert rng.getstate() == before and one != other == hardships.beside(rng, "other").random()


class Door:
    """What a pool needs of a door."""

    class epochs:
        are_told = None
        raised: list[int] = []  # noqa: RUF012

        @classmethod
        def raise_epoch(cls, block: int) -> None:
            cls.raised.append(block)


@pytest.mark.parametrize("reuses_soon", [True, False])
def test_the_end_of_a_prompt_is_reused_first(reuses_soon: bool) -> None:
    pool = Pool(9, Door())  # type: ignore[arg-type]
    pool.reuses_soon = reuses_soon
    prompt = pool.allocate(8 if not reuses_soon else 4)
    pool.drop(prompt)
    assert pool.allocate(2) == prompt[:-3:-1]


def test_what_was_reused_untold_begins_a_new_epoch_with_its_next_pin() -> None:
    door = Door()
    pool = Pool(3, door)  # type: ignore[arg-type]
    pool.steals = lambda: True
    taken = pool.allocate(2)
    pool.unpin(taken)
    assert not door.epochs.are_told(taken)  # type: ignore[misc]
    door.epochs.raised.clear()
    pool.before_pin(pool.allocate(1))
    assert door.epochs.raised == taken[1:] and door.epochs.are_told(taken[1:])  # type: ignore[misc]


def test_a_store_that_was_told_to_stop_reads_on() -> None:
    world = World(1)
    read: list[float] = []
    store = SimStore(world, 0.0, reads_on=True, on_read=lambda blocks, keys: read.append(world.now))
    store.open[PutId(1)] = ((3,),), (b"key",)
    store.cancel(PutId(1))
    assert not store.drain()
    world.run(10.0)
    assert read and [ended.put for ended in store.drain()] == [1] and not store.open


@pytest.mark.parametrize("order", ["HNP", "NHP", "PHN", "PNH"])
def test_tokens_are_found_in_every_order(order: str) -> None:
    shape = Shape(block_tokens=4, order=order, apart=True)
    whole, part = (page_stamp(shape, 1, 0, 0, 0, valid) for valid in (4, 3))
    assert same_tokens(shape, part, whole, 3) and not same_tokens(shape, part, whole, 4)
    assert same_tokens(shape, part, whole, 3, first=2) and not same_tokens(shape, part, whole, 4, first=2)


def test_a_window_is_listed_from_where_the_next_token_reads() -> None:
    shape = Shape(kinds=(GroupKind.SLIDING,), window=4, block_tokens=2)
    assert shape.listed(0, [7, 8, 9, 10], 8) == [-1, -1, 9, 10], "tokens 5 to 7, and the one that is decoded"
    assert shape.listed(0, [7, 8, 9], 5) == [-1, 8, 9]
    assert shape.groups[0].needed(8)[0] == 2 and shape.groups[0].needed(5)[0] == 1


def test_a_state_is_one_block_and_other_bytes_after_each_token() -> None:
    shape = Shape(kinds=(GroupKind.FULL, GroupKind.STATE), group_layers=(1, 1), blocks=4)
    device = Device(World(1), "d", shape, [bytearray(shape.region_bytes)])
    blocks = ([1, 2], [3])
    assert shape.listed(1, blocks[1], 4) == [3] and shape.groups[1].needed(4) == (0, 1)
    device.write(7, blocks, 0, 4, 0, 1)
    device.check(7, blocks, 4, [0], [1], "r")
    for content, tokens in ((7, 3), (8, 4)):
        with pytest.raises(Broken, match="the state is not that after"):
            device.check(content, blocks, tokens, [0], [1], "r")
