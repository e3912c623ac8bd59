"""What a worker announces in the plain formats of MoRI-IO and P2pNccl.

    {"type": "P", "http_address": "10.0.0.1:8100", "zmq_address": "host:10.0.0.1,handshake:6301,notify:61005",
     "dp_size": 1, "tp_size": 1, "transfer_mode": "READ"}                                           MoRI-IO
    {"type": "P", "http_address": "10.0.0.1:8100", "zmq_address": "10.0.0.1:21001"}                 P2pNccl

Laws: `decode` raises `PlainFault` and nothing else, whatever the bytes; past it every field is within its bounds and
every address in one form, so that equal means same. Whatever is accepted here `api.request_ids` can express in an id;
the two hold the same rules for addresses, and the fuzzing holds them together. Keys that are not known are ignored. How
deeply a message is nested is counted without decoding it: decoders stop where their interpreter's recursion limit is,
which differs from one Python to the next; what a peer may send does not.
"""

from __future__ import annotations

import enum
import ipaddress
import re
from collections.abc import Sequence
from typing import Literal, TypeVar

import msgspec
from msgspec import Raw

MESSAGE_BYTES_MAX = 4096
NESTING_MAX = 16
"""Of values that are not known and ignored; those that are known are a map of texts and numbers."""
RANKS_MAX = 65_536
HOST_CHARS_MAX = 253

Role = Literal["P", "D"]
TransferMode = Literal["READ", "WRITE"]
T = TypeVar("T")

_MORIIO = re.compile(r"host:(?P<host>[^,]*),handshake:(?P<handshake>[^,]*),notify:(?P<notify>[^,]*)", re.DOTALL)
_LABEL = r"[A-Za-z0-9](?:[A-Za-z0-9_-]{0,61}[A-Za-z0-9])?"
_NAME = re.compile(rf"{_LABEL}(?:\.{_LABEL})*")
_NUMERIC_LABEL = re.compile(r"[0-9]+|0[xX][0-9A-Fa-f]*")
_PORT = re.compile(r"[1-9][0-9]{0,4}")


class PlainFault(Exception):
    """A message that breaks the rules. `field` says which part; the worker's operator must act."""

    def __init__(self, field: str, message: str) -> None:
        super().__init__(f"{field}: {message}")
        self.field = field


class Fleet(enum.StrEnum):
    """Workers that can serve together: one format, and one transfer mode where the format has one."""

    MORIIO_READ = "moriio-read"
    MORIIO_WRITE = "moriio-write"
    P2P_NCCL = "p2p-nccl"

    @property
    def transfer_mode(self) -> str:
        """What stands in the announcements of its workers."""
        return {"moriio-read": "READ", "moriio-write": "WRITE"}.get(self.value, "none (P2pNccl)")


class Announcement(msgspec.Struct, frozen=True):
    """A worker says that it is there."""

    fleet: Fleet
    role: Role
    http_address: str  # host:port or [v6]:port, as it may stand after http://
    zmq_address: str  # as it stands in request ids
    dp_size: int = 1  # all data-parallel ranks, not those of one host
    tp_size: int = 1

    @property
    def key(self) -> tuple[Role, str]:
        """What tells workers apart, over their restarts."""
        return self.role, self.http_address

    def __str__(self) -> str:
        return f"{self.role} {self.http_address}"


class _Announced(msgspec.Struct, frozen=True):
    """The fields as they came; a Raw without bytes is one that did not come."""

    type: Raw = Raw()
    http_address: Raw = Raw()
    zmq_address: Raw = Raw()
    dp_size: Raw = Raw()
    tp_size: Raw = Raw()
    transfer_mode: Raw = Raw()


_told = msgspec.msgpack.Decoder(_Announced)
_text = msgspec.msgpack.Decoder(str)
_count = msgspec.msgpack.Decoder(int)


def payload_of(frames: Sequence[bytes]) -> bytes:
    """The one frame that says something, of those behind the sender's route; an empty one before it is tolerated."""
    said = frames[1:] if len(frames) > 1 and not frames[0] else frames
    if len(said) != 1:
        raise PlainFault("frames", f"{len(frames)} came, expected one, or an empty one and one")
    return said[0]


def decode(payload: bytes) -> Announcement:
    """The announcement, or `PlainFault` naming the field that is wrong."""
    if len(payload) > MESSAGE_BYTES_MAX:
        raise PlainFault("message", f"{len(payload)} bytes, at most {MESSAGE_BYTES_MAX}")
    if not is_nested_within(payload, NESTING_MAX):
        raise PlainFault("message", f"lists and maps within each other, more than {NESTING_MAX} deep")
    told = _read("message", _told, payload)
    role = _role(_read("type", _text, _given("type", told.type)))
    http = _host_port("http_address", _read("http_address", _text, _given("http_address", told.http_address)))
    address = _read("zmq_address", _text, _given("zmq_address", told.zmq_address))
    sizes = _size("dp_size", told.dp_size), _size("tp_size", told.tp_size)
    moriio = _MORIIO.fullmatch(address)
    if not bytes(told.transfer_mode):
        if moriio is not None:
            raise PlainFault("transfer_mode", "missing; with an address of MoRI-IO's form it is READ or WRITE")
        return Announcement(Fleet.P2P_NCCL, role, http, _host_port("zmq_address", address), *sizes)
    fleet = _moriio_fleet(_read("transfer_mode", _text, told.transfer_mode))
    if moriio is None:
        expected = "host:IP,handshake:PORT,notify:PORT, as it is with a transfer_mode"
        raise PlainFault("zmq_address", f"{_shown(address)} is not {expected}")
    host = _host("zmq_address.host", moriio["host"])
    handshake = _port("zmq_address.handshake", moriio["handshake"])
    notify = _port("zmq_address.notify", moriio["notify"])
    return Announcement(fleet, role, http, f"host:{host},handshake:{handshake},notify:{notify}", *sizes)


def _read(field: str, decoder: msgspec.msgpack.Decoder[T], payload: bytes | Raw) -> T:
    try:
        return decoder.decode(payload)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, OverflowError) as error:
        raise PlainFault(field, str(error)) from None


def _given(field: str, value: Raw) -> Raw:
    if not bytes(value):
        raise PlainFault(field, "missing")
    return value


def _role(text: str) -> Role:
    if text == "P":
        return "P"
    if text == "D":
        return "D"
    raise PlainFault("type", f"got {_shown(text)}, expected P or D")


def _moriio_fleet(text: str) -> Fleet:
    if text == "READ":
        return Fleet.MORIIO_READ
    if text == "WRITE":
        return Fleet.MORIIO_WRITE
    raise PlainFault("transfer_mode", f"got {_shown(text)}, expected READ or WRITE; lower case is refused")


def _size(field: str, value: Raw) -> int:
    if not bytes(value):
        return 1
    count = _read(field, _count, value)
    if not 1 <= count <= RANKS_MAX:
        raise PlainFault(field, f"got {count}, expected 1..{RANKS_MAX}")
    return count


def _host_port(field: str, text: str) -> str:
    host, colon, port = text.rpartition(":")
    if not colon or "/" in text:
        raise PlainFault(field, f"{_shown(text)} is not host:port or [v6]:port, without a scheme")
    if ":" in host and not host.startswith("["):
        raise PlainFault(f"{field}.host", f"{_shown(host)}: an IPv6 address before a port stands in brackets")
    bare, number = _host(f"{field}.host", host), _port(f"{field}.port", port)
    return f"[{bare}]:{number}" if ":" in bare else f"{bare}:{number}"


def _host(field: str, text: str) -> str:
    """The canonical form. A name that a resolver would read as a number (`127.1`, `0x7f.1`) is refused."""
    bare = text[1:-1] if text.startswith("[") and text.endswith("]") else text
    if ":" in bare or _NUMERIC_LABEL.fullmatch(bare.rpartition(".")[2]) is not None:
        return _ip(field, text, bare)
    if bare is not text or len(bare) > HOST_CHARS_MAX or _NAME.fullmatch(bare) is None or "___" in bare:
        raise PlainFault(field, f"{_shown(text)} is not an address or a host name")
    return bare.lower()


def _ip(field: str, text: str, bare: str) -> str:
    try:
        address = ipaddress.IPv6Address(bare) if ":" in bare else ipaddress.IPv4Address(text)
    except ValueError:
        raise PlainFault(field, f"{_shown(text)} is not an IP address") from None
    if isinstance(address, ipaddress.IPv6Address) and address.scope_id is not None:
        raise PlainFault(field, f"{_shown(text)}: a zone is valid on one host only")
    if address.is_unspecified or address.is_multicast:
        raise PlainFault(field, f"{_shown(text)} is not reachable; announce an address at which others reach it")
    return str(address)


def _port(field: str, text: str) -> int:
    if _PORT.fullmatch(text) is None or int(text) > 65535:
        raise PlainFault(field, f"{_shown(text)} is not a port, 1..65535")
    return int(text)


def _shown(text: str) -> str:
    return ascii(text[:80])[:120]  # one character may become ten


_SIZES = {
    0xCA: 4, 0xCB: 8, 0xCC: 1, 0xCD: 2, 0xCE: 4, 0xCF: 8, 0xD0: 1, 0xD1: 2, 0xD2: 4, 0xD3: 8,  # numbers
    0xD4: 2, 0xD5: 3, 0xD6: 5, 0xD7: 9, 0xD8: 17,  # extensions of a fixed size
}  # fmt: skip
_LENGTHS = {0xC4: (1, 0), 0xC5: (2, 0), 0xC6: (4, 0), 0xC7: (1, 1), 0xC8: (2, 1), 0xC9: (4, 1)}
_LENGTHS |= {0xD9: (1, 0), 0xDA: (2, 0), 0xDB: (4, 0)}
"""Bytes of the length, and bytes besides the contents: binaries, extensions, texts."""
_COUNTS = {0xDC: (2, 1), 0xDD: (4, 1), 0xDE: (2, 2), 0xDF: (4, 2)}
"""Bytes of the count, and values to each of it: lists, maps."""


def is_nested_within(message: bytes, most: int) -> bool:
    """Whether no value lies in more than `most` lists and maps; of a message that is cut short, as far as it goes."""
    left = [1]  # values still to come, of each list or map that is open
    at = 0
    while left:
        if not left[-1]:
            left.pop()
            continue
        if at >= len(message):
            return True
        left[-1] -= 1
        kind, at = message[at], at + 1
        if 0x80 <= kind <= 0x9F:  # short maps and lists
            left.append((kind & 0x0F) * (2 if kind < 0x90 else 1))
        elif kind in _COUNTS:
            size, each = _COUNTS[kind]
            left.append(each * int.from_bytes(message[at : at + size], "big"))
            at += size
        elif kind in _LENGTHS:
            size, besides = _LENGTHS[kind]
            at += size + besides + int.from_bytes(message[at : at + size], "big")
        elif 0xA0 <= kind <= 0xBF:  # short texts
            at += kind & 0x1F
        else:
            at += _SIZES.get(kind, 0)
        if len(left) - 1 > most:
            return False
    return True
