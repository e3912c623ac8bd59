"""Performs calls on a backend, on threads that may block for as long as the backend does.

Laws: digests are computed, signed and verified here, off every other thread, so data from a backend is valid only if
its frame says so. An exception or a nonsensical answer of a backend becomes an exception in the outcome; nothing else
leaves a worker. There are never more threads than concurrent calls, and an idle one sleeps.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from queue import SimpleQueue
from typing import TypeAlias, TypeVar

from kvbaton.store.interface import Backend
from kvbaton.store.order_scripts import BackendCall, CallAnswer, OrderKind
from kvbaton.store.value_header import FRAME_BYTES, claimed, seal_all
from kvbaton.store.value_trust import ALONE, StoreTrust

log = logging.getLogger(__name__)

T = TypeVar("T")
Returned: TypeAlias = Callable[[BackendCall, "CallAnswer | Exception"], None]


def perform(backend: Backend, call: BackendCall, trust: StoreTrust = ALONE) -> CallAnswer:
    """Perform it; raises whatever the backend raises."""
    match call.kind:
        case OrderKind.EXISTS:
            return CallAnswer([bool(each) for each in _matched(call, backend.exists(call.keys))])
        case OrderKind.PUT:
            seal_all(call.frames, call.keys, call.origins, trust)
            wrong = _matched(call, backend.put(call.keys, call.frames))
            return CallAnswer([not each for each in wrong], next((each for each in wrong if each), ""))
        case OrderKind.GET:
            return _got(backend, call, trust)


def _got(backend: Backend, call: BackendCall, trust: StoreTrust) -> CallAnswer:
    for frame in call.frames:
        frame[:FRAME_BYTES] = bytes(FRAME_BYTES)  # leftovers of an earlier call must not look like an answer
    sizes = _matched(call, backend.get(call.keys, call.frames))
    frames, claims = [], []
    proven: set[bytes] = set()
    for key, frame, size in zip(call.keys, call.frames, sizes, strict=True):
        if backend.lands_late and size == frame.nbytes:
            frame = memoryview(bytes(frame))  # copied before checking: late bytes must not change it
        frames.append(frame)
        claims.append(claimed(frame, key, trust, proven) if size == frame.nbytes else None)
    # Values after all headers: Python's own memory would leave the processor's cache with each value.
    good = [claim is not None and claim.fits(frame) for claim, frame in zip(claims, frames, strict=True)]
    writers = [claim.names if is_so and claim else () for is_so, claim in zip(good, claims, strict=True)]
    damaged = [key for key, size, is_so in zip(call.keys, sizes, good, strict=True) if size and not is_so]
    if damaged:
        backend.discard(damaged)
    return CallAnswer(good, f"damaged: {damaged[0]}" if damaged else "", len(damaged), frames, writers)


def _matched(call: BackendCall, answers: Sequence[T]) -> list[T]:
    if len(answers) != len(call.keys):
        raise ValueError(f"{call.kind.value}: {len(answers)} answers for {len(call.keys)} keys")
    return list(answers)


class Workers:
    """As many threads as concurrent calls; `returned` is called on them."""

    def __init__(self, backend: Backend, returned: Returned) -> None:
        self.trust = ALONE  # replaced as keys change; a call uses what it finds when it begins
        self._backend = backend
        self._returned = returned
        self._calls: SimpleQueue[BackendCall | None] = SimpleQueue()
        self._lock = threading.Lock()
        self._threads = 0
        self._idle = 0
        self._stopped = False

    def begin(self, call: BackendCall) -> None:
        """RuntimeError when no thread can take it, as after `stop`: the backend may be closed by then."""
        with self._lock:
            if self._stopped:
                raise RuntimeError("the store was closed")
            if self._idle:
                self._idle -= 1
            else:
                threading.Thread(target=self._run, name=f"kvbaton-store-{self._threads + 1}", daemon=True).start()
                self._threads += 1
            self._calls.put(call)

    def stop(self) -> None:
        """Threads end when they are idle; a stuck one ends when it returns."""
        with self._lock:
            self._stopped = True
            for _ in range(self._threads):
                self._calls.put(None)

    def _run(self) -> None:
        while (call := self._calls.get()) is not None:
            try:
                outcome: CallAnswer | Exception = perform(self._backend, call, self.trust)
            except Exception as error:  # noqa: BLE001 - a library's, of whatever kind: the keeper counts and tells it
                outcome = error
            with self._lock:
                self._idle += 1
            self._returned(call, outcome)
            del call, outcome  # an idle thread keeps no references
