"""A frame within its bounds survives the wire; one outside is refused before anything is allocated for it."""

from __future__ import annotations

import struct

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvbaton.protocol.errors import ProtocolError, Reason
from kvbaton.transports.net.stream_socket import (
    FRAME_BYTES,
    PAYLOAD_BYTES_MAX,
    ROWS_MAX,
    Frame,
    FrameKind,
    FrameStatus,
    parse,
)

FRAMES = st.builds(
    Frame,
    kind=st.sampled_from(FrameKind),
    tag=st.integers(0, 2**64 - 1),
    payload_bytes=st.integers(0, PAYLOAD_BYTES_MAX),
    status=st.sampled_from(FrameStatus),
    region=st.integers(0, 2**32 - 1),
    table_bytes=st.integers(0, ROWS_MAX).map(lambda rows: rows * 16),
)


@settings(deadline=None)  # a busy machine is not a failure
@given(FRAMES)
def test_a_frame_survives_the_wire(frame: Frame) -> None:
    packed = frame.pack()
    assert len(packed) == FRAME_BYTES
    assert parse(packed, *FrameKind) == frame


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ((2, 1, 0, 0, 0, 0, 0), Reason.WRONG_VERSION),
        ((1, 9, 0, 0, 0, 0, 0), Reason.BAD_MESSAGE),
        ((1, 3, 0, 0, 0, 0, 0), Reason.BAD_MESSAGE),
        ((1, 1, 3, 0, 0, 0, 0), Reason.BAD_MESSAGE),
        ((1, 1, 0, 0, 8, 0, 0), Reason.BAD_MESSAGE),
        ((1, 1, 0, 0, (ROWS_MAX + 1) * 16, 0, 0), Reason.BAD_MESSAGE),
        ((1, 1, 0, 0, 16, 0, PAYLOAD_BYTES_MAX + 1), Reason.BAD_MESSAGE),
    ],
    ids=["version", "kind", "unexpected kind", "status", "odd table", "long table", "long payload"],
)
def test_what_breaks_a_bound_is_refused_by_name(fields: tuple[int, ...], reason: Reason) -> None:
    with pytest.raises(ProtocolError) as refused:
        parse(struct.pack("<BBHIIQQ", *fields), FrameKind.READ, FrameKind.WRITE)
    assert refused.value.reason is reason
