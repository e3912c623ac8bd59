"""A data plane that lies: it says that a copy went well, and one byte of it is wrong. For tests of checksums.

Law: exactly the byte that `strike` names differs, and only at the receiver. What was read is changed after it landed;
what is written is changed while it is sent, and is right again at the source before anyone hears of the end.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Sequence
from typing import TypeAlias

from kvbaton.protocol.ids import JobId
from kvbaton.transports.core.transport import Copy, CopyEnded, Direction, HostTransport, TransportEvent
from kvbaton.transports.core.wrapped import WrappedTransport

Strike: TypeAlias = Callable[[Copy], int | None]
"""Which byte of a copy goes wrong, counted over its segments in order; None for a copy that is left alone."""

STRUCK_MAX = 4096


def some_byte(seed: int, one_in: int = 1) -> Strike:
    """A random byte of one copy in `one_in`."""
    rng = random.Random(seed)

    def strike(copy: Copy) -> int | None:
        total = sum(copy.spans[2::3])
        return rng.randrange(total) if total and not rng.randrange(one_in) else None

    return strike


class CorruptingTransport(WrappedTransport):
    """Another transport, whose copies arrive with a wrong byte. Put checksums around it, not beneath it."""

    def __init__(self, inner: HostTransport, strike: Strike) -> None:
        super().__init__(inner)
        self._strike = strike
        self._memory: dict[int, memoryview] = {}
        self._lock = threading.Lock()
        self._marked: dict[JobId, tuple[Copy, int]] = {}  # with the place in local memory
        self.struck: list[JobId] = []  # copies that ended well but for one byte; the last `STRUCK_MAX`

    def register(self, region: int, memory: memoryview) -> None:
        super().register(region, memory)
        self._memory[region] = memory.cast("B")

    def submit(self, copy: Copy) -> bool:
        with self._lock:
            byte = self._strike(copy)
            if byte is None:
                return self.inner.submit(copy)
            place = _place(copy, byte)
            self._marked[copy.job] = copy, place
            if copy.direction is Direction.WRITE:
                self._flip(copy, place)
            accepted = self.inner.submit(copy)
            if not accepted:
                self._unmark(copy.job)
            return accepted

    def drain(self) -> Sequence[TransportEvent]:
        events = self.inner.drain()
        with self._lock:
            for event in events:
                if isinstance(event, CopyEnded) and event.job in self._marked:
                    self._ended(event)
        return events

    def _ended(self, event: CopyEnded) -> None:
        copy, place = self._marked[event.job]
        if event.reason is None:
            self.struck = [*self.struck, event.job][-STRUCK_MAX:]
        if copy.direction is Direction.READ and event.reason is None:
            self._flip(copy, place)
        self._unmark(event.job)

    def _unmark(self, job: JobId) -> None:
        copy, place = self._marked.pop(job)
        if copy.direction is Direction.WRITE:
            self._flip(copy, place)

    def _flip(self, copy: Copy, place: int) -> None:
        self._memory[copy.local_region][place] ^= 0x01


def _place(copy: Copy, byte: int) -> int:
    """Where the byte of a copy lies in local memory."""
    for local, size in zip(copy.spans[0::3], copy.spans[2::3], strict=True):
        if byte < size:
            return local + byte
        byte -= size
    raise ValueError(f"job {copy.job} has {byte} bytes fewer than that")
