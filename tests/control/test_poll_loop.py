from __future__ import annotations

import threading
import time
from collections.abc import Callable

from kvbaton.control.sockets import PAUSE_S, LoopThread

from .rig import until


class Bed:
    """Something to sleep on, which remembers for how long it was asked."""

    def __init__(self) -> None:
        self.asked: list[float | None] = []
        self._event = threading.Event()

    def wait(self, timeout_s: float | None) -> None:
        self.asked.append(timeout_s)
        self._event.wait(timeout_s)
        self._event.clear()

    def wake(self) -> None:
        self._event.set()


def _thread(turn: Callable[[float], float | None], finish: Callable[[], None] = lambda: None) -> tuple[LoopThread, Bed]:
    bed = Bed()
    return LoopThread("loop", bed, turn, finish), bed


def test_it_sleeps_until_the_next_deadline_or_a_wake() -> None:
    turns: list[float] = []

    def turn(now: float) -> float | None:
        turns.append(now)
        return now + 0.01 if len(turns) == 1 else None

    thread, bed = _thread(turn)
    thread.start()
    until(lambda: len(bed.asked) == 2)
    assert bed.asked[0] is not None and 0 < bed.asked[0] <= 0.01
    assert bed.asked[1] is None and turns[1] - turns[0] >= 0.009
    bed.wake()
    until(lambda: len(turns) == 3)
    assert thread.stop(30.0) and not thread.is_alive


def test_an_exception_is_counted_and_followed_by_a_pause_not_by_the_end() -> None:
    turns: list[float] = []

    def turn(now: float) -> float | None:
        turns.append(now)
        if len(turns) <= 3:
            raise RuntimeError("a bug")
        return None

    thread, _ = _thread(turn)
    thread.start()
    until(lambda: len(turns) == 4)
    assert thread.faults == 3 and thread.is_alive
    assert turns[3] - turns[0] >= 3 * PAUSE_S * 0.9
    assert thread.stop(30.0)


def test_a_deadline_that_stays_in_the_past_does_not_spin() -> None:
    thread, bed = _thread(lambda now: now - 1.0)
    thread.start()
    until(lambda: len(bed.asked) >= 3)
    assert thread.stop(30.0)
    assert all(asked is not None and asked >= 0.001 for asked in bed.asked)


def test_finishing_happens_once_on_the_thread_itself() -> None:
    finished: list[bool] = []
    thread, _ = _thread(lambda now: None, lambda: finished.append(thread.is_current))
    thread.start()
    assert thread.stop(30.0) and thread.stop(30.0)
    assert finished == [True]


def test_one_that_was_never_started_finishes_too() -> None:
    finished: list[bool] = []
    thread, _ = _thread(lambda now: None, lambda: finished.append(True))
    assert thread.stop(1.0) and thread.stop(1.0)
    assert finished == [True]


def test_a_turn_that_hangs_makes_stop_say_so_in_time() -> None:
    release, began = threading.Event(), threading.Event()

    def turn(now: float) -> float | None:
        began.set()
        release.wait(20)
        return None

    thread, _ = _thread(turn)
    thread.start()
    assert began.wait(20)
    start = time.monotonic()
    assert not thread.stop(0.05)
    assert time.monotonic() - start < 10.0
    release.set()
    assert thread.stop(30.0)


def test_it_can_be_stopped_from_its_own_turn() -> None:
    stopped: list[bool] = []

    def turn(now: float) -> float | None:
        stopped.append(thread.stop(30.0))
        return None

    thread, _ = _thread(turn)
    thread.start()
    until(lambda: not thread.is_alive)
    assert stopped == [True]
