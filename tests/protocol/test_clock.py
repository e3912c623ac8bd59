"""Promise 2 rests on deadlines: none is lost, none fires twice, and moving one replaces it (rule 26)."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvbaton.protocol.machines.context import Timers


def all_due(timers: Timers[str], now: float) -> list[str]:
    found = []
    while (key := timers.pop_due(now)) is not None:
        found.append(key)
    return found


def test_keys_come_when_due_and_in_order() -> None:
    timers: Timers[str] = Timers()
    timers.set("b", 2.0)
    timers.set("a", 1.0)
    assert timers.next_at() == 1.0
    assert timers.pop_due(0.5) is None
    assert all_due(timers, 2.0) == ["a", "b"]
    assert timers.next_at() is None and len(timers) == 0


def test_of_two_due_at_once_the_first_set_comes_first() -> None:
    timers: Timers[str] = Timers()
    for key in "cab":
        timers.set(key, 1.0)
    assert all_due(timers, 1.0) == ["c", "a", "b"]


def test_setting_again_replaces_the_due_time() -> None:
    timers: Timers[str] = Timers()
    timers.set("a", 1.0)
    timers.set("a", 3.0)
    assert all_due(timers, 2.0) == []
    assert (timers.next_at(), len(timers)) == (3.0, 1)
    timers.set("a", 2.0)
    assert all_due(timers, 2.5) == ["a"]
    assert all_due(timers, 9.0) == []


def test_what_is_hastened_is_never_put_off() -> None:
    timers: Timers[str] = Timers()
    timers.set("a", 2.0)
    timers.hasten("a", 3.0)
    assert timers.next_at() == 2.0
    timers.hasten("a", 1.0)
    timers.hasten("b", 1.5)
    assert all_due(timers, 2.0) == ["a", "b"] and len(timers) == 0


def test_a_cleared_key_never_comes() -> None:
    timers: Timers[str] = Timers()
    timers.set("a", 1.0)
    timers.clear("a")
    timers.clear("never set")
    assert all_due(timers, 9.0) == []


def test_renewals_all_day_do_not_grow_memory() -> None:
    """The heap is rebuilt once stale entries outnumber live ones."""
    timers: Timers[str] = Timers()
    for step in range(10_000):
        timers.set("a", float(step))
        timers.set("b", float(step) + 0.5)
    assert len(timers._heap) < 200
    assert all_due(timers, 1e9) == ["a", "b"]


@pytest.mark.parametrize("at", [5.0, 4.9, 0.0, -1.0, -math.inf, math.nan])
def test_a_key_that_is_armed_again_for_now_or_earlier_waits_for_the_next_look(at: float) -> None:
    """Or one frame could have a loop go on for ever within one instant."""
    timers: Timers[str] = Timers()
    timers.set("a", 1.0)
    timers.set("b", 1.0)
    found = []
    while (key := timers.pop_due(5.0)) is not None:
        found.append(key)
        timers.set(key, at)
    assert found == ["a", "b"]
    assert timers.next_at() == math.nextafter(5.0, math.inf)
    assert all_due(timers, 5.001) == ["a", "b"]


@settings(derandomize=True, database=None, deadline=None, max_examples=200)
@given(st.lists(st.tuples(st.sampled_from(["set", "clear", "pop"]), st.sampled_from("abcd"), st.integers(0, 20))))
def test_timers_agree_with_a_plain_dictionary(steps: list[tuple[str, str, int]]) -> None:
    timers: Timers[str] = Timers()
    model: dict[str, float] = {}
    soonest = -math.inf
    for what, key, at in steps:
        if what == "set":
            timers.set(key, at)
            model[key] = max(at, soonest)
        elif what == "clear":
            timers.clear(key)
            model.pop(key, None)
        else:
            found = all_due(timers, at)
            assert sorted(found) == sorted(k for k, due in model.items() if due <= at)
            assert [model[k] for k in found] == sorted(model[k] for k in found)
            model = {k: due for k, due in model.items() if due > at}
            soonest = max(soonest, math.nextafter(at, math.inf))
        assert timers.next_at() == min(model.values(), default=None)
        assert len(timers) == len(model)
