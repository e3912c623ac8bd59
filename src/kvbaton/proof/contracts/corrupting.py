"""A data plane that lies: it says that a copy went well, and one byte of it is wrong. For tests of checksums.

Law: exactly the byte that `strike` names differs, and only at the receiver. What was read is changed after it landed;
what is written is changed while it is sent, and is right again at the source before anyone hears of the end.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Sequence
from typing import TypeAlias, cast

from kvbaton.protocol.capabilities import Capabilities
from kvbaton.protocol.ids import JobId, PeerId
from kvbaton.transports.core.transport import (
    Copy,
    CopyEnded,
    Direction,
    HostTransport,
    LendingTransport,
    Loan,
    PageTable,
    TransportEvent,
)

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


class CorruptingTransport:
    """Another transport, whose copies arrive with a wrong byte. Put checksums around it, not beneath it."""

    def __init__(self, inner: HostTransport, strike: Strike) -> None:
        self._inner = inner
        self._strike = strike
        self._memory: dict[int, memoryview] = {}
        self._lock = threading.Lock()
        self._marked: dict[JobId, tuple[Copy, int]] = {}  # with the place in local memory
        self.struck: list[JobId] = []  # copies that ended well but for one byte; the last `STRUCK_MAX`

    @property
    def capabilities(self) -> Capabilities:
        return self._inner.capabilities

    def register(self, region: int, memory: memoryview) -> None:
        self._inner.register(region, memory)
        self._memory[region] = memory.cast("B")

    def endpoint(self, peer: PeerId) -> bytes:
        return self._inner.endpoint(peer)

    def connect(self, peer: PeerId, endpoint: bytes) -> None:
        self._inner.connect(peer, endpoint)

    def disconnect(self, peer: PeerId) -> None:
        self._inner.disconnect(peer)

    def lay_out(self, tables: Sequence[PageTable]) -> None:
        cast(LendingTransport, self._inner).lay_out(tables)

    def lend(self, loan: Loan) -> None:
        cast(LendingTransport, self._inner).lend(loan)

    def submit(self, copy: Copy) -> bool:
        with self._lock:
            byte = self._strike(copy)
            if byte is None:
                return self._inner.submit(copy)
            place = _place(copy, byte)
            self._marked[copy.job] = copy, place
            if copy.direction is Direction.WRITE:
                self._flip(copy, place)
            accepted = self._inner.submit(copy)
            if not accepted:
                self._unmark(copy.job)
            return accepted

    def cancel(self, job: JobId) -> None:
        self._inner.cancel(job)

    def fence(self, peer: PeerId) -> None:
        self._inner.fence(peer)

    def drain(self) -> Sequence[TransportEvent]:
        events = self._inner.drain()
        with self._lock:
            for event in events:
                if isinstance(event, CopyEnded) and event.job in self._marked:
                    self._ended(event)
        return events

    def set_waker(self, waker: Callable[[], None]) -> None:
        self._inner.set_waker(waker)

    def close(self) -> None:
        self._inner.close()

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
