"""Server-sent events as bytes: whole events only, so that an error event can always follow.

Law: what leaves `Relay` ends where an event ends; a peer that dies in mid-event costs that event, not the stream.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec

from kvbaton.api.errors import ApiError

EVENT_BYTES_MAX = 1 << 20
DONE = b"data: [DONE]\n\n"
CONTENT_TYPE = "text/event-stream"

_encode = msgspec.json.Encoder().encode


def event(value: Any) -> bytes:
    """One event holding a JSON value."""
    return b"data: " + _encode(value) + b"\n\n"


def error_event(error: ApiError) -> bytes:
    """The explicit end of a stream that failed after its first byte; no `[DONE]` follows it."""
    return event(error.body)


def payloads(events: bytes) -> Iterator[bytes]:
    """The data of each event in `events`, without comments and other fields."""
    for line in events.splitlines():
        if line.startswith(b"data:"):
            yield line[5:].strip()


class TooLongError(Exception):
    """An event passes `EVENT_BYTES_MAX` without an end."""


class Relay:
    """Cuts a byte stream after whole events, and knows whether the stream came to its end."""

    def __init__(self) -> None:
        self._rest = b""
        self._last = b""

    def feed(self, data: bytes) -> bytes:
        """All events that are complete now; the beginning of the next one stays here."""
        data = self._rest + data if self._rest else data
        end = 0
        for mark in (b"\n\n", b"\r\n\r\n"):
            found = data.rfind(mark)
            if found >= 0:
                end = max(end, found + len(mark))
        whole, self._rest = data[:end], data[end:]
        if len(self._rest) > EVENT_BYTES_MAX:
            raise TooLongError(f"an event of more than {EVENT_BYTES_MAX} bytes")
        if whole:
            self._last = whole[-EVENT_BYTES_MAX:]
        return whole

    @property
    def ended(self) -> bool:
        """Whether the sender said `[DONE]`, or itself sent the error that ended it."""
        last = b""
        for payload in payloads(self._last):
            last = payload
        return last == b"[DONE]" or last.startswith(b'{"error"')
