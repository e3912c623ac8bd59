"""The thread that drives NIXL: posts parts, polls those in flight, and knows when each has come to rest.

Laws:
 - Only this thread calls NIXL's transfers; `post` copies inside the call on one host, which no other thread may wait
 for.
 - A part rests when NIXL says that it is over, and never because a caller stopped waiting: releasing a request does not
   stop it (reference/transports.md 2.6: late data overwrote every reused block). So a request is released only then.
 - A READ also rests when NIXL has given up the connection (its own process is the one that would write, and no longer
   listens), and a WRITE when the peer's process is known to be dead. All else stays unproven, counted and bounded.
 - At most `window` parts are in flight with one agent, including those that are no longer wanted.
 - Nothing busy-waits: with nothing in flight it sleeps until called; else it polls after an eighth of the time waited.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from kvbaton.protocol.errors import Reason
from kvbaton.transports.core.jobs import CopyJob, Jobs, TurnThread
from kvbaton.transports.core.transport import Direction, Spans
from kvbaton.transports.cuda.cuda_driver import CudaError, Gpu
from kvbaton.transports.nixl.nixl_agent import Agent, ListChoice, Lists, NixlEndpoint, NixlError, NixlPlace

log = logging.getLogger(__name__)

LOOK_S = (0.0001, 0.01)
"""Least and most between two looks; looking more often takes the core that moves the bytes."""

PROOF_S = (0.001, 1.0)
UNPROVEN_MAX = 256
GRACE_S = 1.0
"""How long what is under way may still take when the transport is closed. Ending NIXL under a read of a peer that is
stopped lets that peer's UCX abort its process when it goes on (UCX 1.23: "unexpected error: Endpoint timeout")."""


class NixlMover:
    """Calls from any thread; everything else on its own, which the first call starts."""

    def __init__(
        self, name: str, agent: Agent, jobs: Jobs, places: dict[int, NixlPlace], window: int, gpu: Gpu | None = None
    ) -> None:
        """`gpu`: the device whose memory is moved, if any."""
        self._gpu = gpu
        self._life = 0  # an event that is never recorded: waiting for it tells at once whether the device is lost
        self._agent = agent
        self._jobs = jobs
        self._window = window
        self._mine = Lists(agent, "", places)
        self._remotes: dict[str, NixlRemote] = {}
        self._busy: list[NixlLink] = []  # those with copies that wait
        self._under_way: list[NixlPart] = []
        self._unproven: list[NixlPart] = []
        self._moved_at = 0.0
        self._grace_until = 0.0
        self._thread = TurnThread(name, self._turn, self._patience, self._lingers, self._end, self._enter)

    @property
    def is_full(self) -> bool:
        """Too many parts wait for a proof that may never come."""
        return len(self._unproven) >= UNPROVEN_MAX

    def add(self, link: NixlLink, job: CopyJob) -> None:
        self._thread.call(lambda: self._add(link, job))

    def sweep(self, link: NixlLink) -> None:
        """Forget the copies of `link` that have ended."""
        self._thread.call(lambda: self._sweep(link))

    def retire(self, link: NixlLink) -> None:
        """Its copies have ended; the connection closes when nothing is in flight on it any more."""
        self._thread.call(lambda: self._retire(link))

    def stop(self, join_s: float) -> bool:
        """End the thread and NIXL with it; False if that is not done after `join_s`."""
        return self._thread.stop(join_s)

    def _enter(self) -> None:
        """UCX copies device memory in the context that is current where it is called."""
        try:
            if self._gpu is not None:
                self._gpu.enter()
                self._life = self._gpu.event()
        except CudaError as error:  # then NIXL will say what it cannot do
            log.warning("[device-fault] %s: %s", threading.current_thread().name, error)

    def _turn(self) -> None:
        if not self._thread.stopping:
            for link in list(self._busy):
                self._post_next(link)
        for part in list(self._under_way):
            self._look_at(part)
        for part in [part for part in self._unproven if part.remote.there.life.is_over()]:
            self._unproven.remove(part)
            self._jobs.part_ended(part.job)

    def _lingers(self) -> bool:
        """Whether parts in flight may still take a moment."""
        self._grace_until = self._grace_until or time.monotonic() + GRACE_S
        return bool(self._under_way) and time.monotonic() < self._grace_until

    def _patience(self) -> float | None:
        """How long to sleep unless called; None forever."""
        if self._thread.stopping:
            return LOOK_S[0]
        if any(link.remote is None or link.remote.parts < self._window for link in self._busy):
            return 0
        waited_s = (time.monotonic() - self._moved_at) / 8
        if self._under_way:
            return min(max(waited_s, LOOK_S[0]), LOOK_S[1])
        return min(max(waited_s, PROOF_S[0]), PROOF_S[1]) if self._unproven else None

    def _add(self, link: NixlLink, job: CopyJob) -> None:
        link.waiting.append(job)
        if link not in self._busy:
            self._busy.append(link)

    def _sweep(self, link: NixlLink) -> None:
        link.waiting = deque(job for job in link.waiting if not job.ended)
        if not link.waiting and link in self._busy:
            self._busy.remove(link)
            link.plan = None

    def _retire(self, link: NixlLink) -> None:
        self._sweep(link)
        if link.remote is not None:
            link.remote.links.discard(link)
            self._forget_unused(link.remote)

    def _post_next(self, link: NixlLink) -> None:
        """Start one part of the copy that waits longest, if the window has room."""
        if link.remote is not None and link.remote.parts >= self._window:
            return
        while link.waiting:
            job = link.waiting[0]
            spans = self._jobs.begin(job)
            if spans is not None:
                self._post(link, job, spans)
                return
            link.waiting.popleft()
        self._sweep(link)

    def _post(self, link: NixlLink, job: CopyJob, spans: Spans) -> None:
        self._moved_at = time.monotonic()
        try:
            remote = self._reach(link)
            request = self._request(link, remote, job, spans) if spans else 0
        except NixlError as error:  # nothing was begun
            reason = Reason.UNREACHABLE if link.remote is None else Reason.TRANSFER_FAILED
            self._jobs.part_ended(job, reason, str(error))
            if link.remote is not None and not link.remote.parts and not link.remote.lost:
                self._lose(link.remote, str(error))
            return
        if not spans:  # a copy of nothing: the peer was reached
            self._jobs.part_ended(job)
            return
        part = NixlPart(job, remote, request)
        remote.parts += 1
        self._under_way.append(part)
        try:
            over = self._agent.post(request)
        except NixlError as error:
            self._failed(part, error)
        else:
            if over:
                self._over(part)

    def _reach(self, link: NixlLink) -> NixlRemote:
        """The agent behind `link`, made known to NIXL at the first use."""
        if link.remote is None or link.remote.lost:
            there = link.there
            remote = self._remotes.get(there.agent)
            if remote is None:
                self._agent.add_remote(there.metadata)
                remote = NixlRemote(there, Lists(self._agent, there.agent, there.places))
                self._remotes[there.agent] = remote
            elif remote.there != there:
                # NIXL identifies agents by name, and would read with the old metadata into memory with a new layout.
                raise NixlError("connect", ValueError("copies of an older endpoint of this agent are still in flight"))
            remote.links.add(link)
            link.remote = remote
        return link.remote

    def _request(self, link: NixlLink, remote: NixlRemote, job: CopyJob, spans: Spans) -> int:
        with self._jobs:  # a cancel empties the parts
            parts = (spans, *job.parts)
        plan = plan_of(link, remote, job, parts, self._mine)
        low, plan.done = plan.done, plan.done + len(spans) // 3
        with (
            self._mine.select(plan.here, low, plan.done) as (local, local_at),
            remote.lists.select(plan.there, low, plan.done) as (far, far_at),
        ):
            return self._agent.request(job.copy.direction, local, local_at, far, far_at)

    def _look_at(self, part: NixlPart) -> None:
        try:
            over = self._agent.is_over(part.request)
        except NixlError as error:
            self._failed(part, error)
        else:
            if over:
                self._over(part)

    def _over(self, part: NixlPart) -> None:
        """NIXL is done with it. It was seen to say so for a device that this process has lost."""
        part.remote.reached = True
        self._release(part)
        try:
            if self._gpu is not None:
                self._gpu.wait(self._life)
        except CudaError as error:
            self._jobs.part_ended(part.job, Reason.TRANSFER_FAILED, str(error))
        else:
            self._jobs.part_ended(part.job)

    def _failed(self, part: NixlPart, error: NixlError) -> None:
        """The one place where NIXL's failures become ours."""
        # NIXL says that a transfer failed, not that it has stopped. With the connection gone a READ can no longer land,
        # because this process was to write it. For a WRITE, or for a READ on a live connection, nothing is known: it is
        # reported as not at rest, and kept until the peer's process is seen to be dead.
        remote = part.remote
        lost = error.disconnected or remote.lost  # the first to hear of it makes NIXL forget the agent for the others
        if lost and not remote.lost:
            self._lose(remote, str(error))
        self._release(part)
        reason = Reason.TRANSFER_FAILED if remote.reached else Reason.UNREACHABLE
        if lost and part.job.copy.direction is Direction.READ:
            self._jobs.part_ended(part.job, reason, str(error))
        else:
            self._unproven.append(part)
            self._jobs.abandon(part.job, reason, str(error))

    def _lose(self, remote: NixlRemote, detail: str) -> None:
        """The connection is gone: copies that wait for it fail now, and the next copy connects again."""
        remote.lost = True
        del self._remotes[remote.there.agent]
        for link in remote.links:
            for job in link.waiting:
                self._jobs.fail(job, Reason.TRANSFER_FAILED if remote.reached else Reason.UNREACHABLE, detail)
            self._sweep(link)
        self._drop(remote)

    def _release(self, part: NixlPart) -> None:
        self._moved_at = time.monotonic()
        self._under_way.remove(part)
        part.remote.parts -= 1
        try:
            self._agent.release(part.request)
        except NixlError as error:
            log.warning("[nixl-unreleased] a request could not be released: %s", error)
        self._forget_unused(part.remote)

    def _forget_unused(self, remote: NixlRemote) -> None:
        if not remote.links and not remote.parts and self._remotes.get(remote.there.agent) is remote:
            del self._remotes[remote.there.agent]
            self._drop(remote)

    def _drop(self, remote: NixlRemote) -> None:
        try:
            remote.lists.clear()
            self._agent.remove_remote(remote.there.agent)
        except NixlError as error:  # NIXL has forgotten it by itself
            log.debug("%s", error)

    def _end(self) -> None:
        """Nothing of NIXL is left in this process afterwards, so no READ can land; a WRITE may be with its target."""
        left, self._under_way = self._under_way, []
        for part in left:
            try:
                self._agent.release(part.request)
            except NixlError as error:
                log.warning("[nixl-unreleased] a request could not be released: %s", error)
        for remote in list(self._remotes.values()):
            self._drop(remote)
        self._mine.clear()
        self._agent.close()
        for part in [*left, *self._unproven]:
            reading = part.job.copy.direction is Direction.READ
            self._jobs.part_ended(part.job, Reason.CANCELLED, "the transport was closed", rested=reading)
        with contextlib.suppress(CudaError):  # of a lost device, with everything else of it
            if self._gpu is not None and self._life:
                self._gpu.drop_event(self._life)
        self._unproven.clear()


@dataclass(slots=True, eq=False)
class NixlRemote:
    """An agent that NIXL knows, and what is under way with it."""

    there: NixlEndpoint
    lists: Lists
    links: set[NixlLink] = field(default_factory=set)
    parts: int = 0
    lost: bool = False  # NIXL has given up the connection
    reached: bool = False  # something arrived, so there was a connection


@dataclass(slots=True, eq=False)
class NixlPlan:
    """How the parts of one copy, from the first that was begun with `remote`, are named to NIXL."""

    job: CopyJob
    remote: NixlRemote
    here: ListChoice
    there: ListChoice
    done: int = 0  # spans


@dataclass(slots=True, eq=False)
class NixlLink:
    """One peer as it was connected, and the copies that wait for it."""

    there: NixlEndpoint
    waiting: deque[CopyJob] = field(default_factory=deque)
    remote: NixlRemote | None = None
    plan: NixlPlan | None = None


@dataclass(slots=True, eq=False)
class NixlPart:
    """A request that NIXL has not ended."""

    job: CopyJob
    remote: NixlRemote
    request: int


def plan_of(link: NixlLink, remote: NixlRemote, job: CopyJob, parts: Sequence[Spans], mine: Lists) -> NixlPlan:
    """The plan of `job`, made when its first part begins; `parts` are those that have not begun yet."""
    plan = link.plan
    if plan is None or plan.job is not job or plan.remote is not remote:
        rows = np.concatenate([np.frombuffer(part, np.int64).reshape(-1, 3) for part in parts])
        here = mine.choose(job.copy.local_region, rows[:, 0], rows[:, 2])
        there = remote.lists.choose(job.copy.remote_region, rows[:, 1], rows[:, 2])
        plan = link.plan = NixlPlan(job, remote, here, there)
    return plan
