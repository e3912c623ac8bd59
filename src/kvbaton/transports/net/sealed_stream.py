"""A connection's bytes as records: gathers bytes to send, and yields received bytes only once they are authenticated.

Laws: plaintext leaves this module only after its record has opened, so nothing that was altered, repeated or reordered
ever reaches a sink. `ended` is true only for an end that the peer has proven. All received bytes are processed before
the socket is polled again: the loop reports bytes in the kernel, never bytes here.
"""

from __future__ import annotations

import contextlib
import socket
from collections import deque
from collections.abc import Iterator

from kvbaton.protocol.errors import ProtocolError
from kvbaton.security.records import HEAD, OVERHEAD_BYTES, RECORD_BYTES, Seals
from kvbaton.transports.net.pieces import ByteSource

INBOX_BYTES = RECORD_BYTES + OVERHEAD_BYTES + HEAD.size
TURN_BYTES = 4 << 20
"""As `wire.TURN_BYTES`: a few milliseconds, and here each byte costs more."""


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
