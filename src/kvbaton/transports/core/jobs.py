"""Accepted copies: counts them, ends each exactly once, and keeps the news until it is drained.

Law: an accepted copy ends when none of its parts is left to begin and none is under way, by one `CopyEnded`. Only
`abandon` ends it earlier, with `at_rest=False`; then one `CopyRested` follows when its last part has come to rest, or
none at all when that could not be proven. The waker is called without the lock, when the news was empty before.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from kvbaton.protocol.errors import Reason
from kvbaton.protocol.ids import JobId, PeerId
from kvbaton.transports.core.transport import Copy, CopyEnded, CopyRested, Spans, TransportEvent

log = logging.getLogger(__name__)

AGAIN_S, AGAIN_S_MAX = 0.001, 0.25
LENT_WAIT_S = 2.0
"""How long blocks that are not lent are asked for again, ever less often. The link to a rank takes a fraction of a
millisecond, unless the machine stands still."""


@dataclass(slots=True, eq=False)
class CopyJob:
    """One accepted copy."""

    copy: Copy
    parts: deque[Spans] = field(default_factory=deque)  # not begun
    live: int = 0  # begun and not at rest
    reason: Reason | None = None
    detail: str = ""
    ended: bool = False
    lost: bool = False  # the rest of some part cannot be proven
    halt: bytearray = field(default_factory=lambda: bytearray(1))  # read by movers while they copy
    refused_at: float = 0.0  # when the peer first said that it does not lend this memory


class Jobs:
    """The accepted copies of one transport. `with jobs:` holds its lock, which may be nested."""

    def __init__(self, copies_max: int) -> None:
        self._copies_max = copies_max
        self._lock = threading.RLock()
        self._depth = 0
        self._open = 0  # accepted, and the end not yet drained: bounds the news as well
        self._jobs: dict[JobId, CopyJob] = {}
        self._news: list[TransportEvent] = []
        self._ring = False
        self._closed = False
        self._waker: Callable[[], None] | None = None

    def __enter__(self) -> Jobs:
        self._lock.acquire()
        self._depth += 1
        return self

    def __exit__(self, *_: object) -> None:
        # Only the outermost exit rings, after the lock is free: a waker takes locks of its own, under which others call
        # us, and one news while the list was empty is enough for all that follow until it is drained.
        self._depth -= 1
        ring = self._ring and not self._depth
        if ring:
            self._ring = False
        waker = self._waker
        self._lock.release()
        if ring and waker is not None:
            try:
                waker()
            except Exception:
                log.warning("[waker-failed] the waker raised", exc_info=True)

    @property
    def has_room(self) -> bool:
        return self._open < self._copies_max and not self._closed

    def accept(self, copy: Copy) -> CopyJob | None:
        """A new job, or None at the bound."""
        with self:
            if copy.job in self._jobs:
                raise ValueError(f"job {copy.job} is already under way")
            if not self.has_room:
                return None
            self._open += 1
            job = self._jobs[copy.job] = CopyJob(copy)
            return job

    def find(self, job: JobId) -> CopyJob | None:
        return self._jobs.get(job)

    def of_peer(self, peer: PeerId | None = None) -> list[CopyJob]:
        """Jobs that have not ended: of one peer, or all."""
        with self:
            return [job for job in self._jobs.values() if peer is None or job.copy.peer == peer]

    def begin(self, job: CopyJob) -> Spans | None:
        """The next part, now under way; None when none is left."""
        with self:
            if not job.parts:
                return None
            job.live += 1
            return job.parts.popleft()

    def part_ended(self, job: CopyJob, reason: Reason | None = None, detail: str = "", rested: bool = True) -> None:
        """One begun part is over; a reason fails the whole job. `rested` False: bytes may land for ever."""
        with self:
            job.live -= 1
            job.lost |= not rested
            if reason is not None:
                self._stop(job, reason, detail)
            self.settle(job)

    def forgive(self, job: CopyJob) -> None:
        """Nobody relies any more on the rest that could not be proven: ends as at rest."""
        with self:
            if job.lost:
                job.lost = False
                self.settle(job)

    def fail(self, job: CopyJob, reason: Reason, detail: str = "") -> None:
        """The one way to fail: begin no further part; ends when none is under way."""
        with self:
            if not job.ended:
                self._stop(job, reason, detail)
                self.settle(job)

    def abandon(self, job: CopyJob, reason: Reason, detail: str = "") -> None:
        """Fail, and end now even if parts are under way: `at_rest` is then False."""
        with self:
            if job.ended:
                return
            # Whoever waits must not wait for the peer; but memory that a part may still touch stays out of use. So the
            # end is told now and says `at_rest=False`, and the last part to come to rest tells `CopyRested` (`settle`).
            self._stop(job, reason, detail)
            self._end(job, at_rest=not job.live and not job.lost)

    def settle(self, job: CopyJob) -> None:
        """End `job` if nothing of it is left."""
        with self:
            if job.parts or job.live:
                return
            # Nothing is under way. Either this is the end, or the end was told earlier (`abandon`) and this is the
            # rest. A lost part proves nothing: then no `CopyRested` follows, since a guess would free memory that is
            # written to.
            if not job.ended:
                self._end(job, at_rest=not job.lost)
            elif not job.lost:
                self.post(CopyRested(job.copy.job))

    def post(self, event: TransportEvent) -> None:
        with self:
            self._ring |= not self._news
            self._news.append(event)

    def loan_ended(self, event: CopyEnded) -> None:
        """A loan is no copy that was accepted here, but its end is drained as one."""
        with self:
            self._open += 1
            self.post(event)

    def again_s(self, job: CopyJob, now: float) -> float | None:
        """In how many seconds a part that the peer would not lend is to be asked for again; None: no more.

        The word that blocks are lent may be on its way to the process that serves them while we ask there already.
        """
        with self:
            job.refused_at = job.refused_at or now
            waited_s = now - job.refused_at
            return None if waited_s >= LENT_WAIT_S or job.ended else min(max(waited_s, AGAIN_S), AGAIN_S_MAX)

    def put_back(self, job: CopyJob, spans: Spans) -> None:
        """A part that was begun is not under way any more, and is to be begun again."""
        with self:
            job.live -= 1
            if not job.reason and not job.ended:
                job.parts.append(spans)
            self.settle(job)

    def drain(self) -> list[TransportEvent]:
        with self:
            news, self._news = self._news, []
            self._open -= sum(isinstance(event, CopyEnded) for event in news)
            return news

    def set_waker(self, waker: Callable[[], None]) -> None:
        with self:
            self._waker = waker
            self._ring |= bool(self._news)

    def close(self) -> bool:
        """Accept nothing more; True the first time."""
        with self:
            first, self._closed = not self._closed, True
            return first

    def _stop(self, job: CopyJob, reason: Reason, detail: str) -> None:
        if job.reason is None:
            job.reason, job.detail = reason, detail
        job.parts.clear()
        job.halt[0] = 1

    def _end(self, job: CopyJob, at_rest: bool) -> None:
        job.ended = True
        self._jobs.pop(job.copy.job, None)
        self.post(CopyEnded(job.copy.job, job.reason, at_rest, job.detail))
