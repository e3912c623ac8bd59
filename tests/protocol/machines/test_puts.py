"""A put holds one pin, released once: on success, refusal, error and time-out alike (promise 3, rule store)."""

from __future__ import annotations

import pytest
from pair import Pair

from kvbaton.protocol import events as ev
from kvbaton.protocol.effects import CancelPut, StorePut, UnpinPut
from kvbaton.protocol.errors import Reason
from kvbaton.protocol.ids import PutId
from kvbaton.protocol.settings import Settings


def test_a_stored_put_is_unpinned(pair: Pair) -> None:
    pair.p.put(1)
    pair.settle()
    assert [effect.put for effect in pair.done(StorePut)] == [1]
    assert pair.done(UnpinPut) == [UnpinPut(PutId(1))]
    assert pair.p.counts["puts.stored"] == 1


@pytest.mark.parametrize("reason", [Reason.STORE_FAILED, Reason.CANCELLED])
def test_a_refused_put_is_unpinned(pair: Pair, reason: Reason) -> None:
    """A failed put costs a cache miss, never a pin."""
    pair.p.habits.store = False
    pair.p.put(1)
    pair.p.end_puts(reason)
    assert pair.done(UnpinPut) == [UnpinPut(PutId(1))]
    assert pair.p.counts[f"puts.{reason}"] == 1


def test_a_put_that_takes_too_long_is_cancelled_and_keeps_its_pin_until_the_store_has_stopped(pair: Pair) -> None:
    pair.p.habits.store = False
    pair.p.put(1)
    pair.run(29.9)
    assert not pair.done(CancelPut)
    pair.run(0.2)
    assert pair.done(CancelPut) == [CancelPut(PutId(1))]
    assert not pair.done(UnpinPut), "the store may still be reading"
    pair.run(100)
    pair.p.end_puts()
    assert pair.done(UnpinPut) == [UnpinPut(PutId(1))]
    assert pair.p.counts["puts.transfer_timeout"] == 1


def test_a_put_that_ended_just_after_its_time_out_counts_as_timed_out(pair: Pair) -> None:
    pair.p.habits.store = False
    pair.p.put(1)
    pair.run(31)
    pair.p.tell(ev.StoreEnded(PutId(1)))
    pair.p.storing.clear()
    assert (pair.p.counts["puts.transfer_timeout"], pair.p.counts["puts.stored"]) == (1, 0)


def test_a_late_or_second_answer_is_ignored(pair: Pair) -> None:
    pair.p.put(1)
    pair.settle()
    pair.p.tell(ev.StoreEnded(PutId(1), Reason.STORE_FAILED), ev.StoreEnded(PutId(99)))
    assert len(pair.done(UnpinPut)) == 1
    assert pair.p.counts["late.put"] == 2


def test_more_puts_than_the_bound_are_let_go_at_once(make_pair: type[Pair]) -> None:
    pair = make_pair(settings=Settings(puts_max=2))
    pair.p.habits.store = False
    for number in (1, 2, 3):
        pair.p.put(number)
    assert pair.done(UnpinPut) == [UnpinPut(PutId(3))]
    assert pair.p.counts["puts.busy"] == 1
