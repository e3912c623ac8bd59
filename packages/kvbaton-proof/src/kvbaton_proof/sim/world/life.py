"""One life of one worker: the production node over simulated ports, with a clock of its own that may drift.

Nothing is checked here but what only a life itself can see: checks are hung onto its steps (`checks/`).
"""

from __future__ import annotations

import math
import traceback
from collections.abc import Callable, Sequence
from itertools import pairwise

import msgspec

from kvbaton.api.params import HistoryWay
from kvbaton.node.cluster_node import discarded
from kvbaton.node.doorway import DoorwayConfig
from kvbaton.node.epochs import EpochTable
from kvbaton.node.node import Node, Rank
from kvbaton.node.pin_budget import budget_of
from kvbaton.node.ports import StorePort
from kvbaton.observe.flight.recorder import Recorder
from kvbaton.protocol.ids import (
    HandoffId,
    Incarnation,
    PeerId,
    RequestId,
    TransferId,
    WorkerId,
    rank_peer,
)
from kvbaton.protocol.machines.context import Identity, TimerKey, Timers
from kvbaton.protocol.machines.ledger import Ledger
from kvbaton.protocol.settings import Settings
from kvbaton.protocol.wire.messages import ALL_FEATURES, SPOKEN, Versions
from kvbaton_proof.sim.promises import DEATH, HANG, LEAK, Broken
from kvbaton_proof.sim.ranks.rank_links import EXCUSED, LinkedRanks, RankTraits
from kvbaton_proof.sim.ranks.sim_rank_store import RankStore
from kvbaton_proof.sim.world.sim_doorway import WatchedDoorway
from kvbaton_proof.sim.world.sim_engine import SimEngine
from kvbaton_proof.sim.world.sim_generation import GeneratingEngine
from kvbaton_proof.sim.world.sim_memory import Shape
from kvbaton_proof.sim.world.sim_network import Network, SimControl
from kvbaton_proof.sim.world.sim_store import Reading, SimStore
from kvbaton_proof.sim.world.sim_transport import KINDS, Fabric, SimTransport
from kvbaton_proof.sim.world.touches import TICKET_KEY
from kvbaton_proof.sim.world.world import InjectedFault, World

STEALS = 0.4
LATE_S_MAX = 0.1
PIN_WAIT_S = 1.0
AT_ONE_TIME_MAX = 5_000

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
    turns: bool = False
    early: float = 0.0  # share of pulls for which it takes blocks before P's answer
    stores_read_on: bool = False
    epochs: str = "exact"  # or "none": no reuse is told; or "stolen": of some blocks it is not
    lists_early: bool = False
    skips: float = 0.0
    recorded: bool = True
    pins: float = 1.0  # the share of its cache that handoffs may pin
    overwrites: float = 0.0  # share of prompts with states that it decodes on by itself, after they were granted
    features: int = int(ALL_FEATURES)
    required: int = 0
    versions: Versions = SPOKEN
    store_fails: float = 0.0
    wall_skew_s: float = 0.0
    continues: str | None = None  # how it goes on with another's answer; None: its answers are not made of tokens
    ranks: RankTraits | None = None  # its ranks are processes of their own, behind rank links


class BoundedTimers(Timers[TimerKey]):
    """The production timers, with a limit to what happens at one time: a step that never ends is a hang."""

    __slots__ = ("_looks", "_now", "on_due", "on_set")

    def __init__(self) -> None:
        super().__init__()
        self._now, self._looks = 0.0, 0
        self.on_set: Callable[[TimerKey, float], None] = lambda key, at: None  # whoever measures
        self.on_due: Callable[[TimerKey, float], None] = lambda key, at: None

    def set(self, key: TimerKey, at: float) -> None:
        self.on_set(key, at)
        super().set(key, at)

    def pop_due(self, now: float) -> TimerKey | None:
        self._looks = self._looks + 1 if now == self._now else 0
        self._now = now
        if self._looks > AT_ONE_TIME_MAX:
            raise Broken(HANG, f"a step has handled {self._looks} timers of one time, and there are more")
        before = self.next_at()
        key = super().pop_due(now)
        if key is not None:
            self.on_due(key, before if before is not None else now)
        return key


class Life:
    """A worker between a start and a crash."""

    def __init__(self, world: World, character: Character, network: Network, fabric: Fabric) -> None:
        self.world = world
        self.character = character
        self.alive = True
        self.paused = ""  # "", "process", "loop" or "engine"
        self._node_due = False
        self._excused = False  # it was stopped: what is due is late
        self._engine_due = False
        self.after_node: list[Callable[[], None]] = []  # checks, in this order
        self.after_engine: list[Callable[[], None]] = []
        self.on_leaving: Callable[[], None] = lambda: None
        self.on_left: Callable[[], None] = lambda: None
        self.taken_back: set[HandoffId] = set()  # tickets that the router has said nobody will use
        self.asleep = False  # the engine has nothing to do, and waits for a request
        self._timer_at = float("inf")
        self._offset_s = world.rng.uniform(-1000, 1000)
        if character.versions != SPOKEN:
            world.faults["other_versions"] += 1
        self.peer = PeerId(character.name, Incarnation(world.rng.getrandbits(63)))
        self.control = SimControl(network, character.name)
        self.memory = [bytearray(character.shape.region_bytes) for _ in range(character.shape.ranks)]
        self.transports = self._make_transports(fabric)
        self.ranks = self._make_ranks(fabric)
        self.doorway = self._make_doorway()
        self.pins_max = int((character.shape.blocks - 1) * character.pins) if character.pins < 1 else math.inf
        self.store = SimStore(world, character.store_fails, character.stores_read_on)
        self.store.set_waker(self.wake)
        self.node = self._make_node()
        self.engine = self._make_engine()
        engine = self.engine
        engine.depth, engine.defers = character.depth, character.defers
        engine.preempt = character.preempt
        if not character.shape.states:  # which no store takes
            engine.put, engine.get = character.put, character.get
        engine.pool.reuses_soon, engine.pool.turns = character.reuses_soon, character.turns
        engine.early, engine.skips, engine.overwrites = character.early, character.skips, character.overwrites
        engine.decode.blocks_total = character.shape.blocks if character.early else 0
        engine.announcer.layerwise, engine.sides.lists_early = character.layerwise, character.lists_early
        if character.epochs == "stolen":
            engine.pool.steals = lambda: world.chance(STEALS)
        engine.pool.tells = character.epochs != "none"
        engine.on_wake = engine.device.on_done = self.wake_engine
        self.store.on_read = Reading(engine.pool, engine.device, engine.put_prompts)
        if self.ranks is not None:
            self.doorway.announce, self.doorway.by_rank = self.ranks.progressed, self.ranks.traits.tells
            self.ranks.shelve(engine, self.wake_engine)

    def clock(self) -> float:
        return self._offset_s + self.world.now * (1 + self.character.drift)

    def _wall(self) -> float:
        """A clock that is set right from outside, and never far off; the other one drifts."""
        return self.world.now + self.character.wall_skew_s

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

    def _wake_with_news(self) -> None:
        """News for an engine that sleeps wake nobody: who holds anything does not sleep (rule 19)."""
        if not self.asleep:
            self.wake_engine()

    def receive(self, source: WorkerId, frame: bytes) -> None:
        self.control.inbox.append((source, frame))
        self.wake()

    def lift_pins(self) -> None:
        """All has healed: nobody is short of room any more."""
        budget = self.doorway.budget
        self.pins_max = budget.blocks_max = budget._shares._blocks_max = math.inf

    def take_back(self, ticket: str) -> None:
        """The registry passes on that nobody will use a ticket; whose it is is for the production code to say."""
        for event in discarded(self.doorway, (ticket,)):
            self.world.tell(f"{self.peer.worker} hears that {event.handoff[:6]} was taken back")
            self.taken_back.add(event.handoff)
            self.node.tell(event)
        self.wake()

    def crash(self) -> None:
        self.alive = False
        self.engine.device.stopped = True
        self.store.alive = self.control.alive = False
        if self.ranks is not None:
            self.ranks.crash()
        for rank in self.transports:
            for transport in rank.values():
                transport.alive = False

    def leave(self) -> None:
        """Go in peace: everything is given back and everybody told; the process ends."""
        self.on_leaving()
        self.node.close(self.clock())
        if self.ranks is not None:
            self.ranks.leave()
        self.engine.step_down()
        self.on_left()
        self.crash()

    def pause(self, what: str) -> None:
        """Stop the whole process, or only its node's loop, or only its engine's thread."""
        self.paused = what
        if self.ranks is not None:
            self.ranks.pause_engine(what == "process")
            return
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
        now = self.clock()
        self.node.set_wall(self._wall(), now)  # as the loop does
        try:
            self.node.step(now)
        except Exception:  # noqa: BLE001 - whatever it is, it would have been the end of an engine
            raise Broken(DEATH, f"{self.character.name}: the node raised\n{traceback.format_exc()}") from None
        for check in self.after_node:
            check()
        self._set_timer()

    def _step_engine(self) -> None:
        if not self.alive or self.paused in _STOPS_ENGINE:
            return
        self._engine_due = False
        before = self.engine.pool.total, len(self.engine.requests)
        try:
            self.engine.step()
        except Exception:  # noqa: BLE001 - whatever it is, it would have been the end of an engine
            raise Broken(DEATH, f"{self.character.name}: the engine died\n{traceback.format_exc()}") from None
        for check in self.after_engine:
            check()
        self.asleep = not self.engine.busy
        if self.doorway.pinned_blocks and self.asleep:
            raise Broken(LEAK, f"{self.character.name}: holds blocks for others, and says that it need not be stepped")
        after = self.engine.pool.total, len(self.engine.requests)  # what came and went in one step made room too
        if before != after or self.engine.has_next:
            self.wake_engine()

    def _check_punctual(self) -> None:
        """A loop that nobody stopped looks at what is due when it is due (rule 21)."""
        due = self.node.next_deadline()
        late_s = self.clock() - due if due is not None else 0.0
        if late_s > LATE_S_MAX and not self._excused:
            raise Broken(HANG, f"{self.character.name}: its loop is {late_s:.2f} s late")
        self._excused = False

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

    # --- making

    def _make_transports(self, fabric: Fabric) -> list[dict[str, SimTransport]]:
        ranks = []
        for rank, memory in enumerate(self.memory):
            mine = {}
            for name in self.character.transports:
                transport = SimTransport(fabric, rank_peer(self.peer, rank), KINDS[name])
                for region, (at, stop) in enumerate(pairwise(self.character.shape.edges)):
                    transport.register(region, memoryview(memory)[at:stop])
                transport.rank = rank
                transport.set_waker(self.wake)
                mine[name] = transport
            ranks.append(mine)
        return ranks

    def _make_ranks(self, fabric: Fabric) -> LinkedRanks | None:
        traits = self.character.ranks
        if traits is None:
            return None
        pace = 1 + self.character.drift
        fails, layout = self.character.store_fails, self.character.shape.layout()
        store = RankStore(fabric.store, layout, self.memory, fails) if traits.store else None
        return LinkedRanks(self.world, self.peer, traits, self.transports, self.clock, pace, self.wake, store)

    def _make_doorway(self) -> WatchedDoorway:
        rng, shape = self.world.rng, self.character.shape
        config = DoorwayConfig(
            me=self.peer,
            ranks=shape.ranks,
            groups=len(shape.group_layers),
            ticket_keys=(TICKET_KEY,),
            ticket_ttl_s=5.0,
            mint=lambda: TransferId(f"{rng.getrandbits(128):032x}"),
            wall=self._wall,
        )
        # The table grows with what the pool hands out: how many blocks there are may be known later than it is made.
        doorway = WatchedDoorway(config, EpochTable(self.peer.incarnation % (shape.blocks + 1)))
        doorway.budget = budget_of(shape.blocks - 1, self.character.pins, PIN_WAIT_S)
        doorway.wake_node = self.wake
        doorway.wake_engine = self._wake_with_news
        return doorway

    def _make_engine(self) -> SimEngine:
        character = self.character
        parts = self.world, str(character.name), character.shape, self.doorway, self.memory, character.policy
        if character.continues is None:
            return SimEngine(*parts)
        engine = GeneratingEngine(*parts)
        engine.way = HistoryWay(character.continues)
        return engine

    def _make_node(self) -> Node:
        character = self.character
        identity = Identity(
            me=self.peer,
            host="host",
            compat={"model": "sim", "info.version": "1"},
            layout=character.shape.layout(),
            transports=tuple(KINDS[name] for name in character.transports),
            ticket_keys=(TICKET_KEY,),
            wall_offset_s=self._wall() - self.clock(),
            exact_epochs=character.epochs != "none",
            required=character.required,
            optional=character.features,
            versions=character.versions,
        )
        store: StorePort = self.store
        if self.ranks is not None and self.ranks.shelf is not None:
            store = self.ranks.shelf
            store.set_waker(self.wake)
        ledger = Ledger(identity, character.settings, self.doorway.epochs.all_judged)
        ledger.desk.timers = BoundedTimers()
        recorder = Recorder(self.peer) if character.recorded else None
        ports: Sequence[Rank] = self.transports if self.ranks is None else self.ranks.ports
        extra = self.ranks.links.drain_progress if self.ranks is not None else None
        node = Node(ledger, self.control, ports, self.doorway, store, self._port_failed, extra, recorder)
        node.say = lambda *_: None  # the counters tell; a campaign shuts planes in every fourth world
        return node

    def _port_failed(self, what: str, count: int, error: Exception) -> None:
        excused = InjectedFault if self.ranks is None else (InjectedFault, *EXCUSED)
        if not isinstance(error, excused):
            trace = "".join(traceback.format_exception(error))
            raise Broken(DEATH, f"{self.character.name}: {what} raised\n{trace}")


def request_name(life: Life, index: int, leg: str) -> RequestId:
    """An engine's own name for a request: never equal on two engines."""
    return RequestId(f"{leg}{index}@{life.peer.incarnation & 0xFFFF:04x}")
