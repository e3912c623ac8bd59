"""The contract is tested by breaking what it guards: each of these mutants must be caught by the case named with it.

Without one the same harness keeps the contract: tests/store/test_memory_backend.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from kvbaton.store import order_scripts, threaded_store
from kvbaton.store.interface import OrderEnded, Pins, Put
from kvbaton.store.order_scheduler import Breaker
from kvbaton.store.order_scripts import BackendCall, OrderKind, Script, Task
from kvbaton.store.threaded_store import KeptStore
from kvbaton.store.value_header import ALONE, HeaderClaim
from kvbaton.testing import store_case, store_contract, store_harness
from kvbaton.testing.store_contract import check_store
from kvbaton.testing.store_harness import FaultyBackend
from tests.store.test_memory_backend import MemoryHarness

CASES = {case.name: case for case in check_store.cases}


def put_without_finally(task: Task, order: Put, pins: Pins) -> Script:
    """Seed 003: the release is at the end of the good path."""
    pins.pin(order.order, order.blocks)
    answer = yield BackendCall(OrderKind.EXISTS, order.keys)
    wanted = [index for index, is_there in enumerate(answer.good) if not is_there]
    for start in range(0, len(wanted), task.batch):
        yield from order_scripts._kept(
            task, order_scripts._Staged(task, order, wanted[start : start + task.batch]).take()
        )
    pins.unpin(order.order)


def put_that_releases_twice(task: Task, order: Put, pins: Pins) -> Script:
    try:
        yield from ORIGINAL_PUT(task, order, pins)
    finally:
        pins.unpin(order.order)


def put_that_releases_early(task: Task, order: Put, pins: Pins) -> Script:
    """The library gets the engine's memory: nothing is copied before the pin is dropped."""
    pins.pin(order.order, order.blocks)
    pins.unpin(order.order)
    yield BackendCall(OrderKind.EXISTS, order.keys)
    call = order_scripts._staged(task, order, range(len(order.keys)))
    real = tuple(_Live(frame, pieces) for frame, pieces in zip(call.frames, order.values, strict=True))
    yield from order_scripts._kept(task, BackendCall(OrderKind.PUT, call.keys, real))  # type: ignore[arg-type]


class _Live:
    """A frame whose bytes are read from the engine when the back end gets to it."""

    def __init__(self, frame: memoryview, pieces: Sequence[memoryview]) -> None:
        self.nbytes, self._frame, self._pieces = frame.nbytes, frame, pieces

    def now(self) -> memoryview:
        order_scripts.gather(self._pieces, self._frame)
        return self._frame


class ReadsLate(FaultyBackend):
    def put(self, keys: Sequence[str], values: Sequence[Any]) -> Sequence[str]:
        self._enter("put")
        late = [value.now() if isinstance(value, _Live) else value for value in values]
        threaded_store.seal_all(late, keys, (), ALONE)
        return self.backend.put(keys, late)


ORIGINAL_PUT = order_scripts._put
SEAL = threaded_store.seal_all


class EndsTwice(KeptStore):
    def drain(self) -> list[OrderEnded]:
        return [end for end in super().drain() for _ in range(2)]


class LosesAnEnd(KeptStore):
    def drain(self) -> list[OrderEnded]:
        return [end for end in super().drain() if end.order % 5]


class NeverFull(KeptStore):
    def drain(self) -> list[OrderEnded]:
        self._open = -100
        return super().drain()

    def submit(self, order: Any) -> bool:
        self._open = -100
        return super().submit(order)


class NeverWakes(KeptStore):
    def _ring(self) -> None:
        pass


def patch_put(script: Callable[..., Script]) -> Callable[[pytest.MonkeyPatch], None]:
    return lambda patch: patch.setattr(order_scripts, "_put", script)


def patch_store(store: type[KeptStore]) -> Callable[[pytest.MonkeyPatch], None]:
    return lambda patch: patch.setattr(store_case, "KeptStore", store)


def reads_late(patch: pytest.MonkeyPatch) -> None:
    patch_put(put_that_releases_early)(patch)
    patch.setattr(store_case, "FaultyBackend", ReadsLate)
    is_live = lambda frames: any(isinstance(frame, _Live) for frame in frames)  # noqa: E731
    patch.setattr(threaded_store, "seal_all", lambda frames, *_: None if is_live(frames) else SEAL(frames, *_))


def trusts_back_ends(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(threaded_store, "claimed", lambda *_: HeaderClaim((), lambda _: b"", b""))


def never_gives_up(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(threaded_store.Keeper, "on_time", lambda *_: None)


def always_asks(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Breaker, "may_ask", lambda *_: True)


def never_asks_again(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Breaker, "may_ask", lambda self, now: not self._wait_s)


def closes_under_a_call(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(threaded_store.Keeper, "under_way", 0)


def lands_what_is_behind_a_hole(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(order_scripts.CallAnswer, "lead", property(lambda self: len(self.good)))


MUTANTS: list[tuple[Callable[[pytest.MonkeyPatch], None], str]] = [
    (patch_put(put_without_finally), "an_existence_check_that_raises_leaves_no_pin"),
    (patch_put(put_without_finally), "a_put_that_raises_leaves_no_pin"),
    (patch_put(put_without_finally), "a_call_that_hangs_ends_its_order_in_time_and_leaves_no_pin"),
    (patch_put(put_without_finally), "closing_while_putting_leaves_no_pin_and_is_bounded"),
    (patch_put(put_without_finally), "a_cancelled_put_leaves_no_pin"),
    (patch_put(put_that_releases_twice), "what_one_engine_puts_another_gets"),
    (reads_late, "a_put_that_was_given_up_reads_no_memory_later"),
    (patch_store(EndsTwice), "every_accepted_order_ends_exactly_once"),
    (patch_store(LosesAnEnd), "every_accepted_order_ends_exactly_once"),
    (patch_store(NeverFull), "a_full_queue_says_so_and_loses_nothing"),
    (patch_store(NeverWakes), "the_waker_is_called_when_there_is_news"),
    (trusts_back_ends, "a_damaged_value_is_a_miss_and_can_be_put_again"),
    (never_gives_up, "a_call_that_hangs_ends_its_order_in_time_and_leaves_no_pin"),
    (never_gives_up, "a_get_that_came_too_late_touches_no_memory"),
    (always_asks, "a_store_that_failed_is_left_alone_for_a_while_and_asked_again"),
    (never_asks_again, "a_store_that_failed_is_left_alone_for_a_while_and_asked_again"),
    (closes_under_a_call, "closing_while_putting_leaves_no_pin_and_is_bounded"),
    (lands_what_is_behind_a_hole, "nothing_behind_a_hole_is_found_or_landed"),
]


@pytest.mark.parametrize("number", range(len(MUTANTS)), ids=lambda number: MUTANTS[number][1])
def test_a_mutant_is_caught(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    mutate, case = MUTANTS[number]
    mutate(monkeypatch)
    monkeypatch.setattr(store_harness, "DEADLINE_S", 2.0)
    monkeypatch.setattr(store_contract, "CLOSE_S", 3.0)
    with pytest.raises(AssertionError):
        CASES[case](MemoryHarness())
