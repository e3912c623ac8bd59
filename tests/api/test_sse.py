"""Events as bytes: cut anywhere, passed on whole."""

from __future__ import annotations

import pytest

from kvbaton.api.sse import EVENT_BYTES_MAX, Relay, TooLongError, event, payloads, typed_event


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


@pytest.mark.parametrize("end", [b"\n\n", b"\r\n\r\n"])
@pytest.mark.parametrize("size", [1, 5, 1000])
@pytest.mark.parametrize(
    ("last", "ended"),
    [
        ({"type": "response.completed", "response": {"output": [{"type": "message"}]}}, True),
        ({"response": {"type": "odd", "error": None}, "sequence_number": 3, "type": "response.completed"}, True),
        ({"type": "response.incomplete"}, True),
        ({"type": "response.failed"}, True),
        ({"type": "error", "message": "m"}, True),
        ({"type": "response.output_item.done", "item": {"type": "response.completed"}}, False),
        ({"type": "response.output_text.delta", "delta": "response.completed"}, False),
        ({"type": ["error"]}, False),
        ({}, False),
    ],
)
def test_a_response_ends_with_its_last_event_and_without_done(
    last: dict[str, object], ended: bool, size: int, end: bytes
) -> None:
    stream = typed_event({"type": "response.created"}) + b"event: any\n" + event(last)
    stream = stream if end == b"\n\n" else stream.replace(b"\n", b"\r\n")
    relay = Relay()
    assert b"".join(relay.feed(stream[at : at + size]) for at in range(0, len(stream), size)) == stream
    assert relay.ended is ended


def test_a_response_that_was_cut_off_in_its_last_event_has_not_ended() -> None:
    relay = Relay()
    assert not relay.ended
    relay.feed(typed_event({"type": "response.created"}) + typed_event({"type": "response.completed"})[:-1])
    assert not relay.ended
    relay.feed(b"\n")
    assert relay.ended


@pytest.mark.parametrize("junk", [b"\xff", b"{", b"[]", b'{"type":"\xff"}', b"[" * 100_000, b""])
def test_a_last_event_that_is_no_json_is_no_end(junk: bytes) -> None:
    relay = Relay()
    relay.feed(b"data: " + junk + b"\n\n")
    assert not relay.ended


def test_an_event_without_end_is_refused() -> None:
    relay = Relay()
    with pytest.raises(TooLongError):
        for _ in range(3):
            relay.feed(b"x" * EVENT_BYTES_MAX)


def test_an_event_that_repeats_long_instructions_passes() -> None:
    long = typed_event({"type": "response.completed", "response": {"instructions": "x" * (3 << 19)}})
    relay = Relay()
    assert b"".join(relay.feed(long[at : at + (1 << 18)]) for at in range(0, len(long), 1 << 18)) == long
    assert relay.ended


def test_comments_and_other_fields_are_no_payload() -> None:
    assert list(payloads(b": ping\n\nevent: x\ndata:1\n\ndata: 2\n\n")) == [b"1", b"2"]
