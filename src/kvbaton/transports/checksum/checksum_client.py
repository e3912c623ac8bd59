"""The client side of checksums: one connection to a peer's checksum service, opened when it is needed.

Law: every query gets its answer or its failure, once, or its job has ended. A service that answers nothing for
`answer_s` while queries are outstanding has failed, and all its queries fail. Everything happens on one loop.

The server side of checksums: digests of registered memory, for authenticated peers.

Law: nothing is read before every span of a query was checked against the memory here and, where the transport enforces
loans, against those (a digest tells whether a guess is right); and nothing is digested on the loop. A query occupies
its connection's window until it is answered, so a peer can make at most that much work wait.
"""

from __future__ import annotations

import itertools
import socket
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial

from kvbaton.protocol.errors import ProtocolError, Reason
from kvbaton.protocol.ids import PeerId
from kvbaton.security.sealing import Encrypt
from kvbaton.transports.checksum.checksum_memory import DIGEST_BYTES, Sums
from kvbaton.transports.core.jobs import AGAIN_S_MAX, LENT_WAIT_S, CopyJob, from_wire, size_of, to_wire
from kvbaton.transports.core.loans import BytesUnderWay, Loans
from kvbaton.transports.core.mover import Mover
from kvbaton.transports.core.transport import Direction, Spans, cause_of
from kvbaton.transports.net.connection_handshake import Admitted, Reception, greet
from kvbaton.transports.net.socket_loop import SocketLoop, Timer
from kvbaton.transports.net.stream_socket import (
    FRAME_BYTES,
    WINDOW_MAX,
    Bytes,
    Frame,
    FrameKind,
    FrameStatus,
    Script,
    Wire,
    parse,
    take,
)
from kvbaton.transports.tcp.tcp_client import TcpRoute
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


WINDOW = 32
"""Questions that wait for an answer on one connection; a service allows more (`tcp_frames.WINDOW_MAX`)."""


@dataclass(slots=True, eq=False)
class Question:
    """The digests of a portion of a copy."""

    job: CopyJob
    spans: Spans
    tell: Callable[[bytes], None]
    fail: Callable[[Reason, str], None]
    refused_at: float = 0.0


class SumLink:
    """The queries to one peer. Methods run on the loop."""

    def __init__(self, route: TcpRoute, loop: SocketLoop, answer_s: float) -> None:
        self.there = route
        self._loop = loop
        self._answer_s = answer_s
        self._queue: deque[Question] = deque()
        self._asked: dict[int, Question] = {}  # by tag
        self._tags = itertools.count()
        self._wire: Wire | None = None
        self._ready = False
        self._timer: Timer | None = None
        self._heard_at = 0.0

    def ask(self, questions: Iterable[Question]) -> None:
        self._queue.extend(questions)
        self._pump()
        if self._wire is not None:
            self._wire.flush()

    def sweep(self) -> None:
        """Forget the queries of jobs that have ended. A connection that owes only those is closed."""
        self._queue = deque(question for question in self._queue if not question.job.ended)
        if self._asked and all(question.job.ended for question in self._asked.values()):
            self._hang_up("the answers are no longer wanted")

    def shut(self, detail: str) -> None:
        """End everything; a later query connects again."""
        self._give_up(Reason.TRANSFER_FAILED, f"{self._service}: {detail}")
        self._hang_up(detail)

    def _hang_up(self, detail: str) -> None:
        if self._wire is not None:
            self._wire.close(detail)

    def _pump(self) -> None:
        """Connect if nothing is open; send queries while the window has room."""
        if self._wire is None and self._queue:
            self._dial()
        while self._ready and self._queue and len(self._asked) < WINDOW and self._wire is not None:
            question = self._queue.popleft()
            if question.job.ended:
                continue
            if not self._asked:
                self._heard_at = time.monotonic()
            tag = next(self._tags)
            self._asked[tag] = question
            table = to_wire(question.spans)
            region = question.job.copy.remote_region
            frame = Frame(FrameKind.SUM, tag, size_of(question.spans), region=region, table_bytes=len(table))
            self._wire.out.append(Bytes(frame.pack() + table))
        if self._asked and self._timer is None:
            self._timer = self._loop.later(self._answer_s, self._look)

    def _dial(self) -> None:
        try:
            sock = self.there.dial()
        except OSError as error:
            self._give_up(Reason.UNREACHABLE, f"cannot dial {self._service}: {error}")
            return
        limit_s = self.there.dial_deadline_s
        wire = self._wire = Wire(self._loop, sock, self._closed)
        self._timer = self._loop.later(limit_s, lambda: wire.close(f"no answer to our handshake within {limit_s} s"))
        wire.open(self._talk(wire))

    def _talk(self, wire: Wire) -> Script:
        route = self.there
        seals = yield from greet(wire, route.secret, route.me, route.peer, 0, route.sealed)
        if seals is not None:
            wire.seal(seals)
        self._stop_timer()
        self._ready = True
        self._pump()
        while True:
            frame = parse((yield from take(FRAME_BYTES)), FrameKind.SUMS)
            question = self._asked.get(frame.tag)
            due = 0 if question is None else DIGEST_BYTES * (len(question.spans) // 3)
            if question is None or frame.payload_bytes != (due if frame.status is FrameStatus.OK else 0):
                raise ProtocolError(Reason.BAD_MESSAGE, f"{frame.payload_bytes} bytes of digests, expected {due}")
            found = yield from take(frame.payload_bytes)
            del self._asked[frame.tag]
            self._heard_at = time.monotonic()
            if frame.status is FrameStatus.OK:
                question.tell(found)
            elif frame.status is FrameStatus.NOT_LENT:
                self._not_lent(question)
            else:
                question.fail(Reason.BAD_SPAN, f"{self.there.peer} refused to digest memory outside its regions")
            self._pump()

    def _not_lent(self, question: Question) -> None:
        """Retried for a moment: the loan may not have arrived yet."""
        now = time.monotonic()
        question.refused_at = question.refused_at or now
        if now - question.refused_at >= LENT_WAIT_S:
            question.fail(Reason.LEASE_EXPIRED, f"{self.there.peer} does not lend this memory, or no longer")
        else:
            self._loop.later(AGAIN_S_MAX / 50, lambda: None if question.job.ended else self.ask([question]))

    def _look(self) -> None:
        """Check that the service still answers, repeatedly, as long as queries are outstanding."""
        self._timer = None
        if not self._asked:
            return
        left_s = self._heard_at + self._answer_s - time.monotonic()
        if left_s > 0:
            self._timer = self._loop.later(left_s, self._look)
        else:
            self.shut(f"no answer for {self._answer_s} s")

    def _closed(self, detail: str, _by_peer: bool) -> None:
        self._stop_timer()
        was_ready, self._ready, self._wire = self._ready, False, None
        lost, self._asked = self._asked, {}
        for question in lost.values():
            question.fail(Reason.TRANSFER_FAILED, f"{self._service}: {detail}")
        if not was_ready:
            self._give_up(Reason.UNREACHABLE, f"{self._service}: {detail}")
        elif self._queue:
            self._loop.call(self._pump)  # each round sends, and so ends, at least one of them

    def _give_up(self, reason: Reason, detail: str) -> None:
        failed, self._queue = self._queue, deque()
        for question in failed:
            question.fail(reason, detail)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    @property
    def _service(self) -> str:
        return f"the checksum service of {self.there.peer}"
