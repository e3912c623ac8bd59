"""A rank's memory behind the store: blocks go in and come back, and nothing else of the memory is touched."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from kvbaton.engines.embedded.engine_config import CacheConfig, ModelConfig
from kvbaton.engines.embedded.memory.kv_layout import engine_layout
from kvbaton.engines.embedded.memory.kv_memory import KvGeometry
from kvbaton.protocol.content import Content
from kvbaton.protocol.errors import Reason
from kvbaton.ranks.rank_store import LocalRankStore, rank_store_settings, rank_values
from kvbaton.store.interface import OrderEnded, OrderId, chain
from kvbaton.store.memory_backend import MemoryBackend
from kvbaton.testing.store_harness import FaultyBackend
from kvbaton.testing.transport_harness import poll

BLOCKS, TIMEOUT_S = 12, 10.0
HASHES = list(chain(Content(list(range(64)), 64), 16))


@dataclass
class Side:
    shelf: LocalRankStore
    region: memoryview
    geometry: KvGeometry
    last: int = 0

    def order(self) -> OrderId:
        self.last += 1
        return OrderId(self.last)

    def end(self, order: OrderId) -> OrderEnded:
        found: list[OrderEnded] = []

        def ended() -> bool:
            found.extend(self.shelf.drain())
            return bool(found)

        assert poll(ended, 20) and [end.order for end in found] == [order]
        return found[0]

    def put(self, blocks: list[int]) -> OrderEnded:
        order = self.order()
        assert self.shelf.put(order, HASHES[: len(blocks)], blocks, TIMEOUT_S)
        return self.end(order)

    def get(self, blocks: list[int]) -> OrderEnded:
        order = self.order()
        assert self.shelf.get(order, HASHES[: len(blocks)], blocks, TIMEOUT_S)
        return self.end(order)

    def block(self, block: int) -> bytes:
        geometry = self.geometry
        pages = [geometry.offset(layer, block) for layer in range(geometry.model.layers)]
        return b"".join(self.region[at : at + geometry.page_bytes] for at in pages)


def side(backend: object, layout: str = "LB") -> Side:
    geometry = KvGeometry(ModelConfig(), CacheConfig(blocks=BLOCKS, layout=layout))
    region = memoryview(bytearray(os.urandom(geometry.region_bytes)))
    values = rank_values(engine_layout(geometry), 0, "c" * 32)
    return Side(LocalRankStore(backend, values, [region]), region, geometry)


@pytest.fixture
def faulty() -> FaultyBackend:
    return FaultyBackend(MemoryBackend(1 << 24))


@pytest.fixture
def p(faulty: FaultyBackend) -> Iterator[Side]:
    found = side(faulty)
    yield found
    faulty.go_on()
    found.shelf.close()


def test_blocks_that_one_engine_put_land_in_the_blocks_of_another(faulty: FaultyBackend, p: Side) -> None:
    d = side(faulty, "BL")
    assert p.put([7, 2, 9]) == OrderEnded(OrderId(1), 3)
    untouched = {block: d.block(block) for block in range(BLOCKS) if block not in (1, 5, 3)}
    order = d.order()
    assert d.shelf.lookup(order, HASHES, TIMEOUT_S)
    assert d.end(order).count == 3
    assert d.get([1, 5, 3, 4]).count == 3, "the fourth is not there"
    assert [d.block(block) for block in (1, 5, 3)] == [p.block(block) for block in (7, 2, 9)]
    assert {block: d.block(block) for block in untouched} == untouched
    assert d.shelf.counters["get.keys"] == 3
    d.shelf.close()


def test_a_block_that_does_not_exist_ends_the_order_and_wakes(p: Side) -> None:
    rung: list[int] = []
    p.shelf.set_waker(lambda: rung.append(1))
    order = p.order()
    assert p.shelf.put(order, HASHES[:1], [BLOCKS], TIMEOUT_S)
    assert rung
    assert p.end(order) == OrderEnded(order, 0, Reason.BAD_SPAN, f"block {BLOCKS} is outside 0..{BLOCKS - 1}")


def test_pins_are_counted_while_a_put_reads_and_none_is_left(faulty: FaultyBackend, p: Side) -> None:
    faulty.hangs.add("exists")
    order = p.order()
    assert p.shelf.put(order, HASHES[:2], [1, 2], TIMEOUT_S)
    assert p.shelf.counters["pins"] == 2
    faulty.go_on()
    assert p.end(order).reason is None
    assert p.shelf.counters["pins"] == 0


def test_a_cancelled_order_and_a_closed_store_end_what_is_open(faulty: FaultyBackend, p: Side) -> None:
    faulty.hangs.add("exists")
    order = p.order()
    assert p.shelf.put(order, HASHES[:2], [1, 2], TIMEOUT_S)
    p.shelf.cancel(order)
    assert p.end(order).reason is Reason.CANCELLED
    order = p.order()
    assert p.shelf.put(order, HASHES[:2], [1, 2], TIMEOUT_S)
    p.shelf.close()  # waits for a second at most, which a busy machine may need to end it
    assert p.end(order).reason is Reason.CANCELLED
    assert p.shelf.counters["pins"] == 0
    assert not p.shelf.lookup(p.order(), HASHES, TIMEOUT_S), "closed: nothing begins"


@pytest.mark.parametrize(("value_bytes", "per_call"), [(1, 64), (1 << 20, 64), (4 << 20, 16), (1 << 30, 1)])
def test_a_call_moves_a_bounded_number_of_bytes(value_bytes: int, per_call: int) -> None:
    assert rank_store_settings(value_bytes).values_per_call_max == per_call
