"""A device's memory behind the store: blocks go in and come back through pinned slots, and nothing is left of them.

The device is made of host memory (tests/transports/device/fake_gpu.py), the store is kvbaton's own, in memory or
served.
"""

from __future__ import annotations

import os
import threading
from array import array
from collections.abc import Iterator, Sequence

import pytest

from kvbaton.protocol.content import Content
from kvbaton.protocol.errors import Reason
from kvbaton.ranks import device_store
from kvbaton.ranks.device_store import DeviceRankStore, StagingShape
from kvbaton.ranks.rank_store import LocalRankStore, NotStorable, RankValues, Run
from kvbaton.store.interface import Backend, OrderEnded, OrderId, Space, chain
from kvbaton.store.memory_backend import MemoryBackend
from kvbaton.store.value_header import ALONE
from kvbaton.testing.store_harness import FaultyBackend
from kvbaton.testing.transport_harness import poll
from kvbaton.transports.core.shared_memory import DeviceMemory
from kvbaton.transports.cuda.cuda_driver import CudaError
from kvbaton.transports.cuda.cuda_runner import PIECE_BYTES, ROW_BYTES_MAX, ROWS_MAX
from kvbaton.transports.staged.staged_slots import SLOT_BYTES
from tests.store.test_tcp_backend import LinedHarness
from tests.transports.device.fake_gpu import FakeGpu

LAYERS, BLOCKS, PAGE, GAP = 3, 12, 3000, 40  # a region for each layer, with something else between the blocks
TIMEOUT_S = 20.0
HASHES = list(chain(Content(list(range(16 * BLOCKS)), 16 * BLOCKS), 16))
LOST = CudaError("cuEventSynchronize", 700, "CUDA_ERROR_ILLEGAL_ADDRESS")
REFUSED = CudaError("cuMemHostRegister_v2", 2, "CUDA_ERROR_OUT_OF_MEMORY")


def values_of(runs: Sequence[Run], blocks: int = BLOCKS) -> RankValues:
    size = sum(run.bytes for run in runs)
    space = Space(
        compat="c" * 32, block_tokens=16, value_bytes=size, group="a", layer_start=0, layer_stop=LAYERS, part=0,
        layout="any",
    )  # fmt: skip
    return RankValues(space, blocks, tuple(runs))


VALUES = values_of([Run(layer, GAP, PAGE + GAP, PAGE) for layer in range(LAYERS)])


class SlowGpu(FakeGpu):
    def __init__(self) -> None:
        super().__init__()
        self.go_on = threading.Event()
        self.go_on.set()

    def wait(self, event: int) -> None:
        super().wait(event)
        assert self.go_on.wait(30)


class Side:
    """An engine's rank."""

    def __init__(self, backend: Backend) -> None:
        self.gpu = SlowGpu()
        size = BLOCKS * (PAGE + GAP) + GAP
        self.memory = [DeviceMemory(self.gpu.allocate(size), size) for _ in range(LAYERS)]
        for each in self.memory:
            self.view(each)[:] = os.urandom(size)
        self.shelf = DeviceRankStore(backend, VALUES, self.memory, self.gpu)
        self.rung = threading.Event()
        self.shelf.set_waker(self.rung.set)
        self.last = 0

    def view(self, memory: DeviceMemory) -> memoryview:
        return self.gpu.regions[memory.address].view

    def block(self, block: int) -> bytes:
        at = GAP + block * (PAGE + GAP)
        return b"".join(self.view(each)[at : at + PAGE] for each in self.memory)

    def everything(self) -> list[bytes]:
        return [bytes(self.view(each)) for each in self.memory]

    def order(self) -> OrderId:
        self.last += 1
        return OrderId(self.last)

    def ends(self, count: int = 1) -> dict[OrderId, OrderEnded]:
        """By the waker alone, as a host's thread does it."""
        found: list[OrderEnded] = []
        while len(found) < count:
            assert self.rung.wait(20), found
            self.rung.clear()
            found.extend(self.shelf.drain())
        assert len(found) == count
        return {end.order: end for end in found}

    def put(self, blocks: list[int], timeout_s: float = TIMEOUT_S) -> OrderEnded:
        order = self.order()
        assert self.shelf.put(order, HASHES[: len(blocks)], blocks, timeout_s)
        return self.ends()[order]

    def get(self, blocks: list[int]) -> OrderEnded:
        order = self.order()
        assert self.shelf.get(order, HASHES[: len(blocks)], blocks, TIMEOUT_S)
        return self.ends()[order]

    def close(self) -> None:
        self.gpu.go_on.set()
        self.shelf.close()
        assert not self.gpu.pinned and not self.gpu.live, "nothing is left of slots, streams and events"
        assert set(self.gpu.regions) == {each.address for each in self.memory}, "nor of shadows"


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two blocks go through a slot at a time."""
    monkeypatch.setattr(device_store, "SLOT_BYTES_WANTED", 2 * LAYERS * PAGE)


@pytest.fixture
def faulty() -> FaultyBackend:
    return FaultyBackend(MemoryBackend(1 << 24))


@pytest.fixture
def p(faulty: FaultyBackend) -> Iterator[Side]:
    side = Side(faulty)
    yield side
    faulty.go_on()
    side.close()


@pytest.fixture
def d(faulty: FaultyBackend) -> Iterator[Side]:
    side = Side(faulty)
    yield side
    faulty.go_on()
    side.close()


def test_blocks_of_one_device_land_in_the_blocks_of_another_and_nothing_else_is_touched(p: Side, d: Side) -> None:
    before, source = d.everything(), [7, 2, 9, 0, 11]
    assert p.put(source) == OrderEnded(OrderId(1), 5)
    order = d.order()
    assert d.shelf.lookup(order, HASHES, TIMEOUT_S) and d.ends()[order].count == 5
    target = [1, 5, 3, 4, 10, 8]
    assert d.get(target) == OrderEnded(OrderId(2), 5, writers=(ALONE.me,)), "the sixth is not there"
    assert [d.block(block) for block in target[:5]] == [p.block(block) for block in source]
    for layer, memory in enumerate(d.memory):
        view, old = d.view(memory), bytearray(before[layer])
        for block in target[:5]:
            at = GAP + block * (PAGE + GAP)
            old[at : at + PAGE] = view[at : at + PAGE]
        assert view == old
    assert d.gpu.calls.count("move_rows") == 3, "one launch for each slot that was filled"


def test_what_a_device_put_is_what_host_memory_gets(faulty: FaultyBackend, p: Side) -> None:
    """An engine on a CPU and one on a GPU share a store, where the KV itself is the same."""
    assert p.put([3, 4]).count == 2
    regions = [memoryview(bytearray(each.nbytes)) for each in p.memory]
    shelf = LocalRankStore(faulty, VALUES, regions)
    assert shelf.get(OrderId(1), HASHES[:2], [6, 0], TIMEOUT_S)
    ended: list[OrderEnded] = []
    assert poll(lambda: bool(ended.extend(shelf.drain()) or ended), 20)  # type: ignore[func-returns-value]
    for block, source in ((6, 3), (0, 4)):
        at = GAP + block * (PAGE + GAP)
        assert b"".join(region[at : at + PAGE] for region in regions) == p.block(source)
    shelf.close()


def test_a_served_store_is_reached_as_well() -> None:
    harness = LinedHarness()
    p, d = Side(harness.backend()), Side(harness.backend())
    try:
        assert p.put(list(range(BLOCKS))).count == BLOCKS
        assert d.get(list(reversed(range(BLOCKS)))).count == BLOCKS
        assert [d.block(BLOCKS - 1 - block) for block in range(BLOCKS)] == [p.block(block) for block in range(BLOCKS)]
    finally:
        p.close()
        d.close()
        harness.close()


def test_many_orders_share_few_slots_and_each_ends_once(p: Side, d: Side) -> None:
    assert p.put(list(range(BLOCKS))).count == BLOCKS
    orders = [d.order() for _ in range(20)]
    for order in orders:
        assert d.shelf.get(order, HASHES[:5], [0, 1, 2, 3, 4], TIMEOUT_S)
    assert {end.count for end in d.ends(20).values()} == {5}
    assert sorted(d.shelf._lanes["get"].free) == [0, 1] and sorted(d.shelf._lanes["put"].free) == [2, 3]


# --- orders that fail


@pytest.mark.parametrize(
    ("hashes", "blocks", "timeout_s", "said"),
    [
        (1, [BLOCKS], TIMEOUT_S, f"block {BLOCKS} is outside 0..{BLOCKS - 1}"), (1, [-1], TIMEOUT_S, "block -1"),
        (2, [1], TIMEOUT_S, "2 hashes for 1 blocks"), (0, [], TIMEOUT_S, "0 hashes"), (1, [1], 0.0, "timeout_s"),
        (1, [1], 1e9, "timeout_s"),
    ],
)  # fmt: skip
def test_what_cannot_be_an_order_ends_and_wakes(
    p: Side, hashes: int, blocks: list[int], timeout_s: float, said: str
) -> None:
    order = p.order()
    assert p.shelf.put(order, HASHES[:hashes], blocks, timeout_s)
    end = p.ends()[order]
    assert end.reason is Reason.BAD_SPAN and said in end.detail
    assert "pin" not in p.gpu.calls, "and nothing was pinned for it"


def test_memory_that_cannot_be_pinned_costs_misses_and_is_tried_again(p: Side) -> None:
    p.gpu.refusals["pin"] = REFUSED
    end = p.put([1, 2])
    assert end.reason is Reason.STORE_FAILED and "OUT_OF_MEMORY" in end.detail
    p.gpu.refusals.clear()
    assert p.put([1, 2]).count == 2


def test_a_device_that_is_lost_fails_orders_and_keeps_no_pin(p: Side) -> None:
    assert p.put([1, 2]).count == 2
    p.gpu.refusals["wait"] = LOST
    end = p.get([3, 4])
    assert (end.reason, end.count) == (Reason.STORE_FAILED, 0) and "ILLEGAL_ADDRESS" in end.detail
    assert p.put([5]).reason is Reason.STORE_FAILED
    p.gpu.refusals.clear()
    assert p.shelf.counters["pins"] == 0


def test_a_store_that_fails_keeps_no_pin_and_no_slot(faulty: FaultyBackend, p: Side) -> None:
    faulty.raises["put"] = OSError("gone")
    for _ in range(3):
        assert p.put([1, 2, 3]).reason is Reason.STORE_FAILED
    assert p.shelf.counters["pins"] == 0 and sorted(p.shelf._lanes["put"].free) == [2, 3]


def test_bytes_that_are_not_what_the_key_names_do_not_reach_the_device(faulty: FaultyBackend, p: Side, d: Side) -> None:
    assert p.put([1, 2]).count == 2
    before = d.everything()
    faulty.spoils = True
    assert d.get([3, 4]).count == 0
    assert d.everything() == before and "move_rows" not in d.gpu.calls


def test_a_store_that_hangs_ends_the_order_by_its_time_out(faulty: FaultyBackend, p: Side) -> None:
    faulty.hangs.add("exists")
    assert p.put([1, 2], timeout_s=0.1).reason is Reason.TRANSFER_TIMEOUT
    assert p.shelf.counters["pins"] == 0


def test_who_waits_for_a_slot_ends_by_his_time_out_too(faulty: FaultyBackend, p: Side) -> None:
    faulty.hangs.add("exists")
    holding = [p.order(), p.order()]
    for order in holding:
        assert p.shelf.put(order, HASHES[:1], [1], TIMEOUT_S)
    late = p.order()
    assert p.shelf.put(late, HASHES[:1], [2], 0.05)
    seen: list[OrderEnded] = []
    assert poll(lambda: bool(seen.extend(p.shelf.drain()) or seen), 10)  # type: ignore[func-returns-value]
    assert [(end.order, end.reason) for end in seen] == [(late, Reason.TRANSFER_TIMEOUT)]
    faulty.go_on()
    assert {end.reason for end in p.ends(2).values()} == {None}


# --- cancelling and closing


def test_a_get_ends_when_the_device_is_done_and_not_before(p: Side, d: Side) -> None:
    assert p.put([1, 2]).count == 2
    d.gpu.go_on.clear()
    order = d.order()
    assert d.shelf.get(order, HASHES[:2], [3, 4], TIMEOUT_S)
    assert poll(lambda: not d.shelf.drain() and "move_rows" in d.gpu.calls, 20)
    d.shelf.cancel(order)
    assert d.shelf.drain() == [], "cancelled, but a launch is at it"
    d.gpu.go_on.set()
    assert d.ends()[order].count == 2


@pytest.mark.parametrize("act", ["cancel", "close"])
def test_orders_in_every_state_end_by_a_cancel_or_a_close(faulty: FaultyBackend, p: Side, act: str) -> None:
    faulty.hangs.add("exists")
    orders = [p.order() for _ in range(5)]  # two have slots, three wait
    for order in orders[:4]:
        assert p.shelf.put(order, HASHES[:3], [1, 2, 3], TIMEOUT_S)
    assert p.shelf.lookup(orders[4], HASHES[:3], TIMEOUT_S)
    assert p.shelf.counters["pins"] == 12
    assert poll(lambda: bool(p.shelf.drain()) or faulty.inside > 0, 20)
    if act == "close":
        p.shelf.close()
    for order in orders if act == "cancel" else ():
        p.shelf.cancel(order)
    ends = p.ends(5)
    assert {end.reason for end in ends.values()} == {Reason.CANCELLED}
    assert p.shelf.counters["pins"] == 0
    if act == "close":
        assert not p.shelf.put(p.order(), HASHES[:1], [1], TIMEOUT_S), "closed: nothing begins"


def test_a_store_that_nobody_used_pins_nothing_and_closes(p: Side) -> None:
    p.shelf.close()
    assert p.gpu.calls.count("pin") == 0


def test_there_is_a_bound_on_orders(p: Side, faulty: FaultyBackend) -> None:
    faulty.hangs.add("exists")
    taken = 0
    while p.shelf.put(p.order(), HASHES[:1], [1], TIMEOUT_S):
        taken += 1
        assert taken <= 1000
    assert not p.shelf.lookup(p.order(), HASHES[:1], TIMEOUT_S)
    faulty.go_on()
    assert len(p.ends(taken)) == taken
    assert p.put([1]).reason is None


# --- the tables


def test_rows_name_every_byte_of_a_block_once_and_are_short_enough() -> None:
    long = ROW_BYTES_MAX + 7
    memory = [DeviceMemory(1 << 20, 3 * long), DeviceMemory(1 << 30, 64)]
    shape = StagingShape(values_of([Run(0, 0, long, long), Run(1, 8, 16, 5)], 3), memory)
    rows = array("q", shape.rows([2, 0], gathers=True))
    found = [tuple(rows[at : at + 3]) for at in range(0, len(rows), 3)]
    assert max(size for *_, size in found) <= PIECE_BYTES
    size = long + 5
    places = [(0, 2 * long, long), (long, (1 << 30) - (1 << 20) + 8 + 32, 5), (size, 0, long)]
    places.append((size + long, (1 << 30) - (1 << 20) + 8, 5))
    wanted = {(to + i, at + i) for to, at, count in places for i in range(count)}
    named = [(to + i, at + i) for to, at, count in found for i in range(count)]
    assert set(named) == wanted and len(named) == len(wanted)
    back = array("q", shape.rows([2, 0], gathers=False))
    assert {(back[at + 1], back[at], back[at + 2]) for at in range(0, len(back), 3)} == set(found)


@pytest.mark.parametrize("size", [1, 100, 4096, 1 << 20, 2 << 20, 20 << 20, 64 << 20])
def test_slots_hold_values_of_any_size(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    shape = StagingShape(values_of([Run(0, 0, size, size)], 2), [DeviceMemory(4096, 2 * size)])
    assert shape.slot_bytes in SLOT_BYTES and shape.slot_bytes % size == 0
    assert 1 <= shape.per_slot <= shape.stride and shape.per_slot * size <= shape.slot_bytes


def test_a_value_of_many_pieces_fits_one_launch() -> None:
    runs = [Run(0, 16 * piece, 1 << 20, 8) for piece in range(4096)]
    assert StagingShape(values_of(runs, 2), [DeviceMemory(4096, 2 << 20)]).per_slot * 4096 <= ROWS_MAX


def test_values_that_no_slot_holds_and_blocks_outside_their_region_are_refused() -> None:
    size = (64 << 20) + 1
    with pytest.raises(NotStorable, match=f"{size} bytes"):
        StagingShape(values_of([Run(0, 0, size, size)], 1), [DeviceMemory(4096, size)])
    with pytest.raises(ValueError, match="ends before its last block"):
        StagingShape(values_of([Run(0, 0, 100, 100)], 3), [DeviceMemory(4096, 299)])
