"""A member with a valid key that speaks the protocol and lies: in fields, by silence, repetition, replay and invention.

A liar is a worker like the others, production code over simulated ports; between its node and the wire sits whoever has
taken it over. Some liars lie about one or two fields for a whole life and are right in all else, so that the lie is met
deep inside a handoff; others lie about everything. It knows what its key and its requests let it know: what it heard
and said, the key that tickets are signed with, and tickets of other pairs that somebody has shown it.

Laws: its name is on the wire whatever it writes (the control plane authenticates it); all its chance is its own, so a
world with a liar is otherwise the world without.
"""

from __future__ import annotations

import random
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from kvbaton.protocol.errors import ProtocolError
from kvbaton.protocol.ids import WorkerId
from kvbaton.protocol.legality import Role, may_say
from kvbaton.protocol.wire import messages as m
from kvbaton.protocol.wire.ticket import seal, unseal
from kvbaton_proof.lies.lie_fields import KINDS, Fields, Place, Seen, all_places, kind_of
from kvbaton_proof.sim.world.life import Life
from kvbaton_proof.sim.world.sim_network import SimControl
from kvbaton_proof.sim.world.touches import TICKET_KEY
from kvbaton_proof.sim.world.world import World

SENT_MAX = 60
ANOTHER_KEY = b"the key of some other cluster, 1"
OVERHEARD_MAX = 16

_pack = msgspec.msgpack.encode
_unpack = msgspec.msgpack.decode
_VERSION, _WORKER, _INCARNATION, _TO, _SESSION, _BODY = range(6)
_ENVELOPE = {"version": _VERSION, "worker": _WORKER, "incarnation": _INCARNATION, "to": _TO, "session": _SESSION}
_ODD: dict[str, tuple[int, ...]] = {
    "version": (0, 1, 2, 3, 16, 65_535),
    "session": (0, 1, 2, 3, 7, (1 << 63) - 1),
}


_GREETING = {"Hello", "Welcome", "Joined", "HelloRefused", "Linked"}


_OF_BLOCKS = {"blocks", "first_token"}


class Temper(msgspec.Struct, frozen=True):
    """What kind of liar somebody is."""

    fields: frozenset[Place]  # lies about these alone; about all, if there are none
    alter: float
    omit: float
    repeat: float
    hold: float  # share of messages that it sends late, so that others overtake them
    replay: float
    pause_s: float  # between things that it says, or copies, of its own accord; 0: never


def role_in(name: WorkerId) -> Role:
    """What the key of a worker of this world is for: its name says it."""
    return {"p": Role.PREFILL, "d": Role.DECODE}.get(name[:1], Role.BOTH)


def temper_of(rng: random.Random, role: Role) -> Temper:
    kind = rng.random()
    said = {kind.__name__ for kind in KINDS if may_say(role, kind)} | {"Envelope"}
    if kind < 0.55:  # right in all but a few fields, of greetings or of the messages that handoffs are made of
        said = said & _GREETING if kind < 0.1 else said - _GREETING
        places = [place for place in all_places() if place[0] in said]
        few = frozenset(rng.sample(places, min(len(places), rng.randint(1, 4))))
        return Temper(few, rng.choice((0.3, 0.7)), 0.0, 0.0, 0.0, 0.0, rng.choice((0.0, 0.3)))
    if kind > 0.85:  # right in all but which blocks a handoff is made of: met where copies are planned
        named = frozenset(place for place in all_places() if place[0] in said and place[1] in _OF_BLOCKS)
        return Temper(named, rng.choice((0.3, 0.7)), 0.0, 0.0, 0.0, 0.0, 0.0)
    return Temper(
        frozenset(),
        alter=rng.choice((0.1, 0.3, 0.5)),
        omit=rng.choice((0.0, 0.1)),
        repeat=rng.choice((0.0, 0.1)),
        hold=rng.choice((0.0, 0.1)),
        replay=rng.choice((0.0, 0.1)),
        pause_s=rng.choice((0.05, 0.1, 0.5)),
    )


class Liar:
    """Whoever has taken over one life of a worker."""

    def __init__(self, world: World, life: Life, lives: Mapping[WorkerId, Life], told: Counter[Place]) -> None:
        self.world = world
        self.life = life
        self.lives = lives
        self.told = told  # what has been lied about, in all lives
        self.rng = random.Random(f"liar {world.seed} {life.peer}")
        self.temper = temper_of(random.Random(f"temper {world.seed} {life.peer.worker}"), role_in(life.peer.worker))
        self.seen = Seen()
        self.fields = Fields(self.rng, self.seen)
        self.quiet = False
        self._wire: SimControl = life.control
        self._sent: deque[tuple[WorkerId, list[Any]]] = deque(maxlen=SENT_MAX)
        self._sessions: dict[WorkerId, deque[int]] = {}
        self.overheard: deque[tuple[str, bytes]] = deque(maxlen=OVERHEARD_MAX)
        self.on_overheard: Callable[[], None] = lambda: None
        life.node.control = self

    # --- the control port of its node

    def send(self, worker: WorkerId, frame: bytes) -> bool:
        if worker not in self.lives:
            return False
        tree = _unpack(frame)
        self._note(worker, tree)
        self._sent.append((worker, tree))
        self._say(worker, tree)
        return True

    def receive(self) -> Sequence[tuple[WorkerId, bytes]]:
        frames = self._wire.receive()
        for worker, frame in frames:
            try:
                self._note(worker, _unpack(frame))
            except (msgspec.DecodeError, UnicodeDecodeError, KeyError, IndexError, TypeError):
                continue  # garbled on the way
        return frames

    def overhear(self, ticket: str, digest: bytes) -> None:
        """Somebody shows it a ticket that is for another, and what the prompt was."""
        self.overheard.append((ticket, digest))
        self.on_overheard()

    # --- lies about what its node says

    def _say(self, worker: WorkerId, tree: list[Any]) -> None:
        rng, temper = self.rng, self.temper
        if rng.random() < temper.omit:
            self.world.faults["lies_omitted"] += 1
            return
        if temper.fields or rng.random() < temper.alter:
            tree = self._altered(tree)
        if rng.random() < temper.hold:
            self.world.faults["lies_held_back"] += 1
            self.world.after(rng.choice((0.05, 0.5, 3.0)) * rng.random(), lambda: self.wire(worker, tree))
        else:
            self.wire(worker, tree)
        if rng.random() < temper.repeat:
            for _ in range(rng.choice((1, 2, 8))):
                self.world.faults["lies_repeated"] += 1
                self.wire(worker, tree)
        if rng.random() < temper.replay:
            self.replay()

    def _altered(self, tree: list[Any]) -> list[Any]:
        for _ in range(self.rng.choice((1, 1, 1, 2, 3))):
            place = self.place(kind_of(tree[_BODY]))
            if place is not None and (not self.temper.fields or self.rng.random() < self.temper.alter):
                tree = self.lie(tree, place)
        return tree

    def place(self, kind: type) -> Place | None:
        """What to lie about in a message of this kind; None when this liar is honest there."""
        places = [(kind.__name__, name) for name in kind.__struct_fields__]  # type: ignore[attr-defined]
        places += [("Envelope", name) for name in _ENVELOPE if self.temper.fields or self.rng.random() < 0.1]
        mine = [place for place in places if not self.temper.fields or place in self.temper.fields]
        return self.rng.choice(mine) if mine else None

    def lie(self, tree: list[Any], place: Place) -> list[Any]:
        self.told[place] += 1
        self.world.faults["lies_told"] += 1
        kind, name = place
        if kind == "Envelope":
            return [*tree[: _ENVELOPE[name]], self._envelope_lie(name, tree), *tree[_ENVELOPE[name] + 1 :]]
        body = self.fields.altered(tree[_BODY], name)
        if name == "ticket" and self.rng.random() < 0.7:
            body[3] = self.ticket(str(tree[_BODY][3]))
        return [*tree[:_BODY], body]

    def _envelope_lie(self, name: str, tree: list[Any]) -> Any:
        rng = self.rng
        if name == "worker":
            return rng.choice([*self.lives, "nobody", ""])
        if name in ("incarnation", "to"):
            past = self.seen.any_of(rng, name) or 0
            theirs = rng.choice(sorted(self.lives.items()))[1].peer.incarnation
            return rng.choice((0, past, theirs, tree[_ENVELOPE[name]] + 1, (1 << 63) - 1))
        return rng.choice(_ODD[name])

    def ticket(self, text: str) -> str:
        """One that is not right, but signed: late, endless, another's, of another prompt. Or right, by another key."""
        try:
            ticket = unseal(text, (TICKET_KEY,), 0.0)
        except ProtocolError:
            return text
        rng, now = self.rng, self.world.now
        changes: dict[str, Any] = rng.choice([
            {"expires_unix_s": max(0.0, now - rng.choice((0.0, 60.0)))},
            {"expires_unix_s": now + rng.choice((3500.0, 3700.0, 1e9))},
            {"target": rng.choice(sorted(self.lives))},
            {"source": rng.choice(sorted(self.lives))},
            {"incarnation": rng.choice((0, 1, (1 << 63) - 1))},
            {"lease": rng.choice((0, 1, (1 << 63) - 1))},
            {"digest": rng.choice((b"", b"another"))},
            {"handoff": self.seen.any_of(rng, "handoff") or ticket.handoff},
            {"max_readers": 4096},
        ])  # fmt: skip
        key = ANOTHER_KEY if rng.random() < 0.2 else TICKET_KEY
        return seal(msgspec.structs.replace(ticket, **(changes if key == TICKET_KEY else {})), key)

    def replay(self) -> None:
        """What was said once, again: as it was, or to another, or as if it were of today."""
        if not self._sent:
            return
        worker, tree = self.rng.choice(self._sent)
        self.world.faults["lies_replayed"] += 1
        if self.rng.random() < 0.3:
            worker = self.other()
        if self.rng.random() < 0.5:
            tree = self.addressed(worker, tree[_BODY])
        self.wire(worker, tree)

    # --- what its mischief needs

    def wire(self, worker: WorkerId, tree: list[Any]) -> None:
        self._wire.send(worker, _pack(tree))

    def addressed(self, worker: WorkerId, body: list[Any]) -> list[Any]:
        """In a session that the two have had, to the life that the other has now."""
        sessions = self._sessions.get(worker)
        session = self.rng.choice(sessions) if sessions else self.rng.randint(0, 4)
        me, there = self.life.peer, self.lives[worker].peer.incarnation
        return [self.rng.choice((2, 2, 2, 1)), me.worker, me.incarnation, there, session, body]

    def other(self) -> WorkerId:
        return self.rng.choice([name for name in sorted(self.lives) if name != self.life.peer.worker])

    def _note(self, worker: WorkerId, tree: list[Any]) -> None:
        self.seen.note(tree[_BODY])
        self.seen.add("incarnation", tree[_INCARNATION])
        self.seen.add("to", tree[_TO])
        if tree[_SESSION]:
            sessions = self._sessions.setdefault(worker, deque(maxlen=4))
            if tree[_SESSION] not in sessions:
                sessions.append(tree[_SESSION])
        if kind_of(tree[_BODY]) is m.Claim and tree[_WORKER] == self.life.peer.worker:
            self.world.touch("lie", str(tree[_BODY][1]))  # it has asked for this, so it is a party to it
