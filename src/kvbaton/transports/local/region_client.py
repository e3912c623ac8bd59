"""D's side of shm: maps a peer's memory, and queues the copies that wait for it.

Law: a mapping is read-only, of a descriptor that can neither shrink nor be written through, and lies wholly inside it.
Once mapped it stays, whatever happens to the peer, until it is forgotten and the last copy out of it has ended.
"""

from __future__ import annotations

import array
import fcntl
import mmap
import os
import socket
from collections import deque
from collections.abc import Callable
from typing import TypeAlias

import msgspec

from kvbaton.protocol.errors import ProtocolError, Reason
from kvbaton.protocol.ids import PeerId
from kvbaton.transports.core.jobs import CopyJob, Jobs
from kvbaton.transports.core.mover import Wait
from kvbaton.transports.core.shared_memory import F_SEAL_FUTURE_WRITE, REGIONS_MAX
from kvbaton.transports.local.region_listener import DESCRIPTORS_MAX, LENGTH, ShmEndpoint, SocketPlace, same_user
from kvbaton.transports.net.connection_handshake import greet
from kvbaton.transports.net.socket_loop import SocketLoop, Timer
from kvbaton.transports.net.stream_socket import Script, Wire, take

_SEALS = fcntl.F_SEAL_SHRINK | F_SEAL_FUTURE_WRITE
TABLE_BYTES_MAX = 64 * REGIONS_MAX
Mapped: TypeAlias = dict[int, memoryview]


class Attachment:
    """One peer's memory as mapped here, and the copies that wait for it. Connected at once, and again when needed."""

    def __init__(self, me: PeerId, there: ShmEndpoint, loop: SocketLoop, jobs: Jobs, deadline_s: float) -> None:
        self.there = there
        self._me = me
        self._loop = loop
        self._jobs = jobs
        self._deadline_s = deadline_s
        self._dialling = False
        self._reached = False  # it has answered, and may have nothing for us yet
        self._waiting: deque[tuple[CopyJob, Callable[[Mapped], None]]] = deque()
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
            sock = dial(self.there.name)
        except (OSError, ProtocolError) as error:
            self._done(None, str(error))
            return
        limit = self._loop.later(self._deadline_s, lambda: wire.close(f"no answer within {self._deadline_s} s"))

        def closed(detail: str, _by_peer: bool) -> None:
            limit.cancel()
            self._done(None, detail)

        wire = Wire(self._loop, sock, closed)
        wire.open(self._talk(wire, limit))

    def _talk(self, wire: Wire, limit: Timer) -> Script:
        """Prove ourselves, wait until we may have the descriptors, map them."""
        yield from greet(wire, self.there.secret, self._me, self.there.owner, 0)
        head = TakeDescriptors(LENGTH.size)
        try:
            yield head
            if not LENGTH.unpack(head.data)[0] and not head.descriptors:  # nothing was lent to us yet
                limit.cancel()
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
            empty = [job for job, _ in self._waiting if not job.copy.spans]
            self._waiting = deque(item for item in self._waiting if item[0].copy.spans)
            for job in empty:
                self._jobs.settle(job)

    def _done(self, mapped: Mapped | None, detail: str) -> None:
        """The first result of a dial counts; the close after a success means nothing."""
        with self._jobs:
            if not self._dialling:
                return
            self._mapped, self._dialling, self._reached = mapped, False, False
            waiting, self._waiting = self._waiting, deque()
            problem = f"cannot map the memory of {self.there.owner}: {detail}"
            for job, then in waiting:
                if mapped is None:
                    self._jobs.fail(job, Reason.UNREACHABLE, problem)
                else:
                    then(mapped)


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
