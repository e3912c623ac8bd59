from __future__ import annotations

import os
import select
import threading
from collections import deque

import pytest

from kvbaton.control.sockets import Waker


def _readable(waker: Waker, timeout_s: float = 0.0) -> bool:
    return bool(select.select([waker.fd], [], [], timeout_s)[0])


def test_many_wakes_are_one() -> None:
    waker = Waker()
    for _ in range(1000):
        waker.wake()
    assert _readable(waker)
    waker.clear()
    assert not _readable(waker)
    waker.wake()
    assert _readable(waker)
    waker.close()


def test_clearing_what_nobody_raised_is_harmless() -> None:
    waker = Waker()
    waker.clear()
    assert not _readable(waker)
    waker.close()


def test_a_wake_after_closing_is_harmless() -> None:
    waker = Waker()
    waker.close()
    waker.wake()
    waker.close()


def test_a_wake_in_the_middle_of_clearing_does_not_silence_those_after_it(monkeypatch: pytest.MonkeyPatch) -> None:
    waker, read = Waker(), os.eventfd_read

    def read_late(fd: int) -> int:
        waker.wake()
        return read(fd)

    waker.wake()
    monkeypatch.setattr(os, "eventfd_read", read_late)
    waker.clear()
    waker.wake()
    assert _readable(waker)
    waker.close()


def test_nothing_queued_before_a_wake_is_ever_overslept() -> None:
    waker, queue, seen, items = Waker(), deque[int](), 0, 4 * 5000

    def produce() -> None:
        for item in range(5000):
            queue.append(item)
            waker.wake()

    threads = [threading.Thread(target=produce) for _ in range(4)]
    for thread in threads:
        thread.start()
    while seen < items:
        assert _readable(waker, 30.0), f"overslept with {len(queue)} queued"
        waker.clear()
        while queue:
            queue.popleft()
            seen += 1
    for thread in threads:
        thread.join()
    waker.close()
