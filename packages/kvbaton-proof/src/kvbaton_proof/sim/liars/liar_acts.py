"""A liar's own actions, besides lying in its node's messages.

It invents messages, replays old ones, speaks as somebody else, greets and claims without end, uses tickets of other
pairs and tickets that it has signed itself, and reads and writes pages of whoever its data planes are connected to.

Law: it goes past its ledger to memory only where the owner of that memory enforces what is lent; elsewhere there is
nothing to be shown (docs/security.md).
"""

from __future__ import annotations

import contextlib
import random
from array import array
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from kvbaton.protocol.effects import Copy, Direction
from kvbaton.protocol.errors import ProtocolError
from kvbaton.protocol.events import CopyEnded
from kvbaton.protocol.ids import HandoffId, JobId, WorkerId
from kvbaton.protocol.legality import Act, may
from kvbaton.protocol.wire import messages as m
from kvbaton.protocol.wire.codec import read
from kvbaton.protocol.wire.ticket import Ticket, seal, unseal
from kvbaton_proof.lies import lie_copies
from kvbaton_proof.lies.lie_fields import KINDS, OF_SOURCE, OF_TARGET
from kvbaton_proof.sim.liars.sim_liar import Liar, role_in
from kvbaton_proof.sim.world.sim_transport import SimTransport
from kvbaton_proof.sim.world.touches import TICKET_KEY

FIRST_JOB = 1 << 40
"""Copies that no ledger has asked for have numbers that no ledger gives."""
PLANE = "tcp"
FLOOD = (1, 1, 4, 30)
LOOK_S, LOOKS_MAX, OWN_LIES = 0.01, 40, 3
_INVENTED = tuple(kind for kind in KINDS if kind not in (m.Hello, m.Welcome))


class Mischief:
    """One liar's, for as long as that life lasts."""

    def __init__(self, liar: Liar) -> None:
        self.liar, self.rng, self.world, self.life = liar, liar.rng, liar.world, liar.life
        self._jobs = FIRST_JOB
        acts = (self._invent, self._spoof, self._greet, self._claim, self._copy, self._copy, self._use_overheard)
        self._acts: tuple[Callable[[], None], ...] = (*acts, self._name_others, self._name_others, liar.replay)
        if liar.temper.pause_s:
            self._later()
        if may(role_in(self.life.peer.worker), Act.CLAIM):
            liar.on_overheard = self._hurry
        if may(role_in(self.life.peer.worker), Act.WRITE):
            self._receive = liar.receive
            liar.receive = self._look_for_offers  # type: ignore[method-assign]
            for planes in self.life.node.ranks:
                for name, plane in planes.items():
                    planes[name] = HollowPlane(plane, liar)  # type: ignore[index,arg-type]

    def _later(self) -> None:
        self.world.after(self.liar.temper.pause_s * self.rng.uniform(0.5, 1.5), self._act)

    def _act(self) -> None:
        if not self.life.alive:
            return
        if not self.liar.quiet and not self.life.paused:
            self.rng.choice(self._acts)()
        self._later()

    # --- words

    def _invent(self) -> None:
        liar, worker, kind = self.liar, self.liar.other(), self.rng.choice(_INVENTED)
        self.world.faults["lies_invented"] += 1
        tree = liar.addressed(worker, liar.fields.invented(kind))
        place = liar.place(kind)
        liar.wire(worker, tree if place is None or self.rng.random() < 0.5 else liar.lie(tree, place))

    def _spoof(self) -> None:
        """Something as if somebody else had said it: his name, his life, and a session that he may have there."""
        liar, worker = self.liar, self.liar.other()
        another = self.rng.choice([each for each in sorted(liar.lives) if each != worker])
        version, _, _, to, _, body = liar.addressed(worker, liar.fields.invented(self.rng.choice(_INVENTED)))
        self.world.faults["lies_spoofed"] += 1
        life = liar.lives[another].peer.incarnation
        for session in range(self.rng.choice((1, 8))):
            liar.wire(worker, [version, another, life, to, session, body])

    def _name_others(self, looks: int = LOOKS_MAX) -> None:
        """Say something of a handoff of others, by its right numbers: those are no secrets, and prove nothing.

        Handoffs are short, so it looks until there is one. (A handoff's name is a secret, so no claim is made by it:
        see `_use_overheard`.)
        """
        worker = self.liar.other()
        numbers = self._numbers(worker)
        if not numbers or not self.life.alive:
            if looks and self.life.alive:
                self.world.after(LOOK_S, lambda: self._name_others(looks - 1))
            return
        known, kinds = self.rng.choice(numbers)
        own = known["peer"].worker == self.life.peer.worker
        last = (m.Goodbye,) if self.rng.random() < 0.1 else ()  # after which nobody listens
        for kind in (*self.rng.sample(kinds * (OWN_LIES if own else 1), len(kinds) * (OWN_LIES if own else 1)), *last):
            self._name(worker, kind, known, own)

    def _name(self, worker: WorkerId, kind: type, known: dict[str, Any], own: bool) -> None:
        liar = self.liar
        body = liar.fields.named(kind, known)
        tree, way, place = liar.addressed(worker, body), self.rng.random(), liar.place(kind)
        if own and place is not None:
            tree = liar.lie(tree, place)
        elif way < 0.3:
            tree[4] = known["session"]
            if way < 0.15:  # and in the name of whose it is
                tree[1], tree[2] = known["peer"].worker, known["peer"].incarnation
        self.world.faults["lies_about_others"] += 1
        liar.wire(worker, tree)

    def _numbers(self, worker: WorkerId) -> list[tuple[dict[str, Any], tuple[type, ...]]]:
        """What that worker has with others, to be told what a P says; and has given to anybody: what a D says."""
        ledger, me = self.liar.lives[worker].node.ledger, self.life.peer.worker
        taken: list[dict[str, Any]] = [
            {"attempt": i.attempt, "reservation": i.reservation, "handoff": i.wanted.handoff, "digest": i.wanted.digest,
             "lease": i.source.lease if i.source is not None else 0, "session": i.link.session,
             "peer": i.link.peer}
            for i in ledger.consumer.by_handoff.values() if i.link.worker != me and i.link.peer is not None
        ]  # fmt: skip
        given: list[dict[str, Any]] = [
            {"attempt": reader.attempt, "lease": lease.id, "handoff": lease.handoff, "session": seat.session,
             "peer": reader.peer, "digest": lease.digest}
            for lease in ledger.producer.leases.values() for reader, seat in lease.seats.items()
        ]  # fmt: skip
        found = [(known, OF_SOURCE) for known in taken if may(role_in(me), Act.GRANT)]
        return found + [(known, OF_TARGET) for known in given if may(role_in(me), Act.CLAIM)]

    def _greet(self) -> None:
        """Once, or many times, in one life or in ever another; with its own card, or with one that is not right."""
        liar, worker = self.liar, self.liar.other()
        card = self.life.node.ledger.desk.identity.card()
        lives = self.rng.random() < 0.5
        for _ in range(self.rng.choice(FLOOD)):
            self.world.faults["lies_greeted"] += 1
            tree = liar.addressed(worker, _tree(m.Hello(self.rng.getrandbits(62), card)))
            if lives:
                tree[2] = self.rng.getrandbits(62)
            if self.rng.random() < 0.1:  # of a version that nobody speaks, and none besides
                tree[0], tree[5][2][1] = 9, 7
            liar.wire(worker, tree if self.rng.random() < 0.4 else liar.lie(tree, ("Hello", "card")))

    def _claim(self) -> None:
        """Ask for handoffs that nobody knows, by tickets that the cluster's key has signed."""
        liar, worker = self.liar, self.liar.other()
        for _ in range(self.rng.choice(FLOOD)):
            handoff = HandoffId(f"{self.rng.getrandbits(128):032x}.0")
            text = seal(Ticket(handoff, worker, self.world.now + 5.0), TICKET_KEY)
            if self.rng.random() < 0.5:
                text = liar.ticket(text)
            self.world.faults["lies_claimed"] += 1
            body = _tree(m.Claim(handoff, self.rng.getrandbits(40), text, b"", self.rng.random() < 0.8))
            liar.wire(worker, liar.addressed(worker, body))

    def _use_overheard(self) -> None:
        """Claim with a ticket of another pair, as it is or signed anew for oneself."""
        if not self.liar.overheard:
            return
        text, digest = self.rng.choice((self.liar.overheard[-1], self.rng.choice(self.liar.overheard)))
        ticket = unseal(text, (TICKET_KEY,), 0.0)
        if self.rng.random() < 0.5:
            target = self.rng.choice((WorkerId(""), self.life.peer.worker))
            text = seal(msgspec.structs.replace(ticket, target=target), TICKET_KEY)
        self.world.faults["lies_with_others_tickets"] += 1
        claim = _tree(m.Claim(ticket.handoff, self.rng.randint(1, 50), text, digest, True))
        self.liar.wire(ticket.source, self.liar.addressed(ticket.source, claim))

    def _hurry(self) -> None:
        """Some of them at once: who claims first may be the one who is believed."""
        if not self.liar.quiet and self.liar.temper.pause_s and self.rng.random() < 0.5:
            self.world.after(0.001, self._use_overheard)

    def _look_for_offers(self) -> Sequence[tuple[WorkerId, bytes]]:
        frames = self._receive()
        for worker, frame in frames:
            with contextlib.suppress(ProtocolError, msgspec.MsgspecError, UnicodeDecodeError):
                if isinstance(read(frame)[1], m.Offer):
                    self._say_written(worker, msgspec.msgpack.decode(frame))
        return frames

    def _say_written(self, worker: WorkerId, tree: list[Any]) -> None:
        """At once: before anything is written, and whether it ever is."""
        if self.rng.random() < 0.3 and not self.liar.quiet:
            offer = msgspec.convert(tree[5], m.Offer)
            self.world.faults["lies_written_early"] += 1
            written = m.Written(offer.lease, offer.attempt, offer.reservation, offer.digest)
            answer = self.liar.addressed(worker, _tree(written))
            self.liar.wire(worker, [*answer[:4], tree[4], answer[5]])

    # --- deeds

    def _copy(self) -> None:
        """Read, or write, some page of somebody whose data plane it is connected to, whether it is lent or not."""
        planes = self.rng.choice(self.life.transports)
        plane = planes.get(PLANE) if "shm" not in planes or self.rng.random() < 0.5 else planes["shm"]
        peers = sorted(plane._links) if plane is not None else []
        if plane is None or not peers:
            return
        peer = self.rng.choice(peers)
        there = self.liar.lives[WorkerId(peer.worker.partition("#")[0])].character.shape
        block = self._block() if self.rng.random() < 0.5 else self.rng.randrange(there.blocks)
        size = min(there.page_bytes, self.life.character.shape.page_bytes)
        remote = there.page(self.rng.randrange(there.layers), min(block, there.blocks - 1))
        way = self.rng.choice((Direction.READ, Direction.WRITE)) if plane.kind.can_write else Direction.READ
        self._jobs += 1
        self.world.faults["lies_copied"] += 1
        plane.submit(Copy(JobId(self._jobs), peer, way, 0, 0, array("q", (0, remote, size))))

    def _block(self) -> int:
        """A block that somebody has named to it once."""
        named = b"".join(self.liar.seen.any_of(self.rng, "blocks") or ())
        ids = array("i", named[: len(named) // 4 * 4])
        return max(0, self.rng.choice(ids)) if len(ids) else 0


class HollowPlane:
    """A data plane of a lying P: says of what it is to write that it has, and writes less, elsewhere, or nothing."""

    def __init__(self, plane: SimTransport, liar: Liar) -> None:
        self._plane, self._liar = plane, liar
        self._share = random.Random(f"hollow {liar.world.seed} {liar.life.peer.worker}").choice((0.0, 0.5, 0.9))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._plane, name)

    def submit(self, copy: Copy) -> bool:
        rng = self._liar.rng
        if copy.direction is not Direction.WRITE or not len(copy.spans) or rng.random() >= self._share:
            return self._plane.submit(copy)
        self._liar.world.faults["lies_unwritten"] += 1
        how = rng.random()
        if how < 0.4:
            self._liar.world.after(rng.uniform(0, 0.01), lambda: self._plane._note(CopyEnded(copy.job)))
            return True
        if how < 0.7 and len(copy.spans) > 3:
            return self._plane.submit(lie_copies.all_but_one(copy, rng.randrange(len(copy.spans) // 3)))
        return self._plane.submit(lie_copies.in_one_place(copy) if how < 0.9 else lie_copies.none_whole(copy))


def _tree(message: m.Message) -> list[Any]:
    found: list[Any] = msgspec.msgpack.decode(msgspec.msgpack.encode(message))
    return found
