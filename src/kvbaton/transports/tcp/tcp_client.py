"""The client side of tcp: the streams to one peer, and the parts of copies that they carry.

Law: a part is in exactly one place: in its job, on one conversation, or over. A READ is at rest as soon as the loop of
its conversation has diverted it from memory. A WRITE lands at the peer, so only the peer can bring it to rest: by its
answer, or by closing the connection (which it does only after it has stopped landing bytes). On an encrypted connection
that end must be proven; if it is not, the WRITE comes to rest when the peer is forgotten (`forget`).
"""

from __future__ import annotations

import errno
import itertools
import os
import socket
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import msgspec

from kvbaton.protocol.errors import ProtocolError, Reason
from kvbaton.protocol.ids import PeerId
from kvbaton.transports.core.jobs import CopyJob, Jobs, size_of, to_wire
from kvbaton.transports.core.transport import Direction, Spans
from kvbaton.transports.net.connection_handshake import greet
from kvbaton.transports.net.socket_loop import SocketLoop
from kvbaton.transports.net.stream_socket import (
    FRAME_BYTES,
    WINDOW_MAX,
    Bytes,
    ByteStrip,
    Frame,
    FrameKind,
    FrameStatus,
    Script,
    Sink,
    Skip,
    Wire,
    parse,
    take,
)
from kvbaton.transports.tcp.tcp_server import family_of, prepare


@dataclass(slots=True, eq=False)
class TcpPart:
    """A part of a copy in flight."""

    job: CopyJob
    spans: Spans
    size: int
    tag: int
    reading: bool
    over: bool = False  # already counted as ended: bytes that still arrive are discarded
    sink: Sink | None = None  # while it is being received


class Conversation:
    """One connection, from connecting to its end. Lives on one loop."""

    def __init__(self, link: TcpLink, index: int, sock: socket.socket) -> None:
        self._link = link
        self._index = index
        self._parts: deque[TcpPart] = deque()  # requested, not yet answered, in order
        self._asked_bytes = 0
        self._tags = itertools.count()
        self.ready = False
        loop, limit_s = link.loops[index], link.there.dial_deadline_s
        self._deadline = loop.later(limit_s, lambda: self.wire.close(f"no answer to our handshake within {limit_s} s"))
        self.wire = Wire(loop, sock, self._closed)

    def open(self) -> None:
        self.wire.open(self._talk())

    def has_room(self) -> bool:
        return self._asked_bytes < self._link.there.window_bytes and len(self._parts) < WINDOW_MAX

    def pump(self) -> None:
        """Ask for further parts while the window has room."""
        while self.ready and self.has_room() and (begun := self._link.begin()) is not None:
            job, spans = begun
            copy = job.copy
            part = TcpPart(job, spans, size_of(spans), next(self._tags), copy.direction is Direction.READ)
            self._parts.append(part)
            self._asked_bytes += part.size
            table = to_wire(spans)
            kind = FrameKind.READ if part.reading else FrameKind.WRITE
            frame = Frame(kind, part.tag, part.size, region=copy.remote_region, table_bytes=len(table))
            self.wire.out.append(Bytes(frame.pack() + table, more=not part.reading))
            if not part.reading:
                self.wire.out.append(self._link.strip(copy.local_region, spans, part.size))

    def discard(self, job: CopyJob) -> None:
        """Divert the reads of `job` from memory. A connection that carries nothing else is closed."""
        for part in self._parts:
            if part.job is job and part.reading:
                self._end(part)
                if part.sink is not None:
                    self.wire.divert(part.sink)
        if self._parts and all(part.over or part.job.ended for part in self._parts):
            self.shut()

    def shut(self) -> None:
        """Reads come to rest now; writes when the peer has closed, which is awaited without blocking anything."""
        # A READ lands by our own thread, so it is at rest as soon as we stop reading. A WRITE may be in the peer's
        # socket buffer: closing here would not stop it, and only the peer's own close says that it no longer receives
        # it.
        for part in self._parts:
            if part.reading:
                self._end(part)
        self._deadline.cancel()
        self._link.left(self, redial=True)
        if all(part.over for part in self._parts):
            self.wire.close("shut")
        else:
            self.wire.linger()

    def _talk(self) -> Script:
        link, route = self._link, self._link.there
        seals = yield from greet(self.wire, route.secret, route.me, route.peer, self._index, route.sealed)
        if seals is not None:
            self.wire.seal(seals)
        self._deadline.cancel()
        self.ready = True
        self.pump()
        while True:
            frame = parse((yield from take(FRAME_BYTES)), FrameKind.DATA, FrameKind.DONE)
            part = self._parts[0] if self._parts else None
            if part is None or frame.tag != part.tag or (frame.kind is FrameKind.DATA) is not part.reading:
                raise ProtocolError(Reason.BAD_MESSAGE, "an unexpected answer")
            if frame.payload_bytes != (part.size if part.reading and frame.status is FrameStatus.OK else 0):
                raise ProtocolError(Reason.BAD_MESSAGE, f"{frame.payload_bytes} bytes, expected {part.size}")
            if frame.payload_bytes:
                region = part.job.copy.local_region
                part.sink = Skip(part.size) if part.over else link.strip(region, part.spans, part.size)
                yield part.sink
            self._parts.popleft()
            self._asked_bytes -= part.size
            if frame.status is FrameStatus.OK:
                self._end(part)
            elif frame.status is FrameStatus.BAD_SPAN:
                self._end(part, Reason.BAD_SPAN, f"{route.peer} refused memory outside its regions")
            else:
                self._not_lent(part)
            self.pump()

    def _not_lent(self, part: TcpPart) -> None:
        link = self._link
        again_s = None if part.over else link.jobs.again_s(part.job, time.monotonic())
        if again_s is None:
            self._end(part, Reason.LEASE_EXPIRED, f"{link.there.peer} does not lend this memory, or no longer")
        else:
            # The loan may be on its way to the process that serves it, by another path than our request: retry.
            part.over = True
            link.remove(part.job)  # or what is left of it would be asked for at once
            link.jobs.put_back(part.job, part.spans)
            link.loops[self._index].later(again_s, partial(link.add, part.job))

    def _closed(self, detail: str, by_peer: bool) -> None:
        self._deadline.cancel()
        # The side that closed determines what is known about a WRITE: the peer closes only after it has stopped landing
        # bytes, whereas our own timeout, or a forged end of an encrypted connection, leaves it possible that they still
        # arrive.
        link, proven = self._link, by_peer and self.wire.proven
        with link.jobs:
            for part in self._parts:
                rested = part.reading or proven or link.forgotten
                if not (rested or part.over):
                    link.unproven.append(part.job)
                self._end(part, Reason.TRANSFER_FAILED, detail, rested=rested)
        self._link.left(self, redial=self.ready, detail=detail)

    def _end(self, part: TcpPart, reason: Reason | None = None, detail: str = "", rested: bool = True) -> None:
        if not part.over:
            part.over = True
            self._link.jobs.part_ended(part.job, reason, detail, rested)


class TcpRoute(msgspec.Struct, frozen=True):
    """The address of one peer."""

    me: PeerId
    peer: PeerId
    address: tuple[str, int]
    secret: bytes
    regions: dict[int, int]  # the peer's memory: bytes by region
    window_bytes: int
    dial_deadline_s: float
    sealed: bool = False  # everything after the handshake is encrypted

    def dial(self) -> socket.socket:
        """A socket that is connecting."""
        sock = socket.socket(family_of(self.address[0]))
        prepare(sock)
        error = sock.connect_ex(self.address)
        if error not in {0, errno.EINPROGRESS}:
            sock.close()
            raise OSError(error, os.strerror(error))
        return sock


class TcpLink:
    """The copies that wait for one peer, and one conversation per stream, opened when needed."""

    def __init__(
        self, route: TcpRoute, loops: Sequence[SocketLoop], jobs: Jobs, strip: Callable[[int, Spans, int], ByteStrip]
    ) -> None:
        self.there = route
        self.loops = loops  # one entry per stream
        self.jobs = jobs
        self.strip = strip
        self.unproven: list[CopyJob] = []  # writes whose end was not proven to be the peer's
        self.forgotten = False
        self._queue: deque[CopyJob] = deque()
        self._streams: list[Conversation | None] = [None] * len(loops)

    def add(self, job: CopyJob) -> None:
        """Queue `job` and wake as many streams as it can use. From any thread."""
        with self.jobs:
            if not job.parts:
                return
            if job not in self._queue:
                self._queue.append(job)
            # A full one asks for more by itself when an answer comes; the queue was filled before we check.
            roomy = [index for index, stream in enumerate(self._streams) if stream is None or stream.has_room()]
            turn = job.copy.job % len(self._streams)
            roomy.sort(key=lambda index: (self._streams[index] is None, (index - turn) % len(self._streams)))
            useful = len(job.parts)
        for index in roomy[:useful]:
            self.loops[index].call(partial(self._pump, index))

    def begin(self) -> tuple[CopyJob, Spans] | None:
        """The next part to carry."""
        with self.jobs:
            while self._queue:
                spans = self.jobs.begin(self._queue[0])
                if spans is not None:
                    return self._queue[0], spans
                self._queue.popleft()
            return None

    def remove(self, job: CopyJob) -> None:
        """Forget a failed job that waits. From any thread."""
        with self.jobs:
            if job in self._queue:
                self._queue.remove(job)

    def discard(self, job: CopyJob) -> None:
        """Bring the reads of `job` to rest. From any thread."""
        for index, loop in enumerate(self.loops):
            loop.call(partial(self._discard, index, job))

    def forget(self) -> None:
        """The pairing is over on both sides, or the peer has revoked our secret: bytes that it still receives are its
        own affair, and writes whose end was not proven need hold nothing here. The lock is held."""
        self.forgotten = True
        unproven, self.unproven = self.unproven, []
        for job in unproven:
            self.jobs.forgive(job)

    def shut_on(self, loop: SocketLoop) -> None:
        """On `loop`: end the conversations that live there."""
        for index, stream in enumerate(self._streams):
            if stream is not None and self.loops[index] is loop:
                stream.shut()

    def left(self, conversation: Conversation, redial: bool, detail: str = "") -> None:
        """A conversation is over. Waiting parts are carried by the others, by a new one, or fail if none could be
        opened."""
        with self.jobs:
            if conversation not in self._streams:
                return
            index = self._streams.index(conversation)
            self._streams[index] = None
            if redial:
                self.loops[index].call(partial(self._pump, index))
            else:
                self._give_up(Reason.TRANSFER_FAILED, detail)

    def _give_up(self, reason: Reason, detail: str) -> None:
        """A stream could not be opened: waiting parts are for the others, which may be idle; without any they fail."""
        others = [index for index, stream in enumerate(self._streams) if stream is not None]
        for index in others:
            self.loops[index].call(partial(self._pump, index))
        if not others:
            failed, self._queue = self._queue, deque()
            for job in failed:
                self.jobs.fail(job, reason, detail)

    def _discard(self, index: int, job: CopyJob) -> None:
        stream = self._streams[index]
        if stream is not None:
            stream.discard(job)
        self._pump(index)

    def _pump(self, index: int) -> None:
        with self.jobs:
            stream = self._streams[index]
            if stream is None and self._queue:
                try:
                    sock = self.there.dial()
                except OSError as error:
                    self._give_up(Reason.UNREACHABLE, f"cannot dial {self.there.peer}: {error}")
                    return
                self._streams[index] = Conversation(self, index, sock)
        if stream is not None:
            stream.pump()
            stream.wire.flush()
        elif (fresh := self._streams[index]) is not None:
            fresh.open()
