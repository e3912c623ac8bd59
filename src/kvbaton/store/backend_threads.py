"""Performs calls on a backend, on threads that may block for as long as the backend does.

Laws: digests are computed, signed and verified here, off every other thread, so data from a backend is valid only if
its frame says so. That is done while the bytes beside them move, a part at a time, and ends before the call does. An
exception or a nonsensical answer of a backend becomes an exception in the outcome; nothing else leaves a worker. There
are never more threads than concurrent calls and two for digests, and an idle one sleeps.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from queue import SimpleQueue
from typing import TypeAlias, TypeVar

from kvbaton.store.interface import Backend
from kvbaton.store.order_scripts import BackendCall, CallAnswer, OrderKind
from kvbaton.store.value_header import FRAME_BYTES, held, seal_all
from kvbaton.store.value_trust import ALONE, StoreTrust

log = logging.getLogger(__name__)

PART_BYTES = 8 << 20
"""What is sealed, or checked, while the part beside it moves. Less would leave less time in which nothing moves, more
costs fewer signatures: a signature and its check take 0.3 ms, the digests of a part 2 ms."""

T = TypeVar("T")
Returned: TypeAlias = Callable[[BackendCall, "CallAnswer | Exception"], None]
Aside: TypeAlias = Callable[[Callable[[], None]], Callable[[], None]]
"""Begins some work elsewhere; what it returns waits for its end, and raises what that raised."""


def at_once(work: Callable[[], None]) -> Callable[[], None]:
    work()
    return lambda: None


def perform(backend: Backend, call: BackendCall, trust: StoreTrust = ALONE, aside: Aside = at_once) -> CallAnswer:
    """Perform it; raises whatever the backend raises."""
    match call.kind:
        case OrderKind.EXISTS:
            return CallAnswer([bool(each) for each in _matched(call.keys, backend.exists(call.keys))])
        case OrderKind.PUT:
            return _put(backend, call, trust, aside)
        case OrderKind.GET:
            return _got(backend, call, trust, aside)


def _put(backend: Backend, call: BackendCall, trust: StoreTrust, aside: Aside) -> CallAnswer:
    def seal(part: slice) -> None:
        seal_all(call.frames[part], call.keys[part], call.origins, trust)

    wrong: list[str] = []
    parts = list(_parts(call.frames))
    seal(parts[0])
    for part, following in zip(parts, [*parts[1:], None], strict=True):
        with _meanwhile(aside, seal, following):
            wrong += _matched(call.keys[part], backend.put(call.keys[part], call.frames[part]))
    return CallAnswer([not each for each in wrong], next((each for each in wrong if each), ""))


def _got(backend: Backend, call: BackendCall, trust: StoreTrust, aside: Aside) -> CallAnswer:
    got = _Got(call, trust, backend.lands_late)
    for frame in call.frames:
        frame[:FRAME_BYTES] = bytes(FRAME_BYTES)  # leftovers of an earlier call must not look like an answer
    last: slice | None = None
    for part in _parts(call.frames):
        with _meanwhile(aside, got.check, last):
            sizes = _matched(call.keys[part], backend.get(call.keys[part], call.frames[part]))
        got.sizes += sizes
        last = part
    if last is not None:
        got.check(last)
    if got.damaged:
        backend.discard(got.damaged)
    return got.answer


class _Got:
    """The values of a get, checked in their order."""

    def __init__(self, call: BackendCall, trust: StoreTrust, lands_late: bool) -> None:
        self.sizes: list[int] = []
        self.damaged: list[str] = []
        self._call = call
        self._trust = trust
        self._lands_late = lands_late
        self._proven: set[bytes] = set()
        self._frames: list[memoryview] = []
        self._writers: list[tuple[bytes, ...] | None] = []

    def check(self, part: slice) -> None:
        call = self._call
        for key, frame, size in zip(call.keys[part], call.frames[part], self.sizes[part], strict=True):
            if self._lands_late and size == frame.nbytes:
                frame = memoryview(bytes(frame))  # copied before checking: late bytes must not change it
            self._frames.append(frame)
            names = held(frame, key, self._trust, self._proven) if size == frame.nbytes else None
            self._writers.append(names)
            if size and names is None:
                self.damaged.append(key)

    @property
    def answer(self) -> CallAnswer:
        damaged = self.damaged
        good = [each is not None for each in self._writers]
        writers = [each or () for each in self._writers]
        return CallAnswer(good, f"damaged: {damaged[0]}" if damaged else "", len(damaged), self._frames, writers)


@contextlib.contextmanager
def _meanwhile(aside: Aside, work: Callable[[slice], None], part: slice | None) -> Iterator[None]:
    """That work on a part has ended when the body is left, in whatever way: frames are the call's until then."""
    if part is None:
        yield
        return
    wait = aside(lambda: work(part))
    try:
        yield
    finally:
        wait()


def _parts(frames: Sequence[memoryview]) -> Iterator[slice]:
    start = total = 0
    for index, frame in enumerate(frames):
        if total and total + frame.nbytes > PART_BYTES:
            yield slice(start, index)
            start, total = index, 0
        total += frame.nbytes
    yield slice(start, len(frames))


def _matched(keys: Sequence[str], answers: Sequence[T]) -> list[T]:
    if len(answers) != len(keys):
        raise ValueError(f"{len(answers)} answers for {len(keys)} keys")
    return list(answers)


class Workers:
    """As many threads as concurrent calls; `returned` is called on them."""

    def __init__(self, backend: Backend, returned: Returned) -> None:
        self.trust = ALONE  # replaced as keys change; a call uses what it finds when it begins
        self._backend = backend
        self._returned = returned
        self._digesting = ThreadPoolExecutor(2, "kvbaton-store-digest")  # for a put and a get; starts none before
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
        self._digesting.shutdown(wait=False)

    def _aside(self, work: Callable[[], None]) -> Callable[[], None]:
        return self._digesting.submit(work).result

    def _run(self) -> None:
        while (call := self._calls.get()) is not None:
            try:
                outcome: CallAnswer | Exception = perform(self._backend, call, self.trust, self._aside)
            except Exception as error:  # noqa: BLE001 - a library's, of whatever kind: the keeper counts and tells it
                outcome = error
            with self._lock:
                self._idle += 1
            self._returned(call, outcome)
            del call, outcome  # an idle thread keeps no references
