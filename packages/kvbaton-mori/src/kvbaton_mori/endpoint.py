"""The endpoint of a mori engine: mori's own descriptions of the engine and of each region.

Law: nothing of it reaches mori before it was parsed here, every size bounded. An engine's key contains its owner's name
and incarnation: mori identifies engines by key alone, so a description under another peer's key would replace that
peer's, and a restarted worker under its old key would be mistaken for the one whose connections are gone.

A control message carries 1,024 bytes of endpoint, and one description of a region alone has 250. Most of it is the same
for all, so it travels field by field, common fields once, and compressed: 118 regions of one size fit wherever they
are, and 69 if each has its own size. More are refused when they are registered.
"""

from __future__ import annotations

import secrets
import zlib
from typing import Any

import msgspec

from kvbaton.protocol.ids import PeerId
from kvbaton.protocol.numbers import Number
from kvbaton.transports.core.shared_memory import REGIONS_MAX

VERSION = b"mori1"
ENDPOINT_BYTES_MAX = 1024
PLAIN_BYTES_MAX = 64 << 10
DESCRIPTION_BYTES_MAX = 4096
NONCE_BYTES = 8


class MoriEndpoint(msgspec.Struct, frozen=True, array_like=True):
    """What a peer needs to reach an engine."""

    owner: PeerId
    engine: bytes  # as mori packs it
    regions: dict[int, bytes]  # likewise


class _Field(msgspec.Struct, frozen=True, array_like=True):
    """One field of all descriptions: common to them, or one value for each."""

    common: Any
    each: list[Any]


class _Described(msgspec.Struct, frozen=True, array_like=True):
    """An endpoint on its way."""

    owner: PeerId
    engine: bytes
    numbers: list[Number]
    fields: list[_Field]


def name_engine(owner: PeerId) -> str:
    """A new key, which identifies the owner."""
    return f"{owner.incarnation}.{secrets.token_hex(NONCE_BYTES)}.{owner.worker}"


def is_named_after(key: str, owner: PeerId) -> bool:
    incarnation, _, rest = key.partition(".")
    nonce, _, worker = rest.partition(".")
    return (incarnation, worker) == (str(owner.incarnation), owner.worker) and len(nonce) == 2 * NONCE_BYTES


def pack(endpoint: MoriEndpoint) -> bytes:
    """ValueError when it has become too large to be sent."""
    numbers = list(endpoint.regions)
    told = _Described(endpoint.owner, endpoint.engine, numbers, _by_field(list(endpoint.regions.values())))
    data = VERSION + zlib.compress(msgspec.msgpack.encode(told), 9)
    if len(data) > ENDPOINT_BYTES_MAX:
        raise ValueError(
            f"{len(numbers)} regions need an endpoint of {len(data)} bytes, and a control message carries "
            f"{ENDPOINT_BYTES_MAX}: register fewer and larger regions, one for all layers at best"
        )
    return data


def parse(data: bytes) -> MoriEndpoint:
    """ValueError for anything but an endpoint. Only mori's descriptions tell whose it is: `Engine.understand`."""
    if data[: len(VERSION)] != VERSION or len(data) > ENDPOINT_BYTES_MAX:
        raise ValueError(
            f"not an endpoint of mori: at most {ENDPOINT_BYTES_MAX} bytes that begin with {VERSION!r} were expected; "
            "do both sides run one version?"
        )
    try:
        unpacker = zlib.decompressobj()
        plain = unpacker.decompress(data[len(VERSION) :], PLAIN_BYTES_MAX)
        if not unpacker.eof:
            raise ValueError(f"not an endpoint of mori: cut short, or more than {PLAIN_BYTES_MAX} bytes")
        told = msgspec.msgpack.decode(plain, type=_Described)
    except (zlib.error, msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(f"not an endpoint of mori: {error}") from None
    if len(set(told.numbers)) != len(told.numbers) or not all(0 <= number < REGIONS_MAX for number in told.numbers):
        raise ValueError(f"the endpoint names regions twice, or others than 0..{REGIONS_MAX - 1}: {told.numbers}")
    descriptions = _by_region(told.fields, len(told.numbers))
    return MoriEndpoint(told.owner, told.engine, dict(zip(told.numbers, descriptions, strict=True)))


def _by_field(descriptions: list[bytes]) -> list[_Field]:
    """The fields of all descriptions; each whole as its one field if mori does not pack them as lists of so many."""
    rows = [_row(packed) for packed in descriptions]
    if any(row is None or len(row) != len(rows[0] or ()) for row in rows):
        rows = [[packed] for packed in descriptions]
    columns = (list(column) for column in zip(*(row for row in rows if row is not None), strict=True))
    return [
        _Field(column[0], []) if column.count(column[0]) == len(column) else _Field(None, column) for column in columns
    ]


def _by_region(fields: list[_Field], count: int) -> list[bytes]:
    if any(len(field.each) not in {0, count} for field in fields):
        raise ValueError(f"the endpoint describes other than its {count} regions")
    rows = ([field.each[index] if field.each else field.common for field in fields] for index in range(count))
    packed = [row[0] if len(row) == 1 and isinstance(row[0], bytes) else msgspec.msgpack.encode(row) for row in rows]
    if any(len(one) > DESCRIPTION_BYTES_MAX for one in packed):
        raise ValueError(f"the endpoint describes a region by more than {DESCRIPTION_BYTES_MAX} bytes")
    return packed


def _row(packed: bytes) -> list[Any] | None:
    """Its fields, if they make the same bytes when put together again."""
    try:
        found = msgspec.msgpack.decode(packed)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None
    return found if isinstance(found, list) and len(found) > 1 and msgspec.msgpack.encode(found) == packed else None
