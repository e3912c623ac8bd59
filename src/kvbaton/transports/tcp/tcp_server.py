"""The server side of tcp: carries out the reads and writes of authenticated peers on the memory lent to them.

Laws: no byte moves before every span of its request was checked against the memory here, and against the blocks lent to
that peer (`loans`). After `shut_out(peer)` has run on every loop, with the peer's secret revoked before, no byte of
that peer lands any more.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Sequence
from functools import partial

from kvbaton.protocol.errors import ProtocolError, Reason
from kvbaton.protocol.ids import PeerId
from kvbaton.security.sealing import Encrypt
from kvbaton.transports.core.jobs import from_wire
from kvbaton.transports.core.loans import BytesUnderWay, Loans
from kvbaton.transports.core.mover import Mover, Wait
from kvbaton.transports.core.shared_memory import RegisteredMemory
from kvbaton.transports.core.transport import Cause, Direction, Spans, cause_of
from kvbaton.transports.net.connection_handshake import BACKLOG, Admitted, PeerListener, Reception
from kvbaton.transports.net.socket_loop import SocketLoop
from kvbaton.transports.net.stream_socket import (
    FRAME_BYTES,
    WINDOW_MAX,
    Bytes,
    ByteStrip,
    Frame,
    FrameKind,
    FrameStatus,
    Script,
    Sink,
    Skip,
    Wire,
    parse,
    take,
)

STREAMS_PER_PEER_MAX = 16
TOO_SLOW = "the loan was revoked, and the request did not end in time"
REFUSED_AS = {FrameStatus.BAD_SPAN: Cause.BAD_SPAN, FrameStatus.NOT_LENT: Cause.NOT_LENT}


class TcpListener(PeerListener):
    """Listens on an address of this host."""

    def listen(self, host: str, port: int) -> int:
        """Accept from now on; the port."""
        create = partial(socket.create_server, (host, port), family=family_of(host), backlog=BACKLOG)
        return int(self._reception.listen(create).getsockname()[1])


class TcpServer(TcpListener):
    """Authenticates on the first loop, serves stream n of a peer on loop n modulo the number of loops."""

    def __init__(
        self,
        me: PeerId,
        loops: Sequence[SocketLoop],
        memory: RegisteredMemory,
        mover: Mover,
        loans: Loans,
        strangers_max: int,
        handshake_s: float,
        encrypt: Encrypt = "auto",
    ) -> None:
        self._loops = loops
        self._memory = memory
        self._mover = mover
        self._loans = loans
        self._reception = Reception(me, loops[0], prepare, self._welcome, strangers_max, handshake_s, encrypt)
        self._served: list[dict[tuple[PeerId, int], Wire]] = [{} for _ in loops]  # each touched by its loop only

    def shut_out(self, peer: PeerId, index: int) -> None:
        """On loop `index`: close what is served there to `peer`."""
        for key, wire in list(self._served[index].items()):
            if key[0] == peer:
                wire.close("shut out")

    def _welcome(self, admitted: Admitted, sock: socket.socket) -> None:
        index = admitted.stream % len(self._loops)
        if not self._loops[index].call(lambda: self._adopt(index, admitted, sock)):
            sock.close()

    def _adopt(self, index: int, admitted: Admitted, sock: socket.socket) -> None:
        """On loop `index`. The secret is checked again: a fence may have come in between."""
        if not self.keyring.still_admits(admitted) or admitted.stream >= STREAMS_PER_PEER_MAX:
            if admitted.stream >= STREAMS_PER_PEER_MAX:
                self.refusals.add(Cause.BAD_MESSAGE)
            sock.close()
            return
        served, key = self._served[index], (admitted.peer, admitted.stream)
        if key in served:
            served[key].close("replaced by a newer connection")

        def closed(_detail: str, _by_peer: bool) -> None:
            del served[key]
            guest.left()
            if wire.fault is not None:
                self.refusals.add(cause_of(wire.fault))

        served[key] = wire = Wire(self._loops[index], sock, closed)
        guest = TcpGuest(admitted.peer, self._loans, lambda: self._loops[index].call(partial(wire.close, TOO_SLOW)))
        if admitted.seals is not None:
            wire.seal(admitted.seals)
        wire.open(self._serve(wire, guest))

    def _serve(self, wire: Wire, guest: TcpGuest) -> Script:
        while True:
            frame = parse((yield from take(FRAME_BYTES)), FrameKind.READ, FrameKind.WRITE)
            pairs = from_wire((yield from take(frame.table_bytes)))
            if len(wire.out) > 2 * WINDOW_MAX:  # an answer is a head and perhaps a payload
                raise ProtocolError(Reason.BAD_MESSAGE, f"more than {WINDOW_MAX} concurrent requests")
            strip = self._strip(frame, pairs, guest)
            status = FrameStatus.OK
            if isinstance(strip, FrameStatus):
                status = strip
                self.refusals.add(REFUSED_AS[status])
            if frame.kind is FrameKind.WRITE:
                sink: Sink = Skip(frame.payload_bytes) if isinstance(strip, FrameStatus) else strip
                if sink.left:
                    yield sink
                wire.out.append(Bytes(Frame(FrameKind.DONE, frame.tag, status=status).pack()))
            elif isinstance(strip, FrameStatus):
                wire.out.append(Bytes(Frame(FrameKind.DATA, frame.tag, status=status).pack()))
            else:
                head = Frame(FrameKind.DATA, frame.tag, frame.payload_bytes)
                wire.out.extend((Bytes(head.pack(), more=strip.left > 0), strip))

    def _strip(self, frame: Frame, pairs: Spans, guest: TcpGuest) -> ByteStrip | FrameStatus:
        """The memory that a request names, or the reason for refusal."""
        memory = self._memory.get(frame.region)
        if memory is None:
            return FrameStatus.BAD_SPAN
        try:
            total = self._mover.check_spans(pairs, 2, memory.nbytes, 0)
        except ValueError:
            return FrameStatus.BAD_SPAN
        if total != frame.payload_bytes:
            raise ProtocolError(Reason.BAD_MESSAGE, f"spans of {total} bytes, payload of {frame.payload_bytes}")
        if not total:
            return ByteStrip(self._mover, memory, pairs, 2, 0)
        way = Direction.WRITE if frame.kind is FrameKind.WRITE else Direction.READ
        flight = self._loans.begin(guest.peer, way, frame.region, pairs, guest.cut)
        if flight is None:
            return FrameStatus.NOT_LENT
        guest.flights.add(flight)
        return LentStrip(self._mover, memory, pairs, total, partial(guest.landed, flight))


class TcpGuest:
    """An authenticated peer on one connection, and its requests in flight there."""

    def __init__(self, peer: PeerId, loans: Loans, cut: Callable[[], object]) -> None:
        self.peer = peer
        self.flights: set[BytesUnderWay] = set()
        self._loans = loans
        self._cut = cut

    def cut(self) -> None:
        """From any thread."""
        self._cut()

    def landed(self, flight: BytesUnderWay) -> None:
        """The last byte of it has moved."""
        self.flights.discard(flight)
        self._loans.end(flight, landed=True)

    def left(self) -> None:
        """The connection is over, and so is everything in flight on it."""
        while self.flights:
            self._loans.end(self.flights.pop())


class LentStrip(ByteStrip):
    """A strip that says when its last byte has moved."""

    __slots__ = ("_done",)

    def __init__(self, mover: Mover, memory: memoryview, pairs: Spans, size: int, done: Callable[[], None]) -> None:
        super().__init__(mover, memory, pairs, 2, size)
        self._done = done

    def _exchange(self, data: memoryview, landing: bool) -> int:
        moved = super()._exchange(data, landing)
        if not self.left:
            self._done()
        return moved

    def _stream(self, sock: socket.socket, room: int, sending: bool, wait: Wait) -> int:
        moved = super()._stream(sock, room, sending, wait)
        if not self.left:
            self._done()
        return moved


def family_of(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET


def prepare(sock: socket.socket) -> None:
    """Non-blocking, without delay, and closed by the kernel when the other host has been gone for a minute."""
    sock.setblocking(False)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in ((socket.TCP_KEEPIDLE, 30), (socket.TCP_KEEPINTVL, 10), (socket.TCP_KEEPCNT, 3)):
        sock.setsockopt(socket.IPPROTO_TCP, option, value)
