"""One non-blocking stream socket on one loop: sends in order, receives what its script asks for next.

A script is a generator that yields sinks: `frame = yield from take(28)` reads like blocking code and blocks no thread.
Law: bytes land only in the current sink, and only on the loop's thread. So a sink that was replaced (`divert`) or a
wire that was closed, on that thread, receives nothing more: that is what "at rest" means here. After `seal` the same
bytes cross as records (`sealed_stream`), and a sink gets only authenticated bytes.

A connection's bytes as records: gathers bytes to send, and yields received bytes only once they are authenticated.

Laws: plaintext leaves this module only after its record has opened, so nothing that was altered, repeated or reordered
ever reaches a sink. `ended` is true only for an end that the peer has proven. All received bytes are processed before
the socket is polled again: the loop reports bytes in the kernel, never bytes here.

The protocol of a TCP stream after the handshake: requests one way, responses in the same order the other way.

    READ   tag, region, table of (offset, bytes)              answered by  DATA tag, status, payload
    WRITE  tag, region, table of (offset, bytes), payload     answered by  DONE tag, status
    SUM    tag, region, table of (offset, bytes)              answered by  SUMS tag, status, a digest for each pair

Data streams carry the first two; SUM has its own listener (`checksum_service`), so that it never waits behind payload.

Law: a frame is checked against its bounds here before anything is allocated for it. A frame that exceeds a bound is
malformed and costs the connection; spans outside the memory, or in blocks that are not lent to the peer, are a bad
request and cost only that copy.
"""

from __future__ import annotations

import contextlib
import enum
import errno
import inspect
import logging
import socket
import struct
from collections import deque
from collections.abc import Callable, Iterator

import msgspec

from kvbaton.protocol.errors import ProtocolError, Reason
from kvbaton.security.records import HEAD, OVERHEAD_BYTES, RECORD_BYTES, Seals
from kvbaton.transports.core.jobs import PAIR_BYTES
from kvbaton.transports.net.socket_loop import (
    IN,
    OUT,
    Bytes,
    ByteSource,
    ByteStrip,
    Script,
    Sink,
    Skip,
    SocketLoop,
    Take,
    take,
)

VERSION = 1
ROWS_MAX = 4096
"""Spans in one request; a copy of more is cut into several."""

PAYLOAD_BYTES_MAX = 64 << 20
WINDOW_MAX = 64
"""Requests that may wait on one connection."""

_FRAME = struct.Struct("<BBHIIQQ")
FRAME_BYTES = _FRAME.size


class FrameKind(enum.IntEnum):
    READ = 1
    WRITE = 2
    DATA = 3
    DONE = 4
    SUM = 5
    SUMS = 6


class FrameStatus(enum.IntEnum):
    OK = 0
    BAD_SPAN = 1
    NOT_LENT = 2  # registered, but not lent to the peer: not yet, or no longer


class Frame(msgspec.Struct, frozen=True):
    """The head of a request or an answer."""

    kind: FrameKind
    tag: int
    payload_bytes: int = 0
    status: FrameStatus = FrameStatus.OK
    region: int = 0
    table_bytes: int = 0

    def pack(self) -> bytes:
        return _FRAME.pack(VERSION, self.kind, self.status, self.region, self.table_bytes, self.tag, self.payload_bytes)


def parse(head: bytes, *kinds: FrameKind) -> Frame:
    """One of `kinds`, within all bounds; else ProtocolError."""
    version, kind, status, region, table_bytes, tag, payload_bytes = _FRAME.unpack(head)
    if version != VERSION:
        raise ProtocolError(Reason.WRONG_VERSION, f"frame of version {version}, expected {VERSION}")
    if kind not in kinds or status > max(FrameStatus):
        raise ProtocolError(
            Reason.BAD_MESSAGE, f"frame of kind {kind} and status {status} where one of {kinds} was expected"
        )
    if table_bytes % PAIR_BYTES or table_bytes > ROWS_MAX * PAIR_BYTES:
        raise ProtocolError(Reason.BAD_MESSAGE, f"a table of {table_bytes} bytes, at most {ROWS_MAX} pairs are allowed")
    if payload_bytes > PAYLOAD_BYTES_MAX:
        raise ProtocolError(
            Reason.BAD_MESSAGE, f"{payload_bytes} bytes of payload, at most {PAYLOAD_BYTES_MAX} are allowed"
        )
    return Frame(FrameKind(kind), tag, payload_bytes, FrameStatus(status), region, table_bytes)


INBOX_BYTES = RECORD_BYTES + OVERHEAD_BYTES + HEAD.size
SEALED_TURN_BYTES = 4 << 20
"""As `TURN_BYTES`: a few milliseconds, and here each byte costs more."""


class SealedStream:
    """The records of one connection, both ways. Lives on one loop."""

    def __init__(self, seals: Seals, first: bytes) -> None:
        """`first` precedes the records and is still to be sent."""
        self._sealer, self._opener = seals.sealer, seals.opener
        self._unsent = memoryview(first)
        self._plain = memoryview(bytearray(RECORD_BYTES))
        self._outbox = memoryview(bytearray(RECORD_BYTES + OVERHEAD_BYTES))
        self._opened = memoryview(bytearray(RECORD_BYTES))
        self._inbox = memoryview(bytearray(INBOX_BYTES))
        self._filled = 0
        self.ended = False  # the peer accepts no more bytes, and has proven it

    @property
    def has_unsent(self) -> bool:
        return bool(self._unsent)

    def clear(self) -> None:
        """Stop sending."""
        self._unsent = self._unsent[:0]

    def end(self, sock: socket.socket) -> None:
        """Send the final record, if the socket takes it at once."""
        with contextlib.suppress(OSError):
            sock.sendmsg((self._unsent, self._sealer.end()), (), socket.MSG_NOSIGNAL | socket.MSG_DONTWAIT)

    def hear_out(self, sock: socket.socket) -> None:
        """The connection has broken: its end may be among the bytes received before. None of them land."""
        with contextlib.suppress(OSError, ProtocolError):
            while not self.ended and self.pull(sock):
                for _ in self.opened():
                    pass

    def push(self, sock: socket.socket, out: deque[ByteSource]) -> int:
        """Send the rest of a record, or the next one; BlockingIOError when nothing can go now."""
        if not self._unsent:
            self._unsent = self._outbox[: self._sealer.seal(self._gathered(out), self._outbox)]
        moved = sock.send(self._unsent, socket.MSG_NOSIGNAL)
        self._unsent = self._unsent[moved:]
        return moved

    def pull(self, sock: socket.socket) -> int:
        """Receive; 0 at the end of the stream, BlockingIOError when there is nothing now."""
        known = self._filled >= HEAD.size
        end = self._record_bytes(0) + HEAD.size if known else INBOX_BYTES  # and the next head: then nothing is moved up
        moved = sock.recv_into(self._inbox[self._filled : end])
        self._filled += moved
        return moved

    def opened(self) -> Iterator[memoryview]:
        """The plaintext of every record that has come in whole; each is good until the next. ProtocolError."""
        at = 0
        while (size := self._record_bytes(at)) <= self._filled - at:
            record = self._inbox[at : at + size]
            at += size
            if size == OVERHEAD_BYTES:
                self._opener.open(record, self._opened)
                self.ended = True
                continue
            yield self._opened[: self._opener.open(record, self._opened)]
        rest = self._filled - at
        self._inbox[:rest] = self._inbox[at : self._filled]
        self._filled = rest

    def missing(self, due: int) -> int:
        """Bytes that will surely come while `due` bytes of plaintext are outstanding: the rest of a record, if
        started."""
        return self._record_bytes(0) - self._filled if self._filled >= HEAD.size else max(due, HEAD.size)

    def _record_bytes(self, at: int) -> int:
        """Of the record at `at`, as far as is known."""
        if self._filled - at < HEAD.size:
            return HEAD.size + 1  # more than there is
        return self._opener.size_of(self._inbox[at : at + HEAD.size])

    def _gathered(self, out: deque[ByteSource]) -> memoryview:
        size = 0
        while out and (size < RECORD_BYTES or not out[0].left):  # no empty one is left to be a record of its own
            size += out[0].fill(self._plain[size:])
            if not out[0].left:
                out.popleft()
        return self._plain[:size]


__all__ = ["ByteSource", "ByteStrip", "Bytes", "Script", "Sink", "Skip", "Take", "Wire", "take"]

log = logging.getLogger(__name__)

TURN_BYTES = 16 << 20
"""What one socket may move before others, and calls such as a cancel, get their turn: a few milliseconds."""

DOZE_BYTES = 256 << 10
"""A receiver is not woken for less, unless less is left: halves the wake-ups of a large copy."""

_CLOSED_BY_PEER = {errno.ECONNRESET, errno.EPIPE}


class Wire:
    """A socket, its script, and what waits to be sent. All methods run on the loop's thread."""

    def __init__(self, loop: SocketLoop, sock: socket.socket, on_close: Callable[[str, bool], None]) -> None:
        self.sock = sock
        self.out: deque[ByteSource] = deque()
        self.closed = False
        self.heard = False  # anything at all
        self.fault: ProtocolError | None = None  # what the other end did wrong, if that is why it was closed
        self._loop = loop
        self._script = _to_the_end()
        self._want: Sink = Take(0)
        self._events = IN
        self._enough = 0  # bytes that wake us; unknown, the socket may come from another wire
        self._on_close = on_close
        self._sealed: SealedStream | None = None

    def seal(self, seals: Seals) -> None:
        """Everything from now on, in both directions, crosses as records; queued bytes go before, as they are."""
        first = bytearray(sum(source.left for source in self.out))
        at = 0
        for source in self.out:
            at += source.fill(memoryview(first)[at:])
        self.out.clear()
        self._sealed = SealedStream(seals, bytes(first))

    def open(self, script: Script) -> None:
        """Begin the script. The socket may still be connecting."""
        self._script = script
        self._loop.watch(self.sock.fileno(), self._events, self)
        self.ready(0)

    def divert(self, unwanted: Sink) -> None:
        """If `unwanted` is being received now, discard the rest of it."""
        if self._want is unwanted:
            self._want = Skip(unwanted.left)

    def flush(self) -> None:
        """Send what can be sent now, and watch for room if something is left."""
        try:
            if self._sealed is None:
                self._send()
            else:
                self._send_sealed(self._sealed)
        except BlockingIOError:
            pass
        except OSError as error:
            self._broke(error)
        events = IN | OUT if self.out or (self._sealed is not None and self._sealed.has_unsent) else IN
        if not self.closed and events != self._events:
            self._events = events
            self._loop.change(self.sock.fileno(), events)

    def detach(self) -> socket.socket:
        """Give the socket away, open; this wire is over."""
        self._over("passed on", False)
        return self.sock

    def close(self, detail: str, by_peer: bool = False) -> None:
        """Idempotent. `by_peer`: the other end closed it, so nothing that was sent can still be landing there. See
        `proven`."""
        if not self.closed:
            self._over(detail, by_peer)
            if self._sealed is not None:
                self._sealed.end(self.sock)
            self.sock.close()

    @property
    def proven(self) -> bool:
        """Whether an end `by_peer` certainly was the peer's: with records, an attacker on the path can forge a FIN or a
        reset, and deliver later what was sent before."""
        return self._sealed is None or self._sealed.ended

    def linger(self) -> None:
        """Send nothing more, receive nothing, and wait for the other end to close."""
        self.out.clear()
        if self._sealed is not None:
            self._sealed.clear()
        self._script = _to_the_end()
        self._want = next(self._script)
        try:
            self.sock.shutdown(socket.SHUT_WR)
        except OSError as error:
            self._broke(error)
        self.flush()

    def ready(self, events: int) -> None:
        try:
            self._advance()
            if events & ~OUT:  # readable, or an error or hang-up that reading will name
                self._read()
            if not self.closed:
                self._doze()
                self.flush()
        except Exception as error:
            log.exception("[mover-fault] a connection's script failed")
            self.close(f"internal error: {error!r}")

    def _send(self) -> None:
        room = TURN_BYTES
        while self.out and room > 0:
            room -= self.out[0].push(self.sock, room, self._loop.wait)
            if not self.out[0].left:
                self.out.popleft()
            elif room > 0:
                break

    def _send_sealed(self, sealed: SealedStream) -> None:
        room = SEALED_TURN_BYTES
        while (self.out or sealed.has_unsent) and room > 0:
            room -= sealed.push(self.sock, self.out)

    def _read(self) -> None:
        try:
            if self._sealed is None:
                self._receive()
            if self._sealed is not None:  # possibly just now
                self._receive_sealed(self._sealed)
        except BlockingIOError:
            pass
        except ProtocolError as error:
            self._refuse(error)
        except OSError as error:
            self._broke(error)

    def _receive(self) -> None:
        room = TURN_BYTES
        while room > 0 and not self.closed and self._sealed is None:
            moved = self._want.pull(self.sock, room, self._loop.wait)
            if not moved:
                self.close("the peer closed the connection", by_peer=True)
                return
            self.heard = True
            room -= moved
            if self._want.left:
                break  # all that had come is read, or our turn is over; epoll will say if there is more
            self._advance()

    def _receive_sealed(self, sealed: SealedStream) -> None:
        room = SEALED_TURN_BYTES
        while room > 0 and not self.closed:
            moved = sealed.pull(self.sock)
            if not moved:
                self.close("the peer closed the connection", by_peer=True)
                return
            room -= moved
            for plain in sealed.opened():
                self._deliver(plain)
                if self.closed:
                    return

    def _deliver(self, plain: memoryview) -> None:
        while plain and not self.closed:
            plain = plain[self._want.land(plain) :]
            self._advance()

    def _doze(self) -> None:
        due = self._want.left
        enough = min(due if self._sealed is None else self._sealed.missing(due), DOZE_BYTES)
        if enough != self._enough:
            self._enough = enough
            with contextlib.suppress(OSError):  # a hint
                self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, enough)

    def _advance(self) -> None:
        while not self._want.left and not self.closed:
            try:
                self._want = next(self._script)
            except StopIteration:
                self.close("done")
            except ProtocolError as error:
                self._refuse(error)

    def _refuse(self, error: ProtocolError) -> None:
        self.fault = self.fault or error
        self.close(error.detail)

    def _broke(self, error: OSError) -> None:
        number = error.errno
        if number == errno.ENOTCONN:  # from `shutdown` after a reset; the cause is not known yet
            number = self.sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if self._sealed is not None and not self.closed:
            self._sealed.hear_out(self.sock)
        self.close(f"the connection broke: {error}", by_peer=number in _CLOSED_BY_PEER)

    def _over(self, detail: str, by_peer: bool) -> None:
        self.closed = True
        self._loop.unwatch(self.sock.fileno())
        self.out.clear()
        if inspect.getgeneratorstate(self._script) != inspect.GEN_RUNNING:  # else the script itself ends this
            self._script.close()
        self._on_close(detail, by_peer)


def _to_the_end() -> Script:
    while True:
        yield Skip(1 << 62)
