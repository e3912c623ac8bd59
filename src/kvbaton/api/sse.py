"""Server-sent events as bytes: whole events only, so that an error event can always follow.

Law: what leaves `Relay` ends where an event ends; a peer that dies in mid-event costs that event, not the stream.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

from kvbaton.api.api_errors import ApiError

EVENT_BYTES_MAX = 8 << 20
"""The first and the last event of a response repeat its instructions, so this is more than any chunk needs."""
DONE = b"data: [DONE]\n\n"
CONTENT_TYPE = "text/event-stream"

LAST_TYPES = frozenset({"response.completed", "response.incomplete", "response.failed", "message_stop", "error"})
"""The events that end a stream of `/v1/responses` or `/v1/messages`, which say no `[DONE]`."""
OPENING_TYPES = frozenset({"response.created", "response.queued", "response.in_progress", "message_start", "ping"})
_OPENING_MARKS = (b'"response.', b'"message_start"', b'"ping"')
_CHUNK = (b'data: {"id":"cmpl-', b'data: {"id":"chatcmpl-')
"""So an event of a completion or a chat begins: it does not only open, and is no error. It may bear a long prompt."""


class _SseEvent(msgspec.Struct, frozen=True):
    type: str = ""


_TYPED_TOKENS = (b"event: response.output_text.delta", b"event: content_block_delta")
_NO_TOKEN = (
    b"[DONE]", b'"text":""', b'"text": ""', b'"content":""', b'"content": ""', b'"delta":{}', b'"delta": {}',
    b'"choices":[]', b'"choices": []',
)  # fmt: skip
"""What events have that only begin or end a choice, or tell the usage."""
_encode = msgspec.json.Encoder().encode
_told = msgspec.json.Decoder(_SseEvent).decode


def event(value: Any) -> bytes:
    """One event holding a JSON value."""
    return b"data: " + _encode(value) + b"\n\n"


def typed_event(value: Mapping[str, Any]) -> bytes:
    """One event that bears its type as its name too, as those of `/v1/responses` and `/v1/messages` do."""
    name: str = value["type"]
    return b"event: " + name.encode() + b"\n" + event(value)


def error_event(error: ApiError) -> bytes:
    """The explicit end of a stream that failed after its first byte; no `[DONE]` follows it."""
    return event(error.body)


def typed_error_event(error: ApiError) -> bytes:
    """The same for a stream of `/v1/messages`."""
    return typed_event(error.typed().body)


def payloads(events: bytes) -> Iterator[bytes]:
    """The data of each event in `events`, without comments and other fields."""
    for line in events.splitlines():
        if line.startswith(b"data:"):
            yield line[5:].strip()


def only_comments(data: bytes) -> bool:
    """Of what was read at once, if it begins with one."""
    return data.startswith(b":") and b"data:" not in data


def token_chunks(events: bytes) -> int:
    """How many of whole events bear a token of an answer, in any of the APIs; cheaply, without reading them."""
    if events.startswith(b"event:"):  # typed
        return sum(events.count(mark) for mark in _TYPED_TOKENS)
    count = events.count(b"\ndata:") + events.startswith(b"data:")
    return max(count - sum(map(events.count, _NO_TOKEN)), 0)  # cheaper than one expression


def only_opens(events: bytes, most: int) -> bool:
    """Whether a stream has only said that it began, which those of typed events may before they have a token.

    Of more than `most` events no more are looked at.
    """
    if events.startswith(_CHUNK) or (events.startswith(b"data:") and not _may_open(events)):
        return False
    try:
        looked_at = itertools.islice(payloads(events), most)
        return all(_may_open(each) and _told(each).type in OPENING_TYPES for each in looked_at)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return False


def first_error(events: bytes) -> bytes:
    """The error with which a stream begins, perhaps behind events that only open it; b"" if it begins otherwise."""
    if events.startswith(_CHUNK):
        return b""
    for payload in payloads(events):
        if payload.startswith(b'{"error"'):
            return payload
        try:
            kind = _told(payload).type if b'"type"' in payload else ""
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            kind = ""
        if kind not in OPENING_TYPES:
            return payload if kind == "error" else b""
    return b""


def _may_open(payload: bytes) -> bool:
    """Cheaply, for the first chunk of every stream."""
    return any(mark in payload for mark in _OPENING_MARKS)


class TooLongError(Exception):
    """An event passes `EVENT_BYTES_MAX` without an end."""


class Relay:
    """Cuts a byte stream after whole events, and knows whether the stream came to its end."""

    __slots__ = ("_last", "_rest")

    def __init__(self) -> None:
        self._rest = bytearray()
        self._last = b""

    @property
    def held(self) -> int:
        """Bytes that are kept here."""
        return len(self._rest) + len(self._last)

    def feed(self, data: bytes) -> bytes:
        """All events that are complete now; the beginning of the next one stays here. Each byte is looked at once."""
        rest = self._rest
        if not rest and data.endswith((b"\n\n", b"\r\n\r\n")):  # as mostly
            self._last = data[-EVENT_BYTES_MAX:]
            return data
        searched = max(len(rest) - 3, 0)  # a mark may lie across what came before and what comes now
        rest += data
        end = 0
        for mark in (b"\n\n", b"\r\n\r\n"):
            found = rest.rfind(mark, searched)
            if found >= 0:
                end = max(end, found + len(mark))
        whole = bytes(memoryview(rest)[:end]) if end < len(rest) or len(rest) > len(data) else data
        del rest[:end]
        if len(rest) > EVENT_BYTES_MAX:
            raise TooLongError(f"an event of more than {EVENT_BYTES_MAX} bytes")
        if whole:
            self._last = whole[-EVENT_BYTES_MAX:]
        return whole

    @property
    def ended(self) -> bool:
        """Whether the sender said `[DONE]` or another API's last event, or itself sent the error that ended it."""
        last = next(payloads(self._last[self._last.rfind(b"\ndata:") + 1 :]), b"")
        if last == b"[DONE]" or last.startswith(b'{"error"'):
            return True
        try:
            return _told(last).type in LAST_TYPES
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            return False
