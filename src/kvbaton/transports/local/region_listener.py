"""P's side of shm: a UNIX socket that passes the descriptors of regions to authenticated peers.

Law: a descriptor goes only to a process of the same user that has proven the secret minted for it, whose engine has
been lent something here, and only sealed: it cannot be written through (P is safe from D) and cannot shrink (D is safe
from P: truncation would be SIGBUS there). Who comes before anything is lent to it is told so, by a table of no bytes,
and waits on its line: one for each peer, a bounded number in all. (Releases before this one take that for a fault, and
the pair takes its next transport.)

D's side of shm: maps a peer's memory, and queues the copies that wait for it.

Law: a mapping is read-only, of a descriptor that can neither shrink nor be written through, and lies wholly inside it.
Once mapped it stays, whatever happens to the peer, until it is forgotten and the last copy out of it has ended.
"""

from __future__ import annotations

import array
import contextlib
import fcntl
import mmap
import os
import secrets
import socket
import struct
from collections import deque
from collections.abc import Callable
from typing import ClassVar, Generic, TypeAlias, TypeVar

import msgspec

from kvbaton.protocol.errors import ProtocolError, Reason
from kvbaton.protocol.ids import PeerId, owner_of
from kvbaton.protocol.numbers import Bytes, Number
from kvbaton.security.sealing import SECRET_BYTES
from kvbaton.transports.core.jobs import CopyJob, Jobs
from kvbaton.transports.core.mover import Wait
from kvbaton.transports.core.shared_memory import F_SEAL_FUTURE_WRITE, REGIONS_MAX, Region, host_identity
from kvbaton.transports.core.transport import Cause, Refused, cause_of
from kvbaton.transports.net.connection_handshake import BACKLOG, Admitted, PeerListener, Reception, greet
from kvbaton.transports.net.socket_loop import SocketLoop, Timer
from kvbaton.transports.net.stream_socket import Bytes as Message
from kvbaton.transports.net.stream_socket import Script, Wire, take

STRANGERS_MAX = 32
WAITING_MAX = 1024  # peers that have paired, and to which nothing was lent yet
DESCRIPTORS_MAX = 250  # the kernel passes 253 at once
NAME_PREFIX = "\0kvbaton-"  # abstract: nothing in the file system to clean up

LENGTH = struct.Struct("<I")
_CREDENTIALS = struct.Struct("iII")  # struct ucred: pid, uid, gid


class LocalEndpoint(msgspec.Struct, frozen=True, array_like=True):
    """A peer's way to a listener of this host; a struct for each transport, with a tag of its own."""

    owner: PeerId
    host: str
    name: str
    secret: bytes


class ShmEndpoint(LocalEndpoint, frozen=True, array_like=True, tag="shm1"):
    """Of shm."""


EndpointT = TypeVar("EndpointT", bound=LocalEndpoint)


class SocketPlace(msgspec.Struct, frozen=True, array_like=True):
    """A region within one of the descriptors that are passed with it."""

    region: Number
    descriptor: Number  # which of them
    offset: Bytes
    size: Bytes


class LocalListener(PeerListener):
    """One listening socket for processes of this user on this host, and the engines to which something is lent."""

    def __init__(self, me: PeerId, loop: SocketLoop, handshake_s: float) -> None:
        self._name = NAME_PREFIX + secrets.token_hex(16)
        self._loop = loop
        self._admitted: set[PeerId] = set()  # engines; touched on the loop only
        self._reception = Reception(me, loop, same_user, self._welcome, STRANGERS_MAX, handshake_s)

    def listen(self) -> str:
        """Accept from now on; the name to connect to."""
        self._reception.listen(self._create)
        return self._name[1:]

    def admit(self, engine: PeerId) -> None:
        """Something was lent to it: its ranks get the memory, those that wait for it at once. From any thread."""
        self._loop.call(lambda: self._admit(engine))

    def dismiss(self, engine: PeerId) -> None:
        """Nothing is lent to it any more: who comes now waits. From any thread."""
        self._loop.call(lambda: self._admitted.discard(engine))

    def revoke(self, peer: PeerId) -> None:
        """Nothing new for that rank, nor for its engine before it is admitted again; its line ends. From any thread."""
        self.keyring.revoke(peer)
        self._loop.call(lambda: self._forget(peer))

    def _forget(self, peer: PeerId) -> None:
        self._admitted.discard(owner_of(peer))
        self._hang_up(peer)

    def _create(self) -> socket.socket:
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(self._name)
        listener.listen(BACKLOG)
        return listener

    def _welcome(self, admitted: Admitted, sock: socket.socket) -> None:
        raise NotImplementedError

    def _admit(self, engine: PeerId) -> None:
        raise NotImplementedError

    def _hang_up(self, peer: PeerId) -> None:
        raise NotImplementedError


class RegionListener(LocalListener):
    """Passes regions, as descriptors."""

    def __init__(self, me: PeerId, loop: SocketLoop, handshake_s: float) -> None:
        super().__init__(me, loop, handshake_s)
        self._places: list[SocketPlace] = []
        self._backings: list[Region] = []
        self._waiting: dict[PeerId, tuple[Wire, Admitted]] = {}  # touched on the loop only

    def add(self, region: int, offset: int, size: int, backing: Region) -> None:
        """Pass `region` out from now on, and allow no new writable mapping of it."""
        if backing not in self._backings:
            if len(self._backings) >= DESCRIPTORS_MAX:
                raise ValueError(f"region {region}: more than {DESCRIPTORS_MAX} allocations; let regions share one")
            self._backings.append(backing)
        backing.seal_writes()
        self._places.append(SocketPlace(region, self._backings.index(backing), offset, size))

    def _welcome(self, admitted: Admitted, sock: socket.socket) -> None:
        if not self.keyring.still_admits(admitted):
            sock.close()
        elif owner_of(admitted.peer) in self._admitted:
            self._pass(sock)
        else:
            self._keep(admitted, sock)

    def _admit(self, engine: PeerId) -> None:
        self._admitted.add(engine)
        for peer, (wire, admitted) in list(self._waiting.items()):
            if owner_of(peer) == engine:
                sock = wire.detach()
                if self.keyring.still_admits(admitted):
                    self._pass(sock)
                sock.close()

    def _hang_up(self, peer: PeerId) -> None:
        if peer in self._waiting:
            self._waiting[peer][0].close("hung up")

    def _keep(self, admitted: Admitted, sock: socket.socket) -> None:
        """Until something is lent to it, or it leaves."""
        peer = admitted.peer
        self._hang_up(peer)  # it has connected again
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


def local_endpoint(kind: type[EndpointT], transport: str, peer: PeerId, endpoint: bytes) -> EndpointT:
    """ValueError says what is wrong with it."""
    try:
        there = msgspec.msgpack.decode(endpoint, type=kind)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise ValueError(f"not an endpoint of {transport}: {error}") from None
    if there.owner != peer:
        raise ValueError(f"the endpoint belongs to {there.owner}, not to {peer}")
    if there.host != host_identity():
        raise ValueError(
            f"{peer} is on another host or in another network namespace; {transport} reaches only this one"
        )
    if len(there.secret) != SECRET_BYTES or not there.name:
        raise ValueError("the endpoint has no usable name or secret")
    return there


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


_SEALS = fcntl.F_SEAL_SHRINK | F_SEAL_FUTURE_WRITE
TABLE_BYTES_MAX = 64 * REGIONS_MAX
Mapped: TypeAlias = dict[int, memoryview]
MemoryT = TypeVar("MemoryT")


class LocalLink(Generic[MemoryT]):
    """A line to one peer of this host, and the copies that wait for its memory. Dialled at once, again when needed."""

    how: ClassVar = "reach"

    def __init__(self, there: LocalEndpoint, loop: SocketLoop, jobs: Jobs, deadline_s: float) -> None:
        self._loop = loop
        self._jobs = jobs
        self._at = there
        self._deadline_s = deadline_s
        self._dialling = False
        self._waiting: deque[tuple[CopyJob, Callable[[MemoryT], None]]] = deque()
        self._line: Wire | None = None  # touched on the loop only, as is the timer
        self._timer: Timer | None = None

    def dial(self) -> None:
        """The caller holds the lock."""
        if not self._dialling:
            self._dialling = True
            self._loop.call(self._open)

    def remove(self, job: CopyJob) -> None:
        """Forget a job that has failed while it waited. The caller holds the lock."""
        self._waiting = deque(item for item in self._waiting if item[0] is not job)

    def _open(self) -> None:
        try:
            sock = dial(self._at.name)
        except (OSError, ProtocolError) as error:
            self._done(None, str(error))
            return
        self._timer = self._loop.later(self._deadline_s, lambda: wire.close(f"no answer within {self._deadline_s} s"))
        wire = self._line = Wire(self._loop, sock, self._closed)
        wire.open(self._talk(wire))

    def _closed(self, detail: str, _by_peer: bool) -> None:
        self._cancel_timer()
        self._line = None
        self._done(None, detail)

    def _talk(self, wire: Wire) -> Script:
        """Prove ourselves, receive what says where the memory is."""
        raise NotImplementedError

    def _keep(self, memory: MemoryT | None) -> None:
        """How a dial ended. The caller holds the lock."""
        raise NotImplementedError

    def _done(self, memory: MemoryT | None, detail: str) -> None:
        """The first result of a dial counts; the close after a success means nothing."""
        with self._jobs:
            if not self._dialling:
                return
            self._dialling = False
            self._keep(memory)
            waiting, self._waiting = self._waiting, deque()
            for job, then in waiting:
                if memory is None:
                    problem = f"cannot {self.how} the memory of {self._at.owner}: {detail}"
                    self._jobs.fail(job, Reason.UNREACHABLE, problem)
                else:
                    then(memory)

    def _take_empty(self) -> list[tuple[CopyJob, Callable[[MemoryT], None]]]:
        """Copies of nothing, by which a pair finds out whether the peer can be reached. The caller holds the lock."""
        empty = [item for item in self._waiting if is_empty(item[0])]
        self._waiting = deque(item for item in self._waiting if not is_empty(item[0]))
        return empty

    def _cancel_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


def is_empty(job: CopyJob) -> bool:
    return not job.copy.spans and job.copy.weave is None


class Attachment(LocalLink[Mapped]):
    """One peer's memory as mapped here."""

    how = "map"

    def __init__(self, me: PeerId, there: ShmEndpoint, loop: SocketLoop, jobs: Jobs, deadline_s: float) -> None:
        super().__init__(there, loop, jobs, deadline_s)
        self.there = there
        self._me = me
        self._reached = False  # it has answered, and may have nothing for us yet
        self._mapped: Mapped | None = None

    def use(self, job: CopyJob, then: Callable[[Mapped], None]) -> None:
        """Call `then` with the peer's regions, now or on the loop; or fail the job. The caller holds the lock."""
        if self._mapped is not None:
            then(self._mapped)
        elif self._reached and not job.copy.spans:
            self._jobs.settle(job)  # a copy of nothing, by which a pair finds out whether the peer can be reached
        else:
            self._waiting.append((job, then))
            self.dial()

    def _talk(self, wire: Wire) -> Script:
        """Prove ourselves, wait until we may have the descriptors, map them."""
        yield from greet(wire, self.there.secret, self._me, self.there.owner, 0)
        head = TakeDescriptors(LENGTH.size)
        try:
            yield head
            if not LENGTH.unpack(head.data)[0] and not head.descriptors:  # nothing was lent to us yet
                self._cancel_timer()
                self._note_reached()
                head = TakeDescriptors(LENGTH.size)
                yield head
            table = yield from take(min(LENGTH.unpack(head.data)[0], TABLE_BYTES_MAX))
            try:
                places = msgspec.msgpack.decode(table, type=list[SocketPlace])
                mapped = _map(places, head.descriptors)
            except (msgspec.MsgspecError, OSError, ValueError, IndexError, RecursionError) as error:
                raise ProtocolError(Reason.BAD_MESSAGE, f"regions that cannot be mapped: {error}") from None
        finally:
            for fd in head.descriptors:
                os.close(fd)
        self._done(mapped, "")

    def _note_reached(self) -> None:
        with self._jobs:
            self._reached = True
            for job, _ in self._take_empty():
                self._jobs.settle(job)

    def _keep(self, memory: Mapped | None) -> None:
        self._mapped, self._reached = memory, False


def dial(name: str) -> socket.socket:
    """A connected socket, or OSError."""
    sock = socket.socket(socket.AF_UNIX)
    try:
        sock.setblocking(False)
        sock.connect("\0" + name)
        same_user(sock)
    except BaseException:
        sock.close()
        raise
    return sock


class TakeDescriptors:
    """The first bytes of a response and the descriptors that came with them."""

    __slots__ = ("data", "descriptors", "left")

    def __init__(self, size: int) -> None:
        self.data = b""
        self.left = size
        self.descriptors: list[int] = []

    def pull(self, sock: socket.socket, room: int, wait: Wait) -> int:
        ints = array.array("i")
        space = socket.CMSG_SPACE(DESCRIPTORS_MAX * ints.itemsize)
        data, ancillary, _flags, _address = sock.recvmsg(self.left, space, socket.MSG_CMSG_CLOEXEC)
        for level, kind, body in ancillary:
            if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                ints.frombytes(body[: len(body) - len(body) % ints.itemsize])
        self.descriptors.extend(ints)
        self.data += data
        self.left -= len(data)
        return len(data)

    def land(self, data: memoryview) -> int:
        raise NotImplementedError("descriptors come over a UNIX socket, which is never encrypted")


def _map(places: list[SocketPlace], descriptors: list[int]) -> Mapped:
    """Each descriptor is mapped once, whole; a region is a view of it."""
    wholes = [_map_whole(fd) for fd in descriptors]
    mapped: Mapped = {}
    for place in places:
        whole = wholes[place.descriptor] if place.descriptor >= 0 else memoryview(b"")
        if not 0 <= place.offset <= whole.nbytes - place.size or place.size < 0:
            raise ValueError(f"region {place.region} is not inside its descriptor")
        mapped[place.region] = whole[place.offset : place.offset + place.size]
    return mapped


def _map_whole(fd: int) -> memoryview:
    seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
    if seals & _SEALS != _SEALS:
        raise ValueError("a descriptor is not sealed against shrinking and writing")
    return memoryview(mmap.mmap(fd, 0, mmap.MAP_SHARED, mmap.PROT_READ))
