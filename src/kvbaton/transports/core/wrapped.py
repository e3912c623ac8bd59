"""A transport around another one: everything passes through, except what a subclass changes.

A transport that delays every copy, or misplaces what it brings: for tests on real engines of expiry during a copy, and
of whether wrong KV shows in an answer.

Laws: a delayed one changes nothing but the time; a copy that is cancelled while it waits ends as cancelled, at rest. A
misplacing one fills exactly the requested places, of requested bytes alone, so that it works wherever the inner one
does; some of these bytes it brings twice and others never. Pages that merely change places would not do: keys have
their positions in them, so attention to full pages is the same in any order.

A transport whose owner learns its identity later: a rank has its memory before its engine has an incarnation (rule
3).

Law: before `open` only `register` and `set_waker` have a lasting effect; after it this is the real one.
"""

from __future__ import annotations

import threading
import time
from array import array
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import msgspec

from kvbaton.protocol.effects import Capabilities, Direction
from kvbaton.protocol.errors import Reason
from kvbaton.protocol.geometry.spans import Weave
from kvbaton.protocol.ids import JobId, PeerId
from kvbaton.transports.core.shared_memory import mapped_bytes_of
from kvbaton.transports.core.transport import (
    Copy,
    CopyEnded,
    LendingTransport,
    Loan,
    PageTable,
    Transport,
    TransportEvent,
    refusals_of,
)


class WrappedTransport:
    """See `base.Transport`."""

    def __init__(self, inner: Transport | None) -> None:
        """None: a subclass sets it later."""
        self._inner = inner

    @property
    def inner(self) -> Transport:
        assert self._inner is not None
        return self._inner

    @property
    def capabilities(self) -> Capabilities:
        return self.inner.capabilities

    @property
    def refusals(self) -> Mapping[str, int]:
        return refusals_of(self._inner)

    @property
    def mapped_bytes(self) -> int:
        return mapped_bytes_of(self._inner)

    def register(self, region: int, memory: Any) -> None:
        cast(Any, self.inner).register(region, memory)

    def endpoint(self, peer: PeerId) -> bytes:
        return self.inner.endpoint(peer)

    def connect(self, peer: PeerId, endpoint: bytes) -> None:
        self.inner.connect(peer, endpoint)

    def disconnect(self, peer: PeerId) -> None:
        self.inner.disconnect(peer)

    def lay_out(self, tables: Sequence[PageTable]) -> None:
        cast(LendingTransport, self.inner).lay_out(tables)

    def lend(self, loan: Loan) -> None:
        cast(LendingTransport, self.inner).lend(loan)

    def submit(self, copy: Copy) -> bool:
        return self.inner.submit(copy)

    def cancel(self, job: JobId) -> None:
        self.inner.cancel(job)

    def fence(self, peer: PeerId) -> None:
        self.inner.fence(peer)

    def drain(self) -> Sequence[TransportEvent]:
        return self.inner.drain()

    def set_waker(self, waker: Callable[[], None]) -> None:
        self.inner.set_waker(waker)

    def close(self) -> None:
        self.inner.close()


WAITING_MAX = 4096


class DelayedTransport(WrappedTransport):
    """Another transport, whose memory is registered already, `delay_s` later."""

    def __init__(self, inner: Transport, delay_s: float) -> None:
        super().__init__(inner)
        self._delay_s = delay_s
        self._waiting: deque[tuple[float, Copy]] = deque()
        self._news: list[TransportEvent] = []
        self._changed = threading.Condition()
        self._open = True
        self._waker: Callable[[], None] = lambda: None
        threading.Thread(target=self._run, name="kvbaton-delayed", daemon=True).start()

    def disconnect(self, peer: PeerId) -> None:
        self._drop(lambda copy: copy.peer == peer, Reason.PEER_GONE)
        self.inner.disconnect(peer)

    def submit(self, copy: Copy) -> bool:
        with self._changed:
            if len(self._waiting) >= WAITING_MAX:
                return False
            self._waiting.append((time.monotonic() + self._delay_s, copy))
            self._changed.notify()
        return True

    def cancel(self, job: JobId) -> None:
        self._drop(lambda copy: copy.job == job, Reason.CANCELLED)
        self.inner.cancel(job)

    def fence(self, peer: PeerId) -> None:
        self._drop(lambda copy: copy.peer == peer, Reason.TRANSFER_FAILED)
        self.inner.fence(peer)

    def drain(self) -> Sequence[TransportEvent]:
        with self._changed:
            news, self._news = self._news, []
        return [*news, *self.inner.drain()]

    def set_waker(self, waker: Callable[[], None]) -> None:
        self._waker = waker
        self.inner.set_waker(waker)

    def close(self) -> None:
        with self._changed:
            self._open = False
            self._changed.notify()
        self._drop(lambda _copy: True, Reason.CANCELLED)
        self.inner.close()

    def _drop(self, chosen: Callable[[Copy], bool], reason: Reason) -> None:
        with self._changed:
            ended = [copy for _, copy in self._waiting if chosen(copy)]
            self._waiting = deque(item for item in self._waiting if not chosen(item[1]))
            self._news += [CopyEnded(copy.job, reason) for copy in ended]
        if ended:
            self._waker()

    def _run(self) -> None:
        while True:
            with self._changed:
                if not self._open:
                    return
                left_s = self._waiting[0][0] - time.monotonic() if self._waiting else None
                if left_s is None or left_s > 0:
                    self._changed.wait(left_s)
                    continue
                _, copy = self._waiting[0]
                if self.inner.submit(copy):
                    self._waiting.popleft()
                    continue
            time.sleep(0.001)  # the inner queue is full


class MisplacingTransport(DelayedTransport):
    """Another transport; while a file of that name exists, every block of a copy is filled with the copy's first. A
    number in the file spares copies of fewer bytes."""

    def __init__(self, inner: Transport, delay_s: float, while_there: Path) -> None:
        super().__init__(inner, delay_s)
        self._while_there = while_there

    def submit(self, copy: Copy) -> bool:
        try:
            least = int(self._while_there.read_text() or 0)
        except FileNotFoundError:
            return super().submit(copy)
        size = sum(copy.spans[2::3]) + (copy.weave.bytes if copy.weave is not None else 0)
        return super().submit(copy if size < least else misplaced(copy))


def faulty(plane: Transport, delay_s: float, misplace_while: str) -> Transport:
    """`plane` with the faults that a test has requested, if any."""
    if misplace_while:
        return MisplacingTransport(plane, delay_s, Path(misplace_while))
    return DelayedTransport(plane, delay_s) if delay_s else plane


def misplaced(copy: Copy) -> Copy:
    """The same places, of which those as long as the first are filled with what belongs into the first; pure."""
    source = 1 if copy.direction is Direction.READ else 0
    weave = copy.weave
    if weave is not None:
        weave = Weave(_repeated(weave.column, source), weave.shifts)
    return msgspec.structs.replace(copy, spans=_repeated(copy.spans, source), weave=weave)


def _repeated(spans: array[int], source: int) -> array[int]:
    """(local offset, remote offset, bytes) triples; `source`: which of the two offsets is where bytes come from. Of a
    single one the second half is filled with its first."""
    found = array("q", spans)
    alike = [at for at in range(3, len(found), 3) if found[at + 2] == found[2]]
    for at in alike:
        found[at + source] = found[source]
    if found and not alike and (half := found[2] // 2):
        local, remote, size = found[:3]
        second = [local + half, remote + half]
        second[source] -= half
        found[:3] = array("q", (local, remote, half, *second, half))
        if size % 2:
            found.extend((local + size - 1, remote + size - 1, 1))
    return found


class UnnamedTransport(WrappedTransport):
    """Makes the real transport when given its name."""

    def __init__(self, capabilities: Capabilities, make: Callable[[PeerId], Transport]) -> None:
        super().__init__(None)
        self._capabilities = capabilities
        self._make = make
        self._waker: Callable[[], None] | None = None

    def open(self, me: PeerId) -> None:
        """From now on it can be reached as `me`. A second name is refused: a new incarnation has new transports."""
        if self._inner is not None:
            raise RuntimeError(f"this transport has a name already; {me} needs its own")
        self._inner = self._make(me)
        if self.capabilities.lends_writes:
            self.lay_out(())  # nothing can be lent before the engine has said where blocks are
        if self._waker is not None:
            self._inner.set_waker(self._waker)

    @property
    def inner(self) -> Transport:
        if self._inner is None:
            raise RuntimeError("this transport has no owner yet")
        return self._inner

    @property
    def capabilities(self) -> Capabilities:
        return self._capabilities

    def register(self, region: int, memory: Any) -> None:
        raise NotImplementedError("memory is registered when the real transport is made")

    def drain(self) -> Sequence[TransportEvent]:
        return self._inner.drain() if self._inner is not None else ()

    def set_waker(self, waker: Callable[[], None]) -> None:
        self._waker = waker
        if self._inner is not None:
            self._inner.set_waker(waker)

    def close(self) -> None:
        if self._inner is not None:
            self._inner.close()
