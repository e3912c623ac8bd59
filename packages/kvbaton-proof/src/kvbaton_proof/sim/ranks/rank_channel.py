"""The carrier of rank links in the simulator: a seeded channel for each rank, and turns by the world's clock.

Implements `ranks.rank_carrying`, so both ends are production code: `RankLinks` in the engine's process, `RankHost` in
the rank's, each on a loop of its own.

Laws: frames of one connection arrive in order, or not at all. A connection that breaks takes along what was on its way;
what the engine sends while there is none waits, what the rank sends is lost, as with ZeroMQ. Harsher than that: a frame
may come twice, and one of a broken connection may come late. An end is served only while its process runs, and any
exception that leaves a turn is a bug. Whoever waits for the other end (`SimArrival`) sees it answer, or has waited in
vain; a wait takes no virtual time. Chance comes from a stream of its own.
"""

from __future__ import annotations

import random
import traceback
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import msgspec

from kvbaton.control.sockets import Sleeper
from kvbaton.ranks.rank_messages import RankInvitation
from kvbaton.ranks.rank_stream import Clock, StreamEnvelope
from kvbaton_proof.sim.promises import DEATH, Broken
from kvbaton_proof.sim.world.world import World

T = TypeVar("T")

TURN_S = 0.001
WAY_S = 0.001
LATE_S = 3.0
PUMPS = 3  # turns of both ends that fit into one wait


@dataclass(slots=True)
class ChannelFaults:
    """How bad the channels are; all zero is a good one."""

    double: float = 0.0
    garble: float = 0.0
    stray: float = 0.0  # share of a broken connection's frames that come late instead of never
    slow: float = 0.0  # share of waits that end in vain although the other end is there
    strange: float = 0.0  # share of frames that are followed by the same, of another session
    ping_s: float = 0.0


@dataclass(slots=True)
class SimProcess:
    """One operating-system process."""

    alive: bool = True
    paused: bool = False
    was_paused: bool = False
    loops: list[SimLoop] = field(default_factory=list)

    @property
    def runs(self) -> bool:
        return self.alive and not self.paused

    def pause(self, paused: bool) -> None:
        self.paused = paused
        self.was_paused |= paused
        for loop in self.loops:
            loop.wake()


class SimLoop:
    """Implements `rank_carrying.Loop`: a turn when woken and when due, while the process runs."""

    def __init__(
        self,
        carrier: SimCarrier,
        process: SimProcess,
        turn: Callable[[float], float | None],
        finish: Callable[[], None],
        clock: Clock,
    ) -> None:
        self._carrier = carrier
        self._process = process
        self._turn = turn
        self._finish = finish
        self._clock = clock
        self._started = False
        self._woken = False
        self._due_at = float("inf")
        self.is_stopping = False
        process.loops.append(self)

    def start(self) -> None:
        self._started = True
        self.wake()

    def stop(self, timeout_s: float) -> bool:
        first, self.is_stopping = not self.is_stopping, True
        if first:
            self._guard(self._finish)
        return True

    def wake(self) -> None:
        if not self._woken and self._serves:
            self._woken = True
            carrier = self._carrier
            carrier.world.after(carrier.rng.uniform(0, TURN_S), self._once)

    def turn_now(self) -> None:
        """Another thread's turn, while this one waits."""
        if self._serves:
            due = self._guard(lambda: self._turn(self._clock()))
            if due is not None:
                self._set_timer(due)

    @property
    def _serves(self) -> bool:
        return self._started and self._process.runs and not self.is_stopping

    def _once(self) -> None:
        self._woken = False
        self.turn_now()

    def _set_timer(self, due: float) -> None:
        world = self._carrier.world
        at = world.now + max(due - self._clock(), 0.0) / self._carrier.pace + 1e-6
        if at < self._due_at - 1e-9 or self._due_at <= world.now:
            self._due_at = at
            world.after(at - world.now, self._timer)

    def _timer(self) -> None:
        if self._carrier.world.now >= self._due_at:
            self._due_at = float("inf")
            self.wake()

    def _guard(self, act: Callable[[], T]) -> T:
        try:
            return act()
        except Exception:  # noqa: BLE001 - whatever it is, the loop's thread would have logged a bug
            trace = traceback.format_exc()
            raise Broken(DEATH, f"{self._carrier.name}: an end of a rank link raised\n{trace}") from None


class Channel:
    """The way between an engine and one of its ranks."""

    def __init__(self, carrier: SimCarrier, rank: int) -> None:
        self.carrier = carrier
        self.rank = rank
        self.is_up = True
        self.connection = 0
        self.down_s = 0.0  # the longest time without a connection so far
        self.strange_frames = 0  # that came
        self.at_rank: list[bytes] = []
        self.at_engine: list[bytes] = []
        self.wake_engine: Callable[[], None] = lambda: None
        self.wake_rank: Callable[[], None] = lambda: None
        self._to_rank: deque[tuple[float, int, bytes]] = deque()
        self._to_engine: deque[tuple[float, int, bytes]] = deque()
        self._waiting: list[bytes] = []  # sent by the engine while there was no connection
        self._breaks_in = 0  # frames; 0: it does not
        self._breaks_for_s = 0.0

    def to_rank(self, frame: bytes) -> None:
        if self.is_up:
            self._send(self._to_rank, frame)
        else:
            self._waiting.append(frame)

    def to_engine(self, frame: bytes) -> None:
        if self.is_up:
            self._send(self._to_engine, frame)
        else:
            self._lose(1)

    def cut_under(self, frames: int, down_s: float) -> None:
        """The connection breaks when so many more frames were sent: what it loses matters to somebody."""
        self._breaks_in, self._breaks_for_s = frames, down_s

    def cut(self, down_s: float) -> None:
        """The connection breaks, and another comes a while later."""
        if not self.is_up:
            return
        world, faults = self.carrier.world, self.carrier.faults
        world.strike("rank_link_cut", self.carrier.name, lasts_s=down_s)
        self.is_up = False
        self.connection += 1
        self.down_s = max(self.down_s, down_s)
        for way in (self._to_rank, self._to_engine):
            strays = [frame for _, _, frame in way if self.carrier.chance(faults.stray)]
            self._lose(len(way) - len(strays))
            way.clear()
            for frame in strays:
                world.after(down_s + self.carrier.rng.uniform(0, LATE_S), self._stray_arrives(way, frame))
        world.after(down_s, self._up)

    def haunt(self, every_s: float) -> None:
        """Somebody with the same keys speaks in the place of a rank that is gone, in another session: that proves no
        life. It is heard in turns that the engine takes anyway."""
        carrier = self.carrier
        if carrier.faults.strange and carrier.engine.alive:
            if not carrier.engine.paused:
                self.strange_frames += 1
                self.at_engine.append(msgspec.msgpack.encode(StreamEnvelope(1, 1, 0)))
            carrier.world.after(every_s, lambda: self.haunt(every_s))

    def flush(self) -> None:
        """Let everything arrive now that is on its way."""
        self._arrive(float("inf"))

    def _up(self) -> None:
        self.is_up = True
        waiting, self._waiting = self._waiting, []
        for frame in waiting:
            self.to_rank(frame)

    def _send(self, way: deque[tuple[float, int, bytes]], frame: bytes) -> None:
        carrier = self.carrier
        if carrier.chance(carrier.faults.garble):
            # The rank counts as lost until it answers the next ping.
            carrier.world.strike("rank_frame_garbled", carrier.name, lasts_s=carrier.faults.ping_s + 2 * WAY_S)
            frame = frame[: carrier.rng.randrange(len(frame))]
        copies = 1
        if carrier.chance(carrier.faults.double):
            carrier.world.faults["rank_frame_doubled"] += 1
            copies = 2
        if carrier.chance(carrier.faults.strange):
            self._estrange(way, frame)
        for _ in range(copies):
            at = max(carrier.world.now + carrier.rng.uniform(0, WAY_S), way[-1][0] if way else 0.0)
            way.append((at, self.connection, frame))
            carrier.world.after(at - carrier.world.now, self._arrive_due)
        if self._breaks_in:
            self._breaks_in -= 1
            if not self._breaks_in:
                self.cut(self._breaks_for_s)

    def _estrange(self, way: deque[tuple[float, int, bytes]], frame: bytes) -> None:
        """Somebody with the same keys says the same in another session, as the next thing to be heard."""
        to_rank = way is self._to_rank
        try:
            said = msgspec.msgpack.decode(frame, type=StreamEnvelope)
        except msgspec.MsgspecError:
            return
        if said.number and not way:
            number = said.number + 1
            strange = StreamEnvelope(said.session + 1, number, said.received, said.asks, said.body)
            self.carrier.world.faults["rank_frame_strange"] += 1
            self.carrier.world.after(WAY_S, lambda: self._strange_arrives(to_rank, msgspec.msgpack.encode(strange)))

    def _strange_arrives(self, to_rank: bool, frame: bytes) -> None:
        self.strange_frames += 1
        (self.at_rank if to_rank else self.at_engine).append(frame)
        (self.wake_rank if to_rank else self.wake_engine)()

    def _arrive_due(self) -> None:
        self._arrive(self.carrier.world.now + 1e-9)

    def _arrive(self, upto: float) -> None:
        for way, inbox, wake in (
            (self._to_rank, self.at_rank, self.wake_rank),
            (self._to_engine, self.at_engine, self.wake_engine),
        ):
            came = False
            while way and way[0][0] <= upto:
                inbox.append(way.popleft()[2])
                came = True
            if came:
                wake()

    def _stray_arrives(self, way: deque[tuple[float, int, bytes]], frame: bytes) -> Callable[[], None]:
        to_rank = way is self._to_rank

        def arrive() -> None:
            self.carrier.world.faults["rank_frame_late"] += 1
            (self.at_rank if to_rank else self.at_engine).append(frame)
            (self.wake_rank if to_rank else self.wake_engine)()

        return arrive

    def _lose(self, count: int) -> None:
        self.carrier.world.faults["rank_frames_lost"] += count


class _End:
    """What both ends have in common."""

    def __init__(self, process: SimProcess) -> None:
        self.process = process
        self.loop: SimLoop | None = None

    def wait(self, timeout_s: float | None) -> None:
        raise AssertionError("turns are taken by the world's clock")

    def wake(self) -> None:
        if self.loop is not None:
            self.loop.wake()

    def close(self) -> None:
        """What was sent is on its way, as with a socket that lingers."""


class SimLines(_End):
    """Implements `rank_carrying.Lines`: the engine's ends."""

    def __init__(self, carrier: SimCarrier) -> None:
        super().__init__(carrier.engine)
        self.counters: Counter[str] = Counter()
        self._carrier = carrier
        for channel in carrier.channels.values():
            channel.wake_engine = self.wake

    def send(self, rank: int, frame: bytes) -> None:
        self._carrier.channels[rank].to_rank(frame)

    def receive(self) -> Sequence[tuple[int, bytes]]:
        found = []
        for rank, channel in self._carrier.channels.items():
            found += [(rank, frame) for frame in channel.at_engine]
            channel.at_engine.clear()
        return found


class SimLine(_End):
    """Implements `rank_carrying.Line`: one rank's end."""

    strangers = 0

    def __init__(self, carrier: SimCarrier, rank: int, process: SimProcess) -> None:
        super().__init__(process)
        self.endpoint = f"tcp://127.0.0.1:{5000 + rank}"
        self.keys = carrier.key(), carrier.key(), carrier.key()
        self._channel = carrier.channels[rank]
        self._channel.wake_rank = self.wake

    def send(self, frame: bytes) -> None:
        self._channel.to_engine(frame)

    def receive(self) -> Sequence[bytes]:
        found, self._channel.at_rank = self._channel.at_rank, []
        return found


class SimArrival:
    """Implements `rank_carrying.Arrival`: while one thread waits, the others take their turns."""

    def __init__(self, carrier: SimCarrier) -> None:
        self._carrier = carrier

    def __enter__(self) -> None:
        pass

    def __exit__(self, *what: object) -> None:
        pass

    def wait_for(self, predicate: Callable[[], bool], timeout: float | None = None) -> bool:
        carrier = self._carrier
        if timeout and not predicate():
            if carrier.chance(carrier.faults.slow):
                carrier.world.strike("rank_slow", carrier.name)
            else:
                carrier.pump()
        return predicate()

    def notify_all(self) -> None:
        pass


class SimCarrier:
    """Implements `rank_carrying.Carrier` for all ranks of one engine in one life."""

    def __init__(self, world: World, name: str, faults: ChannelFaults, pace: float, seed: str) -> None:
        """`pace`: how fast the clock of both ends runs."""
        self.world = world
        self.name = name
        self.faults = faults
        self.pace = pace
        self.rng = random.Random(seed)
        self.engine = SimProcess()
        self.ranks: dict[int, SimProcess] = {}
        self.channels: dict[int, Channel] = {}
        self.listening = SimProcess()  # whose line is made next

    def chance(self, probability: float) -> bool:
        return probability > 0 and self.rng.random() < probability

    def key(self) -> str:
        return f"{self.rng.getrandbits(128):040d}"

    def session(self) -> int:
        return self.rng.getrandbits(62) + 1

    def within(self, process: SimProcess) -> SimCarrier:
        """Lines from now on are this process's."""
        self.listening = process
        return self

    def dial(self, invitations: Sequence[RankInvitation], clock: Clock) -> SimLines:
        return SimLines(self)

    def listen(self, rank: int, host: str, clock: Clock) -> SimLine:
        if rank not in self.channels:
            self.channels[rank] = Channel(self, rank)
        self.ranks[rank] = self.listening
        return SimLine(self, rank, self.listening)

    def loop(
        self,
        name: str,
        sleeper: Sleeper,
        turn: Callable[[float], float | None],
        finish: Callable[[], None],
        clock: Clock,
    ) -> SimLoop:
        assert isinstance(sleeper, SimLines | SimLine)
        sleeper.loop = SimLoop(self, sleeper.process, turn, finish, clock)
        return sleeper.loop

    def arrival(self) -> SimArrival:
        return SimArrival(self)

    def pump(self) -> None:
        """Turns of all ends, as many as fit into a wait. The engine's thread comes first and last."""
        for _ in range(PUMPS):
            for loop in self.engine.loops:
                loop.turn_now()
            for channel in self.channels.values():
                channel.flush()
            for channel in self.channels.values():
                for loop in self.ranks[channel.rank].loops:
                    loop.turn_now()
                channel.flush()
            for loop in self.engine.loops:
                loop.turn_now()
