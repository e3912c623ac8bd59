"""One HTTP answer as its bytes come, read no further than a measurement needs.

Laws: pure. It knows where an answer ends and whether it is the one that was asked for; it parses no JSON. It relies on
what the backends of this benchmark send: no body contains CR LF, so a chunked one ends where the last chunk does.
"""

from __future__ import annotations

from kvbaton_proof.bench.router.router_backends import EVENTS, TEXT

_LAST_CHUNK = b"\r\n0\r\n\r\n"
_UNKNOWN, _CHUNKED = -1, -2


class Answer:
    """Feed it until it says that it is complete; then `wrong` is empty or says what is."""

    __slots__ = ("_end", "_start", "data")

    def __init__(self) -> None:
        self.data = b""
        self._start = 0  # of the body
        self._end = _UNKNOWN  # in bytes from the beginning, or one of the two above

    def feed(self, data: bytes) -> bool:
        """Whether it is complete now. One without a length is complete at once, and wrong."""
        self.data = data = self.data + data if self.data else data
        if self._end == _UNKNOWN:
            head_end = data.find(b"\r\n\r\n")
            if head_end < 0:
                return False
            self._start = head_end + 4
            self._end = _end_of(data[: self._start].lower(), self._start)
        if self._end == _CHUNKED:
            return data.endswith(_LAST_CHUNK)
        return len(data) >= self._end

    @property
    def has_event(self) -> bool:
        return self._start > 0 and self.data.find(b"data: ", self._start) >= 0

    @property
    def keeps_alive(self) -> bool:
        return b"\r\nconnection: close" not in self.data[: self._start].lower()

    def wrong(self, stream: bool) -> str:
        """Why this is not the answer to a request of this benchmark; empty if it is."""
        status = self.data[9:12].decode("ascii", "replace")
        if status != "200":
            return f"status {status}"
        if self._end == self._start:
            return "no length, or no body"
        if not stream:
            return "" if self.data.find(TEXT, self._start) >= 0 else "another answer"
        body = self.data[self._start :]
        if body.count(b"data: ") != EVENTS + 1:
            body = dechunked(body)  # an event may be cut in two by a chunk's head
        events = body.count(b"data: ")
        if events != EVENTS + 1 or b"data: [DONE]" not in body:
            return f"a stream of {events} events, expected {EVENTS} and [DONE]"
        return ""


def _end_of(head: bytes, start: int) -> int:
    at = head.find(b"\r\ncontent-length:")
    if at >= 0:
        digits = head[at + 17 : head.find(b"\r\n", at + 17)].strip()
        return start + int(digits) if digits.isdigit() else start
    return _CHUNKED if b"\r\ntransfer-encoding: chunked" in head else start


def dechunked(body: bytes) -> bytes:
    """What the chunks of a complete body carry; as far as they make sense."""
    parts: list[bytes] = []
    at = 0
    while True:
        line_end = body.find(b"\r\n", at)
        try:
            size = int(body[at:line_end].split(b";", 1)[0], 16) if line_end >= 0 else 0
        except ValueError:
            size = 0
        if size <= 0:
            return b"".join(parts)
        parts.append(body[line_end + 2 : line_end + 2 + size])
        at = line_end + 2 + size + 2
