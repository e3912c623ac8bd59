"""The handshake of the transports (`kvbaton.security.handshake` has its laws), as scripts over a `Wire`.

Law: secrets are minted per peer and incarnation, travel in endpoint blobs over the authenticated control plane, and end
with `revoke`.
"""

from __future__ import annotations

import hmac
import secrets
import struct
from collections.abc import Generator

import msgspec

from kvbaton.protocol.errors import ProtocolError, Reason
from kvbaton.protocol.ids import Incarnation, PeerId, WorkerId
from kvbaton.security.handshake import (
    NONCE_BYTES,
    PLAIN,
    PROOF_BYTES,
    SEALED,
    SECRET_BYTES,
    VERSIONS,
    Handshake,
    HandshakeError,
    PlainPeer,
    Service,
    nonce,
)
from kvbaton.security.records import Seals
from kvbaton.transports.core.refusals import Cause, Refused
from kvbaton.transports.net.stream_socket import Bytes, Sink, Wire, take

NAME_BYTES_MAX = 96  # a worker's name and its rank
PEERS_MAX = 4096

_MAGIC = b"KVBT"
_HELLO = struct.Struct(f"<4sBBHQ{NONCE_BYTES}s")  # magic, version, stream, bytes of the name, incarnation, nonce


class Admitted(msgspec.Struct, frozen=True):
    """An authenticated client."""

    peer: PeerId
    stream: int
    secret: bytes
    seals: Seals | None = None  # of the records that follow


class SecretRing:
    """The secrets of the peers that may connect here, one per peer (worker and incarnation).

    A peer keeps its secret until it is revoked; the next request mints another, so an old endpoint never works twice.
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
    version = SEALED if sealed else PLAIN
    said = _HELLO.pack(_MAGIC, version, stream, len(name), me.incarnation, nonce()) + name
    wire.out.append(Bytes(said))
    said += yield from take(NONCE_BYTES)
    ours = Handshake(Service.TRANSPORT, version, secret, _addressed(server, said), is_server=False)
    if not ours.is_proof((yield from take(PROOF_BYTES))):
        raise ProtocolError(Reason.PEER_UNKNOWN, f"{server} does not hold our secret; pair with it again")
    wire.out.append(Bytes(ours.proof()))
    return ours.seals(str(server))


def admit(wire: Wire, keyring: SecretRing, me: PeerId, must_seal: bool = False) -> Generator[Sink, None, Admitted]:
    """The server's half; raises Refused for an unauthenticated peer, and with `must_seal` for one that does not
    encrypt."""
    said = yield from take(_HELLO.size)
    magic, version, stream, name_bytes, incarnation, _ = _HELLO.unpack(said)
    if magic != _MAGIC or version not in VERSIONS or not 0 < name_bytes <= NAME_BYTES_MAX:
        raise Refused(Cause.BAD_GREETING, f"no handshake of version {PLAIN} or {SEALED}")
    name = yield from take(name_bytes)
    peer = PeerId(WorkerId(name.decode(errors="replace")), Incarnation(incarnation))
    challenge, secret = nonce(), keyring.get(peer)
    said += name + challenge
    ours = Handshake(Service.TRANSPORT, version, secret, _addressed(me, said), is_server=True)
    wire.out.append(Bytes(challenge + ours.proof()))
    if not ours.is_proof((yield from take(PROOF_BYTES))) or secret is None:
        raise Refused(Cause.BAD_PROOF, f"{peer} failed to authenticate")
    try:
        return Admitted(peer, stream, secret, ours.seals(str(peer), must_seal))
    except PlainPeer as refused:
        raise Refused(Cause.PLAIN, str(refused)) from None
    except HandshakeError as error:
        raise ProtocolError(Reason.BAD_MESSAGE, str(error)) from None


def _addressed(server: PeerId, said: bytes) -> bytes:
    """A proof for one server, in one incarnation, is invalid for another."""
    return b"|".join((str(server).encode(), said))
