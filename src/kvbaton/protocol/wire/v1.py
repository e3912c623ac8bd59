"""Version 1 of the protocol, where it differs: the shapes on the wire, and conversion in both directions.

Law: a message sent in version 1 has, byte for byte, the shape that version-1 nodes use; theirs are read as they meant
them. To be deleted when `versions.OLDEST` is 2.
"""

from __future__ import annotations

import typing

import msgspec

from kvbaton.protocol.ids import HandoffId
from kvbaton.protocol.numbers import Number
from kvbaton.protocol.wire import messages as m
from kvbaton.protocol.wire.messages import Counts, LeaseId, Message, ReservationId


class Stale1(msgspec.Struct, frozen=True, array_like=True, tag=19):
    """Without `reason`."""

    lease: LeaseId
    attempt: Number
    good: Counts


class Abandon1(msgspec.Struct, frozen=True, array_like=True, tag=20):
    """Without `reason`."""

    handoff: HandoffId
    attempt: Number


class Revoke1(msgspec.Struct, frozen=True, array_like=True, tag=34):
    """Without `reason`."""

    lease: LeaseId
    attempt: Number
    reservation: ReservationId


_OLDER: dict[type, type[msgspec.Struct]] = {m.Stale: Stale1, m.Abandon: Abandon1, m.Revoke: Revoke1}
_NEWER = {older: newer for newer, older in _OLDER.items()}
MESSAGES: typing.Any = typing.Union[tuple(_OLDER.get(kind, kind) for kind in typing.get_args(Message))]  # noqa: UP007


def older(message: Message) -> msgspec.Struct:
    """The message as version 1 says it."""
    kind = _OLDER.get(type(message))
    return message if kind is None else kind(*(getattr(message, name) for name in kind.__struct_fields__))


def newer(message: msgspec.Struct) -> Message:
    """A message of version 1, as one of today's."""
    kind = _NEWER.get(type(message))
    found: Message = message if kind is None else kind(*msgspec.structs.astuple(message))  # type: ignore[assignment]
    return found
