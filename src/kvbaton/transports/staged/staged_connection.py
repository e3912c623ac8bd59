"""One connection of the client side, and its slots: from connecting to its end.

Laws: only launches of this side touch its device memory. So a requested READ is at rest as soon as it is no longer
wanted, whatever the peer still puts into its slot; that slot stays lent until the peer has answered, or the connection
with all its slots is gone. A WRITE is gathered into a slot and lands by a launch of the peer's, so only the peer's
answer brings it to rest, or that the peer never had all of it; a closed connection proves nothing, since a launch may
outlive it, and such a WRITE claims no rest until the peer is forgotten.
"""

from __future__ import annotations

import os
import time
from array import array
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import msgspec

from kvbaton.protocol.errors import ProtocolError, Reason
from kvbaton.protocol.ids import PeerId
from kvbaton.transports.core.jobs import CopyJob, Jobs, size_of, to_wire
from kvbaton.transports.core.mover import Mover
from kvbaton.transports.core.transport import Direction, Spans
from kvbaton.transports.local.region_listener import LENGTH, TakeDescriptors
from kvbaton.transports.net.connection_handshake import greet
from kvbaton.transports.net.socket_loop import SocketLoop
from kvbaton.transports.net.stream_socket import (
    FRAME_BYTES,
    Bytes,
    ByteSource,
    ByteStrip,
    Frame,
    FrameKind,
    FrameStatus,
    Script,
    Take,
    Wire,
    parse,
    take,
)
from kvbaton.transports.staged.staged_listener import HELLO_BYTES_MAX, StagedEndpoint, StagedHello, dial
from kvbaton.transports.staged.staged_slots import (
    Slots,
    StagedChunk,
    Stager,
    allocate_slots,
    gather_rows,
    map_slots,
    scatter_rows,
)

PINNED_BYTES_MAX = 1 << 30
"""What a peer can make this side pin for its slots, over all connections to it."""


class Trade(msgspec.Struct, frozen=True):
    """What all connections of one transport share."""

    me: PeerId
    jobs: Jobs
    mover: Mover
    stager: Stager
    address_of: Callable[[int], int]  # where a registered region begins
    dial_deadline_s: float


class Lead(Protocol):
    """The client of a line; see `staged_client.StagedLink`."""

    trade: Trade
    there: StagedEndpoint
    sealed: bool
    forgotten: bool
    unproven: list[CopyJob]

    @property
    def width(self) -> int:
        """How many lines there are."""

    def begin(self) -> tuple[CopyJob, Spans] | None: ...
    def not_yet(self, job: CopyJob, spans: Spans, loop: SocketLoop, again_s: float) -> None: ...
    def ready(self, line: StagedConnection, hello: StagedHello) -> None: ...
    def left(self, line: StagedConnection, detail: str) -> None: ...


@dataclass(slots=True, eq=False)
class StagedPart:
    """A part of a copy in flight. `over`: already counted as ended."""

    job: CopyJob
    spans: Spans
    size: int
    reading: bool
    over: bool = False
    last: ByteSource | None = None  # of a WRITE: what must be sent before the peer can have all of it


class StagedConnection:
    """Lives on one loop, which is connection `index`'s."""

    def __init__(self, link: Lead, loop: SocketLoop, index: int) -> None:
        """OSError, ProtocolError: it cannot even be opened."""
        self.loop = loop
        self.hello: StagedHello | None = None  # once it can be used
        self._link = link
        self._trade = link.trade
        self._index = index
        self._slots: Slots | None = None
        self._asked: dict[int, StagedPart] = {}  # by tag
        self._free: list[int] = []
        self._turn = 0
        self._release: Callable[[], None] = lambda: None  # the memory of slots that are our own
        limit_s = link.trade.dial_deadline_s
        self.wire = Wire(loop, dial(link.there), self._closed)
        self._deadline = loop.later(limit_s, lambda: self.wire.close(f"no answer within {limit_s} s"))

    @property
    def room(self) -> int:
        """Slots that are free; from any thread, as a hint."""
        return len(self._free)

    def open(self) -> None:
        self.wire.open(self._talk())

    def pump(self) -> None:
        """Begin further parts while there are free slots."""
        slots = self._slots
        usable = slots is not None and self.hello is not None
        while usable and not self.wire.closed and self._free and (begun := self._link.begin()) is not None:
            assert slots is not None
            job, spans = begun
            slot = self._free.pop()
            self._turn += 1
            tag = self._turn * slots.count + slot
            part = StagedPart(job, spans, size_of(spans), job.copy.direction is Direction.READ)
            if part.reading:
                self._ask(tag, part)
            else:
                self._gather(slots, slot, tag, part)
        if not self.wire.closed:
            self.wire.flush()

    def discard(self, job: CopyJob) -> None:
        """Requests for `job` are no longer wanted."""
        for part in self._asked.values():
            if part.job is job and part.reading:
                self._end(part)

    def _talk(self) -> Script:
        link, there, me = self._link, self._link.there, self._trade.me
        seals = yield from greet(self.wire, there.secret, me, there.owner, self._index, link.sealed)
        if seals is not None:
            self.wire.seal(seals)
        by_wire = there.carrier == "tcp"
        head: Take | TakeDescriptors = Take(LENGTH.size) if by_wire else TakeDescriptors(LENGTH.size)
        descriptors = head.descriptors if isinstance(head, TakeDescriptors) else []
        try:
            yield head
            table = yield from take(min(LENGTH.unpack(head.data)[0], HELLO_BYTES_MAX))
            try:
                hello = msgspec.msgpack.decode(table, type=StagedHello)
                self._slots = slots = self._make_slots(hello, descriptors)
            except (msgspec.MsgspecError, OSError, ValueError, RecursionError) as error:
                raise ProtocolError(Reason.BAD_MESSAGE, f"slots that cannot be used: {error}") from None
        finally:
            for fd in descriptors:
                os.close(fd)
        self._free = list(range(slots.count))
        self._trade.stager.open(slots, lambda problem: self.loop.call(partial(self._opened, hello, problem)))
        while True:
            frame = parse((yield from take(FRAME_BYTES)), FrameKind.DATA, FrameKind.DONE)
            part = self._asked.pop(frame.tag, None)
            answers = part is not None and part.reading is (frame.kind is FrameKind.DATA)
            due = part.size if part is not None and part.reading and frame.status is FrameStatus.OK else 0
            if part is None or not answers or frame.payload_bytes != due:
                raise ProtocolError(Reason.BAD_MESSAGE, "an unexpected answer, or one of another size")
            slot = frame.tag % slots.count
            if frame.status is FrameStatus.BAD_SPAN:
                self._end(part, Reason.BAD_SPAN, f"{there.owner} refused memory outside its regions")
            elif frame.status is FrameStatus.NOT_LENT:
                self._not_lent(part)
            elif not part.reading:
                self._end(part)
            elif by_wire:
                self._asked[frame.tag] = part  # a cancel must find it while it comes in
                yield ByteStrip(self._trade.mover, slots.view(slot, due), array("q", (0, due)), 2, due)
                del self._asked[frame.tag]
            if part.over:
                self._freed(slot)
            else:
                self._scatter(slots, slot, part)

    def _opened(self, hello: StagedHello, problem: str) -> None:
        """The slots are pinned: now the line can be used."""
        if self.wire.closed:
            return
        self._deadline.cancel()
        if problem:
            self.wire.close(f"slots that cannot be pinned: {problem}")
        else:
            self.hello = hello
            self._link.ready(self, hello)

    def _make_slots(self, hello: StagedHello, descriptors: list[int]) -> Slots:
        pinned = hello.slot_bytes * hello.slots * self._link.width
        if pinned > PINNED_BYTES_MAX:
            raise ValueError(f"{pinned} bytes would be pinned for one peer, at most {PINNED_BYTES_MAX} are")
        if self._link.there.carrier == "tcp":
            slots, region = allocate_slots(hello.slot_bytes, hello.slots)
            self._release = region.close
            return slots
        if len(descriptors) != 1:
            raise ValueError(f"{len(descriptors)} descriptors received, expected one")
        return map_slots(descriptors[0], hello.slot_bytes, hello.slots)

    def _ask(self, tag: int, part: StagedPart) -> None:
        self._asked[tag] = part
        table = to_wire(part.spans)
        kind = FrameKind.READ if part.reading else FrameKind.WRITE
        frame = Frame(kind, tag, part.size, region=part.job.copy.remote_region, table_bytes=len(table))
        payload = not part.reading and self._link.there.carrier == "tcp"
        part.last = Bytes(frame.pack() + table, more=payload)
        self.wire.out.append(part.last)
        if payload and self._slots is not None:
            view = self._slots.view(tag % self._slots.count, part.size)
            part.last = ByteStrip(self._trade.mover, view, array("q", (0, part.size)), 2, part.size)
            self.wire.out.append(part.last)

    def _gather(self, slots: Slots, slot: int, tag: int, part: StagedPart) -> None:
        """Of a WRITE, first. It is on the device now, and ends nowhere else."""

        def ended(problem: str) -> None:
            if not self.loop.call(partial(self._gathered, tag, part, problem)):
                self._end(part, Reason.CANCELLED, "the transport was closed")

        address = self._trade.address_of(part.job.copy.local_region)
        rows = gather_rows(part.spans, 3)
        self._trade.stager.add(StagedChunk(slots, slot, part.size, address, rows, True, ended))

    def _gathered(self, tag: int, part: StagedPart, problem: str) -> None:
        if problem or self.wire.closed:
            self._end(part, Reason.TRANSFER_FAILED, problem or "the connection was closed")
        elif part.job.halt[0]:
            self._end(part)  # no longer wanted, and nothing of it was sent
        else:
            self._ask(tag, part)
            self.wire.flush()
            return
        if self._slots is not None:
            self._freed(tag % self._slots.count)

    def _scatter(self, slots: Slots, slot: int, part: StagedPart) -> None:
        def ended(problem: str) -> None:
            self._end(part, Reason.TRANSFER_FAILED if problem else None, problem)
            self.loop.call(partial(self._freed, slot))

        address = self._trade.address_of(part.job.copy.local_region)
        rows = scatter_rows(part.spans, 3)
        self._trade.stager.add(StagedChunk(slots, slot, part.size, address, rows, False, ended))

    def _freed(self, slot: int) -> None:
        self._free.append(slot)
        if not self.wire.closed:
            self.pump()

    def _not_lent(self, part: StagedPart) -> None:
        again_s = None if part.over else self._trade.jobs.again_s(part.job, time.monotonic())
        if again_s is None:
            owner = self._link.there.owner
            self._end(part, Reason.LEASE_EXPIRED, f"{owner} does not lend this memory, or no longer")
        else:
            part.over = True
            self._link.not_yet(part.job, part.spans, self.loop, again_s)

    def _closed(self, detail: str, _by_peer: bool) -> None:
        self._deadline.cancel()
        with self._trade.jobs:
            for part in self._asked.values():
                unsent = part.last is not None and part.last.left > 0
                rested = part.reading or unsent or self._link.forgotten
                if not (rested or part.over):
                    self._link.unproven.append(part.job)
                self._end(part, Reason.TRANSFER_FAILED, detail, rested)
        self._asked.clear()
        if self._slots is not None:
            self._trade.stager.release(self._slots, self._release)
        self._link.left(self, detail)

    def _end(self, part: StagedPart, reason: Reason | None = None, detail: str = "", rested: bool = True) -> None:
        if not part.over:
            part.over = True
            self._trade.jobs.part_ended(part.job, reason, detail, rested)
