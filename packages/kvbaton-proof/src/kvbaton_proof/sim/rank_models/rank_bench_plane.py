"""One data plane of a rank on the bench (`rank_planes`), driven by any commands, over a plane that throws at any call.

Laws of the model: a submit whose table came whole is put to the plane, after those that wait; at the bound, torn or
after the close it ends, at rest, with the reason for that. What waits ends with a cancel, a disconnect or a fence that
concerns it, before the plane hears of that. A stop that threw is asked for again, all of them after `AGAIN_S`, but not
a disconnect of who is connected anew; what is owed to a peer comes before its endpoint, or there is none. What else
throws is told as failed, or counted. Refusals and mapped bytes are told where they have changed.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import msgspec

from kvbaton.protocol.effects import Copy, Direction
from kvbaton.protocol.errors import Reason
from kvbaton.protocol.ids import JobId, PeerId
from kvbaton.ranks import rank_messages as said
from kvbaton.ranks import rank_planes
from kvbaton.ranks.rank_planes import AGAIN_MAX, AGAIN_S, HostedPlane
from kvbaton.transports.core.late_identity import UnnamedTransport
from kvbaton.transports.core.transport import CopyEnded, CopyRested, FenceEnded, OpenFailed, Transport, TransportEvent
from kvbaton_proof.sim.rank_models.rank_bench import ANYTHING, PEERS, listened, same, worth
from kvbaton_proof.sim.rank_models.rank_bench_messages import _facts, any_copy
from kvbaton_proof.sim.world.sim_transport import TCP
from kvbaton_proof.sim.world.world import InjectedFault

NAME = "plane"
STEPS, STEPS_CLOSED = 50, 12
JOBS = 6
WAITING_MAX = 3
DETAIL = 512
CALLS = ("submit", "cancel", "disconnect", "fence", "endpoint", "connect", "lay_out", "lend", "drain", "close")
LOOKS = ("refusals", "mapped_bytes")

Stop = said.Cancel | said.RankDisconnect | said.Fence
Call = tuple[Any, ...]


class Scripted:
    """A data plane that does what it is told beforehand, and keeps what it was asked."""

    capabilities = TCP

    def __init__(self) -> None:
        self.calls: list[Call] = []
        self.throws: set[str] = set()
        self.has_room = True
        self.error = "the scripted plane threw"
        self.minted = b"endpoint"
        self.events: list[TransportEvent] = []
        self.turned_away: dict[str, int] = {}
        self.mapped = 0
        self.wakers: list[Callable[[], None]] = []
        self.journal: list[object] = []  # of all who share it: whose call came when

    @property
    def refusals(self) -> Mapping[str, int]:
        self._maybe_throw("refusals")
        return self.turned_away

    @property
    def mapped_bytes(self) -> int:
        self._maybe_throw("mapped_bytes")
        return self.mapped

    def set_waker(self, waker: Callable[[], None]) -> None:
        self.wakers.append(waker)

    def submit(self, copy: Copy) -> bool:
        self._called("submit", _facts(copy))
        return self.has_room

    def endpoint(self, peer: PeerId) -> bytes:
        self._called("endpoint", peer)
        return self.minted

    def drain(self) -> Sequence[TransportEvent]:
        self._called("drain")
        events, self.events = self.events, []
        return events

    def __getattr__(self, name: str) -> Any:
        if name in CALLS:
            return lambda *args: self._called(name, *args)
        raise AttributeError(name)

    def _called(self, *call: Any) -> None:
        self.calls.append(call)
        self.journal.append(self)
        self._maybe_throw(call[0])

    def _maybe_throw(self, name: str) -> None:
        if name in self.throws:
            raise InjectedFault(self.error)


class PlaneModel:
    """What a plane is asked and what is said of it, by the laws."""

    def __init__(self, plane: Scripted, name: str = NAME) -> None:
        self.plane = plane
        self.name = name
        self.calls: list[Call] = []
        self.news: list[said.News] = []
        self.faults = 0
        self.waiting: list[Copy] = []
        self.parts: dict[JobId, bytes] = {}
        self.again: list[Stop] = []
        self.again_at: float | None = None
        self.threw = False
        self.closed = False
        self.told: dict[str, int] = {}
        self.told_mapped = 0

    @property
    def told_error(self) -> str:
        return f"InjectedFault: {self.plane.error}"[:DETAIL]

    def carry_out(self, command: said.Command) -> None:
        match command:
            case said.Submit():
                self._submit(command)
            case said.TablePart(_, job, table):
                if self.closed or len(self.parts) >= WAITING_MAX:
                    self.faults += 1
                else:
                    self.parts[job] = self.parts.get(job, b"") + table
            case said.Cancel(_, job):
                self._stop_all(command, [each for each in self.waiting if each.job == job], Reason.CANCELLED)
            case said.RankDisconnect(_, peer):
                self._stop_all(command, [each for each in self.waiting if each.peer == peer], Reason.PEER_GONE)
            case said.Fence(_, peer):
                self._stop_all(command, [each for each in self.waiting if each.peer == peer], Reason.TRANSFER_FAILED)
            case said.Mint():
                self._mint(command)
            case said.RankConnect(_, peer, endpoint):
                self._welcome(peer)
                if not self._called("connect", peer, endpoint):
                    self.news.append(said.ConnectFailed(self.name, peer, self.told_error))
            case said.LayOut(_, tables):
                self.faults += not self._called("lay_out", tables)
            case said.RankLend(_, job):
                before = bytes(self.parts.pop(job, b""))
                if any(len(ids) % 4 for ids in command.blocks) or before:
                    self._end(job, Reason.BAD_SPAN)
                elif not self._called("lend", said.loan_of(command)):
                    self._end(job, Reason.TRANSFER_FAILED, self.told_error)
            case said.Open():
                self.faults += 1  # it has a name
            case said.Close():
                self.close()

    def turn(self, now: float) -> float | None:
        if self.again_at is not None and now >= self.again_at:
            self.again_at = None
            again, self.again = self.again, []
            for command in again:
                self._stop(command)
        self._drain()
        while self.waiting and self._started(self.waiting[0]):
            del self.waiting[0]
        if self.threw and self.again_at is None:
            self.again_at = now + AGAIN_S
        self.threw = False
        return self.again_at

    def look(self) -> None:
        plane = self.plane
        if "refusals" in plane.throws:
            self.faults += 1
        elif plane.turned_away != self.told:
            self.told = dict(plane.turned_away)
            self.news.append(said.RankRefusals(self.name, self.told))
        if "mapped_bytes" in plane.throws:
            self.faults += 1
        elif plane.mapped != self.told_mapped:
            self.told_mapped = plane.mapped
            self.news.append(said.MappedBytes(self.name, plane.mapped))

    def close(self) -> None:
        if not self.closed:
            self.closed = True
            self.parts, self.again = {}, []
            self._end_all(self.waiting, Reason.CANCELLED)
            self.faults += not self._called("close")
            self._drain()

    def _called(self, *call: Any) -> bool:
        self.calls.append(call)
        return call[0] not in self.plane.throws

    def _submit(self, command: said.Submit) -> None:
        table = self.parts.pop(command.job, b"") + command.table
        if len(table) != command.spans_bytes + command.column_bytes + command.shifts_bytes:
            self._end(command.job, Reason.BAD_SPAN)
        elif self.closed:
            self._end(command.job, Reason.CANCELLED)
        elif len(self.waiting) >= WAITING_MAX:
            self._end(command.job, Reason.BUSY)
        else:
            copy = said.copy_of(msgspec.structs.replace(command, table=table))
            if self.waiting or not self._started(copy):
                self.waiting.append(copy)

    def _started(self, copy: Copy) -> bool:
        if self._called("submit", _facts(copy)):
            return self.plane.has_room
        self._end(copy.job, Reason.TRANSFER_FAILED, self.told_error)
        return True

    def _stop_all(self, command: Stop, concerned: list[Copy], reason: Reason) -> None:
        self._end_all(concerned, reason)
        self._stop(command)

    def _end_all(self, concerned: list[Copy], reason: Reason) -> None:
        self.waiting = [copy for copy in self.waiting if not any(copy is each for each in concerned)]
        for copy in concerned:
            self._end(copy.job, reason)

    def _stop(self, command: Stop) -> bool:
        name = type(command).__name__.removeprefix("Rank").lower()
        taken = self._called(name, command.job if isinstance(command, said.Cancel) else command.peer)
        if not taken:
            self.threw = True
            self.faults += 1
            self.again.append(command)
        return taken

    def _welcome(self, peer: PeerId) -> None:
        owed = said.RankDisconnect(self.name, peer)
        if owed in self.again:
            self.again.remove(owed)

    def _mint(self, command: said.Mint) -> None:
        for owed in (said.RankDisconnect(self.name, command.peer), said.Fence(self.name, command.peer)):
            while owed in self.again:
                self.again.remove(owed)
                if not self._stop(owed):
                    self.news.append(said.MintFailed(self.name, command.ask, ANYTHING))
                    return
        if not self._called("endpoint", command.peer):
            self.news.append(said.MintFailed(self.name, command.ask, self.told_error))
        elif len(self.plane.minted) > said.ENDPOINT_BYTES_MAX:
            self.news.append(said.MintFailed(self.name, command.ask, ANYTHING))
        else:
            self.news.append(said.Minted(self.name, command.ask, self.plane.minted))

    def _drain(self) -> None:
        if not self._called("drain"):
            self.threw = True
            self.faults += 1
            return
        for event in self.plane.events:
            match event:
                case CopyEnded(job, reason, at_rest, detail, unwritten):
                    self.news.append(said.RankEnded(self.name, job, reason, at_rest, detail[:DETAIL], unwritten))
                case CopyRested(job):
                    self.news.append(said.Rested(self.name, job))
                case FenceEnded(peer):
                    self.news.append(said.Fenced(self.name, peer))
                case OpenFailed(peer, detail):
                    self.news.append(said.ConnectFailed(self.name, peer, detail[:DETAIL]))

    def _end(self, job: JobId, reason: Reason, detail: str = ANYTHING) -> None:
        self.news.append(said.RankEnded(self.name, job, reason, True, detail))


def _bench_plane(rng: random.Random) -> int:
    scripted = Scripted()
    model = PlaneModel(scripted)
    transport = cast(Transport, scripted)
    is_named = rng.random() < 0.5
    hosted = HostedPlane(NAME, transport if is_named else UnnamedTransport(TCP, lambda me: transport))
    hosted.waiting_max = WAITING_MAX
    same("how many stops are asked for again", hosted._again.maxlen, AGAIN_MAX)
    if not is_named:
        hosted.carry_out(said.Open(NAME, PEERS[0]))
        same("a plane that was told its name", hosted.faults, 0)
        same("it lends nothing yet", scripted.calls, [("lay_out", ())])
        scripted.calls.clear()
    now = _drive(rng, hosted, scripted, model, STEPS, 0.0)
    for is_asked in rng.sample((True, False), 2):
        model.close()
        if is_asked:
            hosted.carry_out(said.Close(NAME))
        else:
            hosted.close()
        _compare(hosted, scripted, model)
        same("tables that are kept after the close", hosted._parts, {})
    _drive(rng, hosted, scripted, model, STEPS_CLOSED, now)
    hosted.shut()
    same("the last call", scripted.calls[-1], ("close",))
    return worth(hosted.faults)


def _drive(
    rng: random.Random, hosted: HostedPlane, scripted: Scripted, model: PlaneModel, steps: int, now: float
) -> float:
    for _ in range(steps):
        now += rng.choice((0, AGAIN_S / 2, AGAIN_S))
        if model.again_at is not None and rng.random() < 0.3:
            now = max(now, model.again_at)
        script(rng, scripted)
        step = rng.random()
        if step < 0.05:
            _owe_fences(rng, hosted, scripted, model)
        elif step < 0.22:
            expected = model.turn(now)  # before the real one takes the events
            same("when to turn again", hosted.turn(now), expected)
        elif step < 0.3:
            model.look()
            hosted.note_refusals()
        else:
            for command in any_commands(rng):
                model.carry_out(command)
                hosted.carry_out(command)
        if step > 0.4:
            same("news of a plane", hosted.take_news(), model.news)
            model.news.clear()
        _compare(hosted, scripted, model)
    return now


def _owe_fences(rng: random.Random, hosted: HostedPlane, scripted: Scripted, model: PlaneModel) -> None:
    """Fences and farewells that threw, and then whoever they were of is asked in."""
    peer = rng.choice(PEERS)
    owed = rng.choices((said.Fence(NAME, peer), said.RankDisconnect(NAME, peer)), k=rng.randrange(1, 4))
    last = rng.choice((said.Mint(NAME, 1, peer), said.Cancel(NAME, JobId(1))))
    for command in (*owed, last):
        throws = {"fence", "disconnect", "cancel"}
        scripted.throws = throws if not isinstance(command, said.Mint) or rng.random() < 0.3 else set()
        model.carry_out(command)
        hosted.carry_out(command)


def _compare(hosted: HostedPlane, scripted: Scripted, model: PlaneModel) -> None:
    same("calls of a plane", scripted.calls, model.calls)
    same("faults of a plane", hosted.faults, model.faults)
    scripted.calls.clear()
    model.calls.clear()


def script(rng: random.Random, plane: Scripted) -> None:
    """What the plane will do in this step."""
    often = rng.choice((0.0, 0.15, 0.15, 0.7))
    plane.throws = {name for name in (*CALLS, *LOOKS) if rng.random() < often}
    plane.has_room = rng.random() < 0.4
    plane.error = "e" * rng.choice((3, 600))
    plane.minted = bytes(rng.choice((1, 8, said.ENDPOINT_BYTES_MAX, said.ENDPOINT_BYTES_MAX + 1)))
    if rng.random() < 0.2:
        plane.turned_away[rng.choice(("left", "full"))] = rng.randrange(3)
    plane.mapped = rng.choice((plane.mapped, 0, 7))
    while rng.random() < 0.3:
        plane.events.append(_any_event(rng))


def _any_event(rng: random.Random) -> TransportEvent:
    job, peer, detail = JobId(rng.randrange(JOBS)), rng.choice(PEERS), "d" * rng.choice((0, 5, 600))
    return rng.choice(
        (
            CopyEnded(
                job, rng.choice((None, Reason.TRANSFER_FAILED)), rng.random() < 0.5, detail, rng.choice((None, 0, 9))
            ),
            CopyRested(job),
            FenceEnded(peer),
            OpenFailed(peer, detail),
        )
    )


def any_commands(rng: random.Random, name: str = NAME) -> list[said.Command]:
    job, peer = JobId(rng.randrange(JOBS)), rng.choice(PEERS[:2])
    kind = rng.random()
    if kind < 0.35:
        commands = said.submit_commands(name, any_copy(rng, job), 24)
        if len(commands) > 1 and rng.random() < 0.5:
            del commands[rng.choice((0, -1, -1))]  # torn, or never submitted
        return commands
    torn = (b"123",) if rng.random() < 0.3 else (b"", bytes(8))
    lend = said.RankLend(name, job, peer, Direction.READ, torn)
    stops = (said.Cancel(name, job), said.RankDisconnect(name, peer), said.Fence(name, peer))
    opens = (said.Mint(name, rng.randrange(9), peer), said.RankConnect(name, peer, b"there"))
    rare = (said.LayOut(name, ()), lend, said.Open(name, peer))
    return [rng.choice(rng.choice((stops, opens, rare, stops, opens)))]


class _Huge(bytearray):
    """A table that is nearly as large as one may be."""

    size = 0

    def __len__(self) -> int:
        return self.size + super().__len__()


def _fill_up(rng: random.Random) -> None:
    """A table may grow to its bound, and not beyond."""
    hosted, job = HostedPlane(NAME, cast(Transport, Scripted())), JobId(1)
    huge, more = _Huge(), rng.randrange(24, 27)
    huge.size = said.TABLE_BYTES_MAX - 25
    hosted._parts[job] = huge
    hosted.carry_out(said.TablePart(NAME, job, bytes(more)))
    same("a table at its bound", bytearray.__len__(huge), more if more <= 25 else 0)


def bench_plane(rng: random.Random) -> None:
    listened(rank_planes, _bench_plane)(rng)
    _fill_up(rng)
