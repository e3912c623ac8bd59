"""The contract of an engine's adapter as a public suite: run it on your own.

    @pytest.mark.parametrize("case", check_engine.cases, ids=str)
    def test_my_adapter_keeps_the_contract(case: EngineCase) -> None:
        case(EngineRig(MyEngine))

or `check_engine(MyEngine)` for all of it at once. Law: whatever happens, the answer is that of one engine, and
afterwards nothing is held. It is of pull, and in virtual time, so that leases run out at once.

Two engines with adapters, nodes, a wire and a data plane, all in virtual time: what `check_engine` runs on.

Laws: nothing here sleeps, and nothing is random; a step of the rig is a step of each engine and of each node. The data
plane copies at once unless it is held, and cannot cancel: what was given up lands when it is let go, as with
the worst of the real ones.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Protocol

import msgspec

from kvbaton.node.doorway import Doorway, DoorwayConfig
from kvbaton.node.epochs import EpochTable
from kvbaton.node.node import Node
from kvbaton.protocol.effects import Capabilities, Copy
from kvbaton.protocol.errors import Reason
from kvbaton.protocol.events import CopyEnded, CopyRested, Departed
from kvbaton.protocol.geometry.layout import EngineLayout
from kvbaton.protocol.ids import Incarnation, JobId, PeerId, RequestId, TransferId, WorkerId, rank_peer
from kvbaton.protocol.machines.context import Identity
from kvbaton.protocol.machines.ledger import Ledger
from kvbaton.protocol.settings import Settings
from kvbaton.transports.core.transport import TransportEvent

TICK_S = 0.01
STEPS_MAX = 2000
REST_S = 400.0
TICKET_KEYS = (b"the key of a cluster of two",)
PLANE = Capabilities("direct", one_sided=True, can_write=False, can_fence=False, cancels=False, same_host=False)


class Engine(Protocol):
    """An engine and its adapter. `step` is one step of its scheduler; the rest only notes what is wanted."""

    doorway: Doorway
    layout: EngineLayout
    memory: Sequence[memoryview]  # of each rank, as the layout's regions; the adapter's KV is in there and nowhere else

    def prefill(self, request: RequestId, prompt: Sequence[int]) -> None:
        """Compute a prompt and lease it (pull); `finished` then has the ticket."""

    def decode(self, request: RequestId, prompt: Sequence[int], ticket: str) -> None:
        """Answer a prompt, with KV that the ticket leads to; without a ticket, or if that fails, compute it."""

    def abort(self, request: RequestId) -> None: ...

    def step(self) -> None: ...

    def finished(self) -> Mapping[RequestId, str]:
        """What requests came to: a ticket, or an answer that depends on every byte of the prompt's KV."""

    def free_blocks(self) -> int:
        """Blocks that a new request could have now."""


Make = Callable[[Doorway], Engine]


class Wire:
    """Frames between two nodes; cut, it loses them."""

    def __init__(self) -> None:
        self.is_cut = False
        self.inboxes: dict[WorkerId, deque[tuple[WorkerId, bytes]]] = {}


@dataclass
class Line:
    """One node's end of the wire."""

    me: WorkerId
    wire: Wire

    def send(self, worker: WorkerId, frame: bytes) -> bool:
        if worker not in self.wire.inboxes:
            return False
        if not self.wire.is_cut:
            self.wire.inboxes[worker].append((self.me, frame))
        return True

    def receive(self) -> Sequence[tuple[WorkerId, bytes]]:
        inbox = self.wire.inboxes[self.me]
        frames = list(inbox)
        inbox.clear()
        return frames


@dataclass
class Fabric:
    """The memory of all ranks; while it is held, copies wait, or only those that were given up."""

    memory: dict[PeerId, memoryview] = field(default_factory=dict)
    is_held: bool = False
    is_late_held: bool = False


class DirectTransport:
    """Copies within the call, or when the fabric lets go."""

    capabilities = PLANE

    def __init__(self, me: PeerId, fabric: Fabric) -> None:
        self._me = me
        self._fabric = fabric
        self._waiting: dict[JobId, Copy] = {}
        self._given_up: dict[JobId, bytes] = {}  # with what the source held then: it is on its way
        self._news: list[TransportEvent] = []

    def endpoint(self, peer: PeerId) -> bytes:
        return b"direct"

    def connect(self, peer: PeerId, endpoint: bytes) -> None: ...

    def disconnect(self, peer: PeerId) -> None:
        for job, copy in self._waiting.items():
            if copy.peer == peer:
                self.cancel(job)

    def submit(self, copy: Copy) -> bool:
        self._waiting[copy.job] = copy
        return True

    def cancel(self, job: JobId) -> None:
        if job in self._waiting and job not in self._given_up:
            self._given_up[job] = bytes(self._fabric.memory[self._waiting[job].peer])
            self._news.append(CopyEnded(job, Reason.CANCELLED, at_rest=False))

    def fence(self, peer: PeerId) -> None: ...

    def drain(self) -> Sequence[TransportEvent]:
        for job in [] if self._fabric.is_held else list(self._waiting):
            if not (self._fabric.is_late_held and job in self._given_up):
                self._move(self._waiting.pop(job))
        news, self._news = self._news, []
        return news

    def set_waker(self, waker: Callable[[], None]) -> None: ...

    def close(self) -> None: ...

    def _move(self, copy: Copy) -> None:
        here, flat = self._fabric.memory[self._me], copy.spans
        is_late = copy.job in self._given_up
        there = self._given_up.pop(copy.job, self._fabric.memory[copy.peer])
        for local, remote, size in zip(flat[0::3], flat[1::3], flat[2::3], strict=True):
            here[local : local + size] = there[remote : remote + size]
        self._news.append(CopyRested(copy.job) if is_late else CopyEnded(copy.job))


class Party:
    """One engine with all that it needs to take part."""

    def __init__(self, name: str, rig: EngineRig) -> None:
        numbers = count(1)
        self.peer = PeerId(WorkerId(name), Incarnation(ord(name[0])))
        config = DoorwayConfig(
            me=self.peer,
            ranks=rig.ranks,
            groups=rig.groups,
            ticket_keys=TICKET_KEYS,
            ticket_ttl_s=120.0,
            mint=lambda: TransferId(f"{ord(name[0]):02x}{next(numbers):030x}"),
            wall=lambda: rig.now,
        )
        self.engine = rig.make(Doorway(config, EpochTable(0)))
        self.blocks = self.engine.free_blocks()
        ranks = [rank_peer(self.peer, rank) for rank in range(rig.ranks)]
        rig.fabric.memory.update(zip(ranks, self.engine.memory, strict=True))
        rig.wire.inboxes[self.peer.worker] = deque()
        identity = Identity(self.peer, name, {"model": "of the contract"}, self.engine.layout, (PLANE,), TICKET_KEYS)
        ledger = Ledger(identity, Settings(), self.engine.doorway.epochs.all_of)
        planes = [{PLANE.name: DirectTransport(rank, rig.fabric)} for rank in ranks]
        self.node = Node(ledger, Line(self.peer.worker, rig.wire), planes, self.engine.doorway)

    def counted(self, name: str) -> int:
        return self.node.ledger.desk.counts.get(name, 0)

    @property
    def held(self) -> str:
        """What is not at rest, in words; empty when all is."""
        free, pinned = self.engine.free_blocks(), self.engine.doorway.pinned_blocks
        if (free, pinned) == (self.blocks, 0) and not self.engine.doorway.busy:
            return ""
        return f"{self.peer.worker}: {free} of {self.blocks} blocks are free, {pinned} are pinned"


class EngineRig:
    """A prefill engine and a decode engine, made alike."""

    def __init__(self, make: Make, *, ranks: int = 1, groups: int = 1) -> None:
        self.make, self.ranks, self.groups = make, ranks, groups
        self.now = 0.0
        self.wire, self.fabric = Wire(), Fabric()
        self.p, self.d = Party("p", self), Party("d", self)
        self._names = count(1)

    def name(self) -> RequestId:
        return RequestId(f"request-{next(self._names)}")

    def step(self, seconds: float = TICK_S) -> None:
        self.now += seconds
        for party in (self.p, self.d):
            party.engine.step()
            party.node.step(self.now)

    def later(self, seconds: float) -> None:
        """Let time pass, a quarter of a second at a time."""
        for _ in range(round(seconds * 4)):
            self.step(0.25)

    def until(self, what: str, predicate: Callable[[], bool], steps_max: int = STEPS_MAX) -> None:
        for _ in range(steps_max):
            if predicate():
                return
            self.step()
        raise AssertionError(f"{what}: not within {steps_max} steps; {self.p.held} {self.d.held}")

    def result(self, party: Party, request: RequestId) -> str:
        self.until(f"{request} at {party.peer.worker}", lambda: request in party.engine.finished())
        return party.engine.finished()[request]

    def prefilled(self, prompt: Sequence[int]) -> str:
        """The ticket for a prompt that P has computed."""
        request = self.name()
        self.p.engine.prefill(request, prompt)
        return self.result(self.p, request)

    def decoding(self, prompt: Sequence[int], ticket: str) -> RequestId:
        request = self.name()
        self.d.engine.decode(request, prompt, ticket)
        return request

    def blocks_of(self, prompt: Sequence[int]) -> int:
        """How many blocks a prompt needs in the first group."""
        return -(-len(prompt) // self.p.engine.layout.groups[0].block_tokens)

    def alone(self, prompt: Sequence[int]) -> str:
        """The answer of an engine that hands nothing over."""
        return (single := EngineRig(self.make, ranks=self.ranks, groups=self.groups)).result(
            single.d, single.decoding(prompt, "")
        )

    def rest(self) -> None:
        """Let everything end that has a deadline; AssertionError when something is held for good."""
        self.fabric.is_held = self.fabric.is_late_held = self.wire.is_cut = False
        until = self.now + REST_S
        while (held := f"{self.p.held} {self.d.held}".strip()) and self.now < until:
            self.step(0.25)
        assert not held, f"held for good: {held}"
        assert not self.p.node.faults and not self.d.node.faults, (self.p.node.faults, self.d.node.faults)


LEASE_S = 15.0
STEPS_TO_CLAIM = 20  # more than a request needs from its claim to its copy
PROMPTS: Sequence[Sequence[int]] = [
    tuple(range(seed, seed + length)) for seed, length in ((1, 1), (20, 7), (3, 16), (40, 19), (5, 33))
]
"""Of one token, of whole blocks and of others; most engines have blocks of 1 to 16 tokens."""

Check = Callable[[EngineRig], None]


class EngineCase(msgspec.Struct, frozen=True):
    """One law, as a sentence and a function. Whatever it was about, nothing may be held in the end."""

    run: Check

    def __str__(self) -> str:
        return self.run.__name__

    def __call__(self, rig: EngineRig) -> None:
        self.run(rig)
        rig.rest()


def the_answer_is_that_of_one_engine(rig: EngineRig) -> None:
    for number, prompt in enumerate(PROMPTS, 1):
        answer = rig.result(rig.d, rig.decoding(prompt, rig.prefilled(prompt)))
        assert answer == rig.alone(prompt)
        assert rig.d.counted("ends.delivered") == number, "it was computed, not handed over"


def many_at_once_each_get_their_own(rig: EngineRig) -> None:
    asked = [(prompt, rig.decoding(prompt, rig.prefilled(prompt))) for prompt in PROMPTS]
    for prompt, request in asked:
        assert rig.result(rig.d, request) == rig.alone(prompt)


def answers_differ_where_the_kv_does(rig: EngineRig) -> None:
    """Otherwise nothing here would show a wrong byte."""
    assert len({rig.alone(prompt) for prompt in PROMPTS}) == len(PROMPTS)


def a_ticket_that_leads_nowhere_costs_a_prefill_and_no_more(rig: EngineRig) -> None:
    first = PROMPTS[3]
    second = tuple(token + 50 for token in first)  # as long, so that only the content tells them apart
    of_first = rig.prefilled(first)
    for ticket in ("forged", of_first[:-2], of_first):  # the last is genuine, and of another prompt
        assert rig.result(rig.d, rig.decoding(second, ticket)) == rig.alone(second)
    assert rig.d.counted("ends.delivered") == 0


def a_ticket_is_good_once(rig: EngineRig) -> None:
    prompt = PROMPTS[2]
    ticket = rig.prefilled(prompt)
    for _ in range(2):
        assert rig.result(rig.d, rig.decoding(prompt, ticket)) == rig.alone(prompt)
    assert rig.d.counted("ends.delivered") == 1


def a_prompt_that_nobody_reads_is_kept_for_its_lease_and_no_longer(rig: EngineRig) -> None:
    rig.prefilled(PROMPTS[2])
    rig.later(1.0)
    free = rig.p.blocks - rig.p.engine.free_blocks()
    assert free >= rig.blocks_of(PROMPTS[2]), "what was leased is not pinned: it may be reused before D reads it"
    rig.later(LEASE_S + 1.0)
    assert not rig.p.held, "what nobody read is still held"


def a_request_that_is_aborted_after_any_step_leaves_nothing(rig: EngineRig) -> None:
    for steps in range(16):
        prompt = PROMPTS[steps % len(PROMPTS)]
        request = rig.decoding(prompt, rig.prefilled(prompt))
        for _ in range(steps):
            rig.step()
        rig.d.engine.abort(request)
    rig.rest()


def a_prefill_that_is_aborted_leaves_nothing(rig: EngineRig) -> None:
    request = rig.name()
    rig.p.engine.prefill(request, PROMPTS[4])
    rig.p.engine.abort(request)


def a_late_read_of_reused_blocks_never_counts(rig: EngineRig) -> None:
    """The wire is cut until P's lease is over and P has computed over what it leased; then D's copies arrive."""
    prompt = PROMPTS[3]
    request = _copying(rig, prompt)
    rig.wire.is_cut = True
    rig.later(LEASE_S + 1.0)
    _overwrite(rig)
    rig.wire.is_cut = rig.fabric.is_held = False
    assert rig.result(rig.d, request) == rig.alone(prompt), "it answered from what P had computed since"
    assert rig.d.counted("ends.delivered") == 0


def bytes_that_land_late_meet_no_other_request(rig: EngineRig) -> None:
    """A request is aborted in mid-copy; its bytes land when others have loaded into every block that they could get."""
    first = _copying(rig, PROMPTS[4])
    rig.d.engine.abort(first)
    rig.until("P's release", lambda: not rig.p.held)
    fitting = rig.p.blocks // rig.blocks_of(PROMPTS[4])
    prompts = [tuple(token + 100 * number for token in PROMPTS[4]) for number in range(1, fitting + 1)]
    others = [(prompt, rig.decoding(prompt, rig.prefilled(prompt))) for prompt in prompts]
    for _ in range(STEPS_TO_CLAIM):
        rig.step()
    assert any(rig.d.engine.doorway.holds(other) for _, other in others)
    rig.fabric.is_held, rig.fabric.is_late_held = False, True
    rig.step()
    rig.fabric.is_late_held = False
    for prompt, other in others:
        assert rig.result(rig.d, other) == rig.alone(prompt), "another request's bytes landed in its blocks"


def the_death_of_p_costs_a_prefill_and_no_more(rig: EngineRig) -> None:
    prompt = PROMPTS[3]
    request = _copying(rig, prompt)
    rig.d.node.tell(Departed(rig.p.peer.worker))
    rig.later(1.0)
    rig.fabric.is_held = False
    assert rig.result(rig.d, request) == rig.alone(prompt)


def _copying(rig: EngineRig, prompt: Sequence[int]) -> RequestId:
    """A request of D's whose copies are under way, and stay so until the fabric lets go."""
    ticket = rig.prefilled(prompt)
    rig.fabric.is_held = True
    request = rig.decoding(prompt, ticket)
    rig.until("blocks for the load", lambda: rig.d.engine.doorway.holds(request))
    rig.step()
    return request


def _overwrite(rig: EngineRig) -> None:
    """Have P compute until every block has been handed out again, twice over."""
    prompt = PROMPTS[4]
    for number in range(1, 2 * rig.p.blocks // rig.blocks_of(prompt) + 2):
        rig.result(rig.p, _computing(rig, tuple(token + 1000 * number for token in prompt)))


def _computing(rig: EngineRig, prompt: Sequence[int]) -> RequestId:
    request = rig.name()
    rig.p.engine.decode(request, prompt, "")
    return request


class EngineContract:
    """Callable on what makes an engine behind a door; `cases` to run them one by one."""

    cases: tuple[EngineCase, ...] = tuple(
        EngineCase(check)
        for check in (
            the_answer_is_that_of_one_engine,
            many_at_once_each_get_their_own,
            answers_differ_where_the_kv_does,
            a_ticket_that_leads_nowhere_costs_a_prefill_and_no_more,
            a_ticket_is_good_once,
            a_prompt_that_nobody_reads_is_kept_for_its_lease_and_no_longer,
            a_request_that_is_aborted_after_any_step_leaves_nothing,
            a_prefill_that_is_aborted_leaves_nothing,
            a_late_read_of_reused_blocks_never_counts,
            bytes_that_land_late_meet_no_other_request,
            the_death_of_p_costs_a_prefill_and_no_more,
        )
    )

    def __call__(self, make: Make, *, ranks: int = 1, groups: int = 1) -> None:
        """Run every case on a rig of its own; AssertionError names the law that is broken."""
        for case in self.cases:
            try:
                case(EngineRig(make, ranks=ranks, groups=groups))
            except AssertionError as error:
                raise AssertionError(f"{case}: {error}") from error


check_engine = EngineContract()
