"""What a store's server and its clients say to each other, over frames that an authenticated control plane carries.

Law: outside data becomes one of these types at the door, within bounds, or is dropped and counted. A value travels in
pieces of at most `PIECE_BYTES`, so that one frame holds up nobody for long and fits into what the plane allows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Protocol, TypeAlias

import msgspec

from kvbaton.protocol.ids import WorkerId
from kvbaton.protocol.numbers import Number, Port
from kvbaton.store.content_keys import KEY_CHARS_MAX, is_key

PIECE_BYTES = 1 << 20
KEYS_MAX = 4096

_Key: TypeAlias = Annotated[str, msgspec.Meta(max_length=KEY_CHARS_MAX)]
_Keys: TypeAlias = Annotated[tuple[_Key, ...], msgspec.Meta(max_length=KEYS_MAX)]
_Data: TypeAlias = Annotated[bytes, msgspec.Meta(max_length=PIECE_BYTES)]
_Size: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=1 << 32)]
_Id: TypeAlias = Number


class _Message(msgspec.Struct, frozen=True, array_like=True, tag=True):
    id: _Id  # of one value or one question; an answer has that of its question


class Ask(_Message, frozen=True):
    """Which of these are there? (client)"""

    keys: _Keys


class Told(_Message, frozen=True):
    """One byte a key: 1 there, 0 not. (server)"""

    there: Annotated[bytes, msgspec.Meta(max_length=KEYS_MAX)]


class Keep(_Message, frozen=True):
    """A piece of a value, which has `total` bytes; pieces come in order. (client)"""

    key: _Key
    at: _Size
    total: _Size
    data: _Data


class Kept(_Message, frozen=True):
    """A value's last piece has come; what was wrong, or nothing. (server)"""

    wrong: Annotated[str, msgspec.Meta(max_length=200)]


class Fetch(_Message, frozen=True):
    """Send this value if it has at most so many bytes. (client)"""

    key: _Key
    bytes_max: _Size


class Piece(_Message, frozen=True):
    """A piece of a value, or its absence: `total` is 0. (server)"""

    at: _Size
    total: _Size
    data: _Data


class Discard(_Message, frozen=True):
    """These are damaged. (client; no answer)"""

    keys: _Keys


class Dial(_Message, frozen=True):
    """Invite me to a line (`lines`). (client)"""


class Invited(_Message, frozen=True):
    """Where lines are answered, and what to greet with; port 0: nowhere. (server)"""

    port: Port
    number: _Id
    secret: Annotated[bytes, msgspec.Meta(max_length=64)]


Request: TypeAlias = Ask | Keep | Fetch | Discard | Dial
Reply: TypeAlias = Told | Kept | Piece | Invited

encode = msgspec.msgpack.Encoder().encode
_requests = msgspec.msgpack.Decoder(Request)
_replies = msgspec.msgpack.Decoder(Reply)


class FramePort(Protocol):
    """The control plane as the store uses it: `ZmqControl` is one. Touched by one thread, but for `wake`."""

    def send(self, worker: WorkerId, frame: bytes) -> bool: ...
    def receive(self) -> Sequence[tuple[WorkerId, bytes]]: ...
    def wait(self, timeout_s: float | None) -> None: ...
    def wake(self) -> None: ...
    def close(self) -> None: ...


def request(frame: bytes) -> Request | None:
    """What a client said; None when it is not a request within bounds."""
    try:
        message: Request = _requests.decode(frame)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, OverflowError):
        return None
    match message:
        case Ask() | Discard():
            return message if all(map(is_key, message.keys)) else None
        case Keep():
            fits = 0 < message.total >= message.at + len(message.data) and message.data
            return message if fits and is_key(message.key) else None
        case Fetch():
            return message if is_key(message.key) else None
        case Dial():
            return message


def reply(frame: bytes) -> Reply | None:
    """What the server said; None when it is not a reply within bounds."""
    try:
        message: Reply = _replies.decode(frame)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, OverflowError):
        return None
    return None if isinstance(message, Piece) and message.at + len(message.data) > message.total else message


def pieces(total: int) -> list[tuple[int, int]]:
    """Where a value of `total` bytes is cut: (from, to)."""
    return [(at, min(at + PIECE_BYTES, total)) for at in range(0, total, PIECE_BYTES)]
