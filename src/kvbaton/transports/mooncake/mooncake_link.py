"""The copies from one peer: a thread, its own engine, and the reads in flight on it.

Law: a read is at rest when the engine says that it is over, or when its engine has been closed; never because time has
passed. Time only decides when the engine is closed: after `stall_s` without any progress, or after `cancel_s` when a
cancelled copy waits for it. That is why each peer has its own engine: closing it affects no other peer, and brings a
peer's reads to rest whatever that peer does.

One failed read closes the engine too. The next copy connects again and reads the peer's mark again, so nothing is read
from another process that has taken the port of a dead peer (the engine itself would reconnect and not notice).

The reads in flight on one Mooncake engine, from their start to their end.

Laws: used only by the thread of its link. A part is over when the engine says so of all its slices. `close` closes the
engine first, so that what it returns is at rest: the library cannot cancel a read, and closing is the only way.
"""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import msgspec

from kvbaton.protocol.errors import Reason
from kvbaton.transports.core.jobs import CopyJob, Jobs, size_of
from kvbaton.transports.core.transport import Spans
from kvbaton.transports.mooncake.mooncake_engine import (
    MARK_BYTES,
    SLICES_MAX,
    MooncakeEndpoint,
    MooncakeEngine,
    SliceState,
    address_of,
)
from kvbaton.transports.net.socket_loop import SocketLoop

PART_SLICES_MAX = 256
WINDOW_BYTES = 32 << 20
"""Asked for and not there: enough to keep the engine's four connections busy, and a cancelled copy rests soon after."""

LOOK_AHEAD = 16
"""Parts end about in the order in which they began, so only the oldest are looked at."""


class ReadFailed(Exception):
    """The engine could not start a read, or one has failed: the connection is unusable."""


@dataclass(slots=True, eq=False)
class MooncakePart:
    """Some slices of a copy, in flight together."""

    job: CopyJob
    spans: Spans
    size_bytes: int
    slices: deque[int] = field(default_factory=deque)  # not yet seen to be over


class Reads:
    """Parts under way with one peer, oldest first."""

    def __init__(self, engine: MooncakeEngine, there: MooncakeEndpoint, address: Callable[[int], int]) -> None:
        """`address` says where a local region begins."""
        self._engine = engine
        self._there = there
        self._address = address
        self._slices = self._bytes = 0
        self.parts: deque[MooncakePart] = deque()
        self.moved_at = 0.0

    @property
    def has_room(self) -> bool:
        return self._slices <= SLICES_MAX - PART_SLICES_MAX and self._bytes < WINDOW_BYTES

    def start(self, job: CopyJob, spans: Spans) -> None:
        if not self.parts:
            self.moved_at = time.monotonic()
        part = MooncakePart(job, spans, size_of(spans))
        self.parts.append(part)
        self._bytes += part.size_bytes
        local = self._address(job.copy.local_region)
        remote = self._there.regions[job.copy.remote_region].address
        numbers = iter(spans)
        for here, there, size in zip(numbers, numbers, numbers, strict=True):
            if size:
                number = self._engine.start_read(self._there.session, local + here, remote + there, size)
                if not number:
                    raise ReadFailed
                part.slices.append(number)
                self._slices += 1

    def over(self) -> list[MooncakePart]:
        """Those of the oldest that are over, taken out."""
        found = [part for part in itertools.islice(self.parts, LOOK_AHEAD) if self._is_over(part)]
        for part in found:
            self.parts.remove(part)
            self._bytes -= part.size_bytes
        return found

    def close(self) -> deque[MooncakePart]:
        """Reads that were in flight, now at rest."""
        self._engine.close()
        parts, self.parts = self.parts, deque()
        return parts

    def _is_over(self, part: MooncakePart) -> bool:
        while part.slices:
            state = self._engine.state(part.slices[0])
            if state is SliceState.MOVING:
                return False
            part.slices.popleft()
            self._slices -= 1
            self.moved_at = time.monotonic()
            if state is SliceState.FAILED:
                raise ReadFailed
        return True


log = logging.getLogger(__name__)

Trouble = tuple[Reason, str]


class Patience(msgspec.Struct, frozen=True):
    """How long a peer may do nothing, in seconds."""

    dial_s: float
    stall_s: float
    cancel_s: float


class MooncakeLink:
    """Carries out copies from one peer, on a thread that the first of them starts."""

    def __init__(
        self,
        name: str,
        here: str,
        there: MooncakeEndpoint,
        jobs: Jobs,
        address: Callable[[int], int],
        patience: Patience,
        timers: SocketLoop,
    ) -> None:
        """`here` is this host's address; `address` says where a local region begins."""
        self.there = there
        self._here = here
        self._jobs = jobs
        self._address = address
        self._patience = patience
        self._timers = timers
        self._queue: deque[CopyJob] = deque()
        self._reads: Reads | None = None  # on the engine that has reached the peer; the thread's own
        self._dials = itertools.count(1)
        self._dialling = 0  # which dial is under way, 0 for none
        self._silent = False  # a dial has taken too long and is not over
        self._shut = False
        self._news = threading.Event()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    # --- from any thread

    def add(self, job: CopyJob) -> None:
        with self._jobs:
            if not job.parts:
                return
            if self._silent or self._shut:
                self._jobs.fail(job, Reason.UNREACHABLE, f"{self.there.owner} does not answer")
                return
            self._queue.append(job)
            if self._thread.ident is None:
                self._thread.start()
        self._news.set()

    def stop(self, job: CopyJob, reason: Reason, detail: str) -> None:
        """End a copy as soon as nothing of it is in flight."""
        with self._jobs:
            if job in self._queue:
                self._queue.remove(job)
            self._jobs.fail(job, reason, detail)
        self._news.set()

    def shut(self) -> None:
        """Carry nothing more; close the engine when stopped copies have come to rest, or after `cancel_s`."""
        self._shut = True
        self._news.set()

    def join(self, join_s: float) -> bool:
        """Whether the thread is gone, and its engine with it, within `join_s`."""
        if self._thread.ident is not None:
            self._thread.join(join_s)
        return not self._thread.is_alive()

    # --- on the thread

    def _run(self) -> None:
        wait_s: float | None = None
        while not self._shut or self._moving:
            self._news.wait(wait_s)
            self._news.clear()
            try:
                progress = self._turn()
            except Exception as error:  # a bug must not leave copies without an end
                log.exception("[mover-fault] a turn failed on %s", self._thread.name)
                self._give_up((Reason.TRANSFER_FAILED, f"internal error: {error!r}"))
                progress = False
            if not self._moving:
                wait_s = POLL_S if self._queue else None
            else:
                wait_s = POLL_S if progress or wait_s is None else min(POLL_S_MAX, 2 * wait_s)
        self._dropped()
        self._fail_queue((Reason.PEER_GONE, "disconnected"))

    @property
    def _moving(self) -> bool:
        return self._reads is not None and bool(self._reads.parts)

    def _turn(self) -> bool:
        """One poll of everything; whether anything has moved."""
        if self._queue and self._reads is None and not self._shut:
            self._dial()
        reads, patience = self._reads, self._patience
        if reads is None:
            return False
        try:
            self._begin_parts(reads)
            for part in reads.over():
                self._jobs.part_ended(part.job)
        except ReadFailed:
            self._break((Reason.TRANSFER_FAILED, f"a read from {self.there.owner} failed: it closed the connection"))
            return True
        idle_s = time.monotonic() - reads.moved_at
        if reads.parts and idle_s > patience.stall_s:
            self._give_up((Reason.TRANSFER_TIMEOUT, f"{self.there.owner} sent nothing for {patience.stall_s} s"))
        elif idle_s > patience.cancel_s and any(part.job.reason for part in reads.parts):
            self._rest_cancelled()
        return idle_s < POLL_S_MAX

    def _begin_parts(self, reads: Reads) -> None:
        """Start as many reads as there is room for."""
        while reads.has_room:
            with self._jobs:
                spans = self._jobs.begin(self._queue[0]) if self._queue else None
                if spans is None:
                    if not self._queue:
                        return
                    self._queue.popleft()
                    continue
                job = self._queue[0]
            reads.start(job, spans)

    def _break(self, trouble: Trouble) -> None:
        """A read failed: all in flight fail. Waiting copies are tried on a new connection."""
        for part in self._dropped():
            self._jobs.part_ended(part.job, *trouble)

    def _give_up(self, trouble: Trouble) -> None:
        """The peer is connected and does nothing: everything ends now, and rests once the engine is closed."""
        parts = self._reads.parts if self._reads is not None else ()
        for job in {id(part.job): part.job for part in parts}.values():
            self._jobs.abandon(job, *trouble)
        self._fail_queue(trouble)
        self._break(trouble)

    def _rest_cancelled(self) -> None:
        """Close the engine for the sake of cancelled copies; the other reads start again on a new one."""
        # The library has no cancel, so one copy's cancel costs the whole connection. The others lose only time: their
        # parts go back to the front of the queue, in order, and are read again from the start.
        parts = self._dropped()
        with self._jobs:
            for part in reversed(parts):
                if part.job.reason is not None:
                    self._jobs.part_ended(part.job)
                    continue
                part.job.live -= 1
                part.job.parts.appendleft(part.spans)
                if part.job not in self._queue:
                    self._queue.appendleft(part.job)
        self._news.set()

    def _dropped(self) -> deque[MooncakePart]:
        """Reads that were in flight, now at rest: their engine is closed."""
        reads, self._reads = self._reads, None
        return reads.close() if reads is not None else deque()

    def _fail_queue(self, trouble: Trouble) -> None:
        with self._jobs:
            failed, self._queue = self._queue, deque()
            for job in failed:
                self._jobs.fail(job, *trouble)

    # --- dialling

    def _dial(self) -> None:
        """Reach the peer, or fail all copies that wait for it."""
        with self._jobs:
            self._dialling = next(self._dials)
        self._timers.call(partial(self._watch, self._dialling))
        trouble: Trouble | None = None
        try:
            engine = dial(lambda: MooncakeEngine(self._here), self.there, self._patience.dial_s, lambda: self._shut)
            self._reads = Reads(engine, self.there, self._address)
        except DialFailed as error:
            trouble = Reason.UNREACHABLE, str(error)
        finally:
            with self._jobs:
                self._dialling, self._silent = 0, False
                if trouble is not None:
                    self._fail_queue(trouble)

    def _watch(self, dial: int) -> None:
        """On the timers' loop: the engine may wait far longer for a stopped peer than copies may wait in the queue."""
        self._timers.later(self._patience.dial_s, partial(self._overdue, dial))

    def _overdue(self, dial: int) -> None:
        with self._jobs:
            if self._dialling == dial:
                self._silent = True
                owner, limit_s = self.there.owner, self._patience.dial_s
                self._fail_queue((Reason.UNREACHABLE, f"{owner} did not answer within {limit_s} s"))


POLL_S = 0.0001
POLL_S_MAX = 0.01


class DialFailed(Exception):
    """Why a peer could not be reached."""


def dial(
    make: Callable[[], MooncakeEngine], there: MooncakeEndpoint, dial_s: float, given_up: Callable[[], bool]
) -> MooncakeEngine:
    """Reaches the peer; waits for it, up to `dial_s` once it has answered at all: see `MooncakeEngine.start_read`.

    Law: an engine is returned only after it has read the right mark where the peer said it would be; otherwise it is
    closed, and nothing is left behind.
    """
    try:
        engine = make()
    except OSError as error:
        raise DialFailed(str(error)) from error
    try:
        _check_mark(engine, there, dial_s, given_up)
    except BaseException:
        engine.close()
        raise
    return engine


def _check_mark(engine: MooncakeEngine, there: MooncakeEndpoint, dial_s: float, given_up: Callable[[], bool]) -> None:
    deadline = time.monotonic() + dial_s
    mark = memoryview(bytearray(MARK_BYTES))
    number = engine.start_read(there.session, address_of(mark), there.mark_address, MARK_BYTES)
    state = SliceState.MOVING if number else SliceState.FAILED
    wait_s = POLL_S
    try:
        while state is SliceState.MOVING:
            if time.monotonic() > deadline or given_up():
                raise DialFailed(f"{there.owner} did not answer within {dial_s} s")
            time.sleep(wait_s)
            wait_s = min(POLL_S_MAX, 2 * wait_s)
            state = engine.state(number)
    finally:
        if state is SliceState.MOVING:
            engine.close()  # while `mark` is still there for it to land in
    if state is SliceState.FAILED:
        raise DialFailed(f"cannot reach {there.owner} at {there.session}")
    if mark != there.mark:
        raise DialFailed(f"the process at {there.session} is not {there.owner}")
