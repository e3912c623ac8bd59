"""One answer of a worker as it comes in: the parser's state, and what of its body is held.

Laws: what a worker says is bounded, headers by number and by bytes, the body by the reader's limit and by the tab of
the request that it is for. A bound that is passed raises a `WireError` within the parser's callback, which stops it.
Nothing here knows the connection: a reader is fed, and asked what has come.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import httptools

from kvbaton.api.http.client_quotas import Tab
from kvbaton.api.http.http_types import HEADERS_BYTES_MAX, GarbageError, Header, NoRoomError, WireError

PIECES_MAX = 1 << 16
"""Of a whole answer: each costs more than its bytes."""
UNREAD_BYTES_MAX = 256 << 10
"""A stream that is read slower than it comes is stopped here until it is read."""
BYTES_FREE = 16 << 10
"""Of an exchange: not counted."""
READ_BYTES_MAX = 32 << 10
"""Of a stream, at one time: what is read is looked at before anybody else has a turn."""
PIECE_BYTES = 64
"""What a piece of a body costs besides its bytes."""
HEADERS_MAX = 256
"""Of an answer."""
_NOT_HTTP = "answered something that is not HTTP"


class AnswerBody:
    """What has come of a body and is not read yet."""

    __slots__ = ("is_full", "limit", "pieces", "tab", "taken", "unread")

    def __init__(self) -> None:
        self.tab: Tab | None = None  # counts what is held
        self.pieces: list[bytes] = []
        self.unread = 0
        self.taken = 0  # bytes of what was read last, which is somewhere until more is read
        self.limit: int | None = None  # None: it is read as it comes
        self.is_full = False  # the worker should be read no further for now

    def want_whole(self, limit: int) -> None:
        self.limit = limit
        self.is_full = False  # it is bounded by its limit instead

    def check(self, held: int) -> None:
        """Raises where more has come than there is room for, or than is wanted."""
        if held > BYTES_FREE and self.tab is not None and not self.tab.hold(held):
            raise NoRoomError(f"answered {self.unread} bytes, for which the router has no room", self.unread)
        if self.limit is None:
            self.is_full = held > UNREAD_BYTES_MAX
        elif self.unread > self.limit:
            raise GarbageError(f"answered more than {self.limit} bytes")
        elif len(self.pieces) > PIECES_MAX:
            raise GarbageError(f"answered in more than {PIECES_MAX} pieces")

    def take(self) -> bytes:
        """All that is there."""
        pieces = self.pieces
        data = pieces[0] if len(pieces) == 1 else b"".join(pieces)
        pieces.clear()
        self.unread = 0
        self.is_full = False
        return data

    def take_some(self) -> bytes:
        """The first of what is there, at most `READ_BYTES_MAX`."""
        if self.unread <= READ_BYTES_MAX:
            return self.take()
        pieces, size, count = self.pieces, 0, 0
        while size < READ_BYTES_MAX:
            size += len(pieces[count])
            count += 1
        data = b"".join(pieces[:count])
        pieces[:count] = [data[READ_BYTES_MAX:]] if size > READ_BYTES_MAX else []
        self.unread -= min(size, READ_BYTES_MAX)
        self.is_full = self.unread + PIECE_BYTES * len(pieces) > UNREAD_BYTES_MAX
        return data[:READ_BYTES_MAX]

    def uncount(self) -> None:
        tab, self.tab = self.tab, None
        if tab is not None:
            tab.close()


class AnswerReader:
    """The answers of one connection, one after the other: `begin` makes it ready for the next.

    Only where the one before came whole and was read: a parser that has stopped in the middle cannot be used again.
    """

    __slots__ = (
        "_frame_bytes", "_framed", "_parser", "body", "complete", "has_head", "headers", "heard", "keeps", "status",
    )  # fmt: skip

    def __init__(self) -> None:
        self.body = AnswerBody()
        self._parser: Any = httptools.HttpResponseParser(self)  # it and this refer to each other, until `closed`
        self.begin()

    def begin(self) -> None:
        self.status = 0
        self.headers: list[Header] = []
        self.heard = self.has_head = self.complete = self.keeps = self._framed = False
        self._frame_bytes = 0  # of headers, chunk lines and trailers since the last piece of a body
        self.body.taken = 0
        self.body.limit = None

    def feed(self, data: bytes) -> WireError | None:
        """Parse; returns why it is no answer, or too much of one."""
        # Returned, not raised: a traceback holds frames, and those the connection, until the garbage collector runs.
        self.heard = True
        self._frame_bytes += len(data)
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            cause = error.__context__  # what a callback below has raised
            return cause if isinstance(cause, WireError) else GarbageError(f"{_NOT_HTTP} ({error})")
        if self._frame_bytes > HEADERS_BYTES_MAX and not self.complete:
            return _too_many_headers()
        return None

    def closed(self, cleanly: bool) -> None:
        """The connection is gone. That is how an answer ends which told no length."""
        self._parser = None
        if self.has_head and not self._framed and cleanly:
            self.complete = True
        self.keeps = False

    # --- the parser's callbacks; what they raise stops it

    def on_message_begin(self) -> None:
        if self.complete:
            raise GarbageError("answered twice")

    def on_header(self, name: bytes, value: bytes) -> None:
        if self.has_head:  # a trailer
            return
        name = name.lower()
        if name == b"content-length" or (name == b"transfer-encoding" and b"chunked" in value.lower()):
            self._framed = True
        self.headers.append((name, value))
        if len(self.headers) > HEADERS_MAX:
            raise _too_many_headers()

    def on_headers_complete(self) -> None:
        self.status = status = self._parser.get_status_code()
        if self._frame_bytes > HEADERS_BYTES_MAX and _size(self.headers) > HEADERS_BYTES_MAX:  # the rest may be body
            raise _too_many_headers()
        if status < 200:
            if status < 100 or status == 101:
                raise GarbageError(f"answered with an unexpected status {status}")
            return
        self.has_head = True
        if status in (204, 304):
            self._framed = True

    def on_body(self, data: bytes) -> None:
        # Once for every piece of every stream: the bounds are looked at only where one of them could be passed.
        self._frame_bytes = 0
        body = self.body
        body.pieces.append(data)
        body.unread += len(data)
        held = body.unread + body.taken + PIECE_BYTES * len(body.pieces)
        if held > BYTES_FREE or body.limit is not None:
            body.check(held)

    def on_message_complete(self) -> None:
        if self.status < 200:  # 100 Continue and the like: the answer is still to come
            self.headers.clear()
            self._framed = False
            return
        self.complete = True
        self.keeps = self._parser.should_keep_alive()


def _size(headers: Sequence[Header]) -> int:
    return sum(len(name) + len(value) + 4 for name, value in headers)


def _too_many_headers() -> GarbageError:
    return GarbageError(f"answered headers of more than {HEADERS_BYTES_MAX} bytes")
