"""The mutual handshake of data connections: challenge and response over a secret minted for one peer.

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
"""

from __future__ import annotations

import enum
import hmac
import logging
import secrets

from kvbaton.security.records import Seals
from kvbaton.security.sealing import MISSING, can_seal

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
