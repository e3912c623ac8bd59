"""The client side of staging: the copies that wait for one peer, and the connections to it.

Over tcp there are several, each on its own thread, since one thread moves what one core copies. Law: they live and die
together. Each proves the secret of this pairing, each must announce the same slots and regions, and when one fails, all
fail, and copies in flight or waiting fail with them, once; the next copy opens all again.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

from kvbaton.protocol.errors import ProtocolError, Reason
from kvbaton.transports.core.jobs import CopyJob
from kvbaton.transports.core.transport import Spans
from kvbaton.transports.net.socket_loop import SocketLoop
from kvbaton.transports.staged.staged_connection import StagedConnection, Trade
from kvbaton.transports.staged.staged_listener import StagedEndpoint, StagedHello


@dataclass(slots=True, eq=False)
class Crew:
    """The connections that were opened together. `hello`: the announcement on the first usable one."""

    lines: list[StagedConnection] = field(default_factory=list)
    hello: StagedHello | None = None


class StagedLink:
    """Calls from any thread. What it holds is guarded by the lock of the jobs."""

    def __init__(
        self,
        trade: Trade,
        there: StagedEndpoint,
        loops: Sequence[SocketLoop],
        plan: Callable[[CopyJob, StagedHello, int], bool],
        sealed: bool = False,
    ) -> None:
        """`loops`: one for each connection. `plan` checks a copy and gives it parts for so many, or fails it."""
        self.trade = trade
        self.there = there
        self.sealed = sealed
        self.unproven: list[CopyJob] = []  # writes whose rest was not proven
        self.forgotten = False
        self._loops = loops
        self._jobs = trade.jobs
        self._plan = plan
        self._crew: Crew | None = None
        self._new: deque[CopyJob] = deque()
        self._queue: deque[CopyJob] = deque()

    @property
    def width(self) -> int:
        return len(self._loops)

    def add(self, job: CopyJob) -> None:
        """The caller holds the lock."""
        self._new.append(job)
        self._loops[0].call(self._wake)

    def remove(self, job: CopyJob) -> None:
        """A job that has failed. The caller holds the lock."""
        for waiting in (self._new, self._queue):
            if job in waiting:
                waiting.remove(job)
        for line in self._crew.lines if self._crew else ():
            line.loop.call(partial(line.discard, job))

    def forget(self) -> None:
        """The pairing is over: bytes that the peer still receives are its own affair, and writes whose end was not
        proven need hold nothing here. The caller holds the lock."""
        self.forgotten = True
        unproven, self.unproven = self.unproven, []
        for job in unproven:
            self._jobs.forgive(job)

    def shut(self, detail: str) -> None:
        with self._jobs:
            if self._crew is not None:
                self._fall(self._crew, detail)

    # --- for lines

    def begin(self) -> tuple[CopyJob, Spans] | None:
        """The next part to carry."""
        with self._jobs:
            while self._queue:
                spans = self._jobs.begin(self._queue[0])
                if spans is not None:
                    return self._queue[0], spans
                self._queue.popleft()
            return None

    def not_yet(self, job: CopyJob, spans: Spans, loop: SocketLoop, again_s: float) -> None:
        """The peer does not lend these: they, and the rest of the job, are started again later."""
        with self._jobs:
            if job in self._queue:
                self._queue.remove(job)
            self._jobs.put_back(job, spans)
            crew = self._crew
        loop.later(again_s, partial(self._again, job, crew))

    def ready(self, line: StagedConnection, hello: StagedHello) -> None:
        """On the line's loop: it can be used, so what waited can be planned."""
        with self._jobs:
            crew = self._crew
            if crew is None or line not in crew.lines:
                return
            if crew.hello is None:
                crew.hello = hello
            strange = crew.hello != hello
        if strange:
            line.wire.close("the peer announced other slots or regions than on its other connections")
        else:
            self._wake()
            line.pump()

    def left(self, line: StagedConnection, detail: str) -> None:
        """A line is down, and the others with it."""
        with self._jobs:
            if self._crew is not None and line in self._crew.lines:
                self._fall(self._crew, detail)

    # --- inside

    def _wake(self) -> None:
        """On a loop: plan what is new, and let the lines carry it; dial them if there are none."""
        with self._jobs:
            crew = self._crew
            if crew is None and self._new:
                crew = self._crew = Crew()
                for index, loop in enumerate(self._loops):
                    loop.call(partial(self._dial, crew, index))
            if crew is None or crew.hello is None:
                return
            while self._new:
                job = self._new.popleft()
                if not job.ended and self._plan(job, crew.hello, self.width):
                    self._queue.append(job)
            self._spread(crew)

    def _spread(self, crew: Crew) -> None:
        """As many lines as there are parts begin some. The lock is held."""
        useful = sum(len(job.parts) for job in self._queue)
        for line in sorted(crew.lines, key=lambda line: -line.room)[:useful]:
            line.loop.call(line.pump)

    def _again(self, job: CopyJob, crew: Crew | None) -> None:
        """Parts that were put back are due. Those that waited while the lines failed have failed with them: they were
        planned for their slots."""
        with self._jobs:
            if crew is None or crew is not self._crew:
                if job.parts:
                    self._jobs.fail(job, Reason.TRANSFER_FAILED, f"cannot stage with {self.there.owner}: line lost")
                return
            if job.parts and job not in self._queue:
                self._queue.append(job)
            self._spread(crew)

    def _dial(self, crew: Crew, index: int) -> None:
        """On the loop of that connection."""
        with self._jobs:
            if crew is not self._crew:
                return
            try:
                line = StagedConnection(self, self._loops[index], index)
            except (OSError, ProtocolError) as error:
                self._fall(crew, f"cannot dial: {error}")
                return
            crew.lines.append(line)
        line.open()

    def _fall(self, crew: Crew, detail: str) -> None:
        """The only way to lose a peer: all connections close, waiting copies fail. The lock is held."""
        # All lines of a crew share the peer's slots and its announced regions. A lost one leaves slots in a state that
        # this side cannot know, so the others close with it and the next copy starts with a new crew.
        self._crew = None
        reason = Reason.UNREACHABLE if crew.hello is None else Reason.TRANSFER_FAILED
        failed = [*self._new, *self._queue]
        self._new.clear()
        self._queue.clear()
        for line in crew.lines:
            line.loop.call(partial(line.wire.close, detail))
        for job in failed:
            self._jobs.fail(job, reason, f"cannot stage with {self.there.owner}: {detail}")
