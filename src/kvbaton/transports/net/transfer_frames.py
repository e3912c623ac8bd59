"""The protocol of a TCP stream after the handshake: requests one way, responses in the same order the other way.

    READ   tag, region, table of (offset, bytes)              answered by  DATA tag, status, payload
    WRITE  tag, region, table of (offset, bytes), payload     answered by  DONE tag, status
    SUM    tag, region, table of (offset, bytes)              answered by  SUMS tag, status, a digest for each pair

Data streams carry the first two; SUM has its own listener (`checksum_service`), so that it never waits behind payload.

Law: a frame is checked against its bounds here before anything is allocated for it. A frame that exceeds a bound is
malformed and costs the connection; spans outside the memory, or in blocks that are not lent to the peer, are a bad
request and cost only that copy.
"""

from __future__ import annotations

import enum
import struct

import msgspec

from kvbaton.protocol.errors import ProtocolError, Reason
from kvbaton.transports.core.jobs import PAIR_BYTES

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
