"""The keeper on virtual time: every path of a put leaves no pin, and each order ends once (promises 2 and 3)."""

from __future__ import annotations

import random

import msgspec
import pytest

from kvbaton.protocol.errors import Reason
from kvbaton.store.interface import Get, Lookup, Order, OrderEnded, OrderId, Put, StoreSettings
from kvbaton.store.order_scheduler import Keeper
from kvbaton.store.order_scripts import BackendCall, CallAnswer, OrderKind, Task
from kvbaton.store.value_header import FRAME_BYTES
from kvbaton.testing.store_case import VALUE_BYTES, blank, data, names, values
from kvbaton.testing.store_harness import PinBook

SETTINGS = StoreSettings(value_bytes_max=VALUE_BYTES, values_per_call_max=2, stuck_max=2, retry_s_min=1, retry_s_max=4)
DOWN = RuntimeError("down")


class Rig:
    """A keeper whose calls the test answers by hand."""

    def __init__(self, **changes: float) -> None:
        self.settings = msgspec.structs.replace(SETTINGS, **changes)
        self.keeper = Keeper(self.settings)
        self.pins = PinBook()
        self.now = 100.0
        self.under_way: list[BackendCall] = []
        self.ended: list[OrderEnded] = []
        self.last = 0

    def order(self, order: Order) -> OrderId:
        task = Task(order, self.now + order.timeout_s, self.settings.values_per_call_max)
        task.begin(self.pins)
        self.keeper.take(task, self.now)
        self._look()
        return order.order

    def put(self, count: int = 2, seed: int = 0, timeout_s: float = 10) -> OrderId:
        self.last += 1
        blocks = tuple(range(count))
        return self.order(Put(OrderId(self.last), names(count, seed), values(count), blocks, timeout_s))

    def lookup(self, timeout_s: float = 10) -> OrderId:
        self.last += 1
        return self.order(Lookup(OrderId(self.last), names(2), timeout_s))

    def answer(self, outcome: list[bool] | Exception, call: BackendCall | None = None) -> BackendCall:
        """The oldest call (or this one) comes back."""
        call = call or self.under_way[0]
        self.under_way.remove(call)
        frames = call.frames if call.kind is OrderKind.GET else ()
        told = (
            outcome if isinstance(outcome, Exception) else CallAnswer(outcome, "" if all(outcome) else "no", 0, frames)
        )
        self.keeper.returned(call, told, self.now)
        self._look()
        return call

    def wait(self, seconds: float) -> None:
        self.now += seconds
        self.keeper.on_time(self.now)
        self._look()

    def close(self) -> None:
        self.keeper.close(self.now)
        self._look()

    def reasons(self) -> list[Reason | None]:
        return [end.reason for end in self.ended]

    def _look(self) -> None:
        self.under_way += self.keeper.calls()
        self.ended += self.keeper.ends()


def test_a_put_holds_its_pin_until_its_last_byte_is_copied_and_no_longer() -> None:
    rig = Rig()
    rig.put(count=5)
    assert rig.pins.held == {1: (0, 1, 2, 3, 4)}
    rig.answer([False] * 5)
    rig.answer([True] * 2)
    assert rig.pins.held, "three of five values are not copied yet"
    assert rig.answer([True] * 2).kind is OrderKind.PUT
    rig.pins.check()
    assert not rig.ended, "the last call is still under way"
    rig.answer([True])
    assert rig.ended == [OrderEnded(OrderId(1), 5)]


def test_a_put_of_what_is_there_ends_after_the_look() -> None:
    rig = Rig()
    rig.put()
    rig.answer([True, True])
    assert rig.ended == [OrderEnded(OrderId(1), 2)]
    rig.pins.check()


# The ways in which a put can go wrong, as (values, what happens). Each must leave no pin, and one end.
PATHS = {
    "the existence check raises": (2, [DOWN]),
    "the existence check raises, several calls": (5, [DOWN]),
    "the put raises": (2, [[False] * 2, DOWN]),
    "the first put of several raises": (5, [[False] * 5, DOWN]),
    "the last put of several raises": (5, [[False] * 5, [True] * 2, [True] * 2, DOWN]),
    "errors of single keys": (2, [[False] * 2, [True, False]]),
    "errors of single keys, several calls": (5, [[False] * 5, [True, False]]),
    "time-out in the existence check": (2, ["wait"]),
    "time-out in the put": (2, [[False] * 2, "wait"]),
    "time-out in a middle put": (5, [[False] * 5, [True] * 2, "wait"]),
    "shutdown in the existence check": (2, ["close"]),
    "shutdown in the put": (2, [[False] * 2, "close"]),
    "shutdown in a middle put": (5, [[False] * 5, [True] * 2, "close"]),
    "cancelled in the existence check": (2, ["cancel"]),
    "cancelled in the put": (5, [[False] * 5, "cancel"]),
    "time-out, then the call comes back": (5, ["wait", [False] * 5]),
    "time-out, then the call raises": (5, [[False] * 5, "wait", DOWN]),
    "cancelled, then the call comes back": (5, ["cancel", [False] * 5]),
    "shutdown, then the call comes back": (5, [[False] * 5, "close", [True] * 2]),
}


@pytest.mark.parametrize("path", PATHS, ids=str)
def test_no_way_to_fail_leaves_a_pin_or_a_second_end(path: str) -> None:
    count, steps = PATHS[path]
    rig = Rig()
    order = rig.put(count)
    for step in steps:
        if step == "wait":
            rig.wait(10)
        elif step == "close":
            rig.close()
        elif step == "cancel":
            rig.keeper.cancel(order, rig.now)
            rig._look()
        else:
            assert isinstance(step, list | Exception)
            rig.answer(step)
    rig.pins.check()
    assert [end.order for end in rig.ended] == [order]
    assert rig.ended[0].reason is not None
    assert not rig.under_way or "close" in steps or "wait" in steps or "cancel" in steps


def test_pins_that_cannot_be_had_refuse_the_order_and_leave_nothing() -> None:
    class Poor(PinBook):
        def pin(self, order: OrderId, blocks: object) -> None:
            raise RuntimeError("no such block")

    rig = Rig()
    rig.pins = Poor()
    with pytest.raises(RuntimeError, match="no such block"):
        rig.put()
    assert not rig.pins.released
    assert not rig.under_way


def test_an_engine_whose_unpin_raises_loses_that_order_alone() -> None:
    class Rude(PinBook):
        def unpin(self, order: OrderId) -> None:
            super().unpin(order)
            raise RuntimeError("rude")

    rig = Rig()
    rig.pins = Rude()
    rig.put()
    rig.answer([True, True])
    assert rig.reasons() == [Reason.STORE_FAILED]
    rig.pins = PinBook()
    rig.put(seed=1)
    assert len(rig.under_way) == 1


def test_memory_that_went_away_fails_the_order_and_drops_the_pin() -> None:
    rig = Rig()
    gone = values(2)
    rig.order(Put(OrderId(1), names(2), gone, (0, 1), 10))
    gone[1][0].release()
    rig.answer([False, False])
    assert rig.reasons() == [Reason.BAD_SPAN]
    rig.pins.check()


def test_a_stuck_call_keeps_its_slot_and_the_lane_goes_on_with_another() -> None:
    rig = Rig(call_timeout_s=2)
    rig.put(timeout_s=10)
    rig.answer([False] * 2)
    stuck = rig.under_way[0]
    before = stuck.frames[0].tobytes()
    rig.wait(2)
    assert rig.reasons() == [Reason.TRANSFER_TIMEOUT]
    rig.wait(1)
    rig.put(seed=1)
    rig.under_way.remove(stuck)
    rig.answer([False] * 2)
    assert rig.under_way[0].frames[0].tobytes() == before  # equal bytes, other memory:
    rig.under_way[0].frames[0][0] ^= 1
    assert stuck.frames[0].tobytes() == before
    free = rig.keeper.staging["put"].free
    rig.keeper.returned(stuck, CallAnswer([True] * 2), rig.now)
    assert rig.keeper.staging["put"].free == free + 1
    assert rig.keeper.stuck == 0


def test_beyond_the_bound_of_stuck_calls_orders_fail_at_once() -> None:
    rig = Rig(call_timeout_s=2)
    for _ in range(2):
        rig.lookup()
        rig.wait(2)
        rig.now += 4  # the pause after a failure
    assert rig.keeper.stuck == 2
    rig.lookup()
    assert rig.reasons()[-1] is Reason.BUSY
    rig.answer([True, True])
    rig.lookup()
    assert len(rig.under_way) == 2, "one came back: there is room"


def test_a_store_that_is_gone_is_asked_once_per_pause_whatever_waits() -> None:
    rig = Rig()
    for _ in range(50):
        rig.lookup()
    rig.answer(DOWN)
    assert len(rig.ended) == 50
    assert rig.keeper.counters["skipped"] == 49
    rig.now += 1
    rig.lookup()
    rig.put()
    assert len(rig.under_way) == 1, "two tried at once"
    rig.answer([True, False])
    assert rig.ended[-1].count == 1
    rig.put(seed=3)
    assert len(rig.under_way) == 1


def test_a_get_lands_only_what_was_good_from_the_first_on() -> None:
    rig = Rig()
    into = blank(5)
    rig.order(Get(OrderId(1), names(5), into, 10))
    for frame, pieces in zip(rig.under_way[0].frames, values(2), strict=True):
        frame[FRAME_BYTES:] = b"".join(pieces)
    rig.answer([True, True])
    assert data(into)[:2] == data(values(2))
    rig.answer([False, True])
    assert rig.ended == [OrderEnded(OrderId(1), 2, None, "no")]
    assert data(into)[2:] == [bytes(VALUE_BYTES)] * 3


def test_deadlines_are_told_and_kept() -> None:
    rig = Rig(call_timeout_s=5)
    assert rig.keeper.next_deadline() is None
    rig.put(timeout_s=8)
    assert rig.keeper.next_deadline() == 105
    rig.put(seed=1, timeout_s=3)
    assert rig.keeper.next_deadline() == 103
    rig.wait(3)
    assert rig.reasons() == [Reason.TRANSFER_TIMEOUT]


def test_whatever_happens_in_whatever_order_pins_and_ends_add_up() -> None:
    """Random lives: 300 seeds of 60 steps. A failure names its seed."""
    for seed in range(300):
        rng = random.Random(seed)
        rig = Rig(stuck_max=3, call_timeout_s=2)
        submitted: list[OrderId] = []
        for _ in range(60):
            step = rng.choice(["put", "put", "lookup", "answer", "answer", "answer", "raise", "wait", "cancel"])
            if step == "put":
                submitted.append(rig.put(rng.randint(1, 5), rng.randint(0, 9), rng.choice([1, 3, 10])))
            elif step == "lookup":
                submitted.append(rig.lookup(rng.choice([1, 10])))
            elif step in ("answer", "raise") and rig.under_way:
                call = rng.choice(rig.under_way)
                rig.answer(DOWN if step == "raise" else [rng.random() < 0.7 for _ in call.keys], call)
            elif step == "wait":
                rig.wait(rng.choice([0.1, 1, 3]))
            elif step == "cancel" and submitted:
                rig.keeper.cancel(rng.choice(submitted), rig.now)
                rig._look()
            open_puts = {order for order in submitted if order not in {end.order for end in rig.ended}}
            assert set(rig.pins.held) <= open_puts, f"seed {seed}: a pin outlived its put"
            assert len(rig.under_way) <= 3 + 3, f"seed {seed}: too many threads"
        rig.close()
        for call in list(rig.under_way):
            rig.answer([True] * len(call.keys), call)
        rig.pins.check()
        assert sorted(end.order for end in rig.ended) == submitted, f"seed {seed}"
        assert rig.keeper.under_way == 0
        for name in ("get", "put"):
            assert rig.keeper.staging[name].free == 3, f"seed {seed}: a slot was lost"
