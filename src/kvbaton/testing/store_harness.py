"""The harness of the store contract: a backend to check, one that can be made to fail, and counts of pins.

A harness opens back ends on one shared store: what is put through one can be got through another. `FaultyBackend`
stands between, so every law about failure is checked on every back end, and hangs for as long as the case wants it to.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Protocol

from kvbaton.store.interface import Backend, OrderEnded, OrderId, Store
from kvbaton.testing.transport_harness import poll

DEADLINE_S = 30.0
HANG_S = 60.0  # a call that is to hang hangs until it may go on, whatever a busy machine takes for the rest


class StoreHarness(Protocol):
    """What a third party implements."""

    offers: frozenset[str]  # of "idle"

    def backend(self) -> Backend:
        """A fresh way into the harness's one store, empty at first."""

    def reset(self) -> None:
        """Forget the store; the next back end opens another."""


class FaultyBackend:
    """A back end that does what the real one does, unless a case says otherwise. Methods are named as in `Backend`."""

    def __init__(self, backend: Backend) -> None:
        self.backend = backend
        self.calls: Counter[str] = Counter()
        self.raises: dict[str, Exception] = {}
        self.hangs: set[str] = set()
        self.spoils = False  # what a get brings is altered
        self.refuses: dict[str, str] = {}  # a put's errors, by key
        self._threads: set[threading.Thread] = set()  # that called
        self._go_on = threading.Event()
        self._inside = 0
        self._lock = threading.Lock()

    @property
    def inside(self) -> int:
        """Calls that hang now."""
        return self._inside

    def go_on(self) -> None:
        """Let all that hang come back."""
        self.hangs.clear()
        self._go_on.set()

    @property
    def is_left(self) -> bool:
        """Whether, once its store is closed, no call of that store is inside any more."""
        return not any(thread.is_alive() for thread in self._threads)

    @property
    def lands_late(self) -> bool:
        return self.backend.lands_late

    def register(self, memory: memoryview) -> None:
        self.backend.register(memory)

    def exists(self, keys: Sequence[str]) -> Sequence[bool]:
        self._enter("exists")
        return self.backend.exists(keys)

    def put(self, keys: Sequence[str], values: Sequence[memoryview]) -> Sequence[str]:
        self._enter("put")
        good = [index for index, key in enumerate(keys) if key not in self.refuses]
        done = self.backend.put([keys[index] for index in good], [values[index] for index in good]) if good else []
        answers = dict(zip(good, done, strict=True))
        return [answers.get(index, self.refuses.get(key, "")) for index, key in enumerate(keys)]

    def get(self, keys: Sequence[str], into: Sequence[memoryview]) -> Sequence[int]:
        self._enter("get")
        sizes = self.backend.get(keys, into)
        if self.spoils:
            for buffer in into:
                buffer[-1] ^= 1
        return sizes

    def discard(self, keys: Sequence[str]) -> None:
        self.calls["discard"] += 1
        self.backend.discard(keys)

    def close(self) -> None:
        self.calls["close"] += 1
        self.backend.close()

    def _enter(self, name: str) -> None:
        self.calls[name] += 1
        self._threads.add(threading.current_thread())
        if name in self.hangs:
            with self._lock:
                self._inside += 1
            self._go_on.wait(HANG_S)
            with self._lock:
                self._inside -= 1
        if name in self.raises:
            raise self.raises[name]


class PinBook:
    """Books on pins that refuse what an engine could not survive: a second pin, a second release."""

    def __init__(self) -> None:
        self.held: dict[OrderId, tuple[int, ...]] = {}
        self.released: Counter[OrderId] = Counter()
        self.wrong: list[str] = []

    def pin(self, order: OrderId, blocks: Sequence[int]) -> None:
        if order in self.held:
            self.wrong.append(f"{order} pinned twice")
        self.held[order] = tuple(blocks)

    def unpin(self, order: OrderId) -> None:
        self.released[order] += 1
        if self.held.pop(order, None) is None:
            self.wrong.append(f"{order} released without a pin")

    def check(self) -> None:
        """No pin is left, and none was released twice."""
        assert not self.held, f"pins left: {self.held}"
        assert not self.wrong, self.wrong
        assert set(self.released.values()) <= {1}, self.released


class Ends:
    """Everything that a store reported, collected while waiting."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self.all: list[OrderEnded] = []

    def of(self, order: int) -> list[OrderEnded]:
        return [end for end in self.all if end.order == order]

    def wait(self, predicate: Callable[[], bool], deadline_s: float | None = None) -> bool:
        def drained() -> bool:
            self.all.extend(self._store.drain())
            return predicate()

        return poll(drained, DEADLINE_S if deadline_s is None else deadline_s)

    def end(self, order: int) -> OrderEnded:
        """The end of `order`; AssertionError when there is none in time, or more than one."""
        assert self.wait(lambda: bool(self.of(order))), f"order {order} did not end within {DEADLINE_S} s"
        assert len(self.of(order)) == 1, self.of(order)
        return self.of(order)[0]
