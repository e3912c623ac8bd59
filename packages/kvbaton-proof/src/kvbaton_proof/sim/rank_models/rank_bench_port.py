"""A data plane as the node sees it (`rank_transport`) on the bench: any call, and any news.

Laws of the model: what is asked is posted, once and in order, unless it is refused: at the bounds, of a lost rank, of
an endpoint that is nonsense or another's, of what cannot cross. A copy that was accepted ends once; after an end that
was not at rest it rests once, when its rank says so in whichever way. A loss ends all copies, not at rest, and asks
their rank to stop. An endpoint is asked for once until it was told or its peer is let go; only the first question
waits. The node is woken when there is news where there was none.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from functools import partial
from typing import cast

import msgspec

from kvbaton.protocol.effects import Copy, DeviceEvent, Direction, Loan
from kvbaton.protocol.errors import Reason
from kvbaton.protocol.ids import JobId, PeerId
from kvbaton.ranks import rank_messages as said
from kvbaton.ranks import rank_transport
from kvbaton.ranks.rank_carrying import Arrival
from kvbaton.ranks.rank_transport import ENDPOINT_WAIT_S, RESTLESS_MAX, RemoteTransport
from kvbaton.transports.core.transport import CopyEnded, CopyRested, FenceEnded, OpenFailed, TransportEvent
from kvbaton.transports.local.region_listener import ShmEndpoint
from kvbaton.transports.tcp.tcp_transport import SealedTcpEndpoint, TcpEndpoint
from kvbaton_proof.sim.rank_models.rank_bench import ANYTHING, PEERS, Raised, listened, outcome, same, worth
from kvbaton_proof.sim.rank_models.rank_bench_messages import any_copy, any_due
from kvbaton_proof.sim.world.sim_transport import CMA, RDMA, SHM, TCP

NAME = "plane"
STEPS = 90
COPIES_MAX, TABLES_BYTES_MAX, COMMANDS_MAX, RESTLESS = 4, 24 * 8, 8, 2
PART_BYTES = 48
JOBS = 9
WHY = "why"


class Uplink:
    """A way to a rank that keeps what is posted."""

    rank = 3

    def __init__(self) -> None:
        self.lost = False
        self.backlog = 0
        self.posted: list[said.Command] = []

    def post(self, commands: Sequence[said.Command]) -> None:
        self.posted += commands


class Waiting:
    """Implements `Arrival`: while somebody waits, what was arranged for comes."""

    def __init__(self) -> None:
        self.waits: list[float | None] = []
        self.notified = 0
        self.comes: Callable[[], None] = lambda: None

    def __enter__(self) -> None:
        pass

    def __exit__(self, *what: object) -> None:
        pass

    def wait_for(self, predicate: Callable[[], bool], timeout: float | None = None) -> bool:
        if predicate():
            return True
        self.waits.append(timeout)
        if timeout:
            self.comes()
        return predicate()

    def notify_all(self) -> None:
        self.notified += 1


class PortModel:
    """What is posted, told and raised, by the laws."""

    def __init__(self, link: Uplink) -> None:
        self.link = link
        self.posted: list[said.Command] = []
        self.open: dict[JobId, Copy] = {}
        self.stopping: set[JobId] = set()
        self.undrained = 0  # accepted copies and loans that ended, until the end is drained
        self.restless: list[JobId] = []  # the last few
        self.moving: set[JobId] = set()  # of them
        self.loans: set[JobId] = set()
        self.known: set[PeerId] = set()
        self.events: list[TransportEvent] = []
        self.rings = 0
        self.asked: dict[PeerId, int] = {}
        self.answers: dict[PeerId, bytes | None] = {}
        self.asks = 0
        self.waits: list[float] = []
        self.notified = 0
        self.connects_refused = 0
        self.closed = False

    # --- the node

    def check_room(self) -> Raised | None:
        if self.link.lost:
            return Raised("ConnectionError")
        return Raised("TimeoutError") if self.link.backlog >= COMMANDS_MAX else None

    def submit(self, copy: Copy) -> bool | Raised:
        if copy.after is not None:
            return Raised("ValueError")
        tables = sum(said.table_bytes(each) for each in self.open.values())
        if tables and tables + said.table_bytes(copy) > TABLES_BYTES_MAX:
            return False
        if copy.job in self.open:
            return Raised("ValueError")
        if len(self.open) + self.undrained >= COPIES_MAX or self.closed:
            return False
        if self.link.lost:
            self._end(copy.job, Reason.TRANSFER_FAILED, True)
            return True
        self.open[copy.job] = copy
        self.stopping.discard(copy.job)
        self.posted += said.submit_commands(NAME, copy, PART_BYTES)
        return True

    def cancel(self, job: JobId) -> None:
        if job in self.loans or (job in self.open and job not in self.stopping):
            self.stopping.add(job)
            self.posted.append(said.Cancel(NAME, job))

    def let_go(self, peer: PeerId) -> None:
        self.asked.pop(peer, None)
        self.answers.pop(peer, None)

    def endpoint(self, peer: PeerId, comes: bytes | None, answers: bool) -> bytes | Raised:
        """`comes`: what is answered while somebody waits, None for a failure; if at all."""
        first = not self.asked
        if peer not in self.answers and peer not in self.asked:
            self.asks += 1
            refused = self.check_room()
            if refused is not None:
                return refused
            self.known.add(peer)
            self.posted.append(said.Mint(NAME, self.asks, peer))
            self.asked[peer] = self.asks
        if peer not in self.answers:
            self.waits.append(ENDPOINT_WAIT_S if first else 0)
            if first and answers:
                self.answer(self.asks, comes, peer)
        if peer not in self.answers:
            return Raised("TimeoutError")
        found = self.answers[peer]
        if found is None:
            del self.answers[peer]
            return Raised("RuntimeError")
        return found

    def drain(self) -> list[TransportEvent]:
        events, self.events = self.events, []
        self.undrained -= sum(isinstance(event, CopyEnded) for event in events)
        return events

    # --- the link

    def answer(self, ask: int, endpoint: bytes | None, awaited: PeerId | None = None) -> None:
        """A failure that nobody waits for is of another time, and not kept."""
        for peer, number in list(self.asked.items()):
            if number == ask:
                del self.asked[peer]
                if endpoint is not None or peer == awaited:
                    self.answers[peer] = endpoint
                    self.notified += 1

    def ended(self, job: JobId, reason: Reason | None, at_rest: bool, unwritten: int | None = None) -> None:
        if job in self.loans:
            self.loans.discard(job)
            self._end(job, reason, at_rest, WHY, unwritten)
        elif job in self.open:
            del self.open[job]
            if not at_rest:
                reason = reason or Reason.TRANSFER_FAILED
            self._end(job, reason, at_rest, WHY if reason is not None else "")
            if not at_rest:
                self._remember(job)
        elif at_rest:
            self.rested(job)

    def rested(self, job: JobId) -> None:
        if job in self.restless and job in self.moving:
            self.moving.discard(job)
            self.tell(CopyRested(job))

    def lose(self) -> None:
        for job in list(self.open):
            self.cancel(job)
            self.ended(job, Reason.TRANSFER_FAILED, False)

    def tell(self, event: TransportEvent) -> None:
        self.rings += not self.events
        self.events.append(event)

    def _end(
        self, job: JobId, reason: Reason | None, at_rest: bool, detail: str = ANYTHING, unwritten: int | None = None
    ) -> None:
        self.undrained += 1
        self.tell(CopyEnded(job, reason, at_rest, detail, unwritten))

    def _remember(self, job: JobId) -> None:
        self.restless = [each for each in self.restless if each != job] + [job]
        self.moving.add(job)
        self.restless = self.restless[-RESTLESS:]


class _Port:
    """The two side by side."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.kind = rng.choice((SHM, TCP, RDMA, CMA))
        self.link, self.arrival = Uplink(), Waiting()
        self.model = PortModel(self.link)
        self.real = RemoteTransport(NAME, self.kind, self.link, cast(Arrival, self.arrival))
        same("copies that are not at rest, at most", self.real._restless.limit, RESTLESS_MAX)
        self.real._jobs._copies_max, self.real._restless.limit = COPIES_MAX, RESTLESS
        self.real.part_bytes, self.real.tables_bytes_max = PART_BYTES, TABLES_BYTES_MAX
        self.real.commands_max = COMMANDS_MAX
        self.rings = 0
        self.real.set_waker(self._ring)

    def _ring(self) -> None:
        self.rings += 1

    # --- the node's calls

    def submit(self) -> None:
        copy = any_copy(self.rng, self.rng.randrange(JOBS))
        if copy.job in self.model.moving or copy.job in self.model.loans:
            return  # a node numbers what it begins
        if self.rng.random() < 0.05:
            copy = msgspec.structs.replace(copy, after=cast(DeviceEvent, object()))
        same("submit", outcome(lambda: self.real.submit(copy), ValueError), self.model.submit(copy))

    def cancel(self) -> None:
        job = JobId(self.rng.randrange(JOBS))
        self.model.cancel(job)
        self.real.cancel(job)

    def lend(self) -> None:
        job = JobId(JOBS + self.rng.randrange(3))
        blocks = ((1, 2), (self.rng.randrange(9),))
        loan = Loan(job, self.rng.choice(PEERS), Direction.WRITE, blocks, any_due(self.rng))
        self.model.loans.add(job)
        self.model.posted += said.lend_commands(NAME, loan, self.real.part_bytes)
        self.real.lend(loan)
        if self.rng.random() < 0.5:
            self.model.cancel(job)
            self.real.cancel(job)

    def connect(self) -> None:
        peer = self.rng.choice(PEERS)
        endpoint, is_one = self._any_endpoint(peer)
        expected = self.model.check_room() if is_one else Raised("ValueError")
        if expected is None:
            self.model.known.add(peer)
            self.model.posted.append(said.RankConnect(NAME, peer, endpoint))
        found = outcome(lambda: self.real.connect(peer, endpoint), ValueError, ConnectionError, TimeoutError)
        same("connect", found, expected)

    def _any_endpoint(self, peer: PeerId) -> tuple[bytes, bool]:
        owner = peer if self.rng.random() < 0.8 else self.rng.choice([each for each in PEERS if each != peer])
        tcp = self.rng.choice((TcpEndpoint, SealedTcpEndpoint))(owner, "host", 1, b"secret", {})
        shm = ShmEndpoint(owner, "host", "name", b"secret")
        known = {"tcp": tcp, "shm": shm}.get(self.kind.name)
        largest = bytes(said.ENDPOINT_BYTES_MAX)
        for wrong in (b"", largest + b"1"):
            if self.rng.random() < 0.08:
                return wrong, False
        if known is None:
            return self.rng.choice((b"1", largest)), True
        if self.rng.random() < 0.15:
            return self.rng.choice((b"\xc1", b"1", msgspec.msgpack.encode(shm if known is tcp else tcp))), False
        return msgspec.msgpack.encode(known), owner == peer

    def disconnect(self) -> None:
        peer = self.rng.choice(PEERS)
        self.model.let_go(peer)
        if peer in self.model.known:
            self.model.known.discard(peer)
            self.model.posted.append(said.RankDisconnect(NAME, peer))
        self.real.disconnect(peer)

    def fence(self) -> None:
        peer = self.rng.choice(PEERS)
        expected = None if self.kind.can_fence else Raised("NotImplementedError")
        if expected is None:
            self.model.let_go(peer)
            self.model.posted.append(said.Fence(NAME, peer))
        same("fence", outcome(lambda: self.real.fence(peer), NotImplementedError), expected)

    def endpoint(self) -> None:
        peer, comes = self.rng.choice(PEERS), self.rng.choice((b"there", b"there", None))
        answers = self.rng.random() < 0.5
        self.arrival.comes = partial(self._answer, self.model.asks + 1, comes) if answers else lambda: None
        expected = self.model.endpoint(peer, comes, answers)
        errors = ConnectionError, TimeoutError, RuntimeError
        same("an endpoint", outcome(lambda: self.real.endpoint(peer), *errors), expected)

    def drain(self) -> None:
        same("events of a port", list(self.real.drain()), self.model.drain())

    def rare(self) -> None:
        kind = self.rng.randrange(3)
        if kind == 0:
            self.model.posted.append(said.LayOut(NAME, ()))
            self.real.lay_out(())
        elif kind == 1:
            memory = memoryview(b"")
            found = outcome(lambda: self.real.register(0, memory), NotImplementedError)
            same("memory that is registered", found, Raised("NotImplementedError"))
        elif self.rng.random() < 0.1:
            self.close()

    def close(self) -> None:
        if not self.model.closed:
            self.model.closed = True
            self.model.posted.append(said.Close(NAME))
        self.real.close()

    # --- the link's news

    def _answer(self, ask: int, endpoint: bytes | None) -> None:
        failed = said.MintFailed(NAME, ask, WHY)
        self.real.take(said.Minted(NAME, ask, endpoint) if endpoint is not None else failed)

    def answer(self) -> None:
        ask = self.rng.choice((*self.model.asked.values(), self.model.asks, self.model.asks + 1))
        endpoint = self.rng.choice((b"there", None))
        self.model.answer(ask, endpoint)
        self._answer(ask, endpoint)

    def ended(self) -> None:
        job = JobId(self.rng.randrange(JOBS + 3))
        reason, at_rest = self.rng.choice((None, None, Reason.CANCELLED)), self.rng.random() < 0.6
        unwritten = self.rng.choice((None, 0, 5))
        self.model.ended(job, reason, at_rest, unwritten)
        self.real.take(said.RankEnded(NAME, job, reason, at_rest, WHY, unwritten))

    def rested(self) -> None:
        job = JobId(self.rng.randrange(JOBS))
        self.model.rested(job)
        self.real.take(said.Rested(NAME, job))

    def told(self) -> None:
        peer, number = self.rng.choice(PEERS), self.rng.randrange(5)
        kind = self.rng.randrange(4)
        if kind == 0:
            self.model.tell(FenceEnded(peer))
            self.real.take(said.Fenced(NAME, peer))
        elif kind == 1:
            self.real.take(said.RankRefusals(NAME, {"left": number}))
            same("refusals that were told", self.real.refusals, {"left": number})
        elif kind == 2:
            self.real.take(said.MappedBytes(NAME, number))
            same("mapped bytes that were told", self.real.mapped_bytes, number)
        else:
            for _ in range(self.rng.choice((1, 1, 12))):
                self.model.connects_refused += 1
                self.model.tell(OpenFailed(peer, WHY))
                self.real.take(said.ConnectFailed(NAME, peer, WHY))

    def lose(self) -> None:
        self.link.lost = self.rng.random() < 0.4
        if self.link.lost:
            self.model.lose()
            self.real.on_lost(WHY)

    def compare(self) -> None:
        same("commands that were posted", self.link.posted, self.model.posted)
        same("how often the node was woken", self.rings, self.model.rings)
        same("waits for an endpoint", self.arrival.waits, self.model.waits)
        same("answers that somebody may wait for", self.arrival.notified, self.model.notified)
        same("connections that a rank refused", self.real.counters["connects_refused"], self.model.connects_refused)
        for done in (self.link.posted, self.model.posted, self.arrival.waits, self.model.waits):
            done.clear()
        kept = [job.copy for job in self.real._restless._items.values() if job.copy.spans or job.copy.weave]
        same("tables kept of copies that have ended", kept, [])


def _bench_port(rng: random.Random) -> int:
    port = _Port(rng)
    steps = (
        *(port.submit,) * 5, port.cancel, port.cancel, port.lend, port.connect, port.connect, port.disconnect,
        port.fence, *(port.endpoint,) * 3, port.answer, *(port.ended,) * 3, port.rested, port.told, port.drain,
        port.drain, port.lose, port.rare,
    )  # fmt: skip
    for _ in range(STEPS):
        port.link.backlog = rng.choice((0, 0, COMMANDS_MAX - 1, COMMANDS_MAX, COMMANDS_MAX + 1))
        rng.choice(steps)()
        port.compare()
    for _ in range(2):
        port.close()
        port.submit()
        port.compare()
    port.drain()
    return worth(port.model.connects_refused)


bench_port = listened(rank_transport, _bench_port)
