"""Invitations: the messages that give a member of the cluster a line (`tcp_connection`) to a store's server.

They cross an authenticated and encrypted control plane. Law: external data becomes one of these types when received,
within bounds, or is dropped and counted.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Protocol

import msgspec

from kvbaton.protocol.ids import WorkerId
from kvbaton.protocol.numbers import Number, Port


class _StoreMessage(msgspec.Struct, frozen=True, array_like=True, tag=True):
    id: Number  # of a request; its response has the same


class Dial(_StoreMessage, frozen=True):
    """Invite me to a line. (client)"""


class Invited(_StoreMessage, frozen=True):
    """Where lines are served, and the secret to open one with. (server)"""

    port: Port
    number: Number
    secret: Annotated[bytes, msgspec.Meta(max_length=64)]


encode = msgspec.msgpack.Encoder().encode
_dial = msgspec.msgpack.Decoder(Dial)
_invited = msgspec.msgpack.Decoder(Invited)
_MALFORMED = (msgspec.DecodeError, UnicodeDecodeError, RecursionError, OverflowError)


class FramePort(Protocol):
    """The control plane as the store uses it: `ZmqControl` is one. Touched by one thread, except `wake`."""

    def send(self, worker: WorkerId, frame: bytes) -> bool: ...
    def receive(self) -> Sequence[tuple[WorkerId, bytes]]: ...
    def wait(self, timeout_s: float | None) -> None: ...
    def wake(self) -> None: ...
    def close(self) -> None: ...


def request(frame: bytes) -> Dial | None:
    """A client's message; None when it is not one within bounds."""
    try:
        return _dial.decode(frame)
    except _MALFORMED:
        return None


def reply(frame: bytes) -> Invited | None:
    """The server's message; None when it is not one within bounds."""
    try:
        return _invited.decode(frame)
    except _MALFORMED:
        return None
