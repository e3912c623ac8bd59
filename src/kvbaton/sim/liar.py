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
from array import array
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from kvbaton.protocol import messages as m
from kvbaton.protocol.effects import Copy, Direction
from kvbaton.protocol.errors import ProtocolError
from kvbaton.protocol.ids import HandoffId, JobId, WorkerId
from kvbaton.protocol.ticket import seal, unseal
from kvbaton.sim.liar_fields import KINDS, Fields, Place, Seen, all_places, kind_of
from kvbaton.sim.life import TICKET_KEY, Life
from kvbaton.sim.network import SimControl
from kvbaton.sim.world import World

SENT_MAX = 60
OVERHEARD_MAX = 16
FIRST_JOB = 1 << 40
"""Copies that no ledger has asked for have numbers that no ledger gives."""
PLANE = "tcp"
"""The liar reads and writes past its ledger only where the owner of the memory enforces what is lent."""

_pack = msgspec.msgpack.encode
_unpack = msgspec.msgpack.decode
_VERSION, _WORKER, _INCARNATION, _TO, _SESSION, _BODY = range(6)
_ENVELOPE = {"version": _VERSION, "worker": _WORKER, "incarnation": _INCARNATION, "to": _TO, "session": _SESSION}
_ODD: dict[str, tuple[int, ...]] = {
    "version": (0, 1, 2, 3, 16, 65_535),
    "session": (0, 1, 2, 3, 7, (1 << 63) - 1),
}


class Temper(msgspec.Struct, frozen=True):
    """What kind of liar somebody is."""

    fields: frozenset[Place]  # lies about these alone; about all, if there are none
    alter: float
    omit: float
    repeat: float
    hold: float  # share of messages that it sends late, so that others overtake them
    replay: float
    pause_s: float  # between things that it says, or copies, of its own accord; 0: never


def temper_of(rng: random.Random) -> Temper:
    if rng.random() < 0.5:  # right in all but a few fields, of the messages that handoffs are made of
        deep = [place for place in all_places() if place[0] not in ("Hello", "Welcome", "Joined", "HelloRefused")]
        return Temper(frozenset(rng.sample(deep, rng.randint(1, 4))), 0.7, 0.0, 0.0, 0.0, 0.0, rng.choice((0.0, 0.3)))
    return Temper(
        frozenset(),
        alter=rng.choice((0.1, 0.3)),
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
        self.temper = temper_of(random.Random(f"temper {world.seed} {life.peer.worker}"))
        self.seen = Seen()
        self.fields = Fields(self.rng, self.seen)
        self.claimed: set[HandoffId] = set()  # it has asked for these, so it is a party to them
        self.quiet = False
        self._wire: SimControl = life.control
        self._sent: deque[tuple[WorkerId, list[Any]]] = deque(maxlen=SENT_MAX)
        self._sessions: dict[WorkerId, deque[int]] = {}
        self._overheard: deque[tuple[str, bytes]] = deque(maxlen=OVERHEARD_MAX)
        self._jobs = FIRST_JOB
        life.node.control = self
        if self.temper.pause_s:
            self._later(self._meddle)

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
        self._overheard.append((ticket, digest))

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
            self.world.after(rng.choice((0.05, 0.5, 3.0)) * rng.random(), lambda: self._send(worker, tree))
        else:
            self._send(worker, tree)
        if rng.random() < temper.repeat:
            for _ in range(rng.choice((1, 2, 8))):
                self.world.faults["lies_repeated"] += 1
                self._send(worker, tree)
        if rng.random() < temper.replay:
            self._replay()

    def _altered(self, tree: list[Any]) -> list[Any]:
        for _ in range(self.rng.choice((1, 1, 1, 2, 3))):
            place = self._place(kind_of(tree[_BODY]))
            if place is not None and (not self.temper.fields or self.rng.random() < self.temper.alter):
                tree = self._lie(tree, place)
        return tree

    def _place(self, kind: type) -> Place | None:
        """What to lie about in a message of this kind; None when this liar is honest there."""
        places = [(kind.__name__, name) for name in kind.__struct_fields__]  # type: ignore[attr-defined]
        places += [("Envelope", name) for name in _ENVELOPE if self.temper.fields or self.rng.random() < 0.1]
        mine = [place for place in places if not self.temper.fields or place in self.temper.fields]
        return self.rng.choice(mine) if mine else None

    def _lie(self, tree: list[Any], place: Place) -> list[Any]:
        self.told[place] += 1
        self.world.faults["lies_told"] += 1
        kind, name = place
        if kind == "Envelope":
            return [*tree[: _ENVELOPE[name]], self._envelope_lie(name, tree), *tree[_ENVELOPE[name] + 1 :]]
        body = self.fields.altered(tree[_BODY], name)
        if name == "ticket" and self.rng.random() < 0.7:
            body[3] = self._ticket(str(tree[_BODY][3]))
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

    def _ticket(self, text: str) -> str:
        """A ticket that the key has signed and that is not right: late, endless, another's, or of another prompt."""
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
        return seal(msgspec.structs.replace(ticket, **changes), TICKET_KEY)

    # --- what it says and does of its own accord

    def _meddle(self) -> None:
        if not self.life.alive:
            return
        if not self.quiet and not self.life.paused:
            act: Callable[[], None] = self.rng.choice(
                (self._invent, self._invent, self._replay, self._copy, self._copy, self._use_overheard)
            )
            act()
        self._later(self._meddle)

    def _later(self, act: Callable[[], None]) -> None:
        self.world.after(self.temper.pause_s * self.rng.uniform(0.5, 1.5), act)

    def _invent(self) -> None:
        worker = self._other()
        kind = self.rng.choice([kind for kind in KINDS if kind not in (m.Hello, m.Welcome)])
        self.world.faults["lies_invented"] += 1
        tree = self._addressed(worker, self.fields.invented(kind))
        place = self._place(kind)
        self._send(worker, tree if place is None or self.rng.random() < 0.5 else self._lie(tree, place))

    def _replay(self) -> None:
        """What was said once, again: as it was, or to another, or as if it were of today."""
        if not self._sent:
            return
        worker, tree = self.rng.choice(self._sent)
        self.world.faults["lies_replayed"] += 1
        if self.rng.random() < 0.3:
            worker = self._other()
        if self.rng.random() < 0.5:
            tree = self._addressed(worker, tree[_BODY])
        self._send(worker, tree)

    def _use_overheard(self) -> None:
        """Claim with a ticket of another pair, as it is or signed anew for oneself."""
        if not self._overheard:
            return
        text, digest = self.rng.choice(self._overheard)
        ticket = unseal(text, (TICKET_KEY,), 0.0)
        if self.rng.random() < 0.5:
            target = self.rng.choice((WorkerId(""), self.life.peer.worker))
            text = seal(msgspec.structs.replace(ticket, target=target), TICKET_KEY)
        claim = m.Claim(ticket.handoff, self.rng.randint(1, 50), text, digest, True)
        self.world.faults["lies_with_others_tickets"] += 1
        self._send(ticket.source, self._addressed(ticket.source, _unpack(_pack(claim))))

    def _copy(self) -> None:
        """Read, or write, some page of somebody whose data plane it is connected to, whether it is lent or not."""
        rank = self.rng.choice(self.life.transports)
        plane = rank.get(PLANE)
        peers = sorted(plane._links) if plane is not None else []
        if plane is None or not peers:
            return
        peer = self.rng.choice(peers)
        there = self.lives[WorkerId(peer.worker.partition("#")[0])].character.shape
        block = self._block() if self.rng.random() < 0.5 else self.rng.randrange(there.blocks)
        size = min(there.page_bytes, self.life.character.shape.page_bytes)
        remote = there.page(self.rng.randrange(there.layers), min(block, there.blocks - 1))
        way = self.rng.choice((Direction.READ, Direction.WRITE))
        self._jobs += 1
        self.world.faults["lies_copied"] += 1
        plane.submit(Copy(JobId(self._jobs), peer, way, 0, 0, array("q", (0, remote, size))))

    def _block(self) -> int:
        """A block that somebody has named to it once."""
        named = self.seen.any_of(self.rng, "blocks")
        ids = array("i", b"".join(named)[: len(b"".join(named)) // 4 * 4] if named else b"")
        return max(0, self.rng.choice(ids)) if len(ids) else 0

    # --- helpers

    def _send(self, worker: WorkerId, tree: list[Any]) -> None:
        self._wire.send(worker, _pack(tree))

    def _addressed(self, worker: WorkerId, body: list[Any]) -> list[Any]:
        """In a session that the two have had, to the life that the other has now."""
        sessions = self._sessions.get(worker)
        session = self.rng.choice(sessions) if sessions else self.rng.randint(0, 4)
        me, there = self.life.peer, self.lives[worker].peer.incarnation
        return [self.rng.choice((2, 2, 2, 1)), me.worker, me.incarnation, there, session, body]

    def _other(self) -> WorkerId:
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
            self.claimed.add(tree[_BODY][1])
