"""P's side of shm: a UNIX socket that passes the descriptors of regions to authenticated peers.

Law: a descriptor goes only to a process of the same user that has proven the secret minted for it, whose engine has
been lent something here, and only sealed: it cannot be written through (P is safe from D) and cannot shrink (D is safe
from P: truncation would be SIGBUS there). Who comes before anything is lent to it is told so, by a table of no bytes,
and waits on its line: one for each peer, a bounded number in all. (Releases before this one take that for a fault, and
the pair takes its next transport.)
"""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import struct

import msgspec

from kvbaton.protocol.ids import PeerId
from kvbaton.protocol.numbers import Bytes, Number
from kvbaton.transports.core.loans import engine_of
from kvbaton.transports.core.refusals import Cause, Refusals, Refused, cause_of
from kvbaton.transports.core.shared_memory import Region
from kvbaton.transports.net.connection_handshake import BACKLOG, Admitted, Reception, SecretRing
from kvbaton.transports.net.socket_loop import SocketLoop
from kvbaton.transports.net.stream_socket import Bytes as Message
from kvbaton.transports.net.stream_socket import Script, Wire, take

STRANGERS_MAX = 32
WAITING_MAX = 1024  # peers that have paired, and to which nothing was lent yet
DESCRIPTORS_MAX = 250  # the kernel passes 253 at once
NAME_PREFIX = "\0kvbaton-"  # abstract: nothing in the file system to clean up

LENGTH = struct.Struct("<I")
_CREDENTIALS = struct.Struct("iII")  # struct ucred: pid, uid, gid


class ShmEndpoint(msgspec.Struct, frozen=True, array_like=True, tag="shm1"):
    """A peer's way to a listener."""

    owner: PeerId
    host: str
    name: str
    secret: bytes


class SocketPlace(msgspec.Struct, frozen=True, array_like=True):
    """A region within one of the descriptors that are passed with it."""

    region: Number
    descriptor: Number  # which of them
    offset: Bytes
    size: Bytes


class RegionListener:
    """One listening socket, and the regions that it passes."""

    def __init__(self, me: PeerId, loop: SocketLoop, handshake_s: float) -> None:
        self._name = NAME_PREFIX + secrets.token_hex(16)
        self._places: list[SocketPlace] = []
        self._backings: list[Region] = []
        self._admitted: set[PeerId] = set()  # engines; touched on the loop only, as are the lines
        self._waiting: dict[PeerId, tuple[Wire, Admitted]] = {}
        self._loop = loop
        self._reception = Reception(me, loop, same_user, self._welcome, STRANGERS_MAX, handshake_s)

    @property
    def keyring(self) -> SecretRing:
        return self._reception.keyring

    @property
    def refusals(self) -> Refusals:
        return self._reception.refusals

    def add(self, region: int, offset: int, size: int, backing: Region) -> None:
        """Pass `region` out from now on, and allow no new writable mapping of it."""
        if backing not in self._backings:
            if len(self._backings) >= DESCRIPTORS_MAX:
                raise ValueError(f"region {region}: more than {DESCRIPTORS_MAX} allocations; let regions share one")
            self._backings.append(backing)
        backing.seal_writes()
        self._places.append(SocketPlace(region, self._backings.index(backing), offset, size))

    def admit(self, engine: PeerId) -> None:
        """Something was lent to it: its ranks get the memory, those that wait for it at once. From any thread."""
        self._loop.call(lambda: self._admit(engine))

    def dismiss(self, engine: PeerId) -> None:
        """Nothing is lent to it any more: who comes now waits. From any thread."""
        self._loop.call(lambda: self._admitted.discard(engine))

    def revoke(self, peer: PeerId) -> None:
        """Nothing new for that rank, nor for its engine before it is admitted again. From any thread."""
        self.keyring.revoke(peer)
        self._loop.call(lambda: self._forget(peer))

    def listen(self) -> str:
        """Accept from now on; the name to connect to."""
        self._reception.listen(self._create)
        return self._name[1:]

    def _create(self) -> socket.socket:
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(self._name)
        listener.listen(BACKLOG)
        return listener

    def _welcome(self, admitted: Admitted, sock: socket.socket) -> None:
        if not self.keyring.still_admits(admitted):
            sock.close()
        elif engine_of(admitted.peer) in self._admitted:
            self._pass(sock)
        else:
            self._keep(admitted, sock)

    def _admit(self, engine: PeerId) -> None:
        self._admitted.add(engine)
        for peer, (wire, admitted) in list(self._waiting.items()):
            if engine_of(peer) == engine:
                sock = wire.detach()
                if self.keyring.still_admits(admitted):
                    self._pass(sock)
                sock.close()

    def _forget(self, peer: PeerId) -> None:
        self._admitted.discard(engine_of(peer))
        if peer in self._waiting:
            self._waiting[peer][0].close("forgotten")

    def _keep(self, admitted: Admitted, sock: socket.socket) -> None:
        """Until something is lent to it, or it leaves."""
        peer = admitted.peer
        if peer in self._waiting:
            self._waiting[peer][0].close("it has connected again")
        if len(self._waiting) >= WAITING_MAX:
            self.refusals.add(Cause.FULL)
            sock.close()
            return

        def closed(_detail: str, _by_peer: bool) -> None:
            del self._waiting[peer]
            if wire.fault is not None:
                self.refusals.add(cause_of(wire.fault))

        wire = Wire(self._loop, sock, closed)
        self._waiting[peer] = wire, admitted
        wire.out.append(Message(LENGTH.pack(0)))
        wire.open(silence(peer))

    def _pass(self, sock: socket.socket) -> None:
        table = msgspec.msgpack.encode(self._places)
        with sock, contextlib.suppress(OSError), contextlib.ExitStack() as passed:  # the peer may have disconnected
            fds = [_read_only(backing.fd, passed) for backing in self._backings]
            socket.send_fds(sock, [LENGTH.pack(len(table)) + table], fds)


def silence(peer: PeerId) -> Script:
    """Of a line on which nothing is to come."""
    yield from take(1)
    raise Refused(Cause.BAD_MESSAGE, f"{peer} sent data on a line that only waits")


def _read_only(fd: int, passed: contextlib.ExitStack) -> int:
    """The same memory behind a descriptor that was not opened for writing; the seal alone would suffice."""
    reader = os.open(f"/proc/self/fd/{fd}", os.O_RDONLY | os.O_CLOEXEC)
    passed.callback(os.close, reader)
    return reader


def same_user(sock: socket.socket) -> None:
    sock.setblocking(False)
    _pid, uid, _gid = _CREDENTIALS.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
    if uid != os.geteuid():
        raise Refused(Cause.OTHER_USER, f"the other end belongs to user {uid}, not {os.geteuid()}")
