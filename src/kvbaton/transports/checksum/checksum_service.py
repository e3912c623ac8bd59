"""The server side of checksums: digests of registered memory, for authenticated peers.

Law: nothing is read before every span of a query was checked against the memory here and, where the transport enforces
loans, against those (a digest tells whether a guess is right); and nothing is digested on the loop. A query occupies
its connection's window until it is answered, so a peer can make at most that much work wait.
"""

from __future__ import annotations

import socket
from dataclasses import dataclass, field
from functools import partial

from kvbaton.protocol.errors import ProtocolError, Reason
from kvbaton.protocol.ids import PeerId
from kvbaton.security.sealing import Encrypt
from kvbaton.transports.checksum.checksum_memory import Sums
from kvbaton.transports.core.jobs import from_wire
from kvbaton.transports.core.loans import BytesUnderWay, Loans
from kvbaton.transports.core.mover import Mover
from kvbaton.transports.core.transport import Direction, Spans, cause_of
from kvbaton.transports.net.connection_handshake import Admitted, Reception
from kvbaton.transports.net.socket_loop import SocketLoop
from kvbaton.transports.net.stream_socket import Bytes, Script, Wire, take
from kvbaton.transports.net.transfer_frames import FRAME_BYTES, WINDOW_MAX, Frame, FrameKind, FrameStatus, parse
from kvbaton.transports.tcp.tcp_server import REFUSED_AS, TcpListener, prepare

WRITTEN_BYTES_MIN = 16
"""Of a span that a writer asks about. With less a digest could be guessed: a byte has 256 of them."""


@dataclass(slots=True, eq=False)
class ChecksumGuest:
    """One connection of an authenticated peer."""

    peer: PeerId
    wire: Wire
    waiting: int = 0  # queries being digested or waiting
    halt: bytearray = field(default_factory=lambda: bytearray(1))  # set when the answers are no longer wanted


class SumService(TcpListener):
    """Listens, authenticates and answers on one loop; one connection per peer, the newest."""

    def __init__(
        self,
        me: PeerId,
        loop: SocketLoop,
        sums: Sums,
        mover: Mover,
        loans: Loans | None,
        strangers_max: int,
        handshake_s: float,
        encrypt: Encrypt = "auto",
    ) -> None:
        self._loop = loop
        self._sums = sums
        self._mover = mover
        self._loans = loans
        self._reception = Reception(me, loop, prepare, self._adopt, strangers_max, handshake_s, encrypt)
        self._guests: dict[PeerId, ChecksumGuest] = {}  # touched by the loop only

    def shut_out(self, peer: PeerId) -> None:
        """Stop answering `peer`. From any thread."""
        self.keyring.revoke(peer)
        self._loop.call(partial(self._drop, peer, "shut out"))

    def _drop(self, peer: PeerId, detail: str) -> None:
        guest = self._guests.get(peer)
        if guest is not None:
            guest.wire.close(detail)

    def _adopt(self, admitted: Admitted, sock: socket.socket) -> None:
        """The secret is checked again: it may have been revoked in between."""
        if not self.keyring.still_admits(admitted):
            sock.close()
            return
        self._drop(admitted.peer, "replaced by a newer connection")

        def closed(_detail: str, _by_peer: bool) -> None:
            guest.halt[0] = 1
            del self._guests[admitted.peer]
            if guest.wire.fault is not None:
                self.refusals.add(cause_of(guest.wire.fault))

        guest = ChecksumGuest(admitted.peer, Wire(self._loop, sock, closed))
        if admitted.seals is not None:
            guest.wire.seal(admitted.seals)
        self._guests[admitted.peer] = guest
        guest.wire.open(self._serve(guest))

    def _serve(self, guest: ChecksumGuest) -> Script:
        while True:
            frame = parse((yield from take(FRAME_BYTES)), FrameKind.SUM)
            pairs = from_wire((yield from take(frame.table_bytes)))
            if guest.waiting + len(guest.wire.out) >= WINDOW_MAX:
                raise ProtocolError(Reason.BAD_MESSAGE, f"more than {WINDOW_MAX} concurrent queries")
            known = self._is_inside(frame, pairs)
            flight = self._begin(guest, frame.region, pairs) if known and self._loans and pairs else None
            if not known or (self._loans and pairs and flight is None):
                status = FrameStatus.NOT_LENT if known else FrameStatus.BAD_SPAN
                self.refusals.add(REFUSED_AS[status])
                guest.wire.out.append(Bytes(Frame(FrameKind.SUMS, frame.tag, status=status).pack()))
            else:
                guest.waiting += 1
                tell = partial(self._digested, guest, frame.tag, flight)
                self._sums.digest(frame.region, pairs, 2, guest.halt, tell)

    def _begin(self, guest: ChecksumGuest, region: int, pairs: Spans) -> BytesUnderWay | None:
        """A peer that may read lent blocks may ask for their digests; a peer that may only write them must not ask for
        digests of so little that they reveal the previous contents."""
        assert self._loans is not None
        for way in Direction:
            if way is Direction.WRITE and min(pairs[1::2]) < WRITTEN_BYTES_MIN:
                return None
            flight = self._loans.begin(guest.peer, way, region, pairs, lambda: None)  # a digest is short
            if flight is not None:
                return flight
        return None

    def _is_inside(self, frame: Frame, pairs: Spans) -> bool:
        """Whether everything that a query names lies in memory here."""
        size, bounds = self._sums.size_of(frame.region), self._sums.portioning
        if size is None:
            return False
        try:
            total = self._mover.check_spans(pairs, 2, size, 0)
        except ValueError:
            return False
        if frame.payload_bytes > bounds.question_bytes_max or max(pairs[1::2], default=0) > bounds.row_bytes_max:
            raise ProtocolError(Reason.BAD_MESSAGE, f"a query about {frame.payload_bytes} bytes; split it")
        if total != frame.payload_bytes:
            raise ProtocolError(Reason.BAD_MESSAGE, f"spans of {total} bytes, announced as {frame.payload_bytes}")
        return True

    def _digested(
        self, guest: ChecksumGuest, tag: int, flight: BytesUnderWay | None, found: bytes, problem: str
    ) -> None:
        """On the digesting thread."""
        if self._loans is not None and flight is not None:
            self._loans.end(flight)
        if problem:
            self._loop.call(partial(guest.wire.close, "cannot be digested"))
        else:
            self._loop.call(partial(self._answer, guest, tag, found))

    def _answer(self, guest: ChecksumGuest, tag: int, found: bytes) -> None:
        guest.waiting -= 1
        if not guest.wire.closed:
            guest.wire.out.append(Bytes(Frame(FrameKind.SUMS, tag, len(found)).pack() + found))
            guest.wire.flush()
