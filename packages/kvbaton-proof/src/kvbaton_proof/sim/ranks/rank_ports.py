"""Invariants of every transport behind a rank link, checked where the node drives it, against what the rank did.

Laws: a copy that was accepted ends once, and one that was not never does; a loan likewise. It counts as done only if
the rank's own data plane has done it, whatever became of the rank since. It is at rest only if that plane moves nothing
of it any more, and rests once. As many fences end as were begun, and what was let in before them is shut out then. No
more connections fail than were asked for.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from kvbaton.protocol.events import CopyEnded, CopyRested
from kvbaton.protocol.ids import JobId, PeerId
from kvbaton.ranks.rank_transport import RemoteTransport
from kvbaton.transports.core.transport import Copy, FenceEnded, Loan, Transport, TransportEvent
from kvbaton_proof.sim.promises import HANG, LEAK, WRONG, Broken
from kvbaton_proof.sim.ranks.rank_channel import SimCarrier
from kvbaton_proof.sim.world.sim_transport import SimTransport, read_endpoint
from kvbaton_proof.sim.world.world import InjectedFault

LATE_REPORT_S = 2.0
LATE_FENCE = 0.6  # where ranks report late at all: another fence may be begun meanwhile


class ReportFaults:
    """How a rank tells what its data planes do."""

    def __init__(self, twice: float = 0.0, late: float = 0.0, throws: float = 0.0) -> None:
        self.twice = twice
        self.late = late
        self.throws = throws  # having done what it was asked, or when asked what happened


class ReportingPlane:
    """A simulated data plane in its rank: what it did is kept for the checks, and told twice or late now and then."""

    def __init__(self, inner: SimTransport, carrier: SimCarrier, faults: ReportFaults) -> None:
        self.inner = inner
        self.faults = faults
        self.done: set[JobId] = set()
        self.cancelled: set[JobId] = set()
        self.strangers = 0
        self.mapped_bytes = 0
        self._carrier = carrier
        self._held: deque[TransportEvent] = deque()
        self._held_until = 0.0
        self._waker: Callable[[], None] = lambda: None

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    @property
    def refusals(self) -> Mapping[str, int]:
        return {"left": self.strangers} if self.strangers else {}

    def set_waker(self, waker: Callable[[], None]) -> None:
        self._waker = waker
        self.inner.set_waker(waker)

    def submit(self, copy: Copy) -> bool:
        if copy.job in self.cancelled:
            raise Broken(WRONG, f"{self.inner.me}: copy {copy.job} is begun after it was cancelled")
        self._maybe_throw()
        return self.inner.submit(copy)

    def connect(self, peer: PeerId, endpoint: bytes) -> None:
        self.inner.connect(peer, endpoint)
        self.mapped_bytes += 1

    def disconnect(self, peer: PeerId) -> None:
        self.inner.disconnect(peer)
        self.strangers += 1
        self._maybe_throw()

    def cancel(self, job: JobId) -> None:
        self.cancelled.add(job)
        self.inner.cancel(job)
        self._maybe_throw()

    def fence(self, peer: PeerId) -> None:
        self._maybe_throw()  # one that threw is not under way: see `Transport.fence`
        self.inner.fence(peer)

    def _maybe_throw(self) -> None:
        if self._carrier.chance(self.faults.throws):
            self._carrier.world.strike("rank_plane_threw", self._carrier.name)
            raise InjectedFault("the simulated library threw in its rank")

    def drain(self) -> Sequence[TransportEvent]:
        self._maybe_throw()
        for event in self.inner.drain():
            self._held.append(event)
            if isinstance(event, CopyEnded) and event.reason is None:
                self.done.add(event.job)
            late = LATE_FENCE if isinstance(event, FenceEnded) and self.faults.late else self.faults.late
            if self._carrier.chance(late):
                late_s = self._carrier.rng.uniform(0, LATE_REPORT_S)
                self._carrier.world.strike("rank_reports_late", self._carrier.name, lasts_s=late_s)
                self._held_until = self._carrier.world.now + late_s
                self._carrier.world.after(late_s, self._ring)
        if self._carrier.world.now < self._held_until:
            return ()
        told, self._held = list(self._held), deque()
        for event in told:
            if not isinstance(event, FenceEnded) and self._carrier.chance(self.faults.twice):
                self._carrier.world.faults["rank_reports_twice"] += 1
                self._carrier.world.after(self._carrier.rng.uniform(0, 1.0), partial(self._tell_again, event))
        return told

    def _tell_again(self, event: TransportEvent) -> None:
        self._held.append(event)
        self._ring()

    def _ring(self) -> None:
        self._waker()


class WatchedPort:
    """A rank's data plane as the node drives it: `RemoteTransport`, or the plane itself where the rank is near."""

    def __init__(self, name: str, inner: Transport, plane: ReportingPlane) -> None:
        self._name = name
        self._inner = inner
        self._plane = plane
        self._open: set[JobId] = set()
        self._loans: set[JobId] = set()
        self._restless: set[JobId] = set()
        self._cancelled: set[JobId] = set()
        self._connected: set[PeerId] = set()
        self._opening: Counter[PeerId] = Counter()  # how often it was asked for, less what failed
        self._invited: dict[PeerId, set[int]] = {}  # generations of endpoints that were told
        self._condemned: dict[PeerId, deque[set[int]]] = {}  # those that each fence under way shuts out

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def connect(self, peer: PeerId, endpoint: bytes) -> None:
        self._inner.connect(peer, endpoint)
        self._connected.add(peer)
        self._opening[peer] += 1

    def disconnect(self, peer: PeerId) -> None:
        self._inner.disconnect(peer)
        self._connected.discard(peer)

    def endpoint(self, peer: PeerId) -> bytes:
        found = self._inner.endpoint(peer)
        self._invited.setdefault(peer, set()).add(read_endpoint(found)[1])
        return found

    def submit(self, copy: Copy) -> bool:
        if copy.job in self._open or copy.job in self._restless:
            raise Broken(WRONG, f"{self._name}: job {copy.job} is begun again before it has ended")
        accepted = self._inner.submit(copy)
        if accepted:
            self._open.add(copy.job)
        return accepted

    def cancel(self, job: JobId) -> None:
        inner = self._inner
        if isinstance(inner, RemoteTransport) and inner._jobs.find(job) is not None:
            self._cancelled.add(job)
        inner.cancel(job)

    def lend(self, loan: Loan) -> None:
        self._inner.lend(loan)  # type: ignore[attr-defined]
        self._loans.add(loan.job)

    def fence(self, peer: PeerId) -> None:
        self._inner.fence(peer)
        self._condemned.setdefault(peer, deque()).append(self._invited.pop(peer, set()))

    def drain(self) -> Sequence[TransportEvent]:
        events = self._inner.drain()
        for event in events:
            if isinstance(event, CopyEnded):
                self._note_end(event)
            elif isinstance(event, CopyRested):
                self._note_rest(event.job)
            elif isinstance(event, FenceEnded):
                self._note_fence(event.peer)
            else:
                self._note_unopened(event.peer)
        return events

    def _note_end(self, event: CopyEnded) -> None:
        job = event.job
        if job in self._loans:
            self._loans.discard(job)
            lent = self._plane.inner._loans
            if self._plane.inner.alive and (job in lent._loans or job in lent._closing):
                raise Broken(WRONG, f"{self._name}: loan {job} is said to be over, and its rank still serves it")
            return
        if job not in self._open:
            raise Broken(WRONG, f"{self._name}: copy {job} ended twice, or was never accepted")
        self._open.discard(job)
        if event.reason is None and job not in self._plane.done:
            raise Broken(WRONG, f"{self._name}: copy {job} counts as done, and its rank has not done it")
        if not event.at_rest:
            self._restless.add(job)
        elif self._moves(job):
            raise Broken(WRONG, f"{self._name}: copy {job} is said to be at rest, and its rank still moves it")

    def _note_rest(self, job: JobId) -> None:
        if job not in self._restless:
            raise Broken(WRONG, f"{self._name}: copy {job} rests twice, or had never ended")
        self._restless.discard(job)
        if self._moves(job):
            raise Broken(WRONG, f"{self._name}: copy {job} is said to rest, and its rank still moves it")

    def _note_fence(self, peer: PeerId) -> None:
        under_way = self._condemned.get(peer)
        if not under_way:
            raise Broken(WRONG, f"{self._name}: a fence of {peer} ended that nobody had begun")
        if under_way.popleft() & self._plane.inner._admitted.get(peer, set()):
            raise Broken(
                WRONG, f"{self._name}: a fence of {peer} has ended, and who was let in before it can still write"
            )

    def _note_unopened(self, peer: PeerId) -> None:
        self._opening[peer] -= 1
        if self._opening[peer] < 0:
            raise Broken(WRONG, f"{self._name}: {peer} could not be reached, and nobody had asked for that")

    def _moves(self, job: JobId) -> bool:
        return job in self._plane.inner._jobs

    def check_at_rest(self) -> None:
        """Nothing that was begun is still to end."""
        if self._open or self._restless:
            raise Broken(HANG, f"{self._name}: copies {sorted(self._open | self._restless)[:3]} never ended")
        if not self._cancelled <= self._plane.cancelled:
            raise Broken(HANG, f"{self._name}: a copy was cancelled, and its rank was never told")
        kept = set(self._plane.inner._links) - self._connected
        if kept:
            raise Broken(LEAK, f"{self._name}: still connected to {sorted(map(str, kept))[:3]}, who was let go")
        if self._loans:
            raise Broken(LEAK, f"{self._name}: loans {sorted(self._loans)[:3]} never ended")
        fenced = [str(peer) for peer, under_way in self._condemned.items() if under_way]
        if fenced:
            raise Broken(HANG, f"{self._name}: fences of {fenced[:3]} never ended")
