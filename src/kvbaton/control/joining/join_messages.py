"""What a process says at the join door, and the door to it.

Law: `decode` raises `JoinFault` and nothing else, whatever the bytes; past it every field is within its bounds. A
question fits in `QUESTION_BYTES_MAX`; longer ones are hung up on by the socket.

Registries pass the cluster's card on as the admission key signed it (signature 64 | msgpack ClusterCard), so that none
of them can change it. One without that key can withhold a card or repeat one; `at` says which of two is the later, and
no member goes back.
"""

from __future__ import annotations

import enum
import functools
from typing import Annotated

import msgspec
from msgspec import Meta

from kvbaton.control.joining.join_token import Certificate
from kvbaton.control.key_files import TICKET_KEY_BYTES, TICKET_KEYS_MAX, is_public_key
from kvbaton.control.signing import SIGNATURE_BYTES, SIGNING_KEY_BYTES, Signer, verify
from kvbaton.protocol.ids import WORKER_ID_CHARS_MAX, is_worker_id
from kvbaton.protocol.legality import Role
from kvbaton.protocol.numbers import Version

JOIN_VERSION = 1
QUESTION_BYTES_MAX = 1024
ANSWER_BYTES_MAX = 64 << 10
CARDS_MAX = 128
REMOVED_TOLD_MAX = 8192
"""More than a key directory remembers."""
DETAIL_CHARS_MAX = 256

_Key = Annotated[str, Meta(min_length=40, max_length=40)]
_Name = Annotated[str, Meta(max_length=WORKER_ID_CHARS_MAX)]
SigningKey = Annotated[bytes, Meta(min_length=SIGNING_KEY_BYTES, max_length=SIGNING_KEY_BYTES)]
_TicketKey = Annotated[bytes, Meta(min_length=TICKET_KEY_BYTES, max_length=TICKET_KEY_BYTES)]


class JoinFault(Exception):
    """A message that breaks the rules; the text names the field."""


class MemberCard(msgspec.Struct, frozen=True):
    """A minted member that others dial by name, a registry or a store; or whose orders they check: an operator."""

    name: _Name
    public: _Key
    role: Role
    also: Annotated[tuple[_Key, ...], Meta(max_length=1)] = ()
    signing: Annotated[dict[_Key, SigningKey], Meta(max_length=2)] = {}  # by CURVE key


class ClusterCard(msgspec.Struct, frozen=True):
    """All that a member without a key directory needs of one; it holds the ticket keys, so its `repr` is short."""

    ticket_keys: Annotated[tuple[_TicketKey, ...], Meta(max_length=TICKET_KEYS_MAX + 1)]
    members: Annotated[tuple[MemberCard, ...], Meta(max_length=CARDS_MAX)]
    at: Annotated[int, Meta(ge=0, lt=1 << 60)] = 0  # ms, wall clock: since when it says this
    removed: Annotated[tuple[_Name, ...], Meta(max_length=REMOVED_TOLD_MAX)] = ()  # not at the door; see `removed_keys`
    removed_keys: Annotated[tuple[_Key, ...], Meta(max_length=REMOVED_TOLD_MAX)] = ()  # of members that had joined

    def __hash__(self) -> int:
        return hash((self.at, self.removed, self.removed_keys, self.ticket_keys))  # members have dicts

    def __repr__(self) -> str:
        return f"ClusterCard(members={len(self.members)}, ticket_keys={len(self.ticket_keys)})"


class RefusalKind(enum.StrEnum):
    """Why somebody is not let in; what a caller does next depends on it."""

    TOKEN = "token"  # not one of ours, or not proven: the same answer for both
    EXPIRED = "expired"
    USED_UP = "used-up"
    REVOKED = "revoked"
    ROLE = "role"
    NAME = "name"  # minted, or of a kind of name that is kept for another role
    TAKEN = "taken"  # by another key that is alive; may be free later
    REMOVED = "removed"
    CERTIFICATE = "certificate"  # does not verify, is another's, or has expired
    FULL = "full"
    BUSY = "busy"  # the registry cannot write its directory now


class Join(msgspec.Struct, frozen=True, tag="join"):
    """Let me in: my key is this connection's, and so is the word of it by which key I sign."""

    token: Annotated[str, Meta(max_length=16)]
    name: _Name
    role: Role
    proof: Annotated[bytes, Meta(min_length=32, max_length=32)]
    signing: SigningKey | None = None


class Present(msgspec.Struct, frozen=True, tag="present"):
    """I am a member already, by another registry or from before."""

    certificate: Certificate
    signing: SigningKey | None = None


class JoinAdmitted(msgspec.Struct, frozen=True, tag="admitted"):
    certificate: Certificate
    admission: Annotated[bytes, Meta(min_length=32, max_length=32)]
    cluster: ClusterCard

    def __repr__(self) -> str:
        return "JoinAdmitted(…)"


class JoinRefused(msgspec.Struct, frozen=True, tag="refused"):
    kind: RefusalKind
    detail: Annotated[str, Meta(max_length=DETAIL_CHARS_MAX)] = ""


Question = Join | Present
Answer = JoinAdmitted | JoinRefused

_encoder = msgspec.msgpack.Encoder()
_frames = msgspec.msgpack.Decoder(tuple[Version, msgspec.Raw])
_questions = msgspec.msgpack.Decoder(Question)
_answers = msgspec.msgpack.Decoder(Answer)


def encode(message: Question | Answer) -> bytes:
    return _encoder.encode((JOIN_VERSION, message))


def decode_question(frame: bytes) -> Question:
    try:
        question: Question = _questions.decode(_body(frame))
    except _BAD as error:
        raise JoinFault(f"message: {error}") from None
    if isinstance(question, Join) and not is_worker_id(question.name):
        raise JoinFault("name: letters, digits, '.', '_' and '-' only, at most 64")
    return question


def decode_answer(frame: bytes) -> Answer:
    try:
        answer: Answer = _answers.decode(_body(frame))
    except _BAD as error:
        raise JoinFault(f"message: {error}") from None
    if isinstance(answer, JoinAdmitted):
        check_card(answer.cluster)
    return answer


def check_card(card: ClusterCard) -> None:
    """What the decoder cannot."""
    if not card.ticket_keys:
        raise JoinFault("cluster.ticket_keys: none")
    for member in card.members:
        if not is_worker_id(member.name) or not all(map(is_public_key, (member.public, *member.also, *member.signing))):
            raise JoinFault("cluster.members: a name or key that is none")
    if not all(map(is_worker_id, card.removed)) or not all(map(is_public_key, card.removed_keys)):
        raise JoinFault("cluster.removed: a name or key that is none")


def _body(frame: bytes) -> msgspec.Raw:
    version, body = _frames.decode(frame)
    if version != JOIN_VERSION:
        raise JoinFault(f"version: got {version}, expected {JOIN_VERSION}; run one release on both sides")
    return body


_BAD = (msgspec.DecodeError, UnicodeDecodeError, RecursionError, OverflowError)


CARD_BYTES_MAX = 512 << 10
SignedCard = Annotated[bytes, Meta(max_length=CARD_BYTES_MAX)]
_CONTEXT = "cluster card 1"


@functools.lru_cache(maxsize=4)
def signed_card(card: ClusterCard, seed: bytes) -> bytes:
    """Remembered: a registry tells the same with every answer."""
    body = _encoder.encode(card)
    return Signer.from_private(seed).sign(_CONTEXT, body) + body


@functools.lru_cache(maxsize=4)
def opened_card(data: bytes, admission: bytes) -> ClusterCard:
    """What it says, if the admission key has signed it."""
    signature, body = data[:SIGNATURE_BYTES], data[SIGNATURE_BYTES:]
    if not body or not admission or not verify(_CONTEXT, admission, body, signature):
        raise JoinFault("card: not signed by this cluster's admission key")
    try:
        card = _decoder.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, OverflowError) as error:
        raise JoinFault(f"card: {error}") from None
    check_card(card)
    return card


_decoder = msgspec.msgpack.Decoder(ClusterCard)
