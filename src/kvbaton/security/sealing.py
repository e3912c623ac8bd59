"""How a data connection is sealed: each side proves who it is, and both agree whether what follows is encrypted.

    tcp      client  HELLO(version, stream, name, incarnation, nonce)
             server  nonce, proof                                        said: server's id, HELLO, nonce
             client  proof

    store    server  nonce
             client  HELLO(version, number of its invitation, nonce), proof
             server  proof                                               said: (version, number,) both nonces

    proof    HMAC-SHA256(secret, service | role | said)

Laws:
 1. Neither side acts on anything before the other has proven that it holds the secret. Secrets travel over the
    authenticated control plane and never over these connections.
 2. A proof is bound to one service, one role and one connection: it is invalid for another service, cannot be reflected
    to its sender, and covers both sides' fresh nonces.
 3. An unknown peer gets the same response as a known one, with a secret that exists nowhere else: a server does not
    reveal which peers it knows.
 4. The version says what follows: 1, plain bytes; 2, encrypted and signed records (`records`), with keys derived from
    the secret and the whole exchange. It is covered by both proofs, so a 2 cannot be downgraded to a 1; and a
    side that requires 2 accepts nothing else. (A store's version 1 proves the nonces only, as it always has.)
 5. A peer that does not encrypt is told and logged only after it has proven itself: unauthenticated peers cannot fill
    the log.
 6. `encrypt` is `auto`, `on` or `off`, and the stricter side wins. `auto` leaves a connection plain only when both of
    its ends are loopback addresses, so that it never leaves the host. A missing library never results in "plain": it is
    an error with the next step.
"""

from __future__ import annotations

import enum
import functools
import hmac
import importlib.metadata
import ipaddress
import logging
import secrets
import socket
from typing import Literal

from kvbaton.security.records import Seals

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


log = logging.getLogger(__name__)

PLAIN, SEALED = 1, 2
VERSIONS = frozenset({PLAIN, SEALED})
SECRET_BYTES = NONCE_BYTES = PROOF_BYTES = 32
_NEXT_STEP = "upgrade it, or set encrypt to the same value on both"


class HandshakeError(Exception):
    """The peer has proven itself, but the connection cannot continue as it asks."""


class PlainPeer(HandshakeError):
    """It does not encrypt, and this side requires it."""


class Service(enum.Enum):
    """The use of a proof. No value contains `|`: otherwise one service's text could start like another's."""

    TRANSPORT = b"kvbaton"
    STORE = b"kvbaton-line"


class Handshake:
    """One side of one handshake, once both nonces are known. Pure; `secret` is None for an unknown peer."""

    __slots__ = ("_is_proven", "_is_server", "_said", "_secret", "_service", "_version")

    def __init__(self, service: Service, version: int, secret: bytes | None, said: bytes, *, is_server: bool) -> None:
        self._service = service.value
        self._version = version
        self._secret = secret or secrets.token_bytes(SECRET_BYTES)
        self._said = said
        self._is_server = is_server
        self._is_proven = False

    def proof(self) -> bytes:
        """Our own proof."""
        return self._proof(b"server" if self._is_server else b"client")

    def is_proof(self, theirs: bytes) -> bool:
        self._is_proven = hmac.compare_digest(theirs, self._proof(b"client" if self._is_server else b"server"))
        return self._is_proven

    def seals(self, peer: str, must_seal: bool = False) -> Seals | None:
        """The records that follow, None for plain bytes; only for a peer that has proven itself."""
        if not self._is_proven:
            raise RuntimeError(f"{peer} has not proven itself")
        if self._version == PLAIN:
            if must_seal:
                refused = f"encrypt: {peer} does not encrypt, and this side requires it; {_NEXT_STEP}"
                log.warning("[plain-peer-refused] %s", refused)
                raise PlainPeer(refused)
            return None
        if not can_seal():
            raise HandshakeError(f"encrypt: {peer} encrypts, and {MISSING}")
        return Seals(self._secret, b"|".join((self._service, self._said)), self._is_server)

    def _proof(self, role: bytes) -> bytes:
        return hmac.digest(self._secret, b"|".join((self._service, role, self._said)), "sha256")


def nonce() -> bytes:
    return secrets.token_bytes(NONCE_BYTES)
