"""A member that says mad numbers, at the right moment and in its own name, to a whole node.

Every number of every message, found by walking the types, takes every value of `MAD` while everything else of that
message is right: it is of the session, the lease and the attempt that the victim is just waiting to hear of. Law: each
step is over after a bounded number of timers and effects, nothing raises, nothing grows, all that the liar had a part
in ends, and so does the handoff of an honest pair, delivered.
"""

from __future__ import annotations

import typing
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import msgspec
import pytest

from kvbaton.node.doorway import LoadReport, MatchState
from kvbaton.node.node import Node
from kvbaton.protocol.errors import Reason
from kvbaton.protocol.events import CopyEnded
from kvbaton.protocol.geometry.progress import GroupProgress, whole
from kvbaton.protocol.ids import HandoffId, LeaseId, RequestId, ReservationId, WorkerId
from kvbaton.protocol.machines.ledger import Ledger
from kvbaton.protocol.settings import Settings
from kvbaton.protocol.wire import codec
from kvbaton.protocol.wire import messages as m
from kvbaton.protocol.wire.codec import Envelope, pack_blocks
from kvbaton.protocol.wire.messages import NEWEST
from kvbaton.protocol.wire.ticket import Ticket, seal
from tests.wire_numbers import MAD, Path, numbers_in, put

from .test_node import DIGEST, KEY, TOKENS, FakeControl, Worker

QUICK = Settings(
    transfer_timeout=2.0,
    defer_timeout=3.0,
    claim_timeout=1.5,
    lease_s=1.5,
    max_hold_s=5.0,
    retry_s=0.5,
    revoke_timeout=1.0,
)
REST_S = 16.0
"""Longer than all of these one after the other."""
TIMERS_MAX, EFFECTS_MAX, SIZE_MAX = 24, 96, 220
MAD_IDS = (-1, -2, 0, 23, 24, 1 << 20, (1 << 31) - 1, -(1 << 31))
PULL, PUSH, STREAM, PARKED, DONE = map(RequestId, ("pull", "push", "stream", "parked", "done"))


def handoff(number: int) -> HandoffId:
    return HandoffId(f"{number:032x}.7")


class World:
    """P and D in the middle of every kind of handoff, and an honest other for each: `e` and `q`."""

    def __init__(self, meter: Meter) -> None:
        self.meter = meter
        self.network: dict[WorkerId, FakeControl] = {}
        self.p, self.d, self.e, self.q = (Worker(name, self.network, settings=QUICK) for name in "pdeq")
        self.now = 0.0
        self.frozen: Worker | None = None
        self.wanted: list[tuple[Worker, RequestId]] = []
        for _ in range(8):
            self.q.doorway.config.mint()  # or its handoffs had the names of P's

    def turn(self, times: int = 8, arrive: bool = False) -> None:
        for _ in range(times):
            for worker in (self.p, self.d, self.e, self.q):
                if worker is not self.frozen:
                    self.meter.begin()
                    worker.step(self.now)
                    self.meter.check()
                    for transport in worker.transports if arrive else ():
                        transport.arrive()
            self.allocate()

    def want(self, worker: Worker, request: RequestId, ticket: str, push: bool = False) -> None:
        worker.doorway.want(request, ticket, DIGEST, TOKENS, push=push)
        self.wanted.append((worker, request))

    def allocate(self) -> None:
        for worker, request in self.wanted:
            if worker.doorway.match(request).state is MatchState.FOUND and not worker.doorway.holds(request):
                mine = {PULL: (1, 2, 3), PUSH: (4, 5, 6), STREAM: (7, 8, 9), DONE: (10, 11, 12)}
                worker.doorway.allocated(request, (mine.get(request, (13, 14, 15)),), 0)

    def begin(self, number: int, blocks: tuple[int, ...], ready: int) -> str:
        lease = self.p.doorway.begin(handoff(number), DIGEST, TOKENS)
        self.p.doorway.pin(lease, (blocks,))
        self.p.doorway.progressed(lease, whole([ready]))
        if ready == 3:
            self.p.doorway.completed(lease)
        return self.ticket(number)

    def ticket(self, number: int) -> str:
        return seal(Ticket(handoff(number), WorkerId("p"), 60.0), KEY)

    def busy(self) -> World:
        """Copying, being written to, streaming, waiting for P to begin, and waiting for the answer to a commit."""
        self.want(self.d, PULL, self.p.doorway.grant(DIGEST, TOKENS, ((1, 2, 3),))[0])
        self.want(self.d, PUSH, self.begin(2, (4, 5, 6), 3), push=True)
        self.want(self.d, STREAM, self.begin(3, (7,), 1))
        self.want(self.d, PARKED, self.ticket(4))
        self.turn()
        before = set(self.d.transports[0].moving)
        self.want(self.d, DONE, self.p.doorway.grant(DIGEST, TOKENS, ((10, 11, 12),))[0])
        self.turn(6)
        for job in set(self.d.transports[0].moving) - before:
            del self.d.transports[0].moving[job]
            self.d.transports[0].news.append(CopyEnded(job))
        self.d.step(self.now)  # and says Commit, which P has not heard
        states = {request: intake.state.value for request, intake in self.consumer.by_request.items()}
        assert states == {
            PULL: "copying", PUSH: "offered", STREAM: "copying", PARKED: "claiming", DONE: "committing"
        }  # fmt: skip
        return self

    def greeting(self) -> World:
        """D has greeted P, who has not answered."""
        self.want(self.d, PULL, self.p.doorway.grant(DIGEST, TOKENS, ((1, 2, 3),))[0])
        self.d.step(self.now)
        return self

    @property
    def consumer(self) -> Any:
        return self.d.node.ledger.consumer

    @property
    def session(self) -> int:
        return next((s.number for s in self.p.node.ledger.sessions.by_number.values()), 1)

    def attempt(self, request: RequestId) -> int:
        return int(self.consumer.by_request[request].attempt)

    def lease(self, request: RequestId) -> LeaseId:
        found: LeaseId = self.consumer.by_request[request].source.lease
        return found

    def hear(self, victim: Worker, liar: Worker, envelope: list[Any]) -> bool:
        """The frame comes, and is handled; whether it was read."""
        try:
            frame = msgspec.msgpack.encode(envelope)
        except OverflowError:
            return False
        before = victim.node.ledger.desk.counts["frames_refused.bad_message"]
        victim.control.inbox.append((liar.control.me, frame))
        self.meter.begin()
        victim.step(self.now)
        self.meter.check()
        return victim.node.ledger.desk.counts["frames_refused.bad_message"] == before

    def finish(self, victim: Worker, liar: Worker) -> None:
        """The liar is never heard of again; everybody else has what was promised."""
        self.frozen = liar
        if victim is self.p:
            ticket = self.p.doorway.grant(DIGEST, TOKENS, ((16, 17, 18),))[0]
            reader = self.e
        else:
            ticket, reader = self.q.doorway.grant(DIGEST, TOKENS, ((16, 17, 18),))[0], self.d
        self.want(reader, RequestId("honest"), ticket)
        self.turn(10, arrive=True)
        ends = {duty.request: duty.end for duty in reader.reports if isinstance(duty, LoadReport)}
        assert ends[RequestId("honest")].delivered
        end = self.now + REST_S
        while (due := victim.node.next_deadline()) is not None and due <= end:
            self.now = max(due, self.now + 0.001)  # as `LoopThread` sleeps
            self.turn(2, arrive=True)
        self.turn(2, arrive=True)  # the last copies and fences have ended
        assert victim.node.ledger.is_idle() and not victim.node.ledger.desk.owners
        reports = [duty.request for duty in victim.reports if isinstance(duty, LoadReport)]
        assert len(reports) == len(set(reports))
        for worker in (self.p, self.d, self.e, self.q):
            assert worker.problems == [], "nothing was thrown, not even where it is caught"
            assert size(worker) < SIZE_MAX


def size(worker: Worker) -> int:
    """Everything that somebody's numbers could make grow."""
    ledger = worker.node.ledger
    producer, consumer, writer = ledger.producer, ledger.consumer, ledger.producer.writer
    held = (
        producer.leases, producer.parked, producer.tombstones, producer.ended, writer.outlets, writer.revoked,
        writer.sessions, consumer.by_handoff, consumer.by_attempt, consumer.by_reservation, consumer.links.by_worker,
        ledger.sessions.by_number, ledger.desk.owners, ledger.desk.timers, ledger.desk.counts, worker.node._held,
        worker.node._next_events, ledger.desk.timers._heap,
    )  # fmt: skip
    return sum(map(len, held))


class Meter:
    """How much one step has done."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.timers = self.effects = self.steps = 0
        timer, do = Ledger._timer, Node._do

        def counted_timer(ledger: Ledger, *what: Any) -> None:
            self.timers += 1
            assert self.timers <= TIMERS_MAX, "a step that goes on and on"
            timer(ledger, *what)

        def counted_do(node: Node, effect: Any) -> None:
            self.effects += 1
            do(node, effect)

        monkeypatch.setattr(Ledger, "_timer", counted_timer)
        monkeypatch.setattr(Node, "_do", counted_do)

    def begin(self) -> None:
        self.timers = self.effects = 0
        self.steps += 1

    def check(self) -> None:
        assert self.effects <= EFFECTS_MAX


@pytest.fixture
def meter(monkeypatch: pytest.MonkeyPatch) -> Meter:
    return Meter(monkeypatch)


def card(world: World) -> m.Card:
    return world.p.node.ledger.desk.identity.card()


IDS = pack_blocks([7, 8, 9])
TO_D: dict[type, Callable[[World], Any]] = {
    m.Granted: lambda w: m.Granted(handoff(4), w.attempt(PARKED), LeaseId(9), 1.5, TOKENS, (IDS,), whole([3]), True),
    m.GrantedFrom: lambda w: m.GrantedFrom(
        handoff(4), w.attempt(PARKED), LeaseId(9), 1.5, TOKENS, (IDS,), whole([3]), True, ("d9 key",)
    ),
    m.ClaimRefused: lambda w: m.ClaimRefused(handoff(4), w.attempt(PARKED), Reason.BUSY, ""),
    m.Renewed: lambda w: m.Renewed(w.lease(PULL), w.attempt(PULL), 1.5, 1),
    m.RenewRefused: lambda w: m.RenewRefused(w.lease(STREAM), w.attempt(STREAM), Reason.LEASE_EXPIRED),
    m.Ready: lambda w: m.Ready(w.lease(STREAM), w.attempt(STREAM), (0,), (IDS,), (GroupProgress(2, 3, 1),), False),
    m.Committed: lambda w: m.Committed(w.lease(DONE), w.attempt(DONE)),
    m.Stale: lambda w: m.Stale(w.lease(DONE), w.attempt(DONE), (2,), Reason.STALE),
    m.SourceLost: lambda w: m.SourceLost(w.lease(STREAM), w.attempt(STREAM), Reason.SOURCE_ABORTED),
    m.Accepted: lambda w: m.Accepted(ReservationId(1)),
    m.Written: lambda w: m.Written(w.lease(PUSH), w.attempt(PUSH), ReservationId(1), DIGEST),
    m.Quiesced: lambda w: m.Quiesced(ReservationId(1), None),
    m.Reset: lambda w: m.Reset(int(w.p.node.ledger.desk.identity.me.incarnation)),
    m.Welcome: lambda w: m.Welcome(1, card(w), "tcp", (b"p#0 for d#0",), 0),
    m.HelloRefused: lambda w: m.HelloRefused(1, Reason.INCOMPATIBLE, "model"),
}
TO_P: dict[type, Callable[[World], Any]] = {
    m.Hello: lambda w: m.Hello(7, card(w)),
    m.Claim: lambda w: m.Claim(handoff(3), 99, w.ticket(3), DIGEST, True),
    m.Renew: lambda w: m.Renew(w.lease(STREAM), w.attempt(STREAM), (0,), False),
    m.Commit: lambda w: m.Commit(w.lease(PULL), w.attempt(PULL)),
    m.Abandon: lambda w: m.Abandon(handoff(3), w.attempt(STREAM), ""),
    m.Offer: lambda w: m.Offer(w.lease(STREAM), w.attempt(STREAM), ReservationId(7), 0, (IDS,), DIGEST),
    m.Ack: lambda w: m.Ack(w.lease(PUSH), w.attempt(PUSH), ReservationId(1)),
    m.Revoke: lambda w: m.Revoke(w.lease(PUSH), w.attempt(PUSH), ReservationId(1), ""),
}
SAMPLES = TO_D | TO_P
GREETED = (m.Welcome, m.HelloRefused)
KINDS = [kind for kind in typing.get_args(m.Message) if numbers_in(kind)]


def mad(kind: type) -> list[tuple[Path, int | float]]:
    """Every number of a message with every value, and the ids in its lists of blocks."""
    drawn: list[tuple[Path, int | float]] = [(found.path, value) for found in numbers_in(kind) for value in MAD]
    if "blocks" in kind.__struct_fields__:  # type: ignore[attr-defined]
        drawn += [(("blocks", 0), value) for value in MAD_IDS]
    return drawn


def spoken(message: Any, path: Path, value: int | float) -> Any:
    if path != ("blocks", 0):
        return put(message, path, value)
    packed = pack_blocks([7, 8]) + int(value).to_bytes(4, "little", signed=True)
    return msgspec.msgpack.decode(msgspec.msgpack.encode(msgspec.structs.replace(message, blocks=(packed,))))


Draw = Callable[[World], list[Any]]
"""One frame to say in a world."""


def lie(meter: Meter, kind: type, draws: Sequence[Draw]) -> int:
    """Say them all, each that is read in a world that was not lied to before; how many were."""
    world, read = made(meter, kind), 0
    for draw in draws:
        victim, liar = (world.d, world.p) if kind in TO_D else (world.p, world.d)
        if not world.hear(victim, liar, draw(world)):
            continue
        read += 1
        if kind is not m.Hello or not read % 8:  # of which one leaves nothing that another could not find
            world.finish(victim, liar)
            world = made(meter, kind)
    world.finish(*((world.d, world.p) if kind in TO_D else (world.p, world.d)))
    return read


def made(meter: Meter, kind: type) -> World:
    world = World(meter)
    return world.greeting() if kind in GREETED else world.busy()


def envelope(world: World, kind: type, body: Any, version: int = NEWEST) -> list[Any]:
    source, target = (world.p, world.d) if kind in TO_D else (world.d, world.p)
    here, there = (each.node.ledger.desk.identity.me for each in (source, target))
    return [version, here.worker, here.incarnation, there.incarnation, world.session, body]


def drawn(kind: type, version: int = NEWEST) -> list[Draw]:
    """What `mad` draws for a message, or for what version 1 has in its place, as frames."""
    older = codec._OLDER[kind] if version == 1 else kind

    def draw(path: Path, value: int | float, world: World) -> list[Any]:
        sample = SAMPLES[kind](world)
        body = spoken(codec.in_v1(sample) if version == 1 else sample, path, value)
        assert body is not None, f"there is no {path} in the sample"
        return envelope(world, kind, body, version)

    return [partial(draw, path, value) for path, value in mad(older)]


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_no_number_of_a_message_hangs_kills_or_fills_a_node(meter: Meter, kind: type, record_property: Any) -> None:
    draws = drawn(kind)
    record_property("values", len(draws))
    read = lie(meter, kind, draws)
    assert 0 < read < len(draws), "some are within their bounds, and reach whom they are meant for"


@pytest.mark.parametrize("kind", codec._OLDER, ids=lambda kind: kind.__name__)
def test_nor_one_of_version_1(meter: Meter, kind: type) -> None:
    assert lie(meter, kind, drawn(kind, 1)) > 0


@pytest.mark.parametrize("kind", [m.Renewed, m.Renew, m.Hello, m.Welcome], ids=lambda kind: kind.__name__)
def test_nor_one_of_its_envelope(meter: Meter, kind: type) -> None:
    def draw(index: int, value: int | float, world: World) -> list[Any]:
        said = envelope(world, kind, msgspec.msgpack.decode(msgspec.msgpack.encode(SAMPLES[kind](world))))
        said[index] = value
        return said

    places = [Envelope.__struct_fields__.index(str(number.path[0])) for number in numbers_in(Envelope)]
    assert places == [0, 2, 3, 4]
    assert lie(meter, kind, [partial(draw, index, value) for index in places for value in MAD]) > 0


def test_every_number_of_every_message_is_tried_with_every_value() -> None:
    """By walking the types: a field that is added is tried, and a message that is added asks for its sample."""
    assert set(KINDS) == set(SAMPLES)
    for kind in KINDS:
        tried = set(map(repr, mad(kind)))
        assert {repr((number.path, value)) for number in numbers_in(kind) for value in MAD} <= tried
    fields = sum(len(numbers_in(kind)) for kind in KINDS)
    values = sum(len(mad(kind)) for kind in [*KINDS, *codec._OLDER.values()]) + 4 * 4 * len(MAD)
    print(f"{fields} numbers in {len(KINDS)} messages, {values} values drawn")
    assert fields >= 95 and values >= 2400
