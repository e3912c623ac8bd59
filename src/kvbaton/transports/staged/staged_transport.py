"""staged: device memory through pinned host memory, for devices that have no other common path.

READ: the peer gathers a chunk into a slot (`staged_server`), this side scatters it from there (`staged_connection`).
WRITE is the other way round. Over `shm` the slot is the same memory in both processes, pinned in each; over `tcp` its
bytes cross a socket, of which there are several per peer (`staged_client`). Several slots are in flight at once, so the
peer's copy, the wire and this side's copy overlap.

Law: only this side's own launches touch this side's memory, also for a peer. Every span is checked twice: here as a
whole, before any of it is requested, and by the peer where its memory lives. A copy ends when its last launch here is
over; a READ chunk that is still with the peer when it is abandoned is at rest for us, since it can reach no further
than its slot. A fence therefore means only: nothing further is launched for that peer, and earlier launches have ended.

The client side of staging: the copies that wait for one peer, and the connections to it.

Over tcp there are several, each on its own thread, since one thread moves what one core copies. Law: they live and die
together. Each proves the secret of this pairing, each must announce the same slots and regions, and when one fails, all
fail, and copies in flight or waiting fail with them, once; the next copy opens all again.
"""

from __future__ import annotations

import ipaddress
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

import msgspec

from kvbaton.protocol.errors import ProtocolError, Reason
from kvbaton.protocol.ids import PeerId
from kvbaton.security import sealing
from kvbaton.security.records import load
from kvbaton.security.sealing import Encrypt
from kvbaton.transports.core.jobs import CopyJob, cut
from kvbaton.transports.core.loans import GRACE_S, Loans
from kvbaton.transports.core.shared_memory import RegisteredDevice, host_identity
from kvbaton.transports.core.shell import ServingShell
from kvbaton.transports.core.transport import Capabilities, Copy, DeviceEvent, FenceEnded, Spans
from kvbaton.transports.cuda.cuda_driver import SHARE, CudaGpu, Gpu, check_share, quiet_event
from kvbaton.transports.cuda.cuda_runner import PIECE_BYTES
from kvbaton.transports.net.socket_loop import SocketLoop
from kvbaton.transports.net.stream_socket import ROWS_MAX
from kvbaton.transports.staged.staged_connection import StagedConnection, Trade
from kvbaton.transports.staged.staged_listener import (
    SOCKETS_MAX,
    Carrier,
    SealedStagedEndpoint,
    StagedEndpoint,
    StagedHello,
    parse_endpoint,
)
from kvbaton.transports.staged.staged_server import StagedServer
from kvbaton.transports.staged.staged_slots import SLOT_BYTES, SLOTS_MAX, Stager


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


CLOSE_S = 5.0
_BASE = Capabilities(
    name="staged", one_sided=False, can_write=True, can_fence=True, cancels=True, same_host=True,
    device_kinds=("cuda",), enforces=True, knows_writes=True,
)  # fmt: skip
CAPABILITIES: dict[Carrier, Capabilities] = {
    "shm": msgspec.structs.replace(_BASE, name="staged-shm"),
    "tcp": msgspec.structs.replace(_BASE, name="staged-tcp", same_host=False),
}


class StagedConfig(msgspec.Struct, frozen=True):
    """Slots are for each peer, spread over its sockets, at least two for each: pinned on the host, and as much once
    more on the device. A socket is one thread here, and one on the other side; over shm there is one."""

    carrier: Carrier = "shm"
    device: int = 0
    slot_bytes: int = 16 << 20
    slots: int = 12
    sockets: int = 4
    host: str = "127.0.0.1"  # for tcp: numeric, so that nothing ever waits for a resolver
    port: int = 0
    advertise: str = ""
    copies_max: int = 1024
    dial_deadline_s: float = 5.0
    encrypt: Encrypt = "auto"  # over tcp, unless both ends are loopback addresses
    share: float = SHARE  # of the device's multiprocessors

    def __post_init__(self) -> None:
        check_share(self.share)
        if self.slot_bytes not in SLOT_BYTES or not 2 <= self.slots <= SLOTS_MAX:
            raise ValueError(
                f"slot_bytes: expected {SLOT_BYTES.start}..{SLOT_BYTES.stop - 1}, slots: expected 2..{SLOTS_MAX}; "
                f"got {self.slot_bytes} and {self.slots}"
            )
        if not 1 <= self.sockets <= SOCKETS_MAX:
            raise ValueError(f"sockets: got {self.sockets}, expected 1..{SOCKETS_MAX}")
        if ipaddress.ip_address(self.advertise or self.host).is_unspecified:
            raise ValueError(f"peers cannot connect to {self.advertise or self.host}: set advertise to its address")
        if self.carrier == "tcp":
            sealing.check(self.encrypt, self.advertise or self.host)

    @property
    def width(self) -> int:
        """Connections of one peer."""
        return self.sockets if self.carrier == "tcp" else 1

    @property
    def must_seal(self) -> bool:
        """Whether this side requires encryption, with any peer."""
        return self.carrier == "tcp" and sealing.is_required(self.encrypt, self.advertise or self.host)


class StagedTransport(ServingShell[StagedLink]):
    """See `base.DeviceTransport`. Threads: one for each socket of a peer, however many peers there are, two that drive
    the device, one to wait for events."""

    _memory: RegisteredDevice
    _server: StagedServer

    def __init__(self, me: PeerId, config: StagedConfig | None = None, gpu: Gpu | None = None) -> None:
        """ImportError without a driver, CudaError without a device; `gpu` is for tests."""
        self._config = config = config or StagedConfig()
        self.capabilities = CAPABILITIES[config.carrier]
        super().__init__(me, config.copies_max)
        self._gpu = gpu or CudaGpu(config.device, config.share)
        self._memory = RegisteredDevice(config.device)
        self._loops = [SocketLoop(f"kvbaton-staged-{index}-{me}") for index in range(config.width)]
        self._stager = Stager(f"kvbaton-stager-{me}", self._gpu)
        self._trade = Trade(me, self._jobs, self._mover, self._stager, self._address_of, config.dial_deadline_s)
        slots = config.slot_bytes, max(2, config.slots // config.width)
        self._loans = Loans(self._mover, self._jobs.loan_ended, partial(self._loops[0].call_later, GRACE_S))
        self._server = StagedServer(
            me, config.carrier, self._loops, self._memory, self._mover, self._stager, self._loans, slots,
            config.dial_deadline_s, config.encrypt,
        )  # fmt: skip
        if config.must_seal:
            load()

    @property
    def broken(self) -> str:
        """Why the device is unusable; empty while it works."""
        return self._stager.broken

    def endpoint(self, peer: PeerId) -> bytes:
        """Listens from the first call on. The same until `peer` is fenced or disconnected, then a new one."""
        config = self._config
        place, port = self._server.listen((config.host, config.port))
        place = config.advertise or place if config.carrier == "tcp" else place
        secret = self._server.keyring.mint(peer)
        kind = SealedStagedEndpoint if config.must_seal else StagedEndpoint
        place_of = host_identity(), place, port
        return msgspec.msgpack.encode(
            kind(self._me, config.carrier, *place_of, secret, sealing.can_seal(), config.width)
        )

    def connect(self, peer: PeerId, endpoint: bytes) -> None:
        """A new endpoint of a known peer replaces the old one, and ends what was in flight on it."""
        config = self._config
        there = parse_endpoint(peer, config.carrier, endpoint)
        insists, sealed = isinstance(there, SealedStagedEndpoint), False
        if config.carrier == "tcp":
            sealed = sealing.agree(str(peer), config.encrypt, there.place, insists, there.seals)
        if sealed:
            load()
        loops = self._loops[: there.sockets]
        self._link(peer, there, lambda: StagedLink(self._trade, there, loops, self._plan, sealed))

    def fence(self, peer: PeerId) -> None:
        """Nothing more is launched for `peer`, and `FenceEnded` says when earlier launches have ended. Copies that this
        side drives continue: they land by our own launches."""
        self._turn_away(peer)
        ended = partial(self._jobs.post, FenceEnded(peer))
        self._shut_out(peer, partial(self._stager.after, ended))

    def _refusal(self, copy: Copy, link: StagedLink) -> tuple[Reason, str] | None:
        return (Reason.TRANSFER_FAILED, self.broken) if self.broken else None

    def _event(self, event: DeviceEvent) -> DeviceEvent:
        return quiet_event(event, self._gpu)

    def _start(self, job: CopyJob, link: StagedLink) -> None:
        link.add(job)

    def _plan(self, job: CopyJob, hello: StagedHello, hands: int) -> bool:
        """On a loop, with the lock: check the whole copy against both memories and cut it into chunks."""
        copy = job.copy
        try:
            total = self._total(copy, hello.regions.get(copy.remote_region))
        except ValueError as error:
            self._jobs.fail(job, Reason.BAD_SPAN, str(error))
            return False
        # A part may end with a piece that begins within its bound.
        job.parts = cut(copy.spans, total, hands, range(PIECE_BYTES, hello.slot_bytes - PIECE_BYTES), ROWS_MAX)
        self._jobs.settle(job)
        return not job.ended

    def _address_of(self, region: int) -> int:
        memory = self._memory.get(region)
        assert memory is not None  # refused otherwise, and regions are never removed
        return memory.address

    def _stop(self, job: CopyJob, link: StagedLink | None, reason: Reason, detail: str) -> None:
        self._end(job, reason, detail)
        if link is not None:
            link.remove(job)

    def _retire(self, link: StagedLink, detail: str) -> None:
        link.forget()
        link.shut(detail)

    def _halt(self) -> bool:
        for loop in self._loops:
            loop.stop(CLOSE_S)  # closes every connection, which gives its slots to the stager to release
        self._stager.close(CLOSE_S)
        self._loans.close()
        return True
