"""The node over ports that misbehave: order is kept, every copy ends, and no exception of a port leaves `step`."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import pytest

from kvbaton.node.doorway import Doorway, DoorwayConfig, DropBlocks, LoadReport, MatchState, UnpinBlocks
from kvbaton.node.epochs import EpochTable
from kvbaton.node.node import AGAIN_S, FAULTS_LOGGED_MAX, Node, log_fault
from kvbaton.protocol.effects import Capabilities, Copy, Disconnect, Invitation
from kvbaton.protocol.errors import Reason
from kvbaton.protocol.events import CopyEnded, CopyRested, Departed, Groups, LeaseProgressed, StoreEnded
from kvbaton.protocol.geometry.progress import whole
from kvbaton.protocol.ids import (
    HandoffId,
    Incarnation,
    JobId,
    PeerId,
    PutId,
    RequestId,
    TransferId,
    WorkerId,
    rank_peer,
)
from kvbaton.protocol.machines.context import Identity
from kvbaton.protocol.machines.ledger import Ledger
from kvbaton.protocol.settings import Settings
from kvbaton.protocol.wire.codec import decode
from kvbaton.protocol.wire.messages import ClaimRefused, Goodbye, Granted, Message
from kvbaton.protocol.wire.ticket import Ticket, seal
from kvbaton.transports.core.transport import FenceEnded, Loan, OpenFailed, PageTable, TransportEvent
from kvbaton_proof.sim.world.sim_memory import Shape

KEY, DIGEST, TOKENS = b"key of the cluster", b"digest", 5
TCP = Capabilities(
    "tcp", one_sided=False, can_write=True, can_fence=True, cancels=True, same_host=False, knows_writes=True
)
R = RequestId("r")


@dataclass
class FakeControl:
    """Frames by name; a worker that is not there is not known."""

    me: WorkerId
    network: dict[WorkerId, FakeControl]
    inbox: deque[tuple[WorkerId, bytes]] = field(default_factory=deque)
    sent: list[tuple[WorkerId, Message]] = field(default_factory=list)
    broken: bool = False

    def send(self, worker: WorkerId, frame: bytes) -> bool:
        if self.broken:
            raise OSError("the socket is gone")
        if worker not in self.network:
            return False
        self.sent.append((worker, decode(frame)[1]))
        self.network[worker].inbox.append((self.me, frame))
        return True

    def receive(self) -> Sequence[tuple[WorkerId, bytes]]:
        frames = list(self.inbox)
        self.inbox.clear()
        return frames


@dataclass
class FakeTransport:
    """A data plane that does as the test says, and remembers what it was asked to do."""

    me: str
    room: int = 1000
    throws: set[str] = field(default_factory=set)
    asked: list[tuple[str, Any]] = field(default_factory=list)
    moving: dict[JobId, Copy] = field(default_factory=dict)
    lent: dict[JobId, Loan] = field(default_factory=dict)
    news: list[TransportEvent] = field(default_factory=list)
    capabilities: Capabilities = TCP

    def _ask(self, what: str, about: Any) -> None:
        self.asked.append((what, about))
        if what in self.throws:
            raise RuntimeError(f"{what} threw")

    def register(self, region: int, memory: memoryview) -> None: ...

    def endpoint(self, peer: PeerId) -> bytes:
        self._ask("endpoint", peer)
        return f"{self.me} for {peer.worker}".encode()

    def connect(self, peer: PeerId, endpoint: bytes) -> None:
        self._ask("connect", (peer.worker, endpoint.decode()))
        if "nonsense" in self.throws:
            raise ValueError("nonsense")

    def disconnect(self, peer: PeerId) -> None:
        self._ask("disconnect", peer.worker)

    def lay_out(self, tables: Sequence[PageTable]) -> None: ...

    def lend(self, loan: Loan) -> None:
        self.lent[loan.job] = loan

    def submit(self, copy: Copy) -> bool:
        if len(self.moving) >= self.room:
            return False
        self._ask("submit", copy.job)
        self.moving[copy.job] = copy
        return True

    def cancel(self, job: JobId) -> None:
        if self.lent.pop(job, None) is not None:  # all that was due under it came
            self.news.append(CopyEnded(job, Reason.CANCELLED, unwritten=0))
            return
        self._ask("cancel", job)
        if self.moving.pop(job, None) is not None:
            self.news.append(CopyEnded(job, Reason.CANCELLED))

    def fence(self, peer: PeerId) -> None:
        self._ask("fence", peer.worker)
        self.news.append(FenceEnded(peer))

    def drain(self) -> Sequence[TransportEvent]:
        self._ask("drain", None)
        news, self.news = self.news, []
        return news

    def set_waker(self, waker: Callable[[], None]) -> None: ...

    def close(self) -> None:
        self._ask("close", None)

    def arrive(self) -> None:
        """Everything under way arrives."""
        self.news += [CopyEnded(job) for job in self.moving]
        self.moving.clear()

    def were(self, what: str) -> list[Any]:
        return [about for each, about in self.asked if each == what]


@dataclass
class FakeStore:
    throws: set[str] = field(default_factory=set)
    puts: list[PutId] = field(default_factory=list)
    cancelled: list[PutId] = field(default_factory=list)
    ended: list[StoreEnded] = field(default_factory=list)

    def put(self, put: PutId, blocks: Groups, keys: tuple[bytes, ...], origins: tuple[str, ...] = ()) -> None:
        if "put" in self.throws:
            raise RuntimeError("put threw")
        self.puts.append(put)

    def cancel(self, put: PutId) -> None:
        self.cancelled.append(put)
        if "cancel" in self.throws:
            raise RuntimeError("cancel threw")

    def drain(self) -> Sequence[StoreEnded]:
        if "drain" in self.throws:
            raise RuntimeError("drain threw")
        ended, self.ended = self.ended, []
        return ended

    def set_waker(self, waker: Callable[[], None]) -> None: ...


class Worker:
    """A node, its ports and its engine's door."""

    def __init__(
        self,
        name: str,
        network: dict[WorkerId, FakeControl],
        ranks: int = 1,
        store: FakeStore | None = None,
        settings: Settings = Settings(),  # noqa: B008 - frozen
    ) -> None:
        numbers = count(1)
        me = PeerId(WorkerId(name), Incarnation(ord(name[0])))
        shape = Shape(ranks=ranks, heads=2)
        config = DoorwayConfig(
            me=me,
            ranks=ranks,
            groups=1,
            ticket_keys=(KEY,),
            ticket_ttl_s=60.0,
            mint=lambda: TransferId(f"{next(numbers):032x}"),
            wall=lambda: 0.0,
        )
        self.doorway = Doorway(config, EpochTable(shape.blocks))
        self.control = network[me.worker] = FakeControl(me.worker, network)
        self.transports = [FakeTransport(f"{name}#{rank}") for rank in range(ranks)]
        identity = Identity(me, "host", {"model": "m"}, shape.layout(), (TCP,), (KEY,))
        ledger = Ledger(identity, settings, self.doorway.epochs.all_of)
        self.problems: list[str] = []
        self.node = Node(
            ledger,
            self.control,
            [{"tcp": transport} for transport in self.transports],
            self.doorway,
            store,
            lambda what, number, error: self.problems.append(what),
        )
        self.reports: list[Any] = []

    def step(self, now: float) -> None:
        self.node.step(now)
        self.reports += self.doorway.duties()

    @property
    def failed(self) -> Reason | None:
        (first, *_) = [duty.end.reason for duty in self.reports if isinstance(duty, LoadReport)]
        return first


class Net:
    """P and D, stepped in turn."""

    def __init__(self, p_ranks: int = 1, d_ranks: int = 1, store: FakeStore | None = None) -> None:
        self.network: dict[WorkerId, FakeControl] = {}
        self.p = Worker("p", self.network, p_ranks, store)
        self.d = Worker("d", self.network, d_ranks)
        self.now = 0.0

    def steps(self, number: int = 12, arrive: bool = True) -> None:
        for _ in range(number):
            for worker in (self.p, self.d):
                worker.step(self.now)
                if arrive:
                    for transport in worker.transports:
                        transport.arrive()

    def load(self, arrive: bool = True, **options: Any) -> None:
        """D asks for a prompt that P has, and finds blocks for it."""
        ticket, _ = self.p.doorway.grant(DIGEST, TOKENS, ((1, 2, 3),))
        self.d.doorway.want(R, ticket, DIGEST, TOKENS, **options)
        self.steps(8, arrive)
        assert self.d.doorway.match(R).state is MatchState.FOUND
        self.d.doorway.allocated(R, ((4, 5, 6),), 0)
        self.steps(4, arrive)

    def push(self, arrive: bool = True) -> None:
        """The router sends both off at once; P writes."""
        handoff = HandoffId("f" * 32 + ".0")
        lease = self.p.doorway.begin(handoff, DIGEST, TOKENS)
        self.p.doorway.pin(lease, ((1, 2, 3),))
        self.p.doorway.progressed(lease, whole([3]))
        self.p.doorway.completed(lease)
        ticket = seal(Ticket(handoff, WorkerId("p"), 60.0), KEY)
        self.d.doorway.want(R, ticket, DIGEST, TOKENS, push=True)
        self.steps(8, arrive)
        self.d.doorway.allocated(R, ((4, 5, 6),), 0)
        self.steps(4, arrive)


class TestOrder:
    """Law: inputs noted before a message was received are handled before it."""

    def test_a_claim_never_overtakes_the_lease_that_its_ticket_is_of(self) -> None:
        """Rule 8: the ticket reached D, and D's claim P's inbox, before P's loop had turned once."""
        net = Net()
        net.load()  # they know each other now
        ticket, _ = net.p.doorway.grant(DIGEST, TOKENS, ((7, 8, 9),))
        net.d.doorway.want(RequestId("s"), ticket, DIGEST, TOKENS)
        net.d.step(0.0)
        assert net.p.control.inbox, "the claim is there"
        net.p.step(0.0)
        answers = [message for _, message in net.p.control.sent if isinstance(message, Granted | ClaimRefused)]
        assert [type(answer) for answer in answers] == [Granted, Granted]

    @pytest.mark.parametrize("digest", [b"another prompt's", None])
    def test_what_d_turns_away_is_given_back_without_a_wait(self, digest: bytes | None) -> None:
        """Promise 3: refused at the door, or before it; P's pins do not wait for the lease's end."""
        net = Net()
        ticket, _ = net.p.doorway.grant(DIGEST, TOKENS, ((1, 2, 3),))
        if digest is None:
            net.d.doorway.disown(ticket, Reason.BAD_MESSAGE)
        else:
            net.d.doorway.want(R, ticket, digest, TOKENS)
        net.steps(12)
        assert net.p.reports == [UnpinBlocks((1, 2, 3))] and net.now == 0.0

    def test_news_of_data_planes_come_before_messages(self) -> None:
        """A copy that had arrived is committed although a goodbye came meanwhile; both are in the same step."""
        net = Net()
        net.load(arrive=False)
        assert net.d.transports[0].moving
        net.d.transports[0].arrive()
        net.p.node.close(0.0)
        before = len(net.d.control.sent)
        net.d.step(0.0)
        assert next(type(message).__name__ for _, message in net.d.control.sent[before:]) == "Commit"

    def test_what_the_surroundings_tell_comes_before_messages_too(self) -> None:
        net = Net()
        net.load(arrive=False)
        net.d.node.tell(Departed(WorkerId("p")))
        net.d.step(0.0)
        assert net.d.failed is Reason.PEER_GONE

    def test_effects_are_carried_out_in_order(self) -> None:
        net = Net()
        net.load()
        kinds = [what for what, _ in net.d.transports[0].asked if what != "drain"]
        assert kinds == ["connect", "endpoint", "submit"]

    def test_the_next_deadline_is_the_ledger_s(self) -> None:
        net = Net()
        assert net.p.node.next_deadline() is None
        net.p.doorway.grant(DIGEST, TOKENS, ((1,),))
        net.p.step(100.0)
        assert net.p.node.next_deadline() == 115.0


class TestEndpoints:
    """Our rank r reaches the peer's rank s by what that rank minted for us: a matrix, in both directions."""

    @pytest.mark.parametrize(("p_ranks", "d_ranks"), [(1, 1), (2, 1), (1, 2), (2, 2)])
    def test_every_rank_is_connected_to_every_rank(self, p_ranks: int, d_ranks: int) -> None:
        net = Net(p_ranks, d_ranks)
        net.load()
        for r, transport in enumerate(net.d.transports):
            assert transport.were("connect") == [(f"p#{s}", f"p#{s} for d#{r}") for s in range(p_ranks)]
        for s, transport in enumerate(net.p.transports):
            assert transport.were("connect") == [(f"d#{r}", f"d#{r} for p#{s}") for r in range(d_ranks)]
        assert net.d.failed is None

    def test_an_endpoint_that_is_nonsense_fails_what_needs_it(self) -> None:
        net = Net()
        net.d.transports[0].throws.add("nonsense")
        ticket, _ = net.p.doorway.grant(DIGEST, TOKENS, ((1, 2, 3),))
        net.d.doorway.want(R, ticket, DIGEST, TOKENS)
        net.steps()
        found = net.d.doorway.match(R)
        assert found.end is not None and found.end.reason is Reason.UNREACHABLE
        assert "nonsense" in found.end.detail and not net.d.problems, "a peer's mistake is no fault of ours"

    def test_an_endpoint_that_cannot_be_minted_costs_the_frame_and_is_tried_again(self) -> None:
        net = Net()
        net.p.transports[0].throws.add("endpoint")
        ticket, _ = net.p.doorway.grant(DIGEST, TOKENS, ((1, 2, 3),))
        net.d.doorway.want(R, ticket, DIGEST, TOKENS)
        net.steps(2)
        assert net.p.problems == ["Send"]
        net.p.transports[0].throws.clear()
        net.now = 0.6
        net.steps()
        assert net.d.doorway.match(R).state is MatchState.FOUND

    def test_both_roles_share_a_connection_and_the_last_to_let_go_closes_it(self) -> None:
        net = Net()
        net.load()
        ticket, _ = net.d.doorway.grant(DIGEST, TOKENS, ((1,),))
        net.p.doorway.want(RequestId("back"), ticket, DIGEST, TOKENS)
        net.steps(6)
        net.d.node.tell(Departed(WorkerId("p"), reason=Reason.PEER_UNKNOWN))
        net.d.step(0.0)
        assert net.d.transports[0].were("disconnect") == ["p#0"], "once, although two held it"

    def test_one_role_alone_does_not_close_what_the_other_needs(self) -> None:
        net = Net()
        net.load()
        ticket, _ = net.d.doorway.grant(DIGEST, TOKENS, ((1,),))
        net.p.doorway.want(RequestId("back"), ticket, DIGEST, TOKENS)
        net.steps(6)
        links = net.d.node.ledger.consumer.links
        links.lose(links.by_worker[WorkerId("p")], Reason.PEER_GONE, "", 0.0)
        net.d.step(0.0)
        assert net.d.transports[0].were("disconnect") == []

    def test_a_connection_that_failed_late_fails_what_needs_it_and_is_opened_anew(self) -> None:
        """A rank's process says so only after `connect` returned: the ledger must not take the link for good."""
        net = Net()
        net.load()
        link = net.d.node.ledger.consumer.links.by_worker[WorkerId("p")]
        net.d.transports[0].news.append(OpenFailed(rank_peer(link.peer, 0), "no route"))
        net.d.step(0.0)
        assert net.d.node.ledger.consumer.links.by_worker.get(WorkerId("p")) is not link
        net.d.transports[0].news.append(OpenFailed(rank_peer(link.peer, 5), "of nobody"))
        net.d.transports[0].news.append(OpenFailed(PeerId(WorkerId("stranger#0"), link.peer.incarnation)))
        net.d.step(0.0)
        assert not net.d.problems

    def test_a_peer_that_says_to_have_fewer_ranks_than_it_said_before_keeps_none(self) -> None:
        """Seed 3753: a liar that greeted with four and then with three kept its fourth invitation for ever."""
        net = Net()
        node, liar = net.d.node, PeerId(WorkerId("liar"), Incarnation(3))
        for number, ranks in ((1, 4), (2, 3)):
            node._endpoints(Invitation(liar, "tcp", ranks, ("session", number)))
        net.d.transports[0].throws.add("disconnect")
        for number, ranks in ((1, 4), (2, 3)):
            node._do(Disconnect(liar, "tcp", ranks, ("session", number)))
        invited = [f"liar#{rank}" for rank in range(4)]
        assert net.d.transports[0].were("disconnect") == invited
        net.d.transports[0].throws.clear()
        net.d.step(AGAIN_S)
        assert net.d.transports[0].were("disconnect") == invited * 2, "and what threw is asked of all four again"

    def test_a_connection_that_could_not_be_closed_is_closed_later(self) -> None:
        """Else one hiccup of a library leaves somebody who was let go with access for ever."""
        net = Net()
        net.load()
        net.d.transports[0].throws.add("disconnect")
        net.d.node.tell(Departed(WorkerId("p"), reason=Reason.PEER_UNKNOWN))
        net.d.step(0.0)
        due = net.d.node.next_deadline()
        assert due == pytest.approx(AGAIN_S) and net.d.problems == ["disconnect.tcp"]
        net.d.transports[0].throws.clear()
        net.d.step(due)
        net.d.step(due + AGAIN_S)
        assert net.d.transports[0].were("disconnect") == ["p#0", "p#0"]

    def test_a_connection_that_could_not_be_closed_and_is_held_again_stays(self) -> None:
        net = Net()
        net.load()
        net.d.transports[0].throws.add("disconnect")
        net.d.node.tell(Departed(WorkerId("p"), reason=Reason.PEER_GONE))
        net.d.step(0.0)
        net.d.transports[0].throws.clear()
        ticket, _ = net.p.doorway.grant(DIGEST, TOKENS, ((1, 2, 3),))
        net.d.doorway.want(RequestId("later"), ticket, DIGEST, TOKENS)
        net.steps(6)
        assert net.d.node._held
        net.d.step(AGAIN_S)
        assert net.d.transports[0].were("disconnect") == ["p#0"], "only the one that threw"


class TestBackPressure:
    """A data plane with a bounded queue: copies wait in order, and none is lost."""

    def test_copies_wait_for_room_and_go_in_order(self) -> None:
        net = Net(p_ranks=2, d_ranks=1)
        (transport,) = net.d.transports
        transport.room = 1
        net.load(arrive=False)
        assert transport.were("submit") == [1] and len(net.d.node._backlog[0, "tcp"]) == 1
        transport.arrive()
        net.d.step(0.0)
        assert transport.were("submit") == [1, 2]
        net.steps()
        assert net.d.failed is None

    def test_a_copy_that_is_cancelled_while_it_waits_never_starts_and_ends(self) -> None:
        net = Net(p_ranks=2, d_ranks=1)
        (transport,) = net.d.transports
        transport.room = 1
        net.load(arrive=False)
        net.d.doorway.gave_up(R)
        net.steps(3, arrive=False)
        assert transport.were("submit") == [1] and transport.were("cancel") == [1]
        assert net.d.failed is Reason.ABORTED
        assert DropBlocks(R, (4, 5, 6)) in net.d.reports, "both copies are at rest"

    def test_a_copy_that_cannot_be_cancelled_keeps_its_blocks(self) -> None:
        net = Net()
        (transport,) = net.d.transports
        transport.throws.add("cancel")
        net.load(arrive=False)
        net.d.doorway.gave_up(R)
        net.steps(3, arrive=False)
        assert net.d.problems == ["CancelCopy"]
        assert not any(isinstance(duty, DropBlocks) for duty in net.d.reports)
        transport.news.append(CopyEnded(JobId(1), Reason.TRANSFER_FAILED, at_rest=False))
        transport.news.append(CopyRested(JobId(1)))
        net.steps(1)
        assert DropBlocks(R, (4, 5, 6)) in net.d.reports

    def test_a_submit_that_throws_costs_the_copy(self) -> None:
        net = Net()
        net.d.transports[0].throws.add("submit")
        net.load()
        assert net.d.failed is Reason.TRANSFER_FAILED and net.d.node.faults["submit"] == 1
        (report,) = [duty for duty in net.d.reports if isinstance(duty, LoadReport)]
        assert report.end.detail == "RuntimeError: submit threw"
        assert DropBlocks(R, (4, 5, 6)) in net.d.reports

    def test_a_submit_that_throws_when_there_is_room_again_costs_the_copy_too(self) -> None:
        net = Net(p_ranks=2, d_ranks=1)
        (transport,) = net.d.transports
        transport.room = 1
        net.load(arrive=False)
        transport.arrive()
        transport.throws.add("submit")
        net.steps(2, arrive=False)
        assert net.d.failed is Reason.TRANSFER_FAILED


class TestPush:
    def test_p_s_writes_go_to_its_own_ranks(self) -> None:
        net = Net(p_ranks=2, d_ranks=2)
        net.push()
        net.steps()
        assert net.d.failed is None
        assert all(transport.were("submit") for transport in net.p.transports)
        assert not any(transport.were("submit") for transport in net.d.transports)
        assert UnpinBlocks((1, 2, 3)) in net.p.reports

    def test_a_fence_runs_on_every_rank_and_its_end_frees_the_blocks(self) -> None:
        net = Net(p_ranks=1, d_ranks=2)
        net.push(arrive=False)
        net.d.node.tell(Departed(WorkerId("p")))
        net.d.step(0.0)
        assert [transport.were("fence") for transport in net.d.transports] == [["p#0"], ["p#0"]]
        assert not any(isinstance(duty, DropBlocks) for duty in net.d.reports)
        net.d.step(0.0)
        assert DropBlocks(R, (4, 5, 6)) in net.d.reports

    def test_a_fence_that_threw_once_is_asked_for_again(self) -> None:
        """Else one hiccup of a library keeps D's blocks for ever."""
        net = Net()
        net.d.transports[0].throws.add("fence")
        net.push(arrive=False)
        net.d.node.tell(Departed(WorkerId("p")))
        net.d.step(0.0)
        due = net.d.node.next_deadline()
        assert due == pytest.approx(AGAIN_S) and net.d.problems == ["StartFence"]
        net.d.transports[0].throws.clear()
        net.d.step(due)
        net.d.step(due)
        assert DropBlocks(R, (4, 5, 6)) in net.d.reports

    def test_a_fence_that_threw_is_over_before_the_peer_is_invited_again(self) -> None:
        """After it, it would shut out the endpoint that the peer was just given."""
        net = Net()
        net.d.transports[0].throws.add("fence")
        net.push(arrive=False)
        net.d.node.tell(Departed(WorkerId("p")))
        net.d.step(0.0)
        minted = net.d.transports[0].were("endpoint")
        ticket, _ = net.p.doorway.grant(DIGEST, TOKENS, ((1, 2, 3),))
        net.d.doorway.want(RequestId("later"), ticket, DIGEST, TOKENS)
        net.steps(6)
        assert net.d.transports[0].were("endpoint") == minted, "not fenced yet: asked again with the next greeting"
        net.d.transports[0].throws.clear()
        net.now = 1.0
        net.steps(6)
        asked = [what for what, _ in net.d.transports[0].asked if what in ("fence", "endpoint")]
        assert asked[-2:] == ["fence", "endpoint"], asked

    @pytest.mark.parametrize("port", ["cancel", "drain"])
    def test_what_was_not_stopped_or_not_heard_of_once_is_asked_again(self, port: str) -> None:
        net = Net()
        (transport,) = net.d.transports
        net.load(arrive=False)
        transport.throws.add(port)
        net.d.doorway.gave_up(R)
        net.d.step(0.0)
        net.d.step(0.0)
        assert not any(isinstance(duty, DropBlocks) for duty in net.d.reports)
        transport.throws.clear()
        due = net.d.node.next_deadline()
        assert due is not None and due <= AGAIN_S
        net.d.step(due)
        net.d.step(due)
        assert DropBlocks(R, (4, 5, 6)) in net.d.reports

    def test_a_fence_that_throws_never_frees_a_block(self) -> None:
        """Safety first: what could not be shut out may still land."""
        net = Net()
        net.d.transports[0].throws.add("fence")
        net.push(arrive=False)
        net.d.node.tell(Departed(WorkerId("p")))
        for now in range(200):
            net.d.step(float(now))
        assert net.d.failed is Reason.PEER_GONE
        assert not any(isinstance(duty, DropBlocks) for duty in net.d.reports)


class TestStore:
    """A failed put costs a cache miss, never a pin (seed 003)."""

    def test_a_put_is_stored_and_unpinned(self) -> None:
        net = Net(store=(store := FakeStore()))
        net.p.doorway.put(((1, 2),), (b"key",))
        net.p.step(0.0)
        assert store.puts == [1] and not net.p.reports
        store.ended.append(StoreEnded(PutId(1)))
        net.p.step(0.0)
        assert net.p.reports == [UnpinBlocks((1, 2))]

    def test_without_a_store_a_put_fails_at_once(self) -> None:
        net = Net()
        net.p.doorway.put(((1, 2),), (b"key",))
        net.p.step(0.0)
        assert net.p.reports == [UnpinBlocks((1, 2))]

    def test_a_store_that_throws_keeps_no_pin(self) -> None:
        net = Net(store=FakeStore({"put"}))
        net.p.doorway.put(((1, 2),), (b"key",))
        net.p.step(0.0)
        assert net.p.reports == [UnpinBlocks((1, 2))] and net.p.problems == ["StorePut"]

    def test_a_slow_put_is_cancelled_and_keeps_its_pin_until_the_store_has_stopped(self) -> None:
        net = Net(store=(store := FakeStore({"cancel"})))
        net.p.doorway.put(((1, 2),), (b"key",))
        net.p.step(0.0)
        net.p.step(31.0)
        assert store.cancelled == [1] and net.p.problems == ["CancelPut"] and not net.p.reports
        store.ended.append(StoreEnded(PutId(1), Reason.CANCELLED))
        net.p.step(32.0)
        assert net.p.reports == [UnpinBlocks((1, 2))]

    def test_news_that_cannot_be_had_now_are_asked_for_again(self) -> None:
        net = Net(store=(store := FakeStore({"drain"})))
        net.p.doorway.put(((1, 2),), (b"key",))
        net.p.step(0.0)
        store.ended.append(StoreEnded(PutId(1)))
        net.p.step(0.0)
        assert set(net.p.problems) == {"drain.store"}
        store.throws.clear()
        net.p.step(0.0)
        assert net.p.reports == [UnpinBlocks((1, 2))]


class TestControl:
    def test_a_worker_that_the_control_plane_does_not_know_fails_the_request_alone(self) -> None:
        net = Net()
        ticket = seal(Ticket(HandoffId("0" * 32 + ".0"), WorkerId("nobody"), 60.0), KEY)
        net.d.doorway.want(R, ticket, DIGEST, TOKENS)
        net.steps(1)
        found = net.d.doorway.match(R)
        assert found.end is not None and found.end.reason is Reason.PEER_UNKNOWN

    def test_a_control_plane_that_throws_costs_the_frame(self) -> None:
        net = Net()
        net.d.control.broken = True
        ticket, _ = net.p.doorway.grant(DIGEST, TOKENS, ((1, 2, 3),))
        net.d.doorway.want(R, ticket, DIGEST, TOKENS)
        net.steps(2)
        assert net.d.problems == ["Send"]
        net.d.control.broken = False
        net.now = 0.6
        net.steps()
        assert net.d.doorway.match(R).state is MatchState.FOUND

    def test_garbage_costs_nothing_but_a_count(self) -> None:
        net = Net()
        net.p.control.inbox.append((WorkerId("d"), b"garbage"))
        net.p.step(0.0)
        assert net.p.node.ledger.desk.counts["frames_refused.bad_message"] == 1


class TestFaults:
    """An exception of a port costs what it was asked to do, never the step."""

    def test_a_data_plane_that_throws_when_asked_for_news_does_not_stop_the_others(self) -> None:
        net = Net(d_ranks=2)
        net.d.transports[0].throws.add("drain")
        net.load()
        net.d.transports[0].throws.clear()
        net.steps()
        assert set(net.d.problems) == {"drain.tcp"} and net.d.failed is None

    def test_closing_says_goodbye_and_closes_every_data_plane_whatever_one_throws(self) -> None:
        net = Net(d_ranks=2)
        net.load()
        net.d.transports[0].throws.add("close")
        net.d.node.close(0.0)
        assert Goodbye() in [message for _, message in net.d.control.sent]
        assert all(transport.were("close") == [None] for transport in net.d.transports)
        assert net.d.problems == ["close.tcp"]

    def test_only_the_first_few_faults_of_a_kind_are_logged(self, caplog: pytest.LogCaptureFixture) -> None:
        with caplog.at_level(logging.ERROR):
            for number in range(1, 20):
                log_fault("submit", number, RuntimeError("again"))
        said = [record for record in caplog.records if record.name == log_fault.__module__]
        assert len(said) == FAULTS_LOGGED_MAX

    def test_faults_are_counted_by_what_was_asked(self) -> None:
        net = Net()
        net.d.transports[0].throws.add("drain")
        net.steps(3)
        assert net.d.node.faults["drain.tcp"] == 3


class TestExtra:
    """What ranks tell besides their transports' events."""

    def test_progress_that_a_rank_tells_counts_like_the_engine_s_own(self) -> None:
        net = Net()
        handoff = HandoffId("f" * 32 + ".0")
        lease = net.p.doorway.begin(handoff, DIGEST, TOKENS)
        told = [LeaseProgressed(lease, 0, whole([3]))]
        net.p.node.extra = lambda: [told.pop()] if told else []  # in the same step as the lease itself
        net.p.doorway.pin(lease, ((1, 2, 3),))
        net.p.doorway.completed(lease)
        ticket = seal(Ticket(handoff, WorkerId("p"), 60.0), KEY)
        net.d.doorway.want(R, ticket, DIGEST, TOKENS)
        net.steps(8)
        net.d.doorway.allocated(R, ((4, 5, 6),), 0)
        net.steps()
        assert net.d.failed is None and not told

    def test_an_exception_costs_the_news_of_that_step_alone(self) -> None:
        net = Net()

        def throws() -> Sequence[LeaseProgressed]:
            raise RuntimeError("the link is gone")

        net.d.node.extra = throws
        net.load()
        assert set(net.d.problems) == {"drain.extra"} and net.d.failed is None

    def test_a_rank_that_speaks_of_blocks_which_the_engine_has_just_pinned_is_heard_after_it(self) -> None:
        """A rank can be done with a chunk before the node has looked at the engine's door again."""
        net = Net()
        handoff = HandoffId("f" * 32 + ".0")
        lease = net.p.doorway.begin(handoff, DIGEST, TOKENS)
        net.d.doorway.want(R, seal(Ticket(handoff, WorkerId("p"), 60.0), KEY), DIGEST, TOKENS)
        net.steps(8)
        told = []

        def while_the_node_looks_elsewhere() -> Sequence[LeaseProgressed]:
            if told:
                return []
            told.append(True)
            net.p.doorway.pin(lease, ((1, 2, 3),))
            return [LeaseProgressed(lease, 0, whole([3]))]

        net.p.node.extra = while_the_node_looks_elsewhere
        net.steps()
        net.p.doorway.completed(lease)
        net.steps()
        net.d.doorway.allocated(R, ((4, 5, 6),), 0)
        net.steps(8)
        assert net.d.failed is None
