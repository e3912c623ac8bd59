"""A `Store` over any `Backend`: one scheduler thread for the orders, and workers that may hang.

Laws: the submitting thread only checks, pins and appends. Only the scheduler's thread touches the scheduler and the
engine's memory, and it never calls a backend. `close` leaves no order open and no pin held; a backend is closed only
when no call is inside it, since libraries do not survive that.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from queue import SimpleQueue
from typing import TypeAlias, TypeVar

from kvbaton.store.interface import Backend, Get, Order, OrderEnded, OrderId, Pins, Put, StoreSettings, is_key
from kvbaton.store.order_scheduler import Keeper
from kvbaton.store.order_scripts import BackendCall, CallAnswer, OrderKind, Task
from kvbaton.store.value_header import ALONE, FRAME_BYTES, StoreTrust, claimed, seal_all

log = logging.getLogger(__name__)

PAUSE_S = 0.05

_Input: TypeAlias = Task | OrderId | tuple[BackendCall, CallAnswer | Exception]


class KeptStore:
    """Implements `Store`. `owned`: the backend belongs to this store, and is closed with it."""

    def __init__(
        self,
        backend: Backend,
        pins: Pins,
        settings: StoreSettings,
        *,
        owned: bool = True,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._settings = settings
        self._pins = pins
        self._backend = backend if owned else None
        self._clock = clock
        self._keeper = Keeper(settings)
        for staging in self._keeper.staging.values():
            backend.register(staging.memory)
        self._workers = Workers(backend, lambda call, outcome: self._post((call, outcome)))
        self._changed = threading.Condition()
        self._inputs: deque[_Input] = deque()
        self._news: list[OrderEnded] = []
        self._open = 0  # accepted, end not drained: bounds the news as well
        self._closed = False
        self._waker: Callable[[], None] = lambda: None
        self._thread = threading.Thread(target=self._run, name="kvbaton-store", daemon=True)
        self._thread.start()

    @property
    def counters(self) -> Mapping[str, int]:
        return self._keeper.counters

    @property
    def stuck(self) -> int:
        """Abandoned calls that have not returned."""
        return self._keeper.stuck

    def set_trust(self, trust: StoreTrust) -> None:
        """Who this engine writes as, and whose values count, from now on. From any thread."""
        self._workers.trust = trust

    def submit(self, order: Order) -> bool:
        check(order, self._settings)
        with self._changed:
            if self._closed or self._open >= self._settings.orders_max:
                return False
            task = Task(order, self._clock() + order.timeout_s, self._settings.values_per_call_max)
            task.begin(self._pins)
            self._open += 1
            self._inputs.append(task)
            self._changed.notify()
            return True

    def cancel(self, order: OrderId) -> None:
        self._post(order)

    def drain(self) -> list[OrderEnded]:
        with self._changed:
            news, self._news = self._news, []
            self._open -= len(news)
            return news

    def set_waker(self, waker: Callable[[], None]) -> None:
        with self._changed:
            self._waker = waker
            ring = bool(self._news)
        if ring:
            self._ring()

    def close(self) -> None:
        with self._changed:
            first, self._closed = not self._closed, True
            self._changed.notify()
        if threading.current_thread() is not self._thread:  # a waker may close
            self._thread.join(self._settings.close_s)
        if not first:
            return
        self._workers.stop()
        if self._backend is None:
            return
        if self._keeper.under_way:
            log.warning("[store-stuck] a call to the store has not returned: its backend is left open")
            return
        closing = threading.Thread(target=self._backend.close, name="kvbaton-store-close", daemon=True)
        closing.start()
        closing.join(self._settings.close_s)

    def _post(self, given: _Input) -> None:
        with self._changed:
            self._inputs.append(given)
            self._changed.notify()

    def _ring(self) -> None:
        try:
            self._waker()
        except Exception:
            log.warning("[waker-failed] the waker raised", exc_info=True)

    # --- the scheduler's thread

    def _run(self) -> None:
        while True:
            with self._changed:
                due = self._keeper.next_deadline()
                if not self._inputs and not self._closed:
                    self._changed.wait(None if due is None else max(0.0, due - self._clock()))
                inputs, self._inputs = self._inputs, deque()
                closed = self._closed
            try:
                self._turn(inputs)  # removes what it handles: the rest is for the next turn
            except Exception:  # a bug in one turn must not leave other orders without an end
                log.exception("[store-fault] the store's scheduler failed; continuing")
                time.sleep(PAUSE_S)
                with self._changed:
                    self._inputs.extendleft(reversed(inputs))
            if closed:
                self._finish()
                return

    def _turn(self, inputs: deque[_Input]) -> None:
        while inputs:
            given, now = inputs.popleft(), self._clock()
            match given:
                case Task():
                    self._keeper.take(given, now)
                case (call, outcome):
                    self._keeper.returned(call, outcome, now)
                case int():
                    self._keeper.cancel(given, now)
            self._tell()
        self._keeper.on_time(self._clock())
        self._tell()

    def _tell(self) -> None:
        for call in self._keeper.calls():
            try:
                self._workers.begin(call)
            except RuntimeError as error:  # out of threads: the call has failed, and the rest start
                self._post((call, error))
        ends = self._keeper.ends()
        if ends:
            with self._changed:
                ring = not self._news
                self._news += ends
            if ring:
                self._ring()

    def _finish(self) -> None:
        """End all orders, and give the calls in flight a while to return."""
        self._keeper.close(self._clock())
        self._tell()
        until = self._clock() + self._settings.close_s / 2
        with self._changed:
            while self._keeper.under_way and self._clock() < until:
                if not self._inputs:
                    self._changed.wait(max(0.0, until - self._clock()))
                while self._inputs:
                    given = self._inputs.popleft()
                    if isinstance(given, tuple):
                        self._keeper.returned(*given, self._clock())


def check(order: Order, settings: StoreSettings) -> None:
    """ValueError names the invalid field of an order.

    Pieces are checked later, on the scheduler's thread: 64 values of 64 pieces would cost the engine's step 1 ms.
    """
    if not 0 < len(order.keys) <= settings.keys_max:
        raise ValueError(f"keys: {len(order.keys)}; give 1..{settings.keys_max}")
    wrong = next((key for key in order.keys if not is_key(key)), None)
    if wrong is not None:
        raise ValueError(f"keys: {wrong[:40]!r} is not a key; make it with store.keys")
    if not 0 < order.timeout_s <= settings.timeout_s_max:
        raise ValueError(f"timeout_s: {order.timeout_s}; give more than 0 and at most {settings.timeout_s_max}")
    count = len(order.keys)
    match order:
        case Get() if len(order.into) != count:
            raise ValueError(f"into: {len(order.into)} values for {count} keys")
        case Put() if len(order.values) != count:
            raise ValueError(f"values: {len(order.values)} values for {count} keys")


T = TypeVar("T")
Returned: TypeAlias = Callable[[BackendCall, "CallAnswer | Exception"], None]


def perform(backend: Backend, call: BackendCall, trust: StoreTrust = ALONE) -> CallAnswer:
    """Perform it; raises whatever the backend raises. On a `Workers` thread.

    Law: digests are computed, signed and verified here, off every other thread, so data from a backend is valid only if
    its frame says so.
    """
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
