"""The address of a shared store as an operator writes it, and how to open it.

    tcp://host:port                                   a `kvbaton store` process
    mooncake://host:port?lend=256MiB&host=10.0.0.1    a `mooncake_master`; also metadata=, protocol=, devices=

Laws: an address is checked where it enters, and the error names the field. Opening a store connects to nothing: a store
that is not running costs misses and counted errors.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import TypeAlias
from urllib.parse import parse_qsl, urlsplit

import msgspec

from kvbaton.control.addressing import ControlError, check_authority, check_endpoint
from kvbaton.control.keyring import Keyring
from kvbaton.control.zmq import ZmqControl
from kvbaton.protocol.ids import WorkerId
from kvbaton.store.interface import Backend
from kvbaton.store.mooncake_backend import MooncakeBackend, MooncakeSettings
from kvbaton.store.store_client import InvitationClient
from kvbaton.store.tcp_backend import LinedBackend

STORE_NAME = "store"
"""The identity of `kvbaton store` in a key directory, unless another is given."""
LEND_BYTES = 256 << 20
EXPECTED = "tcp://host:port of a kvbaton store, or mooncake://host:port of a mooncake_master"

_UNITS = {"": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40}
_SIZE = re.compile(r"([0-9]{1,15})(|KiB|MiB|GiB|TiB)")
_WORDS = {"host": "host", "protocol": "protocol", "devices": "devices", "metadata": "metadata"}


class Served(msgspec.Struct, frozen=True):
    """A `kvbaton store` process."""

    endpoint: str


class Mooncake(msgspec.Struct, frozen=True):
    """A `mooncake_master` and the memory that this engine lends to it."""

    settings: MooncakeSettings


StorePlace: TypeAlias = Served | Mooncake


def bytes_of(text: str) -> int:
    """A size, such as 4GiB; ValueError says what is wrong."""
    match = _SIZE.fullmatch(text)
    if match is None:
        raise ValueError(f"{text[:40]!r} is not a size; give bytes, or a number with KiB, MiB, GiB or TiB")
    return int(match[1]) * _UNITS[match[2]]


def store_place(text: str) -> StorePlace:
    """Parses an operator's address; ValueError says what is wrong."""
    parts = urlsplit(text)
    if parts.scheme == "tcp":
        return Served(check_endpoint(text, names=True))
    if parts.scheme != "mooncake" or parts.path or parts.fragment:
        raise ValueError(f"{text[:80]!r} is not {EXPECTED}")
    words: dict[str, str | int] = {"segment_bytes": LEND_BYTES}
    for name, value in parse_qsl(parts.query, keep_blank_values=True):
        if name == "lend":
            words["segment_bytes"] = bytes_of(value)
        elif name in _WORDS:
            words[_WORDS[name]] = value
        else:
            raise ValueError(f"{name[:40]!r} is not one of lend, {', '.join(_WORDS)}")
    return Mooncake(MooncakeSettings(master=check_authority(parts.netloc), **words))  # type: ignore[arg-type]


def opener(
    place: StorePlace, keyring: Keyring, *, ranks: int = 1, server: str = STORE_NAME, timeout_s: float = 4.0
) -> tuple[Callable[[], Backend], bool]:
    """A factory of a rank's backend, and whether each rank of this process owns its own; otherwise they share one.

    Memory is lent by all ranks together.
    """
    match place:
        case Served(endpoint):
            if WorkerId(server) not in keyring.peers:
                raise ControlError(f"store: no key of {server!r}; mint one: kvbaton keys add DIR {server}")
            return lambda: _served(endpoint, keyring, WorkerId(server), timeout_s), False
        case Mooncake(settings):
            lent = msgspec.structs.replace(settings, segment_bytes=settings.segment_bytes // ranks)
            return lambda: MooncakeBackend(lent), True


def _served(endpoint: str, keyring: Keyring, server: WorkerId, timeout_s: float) -> LinedBackend:
    control = ZmqControl(keyring, None)
    control.set_directory({server: (endpoint, "")})  # with the key that it has by then
    host = urlsplit(endpoint).hostname or ""
    return LinedBackend(InvitationClient(control, server), host, timeout_s=timeout_s)
