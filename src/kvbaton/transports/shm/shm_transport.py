"""shm: READ from another process of this host, at the speed of memcpy. The receiver copies (rule 16).

P's memory is a sealed memfd (`shared_memory.allocate`); D maps it read-only and its mover threads copy, with the GIL
released. P takes no part once its descriptors have been passed and need not even be alive: a mapping outlives its
process. A peer cannot be shut out of what it has mapped, which is why commits are verified against epochs and why
nothing is written. It gets the descriptors when something is lent to it for the first time, and waits for that on the
line (`region_listener`): who has only greeted has no memory.

Law: only movers touch memory, and a copy ends when its last mover has finished with it.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Mapping
from functools import partial

import msgspec

from kvbaton.protocol.errors import Reason
from kvbaton.protocol.ids import PeerId
from kvbaton.transports.core.jobs import CopyJob, Jobs, cut
from kvbaton.transports.core.mover import Mover
from kvbaton.transports.core.shared_memory import RegisteredMemory, host_identity, region_of
from kvbaton.transports.core.shell import AdmittingShell
from kvbaton.transports.core.transport import Capabilities
from kvbaton.transports.local.region_listener import Attachment, Mapped, RegionListener, ShmEndpoint, local_endpoint
from kvbaton.transports.net.socket_loop import SocketLoop

CLOSE_S = 2.0
PART_BYTES = range(512 << 10, 16 << 20)
"""Smaller copies are not split: waking a second thread costs as much as copying this."""

CAPABILITIES = Capabilities(
    name="shm", one_sided=True, can_write=False, can_fence=False, cancels=True, same_host=True, admits=True
)


class ShmConfig(msgspec.Struct, frozen=True):
    threads: int = 2  # that copy; one fills most of the memory bandwidth of two cores, two all of it
    copies_max: int = 1024
    dial_deadline_s: float = 5.0
    pure_python: bool = False


class ShmTransport(AdmittingShell[Attachment]):
    """See `base.Transport`. Threads: one for descriptors, `threads` that copy, one more to wait for devices."""

    capabilities = CAPABILITIES
    _memory: RegisteredMemory

    def __init__(self, me: PeerId, config: ShmConfig | None = None) -> None:
        self._config = config or ShmConfig()
        super().__init__(me, self._config.copies_max, self._config.pure_python)
        self._memory = RegisteredMemory()
        self._loop = SocketLoop(f"kvbaton-shm-door-{me}")
        self._door = RegionListener(me, self._loop, self._config.dial_deadline_s)
        self._movers = Movers(f"kvbaton-shm-{me}", self._mover, self._jobs, self._memory, self._config.threads)

    @property
    def refusals(self) -> Mapping[str, int]:
        """Refused connections; see `refusals.Cause`."""
        return self._door.refusals

    def register(self, region: int, memory: memoryview) -> None:
        """Only memory of `memory.allocate` can be shared; from now on no process can map it for writing."""
        found = region_of(memory)
        if found is None:
            raise ValueError(f"region {region}: shm shares only memory that transports.memory allocated or adopted")
        self._memory.add(region, memory)
        self._door.add(region, found[1], memory.nbytes, found[0])

    def endpoint(self, peer: PeerId) -> bytes:
        """Listens from the first call on. The same until `peer` is disconnected, then a new one."""
        there = ShmEndpoint(self._me, host_identity(), self._door.listen(), self._door.keyring.mint(peer))
        return msgspec.msgpack.encode(there)

    def connect(self, peer: PeerId, endpoint: bytes) -> None:
        """Maps the peer's memory as soon as it may, in the background, so that the mapping exists if the peer dies."""
        there = local_endpoint(ShmEndpoint, "shm", peer, endpoint)

        def attach() -> Attachment:
            made = Attachment(self._me, there, self._loop, self._jobs, self._config.dial_deadline_s)
            made.dial()
            return made

        self._link(peer, there, attach)

    def _turn_away(self, peer: PeerId) -> None:
        """Memory that `peer` has already mapped it keeps until it unmaps it; its old endpoint gives it nothing new."""
        self._door.revoke(peer)
        self._admit_again(peer)

    def _admit(self, engine: PeerId) -> None:
        self._door.admit(engine)

    def _dismiss(self, engine: PeerId) -> None:
        self._door.dismiss(engine)

    def _start(self, job: CopyJob, link: Attachment) -> None:
        link.use(job, partial(self._plan, job))

    def _plan(self, job: CopyJob, mapped: Mapped) -> None:
        """Check the whole copy against both memories, then start it."""
        copy = job.copy
        source = mapped.get(copy.remote_region)
        try:
            total = self._total(copy, None if source is None else source.nbytes)
        except ValueError as error:
            self._jobs.fail(job, Reason.BAD_SPAN, str(error))
            return
        assert source is not None  # or it had no total
        job.parts = cut(copy.spans, total, self._config.threads, PART_BYTES, len(copy.spans))
        self._movers.add(job, source)
        self._jobs.settle(job)

    def _stop(self, job: CopyJob, link: Attachment | None, reason: Reason, detail: str) -> None:
        if link is not None:
            link.remove(job)
        super()._stop(job, link, reason, detail)

    def _halt(self) -> bool:
        self._movers.close(CLOSE_S)
        self._loop.stop(CLOSE_S)
        return True


class Movers:
    """Threads that copy, started by the first part; each takes the next part of whichever copy is due.

    Law: a mover holds a part from `begin` to `part_ended` and touches no memory outside that time.
    """

    def __init__(self, name: str, mover: Mover, jobs: Jobs, memory: RegisteredMemory, threads: int) -> None:
        self._name = name
        self._mover = mover
        self._jobs = jobs
        self._memory = memory
        self._due: queue.SimpleQueue[tuple[CopyJob, memoryview] | None] = queue.SimpleQueue()
        self._threads_max = threads
        self._threads: list[threading.Thread] = []

    def add(self, job: CopyJob, source: memoryview) -> None:
        """Copy every part of `job` out of `source`. The caller holds the lock of the jobs."""
        while len(self._threads) < self._threads_max:
            thread = threading.Thread(target=self._run, name=f"{self._name}-{len(self._threads)}", daemon=True)
            self._threads.append(thread)
            thread.start()
        for _ in range(len(job.parts)):
            self._due.put((job, source))

    def close(self, join_s: float) -> bool:
        """End the threads; False if one was still busy after `join_s`."""
        for _ in self._threads:
            self._due.put(None)
        for thread in self._threads:
            thread.join(join_s)
        return not any(thread.is_alive() for thread in self._threads)

    def _run(self) -> None:
        while (due := self._due.get()) is not None:
            self._move(*due)
            del due  # otherwise an idle thread would keep the last peer's memory mapped

    def _move(self, job: CopyJob, source: memoryview) -> None:
        spans = self._jobs.begin(job)
        target = self._memory.get(job.copy.local_region)
        if spans is None:
            return
        try:
            if target is None:
                raise ValueError(f"region {job.copy.local_region} is not registered")
            self._mover.copy_spans(target, source, spans, False, 0, len(spans) // 3, job.halt)
        except (ValueError, BufferError) as error:
            self._jobs.part_ended(job, Reason.BAD_SPAN, str(error))
        else:
            self._jobs.part_ended(job)
