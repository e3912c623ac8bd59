"""The harness of the transport contract, as a transport's author provides it.

A harness wires two transports of one kind together, `near` (under test, in this process) and `far` (here or elsewhere),
and lets time pass. One on virtual time pumps its world in `wait`; one on real time polls. Whatever a harness does not
offer (killing or pausing the far side, idling in real time) it leaves out of `offers`; cases that need it are skipped.

A data plane that lies: it says that a copy went well, and one byte of it is wrong. For tests of checksums.

Law: exactly the byte that `strike` names differs, and only at the receiver. What was read is changed after it landed;
what is written is changed while it is sent, and is right again at the source before anyone hears of the end.
"""

from __future__ import annotations

import math
import random
import threading
import time
from collections.abc import Callable, Sequence
from typing import Protocol, TypeAlias, cast

import msgspec

from kvbaton.protocol.effects import Capabilities
from kvbaton.protocol.ids import Incarnation, JobId, PeerId, WorkerId
from kvbaton.transports.core.loans import lend_everything
from kvbaton.transports.core.transport import (
    Copy,
    CopyEnded,
    CopyRested,
    Direction,
    HostTransport,
    LendingTransport,
    TransportEvent,
)
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


DEADLINE_S = 30.0
POLL_S = 0.001
POLL_MAX_S = 0.008
"""Who is asked again and again for long is asked less often: to ask costs more than what is waited for."""
IDLE_LOOKS = 10


class Drives(Protocol):
    """The part of `Transport` that cases use once two sides are connected; the far side may be a proxy."""

    def endpoint(self, peer: PeerId) -> bytes: ...
    def connect(self, peer: PeerId, endpoint: bytes) -> None: ...
    def disconnect(self, peer: PeerId) -> None: ...
    def submit(self, copy: Copy) -> bool: ...
    def cancel(self, job: JobId) -> None: ...
    def fence(self, peer: PeerId) -> None: ...
    def drain(self) -> Sequence[TransportEvent]: ...
    def set_waker(self, waker: Callable[[], None]) -> None: ...
    def close(self) -> None: ...


class Side(msgspec.Struct):
    """One transport, and the memory that it has registered as region 0 (readable here even if its process stops)."""

    peer: PeerId
    transport: Drives
    memory: memoryview


class Pair(msgspec.Struct):
    """Two sides that have exchanged endpoints."""

    near: Side
    far: Side


class TransportHarness(Protocol):
    """What a third party implements; `InProcessHarness` does it for any transport with real threads or sockets."""

    capabilities: Capabilities
    offers: frozenset[str]  # of "kill", "pause", "idle"

    def pair(self, near_bytes: int, far_bytes: int) -> Pair:
        """Two fresh sides, connected both ways, each with that much memory; all of it lent to the other side, where the
        transport enforces that (`loans.lend_everything`)."""

    def wait(self, predicate: Callable[[], bool], deadline_s: float) -> bool:
        """Let time pass until `predicate` holds; False at the deadline."""

    def kill(self, side: Side) -> None:
        """End the far side without a word, as SIGKILL does."""

    def pause(self, side: Side) -> None:
        """Stop the far side as SIGSTOP does: it is there, and does nothing."""

    def resume(self, side: Side) -> None: ...

    def reset(self) -> None:
        """Close every pair."""


class Log:
    """Everything that one side reported, collected while waiting."""

    def __init__(self, harness: TransportHarness, side: Side) -> None:
        self._harness = harness
        self._side = side
        self.events: list[TransportEvent] = []
        self._ends: dict[int, list[CopyEnded]] = {}
        self._sorted = 0  # so many of the events are among `_ends`, or no end

    def ends(self, job: int) -> list[CopyEnded]:
        for event in self.events[self._sorted :]:
            if isinstance(event, CopyEnded):
                self._ends.setdefault(event.job, []).append(event)
        self._sorted = len(self.events)
        return list(self._ends.get(job, ()))

    def rested(self, job: int) -> bool:
        """Whether the job can touch no memory any more."""
        return any(end.at_rest for end in self.ends(job)) or CopyRested(JobId(job)) in self.events

    def wait(self, predicate: Callable[[], bool], deadline_s: float = DEADLINE_S) -> bool:
        def drained() -> bool:
            self.events.extend(self._side.transport.drain())
            return predicate()

        return self._harness.wait(drained, deadline_s)

    def end(self, job: int) -> CopyEnded:
        """The end of `job`; AssertionError when there is none in time."""
        assert self.wait(lambda: bool(self.ends(job))), f"job {job} did not end within {DEADLINE_S} s: {self.events}"
        return self.ends(job)[0]

    def rest(self, job: int) -> CopyEnded:
        """The end of `job`, once it can touch no memory any more."""
        end = self.end(job)
        assert self.wait(lambda: self.rested(job)), f"job {job} did not come to rest: {self.events}"
        return end


class InProcessHarness:
    """Two transports of real threads or sockets in this process."""

    offers = frozenset({"idle"})

    def __init__(
        self, make: Callable[[PeerId], HostTransport], allocate: Callable[[int], memoryview], capabilities: Capabilities
    ) -> None:
        self.capabilities = capabilities
        self._make = make
        self._allocate = allocate
        self._transports: list[HostTransport] = []

    def pair(self, near_bytes: int, far_bytes: int) -> Pair:
        number = len(self._transports)
        sides = []
        for name, size in (("near", near_bytes), ("far", far_bytes)):
            peer = PeerId(WorkerId(name), Incarnation(number + 1))
            transport = self._make(peer)
            self._transports.append(transport)
            memory = self._allocate(size)
            transport.register(0, memory)
            sides.append(Side(peer, transport, memory))
        near, far = sides
        able = self.capabilities
        lend_everything(cast(LendingTransport, near.transport), far.peer, able=able)
        lend_everything(cast(LendingTransport, far.transport), near.peer, able=able)
        near.transport.connect(far.peer, far.transport.endpoint(near.peer))
        far.transport.connect(near.peer, near.transport.endpoint(far.peer))
        return Pair(near, far)

    def wait(self, predicate: Callable[[], bool], deadline_s: float) -> bool:
        return poll(predicate, deadline_s)

    def kill(self, side: Side) -> None:
        raise NotImplementedError("one process cannot lose half of itself")

    pause = resume = kill

    def reset(self) -> None:
        for transport in self._transports:
            transport.close()
        self._transports.clear()


def poll(predicate: Callable[[], bool], deadline_s: float) -> bool:
    """Ask until the answer is yes; False after `deadline_s`."""
    deadline, pause_s = time.monotonic() + deadline_s, POLL_S
    while not predicate():
        if time.monotonic() > deadline:
            return False
        time.sleep(pause_s)
        pause_s = min(1.25 * pause_s, POLL_MAX_S)
    return True


def idle_cpu_s(idle_s: float, enough_s: float) -> float:
    """The least CPU that this process used in some looks of `idle_s`; fewer of them once it is less than `enough_s`.

    The process may have other things to do, and what spins does so each time. While the machine stands still nothing
    spins, so a look that took twice its time shows nothing.
    """
    least_s = math.inf
    for _ in range(IDLE_LOOKS):
        begun, before = time.monotonic(), time.process_time()
        time.sleep(idle_s)  # the measurement itself: nothing is waited for
        spent_s = time.process_time() - before
        if time.monotonic() - begun < 2 * idle_s:
            least_s = min(least_s, spent_s)
        if least_s < enough_s:
            break
    return least_s
