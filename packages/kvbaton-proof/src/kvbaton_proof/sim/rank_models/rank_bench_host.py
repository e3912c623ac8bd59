"""The rank's end of a rank link on the bench (`rank_host`), between a stream and data planes that are made up.

Laws of the model: each command goes to the plane or the shelf that it names; one for nobody, and what cannot be read,
is counted and costs nothing else. A turn takes what came, lets planes and shelf go on, and sends what they have to say,
in that order and in batches; who was turned away is looked up once in `REFUSALS_S`. Of each lease the latest progress
is told, of so many as may be. To who has the planes nothing is told of them. At the end everything is closed, the line
last, whatever happens.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import msgspec

from kvbaton.control.poll_loop import Sleeper
from kvbaton.protocol.geometry.progress import Progress, whole
from kvbaton.protocol.ids import LeaseId
from kvbaton.ranks import rank_host
from kvbaton.ranks import rank_messages as said
from kvbaton.ranks.rank_carrying import Carrier, Clock
from kvbaton.ranks.rank_host import _HERE, LEASES_MAX, REFUSALS_S, STOP_S, RankHost, host_of
from kvbaton.ranks.rank_store_messages import ShelfAsk, ShelfCancel, ShelfCommand, ShelfOpen
from kvbaton.ranks.rank_stream import Stream
from kvbaton.ranks.store_interface import RankStoreInterface
from kvbaton.ranks.store_trust import ShelfTrust
from kvbaton.transports.core.transport import Transport
from kvbaton_proof.sim.rank_models.rank_bench import Raised, listened, outcome, same, worth
from kvbaton_proof.sim.rank_models.rank_bench_plane import WAITING_MAX, PlaneModel, Scripted, any_commands, script
from kvbaton_proof.sim.rank_models.rank_bench_port import Waiting
from kvbaton_proof.sim.rank_models.rank_bench_store import COMPAT, ScriptedShelf, ShelfModel, any_order

STEPS = 30
LEASES, BATCH = 4, 2
BAD, NOTHING = b"bad", b"nothing"
SESSION = 7


class StubStream:
    """Hands on what comes as it is, and what is added as frames."""

    def __init__(self) -> None:
        self.session = 0
        self.is_open = True
        self.heard = 0
        self.backlog = 0
        self.asked = 0
        self.counters: Counter[str] = Counter()
        self.added: list[bytes] = []

    def take(self, frame: bytes, now: float) -> bytes | None:
        if frame == BAD:
            raise msgspec.DecodeError("no frame")
        return None if frame == NOTHING else frame

    def add(self, body: bytes) -> None:
        self.added.append(body)

    def ask(self) -> None:
        self.asked += 1

    def due(self, now: float) -> list[bytes]:
        frames, self.added = self.added, []
        return frames


class StubLine:
    """Both a rank's line and an engine's lines."""

    strangers = 4
    endpoint = "tcp://127.0.0.1:5000"

    def __init__(self, number: int) -> None:
        self.keys = tuple(f"{number:039d}{each}" for each in "123")
        self.counters: Counter[str] = Counter(refused_frames=1)
        self.inbox: list[Any] = []
        self.sent: list[Any] = []
        self.wakes = 0
        self.closed = 0

    def wake(self) -> None:
        self.wakes += 1

    def send(self, *frame: Any) -> None:
        self.sent.append(frame[0] if len(frame) == 1 else frame)

    def receive(self) -> Sequence[Any]:
        found, self.inbox = self.inbox, []
        return found

    def close(self) -> None:
        self.closed += 1


class StubLoop:
    """Turns when it is told to."""

    def __init__(self, name: str, turn: Callable[[float], float | None], finish: Callable[[], None]) -> None:
        self.name = name
        self.turn = turn
        self.finish = finish
        self.started = 0
        self.timeouts: list[float] = []
        self.is_stopping = False

    def start(self) -> None:
        self.started += 1

    def stop(self, timeout_s: float) -> bool:
        self.timeouts.append(timeout_s)
        return timeout_s > 1


class StubCarrier:
    """Implements `Carrier`."""

    def __init__(self, rng: random.Random) -> None:
        self._number = rng.getrandbits(64)
        self.lines: list[StubLine] = []
        self.loops: list[StubLoop] = []
        self.sleepers: list[Sleeper] = []

    def session(self) -> int:
        self._number += 1
        return self._number

    def dial(self, invitations: Sequence[said.RankInvitation], clock: Clock) -> StubLine:
        return self.listen(0, "", clock)

    def listen(self, rank: int, host: str, clock: Clock) -> StubLine:
        self.lines.append(StubLine(self.session()))
        return self.lines[-1]

    def loop(
        self,
        name: str,
        sleeper: Sleeper,
        turn: Callable[[float], float | None],
        finish: Callable[[], None],
        clock: Clock,
    ) -> StubLoop:
        self.sleepers.append(sleeper)
        self.loops.append(StubLoop(name, turn, finish))
        return self.loops[-1]

    def arrival(self) -> Waiting:
        return Waiting()


class _Host:
    """A host and its model."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.now = 0.0
        self.carrier = StubCarrier(rng)
        names = rng.sample(("a", "b", "c"), rng.choice((1, 2, 2, 3)))
        self.planes = {name: Scripted() for name in names}
        self.models = {name: PlaneModel(plane, name) for name, plane in self.planes.items()}
        self.shelf = ScriptedShelf() if rng.random() < 0.7 else None
        self.shelf_model = ShelfModel(self.shelf) if self.shelf is not None else None
        self.rank = rng.randrange(4)
        self.real = RankHost(
            self.rank,
            cast("Mapping[str, Transport]", self.planes),
            clock=lambda: self.now,
            shelf=self._make if self.shelf is not None else None,
            carrier=cast(Carrier, self.carrier),
        )
        (self.line,), (self.loop,) = self.carrier.lines, self.carrier.loops
        same("leases and news at most", (self.real.leases_max, self.real.batch_max), (LEASES_MAX, said.NEWS_BATCH_MAX))
        self.stream = StubStream()
        self.real._stream = cast(Stream, self.stream)
        self.real.leases_max, self.real.batch_max = LEASES, BATCH
        for plane in self.real._planes.values():
            plane.waiting_max = WAITING_MAX
        self.progress: dict[LeaseId, Progress] = {}
        self.counters: Counter[str] = Counter()
        self.wakes = self.tells = self.told = 0
        self.looks_at = 0.0
        self.given = False
        self.sent: list[list[said.News]] = []
        self.unsent: list[list[said.News]] = []

    def _make(self, compat: str) -> RankStoreInterface:
        return cast(RankStoreInterface, self.shelf)

    def check_made(self) -> None:
        invitation = self.real.invitation
        able = {name: plane.capabilities for name, plane in self.planes.items()}
        keys = invitation.rank_public, invitation.engine_public, invitation.engine_secret
        found = invitation.rank, invitation.endpoint, keys, invitation.capabilities, invitation.has_shelf
        same("an invitation", found, (self.rank, self.line.endpoint, self.line.keys, able, self.shelf is not None))
        same("the host of an invitation", host_of(invitation), self.real)
        same("who sleeps between turns", self.carrier.sleepers, [self.line])
        same("whose thread it is", self.loop.name, f"kvbaton-rank-{self.rank}")
        self.real.start()
        same("a host that was started", self.loop.started, 1)
        wakers = [waker for plane in self.planes.values() for waker in plane.wakers]
        for waker in wakers:
            waker()
        same("planes that wake their host", (len(wakers), self.line.wakes), (len(self.planes), len(self.planes)))
        self.wakes = self.line.wakes
        same("strangers", self.real.strangers, self.line.strangers)
        same("counters of a stream", self.real.stream_counters, self.stream.counters)
        same("a host that is stopped", (self.real.stop(), self.real.stop(0.5)), (True, False))
        same("how long a stop may take", self.loop.timeouts, [STOP_S, 0.5])

    def give(self) -> None:
        """Take the planes; once, with the invitation, and not where somebody is served."""
        invitation = self.real.invitation
        other = msgspec.structs.replace(invitation, engine_secret="0" * 40)
        same("planes for another invitation", self.real.give(other, SESSION, self._tell), None)
        self.loop.is_stopping = self.rng.random() < 0.35
        fits = not self.stream.session and not self.loop.is_stopping
        found = self.real.give(invitation, SESSION, self._tell)
        taken = {name: plane.transport for name, plane in found.items()} if found is not None else None
        same("planes that are given", taken, self.planes if fits else None)
        self.loop.is_stopping = False
        if fits:
            self.given = True
            same("whose planes they are", self.stream.session, SESSION)
            same("planes that are given twice", self.real.give(invitation, SESSION, self._tell), None)

    def _tell(self) -> None:
        self.told += 1

    def progressed(self) -> None:
        lease, progress = LeaseId(self.rng.randrange(LEASES + 2)), whole([self.rng.randrange(9)])
        if lease in self.progress or len(self.progress) < LEASES:
            self.progress[lease] = progress
        else:
            self.counters["progress_lost"] += 1
        self.tells += self.given
        self.wakes += not self.given
        self.real.progressed(lease, progress)

    def take_progress(self) -> None:
        expected = [said.Progressed(lease, progress) for lease, progress in self.progress.items()]
        self.progress.clear()
        same("progress that is taken", self.real.take_progress(), expected)

    def turn(self) -> None:
        self.now += self.rng.choice((0, 0.05, 0.05, 0.25, REFUSALS_S))
        for plane in self.planes.values():
            script(self.rng, plane)
        self._script_shelf()
        self.stream.is_open = self.rng.random() < 0.7
        frames = [self._any_frame() for _ in range(self.rng.randrange(4))]
        for frame in frames:
            self._take(frame)
        again = [at for model in self._own() if (at := model.turn(self.now)) is not None]
        if self.shelf_model is not None:
            self.shelf_model.drain()
        self._send()
        self.line.inbox = list(frames)
        same("when to turn again", self.loop.turn(self.now), min(again, default=None))
        self.compare()

    def _own(self) -> list[PlaneModel]:
        return [] if self.given else list(self.models.values())

    def _script_shelf(self) -> None:
        if self.shelf is not None:
            self.shelf.has_room = self.rng.random() < 0.5
            self.shelf.counts["a"] = self.rng.randrange(3)

    def _any_frame(self) -> bytes:
        kind = self.rng.random()
        if kind < 0.15:
            return self.rng.choice((BAD, NOTHING, b"\xc1"))
        if kind < 0.4:
            order = any_order(self.rng)
            return said.encode_command(
                self.rng.choice((ShelfOpen(COMPAT), order, order, ShelfCancel(order.order), ShelfAsk(3)))
            )
        return said.encode_command(any_commands(self.rng, self.rng.choice((*self.planes, "nobody")))[0])

    def _take(self, frame: bytes) -> None:
        if frame == NOTHING:
            return
        if frame in (BAD, b"\xc1"):
            self.counters["malformed"] += 1
            return
        command = said.decode_command(frame)
        if isinstance(command, ShelfCommand):
            self._take_order(command)
        elif command.transport not in self.models or self.given:
            self.counters["unknown_transport"] += 1
        else:
            self.models[command.transport].carry_out(command)

    def _take_order(self, command: ShelfCommand) -> None:
        model = self.shelf_model
        if model is None:
            self.counters["no_shelf"] += 1
        elif isinstance(command, ShelfOpen):
            model.faults += model.is_made
            self.wakes += not model.is_made  # by the shelf, that was told whom to wake
            model.is_made = True
        elif isinstance(command, ShelfTrust):
            pass
        elif isinstance(command, ShelfCancel):
            model.cancel(command.order)
        elif isinstance(command, ShelfAsk):
            model.ask(command.ask)
        else:
            model.begin(command)

    def _send(self) -> None:
        news: list[said.News] = []
        looks = self.now >= self.looks_at and self.stream.is_open
        if looks:
            self.looks_at = self.now + REFUSALS_S
        for model in self._own():
            if looks:
                model.look()
            news += model.news
            model.news.clear()
        if self.shelf_model is not None:
            news += self.shelf_model.news
            self.shelf_model.news.clear()
        if self.progress and self.stream.session and self.stream.is_open and not self.given:
            for lease in list(self.progress)[:BATCH]:
                news.append(said.Progressed(lease, self.progress.pop(lease)))
            self.wakes += bool(self.progress)
        self.unsent += [news[at : at + BATCH] for at in range(0, len(news), BATCH)]
        if self.stream.session:
            self.sent, self.unsent = self.unsent, []

    def compare(self) -> None:
        same("news of a rank", [said.decode_news(frame) for frame in self.line.sent], self.sent)
        self.line.sent.clear()
        self.sent = []
        for name, plane in self.planes.items():
            same(f"calls of plane {name}", plane.calls, self.models[name].calls)
            plane.calls.clear()
            self.models[name].calls.clear()
        if self.shelf is not None and self.shelf_model is not None:
            same("calls of a shelf", self.shelf.calls, self.shelf_model.calls)
        same("how often a host was woken", self.line.wakes, self.wakes)
        same("how often an engine was told", self.told, self.tells)
        same("counters of a host", +self.real.counters, +self.counters)

    def finish(self) -> None:
        for plane in self.planes.values():
            script(self.rng, plane)
        if self.shelf_model is not None:
            self.shelf_model.close()
        for model in self.models.values():
            if self.given:
                model._called("close")
            else:
                model.close()
        self._send()
        journal: list[object] = []
        for each in (self.shelf, *self.planes.values()):
            if each is not None:
                each.journal = journal
        self.loop.finish()
        self.compare()
        of_shelf = [at for at, whose in enumerate(journal) if whose is self.shelf]
        same("a shelf that is closed before the planes", of_shelf, list(range(len(of_shelf))))
        same("lines that are closed", self.line.closed, 1)


def _bench_host(rng: random.Random) -> int:
    host = _Host(rng)
    try:
        host.check_made()
        gives_at = rng.randrange(STEPS // 2) if rng.random() < 0.5 else STEPS
        speaks_at = rng.choice((0, 0, 5, STEPS - 1)) if gives_at == STEPS or rng.random() < 0.3 else STEPS
        steps = (host.turn, host.turn, host.turn, host.progressed, host.progressed, host.progressed)
        for step in range(STEPS):
            if step == speaks_at:
                host.stream.session = SESSION
            if step == gives_at:
                host.give()
            rng.choice(steps)()
            if rng.random() < (0.3 if host.given else 0.05):
                host.take_progress()
        host.finish()
    finally:
        _HERE.pop(host.real.invitation.rank_public, None)
    _break_at_the_end(rng)
    for count in (0, said.TRANSPORTS_MAX + 1):
        planes = {f"plane{at}": cast(Transport, Scripted()) for at in range(count)}
        made = outcome(lambda planes=planes: RankHost(0, planes, carrier=cast(Carrier, StubCarrier(rng))), ValueError)  # type: ignore[misc]
        same(f"a host of {count} planes", made, Raised("ValueError"))
    return sum(worth(host.counters[name]) for name in ("malformed", "unknown_transport", "no_shelf"))


def _break_at_the_end(rng: random.Random) -> None:
    """Whatever breaks at the end, the line is closed."""
    carrier = StubCarrier(rng)
    planes = {f"plane{at}": cast(Transport, Scripted()) for at in range(said.TRANSPORTS_MAX)}
    host = RankHost(0, planes, carrier=cast(Carrier, carrier))
    del _HERE[host.invitation.rank_public]
    stream = StubStream()
    stream.session = SESSION
    stream.due = lambda now: 1 // 0  # type: ignore[method-assign,assignment,return-value]
    host._stream = cast(Stream, stream)
    same("an end that breaks", outcome(carrier.loops[0].finish, ZeroDivisionError), Raised("ZeroDivisionError"))
    same("lines that are closed", carrier.lines[0].closed, 1)


bench_host = listened(rank_host, _bench_host)
