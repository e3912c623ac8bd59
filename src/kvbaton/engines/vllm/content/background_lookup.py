"""Work that is too long for a hook, on one thread of ours: asked for by request, told when it is there.

Laws: no method waits. What is asked for is bounded in number and in time; beyond either the answer is that nothing is
known, and it stays so for that request. Work that raises is counted, and answers nothing.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

from kvbaton.engines.side.guard import note

WAITING_MAX = 256
"""Requests whose turn has not come; a further one is not waited for."""
WAIT_S = 10.0
"""From the first question: a 300 MB adapter is read in about one second, and then known."""

T = TypeVar("T")


@dataclass(slots=True)
class _Ask(Generic[T]):
    work: Callable[[], T] | None
    until: float
    found: T | None = None
    is_over: bool = False  # found, given up, or not taken at all


class Looker(Generic[T]):
    """One thread, started when it is first needed."""

    def __init__(self, name: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._name = name
        self._clock = clock
        self._lock = threading.Condition()
        self._asks: dict[str, _Ask[T]] = {}
        self._queue: deque[_Ask[T]] = deque()
        self._thread: threading.Thread | None = None

    def ask(self, name: str, work: Callable[[], T]) -> bool:
        """Whether there is an answer for `name`; the first question has `work` done."""
        with self._lock:
            ask = self._asks.get(name)
            if ask is None:
                ask = self._asks[name] = self._begun(work)
            elif not ask.is_over and self._clock() >= ask.until:
                ask.is_over, ask.work = True, None
            return ask.is_over

    def found(self, name: str) -> T | None:
        """What was found for `name`: nothing while it is looked for, or when it was given up."""
        with self._lock:
            ask = self._asks.get(name)
            return None if ask is None else ask.found

    def forget(self, name: str) -> None:
        with self._lock:
            ask = self._asks.pop(name, None)
            if ask is not None:
                ask.is_over, ask.work = True, None

    def _begun(self, work: Callable[[], T]) -> _Ask[T]:
        ask = _Ask(work, self._clock() + WAIT_S)
        while self._queue and self._queue[0].work is None:
            self._queue.popleft()
        if len(self._queue) >= WAITING_MAX:
            ask.is_over, ask.work = True, None
            return ask
        self._queue.append(ask)
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
            self._thread.start()
        self._lock.notify()
        return ask

    def _run(self) -> None:
        while True:
            with self._lock:
                while not self._queue:
                    self._lock.wait()
                ask = self._queue.popleft()
                work = ask.work
            if work is None:
                continue
            found = None
            try:
                found = work()
            except Exception as error:  # noqa: BLE001 - promise 4: whatever it was, nothing is known
                note("content", error)
            with self._lock:
                if not ask.is_over:  # else it came too late for its request
                    ask.found, ask.is_over, ask.work = found, True, None
