"""The handshake of the transports (`kvbaton.security.sealing` has its laws), as scripts over a `Wire`.

Law: secrets are minted per peer and incarnation, travel in endpoint blobs over the authenticated control plane, and end
with `revoke`.

Authenticates connections on a listening socket, then passes them on.

Law: no connection is passed on before it is authenticated. An unauthenticated peer costs one of a bounded number of
sockets, for a bounded time, and the newest is always accepted: when there are too many, the oldest is closed. Nothing
here can block or end the listening. A connection that is not passed on is counted, once, in `refusals`; except when the
loop ends.
"""

from __future__ import annotations

import hmac
import logging
import secrets
import socket
import struct
from collections.abc import Callable, Generator

import msgspec

from kvbaton.observe.codes.entry import worth_saying
from kvbaton.protocol.errors import ProtocolError, Reason
from kvbaton.protocol.ids import Incarnation, PeerId, WorkerId
from kvbaton.security.records import Seals
from kvbaton.security.sealing import (
    NONCE_BYTES,
    PLAIN,
    PROOF_BYTES,
    SEALED,
    SECRET_BYTES,
    VERSIONS,
    Encrypt,
    Handshake,
    HandshakeError,
    PlainPeer,
    Service,
    is_required_on,
    nonce,
)
from kvbaton.transports.core.transport import Cause, Refusals, Refused, cause_of
from kvbaton.transports.net.socket_loop import IN, SocketLoop
from kvbaton.transports.net.stream_socket import Bytes, Script, Sink, Wire, take

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


log = logging.getLogger(__name__)

ACCEPTS_PER_TURN = 16
ACCEPT_PAUSE_S = 0.1
BACKLOG = 128


class Reception:
    """One listening socket on one loop."""

    def __init__(
        self,
        me: PeerId,
        loop: SocketLoop,
        prepare: Callable[[socket.socket], None],
        welcome: Callable[[Admitted, socket.socket], None],
        strangers_max: int,
        handshake_s: float,
        encrypt: Encrypt = "auto",
    ) -> None:
        """`prepare` configures a new socket, or refuses it by ProtocolError; `welcome` owns it from then on."""
        self.keyring = SecretRing()
        self.refusals = Refusals()  # also of the peers that `welcome` serves
        self._me = me
        self._loop = loop
        self._prepare = prepare
        self._welcome = welcome
        self._strangers_max = strangers_max
        self._handshake_s = handshake_s
        self._encrypt: Encrypt = encrypt
        self._strangers: dict[Wire, None] = {}  # oldest first
        self._listener: socket.socket | None = None
        self._unfit = 0  # connections that `prepare` refused

    def listen(self, create: Callable[[], socket.socket]) -> socket.socket:
        """The listening socket, created and listened on by the first call."""
        if self._listener is None:
            self._listener = create()
            self._listener.setblocking(False)
            self._loop.call(self._watch)
        return self._listener

    def close(self, _detail: str) -> None:
        """Stop listening. Called by the loop when it ends."""
        if self._listener is not None:
            self._loop.unwatch(self._listener.fileno())
            self._listener.close()

    def _watch(self) -> None:
        assert self._listener is not None
        self._loop.watch(self._listener.fileno(), IN, self)

    def ready(self, _events: int) -> None:
        """Accept pending connections. Called by the loop."""
        assert self._listener is not None
        for _ in range(ACCEPTS_PER_TURN):
            try:
                sock, _address = self._listener.accept()
            except (BlockingIOError, ConnectionError):
                return
            except OSError as error:  # out of descriptors or memory: the listener would stay readable and spin
                log.warning("[accept-failed] cannot accept connections: %s; retrying in %s s", error, ACCEPT_PAUSE_S)
                self._loop.unwatch(self._listener.fileno())
                self._loop.later(ACCEPT_PAUSE_S, self._watch)
                return
            try:
                self._prepare(sock)
                must_seal = is_required_on(self._encrypt, sock)
            except (OSError, ProtocolError) as error:
                self._unfit += 1
                if worth_saying(self._unfit):
                    log.warning("[connection-refused] refused a connection: %s", error)
                self.refusals.add(cause_of(error))
                sock.close()
            else:
                self._hear(sock, must_seal)

    def _hear(self, sock: socket.socket, must_seal: bool) -> None:
        if len(self._strangers) >= self._strangers_max:
            self._drop(next(iter(self._strangers)), Cause.CROWDED_OUT, "too many unauthenticated connections")
        deadline = self._loop.later(self._handshake_s, lambda: self._drop(wire, Cause.NO_PROOF, "no proof in time"))

        def closed(detail: str, by_peer: bool) -> None:
            deadline.cancel()
            self._strangers.pop(wire, None)
            if wire.fault is not None:
                self.refusals.add(cause_of(wire.fault))
            elif by_peer:
                self.refusals.add(Cause.NO_PROOF if wire.heard else Cause.LEFT)
            log.debug("an unauthenticated peer disconnected: %s", detail)

        wire = Wire(self._loop, sock, closed)
        self._strangers[wire] = None
        wire.open(self._admit(wire, must_seal))

    def _drop(self, wire: Wire, cause: Cause, detail: str) -> None:
        self.refusals.add(cause)
        wire.close(detail)

    def _admit(self, wire: Wire, must_seal: bool) -> Script:
        admitted = yield from admit(wire, self.keyring, self._me, must_seal)
        sock = wire.detach()
        self._welcome(admitted, sock)


class PeerListener:
    """What listens for peers: whose proofs it accepts, and whom it has refused."""

    _reception: Reception

    @property
    def keyring(self) -> SecretRing:
        return self._reception.keyring

    @property
    def refusals(self) -> Refusals:
        return self._reception.refusals
