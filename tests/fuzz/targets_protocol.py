"""What reaches the protocol from outside: frames, block lists and tickets."""

from __future__ import annotations

import base64
import hashlib
import hmac

import msgspec
from guided import Target
from mutators import Shape

from kvbaton.protocol.errors import ProtocolError, Reason
from kvbaton.protocol.geometry.progress import whole
from kvbaton.protocol.ids import (
    Incarnation,
    LeaseId,
    PeerId,
    ReservationId,
    TransferId,
    WorkerId,
    handoff_id,
    is_handoff_id,
    is_worker_id,
)
from kvbaton.protocol.wire import messages as m
from kvbaton.protocol.wire.codec import decode, encode, pack_blocks, unpack_blocks
from kvbaton.protocol.wire.ticket import TICKET_CHARS_MAX, Ticket, seal, unseal
from kvbaton_proof.sim.world.sim_memory import Shape as Memory

KEY = b"the key of the fuzzed cluster..."
WALL_S = 1_700_000_000.0
HANDOFF = handoff_id(TransferId("0" * 31 + "1"))
D, P = PeerId(WorkerId("d"), Incarnation(0xD1)), PeerId(WorkerId("p"), Incarnation(0xA1))
CARD = m.Card(0, int(m.ALL_FEATURES), "host", {"model": "m"}, Memory().layout(), ("tcp", "shm"))
SIGNED = Ticket(HANDOFF, P.worker, WALL_S + 60, P.incarnation, LeaseId(1), D.worker, b"digest", 1)
LEASE, RESERVATION, TICKET = LeaseId(1), ReservationId(1), seal(SIGNED, KEY)
MESSAGES: list[m.Message] = [
    m.Hello(7, CARD),
    m.Welcome(7, CARD, "tcp", (b"endpoint",), 3),
    m.HelloRefused(7, Reason.INCOMPATIBLE, "model: m is not n"),
    m.Joined((b"endpoint",)),
    m.Linked(),
    m.Reset(0xA1),
    m.Goodbye(),
    m.Claim(HANDOFF, 1, TICKET, b"digest", False),
    m.Granted(HANDOFF, 1, LEASE, 15.0, 5, (pack_blocks([1, 2, 3]),), whole([3]), True),
    m.GrantedFrom(HANDOFF, 1, LEASE, 15.0, 5, (pack_blocks([1, 2, 3]),), whole([3]), True, ("d0 key", "*")),
    m.ClaimRefused(HANDOFF, 1, Reason.BUSY, "full"),
    m.Renew(LEASE, 1, (3,), True),
    m.Renewed(LEASE, 1, 15.0, 2),
    m.RenewRefused(LEASE, 1, Reason.UNKNOWN_LEASE),
    m.Ready(LEASE, 1, (0,), (pack_blocks([1, 2]),), whole([2]), False),
    m.Commit(LEASE, 1),
    m.Committed(LEASE, 1),
    m.Stale(LEASE, 1, (2,)),
    m.Abandon(HANDOFF, 1),
    m.SourceLost(LEASE, 1, Reason.SOURCE_ABORTED),
    m.Offer(LEASE, 1, RESERVATION, 0, (pack_blocks([4, 5, 6]),), b"digest"),
    m.Accepted(RESERVATION),
    m.Written(LEASE, 1, RESERVATION, b"digest"),
    m.Ack(LEASE, 1, RESERVATION),
    m.Revoke(LEASE, 1, RESERVATION),
    m.Quiesced(RESERVATION, None),
]


def refused(error: ProtocolError) -> None:
    assert error.detail and len(error.detail) < 2000


# --- frames


def frame(data: bytes) -> None:
    """A refusal with a reason, or a message that says the same when it is said again."""
    try:
        envelope, message = decode(data)
    except ProtocolError as error:
        refused(error)
        return
    again, same = decode(encode(envelope.sender, envelope.to, envelope.session, message))
    assert (again.sender, again.to, again.session) == (envelope.sender, envelope.to, envelope.session)
    assert msgspec.msgpack.encode(same) == msgspec.msgpack.encode(message)  # by bytes: a nan is not equal to itself
    assert is_worker_id(envelope.worker)


def frames() -> list[bytes]:
    return [encode(D, P.incarnation, 3, message) for message in MESSAGES]


def blocks(data: bytes) -> None:
    """Ids that give the same bytes again, none below the one that stands for no block."""
    try:
        ids = unpack_blocks(data)
    except ProtocolError as error:
        refused(error)
    else:
        assert pack_blocks(ids) == data and min(ids, default=0) >= -1


# --- tickets


def opened(text: str) -> None:
    try:
        ticket = unseal(text, (b"another key", KEY), WALL_S)
    except ProtocolError as error:
        refused(error)
        return
    assert len(text) <= TICKET_CHARS_MAX
    assert is_handoff_id(ticket.handoff) and is_worker_id(ticket.source) and ticket.max_readers >= 1
    assert not ticket.expires_unix_s < WALL_S
    again = seal(ticket, KEY)
    if len(again) <= TICKET_CHARS_MAX:
        assert msgspec.msgpack.encode(unseal(again, (KEY,), WALL_S)) == msgspec.msgpack.encode(ticket)


def ticket_text(data: bytes) -> None:
    """Text from anyone: nothing is read of it that our key has not signed."""
    text = data.decode("latin-1")
    try:
        found = unseal(text, (KEY,), WALL_S)
    except ProtocolError as error:
        refused(error)
    else:
        raw = base64.urlsafe_b64decode(text + "=" * (-len(text) % 4))
        assert raw[:16] == hmac.new(KEY, b"kvbaton-ticket\0" + raw[16:], hashlib.sha256).digest()[:16], found


def ticket_signed(data: bytes) -> None:
    """A body with a good signature: of a holder of the key who makes mistakes."""
    mac = hmac.new(KEY, b"kvbaton-ticket\0" + data, hashlib.sha256).digest()[:16]
    opened(base64.urlsafe_b64encode(mac + data).decode().rstrip("="))


def ticket_bodies() -> list[bytes]:
    minted = msgspec.structs.replace(SIGNED, incarnation=Incarnation(0), lease=LeaseId(0), digest=b"", target="")
    late = msgspec.structs.replace(SIGNED, expires_unix_s=WALL_S - 1)
    texts = [seal(ticket, KEY) for ticket in (SIGNED, minted, late)]
    return [base64.urlsafe_b64decode(text + "=" * (-len(text) % 4))[16:] for text in texts]


def ticket_texts() -> list[bytes]:
    return [TICKET.encode(), seal(SIGNED, b"a key of others").encode(), b"", b"not base64url!"]


TARGETS = (
    Target("codec", frame, frames, Shape.MSGPACK, 5000),
    Target(
        "blocks", blocks, lambda: [pack_blocks([-1, 0, 1, 1 << 20]), b"\xfe\xff\xff\xff", b"abc"], Shape.BYTES, 1000
    ),
    Target("ticket_text", ticket_text, ticket_texts, Shape.BYTES, 2000),
    Target("ticket_signed", ticket_signed, ticket_bodies, Shape.MSGPACK, 2500),
)
