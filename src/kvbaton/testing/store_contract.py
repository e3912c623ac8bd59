"""The contract of `Store` as a public suite: run it on any `Backend`, the ones here or your own.

    @pytest.mark.parametrize("case", check_store.cases, ids=str)
    def test_my_back_end_keeps_the_contract(case: StoreCase) -> None:
        case(MyHarness())

or `check_store(harness)` for all of it at once. A case that needs what the harness does not offer raises
`unittest.SkipTest`. Cases assert laws, never speed.
"""

from __future__ import annotations

import time
import unittest
from functools import partial

from kvbaton.protocol.errors import Reason
from kvbaton.store.interface import Get, Lookup, OrderId, Pieces, Put
from kvbaton.testing.store_case import (
    NOTHING,
    SOON_S,
    VALUE_BYTES,
    Engine,
    StoreCase,
    StoreCases,
    blank,
    data,
    engine,
    names,
    values,
)
from kvbaton.testing.store_harness import StoreHarness
from kvbaton.testing.transport_harness import idle_cpu_s, poll

CLOSE_S = 20.0
IDLE_S = 1.0
IDLE_CPU_S = 0.01
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


def _fails(p: Engine, count: int = 6) -> None:
    """A put fails, says so, and leaves no pin."""
    end = p.end(p.put(names(count), values(count)))
    assert end.reason is Reason.STORE_FAILED, end
    p.pins.check()


def _hung(p: Engine, source: tuple[Pieces, ...]) -> bool:
    """A put ends in time and leaves no pin; whether its call hangs, and was not given up by a busy machine before."""
    end = p.end(p.put(names(len(source)), source, SOON_S))
    late = end.reason is Reason.TRANSFER_TIMEOUT
    assert late or (end.reason is not None and p.store.counters["stuck"]), end
    p.pins.check()
    return late and poll(lambda: p.faulty.inside > 0, SOON_S)


@CASES.add()
def an_existence_check_that_raises_leaves_no_pin(harness: StoreHarness) -> None:
    with engine(harness) as p:
        p.faulty.raises["exists"] = RuntimeError("the store is down")
        _fails(p)
        assert p.faulty.calls["put"] == 0
        assert p.store.counters["errors.exists"] == 1


@CASES.add()
def a_put_that_raises_leaves_no_pin(harness: StoreHarness) -> None:
    for count in (2, 9):  # one call, several calls
        with engine(harness) as p:
            p.faulty.raises["put"] = RuntimeError("the wire is down")
            _fails(p, count)
            assert p.faulty.calls["put"] == 1, "the rest was put behind a hole"


@CASES.add()
def errors_of_single_keys_leave_no_pin_and_are_a_shorter_prefix(harness: StoreHarness) -> None:
    with engine(harness) as p, engine(harness) as d:
        p.faulty.refuses[names(6)[1]] = "no room"
        end = p.end(p.put(names(6), values(6)))
        assert (end.count, end.reason, end.detail) == (3, Reason.STORE_FAILED, "no room")
        p.pins.check()
        into = blank(6)
        assert d.end(d.get(names(6), into)).count == 1
        assert data(into) == data(values(6)[:1]) + [NOTHING] * 5


@CASES.add()
def a_call_that_hangs_ends_its_order_in_time_and_leaves_no_pin(harness: StoreHarness) -> None:
    for what in ("exists", "put"):
        for count in (2, 9):
            with engine(harness) as p:
                p.end(p.lookup(names(1)))  # the way to the store is open
                p.faulty.hangs.add(what)
                assert poll(partial(_hung, p, values(count)), CLOSE_S), "it was not hanging"
                p.faulty.go_on()
                assert poll(lambda p=p: not p.store.stuck, CLOSE_S)  # type: ignore[misc]
            harness.reset()


@CASES.add()
def a_put_that_waits_behind_one_that_hangs_leaves_no_pin(harness: StoreHarness) -> None:
    with engine(harness, call_timeout_s=3.0) as p:
        p.faulty.hangs.add("exists")
        orders = [p.put(names(2, seed), values(2), SOON_S * 2) for seed in range(4)]
        ends = [p.end(order) for order in orders]
        assert {end.reason for end in ends} <= {Reason.TRANSFER_TIMEOUT, Reason.STORE_FAILED}
        p.pins.check()


@CASES.add()
def closing_while_putting_leaves_no_pin_and_is_bounded(harness: StoreHarness) -> None:
    for what in ("exists", "put"):
        with engine(harness) as p:
            p.faulty.hangs.add(what)
            orders = [p.put(names(9, seed), values(9)) for seed in range(3)]
            assert poll(lambda p=p: p.faulty.inside == 1, CLOSE_S)  # type: ignore[misc]
            begun = time.monotonic()
            p.store.close()
            p.store.close()
            assert time.monotonic() - begun < CLOSE_S
            assert {p.end(order).reason for order in orders} == {Reason.CANCELLED}
            p.pins.check()
            assert p.faulty.calls["close"] == 0, "closed while a call was inside"
            assert not p.store.submit(Lookup(OrderId(99), names(1), 1.0))
        harness.reset()


@CASES.add()
def a_cancelled_put_leaves_no_pin(harness: StoreHarness) -> None:
    with engine(harness) as p:
        p.faulty.hangs.add("exists")
        first, second = p.put(names(2), values(2)), p.put(names(2, 1), values(2))
        p.store.cancel(second)
        p.store.cancel(first)
        p.store.cancel(OrderId(77))
        assert {p.end(first).reason, p.end(second).reason} == {Reason.CANCELLED}
        p.pins.check()


@CASES.add()
def a_get_that_came_too_late_touches_no_memory(harness: StoreHarness) -> None:
    with engine(harness) as p:
        p.kept(names(3), values(3))
        p.faulty.hangs.add("get")
        into = blank(3)
        end = p.end(p.get(names(3), into, SOON_S))
        assert (end.count, end.reason) == (0, Reason.TRANSFER_TIMEOUT)
        p.faulty.go_on()
        assert poll(lambda: not p.store.stuck, CLOSE_S)
        assert data(into) == [NOTHING] * 3, "bytes landed after the end"


@CASES.add()
def a_put_that_was_given_up_reads_no_memory_later(harness: StoreHarness) -> None:
    """The engine reuses the blocks at once; whoever gets that key afterwards finds nothing or the right bytes."""
    with engine(harness) as p:
        p.faulty.hangs.add("put")
        source = values(3)
        right = data(source)
        assert poll(lambda: _hung(p, source), CLOSE_S), "it was not hanging"
        for pieces in source:
            for piece in pieces:
                piece[:] = bytes(piece.nbytes)
        p.faulty.go_on()
        assert poll(lambda: not p.store.stuck, CLOSE_S)
        into = blank(3)
        count = p.end(p.get(names(3), into)).count
        assert data(into) == right[:count] + [NOTHING] * (3 - count)


@CASES.add()
def a_store_that_failed_is_left_alone_for_a_while_and_asked_again(harness: StoreHarness) -> None:
    with engine(harness, retry_s_min=0.3, retry_s_max=0.3) as p:
        p.faulty.raises["exists"] = ConnectionError("gone")
        for _ in range(20):
            end = p.end(p.lookup(names(1)))
            assert (end.count, end.reason) == (0, Reason.STORE_FAILED)
        asked = p.faulty.calls["exists"]
        assert asked < 20, "each order paid for a store that is gone"
        assert p.store.counters["skipped"] == 20 - asked
        p.faulty.raises.clear()
        assert poll(lambda: p.end(p.lookup(names(1))).reason is None, CLOSE_S), "it was never asked again"


@CASES.add()
def calls_that_never_come_back_are_bounded(harness: StoreHarness) -> None:
    with engine(harness, stuck_max=2, retry_s_min=0.001, retry_s_max=0.001) as p:
        p.kept(names(2), values(2))
        p.faulty.hangs |= {"get", "exists"}

        def gone() -> bool:
            return p.end(p.get(names(2), blank(2), SOON_S)).reason is Reason.BUSY

        assert poll(gone, CLOSE_S)
        assert poll(lambda: p.faulty.inside == 2, CLOSE_S)  # a call may be given up before its thread has begun it
        p.faulty.go_on()
        assert poll(lambda: p.end(p.get(names(2), blank(2))).count == 2, CLOSE_S), "it did not recover"


@CASES.add()
def every_accepted_order_ends_exactly_once(harness: StoreHarness) -> None:
    with engine(harness, orders_max=64) as p:
        orders = []
        for index in range(20):
            some = names(3, index % 5)
            orders.append(p.put(some, values(3)))
            orders.append(p.get(some, blank(3)))
            orders.append(p.lookup(some))
            if index % 4 == 0:
                p.store.cancel(orders[-2])
        for order in orders:
            p.end(order)
        p.store.close()
        p.ends.wait(lambda: False, 0.05)
        assert [len(p.ends.of(order)) for order in orders] == [1] * len(orders)


@CASES.add()
def a_full_queue_says_so_and_loses_nothing(harness: StoreHarness) -> None:
    with engine(harness, orders_max=8) as p:
        orders = [p.lookup(names(1)) for _ in range(8)]
        assert not p.store.submit(Lookup(OrderId(99), names(1), 1.0))
        assert all(p.end(order).reason is None for order in orders)
        assert p.end(p.lookup(names(1))).reason is None


@CASES.add()
def the_waker_is_called_when_there_is_news(harness: StoreHarness) -> None:
    with engine(harness) as p:
        rung: list[int] = []
        p.store.set_waker(lambda: rung.append(1))
        for _ in range(3):
            rung.clear()
            order = p.lookup(names(1))
            assert poll(lambda: bool(rung), CLOSE_S)
            assert [end.order for end in p.store.drain()] == [order]


@CASES.add("idle")
def an_idle_store_costs_no_cpu(harness: StoreHarness) -> None:
    with engine(harness) as p:
        p.kept(names(1), values(1))
        spent_s = idle_cpu_s(IDLE_S, IDLE_CPU_S * IDLE_S)
        assert spent_s < IDLE_CPU_S * IDLE_S, f"idle for {IDLE_S} s, it used {spent_s} s of CPU"


class StoreContract:
    """Callable on a harness; `cases` to run them one by one."""

    cases: tuple[StoreCase, ...] = tuple(CASES)

    def __call__(self, harness: StoreHarness) -> list[str]:
        """Run every case; the names of those that could not be run."""
        skipped = []
        for case in self.cases:
            try:
                case(harness)
            except unittest.SkipTest:
                skipped.append(case.name)
        return skipped


check_store = StoreContract()
