"""Events as bytes: cut anywhere, passed on whole."""

from __future__ import annotations

import pytest

from kvbaton.api.sse import EVENT_BYTES_MAX, Relay, TooLongError, payloads


@pytest.mark.parametrize("end", [b"\n\n", b"\r\n\r\n"])
@pytest.mark.parametrize("size", [1, 2, 3, 7, 1000])
def test_a_stream_cut_anywhere_leaves_in_whole_events(size: int, end: bytes) -> None:
    stream = b"".join(b'data: {"n": %d}' % n + end for n in range(5)) + b"data: [DONE]" + end
    relay = Relay()
    pieces = [relay.feed(stream[at : at + size]) for at in range(0, len(stream), size)]
    assert b"".join(pieces) == stream
    assert all(piece == b"" or piece.endswith(end) for piece in pieces)
    assert relay.ended


def test_a_stream_without_done_has_not_ended_and_one_that_told_an_error_has() -> None:
    relay = Relay()
    relay.feed(b"data: {}\n\n")
    assert not relay.ended
    relay.feed(b'data: {"error": {}}\n\n')
    assert relay.ended


def test_an_event_without_end_is_refused() -> None:
    relay = Relay()
    with pytest.raises(TooLongError):
        for _ in range(3):
            relay.feed(b"x" * EVENT_BYTES_MAX)


def test_comments_and_other_fields_are_no_payload() -> None:
    assert list(payloads(b": ping\n\nevent: x\ndata:1\n\ndata: 2\n\n")) == [b"1", b"2"]
