"""The threads around the keeper: what lands late, what never closes, what an engine's step pays."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from typing import Any

import pytest

from kvbaton.protocol.errors import Reason
from kvbaton.store.interface import Get, Lookup, OrderId, Put, StoreSettings
from kvbaton.store.memory_backend import MemoryBackend
from kvbaton.store.order_scripts import BackendCall, OrderKind
from kvbaton.store.threaded_store import KeptStore, perform
from kvbaton.store.value_header import FRAME_BYTES
from kvbaton.testing.store_case import VALUE_BYTES, blank, data, names, values
from kvbaton.testing.store_harness import Ends, FaultyBackend, PinBook
from kvbaton.testing.transport_harness import poll

SETTINGS = StoreSettings(value_bytes_max=VALUE_BYTES, close_s=0.3)


class LateLibrary(MemoryBackend):
    """Comes back, and writes into the memory of its gets again whenever the test says."""

    lands_late = True

    def __init__(self) -> None:
        super().__init__(64 << 20)
        self.known: list[memoryview] = []
        self.put_from: list[memoryview] = []

    def get(self, keys: Sequence[str], into: Sequence[memoryview]) -> list[int]:
        self.known += into
        return super().get(keys, into)

    def put(self, keys: Sequence[str], values: Sequence[memoryview]) -> list[str]:
        self.put_from += values
        return super().put(keys, values)

    def land(self) -> None:
        for buffer in self.known:
            buffer[:] = b"\xee" * buffer.nbytes


def sealed(backend: MemoryBackend) -> BackendCall:
    """One value in the back end, and the call that gets it."""
    frame = memoryview(bytearray(FRAME_BYTES + 100))
    frame[FRAME_BYTES:] = b"1" * 100
    assert perform(backend, BackendCall(OrderKind.PUT, ("a",), (frame,))).good == (True,)
    return BackendCall(OrderKind.GET, ("a",), (memoryview(bytearray(FRAME_BYTES + 100)),))


def test_what_was_checked_is_out_of_reach_of_what_lands_later() -> None:
    late = LateLibrary()
    answer = perform(late, sealed(late))
    late.land()
    assert answer.good == (True,)
    assert answer.frames[0][FRAME_BYTES:] == b"1" * 100


def test_bytes_that_land_late_spoil_no_value_that_is_put() -> None:
    """Gets and puts never share a slot, in whatever order they come."""
    late = LateLibrary()
    store = KeptStore(late, PinBook(), SETTINGS)
    ends = Ends(store)
    for number in range(6):
        assert store.submit(Put(OrderId(2 * number), names(3, number), values(3), (0,), 5.0))
        assert store.submit(Get(OrderId(2 * number + 1), names(3, number), blank(3), 5.0))
        ends.end(2 * number), ends.end(2 * number + 1)
    before = [bytes(frame) for frame in late.put_from]
    late.land()
    assert [bytes(frame) for frame in late.put_from] == before
    store.close()


def test_a_get_never_returns_what_an_earlier_one_left_in_its_slot() -> None:
    class SaysSo(MemoryBackend):
        """Claims that it has written, and has not."""

        def get(self, keys: Sequence[str], into: Sequence[memoryview]) -> list[int]:
            return [buffer.nbytes for buffer in into] if self.lies else super().get(keys, into)

    backend = SaysSo(1 << 20)
    backend.lies = False  # type: ignore[attr-defined]
    call = sealed(backend)
    assert perform(backend, call).good == (True,)
    backend.lies = True  # type: ignore[attr-defined]
    assert perform(backend, call).good == (False,)


def test_a_back_end_that_answers_too_little_is_an_error() -> None:
    class Short(MemoryBackend):
        def exists(self, keys: Sequence[str]) -> list[bool]:
            return [True]

    with pytest.raises(ValueError, match="1 answers for 2 keys"):
        perform(Short(1000), BackendCall(OrderKind.EXISTS, ("a", "b")))


def test_a_back_end_whose_close_hangs_costs_the_bound_and_no_more() -> None:
    go_on = threading.Event()

    class Hangs(MemoryBackend):
        def close(self) -> None:
            go_on.wait(60)

    store = KeptStore(Hangs(1000), PinBook(), SETTINGS)
    begun = time.monotonic()
    store.close()
    assert time.monotonic() - begun < 10
    go_on.set()


def test_a_shared_back_end_is_left_open() -> None:
    faulty = FaultyBackend(MemoryBackend(1 << 20))
    KeptStore(faulty, PinBook(), SETTINGS, owned=False).close()
    assert faulty.calls["close"] == 0
    KeptStore(faulty, PinBook(), SETTINGS).close()
    assert poll(lambda: faulty.calls["close"] == 1, 10)


def test_submit_and_drain_do_not_wait_for_a_keeper_that_copies() -> None:
    """The keeper is held in the middle of a copy; the engine's thread goes on."""
    store = KeptStore(MemoryBackend(1 << 20), PinBook(), SETTINGS)
    held, go_on = threading.Event(), threading.Event()

    def hold(*_: object) -> None:
        held.set()
        go_on.wait(30)

    store._keeper.staging["put"].frame = hold  # type: ignore[assignment,method-assign]
    assert store.submit(Put(OrderId(1), names(1), values(1), (0,), 20.0))
    assert held.wait(10)
    assert store.submit(Lookup(OrderId(2), names(1), 5.0))
    store.cancel(OrderId(2))
    assert store.drain() == []
    go_on.set()
    ends = Ends(store)
    assert ends.end(1).reason is Reason.STORE_FAILED  # the frame was no frame
    ends.end(2)
    store.close()


def test_threads_are_as_many_as_calls_at_once_and_go_when_it_closes() -> None:
    before = set(threading.enumerate())

    def threads() -> int:
        return len(set(threading.enumerate()) - before)

    store = KeptStore(MemoryBackend(1 << 20), PinBook(), SETTINGS)
    ends = Ends(store)
    for number in range(50):
        assert store.submit(Lookup(OrderId(number), names(1), 5.0))
        ends.end(number)
    assert threads() == 2
    store.close()
    assert poll(lambda: threads() == 0, 10)


def test_a_keeper_that_comes_late_calls_no_back_end_that_was_closed() -> None:
    """It was about to take an order when it got no core; the store is closed meanwhile, and waits for it no longer."""
    before = set(threading.enumerate())
    faulty = FaultyBackend(MemoryBackend(1 << 20))
    store = KeptStore(faulty, PinBook(), SETTINGS)
    held, go_on = threading.Event(), threading.Event()
    take = store._keeper.take

    def late(*given: Any) -> None:
        held.set()
        go_on.wait(30)
        take(*given)

    store._keeper.take = late  # type: ignore[method-assign]
    assert store.submit(Lookup(OrderId(1), names(1), 5.0))
    assert held.wait(10)
    store.close()
    assert poll(lambda: faulty.calls["close"] == 1, 10)
    go_on.set()
    assert poll(lambda: set(threading.enumerate()) <= before, 10), "a thread is left"
    assert faulty.calls["exists"] == 0


def test_a_waker_may_close_the_store() -> None:
    store = KeptStore(MemoryBackend(1 << 20), PinBook(), SETTINGS)
    store.set_waker(store.close)
    assert store.submit(Lookup(OrderId(1), names(1), 5.0))
    assert Ends(store).end(1).count == 0
    assert poll(lambda: not store._thread.is_alive(), 10)


def test_a_waker_that_raises_costs_nothing() -> None:
    store = KeptStore(MemoryBackend(1 << 20), PinBook(), SETTINGS)

    def rude() -> None:
        raise RuntimeError("rude")

    store.set_waker(rude)
    ends = Ends(store)
    for number in range(2):
        assert store.submit(Put(OrderId(number), names(2), values(2), (0,), 5.0))
        assert ends.end(number).count == 2
    into = blank(2)
    assert store.submit(Get(OrderId(9), names(2), into, 5.0))
    assert ends.end(9).count == 2
    assert data(into) == data(values(2))
    store.close()


def test_a_machine_out_of_threads_costs_the_orders_and_no_pin(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three puts that come in one turn, none of whose calls can begin: each ends, and what it pinned is free."""
    pins, real = PinBook(), threading.Thread.start
    store = KeptStore(MemoryBackend(1 << 20), pins, SETTINGS)

    def start(thread: threading.Thread) -> None:
        if thread.name.startswith("kvbaton-store-"):
            raise RuntimeError("can't start new thread")
        real(thread)

    monkeypatch.setattr(threading.Thread, "start", start)
    with store._changed:
        for number in (1, 2, 3):
            assert store.submit(Put(OrderId(number), (f"k{number}",), values(1), (number,), 5.0))
    ended: set[int] = set()
    assert poll(lambda: bool(ended.update(end.order for end in store.drain())) or len(ended) == 3, 20)
    monkeypatch.undo()
    assert not pins.held
    store.close()
