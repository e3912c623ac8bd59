"""Data planes in virtual time, over real bytes. They can be slow, fail half-way, stall, and land late.

One class plays every kind by its capabilities: shared memory (reader copies, survives the source's death), sockets
(both ways, fenced by closing, only what is lent), and one-sided hardware that cannot cancel (a copy that was given up
still lands).
`kvbaton.testing.check_transport` runs on it as on the real ones.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import msgspec

from kvbaton.protocol.effects import Capabilities, Copy, Direction
from kvbaton.protocol.errors import Reason
from kvbaton.protocol.events import CopyEnded, CopyRested
from kvbaton.protocol.ids import JobId, PeerId, WorkerId, owner_of
from kvbaton.store.memory_backend import MemoryBackend
from kvbaton.transports.core.jobs import AGAIN_S_MAX, LENT_WAIT_S
from kvbaton.transports.core.loans import GRACE_S, BytesUnderWay, Loans
from kvbaton.transports.core.mover import choose_mover
from kvbaton.transports.core.transport import FenceEnded, Loan, PageTable, TransportEvent
from kvbaton.transports.local.region_listener import ShmEndpoint
from kvbaton.transports.tcp.tcp_transport import SealedTcpEndpoint, TcpEndpoint
from kvbaton_proof.sim.promises import RULE, Broken
from kvbaton_proof.sim.world.touches import pair
from kvbaton_proof.sim.world.world import InjectedFault, World

SHM = Capabilities("shm", one_sided=True, can_write=False, can_fence=False, cancels=True, same_host=True, admits=True)
TCP = Capabilities(
    "tcp", one_sided=False, can_write=True, can_fence=True, cancels=True, same_host=False, knows_writes=True
)
LENT_TCP = msgspec.structs.replace(TCP, enforces=True)
RDMA = Capabilities(
    "rdma", one_sided=True, can_write=True, can_fence=True, cancels=False, same_host=False, knows_writes=True
)
CMA = Capabilities("cma", one_sided=True, can_write=True, can_fence=False, cancels=False, same_host=True)
CUDA = Capabilities(
    "cuda", one_sided=True, can_write=False, can_fence=False, cancels=False, same_host=True, weaves=True
)
STORE_BYTES = 1 << 15
KINDS = {kind.name: kind for kind in (SHM, LENT_TCP, RDMA, CMA, CUDA)}


class SlowRank(InjectedFault, TimeoutError):
    """A rank that did not answer in time."""


@dataclass(slots=True)
class TransportFaults:
    """How bad the data plane is."""

    fail: float = 0.0  # share of copies that fail half-way
    stall: float = 0.0  # share that never finish by themselves
    slow: float = 0.0
    slow_s: float = 5.0
    refuse: float = 0.0  # back-pressure
    broken: float = 0.0  # what opens, lends or begins raises
    throws: float = 0.0  # what stops, fences, closes or tells news raises
    shut: frozenset[str] = frozenset()  # kinds that cannot be opened to anybody
    shut_rank: int = -1  # if not -1, by and to this rank alone
    queue_max: int = 64


@dataclass(slots=True)
class _Job:
    copy: Copy
    remote: SimTransport
    generation: int
    spans: list[tuple[int, int, int]]
    moved: int = 0  # spans landed
    asked_since: float = -1.0  # when the remote first said that it does not lend this
    given_up: bool = False
    over: bool = False
    flight: BytesUnderWay | None = None  # while the remote serves it, where that enforces what it has lent


def astray(driver: SimTransport, remote: SimTransport) -> None:
    """Data planes refuse what is outside registered memory, but what is planned by both cards never is (rule 25)."""
    raise Broken(RULE, f"{driver.me}: a copy with {remote.me} goes beyond what their cards say that there is")


class Fabric:
    """Where endpoints of all lives meet, by address."""

    def __init__(self, world: World, faults: TransportFaults) -> None:
        self.world = world
        self.faults = faults
        self.by_address: dict[int, SimTransport] = {}
        self.store = MemoryBackend(STORE_BYTES)  # that all engines of this world share, if they have one
        self.on_landing: Callable[[SimTransport, SimTransport, Copy, int, int], None] | None = None
        self.on_leaving: Callable[[SimTransport, int], None] | None = None
        self.on_lending: Callable[[SimTransport, Loan], None] | None = None
        self.on_astray: Callable[[SimTransport, SimTransport], None] | None = None
        self.on_fate: Callable[[SimTransport, Copy, str, float], None] = lambda driver, copy, what, lasts_s: None

    def add(self, transport: SimTransport) -> int:
        self.by_address[len(self.by_address) + 1] = transport
        return len(self.by_address)


@dataclass(slots=True)
class SimTransport:
    """One rank's data plane of one kind, in one life."""

    fabric: Fabric
    me: PeerId
    kind: Capabilities
    address: int = 0
    rank: int = 0
    regions: dict[int, memoryview] = field(default_factory=dict)
    alive: bool = True
    paused: bool = False
    bytes_moved: int = 0
    lends_late: bool = False  # a loan may be on its way to this rank's process: who reads asks again for a while
    _links: dict[PeerId, tuple[int, int]] = field(default_factory=dict)  # peer -> (address, generation)
    _invited: dict[PeerId, int] = field(default_factory=dict)  # peer -> generation of its endpoint
    _admitted: dict[PeerId, set[int]] = field(default_factory=dict)  # peer -> generations that can still write
    _fenced_at: dict[PeerId, float] = field(default_factory=dict)  # when the last fence of each takes effect
    _generations: int = 0
    _opened: set[PeerId] = field(default_factory=set)  # engines to which something was lent to read, ever
    _jobs: dict[JobId, _Job] = field(default_factory=dict)
    _events: list[TransportEvent] = field(default_factory=list)
    _waker: Callable[[], None] = lambda: None
    _loans: Loans = field(init=False)

    def __post_init__(self) -> None:
        self.address = self.fabric.add(self)
        self._loans = Loans(choose_mover(), self._loan_ended, lambda cut: self.fabric.world.after(GRACE_S, cut))

    @property
    def worker(self) -> WorkerId:
        return worker_of(self.me)

    @property
    def capabilities(self) -> Capabilities:
        return self.kind

    def register(self, region: int, memory: memoryview) -> None:
        self.regions[region] = memory
        self._loans.add_region(region, memory.nbytes)

    def lay_out(self, tables: Sequence[PageTable]) -> None:
        self._loans.lay_out(tables)

    def lend(self, loan: Loan) -> None:
        reads = loan.direction is Direction.READ
        if not (self.kind.lends_reads if reads else self.kind.lends_writes):
            raise TypeError(f"{self.kind.name} lends nothing: see its capabilities")
        self._maybe_throw()
        if self.fabric.on_lending is not None:
            self.fabric.on_lending(self, loan)
        self._loans.lend(loan)
        if reads:
            self._opened.add(loan.peer)

    def _loan_ended(self, event: CopyEnded) -> None:
        """Told a little later: the rank may be another process."""
        world = self.fabric.world
        world.after(world.rng.uniform(0, 0.002), lambda: self._note(event))

    def endpoint(self, peer: PeerId) -> bytes:
        self._maybe_throw()
        if self.fabric.faults.throws and self.fabric.world.chance(self.fabric.faults.throws):
            self.fabric.world.strike("port_threw_slow", self.worker)
            raise SlowRank("the simulated rank does not answer")
        if peer not in self._invited:
            self._generations += 1
            self._invited[peer] = self._generations
            self._admitted.setdefault(peer, set()).add(self._generations)
        return made_endpoint(self, self._invited[peer])

    def connect(self, peer: PeerId, endpoint: bytes) -> None:
        there = read_endpoint(endpoint)
        self._maybe_throw()
        if self._links.get(peer, there) != there:  # a new endpoint replaces the old, and ends what was under way on it
            self._end_copies(peer)
        self._links[peer] = there

    def disconnect(self, peer: PeerId) -> None:
        """Forgets at once; what the peer has under way is cut a little later, and by hardware not at all."""
        self._maybe_throw_late()
        self._links.pop(peer, None)
        generation = self._invited.pop(peer, 0)
        if self.kind.cancels:
            admitted = self._admitted.get(peer, set())
            self.fabric.world.after(self.fabric.world.rng.uniform(0, 0.5), lambda: admitted.discard(generation))
        self._end_copies(peer)

    def _end_copies(self, peer: PeerId) -> None:
        for job in [job for job in self._jobs.values() if job.copy.peer == peer]:
            self._give_up(job, Reason.TRANSFER_FAILED)

    def _maybe_throw(self) -> None:
        if self.fabric.world.chance(self.fabric.faults.broken):
            self.fabric.world.strike("port_threw", self.worker)
            raise InjectedFault("the simulated library threw")

    def _maybe_throw_late(self) -> None:
        share = self.fabric.faults.throws
        if share and self.fabric.world.chance(share):
            self.fabric.world.strike("port_threw_late", self.worker)
            raise InjectedFault("the simulated library threw when it should have stopped")

    def submit(self, copy: Copy) -> bool:
        faults, world = self.fabric.faults, self.fabric.world
        if len(self._jobs) >= faults.queue_max or world.chance(faults.refuse):
            self.fabric.on_fate(self, copy, "queued_copy", 0.0)
            return False
        self._maybe_throw()
        link = self._links.get(copy.peer)
        remote = self.fabric.by_address.get(link[0]) if link else None
        if link is None or remote is None:
            self._note(CopyEnded(copy.job, Reason.PEER_UNKNOWN))
            return True
        if self.kind.name in faults.shut and faults.shut_rank in (-1, self.rank, remote.rank):
            world.strike("plane_shut", pair(self.worker, worker_of(copy.peer)))
            world.after(world.rng.uniform(0, 0.01), lambda: self._note(CopyEnded(copy.job, Reason.UNREACHABLE)))
            return True
        numbers = copy.spans if copy.weave is None else copy.spans + copy.weave.flat()
        spans = [tuple(numbers[i : i + 3]) for i in range(0, len(numbers), 3)]
        job = _Job(copy, remote, link[1], spans)  # type: ignore[arg-type]
        if not self._in_range(job) or (copy.direction is Direction.WRITE and not self.kind.can_write):
            if (
                self.fabric.on_astray is not None and remote.me == copy.peer
            ):  # else a liar has given another's endpoint for its own
                self.fabric.on_astray(self, remote)
            self._note(CopyEnded(copy.job, Reason.BAD_SPAN, detail="outside registered memory"))
            return True
        self._jobs[copy.job] = job
        self._launch(job)
        return True

    def cancel(self, job: JobId) -> None:
        self._maybe_throw_late()
        if self._loans.take_back(job):
            return
        if job in self._jobs:
            self._give_up(self._jobs[job], Reason.CANCELLED)

    def fence(self, peer: PeerId) -> None:
        """Takes effect when it ends, not when it is asked for; what was admitted since is not touched.

        Of a plane that cannot fence it ends as well, and has shut nobody out: who asks for it has not read `can_fence`.
        """
        self._maybe_throw_late()
        condemned: set[int] = set()
        if self.kind.can_fence:
            self._invited.pop(peer, None)
            condemned = set(self._admitted.get(peer, ()))
        world = self.fabric.world
        earlier_s = max(0.0, self._fenced_at.get(peer, 0.0) - world.now)  # fences of one peer wait for each other
        slow = earlier_s or world.chance(self.fabric.faults.slow)
        takes_s = earlier_s + (world.rng.uniform(0.01, 1.5) if slow else world.rng.uniform(0, 0.01))
        self._fenced_at[peer] = world.now + takes_s
        world.after(takes_s, lambda: self._fenced(peer, condemned))

    def _fenced(self, peer: PeerId, condemned: set[int]) -> None:
        self._admitted.get(peer, set()).difference_update(condemned)
        self._note(FenceEnded(peer))

    def drain(self) -> Sequence[TransportEvent]:
        if self._events:
            self._maybe_throw_late()
        events, self._events = self._events, []
        return events

    def set_waker(self, waker: Callable[[], None]) -> None:
        self._waker = waker

    def close(self) -> None:
        self.alive = False
        for job in list(self._jobs.values()):
            self._give_up(job, Reason.TRANSFER_FAILED)
        self._loans.close()

    # --- how a copy goes

    def _launch(self, job: _Job) -> None:
        world, faults = self.fabric.world, self.fabric.faults
        rng = world.rng
        batches = min(len(job.spans), rng.choice((1, 1, 2, 3)))
        duration = rng.uniform(0.0002, 0.01)
        if world.chance(faults.slow):
            world.faults["slow_copy"] += 1
            duration = rng.uniform(0.01, faults.slow_s)
            self.fabric.on_fate(self, job.copy, "slow_copy", duration)
        fate = "arrive"
        if world.chance(faults.fail):
            world.faults["failed_copy"] += 1
            self.fabric.on_fate(self, job.copy, "failed_copy", duration)
            fate = "fail"
        elif world.chance(faults.stall):
            world.faults["stalled_copy"] += 1
            self.fabric.on_fate(self, job.copy, "stalled_copy", duration)
            fate = "stall"
        self._move(job, batches, duration / (batches + 1), fate)

    def _move(self, job: _Job, batches: int, gap_s: float, fate: str, late_s: float = 0.0) -> None:
        """Land one batch after `gap_s`, or `late_s` for once; then the next, until all have landed or fate strikes."""

        def act() -> None:
            if job.over or not (self.alive or self._posted(job)):
                return
            if (self.paused and not self._posted(job)) or (job.remote.paused and not self.kind.one_sided):
                self._move(job, batches, 0.25, fate)  # nobody home: try again
            elif not (job.remote.alive or self.kind.same_host):
                self._end(job, Reason.TRANSFER_FAILED)
            elif not self._admitted_by(job):
                self._end(job, Reason.PEER_UNKNOWN)
            elif not self._lent(job):
                if self._asks_again(job):
                    self._move(job, batches, gap_s, fate, AGAIN_S_MAX)
                else:
                    self._end(job, Reason.LEASE_EXPIRED)
            elif fate == "fail" and job.moved * 2 >= len(job.spans):
                self._end(job, Reason.TRANSFER_FAILED)
            elif fate == "stall" and job.moved * 2 >= len(job.spans):
                if not self.kind.cancels:  # it lands in the end, long after everybody gave up on it
                    self._move(job, 1, self.fabric.world.rng.uniform(3.0, 20.0), "arrive")
            elif job.moved == len(job.spans):
                self._end(job, None)
            else:
                step = -(-(len(job.spans) - job.moved) // batches)
                self._land(job, step)
                self._move(job, max(1, batches - 1), gap_s, fate)

        self.fabric.world.after(late_s or gap_s, act)

    def _posted(self, job: _Job) -> bool:
        """Hardware goes on writing what a process had posted, whether that process is stopped or dead."""
        return self.kind.one_sided and not self.kind.cancels and job.copy.direction is Direction.WRITE

    def _admitted_by(self, job: _Job) -> bool:
        """What is mapped stays mapped; all else needs the peer's leave at every access."""
        if job.copy.direction is Direction.READ and self.kind.same_host:
            return True
        return job.generation in job.remote._admitted.get(self.me, ())

    def _lent(self, job: _Job) -> bool:
        """Whether the remote serves this, asked when it begins; from then on it is under way until it ends."""
        kind, writes = job.remote.kind, job.copy.direction is Direction.WRITE
        if kind.admits and not writes and job.spans and owner_of(self.me) not in job.remote._opened:
            return False
        checks = kind.lends_writes if writes else kind.enforces
        if not checks or job.flight is not None or not job.spans:
            return True
        pairs = array("q", [number for _, remote, size in job.spans for number in (remote, size)])
        copy = job.copy
        job.flight = job.remote._loans.begin(
            self.me, copy.direction, copy.remote_region, pairs, lambda: self._end(job, Reason.TRANSFER_FAILED)
        )
        return job.flight is not None

    def _asks_again(self, job: _Job) -> bool:
        now = self.fabric.world.now
        job.asked_since = now if job.asked_since < 0 else job.asked_since
        return job.remote.lends_late and not job.given_up and now - job.asked_since < LENT_WAIT_S

    def _land(self, job: _Job, count: int) -> None:
        copy = job.copy
        ours, theirs = self.regions[copy.local_region], job.remote.regions[copy.remote_region]
        fabric = self.fabric
        for local, remote, size in job.spans[job.moved : job.moved + count]:
            if copy.direction is Direction.READ:
                if fabric.on_landing is not None:
                    fabric.on_landing(self, self, copy, local, size)
                if fabric.on_leaving is not None and job.flight is not None and job.remote.alive:
                    fabric.on_leaving(job.remote, remote)
                ours[local : local + size] = theirs[remote : remote + size]
            else:
                if fabric.on_landing is not None:
                    fabric.on_landing(job.remote, self, copy, remote, size)
                if fabric.on_leaving is not None and self.alive:
                    fabric.on_leaving(self, local)
                theirs[remote : remote + size] = ours[local : local + size]
            self.bytes_moved += size
        job.moved += count

    def _in_range(self, job: _Job) -> bool:
        copy = job.copy
        ours, theirs = self.regions.get(copy.local_region), job.remote.regions.get(copy.remote_region)
        if ours is None or theirs is None:
            return False
        return all(
            size >= 0 and 0 <= local <= len(ours) - size and 0 <= remote <= len(theirs) - size
            for local, remote, size in job.spans
        )

    def _give_up(self, job: _Job, reason: Reason) -> None:
        if job.given_up:
            return
        if self.kind.cancels:
            self._end(job, reason)
        else:
            job.given_up = True
            self._note(CopyEnded(job.copy.job, reason, at_rest=False))

    def _end(self, job: _Job, reason: Reason | None) -> None:
        if job.over:
            return
        job.over = True
        if job.flight is not None:
            job.remote._loans.end(job.flight, landed=job.moved == len(job.spans))
        self._jobs.pop(job.copy.job, None)
        self._note(CopyRested(job.copy.job) if job.given_up else CopyEnded(job.copy.job, reason))

    def _note(self, event: TransportEvent) -> None:
        self._events.append(event)
        self._waker()


def worker_of(rank: PeerId) -> WorkerId:
    return WorkerId(rank.worker.partition("#")[0])


def made_endpoint(transport: SimTransport, generation: int) -> bytes:
    """Where a peer finds a data plane; of the kinds that rank links look into, as the real ones write it."""
    secret = generation.to_bytes(8, "big")
    if transport.kind.name == "tcp":
        kind = SealedTcpEndpoint if transport.address % 2 else TcpEndpoint
        return msgspec.msgpack.encode(kind(transport.me, "sim", transport.address, secret, {}))
    if transport.kind.name == "shm":
        return msgspec.msgpack.encode(ShmEndpoint(transport.me, "sim", str(transport.address), secret))
    return f"{transport.address}:{generation}".encode()


def read_endpoint(endpoint: bytes) -> tuple[int, int]:
    """Address and generation; ValueError for what is no endpoint."""
    address, _, generation = endpoint.partition(b":")
    if address.isdigit() and generation.isdigit():
        return int(address), int(generation)
    try:
        there = msgspec.msgpack.decode(endpoint, type=TcpEndpoint | SealedTcpEndpoint | ShmEndpoint)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise ValueError(f"endpoint {endpoint!r} is not one of this data plane: {error}") from None
    return int(there.name if isinstance(there, ShmEndpoint) else there.port), int.from_bytes(there.secret, "big")
