"""One life of one worker: the production node over simulated ports, with a clock of its own that may drift.

Also the checks that run at every step; `checkers.py` has those that need rest.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import msgspec

from kvbaton.flight.recorder import Recorder
from kvbaton.protocol.desk import Identity
from kvbaton.protocol.effects import Effect, Unpin
from kvbaton.protocol.errors import Reason
from kvbaton.protocol.events import Groups, StoreEnded
from kvbaton.protocol.ids import (
    HandoffId,
    Incarnation,
    LeaseId,
    PeerId,
    PutId,
    RequestId,
    TransferId,
    WorkerId,
    rank_peer,
)
from kvbaton.protocol.lease import LeaseState, ReaderState
from kvbaton.protocol.ledger import Ledger
from kvbaton.protocol.messages import ALL_FEATURES
from kvbaton.protocol.settings import Settings
from kvbaton.protocol.versions import SPOKEN, Versions
from kvbaton.runtime.discarding import discarded
from kvbaton.runtime.doorway import Doorway, DoorwayConfig
from kvbaton.runtime.epochs import EpochTable
from kvbaton.runtime.node import Node
from kvbaton.sim.engine import SimEngine
from kvbaton.sim.memory import Shape
from kvbaton.sim.network import Network, SimControl
from kvbaton.sim.promises import DEATH, HANG, LEAK, Broken
from kvbaton.sim.timers import BoundedTimers
from kvbaton.sim.transport import KINDS, Fabric, SimTransport
from kvbaton.sim.world import InjectedFault, World

TICKET_KEY = b"simulated cluster key 0123456789"


LATE_S_MAX = 0.1

_STOPS_NODE = ("process", "loop")
_STOPS_ENGINE = ("process", "engine")


class Character(msgspec.Struct, frozen=True):
    """What stays the same over a worker's lives."""

    name: WorkerId
    shape: Shape
    transports: tuple[str, ...]
    settings: Settings
    policy: str = "recompute"
    drift: float = 0.0
    layerwise: bool = False
    preempt: float = 0.0
    put: float = 0.0
    get: float = 0.0
    depth: int = 1  # steps in flight
    defers: bool = True  # it frees blocks with the output of the last step that may write them
    reuses_soon: bool = False
    features: int = int(ALL_FEATURES)
    required: int = 0
    versions: Versions = SPOKEN
    store_fails: float = 0.0
    wall_skew_s: float = 0.0


@dataclass(slots=True)
class SimStore:
    """A store that takes time, refuses, throws, and sometimes answers only when told to stop."""

    world: World
    fails: float
    ended: list[StoreEnded] = field(default_factory=list)
    waker: Callable[[], None] = lambda: None
    open: set[PutId] = field(default_factory=set)

    def put(self, put: PutId, blocks: Groups, keys: tuple[bytes, ...]) -> None:
        kind = self.world.rng.random()
        if kind < self.fails / 3:
            self.world.faults["store_threw"] += 1
            raise InjectedFault("the simulated store threw")
        self.open.add(put)
        if kind < self.fails * 2 / 3:
            self.world.faults["store_stalled"] += 1
            return
        reason = Reason.STORE_FAILED if kind < self.fails else None
        self.world.after(self.world.rng.uniform(0.001, 0.2), lambda: self._end(put, reason))

    def cancel(self, put: PutId) -> None:
        self._end(put, Reason.CANCELLED)

    def drain(self) -> Sequence[StoreEnded]:
        ended, self.ended = self.ended, []
        return ended

    def set_waker(self, waker: Callable[[], None]) -> None:
        self.waker = waker

    def _end(self, put: PutId, reason: Reason | None) -> None:
        if put in self.open:
            self.open.discard(put)
            self.ended.append(StoreEnded(put, reason))
            self.waker()


class WatchedDoorway(Doorway):
    """The production door, and a memory of which leases have been released: each is, once."""

    def __init__(self, config: DoorwayConfig, epochs: EpochTable) -> None:
        super().__init__(config, epochs)
        self._released: set[LeaseId] = set()
        self.sourceless: set[LeaseId] = set()  # P's request has ended early

    def source_ended(self, lease: LeaseId, reason: Reason) -> None:
        self.sourceless.add(lease)
        super().source_ended(lease, reason)

    def hand_in(self, effect: Effect) -> None:
        if isinstance(effect, Unpin):
            if effect.lease in self._released:
                raise Broken(LEAK, f"{self.config.me.worker}: lease {effect.lease} was released twice")
            self._released.add(effect.lease)
        super().hand_in(effect)


class Life:
    """A worker between a start and a crash."""

    def __init__(self, world: World, character: Character, network: Network, fabric: Fabric) -> None:
        self.world = world
        self.character = character
        self.alive = True
        self.paused = ""  # "", "process", "loop" or "engine"
        self._signs: dict[HandoffId, tuple[object, float]] = {}  # what was last seen of each handoff, and since when
        self._taken_back: set[HandoffId] = set()  # tickets that the router has said nobody will use
        self._node_due = False
        self._excused = False  # it was stopped: what is due is late
        self._engine_due = False
        self._timer_at = float("inf")
        self._offset_s = world.rng.uniform(-1000, 1000)
        if character.versions != SPOKEN:
            world.faults["other_versions"] += 1
        self.peer = PeerId(character.name, Incarnation(world.rng.getrandbits(63)))
        self.control = SimControl(network, character.name)
        self.memory = [bytearray(character.shape.region_bytes) for _ in range(character.shape.ranks)]
        self.transports = self._make_transports(fabric)
        self.doorway = self._make_doorway()
        self.node = self._make_node()
        self.engine = SimEngine(
            world, str(character.name), character.shape, self.doorway, self.memory, character.policy
        )
        engine = self.engine
        engine.layerwise, engine.depth, engine.defers = character.layerwise, character.depth, character.defers
        engine.preempt, engine.put, engine.get = character.preempt, character.put, character.get
        engine.pool.reuses_soon = character.reuses_soon

    def clock(self) -> float:
        return self._offset_s + self.world.now * (1 + self.character.drift)

    # --- being

    def wake(self) -> None:
        if not self._node_due and self.alive and self.paused not in _STOPS_NODE:
            self._node_due = True
            busy_s = self.world.rng.choice((0.001, 0.001, 0.001, 0.03))
            self.world.after(busy_s * self.world.rng.random(), self._step_node)

    def wake_engine(self) -> None:
        if not self._engine_due and self.alive and self.paused not in _STOPS_ENGINE:
            self._engine_due = True
            self.world.after(self.world.rng.uniform(0.001, 0.01), self._step_engine)

    def receive(self, source: WorkerId, frame: bytes) -> None:
        self.control.inbox.append((source, frame))
        self.wake()

    def take_back(self, ticket: str) -> None:
        """The registry passes on that nobody will use a ticket; whose it is is for the production code to say."""
        for event in discarded(self.doorway, (ticket,)):
            self.world.tell(f"{self.peer.worker} hears that {event.handoff[:6]} was taken back")
            self._taken_back.add(event.handoff)
            self.node.tell(event)
        self.wake()

    def crash(self) -> None:
        self.alive = False
        self.engine.stop()
        self.control.alive = False
        for rank in self.transports:
            for transport in rank.values():
                transport.alive = False

    def leave(self) -> None:
        """Go in peace: everything is given back and everybody told; the process ends."""
        self.node.close(self.clock())
        self.engine.step_down()
        self._check_pins()
        self.crash()

    def pause(self, what: str) -> None:
        """Stop the whole process, or only its node's loop, or only its engine's thread."""
        self.paused = what
        for rank in self.transports:
            for transport in rank.values():
                transport.paused = what == "process"

    def resume(self) -> None:
        self.pause("")
        self._excused = True
        self._node_due = self._engine_due = False
        self._timer_at = float("inf")
        self.wake()
        self.wake_engine()

    # --- stepping

    def _step_node(self) -> None:
        if not self.alive or self.paused in _STOPS_NODE:
            return
        self._node_due = False
        self._check_punctual()
        try:
            self.node.step(self.clock())
        except Exception:  # noqa: BLE001 - whatever it is, it would have been the end of an engine
            raise Broken(DEATH, f"{self.character.name}: the node raised\n{traceback.format_exc()}") from None
        self._check_node()
        self._set_timer()

    def _step_engine(self) -> None:
        if not self.alive or self.paused in _STOPS_ENGINE:
            return
        self._engine_due = False
        before = self.engine.pool.total
        try:
            self.engine.step()
        except Exception:  # noqa: BLE001 - whatever it is, it would have been the end of an engine
            raise Broken(DEATH, f"{self.character.name}: the engine died\n{traceback.format_exc()}") from None
        self._check_pins()
        if self.doorway.pinned_blocks and not self.engine.busy:
            raise Broken(LEAK, f"{self.character.name}: holds blocks for others, and says that it need not be stepped")
        if before != self.engine.pool.total or self.engine.has_next:
            self.wake_engine()

    def _set_timer(self) -> None:
        deadline = self.node.next_deadline()
        if deadline is None:
            return
        at = max((deadline - self._offset_s) / (1 + self.character.drift), self.world.now)
        if at < self._timer_at - 1e-9:
            self._timer_at = at
            self.world.after(at - self.world.now + 1e-6, self._timer)

    def _timer(self) -> None:
        if self.world.now >= self._timer_at and self.alive and self.paused not in _STOPS_NODE:
            self._timer_at = float("inf")
            self.wake()

    # --- checks at every step

    def _check_node(self) -> None:
        """Queues are within their bounds, nothing is overdue, no lease is held past its hard limit."""
        ledger, settings = self.node.ledger, self.character.settings
        now = self.clock()
        producer, consumer = ledger.producer, ledger.consumer
        bounds = (
            ("parked", len(producer.parked), settings.parked_max),
            ("tombstones", len(producer.tombstones), settings.tombstones_max),
            ("ended handoffs", len(producer.ended), settings.tombstones_max),
            ("leases", len(producer.leases), settings.leases_max),
            ("sessions", len(ledger.sessions.by_number), settings.sessions_max),
            ("intakes", len(consumer.by_handoff), settings.intakes_max),
            ("puts", len(ledger.puts.states), settings.puts_max),
        )
        for name, count, limit in bounds:
            if count > limit:
                raise Broken(LEAK, f"{self.character.name}: {count} {name}, at most {limit}")
        for lease in producer.leases.values():
            if lease.state is not LeaseState.CLOSING and now > lease.hold_until + 0.1:
                raise Broken(LEAK, f"{self.character.name}: lease {lease.id} is held past max_hold_s")
            if lease.id in self.doorway.sourceless and lease.state is not LeaseState.CLOSING and not lease.final:
                raise Broken(HANG, f"{self.character.name}: lease {lease.id} goes on, and its request has ended")
            if not self.doorway.is_leased(lease.id):
                raise Broken(LEAK, f"{self.character.name}: lease {lease.id} is held, and its blocks are not pinned")
        self._check_waits(now)
        self._check_taken_back()

    def _check_punctual(self) -> None:
        """A loop that nobody stopped looks at what is due when it is due (rule 21)."""
        due = self.node.next_deadline()
        late_s = self.clock() - due if due is not None else 0.0
        if late_s > LATE_S_MAX and not self._excused:
            raise Broken(HANG, f"{self.character.name}: its loop is {late_s:.2f} s late")
        self._excused = False

    def _check_waits(self, now: float) -> None:
        """No handoff of D's waits longer than its longest time-out without anything having happened to it."""
        settings = self.character.settings
        living: dict[HandoffId, tuple[object, float]] = {}
        longest_s = max(settings.transfer_timeout, settings.defer_timeout, settings.claim_timeout) + 0.5
        for handoff, intake in self.node.ledger.consumer.by_handoff.items():
            if intake.end is not None:
                continue
            source = intake.source
            heard = (source.work, source.progress, source.final) if source is not None else None
            sign = (intake.state, heard, len(intake.parts.moving))
            seen, since = self._signs.get(handoff, (sign, now))
            living[handoff] = (sign, since if seen == sign else now)
            if now - living[handoff][1] > longest_s:
                raise Broken(
                    HANG, f"{self.character.name}: {intake.wanted.request} waits, {intake.state.value}, for ever"
                )
        self._signs = living

    def _check_taken_back(self) -> None:
        """What the router took back is held by nobody but its readers, and no claim waits for it."""
        producer, taken = self.node.ledger.producer, self._taken_back
        known = len(taken) + producer.desk.counts["leases"]
        if not taken or known > self.character.settings.tombstones_max:
            return  # it may have been forgotten, as the bound allows
        for handoff, lease in producer.by_handoff.items():
            if handoff in taken and not any(seat.state is ReaderState.LIVE for seat in lease.seats.values()):
                raise Broken(LEAK, f"{self.character.name}: lease {lease.id} is held, and its ticket was taken back")
        for parked in producer.parked.values():
            if parked.claim.handoff in taken:
                raise Broken(HANG, f"{self.character.name}: a claim waits, and its ticket was taken back")

    def _check_pins(self) -> None:
        """Every reference to a block is the engine's own or has an owner at the door."""
        pool, owned = self.engine.pool, self.engine.held_refs + self.doorway.pinned_blocks
        if pool.total != owned:
            raise Broken(LEAK, f"{self.character.name}: {pool.total} references to blocks, {owned} with an owner")

    # --- making

    def _make_transports(self, fabric: Fabric) -> list[dict[str, SimTransport]]:
        ranks = []
        for rank, memory in enumerate(self.memory):
            mine = {}
            for name in self.character.transports:
                transport = SimTransport(fabric, rank_peer(self.peer, rank), KINDS[name])
                transport.register(0, memoryview(memory))
                transport.set_waker(self.wake)
                mine[name] = transport
            ranks.append(mine)
        return ranks

    def _make_doorway(self) -> WatchedDoorway:
        rng, shape = self.world.rng, self.character.shape
        config = DoorwayConfig(
            me=self.peer,
            ranks=shape.ranks,
            groups=len(shape.group_layers),
            ticket_keys=(TICKET_KEY,),
            ticket_ttl_s=5.0,
            mint=lambda: TransferId(f"{rng.getrandbits(128):032x}"),
            wall=lambda: self.world.now + self.character.wall_skew_s,
        )
        doorway = WatchedDoorway(config, EpochTable(shape.blocks))
        doorway.wake_node = self.wake
        doorway.wake_engine = self.wake_engine
        return doorway

    def _make_node(self) -> Node:
        character = self.character
        identity = Identity(
            me=self.peer,
            host="host",
            compat={"model": "sim", "info.version": "1"},
            layout=character.shape.layout(),
            transports=tuple(KINDS[name] for name in character.transports),
            ticket_keys=(TICKET_KEY,),
            wall_offset_s=self.world.now + character.wall_skew_s - self.clock(),
            required=character.required,
            optional=character.features,
            versions=character.versions,
        )
        store = SimStore(self.world, character.store_fails)
        store.set_waker(self.wake)
        ledger = Ledger(identity, character.settings, self.doorway.epochs.all_of)
        ledger.desk.timers = BoundedTimers()
        recorder = Recorder(self.peer)
        node = Node(ledger, self.control, self.transports, self.doorway, store, self._port_failed, recorder=recorder)
        node.say = lambda *_: None  # the counters tell; a campaign shuts planes in every fourth world
        return node

    def _port_failed(self, what: str, count: int, error: Exception) -> None:
        if not isinstance(error, InjectedFault):
            trace = "".join(traceback.format_exception(error))
            raise Broken(DEATH, f"{self.character.name}: {what} raised\n{trace}")


def request_name(life: Life, index: int, leg: str) -> RequestId:
    """An engine's own name for a request: never equal on two engines."""
    return RequestId(f"{leg}{index}@{life.peer.incarnation & 0xFFFF:04x}")
