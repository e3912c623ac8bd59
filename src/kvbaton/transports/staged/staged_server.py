"""The server side of staging: gathers what an authenticated peer reads into a slot, and scatters its writes from a
slot.

Laws: no byte of this memory moves before every span of its request was checked against it, and against the blocks lent
to that peer (`loans`); a write is checked when all of it is in its slot, so what is in flight under a loan is a launch,
and does not depend on a peer. Only launches made here touch memory here: after `shut_out(peer)` has run on every loop,
with the peer's secret revoked before, no launch for that peer starts, and those that had started end in milliseconds. A
slot serves one request at a time; over tcp its bytes follow the request or the response on the same wire.
"""

from __future__ import annotations

import logging
import socket
import threading
from array import array
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial

import msgspec

from kvbaton.protocol.errors import ProtocolError, Reason
from kvbaton.protocol.ids import PeerId
from kvbaton.security.sealing import Encrypt
from kvbaton.transports.core.jobs import from_wire
from kvbaton.transports.core.loans import Loans
from kvbaton.transports.core.mover import Mover
from kvbaton.transports.core.shared_memory import DeviceMemory, Region, RegisteredDevice
from kvbaton.transports.core.transport import Cause, Direction, Spans, cause_of
from kvbaton.transports.local.region_listener import LENGTH, STRANGERS_MAX, same_user
from kvbaton.transports.net.connection_handshake import Admitted, PeerListener, Reception
from kvbaton.transports.net.socket_loop import SocketLoop
from kvbaton.transports.net.stream_socket import (
    FRAME_BYTES,
    Bytes,
    ByteStrip,
    Frame,
    FrameKind,
    FrameStatus,
    Script,
    Skip,
    Wire,
    parse,
    take,
)
from kvbaton.transports.staged.staged_listener import Carrier, StagedHello, listen
from kvbaton.transports.staged.staged_slots import (
    SLOTS_MAX,
    Slots,
    StagedChunk,
    Stager,
    allocate_slots,
    gather_rows,
    scatter_rows,
)
from kvbaton.transports.tcp.tcp_server import REFUSED_AS, TOO_SLOW, prepare

log = logging.getLogger(__name__)

SESSIONS_MAX = 32
"""Peers that are served, with all their connections. Each pins its slots; one beyond is turned away, and finds another
data plane."""


@dataclass(slots=True, eq=False)
class StagedSession:
    """One connection of one peer, on the loop `index`."""

    peer: PeerId
    index: int
    wire: Wire
    slots: Slots
    busy: set[int] = field(default_factory=set)


class StagedServer(PeerListener):
    """Authenticates on the first loop, serves connection n of a peer on loop n; gathers on the runner's threads."""

    def __init__(
        self,
        me: PeerId,
        carrier: Carrier,
        loops: Sequence[SocketLoop],
        memory: RegisteredDevice,
        mover: Mover,
        stager: Stager,
        loans: Loans,
        slots: tuple[int, int],
        handshake_s: float,
        encrypt: Encrypt = "auto",
    ) -> None:
        """`loops`: one for each connection of a peer. `slots`: bytes of one, and how many, for each connection."""
        self._carrier = carrier
        self._loops = loops
        self._memory = memory
        self._mover = mover
        self._stager = stager
        self._loans = loans
        self._slot_bytes, self._slot_count = slots
        self._served: list[dict[PeerId, StagedSession]] = [{} for _ in loops]  # each touched by its loop only
        self._seated: Counter[PeerId] = Counter()  # connections whose slots are pinned, or will be
        self._lock = threading.Lock()
        ready = same_user if carrier == "shm" else prepare
        self._reception = Reception(me, loops[0], ready, self._welcome, STRANGERS_MAX, handshake_s, encrypt)

    def listen(self, address: tuple[str, int]) -> tuple[str, int]:
        return listen(self._reception, self._carrier, address)

    def shut_out(self, peer: PeerId, index: int) -> None:
        """On loop `index`: close what is served there to `peer`."""
        session = self._served[index].get(peer)
        if session is not None:
            session.wire.close("shut out")

    def _welcome(self, admitted: Admitted, sock: socket.socket) -> None:
        if not self.keyring.still_admits(admitted) or not self._seat(admitted):
            sock.close()
            return
        peer, loop = admitted.peer, self._loops[admitted.stream]
        try:
            slots, region = allocate_slots(self._slot_bytes, self._slot_count)
        except OSError as error:
            log.warning("[staging-failed] cannot stage for %s: %s", peer, error)
            sock.close()
            self._unseat(peer)
            return

        def pinned(problem: str) -> bool:
            return loop.call(partial(self._begin, admitted, sock, slots, region, problem))

        def unwanted() -> None:
            sock.close()
            self._gone(peer, region)

        self._stager.open(slots, pinned, unwanted)

    def _seat(self, admitted: Admitted) -> bool:
        """Whether there is room for one more connection of that peer."""
        width = len(self._loops)
        if admitted.stream >= width:
            self.refusals.add(Cause.BAD_MESSAGE)
            return False
        with self._lock:  # a peer that reconnects has twice as many, until its old ones close
            served = self._seated.total()
            if self._seated[admitted.peer] < 2 * width and served < SESSIONS_MAX * width:
                self._seated[admitted.peer] += 1
                return True
        log.warning("[staging-full] no staging memory for %s: %d connections are served", admitted.peer, served)
        self.refusals.add(Cause.FULL)
        return False

    def _gone(self, peer: PeerId, region: Region) -> None:
        region.close()
        self._unseat(peer)

    def _unseat(self, peer: PeerId) -> None:
        with self._lock:
            self._seated[peer] -= 1
            if not self._seated[peer]:
                del self._seated[peer]

    def _begin(self, admitted: Admitted, sock: socket.socket, slots: Slots, region: Region, problem: str) -> None:
        """The slots are pinned: announce them, and serve. The secret is checked again."""
        peer, index = admitted.peer, admitted.stream
        gone = partial(self._gone, peer, region)
        hello = StagedHello(
            slots.slot_bytes, slots.count, {number: each.nbytes for number, each in self._memory.items()}
        )
        table = msgspec.msgpack.encode(hello)
        head = LENGTH.pack(len(table)) + table  # a few kilobytes into an empty buffer: they go at once
        try:
            if problem or not self.keyring.still_admits(admitted):
                raise OSError(problem or "its secret was revoked")
            if self._carrier == "shm" and socket.send_fds(sock, [head], [region.fd]) != len(head):
                raise OSError("the socket took only a part of the announcement")
        except OSError as error:
            log.warning("[staging-failed] cannot stage for %s: %s", peer, error)
            sock.close()
            self._stager.release(slots, gone)
            return
        served = self._served[index]
        if peer in served:
            served[peer].wire.close("replaced by a newer connection")
        wire = Wire(self._loops[index], sock, lambda _detail, _by_peer: self._left(session, gone))
        session = served[peer] = StagedSession(peer, index, wire, slots)
        if admitted.seals is not None:
            wire.seal(admitted.seals)
        if self._carrier == "tcp":
            wire.out.append(Bytes(head))
        wire.open(self._serve(session))

    def _left(self, session: StagedSession, gone: partial[None]) -> None:
        del self._served[session.index][session.peer]
        if session.wire.fault is not None:
            self.refusals.add(cause_of(session.wire.fault))
        self._stager.release(session.slots, gone)

    def _serve(self, session: StagedSession) -> Script:
        slots, wire = session.slots, session.wire
        while True:
            frame = parse((yield from take(FRAME_BYTES)), FrameKind.READ, FrameKind.WRITE)
            pairs = from_wire((yield from take(frame.table_bytes)))
            slot, size, writes = frame.tag % slots.count, frame.payload_bytes, frame.kind is FrameKind.WRITE
            if len(wire.out) > 2 * SLOTS_MAX:  # an answer is a head and perhaps a payload
                raise ProtocolError(Reason.BAD_MESSAGE, "more requests than slots, and the responses are not read")
            if slot in session.busy or size > slots.slot_bytes:
                raise ProtocolError(Reason.BAD_MESSAGE, f"slot {slot} is in use, or too small for the request")
            memory = self._named(frame, pairs)
            if writes and self._carrier == "tcp" and size:
                view = slots.view(slot, size)
                yield Skip(size) if memory is None else ByteStrip(self._mover, view, array("q", (0, size)), 2, size)
            chunk = FrameStatus.BAD_SPAN if memory is None else self._chunk(session, memory, slot, frame, pairs)
            if isinstance(chunk, FrameStatus):
                self.refusals.add(REFUSED_AS[chunk])
                wire.out.append(
                    Bytes(Frame(FrameKind.DONE if writes else FrameKind.DATA, frame.tag, status=chunk).pack())
                )
            else:
                session.busy.add(slot)
                self._stager.add(chunk)

    def _named(self, frame: Frame, pairs: Spans) -> DeviceMemory | None:
        """The memory that a request names, if all of it lies there."""
        memory = self._memory.get(frame.region)
        try:
            total = self._mover.check_spans(pairs, 2, memory.nbytes if memory else 0, 0)
        except ValueError:
            return None
        if memory is not None and total != frame.payload_bytes:
            raise ProtocolError(Reason.BAD_MESSAGE, f"spans of {total} bytes, payload of {frame.payload_bytes}")
        return memory

    def _chunk(
        self, session: StagedSession, memory: DeviceMemory, slot: int, frame: Frame, pairs: Spans
    ) -> StagedChunk | FrameStatus:
        """The launch, or the reason for refusal."""

        def cut() -> None:
            self._loops[session.index].call(partial(session.wire.close, TOO_SLOW))

        reads = frame.kind is FrameKind.READ
        way = Direction.READ if reads else Direction.WRITE
        flight = self._loans.begin(session.peer, way, frame.region, pairs, cut)
        if flight is None:
            return FrameStatus.NOT_LENT

        def ended(problem: str) -> None:
            # What was read is in the slot now, which is the peer's; what was written has landed.
            self._loans.end(flight, landed=not problem)
            self._loops[session.index].call(partial(self._answer, session, slot, frame, problem))

        rows = gather_rows(pairs, 2) if reads else scatter_rows(pairs, 2)
        return StagedChunk(session.slots, slot, frame.payload_bytes, memory.address, rows, reads, ended)

    def _answer(self, session: StagedSession, slot: int, frame: Frame, problem: str) -> None:
        """On the session's loop: the slot is filled, or was emptied."""
        wire, size = session.wire, frame.payload_bytes
        if wire.closed:
            return
        session.busy.discard(slot)
        if problem:
            log.error("[staging-failed] cannot stage for %s: %s", session.peer, problem)
            wire.close(problem)
            return
        if frame.kind is FrameKind.WRITE:
            wire.out.append(Bytes(Frame(FrameKind.DONE, frame.tag).pack()))
        else:
            by_wire = self._carrier == "tcp" and size > 0
            wire.out.append(Bytes(Frame(FrameKind.DATA, frame.tag, size).pack(), more=by_wire))
            if by_wire:
                view = session.slots.view(slot, size)
                wire.out.append(ByteStrip(self._mover, view, array("q", (0, size)), 2, size))
        wire.flush()
