"""Whether a connection is encrypted: `encrypt` is `auto`, `on` or `off`, and the stricter side wins.

Law: `auto` leaves a connection plain only when both of its ends are loopback addresses, so that it never leaves the
host. A missing library never results in "plain": it is an error with the next step.
"""

from __future__ import annotations

import functools
import importlib.metadata
import ipaddress
import socket
from typing import Literal

Encrypt = Literal["auto", "on", "off"]
ENCRYPT: tuple[Encrypt, ...] = ("auto", "on", "off")
_INTERNET = frozenset({socket.AF_INET, socket.AF_INET6})

MISSING = "the package `cryptography` (47 or later) is needed to encrypt: pip install 'cryptography>=47'"


def is_loopback(host: str) -> bool:
    """For a numeric address; anything else is not known to be one."""
    try:
        address = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return False
    mapped = getattr(address, "ipv4_mapped", None)
    return (mapped or address).is_loopback


def is_required(mode: Encrypt, *hosts: str) -> bool:
    """Whether this side requires encryption between `hosts`."""
    return mode == "on" or (mode == "auto" and not all(map(is_loopback, hosts)))


def is_required_on(mode: Encrypt, sock: socket.socket) -> bool:
    """The same for an accepted connection."""
    return sock.family in _INTERNET and is_required(mode, sock.getsockname()[0], sock.getpeername()[0])


def is_local(sock: socket.socket) -> bool:
    """Whether a connection never leaves the host; a UNIX socket does not."""
    return sock.family not in _INTERNET or not is_required_on("auto", sock)


@functools.cache
def can_seal() -> bool:
    """Whether the library is installed and new enough; does not load it."""
    try:
        version = importlib.metadata.version("cryptography")
    except importlib.metadata.PackageNotFoundError:
        return False
    return int(version.partition(".")[0]) >= 47  # the first version that encrypts into a buffer


def check(mode: Encrypt, host: str) -> None:
    """ValueError for a configuration that cannot be satisfied."""
    if mode not in ENCRYPT:
        raise ValueError(f"encrypt: got {mode!r}, expected one of {', '.join(ENCRYPT)}")
    if is_required(mode, host) and not can_seal():
        raise ValueError(
            f"encrypt: {mode} between hosts ({host}), and {MISSING}; or set it to off on a trusted network"
        )


def agree(peer: str, mode: Encrypt, host: str, wanted: bool, able: bool) -> bool:
    """Whether we connect to `peer` at `host` encrypted; `wanted` and `able` come from its endpoint. ValueError where
    one side requires it and the other cannot."""
    if not (wanted or is_required(mode, host)):
        return False
    if not able:
        raise ValueError(
            f"encrypt: {peer} at {host} cannot encrypt (an older version, or without the package cryptography), and "
            "this side requires it; upgrade it, or set encrypt to off on both sides of a trusted network"
        )
    if not can_seal():
        raise ValueError(f"encrypt: {peer} requires it, and {MISSING}")
    return True
