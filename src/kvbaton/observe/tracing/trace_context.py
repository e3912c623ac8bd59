"""W3C trace context: the header that says which trace a request belongs to.

Law: `parse` never raises, and its result is valid: hexadecimal ids in lower case, neither of them all zeros. The header
sent is always version 00 with the flags that version defines, whatever came in.
"""

from __future__ import annotations

import re
import secrets

import msgspec

HEADER = "traceparent"
SAMPLED = 0x01
RANDOM_TRACE_ID = 0x02
KNOWN_FLAGS = SAMPLED | RANDOM_TRACE_ID
TRACEPARENT_CHARS_MAX = 256
"""A version after 00 may say more behind the four fields that we read; this much is borne with."""
VERSION_00_CHARS = 55

_FIELDS = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})")
_SPAN_ID = re.compile(r"[0-9a-f]{16}")
NO_TRACE = "0" * 32
NO_SPAN = "0" * 16


class Traceparent(msgspec.Struct, frozen=True):
    """A span as others refer to it; `str()` is the header's value."""

    trace_id: str  # 32 hexadecimal digits
    span_id: str  # 16
    flags: int = 0

    @property
    def sampled(self) -> bool:
        """Whether its caller records this trace, and so should we."""
        return bool(self.flags & SAMPLED)

    def child(self, span_id: str) -> Traceparent:
        """The same trace, propagated under the span `span_id`."""
        return Traceparent(trace_id=self.trace_id, span_id=span_id, flags=self.flags)

    def __str__(self) -> str:
        return f"00-{self.trace_id}-{self.span_id}-{self.flags:02x}"


def parse(text: str | None) -> Traceparent | None:
    """The parsed header; None where it is missing or invalid, in which case a new trace starts."""
    if not text or len(text) > TRACEPARENT_CHARS_MAX:
        return None
    fields = _FIELDS.match(text)
    if fields is None:
        return None
    version, trace_id, span_id, flags = fields.groups()
    more = text[VERSION_00_CHARS:]
    if version == "ff" or (more and (version == "00" or more[0] != "-")):
        return None
    if trace_id == NO_TRACE or span_id == NO_SPAN:
        return None
    return Traceparent(trace_id=trace_id, span_id=span_id, flags=int(flags, 16) & KNOWN_FLAGS)


def new_trace(*, sampled: bool = True) -> Traceparent:
    """A trace that starts here."""
    flags = RANDOM_TRACE_ID | (SAMPLED if sampled else 0)
    return Traceparent(trace_id=_hex(16), span_id=new_span_id(), flags=flags)


def new_span_id() -> str:
    """16 hexadecimal digits, never all zeros."""
    return _hex(8)


def is_span_id(text: str) -> bool:
    return _SPAN_ID.fullmatch(text) is not None and text != NO_SPAN


def _hex(size: int) -> str:
    while not any(octets := secrets.token_bytes(size)):
        pass
    return octets.hex()
