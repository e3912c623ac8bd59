"""The thread that drives mori: starts parts, polls those in flight, and knows when each has come to rest.

Laws:
 - Only this thread opens sessions and starts reads: opening waits for the peer, and starting for room in mori's queue.
 - A part rests when its status says that it arrived, never because a caller stopped waiting: mori cannot cancel. One
   that failed rests as well where errors come in order (`MoriEngine.in_order`); otherwise it stays unproven, counted
   and bounded, until the engine is closed.
 - A full send queue is not a failure: the part is held and tried again, with pauses, until `full_s` has passed. That
   is rare, since no more than `rows_max` rows are in flight with one peer.
 - Opening a session talks to the peer with the GIL held, so it is done rarely: an unreachable peer is not tried again
   for `redial_s`, and a session is kept for as long as its peer is connected.
 - A peer with which a read has failed is given up for good: its queue pair is in the error state, and mori makes no
   new one for the same two engines (August 2026). After a restart it is another engine.
 - Nothing busy-waits: with nothing in flight it sleeps until called; otherwise it polls after an eighth of the time
   waited. A status could be waited for (`WaitFor`), but then this thread would not respond to calls.
"""

from __future__ import annotations

import logging
import time
from collections import Counter, deque
from typing import Any

import msgspec

from kvbaton.protocol.errors import Reason
from kvbaton.transports.core.jobs import CopyJob, Jobs, TurnThread
from kvbaton_mori.engine import MoriEngine, MoriError, MoriOutcome, Plot
from kvbaton_mori.links import MoriLink, MoriPart, part_of

log = logging.getLogger(__name__)

LOOK_S = (0.0001, 0.01)
"""Least and most between two looks."""

AGAIN_S = (0.001, 0.05)
"""Least and most between two tries when mori's queue is full."""

UNPROVEN_MAX = 256
GRACE_S = 1.0
"""How long what is under way may still take when the transport is closed."""


class MoriLimits(msgspec.Struct, frozen=True):
    window: int  # parts under way with one peer
    rows_max: int  # rows of these
    full_s: float  # how long a full send queue is tolerated
    redial_s: float  # pause before an unreachable peer is tried again


class MoriMover:
    """Calls from any thread; everything else on its own, which the first call starts."""

    def __init__(self, name: str, engine: MoriEngine, jobs: Jobs, plots: dict[int, Plot], limits: MoriLimits) -> None:
        self._engine = engine
        self._jobs = jobs
        self._reach = Reach(engine, plots, limits.redial_s)
        self._limits = limits
        self._busy: list[MoriLink] = []  # those with copies that wait
        self._under_way: list[MoriPart] = []
        self._unproven: list[MoriPart] = []
        self._moved_at = 0.0
        self._grace_until = 0.0
        self._thread = TurnThread(name, self._turn, self._patience, self._lingers, self._end)

    @property
    def is_full(self) -> bool:
        """Too many parts wait for a proof that may never come."""
        return len(self._unproven) >= UNPROVEN_MAX

    def add(self, link: MoriLink, job: CopyJob) -> None:
        self._thread.call(lambda: self._add(link, job))

    def sweep(self, link: MoriLink) -> None:
        """Forget the copies of `link` that have ended."""
        self._thread.call(lambda: self._sweep(link))

    def retire(self, link: MoriLink) -> None:
        """Its copies have ended; their parts in flight are still polled."""
        self._thread.call(lambda: self._retire(link))

    def stop(self, join_s: float) -> bool:
        """End the thread and mori's engine with it; False if that is not done after `join_s`."""
        return self._thread.stop(join_s)

    def _turn(self) -> None:
        if not self._thread.stopping:
            for link in list(self._busy):
                self._post_next(link)
        for part in list(self._under_way):
            self._look_at(part)

    def _lingers(self) -> bool:
        """Whether parts in flight may still take a moment."""
        if not self._grace_until:
            self._grace_until = time.monotonic() + GRACE_S
        return bool(self._under_way) and time.monotonic() < self._grace_until

    def _patience(self) -> float | None:
        """How long to sleep unless called; None forever."""
        waits = [self._wait_of(link) for link in self._busy if not self._thread.stopping]
        if self._under_way:
            waits.append(self._pause())
        return min((wait for wait in waits if wait is not None), default=None)

    def _pause(self) -> float:
        return min(max((time.monotonic() - self._moved_at) / 8, LOOK_S[0]), LOOK_S[1])

    def _wait_of(self, link: MoriLink) -> float | None:
        """Until the next part of `link` can be started; None while it waits for those in flight."""
        if not self._has_room(link):
            return None
        return max(0.0, link.held.again_at - time.monotonic()) if link.held is not None else 0.0

    def _has_room(self, link: MoriLink) -> bool:
        rows = link.held.rows if link.held is not None else 1
        return not link.parts or (link.parts < self._limits.window and link.rows + rows <= self._limits.rows_max)

    def _add(self, link: MoriLink, job: CopyJob) -> None:
        link.waiting.append(job)
        if link not in self._busy:
            self._busy.append(link)

    def _sweep(self, link: MoriLink) -> None:
        link.waiting = deque(job for job in link.waiting if not job.ended)
        if link.held is not None and link.held.job.ended:
            self._put_back(link)
        if not link.waiting and link.held is None and link in self._busy:
            self._busy.remove(link)

    def _retire(self, link: MoriLink) -> None:
        self._sweep(link)
        self._reach.leave(link)

    def _post_next(self, link: MoriLink) -> None:
        """Start one part of the copy that waits longest, if there is room."""
        self._sweep(link)
        while link.held is None and link.waiting:
            job = link.waiting[0]
            spans = self._jobs.begin(job)
            if spans is None:
                link.waiting.popleft()
            else:
                link.held = part_of(job, link, spans)
        if link.held is None:
            self._sweep(link)
        elif self._has_room(link) and link.held.again_at <= time.monotonic():
            self._post(link, link.held)

    def _post(self, link: MoriLink, part: MoriPart) -> None:
        self._moved_at = time.monotonic()
        try:
            part.session = self._reach.session(link, part.job.copy.local_region, part.job.copy.remote_region)
            if not part.rows:
                self._put_back(link)  # an empty copy only tests that the peer is reachable
                return
            if part.uid < 0:
                part.uid = self._engine.ticket(part.session)
        except MoriError as error:  # nothing was begun
            self._lose(link, Reason.UNREACHABLE, str(error))
            return
        outcome, words = self._begin(part)
        if outcome is MoriOutcome.FULL:
            self._hold(link, part, words)
        elif outcome is MoriOutcome.REFUSED:
            self._put_back(link, Reason.TRANSFER_FAILED, words)
        else:
            link.held = None
            link.parts += 1
            link.rows += part.rows
            self._under_way.append(part)
            if outcome is MoriOutcome.FAILED:  # some of it may be posted, without a tail that tells its end
                self._failed(part, words, rested=False)

    def _begin(self, part: MoriPart) -> tuple[MoriOutcome, str]:
        try:
            part.statuses.append(self._engine.read(part.session, part.here, part.there, part.sizes, part.uid))
        except MoriError as error:
            return MoriOutcome.FAILED, str(error)
        return self._outcome(part.statuses[-1], posting=True)

    def _hold(self, link: MoriLink, part: MoriPart, words: str) -> None:
        """mori's queue is full: try the same part again a little later, but not forever."""
        now = time.monotonic()
        if part.refused_at is None:
            part.refused_at = now
        waited_s = now - part.refused_at
        if waited_s >= self._limits.full_s:
            self._put_back(link, Reason.TRANSFER_TIMEOUT, f"no room for {self._limits.full_s} s: {words}")
        else:
            part.again_at = now + min(max(waited_s / 2, AGAIN_S[0]), AGAIN_S[1])

    def _put_back(self, link: MoriLink, reason: Reason | None = None, detail: str = "") -> None:
        """Give up the held part. It was not started, unless several queues took it and only the last was full."""
        part, link.held = link.held, None
        if part is None:
            return
        if part.statuses and not self._engine.in_order and part.refused_at is not None:
            self._unproven.append(part)
            self._jobs.abandon(part.job, reason or Reason.CANCELLED, detail)
        else:
            self._bury(part)
            self._jobs.part_ended(part.job, reason, detail)

    def _look_at(self, part: MoriPart) -> None:
        outcome, words = self._outcome(part.statuses[-1])
        if outcome is MoriOutcome.ARRIVED:
            self._take_away(part)
            self._bury(part)
            self._jobs.part_ended(part.job)
        elif outcome is not MoriOutcome.MOVING:
            self._failed(part, words, rested=self._engine.in_order)

    def _outcome(self, status: Any, posting: bool = False) -> tuple[MoriOutcome, str]:
        try:
            return self._engine.look(status, posting)
        except MoriError as error:
            return MoriOutcome.FAILED, str(error)

    def _failed(self, part: MoriPart, words: str, rested: bool) -> None:
        """The one place where failures of started reads become ours."""
        self._take_away(part)
        if rested:
            self._bury(part)
            self._jobs.part_ended(part.job, Reason.TRANSFER_FAILED, words)
        else:
            self._unproven.append(part)
            self._jobs.abandon(part.job, Reason.TRANSFER_FAILED, words)
        self._reach.give_up(part.link, words)
        self._lose(part.link, Reason.TRANSFER_FAILED, words)

    def _lose(self, link: MoriLink, reason: Reason, words: str) -> None:
        """Copies that wait for the peer fail now."""
        link.sessions.clear()
        self._put_back(link, reason, words)
        for job in link.waiting:
            self._jobs.fail(job, reason, words)
        self._sweep(link)

    def _take_away(self, part: MoriPart) -> None:
        self._moved_at = time.monotonic()
        self._under_way.remove(part)
        part.link.parts -= 1
        part.link.rows -= part.rows

    def _bury(self, part: MoriPart) -> None:
        for status in part.statuses:
            self._engine.bury(status)
        part.statuses.clear()

    def _end(self) -> None:
        """No queue pair is left afterwards, so no read can land."""
        rested = True
        try:
            self._engine.close()
        except MoriError as error:
            log.warning("[memory-kept] the engine could not be closed, so its memory stays in use: %s", error)
            rested = False
        held = [link.held for link in self._busy if link.held is not None]
        for part in [*self._under_way, *held, *self._unproven]:
            self._jobs.part_ended(part.job, Reason.CANCELLED, "the transport was closed", rested=rested)
        if rested:
            self._under_way.clear()
            self._unproven.clear()


BROKEN_MAX = 4096


class Reach:
    """The peers that one engine knows, and their sessions between two regions each, opened at first use."""

    def __init__(self, engine: MoriEngine, plots: dict[int, Plot], redial_s: float) -> None:
        self._engine = engine
        self._plots = plots
        self._redial_s = redial_s
        self._met: Counter[str] = Counter()  # links by engine
        self._broken: dict[str, str] = {}  # engines with which a read has failed, and how

    def session(self, link: MoriLink, here: int, there: int) -> Any:
        """The session of two regions; MoriError where the peer cannot be reached."""
        if link.far.key in self._broken:
            raise MoriError("session", f"broken for good until one of the two restarts: {self._broken[link.far.key]}")
        if time.monotonic() < link.shut_until:
            raise MoriError("session", f"the peer is not tried again for {self._redial_s} s: {link.problem}")
        try:
            return self._open(link, here, there)
        except MoriError as error:
            link.shut_until, link.problem = time.monotonic() + self._redial_s, str(error)
            raise

    def give_up(self, link: MoriLink, problem: str) -> None:
        """A read has failed."""
        while len(self._broken) >= BROKEN_MAX:
            self._broken.pop(next(iter(self._broken)))
        self._broken.setdefault(link.far.key, problem)

    def leave(self, link: MoriLink) -> None:
        """The peer is disconnected; mori forgets it when no other link needs it."""
        link.sessions.clear()
        if not link.met:
            return
        link.met = False
        self._met[link.far.key] -= 1
        if not self._met[link.far.key]:
            del self._met[link.far.key]
            try:
                self._engine.part(link.far)
            except MoriError as error:
                log.debug("%s", error)

    def _open(self, link: MoriLink, here: int, there: int) -> Any:
        session = link.sessions.get((here, there))
        if session is None or not self._engine.is_alive(session):
            if not link.met:
                self._engine.meet(link.far)
                link.met = True
                self._met[link.far.key] += 1
            session = self._engine.open(self._plots[here].desc, link.far.regions[there].desc)
        link.keep((here, there), session)
        return session
