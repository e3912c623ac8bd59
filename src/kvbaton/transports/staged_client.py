"""D's side of staging: asks for chunks, one for each free slot, and scatters what has come.

Law: only what this side launches touches its device memory. So a part that was asked for is at rest as soon as it is
not wanted any more, whatever the peer still writes into its slot; that slot stays lent until the peer has answered, or
the connection with all its slots is gone.
"""

from __future__ import annotations

import os
import time
from array import array
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import msgspec

from kvbaton.protocol.errors import ProtocolError, Reason
from kvbaton.protocol.ids import PeerId
from kvbaton.transports.auth import greet
from kvbaton.transports.base import Spans
from kvbaton.transports.jobs import Job, Jobs
from kvbaton.transports.loop import Loop
from kvbaton.transports.mover import Mover
from kvbaton.transports.shm_attach import TakeDescriptors
from kvbaton.transports.shm_door import LENGTH
from kvbaton.transports.spans import size_of, to_wire
from kvbaton.transports.staged_door import HELLO_BYTES_MAX, Hello, StagedEndpoint, dial
from kvbaton.transports.staged_slots import Slots, allocate_slots, map_slots, scatter_rows
from kvbaton.transports.staged_work import Chunk, Stager
from kvbaton.transports.tcp_frames import FRAME_BYTES, Frame, Kind, Status, parse
from kvbaton.transports.wire import Bytes, Script, Strip, Take, Wire, take


@dataclass(slots=True, eq=False)
class Part:
    """A stretch of a copy on its way. `over`: already counted as ended."""

    job: Job
    spans: Spans
    size: int
    over: bool = False


class Line:
    """One connection and its slots, from dialling to its end. Lives on the loop."""

    def __init__(self, link: StagedLink) -> None:
        self.hello: Hello | None = None
        self._link = link
        self._slots: Slots | None = None
        self._asked: dict[int, Part] = {}  # by tag
        self._free: list[int] = []
        self._turn = 0
        self._release: Callable[[], None] = lambda: None  # the memory of slots that are our own
        limit_s = link.dial_deadline_s
        self.wire = Wire(link.loop, dial(link.there), self._closed)
        self._deadline = link.loop.later(limit_s, lambda: self.wire.close(f"no answer within {limit_s} s"))

    def open(self) -> None:
        self.wire.open(self._talk())

    def pump(self) -> None:
        """Ask for further parts while there are free slots."""
        slots = self._slots
        while slots is not None and self._free and (begun := self._link.begin()) is not None:
            job, spans = begun
            self._turn += 1
            tag = self._turn * slots.count + self._free.pop()
            part = self._asked[tag] = Part(job, spans, size_of(spans))
            table = to_wire(spans)
            frame = Frame(Kind.READ, tag, part.size, region=job.copy.remote_region, table_bytes=len(table))
            self.wire.out.append(Bytes(frame.pack() + table))
        if not self.wire.closed:
            self.wire.flush()

    def discard(self, job: Job) -> None:
        """What was asked for `job` is not wanted any more."""
        for part in self._asked.values():
            if part.job is job:
                self._end(part)

    def _talk(self) -> Script:
        link = self._link
        seals = yield from greet(self.wire, link.there.secret, link.me, link.there.owner, 0, link.sealed)
        if seals is not None:
            self.wire.seal(seals)
        by_wire = link.there.carrier == "tcp"
        head: Take | TakeDescriptors = Take(LENGTH.size) if by_wire else TakeDescriptors(LENGTH.size)
        descriptors = head.descriptors if isinstance(head, TakeDescriptors) else []
        try:
            yield head
            table = yield from take(min(LENGTH.unpack(head.data)[0], HELLO_BYTES_MAX))
            try:
                hello = msgspec.msgpack.decode(table, type=Hello)
                self._slots = slots = self._make_slots(hello, descriptors)
            except (msgspec.MsgspecError, OSError, ValueError, RecursionError) as error:
                raise ProtocolError(Reason.BAD_MESSAGE, f"slots that cannot be used: {error}") from None
        finally:
            for fd in descriptors:
                os.close(fd)
        self._free = list(range(slots.count))
        link.stager.open(slots, lambda problem: link.loop.call(partial(self._opened, hello, problem)))
        while True:
            frame = parse((yield from take(FRAME_BYTES)), Kind.DATA)
            part = self._asked.pop(frame.tag, None)
            if part is None or frame.payload_bytes != (part.size if frame.status is Status.OK else 0):
                raise ProtocolError(Reason.BAD_MESSAGE, "an answer to nothing that was asked, or of another size")
            slot = frame.tag % slots.count
            if frame.status is Status.BAD_SPAN:
                self._end(part, Reason.BAD_SPAN, f"{link.there.owner} refused memory outside its regions")
            elif frame.status is Status.NOT_LENT:
                self._not_lent(part)
            elif by_wire:
                self._asked[frame.tag] = part  # a cancel must find it while it comes in
                yield Strip(link.mover, slots.view(slot, part.size), array("q", (0, part.size)), 2, part.size)
                del self._asked[frame.tag]
            if part.over:
                self._free.append(slot)
                self.pump()
            else:
                self._scatter(slots, slot, part)

    def _not_lent(self, part: Part) -> None:
        link = self._link
        again_s = None if part.over else link.jobs.again_s(part.job, time.monotonic())
        if again_s is None:
            self._end(part, Reason.LEASE_EXPIRED, f"{link.there.owner} does not lend this memory, or no longer")
        else:
            part.over = True
            link.hold(part.job)
            link.jobs.put_back(part.job, part.spans)
            link.loop.later(again_s, partial(link.again, part.job))

    def _opened(self, hello: Hello, problem: str) -> None:
        """The slots are pinned: now the line can be used."""
        if self.wire.closed:
            return
        self._deadline.cancel()
        if problem:
            self.wire.close(f"slots that cannot be pinned: {problem}")
        else:
            self.hello = hello
            self._link.ready(hello)

    def _make_slots(self, hello: Hello, descriptors: list[int]) -> Slots:
        if self._link.there.carrier == "tcp":
            slots, region = allocate_slots(hello.slot_bytes, hello.slots)
            self._release = region.close
            return slots
        if len(descriptors) != 1:
            raise ValueError(f"{len(descriptors)} descriptors came, one was due")
        return map_slots(descriptors[0], hello.slot_bytes, hello.slots)

    def _scatter(self, slots: Slots, slot: int, part: Part) -> None:
        def ended(problem: str) -> None:
            reason = Reason.TRANSFER_FAILED if problem else None
            part.over = True
            self._link.jobs.part_ended(part.job, reason, problem)
            self._link.loop.call(partial(self._freed, slot))

        address = self._link.address_of(part.job.copy.local_region)
        self._link.stager.add(Chunk(slots, slot, part.size, address, scatter_rows(part.spans), False, ended))

    def _freed(self, slot: int) -> None:
        self._free.append(slot)
        if not self.wire.closed:
            self.pump()

    def _closed(self, detail: str, _by_peer: bool) -> None:
        self._deadline.cancel()
        for part in self._asked.values():
            self._end(part, Reason.TRANSFER_FAILED, detail)
        self._asked.clear()
        if self._slots is not None:
            self._link.stager.release(self._slots, self._release)
        self._link.left(self, detail)

    def _end(self, part: Part, reason: Reason | None = None, detail: str = "") -> None:
        if not part.over:
            part.over = True
            self._link.jobs.part_ended(part.job, reason, detail)


class StagedLink:
    """The copies that wait for one peer, and the line to it, dialled when needed."""

    def __init__(
        self,
        me: PeerId,
        there: StagedEndpoint,
        loop: Loop,
        jobs: Jobs,
        mover: Mover,
        stager: Stager,
        plan: Callable[[Job, Hello], bool],
        address_of: Callable[[int], int],
        dial_deadline_s: float,
        sealed: bool = False,
    ) -> None:
        """`plan` checks a copy and gives it parts, or fails it."""
        self.me = me
        self.there = there
        self.loop = loop
        self.jobs = jobs
        self.mover = mover
        self.stager = stager
        self.address_of = address_of
        self.dial_deadline_s = dial_deadline_s
        self.sealed = sealed
        self._plan = plan
        self._line: Line | None = None
        self._new: deque[Job] = deque()
        self._queue: deque[Job] = deque()

    def add(self, job: Job) -> None:
        """From any thread; the caller holds the lock."""
        self._new.append(job)
        self.loop.call(self._pump)

    def hold(self, job: Job) -> None:
        """Ask for nothing more of it until `again`."""
        with self.jobs:
            if job in self._queue:
                self._queue.remove(job)

    def again(self, job: Job) -> None:
        """On the loop: parts that were put back are due. What waited while the line fell has fallen with it."""
        with self.jobs:
            if job.parts and self._line is None:
                self.jobs.fail(job, Reason.TRANSFER_FAILED, f"cannot stage from {self.there.owner}: the line is down")
            elif job.parts and job not in self._queue:
                self._queue.append(job)
        if self._line is not None and self._line.hello is not None:
            self._line.pump()

    def remove(self, job: Job) -> None:
        """A job that has failed. From any thread; the caller holds the lock."""
        for waiting in (self._new, self._queue):
            if job in waiting:
                waiting.remove(job)
        self.loop.call(partial(self._discard, job))

    def shut(self, detail: str) -> None:
        """On the loop."""
        if self._line is not None:
            self._line.wire.close(detail)

    def begin(self) -> tuple[Job, Spans] | None:
        """The next part to ask for."""
        with self.jobs:
            while self._queue:
                spans = self.jobs.begin(self._queue[0])
                if spans is not None:
                    return self._queue[0], spans
                self._queue.popleft()
            return None

    def ready(self, hello: Hello) -> None:
        """The peer has said what it has: what waited can be planned, and asked for."""
        with self.jobs:
            while self._new:
                job = self._new.popleft()
                if not job.ended and self._plan(job, hello):
                    self._queue.append(job)
        if self._line is not None:
            self._line.pump()

    def left(self, line: Line, detail: str) -> None:
        """The line is down: what waits for it fails, and the next copy dials anew."""
        with self.jobs:
            reason = Reason.UNREACHABLE if line.hello is None else Reason.TRANSFER_FAILED
            if self._line is line:
                self._line = None
            failed = [*self._new, *self._queue]
            self._new.clear()
            self._queue.clear()
            for job in failed:
                self.jobs.fail(job, reason, f"cannot stage from {self.there.owner}: {detail}")

    def _discard(self, job: Job) -> None:
        if self._line is not None:
            self._line.discard(job)

    def _pump(self) -> None:
        if self._line is None and self._new:
            try:
                self._line = line = Line(self)
            except (OSError, ProtocolError) as error:
                self._refused(str(error))
                return
            line.open()
        elif self._line is not None and self._line.hello is not None:
            self.ready(self._line.hello)

    def _refused(self, detail: str) -> None:
        with self.jobs:
            failed, self._new = self._new, deque()
            for job in failed:
                self.jobs.fail(job, Reason.UNREACHABLE, f"cannot dial {self.there.owner}: {detail}")
