"""A loop runs one thing at a time, survives what its callbacks do, and closes what it watches when it ends."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator

import pytest

from kvbaton.testing.transport_harness import poll
from kvbaton.transports.net.socket_loop import IN, SocketLoop


@pytest.fixture
def loop() -> Iterator[SocketLoop]:
    loop = SocketLoop("test-loop")
    yield loop
    assert loop.stop(5)


class Pipe:
    """Something to watch."""

    def __init__(self, loop: SocketLoop) -> None:
        self.read_fd, self.write_fd = os.pipe()
        self.got: list[bytes] = []
        self.closed = threading.Event()
        self._loop = loop

    def ready(self, events: int) -> None:
        self.got.append(os.read(self.read_fd, 100))
        if self.got[-1] == b"boom":
            raise RuntimeError("boom")

    def close(self, detail: str) -> None:
        self._loop.unwatch(self.read_fd)
        os.close(self.read_fd)
        os.close(self.write_fd)
        self.closed.set()


def test_calls_run_in_order_on_one_thread_that_the_first_starts(loop: SocketLoop) -> None:
    ran: list[tuple[int, str]] = []
    for number in range(100):
        loop.call(lambda number=number: ran.append((number, threading.current_thread().name)))  # type: ignore[misc]
    assert poll(lambda: len(ran) == 100, 20)
    assert ran == [(number, "test-loop") for number in range(100)]


def test_timers_fire_in_order_and_not_when_cancelled(loop: SocketLoop) -> None:
    fired: list[str] = []

    def start() -> None:
        loop.later(0.02, lambda: fired.append("second"))
        loop.later(0.01, lambda: fired.append("first"))
        loop.later(0.0, lambda: fired.append("never")).cancel()

    loop.call(start)
    assert poll(lambda: len(fired) == 2, 20)
    assert fired == ["first", "second"]


def test_a_failing_callback_costs_nobody_else_anything(loop: SocketLoop) -> None:
    pipe = Pipe(loop)
    ran = threading.Event()

    def fail() -> None:
        raise RuntimeError("boom")

    loop.call(fail)
    loop.call(lambda: loop.later(0.0, fail) and None)
    loop.call(lambda: loop.watch(pipe.read_fd, IN, pipe))
    os.write(pipe.write_fd, b"boom")
    assert poll(lambda: pipe.got == [b"boom"], 20)
    loop.call(ran.set)
    assert ran.wait(20)


def test_what_is_watched_is_told_and_closed_at_the_end() -> None:
    loop = SocketLoop("ending")
    pipe = Pipe(loop)
    loop.call(lambda: loop.watch(pipe.read_fd, IN, pipe))
    os.write(pipe.write_fd, b"hello")
    assert poll(lambda: pipe.got == [b"hello"], 20)
    assert loop.stop(5)
    assert pipe.closed.is_set()


def test_a_stopped_loop_takes_no_calls_and_stops_again() -> None:
    used, unused = SocketLoop("used"), SocketLoop("unused")
    used.call(lambda: None)
    for loop in (used, unused):
        assert loop.stop(5) and loop.stop(5)
        assert not loop.call(lambda: None)


def test_a_loop_can_be_stopped_from_its_own_thread() -> None:
    loop = SocketLoop("own")
    stopped: list[bool] = []
    loop.call(lambda: stopped.append(loop.stop(5)))
    assert poll(lambda: stopped == [False], 20)  # not yet: it is still running this very call
    assert loop.stop(5)
