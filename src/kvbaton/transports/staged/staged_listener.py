"""Rendezvous of staging peers: a UNIX socket on one host, a TCP socket between hosts; and P's announcement.

Law: a peer gets nothing before it has proven the secret minted for it (`reception`). A peer's announced slots and
regions are checked before they are used.
"""

from __future__ import annotations

import errno
import os
import secrets
import socket
from functools import partial
from typing import Literal, TypeAlias

import msgspec

from kvbaton.protocol.ids import PeerId
from kvbaton.protocol.numbers import Bytes, Number, Port
from kvbaton.security.sealing import SECRET_BYTES
from kvbaton.transports.core.shared_memory import REGIONS_MAX, host_identity
from kvbaton.transports.local.region_listener import NAME_PREFIX
from kvbaton.transports.local.region_listener import dial as dial_name
from kvbaton.transports.net.connection_handshake import BACKLOG, Reception
from kvbaton.transports.tcp.tcp_server import family_of, prepare

Carrier: TypeAlias = Literal["shm", "tcp"]
HELLO_BYTES_MAX = 32 * REGIONS_MAX
SOCKETS_MAX = 16
"""Connections of one peer. Each proves the secret of this pairing by itself, and its number is a part of that proof."""


class StagedEndpoint(msgspec.Struct, frozen=True, array_like=True, tag="staged1"):
    """What a peer needs to dial: a name on this host (shm), or an address and a port (tcp)."""

    owner: PeerId
    carrier: Carrier
    host: str
    place: str
    port: Port
    secret: bytes
    seals: bool = False  # can encrypt; older versions omit it
    sockets: Number = 1  # connections that one peer may have; older versions omit it


class SealedStagedEndpoint(StagedEndpoint, frozen=True, array_like=True, tag="staged2"):
    """The same for a rank that requires encryption, which is over tcp only."""


class StagedHello(msgspec.Struct, frozen=True, array_like=True):
    """P's announcement: its slots, and its regions by number and bytes."""

    slot_bytes: Bytes
    slots: Number
    regions: dict[Number, Bytes]


def listen(reception: Reception, carrier: Carrier, address: tuple[str, int]) -> tuple[str, int]:
    """Accept from now on; the place and the port to dial."""
    if carrier == "shm":
        name = reception.listen(_named).getsockname()
        return (name.decode() if isinstance(name, bytes) else name)[1:], 0
    create = partial(socket.create_server, address, family=family_of(address[0]), backlog=BACKLOG)
    return address[0], int(reception.listen(create).getsockname()[1])


def dial(there: StagedEndpoint) -> socket.socket:
    """A socket that is connected or connecting. OSError, ProtocolError."""
    if there.carrier == "shm":
        return dial_name(there.place)
    sock = socket.socket(family_of(there.place))
    prepare(sock)
    error = sock.connect_ex((there.place, there.port))
    if error not in {0, errno.EINPROGRESS}:
        sock.close()
        raise OSError(error, os.strerror(error))
    return sock


def parse_endpoint(peer: PeerId, carrier: Carrier, endpoint: bytes) -> StagedEndpoint:
    """ValueError says what is wrong with it."""
    try:
        there = msgspec.msgpack.decode(endpoint, type=StagedEndpoint | SealedStagedEndpoint)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise ValueError(f"not an endpoint of staging: {error}") from None
    if there.owner != peer:
        raise ValueError(f"the endpoint belongs to {there.owner}, not to {peer}")
    if there.carrier != carrier:
        raise ValueError(f"{peer} stages over {there.carrier}, this side over {carrier}")
    if carrier == "shm" and there.host != host_identity():
        raise ValueError(f"{peer} is on another host or in another network namespace; stage over tcp instead")
    if len(there.secret) != SECRET_BYTES or not there.place:
        raise ValueError("the endpoint has no usable place or secret")
    if not 1 <= there.sockets <= SOCKETS_MAX:
        raise ValueError(f"the endpoint allows {there.sockets} connections, expected 1..{SOCKETS_MAX}")
    return there


def _named() -> socket.socket:
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(NAME_PREFIX + secrets.token_hex(16))
    listener.listen(BACKLOG)
    return listener
