"""D's side of cuda: how a peer's handles come here, who waits for them, and the memory that they open.

Law: memory is opened and closed by the mover only, opened by the first copy that needs it and closed when the peer was
forgotten and the last copy out of it has ended. A region lies wholly inside an allocation that was passed.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import msgspec

from kvbaton.protocol.errors import ProtocolError, Reason
from kvbaton.protocol.ids import PeerId
from kvbaton.transports.auth import greet
from kvbaton.transports.cuda_door import LIFE, TABLE_BYTES_MAX, CudaEndpoint, Shared
from kvbaton.transports.cuda_driver import HANDLE_BYTES, Gpu
from kvbaton.transports.jobs import Job, Jobs
from kvbaton.transports.loop import Loop
from kvbaton.transports.shm_attach import dial
from kvbaton.transports.shm_door import LENGTH
from kvbaton.transports.wire import Script, Wire, take


class Remote:
    """The memory of one peer, as far as it was told and opened."""

    def __init__(self, shared: Shared) -> None:
        """ValueError for places that lie outside their allocations."""
        for place in shared.places:
            if not 0 <= place.allocation < len(shared.allocations) or place.size < 1:
                raise ValueError(f"region {place.region} is in no allocation that was passed")
            if not 0 <= place.offset <= shared.allocations[place.allocation].size - place.size:
                raise ValueError(f"region {place.region} is not inside its allocation")
        if any(len(allocation.handle) != HANDLE_BYTES for allocation in shared.allocations):
            raise ValueError(f"a handle has {HANDLE_BYTES} bytes")
        self._shared = shared
        self._places = {place.region: place for place in shared.places}
        self._bases: dict[int, int] = {}

    def size_of(self, region: int) -> int | None:
        place = self._places.get(region)
        return None if place is None else place.size

    def address_of(self, region: int, gpu: Gpu) -> int:
        """Where a known region begins in this process; opens its allocation. CudaError. By the mover."""
        place = self._places[region]
        if place.allocation not in self._bases:
            allocation = self._shared.allocations[place.allocation]
            ours = self._shared.life == LIFE
            self._bases[place.allocation] = allocation.base if ours else gpu.open(allocation.handle)
        return self._bases[place.allocation] + place.offset

    def close(self, gpu: Gpu) -> None:
        """By the mover, when no copy out of it is under way."""
        bases, self._bases = self._bases, {}
        if self._shared.life != LIFE:
            for base in bases.values():
                gpu.close(base)


class CudaAttachment:
    """How one peer is reached, and the copies that wait for its handles. Dialled at once, and again when needed."""

    def __init__(self, me: PeerId, there: CudaEndpoint, loop: Loop, jobs: Jobs, deadline_s: float) -> None:
        self.there = there
        self.remote: Remote | None = None
        self._me = me
        self._loop = loop
        self._jobs = jobs
        self._deadline_s = deadline_s
        self._dialling = False
        self._waiting: deque[tuple[Job, Callable[[Remote], None]]] = deque()

    def use(self, job: Job, then: Callable[[Remote], None]) -> None:
        """Call `then` with the peer's memory, now or on the loop; or fail the job. The caller holds the lock."""
        if self.remote is not None:
            then(self.remote)
            return
        self._waiting.append((job, then))
        self.dial()

    def dial(self) -> None:
        """The caller holds the lock."""
        if not self._dialling:
            self._dialling = True
            self._loop.call(self._open)

    def remove(self, job: Job) -> None:
        """Forget a job that has failed while it waited. The caller holds the lock."""
        self._waiting = deque(item for item in self._waiting if item[0] is not job)

    def _open(self) -> None:
        try:
            sock = dial(self.there.name)
        except (OSError, ProtocolError) as error:
            self._done(None, str(error))
            return
        limit = self._loop.later(self._deadline_s, lambda: wire.close(f"no answer within {self._deadline_s} s"))

        def closed(detail: str, _by_peer: bool) -> None:
            limit.cancel()
            self._done(None, detail)

        wire = Wire(self._loop, sock, closed)
        wire.open(self._talk(wire))

    def _talk(self, wire: Wire) -> Script:
        """Prove ourselves, receive the handles."""
        yield from greet(wire, self.there.secret, self._me, self.there.owner, 0)
        head = yield from take(LENGTH.size)
        table = yield from take(min(LENGTH.unpack(head)[0], TABLE_BYTES_MAX))
        try:
            remote = Remote(msgspec.msgpack.decode(table, type=Shared))
        except (msgspec.MsgspecError, ValueError, RecursionError) as error:
            raise ProtocolError(Reason.BAD_MESSAGE, f"regions that cannot be opened: {error}") from None
        self._done(remote, "")

    def _done(self, remote: Remote | None, detail: str) -> None:
        """The first word on a dial counts; the connection that closes after a success says nothing new."""
        with self._jobs:
            if not self._dialling:
                return
            self.remote, self._dialling = remote, False
            waiting, self._waiting = self._waiting, deque()
            problem = f"cannot reach the memory of {self.there.owner}: {detail}"
            for job, then in waiting:
                if remote is None:
                    self._jobs.fail(job, Reason.UNREACHABLE, problem)
                else:
                    then(remote)
