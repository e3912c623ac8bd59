"""P's side of staging: gathers what a proven peer asks for into a slot, and says when it is there.

Law: no byte is gathered before every span of its request was checked against the memory here, and against what is lent
to that peer (`loans`). A slot is filled for one request at a time; over tcp its bytes follow the answer on the same
wire.
"""

from __future__ import annotations

import logging
import socket
from array import array
from dataclasses import dataclass, field
from functools import partial

import msgspec

from kvbaton.protocol.errors import ProtocolError, Reason
from kvbaton.protocol.ids import PeerId
from kvbaton.sealed.policy import Encrypt
from kvbaton.transports.auth import Admitted, Keyring
from kvbaton.transports.base import Direction
from kvbaton.transports.device import RegisteredDevice
from kvbaton.transports.loans import Loans
from kvbaton.transports.loop import Loop
from kvbaton.transports.memory import Region
from kvbaton.transports.mover import Mover
from kvbaton.transports.reception import Reception
from kvbaton.transports.refusals import Cause, Refusals, cause_of
from kvbaton.transports.shm_door import LENGTH, STRANGERS_MAX, same_user
from kvbaton.transports.spans import from_wire
from kvbaton.transports.staged_door import Carrier, Hello, listen
from kvbaton.transports.staged_slots import Slots, allocate_slots, gather_rows
from kvbaton.transports.staged_work import Chunk, Stager
from kvbaton.transports.tcp_frames import FRAME_BYTES, Frame, Kind, Status, parse
from kvbaton.transports.tcp_server import REFUSED_AS, TOO_SLOW, prepare
from kvbaton.transports.wire import Bytes, Script, Strip, Wire, take

log = logging.getLogger(__name__)

SESSIONS_MAX = 32
"""Each pins its slots; a peer beyond is turned away, and finds another data plane."""


@dataclass(slots=True, eq=False)
class Session:
    """One connection of one peer."""

    peer: PeerId
    wire: Wire
    slots: Slots
    busy: set[int] = field(default_factory=set)


class StagedServer:
    """Lives on one loop; gathers on the runner's thread."""

    def __init__(
        self,
        me: PeerId,
        carrier: Carrier,
        loop: Loop,
        memory: RegisteredDevice,
        mover: Mover,
        stager: Stager,
        loans: Loans,
        slots: tuple[int, int],
        handshake_s: float,
        encrypt: Encrypt = "auto",
    ) -> None:
        """`slots`: bytes of one, and how many, for each connection."""
        self._carrier = carrier
        self._loop = loop
        self._memory = memory
        self._mover = mover
        self._stager = stager
        self._loans = loans
        self._slot_bytes, self._slot_count = slots
        self._sessions: list[Session] = []
        self._pinning = 0  # admitted, and not served yet
        ready = same_user if carrier == "shm" else prepare
        self._reception = Reception(me, loop, ready, self._welcome, STRANGERS_MAX, handshake_s, encrypt)

    @property
    def keyring(self) -> Keyring:
        return self._reception.keyring

    @property
    def refusals(self) -> Refusals:
        return self._reception.refusals

    def listen(self, address: tuple[str, int]) -> tuple[str, int]:
        return listen(self._reception, self._carrier, address)

    def shut_out(self, peer: PeerId) -> None:
        """On the loop: close what is served to `peer`."""
        for session in [session for session in self._sessions if session.peer == peer]:
            session.wire.close("shut out")

    def _welcome(self, admitted: Admitted, sock: socket.socket) -> None:
        if not self.keyring.still_admits(admitted) or len(self._sessions) + self._pinning >= SESSIONS_MAX:
            log.warning("[staging-full] no room to stage for %s: %d are served", admitted.peer, len(self._sessions))
            if self.keyring.still_admits(admitted):
                self.refusals.add(Cause.FULL)
            sock.close()
            return
        self._pinning += 1
        slots, region = allocate_slots(self._slot_bytes, self._slot_count)

        def pinned(problem: str) -> bool:
            return self._loop.call(partial(self._begin, admitted, sock, slots, region, problem))

        def unwanted() -> None:
            sock.close()
            region.close()

        self._stager.open(slots, pinned, unwanted)

    def _begin(self, admitted: Admitted, sock: socket.socket, slots: Slots, region: Region, problem: str) -> None:
        """The slots are pinned: say what there is, and serve. The secret is looked at again."""
        self._pinning -= 1
        hello = Hello(slots.slot_bytes, slots.count, {number: each.nbytes for number, each in self._memory.items()})
        table = msgspec.msgpack.encode(hello)
        head = LENGTH.pack(len(table)) + table  # a few kilobytes into an empty buffer: they go at once
        try:
            if problem or not self.keyring.still_admits(admitted):
                raise OSError(problem or "its secret was revoked")
            if self._carrier == "shm" and socket.send_fds(sock, [head], [region.fd]) != len(head):
                raise OSError("the socket took only a part of our first words")
        except OSError as error:
            log.warning("[staging-failed] cannot stage for %s: %s", admitted.peer, error)
            sock.close()
            self._stager.release(slots, region.close)
            return
        wire = Wire(self._loop, sock, lambda _detail, _by_peer: self._left(session, region))
        session = Session(admitted.peer, wire, slots)
        self._sessions.append(session)
        if admitted.seals is not None:
            wire.seal(admitted.seals)
        if self._carrier == "tcp":
            wire.out.append(Bytes(head))
        wire.open(self._serve(session))

    def _left(self, session: Session, region: Region) -> None:
        self._sessions.remove(session)
        if session.wire.fault is not None:
            self.refusals.add(cause_of(session.wire.fault))
        self._stager.release(session.slots, region.close)

    def _serve(self, session: Session) -> Script:
        slots, wire = session.slots, session.wire
        while True:
            frame = parse((yield from take(FRAME_BYTES)), Kind.READ)
            pairs = from_wire((yield from take(frame.table_bytes)))
            slot = frame.tag % slots.count
            if slot in session.busy or frame.payload_bytes > slots.slot_bytes:
                raise ProtocolError(Reason.BAD_MESSAGE, f"slot {slot} is in use, or too small for the request")
            chunk = self._chunk(session, slot, frame, pairs)
            if isinstance(chunk, Status):
                self.refusals.add(REFUSED_AS[chunk])
                wire.out.append(Bytes(Frame(Kind.DATA, frame.tag, status=chunk).pack()))
            else:
                session.busy.add(slot)
                self._stager.add(chunk)

    def _chunk(self, session: Session, slot: int, frame: Frame, pairs: array[int]) -> Chunk | Status:
        """What a request names, or why it is refused."""
        memory = self._memory.get(frame.region)
        try:
            total = self._mover.check_spans(pairs, 2, memory.nbytes if memory else 0, 0)
        except ValueError:
            return Status.BAD_SPAN
        if memory is None:
            return Status.BAD_SPAN
        if total != frame.payload_bytes:
            raise ProtocolError(Reason.BAD_MESSAGE, f"spans of {total} bytes, payload of {frame.payload_bytes}")

        def cut() -> None:
            self._loop.call(partial(session.wire.close, TOO_SLOW))

        flight = self._loans.begin(session.peer, Direction.READ, frame.region, pairs, cut)
        if flight is None:
            return Status.NOT_LENT

        def ended(problem: str) -> None:
            self._loans.end(flight)  # what is in the slot now is the peer's
            self._loop.call(partial(self._answer, session, slot, frame, problem))

        return Chunk(session.slots, slot, total, memory.address, gather_rows(pairs), True, ended)

    def _answer(self, session: Session, slot: int, frame: Frame, problem: str) -> None:
        """On the loop: the slot is filled."""
        wire, size = session.wire, frame.payload_bytes
        if wire.closed:
            return
        session.busy.discard(slot)
        if problem:
            log.error("[staging-failed] cannot stage for %s: %s", session.peer, problem)
            wire.close(problem)
            return
        by_wire = self._carrier == "tcp" and size > 0
        wire.out.append(Bytes(Frame(Kind.DATA, frame.tag, size).pack(), more=by_wire))
        if by_wire:
            view = session.slots.view(slot, size)
            wire.out.append(Strip(self._mover, view, array("q", (0, size)), 2, size))
        wire.flush()
