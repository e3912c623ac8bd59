"""Who is at the other end of a connection: a mutual challenge and response over a secret minted for one peer.

    client  HELLO(version, stream, name, incarnation, nonce)
    server  nonce, HMAC(secret, "server" + everything said)
    client  HMAC(secret, "client" + everything said)

Law: neither side acts on anything before the other has proven that it holds the secret. A server answers strangers like
peers (with a secret that nobody knows), so it tells nobody whom it knows. Secrets travel in endpoint blobs over the
authenticated control plane and never over these sockets. The version says what follows: 1, plain bytes; 2, records that
are encrypted and signed with keys made of the secret and all that was said (`kvbaton.sealed`). It is a part of what
both sides prove, so nobody in between can turn a 2 into a 1; and a server that insists on 2 admits nobody who says 1.
"""

from __future__ import annotations

import hmac
import logging
import secrets
import struct
from collections.abc import Generator

import msgspec

from kvbaton.protocol.errors import ProtocolError, Reason
from kvbaton.protocol.ids import Incarnation, PeerId, WorkerId
from kvbaton.security.records import Seals
from kvbaton.security.sealing import MISSING, can_seal
from kvbaton.transports.core.refusals import Cause, Refused
from kvbaton.transports.net.stream_socket import Bytes, Sink, Wire, take

log = logging.getLogger(__name__)

PLAIN, SEALED = 1, 2
SECRET_BYTES = 32
NONCE_BYTES = 32
PROOF_BYTES = 32
NAME_BYTES_MAX = 96  # a worker's name and its rank
PEERS_MAX = 4096

_MAGIC = b"KVBT"
_HELLO = struct.Struct(f"<4sBBHQ{NONCE_BYTES}s")  # magic, version, stream, bytes of the name, incarnation, nonce


class Admitted(msgspec.Struct, frozen=True):
    """A client that has proven itself."""

    peer: PeerId
    stream: int
    secret: bytes
    seals: Seals | None = None  # of the records that follow


class Keyring:
    """The secrets of those who may connect here, one per peer (worker and incarnation).

    A peer keeps its secret until it is revoked; asking again then mints another, so an old endpoint never works twice.
    """

    def __init__(self) -> None:
        self._secrets: dict[PeerId, bytes] = {}

    def mint(self, peer: PeerId) -> bytes:
        known = self._secrets.get(peer)
        if known is None:
            if len(self._secrets) >= PEERS_MAX:
                raise RuntimeError(f"{PEERS_MAX} peers hold an endpoint; disconnect those that are gone")
            known = self._secrets[peer] = secrets.token_bytes(SECRET_BYTES)
        return known

    def revoke(self, peer: PeerId) -> None:
        self._secrets.pop(peer, None)

    def get(self, peer: PeerId) -> bytes | None:
        return self._secrets.get(peer)

    def still_admits(self, admitted: Admitted) -> bool:
        """Whether the secret that `admitted` proved is still in force."""
        known = self._secrets.get(admitted.peer)
        return known is not None and hmac.compare_digest(known, admitted.secret)


def greet(
    wire: Wire, secret: bytes, me: PeerId, server: PeerId, stream: int, sealed: bool = False
) -> Generator[Sink, None, Seals | None]:
    """The client's half; raises ProtocolError when the server cannot prove itself. Give the seals to the wire."""
    name = me.worker.encode()
    nonce = secrets.token_bytes(NONCE_BYTES)
    version = SEALED if sealed else PLAIN
    said = _HELLO.pack(_MAGIC, version, stream, len(name), me.incarnation, nonce) + name
    wire.out.append(Bytes(said))
    said += yield from take(NONCE_BYTES)
    if not hmac.compare_digest((yield from take(PROOF_BYTES)), _proof(secret, b"server", server, said)):
        raise ProtocolError(Reason.PEER_UNKNOWN, f"{server} does not hold our secret; pair with it again")
    wire.out.append(Bytes(_proof(secret, b"client", server, said)))
    return Seals(secret, _context(server, said), is_server=False) if sealed else None


def admit(wire: Wire, keyring: Keyring, me: PeerId, must_seal: bool = False) -> Generator[Sink, None, Admitted]:
    """The server's half; raises Refused for a stranger, and with `must_seal` for a peer that speaks plainly."""
    said = yield from take(_HELLO.size)
    magic, version, stream, name_bytes, incarnation, _ = _HELLO.unpack(said)
    if magic != _MAGIC or version not in {PLAIN, SEALED} or not 0 < name_bytes <= NAME_BYTES_MAX:
        raise Refused(Cause.BAD_GREETING, f"no greeting of version {PLAIN} or {SEALED}")
    name = yield from take(name_bytes)
    peer = PeerId(WorkerId(name.decode(errors="replace")), Incarnation(incarnation))
    secret = keyring.get(peer) or secrets.token_bytes(SECRET_BYTES)
    said += name + secrets.token_bytes(NONCE_BYTES)
    wire.out.append(Bytes(said[-NONCE_BYTES:] + _proof(secret, b"server", me, said)))
    if not hmac.compare_digest((yield from take(PROOF_BYTES)), _proof(secret, b"client", me, said)):
        raise Refused(Cause.BAD_PROOF, f"{peer} did not prove itself")
    if version == SEALED:
        return Admitted(peer, stream, secret, _seals(secret, _context(me, said), peer))
    if must_seal:  # said only now, so that no stranger fills the log
        refused = f"encrypt: {peer} would not encrypt, and this side insists; update it, or set encrypt on both alike"
        log.warning("[plain-peer-refused] %s", refused)
        raise Refused(Cause.PLAIN, refused)
    return Admitted(peer, stream, secret)


def _seals(secret: bytes, said: bytes, peer: PeerId) -> Seals:
    if not can_seal():
        raise ProtocolError(Reason.BAD_MESSAGE, f"encrypt: {peer} encrypts, and {MISSING}")
    return Seals(secret, said, is_server=True)


def _context(server: PeerId, said: bytes) -> bytes:
    return b"|".join((b"kvbaton", str(server).encode(), said))


def _proof(secret: bytes, role: bytes, server: PeerId, said: bytes) -> bytes:
    return hmac.digest(secret, b"|".join((b"kvbaton", role, str(server).encode(), said)), "sha256")
