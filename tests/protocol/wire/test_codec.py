"""Bytes become types at the door, once: whatever comes, only `ProtocolError` leaves `decode` (promises 4 and 5)."""

from __future__ import annotations

import typing

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvbaton.protocol.errors import ProtocolError, Reason
from kvbaton.protocol.geometry.progress import GroupProgress
from kvbaton.protocol.ids import HandoffId, Incarnation, LeaseId, PeerId, ReservationId, WorkerId
from kvbaton.protocol.wire import messages as m
from kvbaton.protocol.wire.codec import (
    CARD_BYTES_MAX,
    FRAME_BYTES_MAX,
    Envelope,
    Folded,
    decode,
    encode,
    pack_blocks,
    read,
    unfolded,
    unpack_blocks,
)
from kvbaton.protocol.wire.messages import NEWEST, Versions
from kvbaton_proof.sim.world.sim_memory import Shape

ME = PeerId(WorkerId("d"), Incarnation(7))
CARD = m.Card(0, 7, "host", {"model": "m"}, Shape().layout(), ("tcp",))
HANDOFF = HandoffId("0" * 32 + ".0")
READY = (GroupProgress(3),)
SAMPLES: list[m.Message] = [
    m.Hello(1, CARD),
    m.Welcome(1, CARD, "tcp", (b"endpoint",)),
    m.HelloRefused(1, Reason.INCOMPATIBLE, "compat.model"),
    m.Joined((b"endpoint",)),
    m.Linked(),
    m.Reset(5),
    m.Goodbye(),
    m.Claim(HANDOFF, 1, "ticket", b"digest", False),
    m.Granted(HANDOFF, 1, LeaseId(1), 15.0, 5, (pack_blocks([1, 2, 3]),), READY, True),
    m.GrantedFrom(HANDOFF, 1, LeaseId(1), 15.0, 5, (pack_blocks([1, 2, 3]),), READY, True, ("d0 key",)),
    m.ClaimRefused(HANDOFF, 1, Reason.TICKET_SPENT, "detail"),
    m.Renew(LeaseId(1), 1, (3,), True),
    m.Renewed(LeaseId(1), 1, 15.0, 2),
    m.RenewRefused(LeaseId(1), 1, Reason.LEASE_EXPIRED),
    m.Ready(LeaseId(1), 1, (0,), (pack_blocks([1]),), READY, False),
    m.Commit(LeaseId(1), 1),
    m.Committed(LeaseId(1), 1),
    m.Stale(LeaseId(1), 1, (2,), Reason.LEASE_EXPIRED),
    m.Abandon(HANDOFF, 1, Reason.ABORTED),
    m.SourceLost(LeaseId(1), 1, Reason.SOURCE_PREEMPTED),
    m.Offer(LeaseId(1), 1, ReservationId(1), 0, (pack_blocks([1]),), b"digest"),
    m.Accepted(ReservationId(1)),
    m.Written(LeaseId(1), 1, ReservationId(1), b"digest"),
    m.Ack(LeaseId(1), 1, ReservationId(1)),
    m.Revoke(LeaseId(1), 1, ReservationId(1), Reason.TRANSFER_TIMEOUT),
    m.Quiesced(ReservationId(1), None),
]
IDS = [type(message).__name__ for message in SAMPLES]


def refused(frame: bytes) -> tuple[Reason, str]:
    with pytest.raises(ProtocolError) as error:
        decode(frame)
    return error.value.reason, error.value.detail


def envelope(body: object, version: int = NEWEST, worker: str = "d", more: tuple[object, ...] = ()) -> bytes:
    return msgspec.msgpack.encode((version, worker, 7, 9, 3, body, *more))


def test_there_is_a_sample_of_every_message() -> None:
    assert [type(message) for message in SAMPLES] == list(typing.get_args(m.Message))


@pytest.mark.parametrize("message", SAMPLES, ids=IDS)
def test_what_was_said_is_heard(message: m.Message) -> None:
    heard, again = decode(encode(ME, Incarnation(9), 3, message))
    assert again == message
    assert (heard.sender, heard.to, heard.session, heard.version) == (ME, 9, 3, NEWEST)


@pytest.mark.parametrize("message", SAMPLES, ids=IDS)
def test_extra_trailing_fields_pass(message: m.Message) -> None:
    """A later version may add fields, to the message and to the envelope."""
    body = msgspec.msgpack.decode(msgspec.msgpack.encode(message))
    assert decode(envelope([*body, "new", 3], worker="d", more=("new",)))[1] == message


@pytest.mark.parametrize("message", SAMPLES, ids=IDS)
def test_every_truncation_is_a_bad_message(message: m.Message) -> None:
    frame = encode(ME, Incarnation(9), 3, message)
    step = max(1, len(frame) // 64)
    assert {refused(frame[:length])[0] for length in range(0, len(frame), step)} == {Reason.BAD_MESSAGE}


@pytest.mark.parametrize("message", SAMPLES, ids=IDS)
def test_trailing_bytes_are_a_bad_message(message: m.Message) -> None:
    assert refused(encode(ME, Incarnation(9), 3, message) + b"\0")[0] is Reason.BAD_MESSAGE


def test_another_version_is_named() -> None:
    frame = envelope([99, "whatever it says"], version=NEWEST + 1)
    assert refused(frame) == (Reason.WRONG_VERSION, "version: got 3, this node speaks 1 to 2")


@pytest.mark.parametrize("tag", [0, 8, 36, -1, 1 << 40, "Hello", None])
def test_an_unknown_message_is_refused(tag: object) -> None:
    reason, detail = refused(envelope([tag, 1]))
    assert reason is Reason.BAD_MESSAGE and detail.startswith("message: ")


def test_an_oversized_frame_is_refused_before_it_is_read() -> None:
    reason, detail = refused(b"\0" * (FRAME_BYTES_MAX + 1))
    assert (reason, detail) == (Reason.BAD_MESSAGE, f"frame: {FRAME_BYTES_MAX + 1} bytes, at most {FRAME_BYTES_MAX}")


@pytest.mark.parametrize("worker", ["", "a b", "p#0", "x" * 65, "ü"])
def test_a_sender_whose_name_is_none_is_refused(worker: str) -> None:
    reason, detail = refused(envelope(m.Goodbye(), worker=worker))
    assert reason is Reason.BAD_MESSAGE and detail.startswith("worker: ")


@pytest.mark.parametrize(
    "message",
    [
        m.Claim(HANDOFF, 1, "t" * 1025, b"digest", False),
        m.Claim(HANDOFF, 1, "t", b"d" * 65, False),
        m.Claim(HANDOFF, -1, "t", b"d", False),
        m.ClaimRefused(HANDOFF, 1, Reason.BUSY, "d" * 513),
        m.Joined((b"",) * 4097),
        m.Joined((b"e" * 1025,)),
        m.Renew(LeaseId(1), 1, (0,) * 65, False),
        m.Renew(LeaseId(1), 1, (-1,), False),
        m.Offer(LeaseId(1), 1, ReservationId(1), 0, (b"",) * 65, b"digest"),
        m.Offer(LeaseId(1), 1, ReservationId(1), 0, (b"\0" * (4 * m.LISTED_MAX + 4),), b"digest"),
        m.Granted(HANDOFF, 1, LeaseId(1), 15.0, 5, (), READY * 65, True),
        m.Hello(1, msgspec.structs.replace(CARD, compat={str(n): "" for n in range(65)})),
        m.Hello(1, msgspec.structs.replace(CARD, compat={"model": "m" * 257})),
        m.Hello(1, msgspec.structs.replace(CARD, required=-1)),
        m.Hello(1, msgspec.structs.replace(CARD, host="h" * 129)),
        m.Hello(1, msgspec.structs.replace(CARD, transports=("t",) * 17)),
    ],
)
def test_everything_that_a_peer_says_is_bounded(message: m.Message) -> None:
    reason, detail = refused(encode(ME, Incarnation(9), 3, message))
    assert reason is Reason.BAD_MESSAGE
    assert detail.startswith("card: " if isinstance(message, m.Hello) else "message: ")


def test_a_card_that_is_too_large_is_refused_before_it_is_read() -> None:
    frame = envelope([1, 7, [0] * CARD_BYTES_MAX])
    reason, detail = refused(frame)
    assert reason is Reason.BAD_MESSAGE and detail.startswith("card: 524293 bytes, at most 524288")


def test_a_greeting_is_folded_at_first_and_the_same_when_unfolded() -> None:
    for message in (m.Hello(7, CARD), m.Welcome(7, CARD, "tcp", (b"endpoint",), 3)):
        folded = read(encode(ME, Incarnation(9), 3, message))[1]
        assert isinstance(folded, Folded) and folded.nonce == 7 and unfolded(folded) == message


def test_a_reason_that_this_version_does_not_know_passes_and_is_bounded() -> None:
    """A newer peer may know more ways to fail; `errors.reason_of` makes one of ours of it."""
    assert decode(envelope([15, 1, 1, "bored"]))[1] == m.RenewRefused(LeaseId(1), 1, "bored")
    assert refused(envelope([15, 1, 1, "b" * 65]))[0] is Reason.BAD_MESSAGE


class TestGreetingsOfOtherVersions:
    """D of another version is told so, instead of timing out; and hears it when it is told so itself."""

    @pytest.mark.parametrize("version", [0, 3, 99, (1 << 16) - 1])
    @pytest.mark.parametrize("message", [m.Hello(7, CARD), m.HelloRefused(7, Reason.WRONG_VERSION, "detail")])
    def test_a_greeting_and_its_refusal_are_read_in_every_version(self, message: m.Message, version: int) -> None:
        heard, again = decode(envelope(message, version=version))
        assert again == message and heard.version == version

    @pytest.mark.parametrize("version", [-1, 1 << 16, (1 << 64) - 1])
    def test_but_not_in_what_can_be_none(self, version: int) -> None:
        reason, detail = refused(envelope(m.Hello(7, CARD), version=version))
        assert reason is Reason.BAD_MESSAGE and "$[0]" in detail

    @pytest.mark.parametrize(
        "body", [m.Goodbye(), [1, "another Hello altogether"], m.Claim(HANDOFF, 1, "t", b"", False)]
    )
    def test_anything_else_is_not(self, body: object) -> None:
        assert refused(envelope(body, version=3)) == (Reason.WRONG_VERSION, "version: got 3, this node speaks 1 to 2")

    def test_a_range_of_one_reads_one(self) -> None:
        with pytest.raises(ProtocolError, match="version: got 2, this node speaks 1"):
            decode(envelope(m.Goodbye(), version=2), Versions(1, 1))


@pytest.mark.parametrize("message", SAMPLES, ids=IDS)
def test_what_was_said_in_version_1_is_heard_but_for_what_it_could_not_say(message: m.Message) -> None:
    heard, again = decode(encode(ME, Incarnation(9), 3, message, 1))
    unsaid = {"reason": ""} if isinstance(message, m.Stale | m.Abandon | m.Revoke) else {}
    assert again == msgspec.structs.replace(message, **unsaid) and heard.version == 1


def test_what_follows_in_a_message_of_version_1_is_passed_over_as_it_was_then() -> None:
    assert decode(envelope([20, HANDOFF, 1, ["whatever"]], 1))[1] == m.Abandon(HANDOFF, 1)


def test_deep_nesting_is_a_bad_message() -> None:
    assert refused(b"\x91" * 100_000 + b"\x90")[0] is Reason.BAD_MESSAGE
    assert refused(envelope(msgspec.Raw(b"\x91" * 100_000 + b"\x90")))[0] is Reason.BAD_MESSAGE


def test_text_that_is_not_utf8_is_a_bad_message() -> None:
    frame = envelope(m.Goodbye(), worker="dd").replace(b"\xa2dd", b"\xa2\xff\xff")
    assert refused(frame)[0] is Reason.BAD_MESSAGE


@settings(derandomize=True, database=None, deadline=None, max_examples=500)
@given(st.binary(max_size=200))
def test_garbage_never_raises_anything_else(frame: bytes) -> None:
    refused(frame)


@settings(derandomize=True, database=None, deadline=None, max_examples=800)
@given(
    st.sampled_from(SAMPLES), st.lists(st.tuples(st.integers(0, 1 << 20), st.integers(0, 255)), min_size=1, max_size=4)
)
def test_changed_bytes_are_another_message_or_a_protocol_error(
    message: m.Message, changes: list[tuple[int, int]]
) -> None:
    frame = bytearray(encode(ME, Incarnation(9), 3, message))
    for at, value in changes:
        frame[at % len(frame)] = value
    try:
        heard, again = decode(bytes(frame))
    except ProtocolError as error:
        assert error.reason in (Reason.BAD_MESSAGE, Reason.WRONG_VERSION)
    else:
        assert isinstance(heard, Envelope) and isinstance(again, typing.get_args(m.Message))


def test_blocks_go_packed_and_come_back() -> None:
    assert unpack_blocks(pack_blocks([0, 5, -1, (1 << 31) - 1])) == (0, 5, -1, (1 << 31) - 1)
    assert pack_blocks([1]) == b"\1\0\0\0"
    assert unpack_blocks(b"") == ()


def test_half_a_block_id_is_refused() -> None:
    with pytest.raises(ProtocolError, match="blocks: 5 bytes are not whole int32 ids"):
        unpack_blocks(b"\0" * 5)


def test_a_negative_block_id_is_refused() -> None:
    with pytest.raises(ProtocolError, match="blocks: id -2 is negative"):
        unpack_blocks(pack_blocks([1, -2]))
