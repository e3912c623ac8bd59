"""Authenticates connections on a listening socket, then passes them on.

Law: no connection is passed on before it is authenticated. An unauthenticated peer costs one of a bounded number of
sockets, for a bounded time, and the newest is always accepted: when there are too many, the oldest is closed. Nothing
here can block or end the listening. A connection that is not passed on is counted, once, in `refusals`; except when the
loop ends.
"""

from __future__ import annotations

import logging
import socket
from collections.abc import Callable

from kvbaton.observe.codes.saying import worth_saying
from kvbaton.protocol.errors import ProtocolError
from kvbaton.protocol.ids import PeerId
from kvbaton.security.sealing import Encrypt, is_required_on
from kvbaton.transports.core.refusals import Cause, Refusals, cause_of
from kvbaton.transports.net.connection_handshake import Admitted, SecretRing, admit
from kvbaton.transports.net.socket_loop import IN, SocketLoop
from kvbaton.transports.net.stream_socket import Script, Wire

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
