"""The shell that all transports share: from `submit` to `close`, with the laws of `transport` kept in one place.

A transport says how it moves bytes, by the hooks at the end of `PlaneShell`; when a copy may start, how its end is
reported, and in which order things close is decided here.

Laws:
 - `submit` checks a copy in one order: room, peer, direction, spans. A copy refused after it was accepted still ends
   by `CopyEnded`. A copy that waits for a device waits at the gate; its peer may be lost meanwhile.
 - A peer has one link. The same endpoint again changes nothing; another one ends what was in flight on the old link.
   So a copy that has not ended belongs to the link it was accepted for.
 - Access is revoked from a peer before its copies end, so that nothing new can start in between.
 - `close` accepts nothing more, ends copies, stops threads, and only then releases memory: what `_halt` could not
   stop may still touch it.
"""

from __future__ import annotations

import queue
import threading
from array import array
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Generic, Protocol, TypeVar

from kvbaton.protocol.errors import Reason
from kvbaton.protocol.ids import JobId, PeerId, owner_of
from kvbaton.transports.core.jobs import CopyJob, Jobs
from kvbaton.transports.core.loans import Loans
from kvbaton.transports.core.mover import choose_mover
from kvbaton.transports.core.transport import (
    Capabilities,
    Copy,
    CopyEnded,
    DeviceEvent,
    Direction,
    Loan,
    PageTable,
    Spans,
    TransportEvent,
)
from kvbaton.transports.net.connection_handshake import SecretRing
from kvbaton.transports.net.socket_loop import SocketLoop

CLOSED = Reason.CANCELLED, "the transport was closed"
NEW_ENDPOINT = Reason.TRANSFER_FAILED, "the peer has a new endpoint"

LinkT = TypeVar("LinkT", bound="PeerLink")
LinkT_contra = TypeVar("LinkT_contra", contravariant=True)


class PeerLink(Protocol):
    """How one peer is reached."""

    @property
    def there(self) -> Any:
        """The contents of its endpoint; two that are equal lead to the same place."""


class Memory(Protocol):
    """The registered memory, by region."""

    def get(self, region: int) -> Any: ...

    def clear(self) -> None: ...


class PlaneShell(Generic[LinkT]):
    """See `base.Transport`. A subclass has `register`, `endpoint` and `connect`, and the hooks."""

    capabilities: Capabilities
    _memory: Memory

    def __init__(self, me: PeerId, copies_max: int, pure_python: bool = False) -> None:
        self._me = me
        self._mover = choose_mover(pure_python)
        self._jobs = Jobs(copies_max)
        self._links: dict[PeerId, LinkT] = {}
        self._gate = DeviceEventWait(f"kvbaton-{self.capabilities.name}-gate-{me}")

    def disconnect(self, peer: PeerId) -> None:
        with self._jobs:
            self._turn_away(peer)
            self._forget(peer, Reason.PEER_GONE, "disconnected")

    def fence(self, peer: PeerId) -> None:
        raise NotImplementedError(f"{self.capabilities.name} cannot fence: see capabilities.can_fence")

    def submit(self, copy: Copy) -> bool:
        with self._jobs:
            job = self._jobs.accept(copy) if self._has_room() else None
            if job is None:
                return False
            link = self._links.get(copy.peer)
            if link is None:
                self._jobs.fail(job, Reason.PEER_UNKNOWN, f"{copy.peer} is not connected")
                return True
            refusal = self._refusal(copy, link)
            if refusal is not None:
                self._jobs.fail(job, *refusal)
                return True
            try:
                job.parts = self._cut(copy, link)
            except ValueError as error:
                self._jobs.fail(job, Reason.BAD_SPAN, str(error))
                return True
            if copy.after is None:
                self._start(job, link)
            else:
                self._gate.wait(self._event(copy.after), partial(self._released, job, link))
        return True

    def cancel(self, job: JobId) -> None:
        with self._jobs:
            found = self._jobs.find(job)
            if found is not None:
                self._stop(found, self._links.get(found.copy.peer), Reason.CANCELLED, "")

    def drain(self) -> Sequence[TransportEvent]:
        return self._jobs.drain()

    def set_waker(self, waker: Callable[[], None]) -> None:
        self._jobs.set_waker(waker)

    def close(self) -> None:
        if not self._jobs.close():
            return
        # The order is the law: no new copies, then no copies, then no threads, then no memory. A device that hangs
        # keeps the gate's daemon thread and nothing else, so that is not waited for.
        with self._jobs:
            self._wind_up()
        self._gate.close(0)
        halted = self._halt()
        for job in self._jobs.of_peer():  # no thread is left that would end them
            self._jobs.abandon(job, *CLOSED)
        self._links.clear()
        if halted:
            self._memory.clear()

    # --- for subclasses

    def _link(self, peer: PeerId, there: object, make: Callable[[], LinkT]) -> None:
        """`peer` is reached by the result of `make`, unless it already is, by the same endpoint."""
        with self._jobs:
            old = self._links.get(peer)
            if old is None or old.there != there:
                self._forget(peer, *NEW_ENDPOINT)
                self._links[peer] = make()

    def _forget(self, peer: PeerId, reason: Reason, detail: str) -> None:
        """End the copies with `peer`, and its link. The lock is held."""
        # Copies end before the link: `_stop` needs it to reach what is in flight. Copies that are not at rest outlive
        # it, and end by the thread that still carries them.
        link = self._end_copies(peer, reason, detail)
        if link is not None:
            del self._links[peer]
            self._retire(link, detail)

    def _end_copies(self, peer: PeerId, reason: Reason, detail: str) -> LinkT | None:
        link = self._links.get(peer)
        for job in self._jobs.of_peer(peer):
            self._stop(job, link, reason, detail)
        return link

    def _total(self, copy: Copy, remote_bytes: int | None) -> int:
        """The bytes of a copy that lies wholly inside both memories; ValueError for any other."""
        local_bytes = self._local_bytes(copy.local_region)
        if local_bytes is None or remote_bytes is None:
            raise ValueError(f"region {copy.local_region} here or {copy.remote_region} there is not registered")
        return self._mover.check_spans(copy.spans, 3, local_bytes, remote_bytes)

    def _released(self, job: CopyJob, link: LinkT, problem: str) -> None:
        """The device event that `job` waited for has happened, or has failed."""
        with self._jobs:
            if problem:
                self._jobs.fail(job, Reason.TRANSFER_FAILED, problem)
            elif not job.ended:
                self._start(job, link)

    # --- hooks; except in `_halt` the lock is held

    def _local_bytes(self, region: int) -> int | None:
        memory = self._memory.get(region)
        return None if memory is None else int(memory.nbytes)

    def _has_room(self) -> bool:
        """Beyond the bound on accepted copies."""
        return True

    def _refusal(self, copy: Copy, link: LinkT) -> tuple[Reason, str] | None:
        """Why a copy cannot even start."""
        if copy.direction is Direction.WRITE and not self.capabilities.can_write:
            return Reason.NO_TRANSPORT, f"{self.capabilities.name} does not support WRITE: the receiver reads"
        return None

    def _cut(self, copy: Copy, link: LinkT) -> deque[Spans]:
        """The parts of a copy, or none yet if `_start` divides it; ValueError for one outside either memory."""
        if self._local_bytes(copy.local_region) is None:
            raise ValueError(f"region {copy.local_region} is not registered")
        return deque()

    def _event(self, event: DeviceEvent) -> DeviceEvent:
        """What the gate waits for."""
        return event

    def _start(self, job: CopyJob, link: LinkT) -> None:
        """Start a copy: it was checked, and its device is done."""
        raise NotImplementedError

    def _stop(self, job: CopyJob, link: LinkT | None, reason: Reason, detail: str) -> None:
        """End a copy as soon as it can be ended truthfully."""
        self._jobs.fail(job, reason, detail)

    def _turn_away(self, peer: PeerId) -> None:
        """Let `peer` start nothing more here."""

    def _retire(self, link: LinkT, detail: str) -> None:
        """Its copies were stopped, and no more follow."""

    def _wind_up(self) -> None:
        """Stop all copies, since the transport is closed."""
        for peer in list(self._links):
            self._forget(peer, *CLOSED)

    def _halt(self) -> bool:
        """Stop the threads, in bounded time; False where something may still touch memory."""
        raise NotImplementedError


def at_least_one(parts: deque[Spans]) -> deque[Spans]:
    """An empty copy has one part as well, which ends when the peer was reached: the protocol probes with it."""
    return parts or deque([array("q")])


class AdmittingShell(PlaneShell[LinkT]):
    """A transport that gives a peer all of its memory, once something of it was lent to that peer, and not before."""

    def __init__(self, me: PeerId, copies_max: int, pure_python: bool = False) -> None:
        super().__init__(me, copies_max, pure_python)
        self._lent: dict[JobId, PeerId | None] = {}  # loans that stand; to whom, if for reading
        self._parting: set[PeerId] = set()  # engines that were turned away, and admitted again while loans stand

    def lay_out(self, tables: Sequence[PageTable]) -> None:
        """Where blocks are is of no use here: it is all or nothing."""

    def lend(self, loan: Loan) -> None:
        """Of any block: what it opens cannot be closed again, so its end says only that it was revoked."""
        reads = loan.direction is Direction.READ
        with self._jobs:
            self._lent[loan.job] = loan.peer if reads else None
            if reads:
                self._parting.discard(loan.peer)
                self._admit(loan.peer)

    def cancel(self, job: JobId) -> None:
        with self._jobs:
            if job in self._lent:
                engine = self._lent.pop(job)
                if engine in self._parting and engine not in self._lent.values():
                    self._parting.discard(engine)
                    self._dismiss(engine)
                self._jobs.loan_ended(CopyEnded(job, Reason.CANCELLED))
                return
        super().cancel(job)

    def _wind_up(self) -> None:
        super()._wind_up()
        for job in list(self._lent):
            self.cancel(job)

    def _admit_again(self, peer: PeerId) -> None:
        """A rank was turned away. Loans to its engine that stand are not made anew when it pairs again, and other ranks
        of it may not have come yet; when they have ended, it needs a new one. The lock is held."""
        engine = owner_of(peer)
        if engine in self._lent.values():
            self._parting.add(engine)
            self._admit(engine)

    def _admit(self, engine: PeerId) -> None:
        """All ranks of that engine may have the memory from now on. The lock is held."""
        raise NotImplementedError

    def _dismiss(self, engine: PeerId) -> None:
        """Ranks of that engine that come from now on wait. The lock is held."""
        raise NotImplementedError


class Driver(Protocol[LinkT_contra]):
    """The thread that drives a library."""

    @property
    def is_full(self) -> bool: ...

    def add(self, link: LinkT_contra, job: CopyJob) -> None: ...

    def sweep(self, link: LinkT_contra) -> None: ...

    def retire(self, link: LinkT_contra) -> None: ...

    def stop(self, join_s: float) -> bool: ...


class DrivenShell(PlaneShell[LinkT]):
    """A transport over a library that cannot cancel: an abandoned copy ends now, and rests when the library says so."""

    _driver: Driver[LinkT]
    _close_s: float

    def cancel(self, job: JobId) -> None:
        """It ends now. Bytes in flight still land; `CopyRested` says when they have."""
        with self._jobs:
            found = self._jobs.find(job)
            super().cancel(job)
            link = self._links.get(found.copy.peer) if found is not None else None
        if link is not None:
            self._driver.sweep(link)

    def _has_room(self) -> bool:
        return not self._driver.is_full

    def _start(self, job: CopyJob, link: LinkT) -> None:
        self._driver.add(link, job)

    def _stop(self, job: CopyJob, link: LinkT | None, reason: Reason, detail: str) -> None:
        self._jobs.abandon(job, reason, detail)

    def _retire(self, link: LinkT, detail: str) -> None:
        self._driver.retire(link)

    def _wind_up(self) -> None:
        # Not abandoned: the driver gives what is in flight a moment, after which it ends at rest.
        for job in self._jobs.of_peer():
            self._jobs.fail(job, *CLOSED)

    def _halt(self) -> bool:
        """A stuck library keeps its memory registered, and referenced."""
        return self._driver.stop(self._close_s)


class Server(Protocol):
    """The listening side of a transport, on some loops."""

    @property
    def keyring(self) -> SecretRing: ...

    @property
    def refusals(self) -> Mapping[str, int]: ...

    def shut_out(self, peer: PeerId, index: int) -> None: ...


class ServingShell(PlaneShell[LinkT]):
    """A transport that serves its memory itself: it lends blocks, and can shut a peer out."""

    _loops: list[SocketLoop]
    _loans: Loans
    _server: Server

    @property
    def refusals(self) -> Mapping[str, int]:
        """Refused connections; see `refusals.Cause`."""
        return self._server.refusals

    def register(self, region: int, memory: Any) -> None:
        """It must stay allocated until `close`."""
        self._memory.add(region, memory)  # type: ignore[attr-defined]  # which raises for memory of another kind
        self._loans.add_region(region, memory.nbytes)

    def lay_out(self, tables: Sequence[PageTable]) -> None:
        self._loans.lay_out(tables)

    def lend(self, loan: Loan) -> None:
        self._loans.lend(loan)

    def cancel(self, job: JobId) -> None:
        """A READ rests within one turn of a loop. A WRITE ends now; `CopyRested` follows if it was in flight. A loan is
        revoked."""
        if not self._loans.take_back(job):
            super().cancel(job)

    def disconnect(self, peer: PeerId) -> None:
        super().disconnect(peer)
        self._loans.forget(peer)
        self._shut_out(peer, lambda: None)

    def _turn_away(self, peer: PeerId) -> None:
        self._server.keyring.revoke(peer)

    def _end(self, job: CopyJob, reason: Reason, detail: str) -> None:
        """A WRITE lands at the peer: it ends without waiting for it, and rests when the peer says so."""
        end = self._jobs.abandon if job.copy.direction is Direction.WRITE else self._jobs.fail
        end(job, reason, detail)

    def _shut_out(self, peer: PeerId, then: Callable[[], None]) -> None:
        """Close what is served to `peer`, whose secret was revoked, then call `then`, on a loop.

        Each loop closes its own connections, so once all have, no byte of that peer can be in flight into memory.
        """
        waiting = set(range(len(self._loops)))

        def on_loop(index: int) -> None:
            self._server.shut_out(peer, index)
            with self._jobs:
                waiting.discard(index)
                last = not waiting
            if last:
                then()

        for index, loop in enumerate(self._loops):
            loop.call(partial(on_loop, index))


class DeviceEventWait:
    """Waits for device events on its own thread, started by the first, so that no mover ever waits for one."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._queue: queue.SimpleQueue[tuple[DeviceEvent, Callable[[str], None]] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def wait(self, event: DeviceEvent, then: Callable[[str], None]) -> None:
        """Call `then` with "" once the device is done, or with the error."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
            self._thread.start()
        self._queue.put((event, then))

    def close(self, join_s: float) -> None:
        if self._thread is not None:
            self._queue.put(None)
            self._thread.join(join_s)  # bounded: a device that hangs keeps a daemon thread, nothing else

    def _run(self) -> None:
        while (item := self._queue.get()) is not None:
            event, then = item
            try:
                event.synchronize()
            except Exception as error:  # noqa: BLE001 - a device library's own errors; they fail one copy
                then(f"the device event failed: {error!r}")
            else:
                then("")
