"""Cases about what a store is for: what one engine puts another gets, whole, and nothing else."""

from __future__ import annotations

from kvbaton.protocol.errors import Reason
from kvbaton.store.interface import Get, OrderId, Put
from kvbaton.testing.store_case import NOTHING, VALUE_BYTES, StoreCases, blank, data, engine, names, values
from kvbaton.testing.store_harness import StoreHarness

CASES = StoreCases()


@CASES.add()
def what_one_engine_puts_another_gets(harness: StoreHarness) -> None:
    with engine(harness) as p, engine(harness) as d:
        p.kept(names(11), values(11))
        assert d.end(d.lookup(names(11))).count == 11
        into = blank(11)
        assert (end := d.end(d.get(names(11), into))).count == 11 and end.reason is None
        assert data(into) == data(values(11))


@CASES.add()
def a_partial_get_is_a_shorter_prefix(harness: StoreHarness) -> None:
    with engine(harness) as p, engine(harness) as d:
        p.kept(names(6), values(6))
        assert d.end(d.lookup(names(9))).count == 6
        into = blank(9)
        end = d.end(d.get(names(9), into))
        assert (end.count, end.reason) == (6, None)
        assert data(into) == data(values(6)) + [NOTHING] * 3


@CASES.add()
def nothing_behind_a_hole_is_found_or_landed(harness: StoreHarness) -> None:
    with engine(harness) as p:
        some, kept = names(7), values(7)
        p.kept(some[:2] + some[3:], kept[:2] + kept[3:])
        assert p.end(p.lookup(some)).count == 2
        into = blank(7)
        assert p.end(p.get(some, into)).count == 2
        assert data(into) == data(kept[:2]) + [NOTHING] * 5


@CASES.add()
def another_prompt_finds_nothing(harness: StoreHarness) -> None:
    with engine(harness) as p:
        p.kept(names(3), values(3))
        assert p.end(p.lookup(names(3, seed=1))).count == 0
        into = blank(3)
        end = p.end(p.get(names(3, seed=1), into))
        assert (end.count, end.reason) == (0, None)
        assert data(into) == [NOTHING] * 3


@CASES.add()
def what_is_there_is_not_put_again(harness: StoreHarness) -> None:
    with engine(harness) as p, engine(harness) as q:
        p.kept(names(3), values(3))
        q.kept(names(3), values(3, seed=9))
        assert q.faulty.calls["put"] == 0
        q.kept(names(5), values(5))
        into = blank(5)
        assert p.end(p.get(names(5), into)).count == 5
        assert data(into) == data(values(3)) + data(values(5))[3:], "the first one's values stay"


@CASES.add()
def a_damaged_value_is_a_miss_and_can_be_put_again(harness: StoreHarness) -> None:
    with engine(harness) as p:
        p.kept(names(3), values(3))
        p.faulty.spoils = True
        into = blank(3)
        end = p.end(p.get(names(3), into))
        assert (end.count, end.reason) == (0, None) and "damaged" in end.detail
        assert data(into) == [NOTHING] * 3, "bytes that were known to be wrong reached the engine"
        assert p.store.counters["damaged"] == 3
        p.faulty.spoils = False
        p.kept(names(3), values(3))
        assert p.end(p.get(names(3), into)).count == 3
        assert data(into) == data(values(3))


@CASES.add()
def an_order_that_makes_no_sense_is_refused_by_the_field(harness: StoreHarness) -> None:
    with engine(harness) as p:
        for field, wrong in (
            ("keys", Put(OrderId(1), (), (), (), 1.0)),
            ("keys", Put(OrderId(1), ("Not a key",), values(1), (0,), 1.0)),
            ("values", Put(OrderId(1), names(2), values(1), (0,), 1.0)),
            ("into", Get(OrderId(1), names(2), blank(1), 1.0)),
            ("timeout_s", Put(OrderId(1), names(1), values(1), (0,), 0.0)),
        ):
            try:
                p.store.submit(wrong)
            except ValueError as error:
                assert str(error).startswith(f"{field}:"), error
            else:
                raise AssertionError(f"{field}: accepted")
        assert not p.pins.released, "pinned before it was checked"


@CASES.add()
def memory_that_cannot_be_a_value_ends_the_order_alone(harness: StoreHarness) -> None:
    with engine(harness) as p:
        size = VALUE_BYTES + 1
        strided, words = memoryview(bytearray(8))[::2], memoryview(bytearray(8)).cast("H")
        for piece in (memoryview(b""), memoryview(bytearray(size)), strided, words):
            end = p.end(p.put(names(2), (*values(1), (piece,))))
            assert end.reason is Reason.BAD_SPAN and end.detail.startswith("values:"), end
            p.pins.check()
        assert p.end(p.get(names(1), ((memoryview(bytes(8)),),))).reason is Reason.BAD_SPAN
        p.kept(names(2), values(2))
