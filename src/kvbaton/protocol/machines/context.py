"""Context shared by the roles of one ledger: identity, settings, timers, effects, job ids and counters, and copies.

Law: effects are only appended here, and taken by the node after each input; nothing here decides anything.

Deadlines. Time is an argument everywhere: nothing in this package reads a clock.

Laws: a key has at most one due time; setting it again replaces it, and a popped key is gone. A key set after a time has
been popped is due after that time, so everything due at one time is popped in as many steps as there were keys: a key
that is set again for now waits for the next reading of the clock.

Origins of an engine's cached KV: the members from whom KV came since its prefix cache was last empty.

Laws: an origin is noted before a block of its KV can be found, and every grant names all of them, so D knows also the
members from whom its P took. KV of a member that is gone (removed, or its key no longer allows it to grant) is not
taken; once one of the origins is gone, the engine forgets its cache: once, until it says that it has. Beyond
`ORIGINS_MAX` names any removal counts. A name that is wrong costs a reset at that member's removal, and nothing else.

From "this much is ready" to copies on every rank (`Route`, `Cargo`, `moves`): the same for D's reads and P's writes.
"""

from __future__ import annotations

import hashlib
import heapq
import itertools
import math
from array import array
from collections import Counter, deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

import msgspec

from kvbaton.protocol.effects import (
    Begun,
    CancelCopy,
    Capabilities,
    Copy,
    Direction,
    Effect,
    Ended,
    Lend,
    Loan,
    Mark,
    Send,
    Side,
    StartCopy,
    Step,
)
from kvbaton.protocol.errors import ProtocolError, Reason
from kvbaton.protocol.events import CopyEnded, Groups
from kvbaton.protocol.geometry.layout import NULL_BLOCK, EngineLayout
from kvbaton.protocol.geometry.plan import Plan
from kvbaton.protocol.geometry.progress import Progress, advance, nothing, whole
from kvbaton.protocol.geometry.spans import Area, BlockLists, Move, SpanSide, blocks_per_call, segments
from kvbaton.protocol.ids import Incarnation, JobId, PeerId, WorkerId, rank_peer
from kvbaton.protocol.legality import Act, Role, may
from kvbaton.protocol.settings import Settings
from kvbaton.protocol.wire.messages import ALL_FEATURES, ORIGINS_MAX, SPOKEN, Card, Message, Versions

MARK_BYTES = 8
ANYBODY = "*"
"""Stands for more members than there is room for."""


def mark_of(origin: str) -> bytes:
    """An origin as values of the store name it: by a hash of its name, or the very mark of one that only they named."""
    if origin.startswith("#"):
        return bytes.fromhex(origin[1:])
    name = origin.partition(" ")[0]
    return hashlib.blake2b(name.encode(), digest_size=MARK_BYTES, person=b"kvbaton-origin").digest()


def marked(mark: bytes) -> str:
    """An origin of which only a value's mark is known."""
    return f"#{mark.hex()}"


class Origins:
    """Of one engine."""

    __slots__ = ("_forgetting", "_names")

    def __init__(self) -> None:
        self._names: dict[str, None] = {}  # in order, so that equal histories give equal messages
        self._forgetting = False

    @property
    def names(self) -> tuple[str, ...]:
        """As a grant tells them."""
        return tuple(self._names) if len(self._names) <= ORIGINS_MAX else (ANYBODY,)

    def note(self, names: Iterable[str]) -> None:
        if len(self._names) <= ORIGINS_MAX:  # one more than that is as good as all
            self._names.update(dict.fromkeys(filter(None, names)))

    def gone(self, is_gone: Callable[[str], bool]) -> tuple[str, ...]:
        """Those for whom the cache must be forgotten now; none while the engine is already about to."""
        if self._forgetting or not self._names:
            return ()
        found = (ANYBODY,) if ANYBODY in self.names else tuple(name for name in self._names if is_gone(name))
        self._forgetting = bool(found)
        return found

    def forgotten(self) -> None:
        """The engine's cache is empty: nothing in it is of anybody."""
        self._names.clear()
        self._forgetting = False


K = TypeVar("K", bound=Hashable)

_SLACK = 64


class Timers(Generic[K]):
    """A set of keys with due times; cheap to move forward, which is what renewals do."""

    __slots__ = ("_at", "_heap", "_order", "_soonest")

    def __init__(self) -> None:
        self._at: dict[K, float] = {}
        self._heap: list[tuple[float, int, K]] = []
        self._order = itertools.count()
        self._soonest = -math.inf  # just after the latest popped time

    def set(self, key: K, at: float) -> None:
        at = max(self._soonest, at)  # in this order: a NaN, which the heap would lose, is due next
        self._at[key] = at
        heapq.heappush(self._heap, (at, next(self._order), key))
        if len(self._heap) > 2 * len(self._at) + _SLACK:
            self._heap = [(due, next(self._order), k) for k, due in self._at.items()]
            heapq.heapify(self._heap)

    def hasten(self, key: K, at: float) -> None:
        """Due at `at`, unless it is due sooner."""
        self.set(key, min(at, self._at.get(key, math.inf)))

    def clear(self, key: K) -> None:
        self._at.pop(key, None)

    def pop_due(self, now: float) -> K | None:
        """The next key due at or before `now`, removed; None when there is none."""
        self._soonest = max(self._soonest, math.nextafter(now, math.inf))
        due = self.next_at()
        if due is None or due > now:
            return None
        key = heapq.heappop(self._heap)[2]
        del self._at[key]
        return key

    def next_at(self) -> float | None:
        """When the earliest key is due; None when nothing waits."""
        while self._heap:
            at, _, key = self._heap[0]
            if self._at.get(key) == at:
                return at
            heapq.heappop(self._heap)
        return None

    def __len__(self) -> int:
        return len(self._at)


MARKS_MAX = 16_384
"""Marks not taken yet; the oldest are forgotten."""

TimerKey = tuple[str, object]
EpochsOf = Callable[[Sequence[int]], list[int]]
"""The epochs of these blocks, as they are now."""


@dataclass(slots=True)
class Identity:
    """The identity of this node; changes only when the engine's cache is replaced (a new incarnation)."""

    me: PeerId
    host: str
    compat: dict[str, str]
    layout: EngineLayout
    transports: tuple[Capabilities, ...]  # best first
    ticket_keys: tuple[bytes, ...]
    wall_offset_s: float = 0.0  # wall clock = node clock + this
    exact_epochs: bool = True  # the engine's pool reports before it reuses a block
    required: int = 0
    optional: int = int(ALL_FEATURES)
    versions: Versions = SPOKEN
    role_of: Callable[[WorkerId], Role] = lambda worker: Role.BOTH  # the role of a member's key
    origin_of: Callable[[WorkerId], str] = str  # a member as an origin of KV: its name and its key
    is_gone: Callable[[str], bool] = lambda origin: False  # whether that member's KV is not to be used any more

    @property
    def offered(self) -> int:
        """The bits of this node's card: features, and the versions that it supports."""
        return self.optional | self.versions.bits

    def card(self, transports: tuple[str, ...] | None = None) -> Card:
        """This node's card; for some peers with fewer transports than it has."""
        names = self.transport_names if transports is None else transports
        return Card(self.required, self.offered, self.host, self.compat, self.layout, names)

    @property
    def transport_names(self) -> tuple[str, ...]:
        return tuple(transport.name for transport in self.transports)

    def capabilities(self, name: str) -> Capabilities | None:
        return next((transport for transport in self.transports if transport.name == name), None)


@dataclass(slots=True)
class LedgerContext:
    """State shared by the producer, the consumer and the pairings."""

    identity: Identity
    settings: Settings
    epochs_of: EpochsOf
    timers: Timers[TimerKey] = field(default_factory=Timers)
    effects: list[Effect] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)
    marks: deque[Mark] = field(default_factory=lambda: deque(maxlen=MARKS_MAX))
    owners: dict[JobId, Parts] = field(default_factory=dict)
    origins: Origins = field(default_factory=Origins)
    last_job: int = 0
    confirmed: int = 0  # sessions that targets have confirmed, so far

    def emit(self, effect: Effect) -> None:
        self.effects.append(effect)

    def send(self, worker: WorkerId, to: Incarnation, session: int, message: Message, version: int) -> None:
        self.effects.append(Send(worker, to, session, message, version=version))

    def count(self, name: str) -> None:
        self.counts[name] += 1

    def mark(
        self, side: Side, key: int, step: Step, now: float, what: Begun | Ended | None = None, detail: str = ""
    ) -> None:
        """Record a step of a handoff, for observers."""
        self.marks.append(Mark(side, key, step, now, what, detail))

    def start(
        self, parts: Parts, transport: str, peer: PeerId, direction: Direction, rank: int, moves: Sequence[Move]
    ) -> None:
        """Make local rank `rank` carry out each of `moves`, on behalf of `parts`."""
        plane = self.identity.capabilities(transport)
        weaves = plane is not None and plane.weaves
        for move in moves:
            self.last_job += 1
            job = JobId(self.last_job)
            self.owners[job] = parts
            parts.moving[job] = Moving(rank, transport, move.bytes)
            remote = rank_peer(peer, move.peer_rank)
            regions = move.local_region, move.remote_region
            if weaves and move.weave is not None:
                copy = Copy(job, remote, direction, *regions, move.flat, weave=move.weave)
            else:
                copy = Copy(job, remote, direction, *regions, move.spans)
            self.effects.append(StartCopy(rank, transport, copy))

    def lend(
        self,
        parts: Parts,
        plane: Capabilities | None,
        peer: PeerId,
        direction: Direction,
        blocks: Groups,
        due: Sequence[tuple[Area, ...]] = (),
    ) -> None:
        """Lend these blocks of every rank to `peer` for as long as `parts` last, where the transport requires that.

        `due`: by rank, what the peer must write.
        """
        reads = direction is Direction.READ
        if plane is None or not (plane.lends_reads if reads else plane.lends_writes) or not any(blocks):
            return
        if not may(self.identity.role_of(peer.worker), Act.READ if reads else Act.WRITE):
            return
        for rank in range(len(self.identity.layout.ranks)):
            self.last_job += 1
            job = JobId(self.last_job)
            self.owners[job] = parts
            parts.moving[job] = Moving(rank, plane.name, 0)
            owed = due[rank] if due else ()
            if owed:
                parts.unproven.add(job)
            self.effects.append(Lend(rank, plane.name, Loan(job, peer, direction, blocks, owed)))

    def cancel(self, parts: Parts) -> None:
        for job, moving in parts.moving.items():
            self.effects.append(CancelCopy(moving.rank, moving.transport, job))


class Moving(msgspec.Struct, frozen=True):
    """One copy in flight."""

    rank: int
    transport: str
    bytes: int


@dataclass(slots=True)
class Parts:
    """The copies of one handoff on one side, over all ranks. At rest means: none can touch memory any more."""

    owner: object
    moving: dict[JobId, Moving] = field(default_factory=dict)
    restless: set[JobId] = field(default_factory=set)
    unproven: set[JobId] = field(default_factory=set)  # loans into which the peer must write, and is not known to have
    moved: int = 0  # bytes that have arrived

    @property
    def at_rest(self) -> bool:
        return not self.moving and not self.restless

    def ended(self, event: CopyEnded) -> Moving:
        if not event.at_rest:
            self.restless.add(event.job)
        if event.unwritten == 0:
            self.unproven.discard(event.job)
        return self.moving.pop(event.job)

    def rested(self, job: JobId) -> None:
        self.restless.discard(job)


SPANS_IN_ALL_MAX = 1 << 24
"""Of one step of a handoff, on all ranks: 128,000 tokens of 128 layers, keys and values apart, on 8 ranks. A peer whose
planes are such that it takes more would have the node's memory and time, and gets neither."""


_ANYBODY = PeerId(WorkerId(""), Incarnation(0))


class Route(msgspec.Struct, frozen=True):
    """The two sides, the transport, and which side drives."""

    plan: Plan
    side: SpanSide
    peer: PeerId
    transport: str
    weaves: bool = False  # the transport accepts spans in product form, so that is what they cost


class Cargo(msgspec.Struct, frozen=True):
    """Which blocks of the two sides; lists per group, each in its own side's order of groups."""

    source: Sequence[Sequence[int]]
    target: Sequence[Sequence[int]]
    tokens: int
    first_token: int


def moves(route: Route, cargo: Cargo, before: Progress, after: Progress) -> list[tuple[int, list[Move]]]:
    """The copies of each local rank for what became ready. Raises ProtocolError on lists that do not fit."""
    plan = route.plan
    layout = plan.target if route.side is SpanSide.TARGET else plan.source
    layers = [len(group.layers) for group in plan.source.groups]
    found: list[tuple[int, list[Move]]] = []
    spans = 0
    for rect in advance(before, after, layers):
        target_group = plan.target_groups[rect.group]
        if target_group is None:
            continue
        lists = BlockLists(cargo.source[rect.group], cargo.target[target_group], cargo.tokens, cargo.first_token)
        for rank in range(len(layout.ranks)):
            for part in rect.cut(blocks_per_call(plan, route.side, rank, rect)):
                found.append((rank, segments(plan, route.side, rank, part, lists, not route.weaves)))
                spans += sum(_spans(move, route.weaves) for move in found[-1][1])
                if spans > SPANS_IN_ALL_MAX:
                    raise ProtocolError(Reason.BAD_SPAN, f"spans: more than {SPANS_IN_ALL_MAX} between these planes")
    return found


def due(plan: Plan, blocks: Sequence[Sequence[int]], tokens: int, first_token: int) -> list[tuple[Area, ...]]:
    """By rank of the target, what a push of these tokens must fill. Raises ProtocolError on lists that do not fit.

    As D would read it, except that nothing is known of P's blocks but how many there are.
    """
    needed = [group.needed(tokens) for group in plan.source.groups]
    source = [[NULL_BLOCK] * low + [0] * (high - low) for low, high in needed]
    route = Route(plan, SpanSide.TARGET, _ANYBODY, "", weaves=True)
    everything = whole([high for _, high in needed])
    found: list[list[Area]] = [[] for _ in plan.target.ranks]
    for rank, listed in moves(route, Cargo(source, blocks, tokens, first_token), nothing(len(needed)), everything):
        for move in listed:
            found[rank] += _areas(move)
    return [tuple(areas) for areas in found]


def _areas(move: Move) -> Iterator[Area]:
    if move.flat:
        yield Area(move.local_region, _local(move.flat), array("q", (0,)))
    if move.weave is not None:
        yield Area(move.local_region, _local(move.weave.column), move.weave.shifts[0::2])


def _local(triples: array[int]) -> array[int]:
    pairs = array("q", bytes(16 * (len(triples) // 3)))
    pairs[0::2], pairs[1::2] = triples[0::3], triples[2::3]
    return pairs


def _spans(move: Move, weaves: bool) -> int:
    if move.weave is None:
        return len(move.flat) // 3
    woven = (len(move.weave.column) + len(move.weave.shifts)) // 3 if weaves else move.weave.rows
    return len(move.flat) // 3 + woven


def start(desk: LedgerContext, parts: Parts, route: Route, listed: list[tuple[int, list[Move]]]) -> None:
    """Hand the copies to the ranks, as parts of one handoff."""
    direction = Direction.READ if route.side is SpanSide.TARGET else Direction.WRITE
    for rank, found in listed:
        desk.start(parts, route.transport, route.peer, direction, rank, found)
