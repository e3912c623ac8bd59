"""The client side of checksums: one connection to a peer's checksum service, opened when it is needed.

Law: every query gets its answer or its failure, once, or its job has ended. A service that answers nothing for
`answer_s` while queries are outstanding has failed, and all its queries fail. Everything happens on one loop.
"""

from __future__ import annotations

import itertools
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from kvbaton.protocol.errors import ProtocolError, Reason
from kvbaton.transports.checksum.checksum_portions import DIGEST_BYTES
from kvbaton.transports.core.jobs import AGAIN_S_MAX, LENT_WAIT_S, CopyJob, size_of, to_wire
from kvbaton.transports.core.transport import Spans
from kvbaton.transports.net.connection_handshake import greet
from kvbaton.transports.net.socket_loop import SocketLoop, Timer
from kvbaton.transports.net.stream_socket import Bytes, Script, Wire, take
from kvbaton.transports.net.transfer_frames import FRAME_BYTES, Frame, FrameKind, FrameStatus, parse
from kvbaton.transports.tcp.tcp_client import TcpRoute

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
