"""Ledgers that talk: real encoded frames over a scripted wire, in virtual time.

    pair = Pair("p", "d")
    pair.lose(Granted)                     # the next one
    pair.d.want("r", pair.p.grant())
    pair.run(1)                            # no clock is read, nothing sleeps

A test ends with `finish`, which lets everything come to rest and then checks all promises about endings.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from party import KEY, WALL_S, Habits, Load, Party, transfer

from kvbaton.protocol import effects as fx
from kvbaton.protocol.ids import Incarnation, PeerId, WorkerId
from kvbaton.protocol.wire.codec import encode
from kvbaton.protocol.wire.messages import Message
from kvbaton.protocol.wire.ticket import Ticket, seal

STEPS_MAX = 20_000
"""A pair that is not quiet after this many steps at one instant never will be."""
REST_S = 400.0
"""Longer than every time-out of the default settings one after the other."""


@dataclass(slots=True)
class Frame:
    """A message on the wire, as bytes; `message` is what the bytes say, for scripts and transcripts."""

    source: WorkerId
    target: WorkerId
    message: Message
    raw: bytes
    fate: str = "sent"


@dataclass(slots=True)
class Rule:
    """What happens to the next `times` frames of a kind."""

    fate: str
    kind: type
    times: float
    source: str = ""

    def takes(self, frame: Frame) -> bool:
        return isinstance(frame.message, self.kind) and self.source in ("", frame.source) and self.times > 0


class Pair:
    """Some workers by name, the wire between them, and the time."""

    def __init__(self, *names: str, **options: Any) -> None:
        self.now = 0.0
        self.lives = 0
        self.wire: list[Frame] = []
        self.held: list[Frame] = []
        self.late: list[tuple[float, Frame]] = []  # by when they arrive
        self.log: list[Frame | tuple[Party, fx.Effect | str]] = []
        self.times: list[float] = []  # of the log's entries
        self.sent = 0  # frames, ever
        self.on_post: Callable[[int, Frame], str] | None = None  # the fate of the n-th frame, for sweeps
        self.on_delivery: Callable[[int], None] | None = None  # before the n-th arrival, for sweeps
        self.arrived = 0
        self.rules: list[Rule] = []
        self.options = options
        self.parties: dict[WorkerId, Party] = {}
        self.graves: list[Party] = []
        for name in names or ("p", "d"):
            self.add(name)

    # --- who is there

    def add(self, name: str, **options: Any) -> Party:
        """A worker begins a life; an earlier one of that name is over."""
        old = self.parties.get(WorkerId(name))
        if old is not None:
            old.alive = False
            self.graves.append(old)
        party = self.parties[WorkerId(name)] = Party(self, name, **(self.options | options))
        return party

    def restart(self, name: str) -> Party:
        """Same name, same shape, another incarnation; what was on the wire still arrives."""
        old = self.parties[WorkerId(name)]
        identity = old.ledger.desk.identity
        return self.add(
            name,
            shape=old.shape,
            transports=identity.transports,
            settings=old.ledger.desk.settings,
            host=identity.host,
            versions=identity.versions,
        )

    def __getattr__(self, name: str) -> Party:
        try:
            return self.__dict__["parties"][name]
        except KeyError:
            raise AttributeError(name) from None

    def life_of(self, rank: PeerId) -> tuple[Party | None, int]:
        """The life, and the rank in it, that a data plane reaches under this name."""
        name, _, number = rank.worker.partition("#")
        party = self.parties.get(WorkerId(name))
        return (party, int(number)) if party is not None and party.me.incarnation == rank.incarnation else (None, 0)

    # --- the wire

    def post(self, source: Party, target: WorkerId, message: Message, raw: bytes) -> None:
        frame = Frame(source.name, target, message, raw)
        self._record(frame)
        self.sent += 1
        fate = self.on_post(self.sent, frame) if self.on_post is not None else ""
        rule = next((rule for rule in self.rules if rule.takes(frame)), None)
        if rule is not None:
            rule.times -= 1
            fate = rule.fate
        if fate == "lost" or target not in self.parties:
            frame.fate = "lost"
        elif fate == "held":
            frame.fate = "held"
            self.held.append(frame)
        elif fate.startswith("late "):
            frame.fate = fate
            self.late.append((self.now + float(fate.removeprefix("late ")), frame))
        else:
            self.wire.extend([frame] * (2 if fate == "doubled" else 1))
            frame.fate = fate or "sent"

    def lose(self, kind: type, times: float = 1, source: str = "") -> None:
        self.rules.append(Rule("lost", kind, times, source))

    def hold(self, kind: type, times: float = 1, source: str = "") -> None:
        self.rules.append(Rule("held", kind, times, source))

    def double(self, kind: type, times: float = 1, source: str = "") -> None:
        self.rules.append(Rule("doubled", kind, times, source))

    def cut(self, source: str) -> None:
        """Nothing that this worker says arrives."""
        self.rules.append(Rule("lost", object, math.inf, source))

    def heal(self) -> None:
        """The wire is good again; what was held back stays so."""
        self.rules.clear()

    def release(self, kind: type = object) -> None:
        """Deliver what was held back."""
        ready = [frame for frame in self.held if isinstance(frame.message, kind)]
        self.held = [frame for frame in self.held if frame not in ready]
        for frame in ready:
            self._record(Frame(frame.source, frame.target, frame.message, frame.raw, "arrives at last"))
        self.wire.extend(ready)
        self.settle()

    def inject(
        self,
        source: str,
        target: str,
        message: Message,
        *,
        session: int | None = None,
        to: int | None = None,
        incarnation: int | None = None,
    ) -> None:
        """Say something as `source` that its ledger did not; in its session with `target` unless told otherwise."""
        ours, theirs = self.parties[WorkerId(source)], self.parties[WorkerId(target)]
        sender = ours.me if incarnation is None else PeerId(ours.name, Incarnation(incarnation))
        if session is None:
            link = ours.ledger.consumer.links.by_worker.get(theirs.name)
            granted = (s.number for s in ours.ledger.sessions.by_number.values() if s.peer == theirs.me and s.joined)
            session = link.session if link is not None else next(granted, 0)
        addressee = theirs.me.incarnation if to is None else Incarnation(to)
        frame = Frame(ours.name, theirs.name, message, encode(sender, addressee, session, message), "injected")
        self._record(frame)
        self.wire.append(frame)
        self.settle()

    def note(self, party: Party, what: fx.Effect | str) -> None:
        """An effect of a ledger, or what came of one."""
        self._record((party, what))

    def _record(self, entry: Frame | tuple[Party, fx.Effect | str]) -> None:
        self.log.append(entry)
        self.times.append(self.now)

    def said(self, kind: type, source: str = "") -> list[Any]:
        """Every message of that kind, ever, in order."""
        frames = [entry for entry in self.log if isinstance(entry, Frame) and entry.fate != "arrives at last"]
        return [f.message for f in frames if isinstance(f.message, kind) and source in ("", f.source)]

    def done(self, kind: type, party: str = "") -> list[Any]:
        """Every effect of that kind, ever, in order."""
        entries = [entry for entry in self.log if isinstance(entry, tuple)]
        return [effect for one, effect in entries if isinstance(effect, kind) and party in ("", one.name)]

    # --- time

    def settle(self) -> None:
        """Deliver and do everything that happens at this instant."""
        for _ in range(STEPS_MAX):
            if self.wire:
                self.arrived += 1
                if self.on_delivery is not None:
                    self.on_delivery(self.arrived)
                frame = self.wire.pop(0)
                self.parties[frame.target].receive(frame.source, frame.raw)
            elif not any(party.act() for party in list(self.parties.values())):
                return
        raise AssertionError("the pair does not become quiet")

    def run(self, seconds: float) -> None:
        """Let time pass, from deadline to deadline."""
        end = self.now + seconds
        self.settle()
        while (due := self._next_due()) is not None and due <= end:
            self.now = max(self.now, due)
            self.wire.extend(frame for at, frame in self.late if at <= self.now)
            self.late = [(at, frame) for at, frame in self.late if at > self.now]
            for party in list(self.parties.values()):
                party.on_time()
            self.settle()
        self.now = end

    def _next_due(self) -> float | None:
        dues = [party.due() for party in self.parties.values()] + [at for at, _ in self.late]
        return min((at for at in dues if at is not None), default=None)

    # --- short cuts

    def pull(self, *, copies: bool = True) -> Load:
        """D wants what P has leased, and all that follows at this instant has happened."""
        if not copies:
            self.d.habits.copies = False
        load = self.d.want("r", self.p.grant())
        self.settle()
        return load

    def give_up(self) -> None:
        """D's engine needs it no more."""
        self.d.give_up("r")
        self.settle()

    def router_ticket(self, number: int = 1, *, source: str = "p", **changes: Any) -> str:
        """A ticket minted before P began (streaming, push)."""
        given = {"target": WorkerId(""), "expires_unix_s": WALL_S + 1000.0} | changes
        return seal(Ticket(transfer(number), WorkerId(source), **given), KEY)

    def finish(self) -> None:
        """Nothing is scripted any more: let all come to rest, and check that it has."""
        self.rules.clear()
        self.on_post = self.on_delivery = None
        for party in self.parties.values():
            party.habits = Habits()
        self.release()
        self.run(REST_S)
        for party in self.parties.values():
            party.check_at_rest()


Make = Callable[..., Pair]
"""The fixture `make_pair`."""
