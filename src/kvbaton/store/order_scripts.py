"""Each kind of order as a script: a generator that yields backend calls and receives their answers.

Law: a put's pin is dropped in the one `finally` of `_put`: after its last byte was copied, or when the script is left
in any other way, by an answer or an exception thrown in for a timeout, a cancel or a shutdown. `begin` runs a put up to
its first call, so there is no time at which the pin is held and the `finally` not armed.
"""

from __future__ import annotations

import enum
import mmap
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from kvbaton.protocol.errors import Reason
from kvbaton.store.interface import Get, Lookup, Order, Pieces, Pins, Put
from kvbaton.store.value_header import FRAME_BYTES


class OrderKind(enum.Enum):
    EXISTS = "exists"
    GET = "get"
    PUT = "put"


@dataclass(slots=True, eq=False)
class BackendCall:
    """One backend operation, on a thread that may block. `frames` are in the caller's slot."""

    kind: OrderKind
    keys: tuple[str, ...]
    frames: tuple[memoryview, ...] = ()
    origins: tuple[bytes, ...] = ()  # of a put: whose KV these values may be computed on
    deadline: float = 0.0  # set when it starts


class CallAnswer:
    """The result of a call: per key whether it is good (present, intact, stored), and the first error.

    `frames` hold the data of a get, in memory that nothing else can change.
    """

    __slots__ = ("damaged", "detail", "frames", "good", "writers")

    def __init__(
        self,
        good: Sequence[bool],
        detail: str = "",
        damaged: int = 0,
        frames: Sequence[memoryview] = (),
        writers: Sequence[tuple[bytes, ...]] = (),
    ) -> None:
        self.good = tuple(good)
        self.detail = detail
        self.damaged = damaged
        self.frames = frames
        self.writers = writers or ((),) * len(self.good)  # of a get: from whom each value is

    @property
    def lead(self) -> int:
        """How many keys are good, from the first on."""
        return next((index for index, is_so in enumerate(self.good) if not is_so), len(self.good))


class RefusedCall(Exception):
    """Thrown into a script: why its order ends now."""

    def __init__(self, reason: Reason, detail: str) -> None:
        super().__init__(detail)
        self.reason = reason
        self.detail = detail


Script: TypeAlias = Generator[BackendCall, CallAnswer, None]
FrameOf: TypeAlias = Callable[[int, int], memoryview]
"""(index, value bytes) to a frame of the slot that the order has."""


@dataclass(slots=True, eq=False)
class Task:
    """One accepted order. The scheduler fills in `frame` when its turn comes."""

    order: Order
    deadline: float
    batch: int
    count: int = 0
    reason: Reason | None = None
    detail: str = ""
    writers: dict[bytes, None] = field(default_factory=dict)  # of a get: from whom what has landed is
    frame: FrameOf | None = None
    first: BackendCall | None = None  # of a put, which is in flight from the moment it is accepted
    script: Script = field(init=False)

    def begin(self, pins: Pins) -> None:
        """On the submitting thread: a put pins, and stops at its first call."""
        match self.order:
            case Put():
                self.script = _put(self, self.order, pins)
                self.first = next(self.script)
            case Get():
                self.script = _get(self, self.order)
            case Lookup():
                self.script = _lookup(self, self.order)

    def frames(self, values: Sequence[Pieces], *, writes: bool) -> tuple[memoryview, ...]:
        """A frame for each value."""
        if self.frame is None:
            raise RefusedCall(Reason.BUSY, "all staging memory is held by calls that have not returned")
        try:
            if writes and any(piece.readonly for pieces in values for piece in pieces):
                raise ValueError("a piece cannot be written to")
            return tuple(self.frame(index, size_of(pieces)) for index, pieces in enumerate(values))
        except ValueError as error:
            raise RefusedCall(Reason.BAD_SPAN, f"{'into' if writes else 'values'}: {error}") from None


def _lookup(task: Task, order: Lookup) -> Script:
    answer = yield BackendCall(OrderKind.EXISTS, order.keys)
    task.count = answer.lead


def _get(task: Task, order: Get) -> Script:
    for start, stop in _batches(len(order.keys), task.batch):
        frames = task.frames(order.into[start:stop], writes=True)
        answer = yield BackendCall(OrderKind.GET, order.keys[start:stop], frames)
        for index in range(answer.lead):
            scatter(answer.frames[index], order.into[start + index])
            task.writers.update(dict.fromkeys(answer.writers[index]))
            task.count += 1
        if answer.lead < stop - start:
            task.detail = answer.detail
            return


def _put(task: Task, order: Put, pins: Pins) -> Script:
    pins.pin(order.order, order.blocks)
    try:
        answer = yield BackendCall(OrderKind.EXISTS, order.keys)
        wanted = [index for index, is_there in enumerate(answer.good) if not is_there]
        task.count = len(order.keys) - len(wanted)
        last: BackendCall | None = None
        for start, stop in _batches(len(wanted), task.batch):
            if last is not None and not (yield from _kept(task, last)):
                return
            last = _staged(task, order, wanted[start:stop])
    finally:
        pins.unpin(order.order)
    if last is not None:
        yield from _kept(task, last)


def _staged(task: Task, order: Put, indexes: Sequence[int]) -> BackendCall:
    frames = task.frames([order.values[index] for index in indexes], writes=False)
    for frame, index in zip(frames, indexes, strict=True):
        gather(order.values[index], frame)
    return BackendCall(OrderKind.PUT, tuple(order.keys[index] for index in indexes), frames, order.origins)


def _kept(task: Task, call: BackendCall) -> Generator[BackendCall, CallAnswer, bool]:
    """Put one batch; whether to continue. After a hole the rest would never be found."""
    answer = yield call
    task.count += sum(answer.good)
    if not all(answer.good):
        task.reason, task.detail = Reason.STORE_FAILED, answer.detail
    return all(answer.good)


def _batches(count: int, size: int) -> Iterator[tuple[int, int]]:
    for start in range(0, count, size):
        yield start, min(start + size, count)


class Staging:
    """Memory that a store shares with its backend: `slots` slots of one call each, with room for `frames` frames of at
    most `value_bytes_max` each. A backend never sees engines' memory.

    Law: a slot has at most one owner. A slot whose call was abandoned stays with that call until it returns: a library
    that cannot cancel may read and write it for as long as it likes, without harm. The price is one more copy in each
    direction (about 8 GB/s at 16 KiB pieces); it also makes one contiguous object of a block's many pieces, which
    Mooncake moves three times as fast.
    """

    def __init__(self, slots: int, frames: int, value_bytes_max: int) -> None:
        self.frames = frames
        self.value_bytes_max = value_bytes_max
        self._pitch = -(-(FRAME_BYTES + value_bytes_max) // FRAME_BYTES) * FRAME_BYTES
        self._map = mmap.mmap(-1, max(1, slots * frames * self._pitch))
        self.memory = memoryview(self._map)
        self._free = list(range(slots))

    @property
    def free(self) -> int:
        return len(self._free)

    def take(self) -> int | None:
        """A slot, or None when all are in use or held by calls that have not returned."""
        return self._free.pop() if self._free else None

    def give_back(self, slot: int) -> None:
        if slot in self._free:
            raise ValueError(f"slot {slot} is free already")
        self._free.append(slot)

    def frame(self, slot: int, index: int, value_bytes: int) -> memoryview:
        """The `index`th frame of a slot, sized for such a value; ValueError when it has no room."""
        if not 0 < value_bytes <= self.value_bytes_max or not 0 <= index < self.frames:
            raise ValueError(f"a value of {value_bytes} bytes; 1..{self.value_bytes_max}")
        at = (slot * self.frames + index) * self._pitch
        return self.memory[at : at + FRAME_BYTES + value_bytes]


def size_of(pieces: Pieces) -> int:
    """The size of a value; ValueError unless its pieces are contiguous bytes."""
    if any(piece.format != "B" or not piece.c_contiguous for piece in pieces):
        raise ValueError("a piece is not a contiguous memoryview of bytes")
    return sum(piece.nbytes for piece in pieces)


def gather(pieces: Sequence[memoryview], frame: memoryview) -> None:
    """Copy an engine's pieces after the header of a frame."""
    at = FRAME_BYTES
    for piece in pieces:
        frame[at : at + piece.nbytes] = piece
        at += piece.nbytes


def scatter(frame: memoryview, pieces: Sequence[memoryview]) -> None:
    """Copy a frame's value into an engine's pieces."""
    at = FRAME_BYTES
    for piece in pieces:
        piece[:] = frame[at : at + piece.nbytes]
        at += piece.nbytes
