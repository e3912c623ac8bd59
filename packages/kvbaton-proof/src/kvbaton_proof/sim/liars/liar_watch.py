"""Requirements where one member lies: everything of the honest ones, and of what they do with each other.

1. *No wrong answer*: what an honest D was handed by an honest P is that prompt's. (A lying P gives what it likes to
   whoever asked it, so those prompts are not compared; nor is anything in a liar's own memory.) But it did give it:
   no honest D decodes on what lay in its blocks before it offered them (rule 35).
2. *No hang*: what an honest D waits for from a liar ends by the sum of its own time-outs, what an honest P keeps for
   one by `max_hold_s`. A step handles each time once, and nobody is made to speak without end.
3. *No leak*: at rest an honest member remembers nothing of a liar; quotas hold for the liar as they are set.
4. *No engine death*: no step of anybody's raises; not of the liar's either, whose node is production code as well.
5. *No stranger*: a byte leaves, or lands in, an honest member's memory for the liar only in blocks that it was granted,
   or offered, in a handoff that is its own; and it sits at no lease that was made for another.
And no needless failure: between honest members every handoff is delivered, while the liar lies.
"""

from __future__ import annotations

import base64
import hmac
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import product
from typing import Any

from kvbaton.protocol.effects import Copy, Direction
from kvbaton.protocol.geometry.layout import EngineLayout
from kvbaton.protocol.ids import HandoffId, PeerId, WorkerId
from kvbaton.protocol.legality import Act, may
from kvbaton.protocol.machines.lease import ReaderState
from kvbaton.protocol.machines.push_writer import Outlet
from kvbaton.protocol.numbers import DURATION_S_MIN
from kvbaton.protocol.wire.codec import FoldedWelcome, read
from kvbaton.protocol.wire.messages import HelloRefused, Renew
from kvbaton.protocol.wire.ticket import TICKET_LIFE_S_MAX
from kvbaton.transports.core.transport import Loan
from kvbaton_proof.lies.lie_fields import Place
from kvbaton_proof.sim.checks.byte_invariants import ByteInvariants
from kvbaton_proof.sim.checks.cards import absurdity
from kvbaton_proof.sim.liars.liar_acts import Mischief
from kvbaton_proof.sim.liars.liar_listener import Listener
from kvbaton_proof.sim.liars.sim_liar import Liar, role_in
from kvbaton_proof.sim.promises import HANG, LEAK, RULE, STRANGER, WRONG, Broken
from kvbaton_proof.sim.world.life import Character, Life
from kvbaton_proof.sim.world.sim_network import Network
from kvbaton_proof.sim.world.sim_transport import Fabric, SimTransport, astray
from kvbaton_proof.sim.world.touches import TICKET_KEY, opened
from kvbaton_proof.sim.world.world import World

LIED_ABOUT = 10_000_000
"""Prompts that a liar computes are numbered from here on, so that no honest pair has the same."""
COUNTERS_MAX = 300
GRACE_S = 3.0
"""What was held for somebody is at rest by then after its limit: what moves is cut before."""
SAID_MAX, SAID_FOR_EACH, WINDOW_S = 150, 60, 1.0
"""Frames to one peer in a second: some for every handoff and every frame of its own, and some more."""


LAY_THERE = b"\xee"
CELL = LAY_THERE * 4
"""What a token of one head has at least, in every shape."""

_ANSWERS = (FoldedWelcome, HelloRefused)


class CountedControl:
    """An honest node's control port, and how much it says to the liar and hears from it."""

    def __init__(self, life: Life, liars: frozenset[WorkerId]) -> None:
        self._life, self._world, self._wire, self._liars = life, life.world, life.control, liars
        self._since, self._said, self._heard = 0.0, 0, 0
        self._greeted_at, self._greetings_left = 0.0, life.character.settings.greetings_burst_max
        self._renewed: dict[int, float] = {}

    def send(self, worker: WorkerId, frame: bytes) -> bool:
        if worker in self._liars:
            self._count()
            self._look(read(frame)[1])
        return self._wire.send(worker, frame)

    def receive(self) -> Sequence[tuple[WorkerId, bytes]]:
        frames = self._wire.receive()
        self._heard += sum(worker in self._liars for worker, _ in frames)
        return frames

    def _count(self) -> None:
        if self._world.now - self._since > WINDOW_S:
            self._since, self._said, self._heard = self._world.now, 0, 0
        self._said += 1
        ledger = self._life.node.ledger
        busy = len(ledger.consumer.by_handoff) + len(ledger.producer.leases) + len(ledger.producer.parked)
        if self._said > SAID_MAX + SAID_FOR_EACH * busy + 3 * self._heard:
            raise Broken(HANG, f"{self._life.peer.worker}: speaks {self._said} times a second to {sorted(self._liars)}")

    def _look(self, message: object) -> None:
        """How often D speaks is D's to say (rule 25)."""
        if isinstance(message, Renew):
            at, before = self._life.clock(), self._renewed.get(message.attempt, -1e9)
            if at - before < DURATION_S_MIN * 0.99:
                raise Broken(HANG, f"{self._life.peer.worker}: renews again after {at - before:.6f} s")
            self._renewed[message.attempt] = at
        elif isinstance(message, _ANSWERS):
            self._count_greetings()

    def _count_greetings(self) -> None:
        """Each is charged for before anything of it is read (rule 27), the refused as well."""
        settings, now = self._life.character.settings, self._world.now
        refilled = (now - self._greeted_at) * settings.greetings_per_s_max * (1 + abs(self._life.character.drift))
        self._greetings_left = min(settings.greetings_burst_max, self._greetings_left + refilled) - 1
        self._greeted_at = now
        if self._greetings_left < -1:
            raise Broken(LEAK, f"{self._life.peer.worker}: answers more greetings of a liar than it may")


class Company:
    """The liar of one world, and what the others are owed all the same. Without a liar it does nothing."""

    def __init__(
        self,
        world: World,
        names: tuple[WorkerId, ...],
        network: Network,
        fabric: Fabric,
        lives: Mapping[WorkerId, Life],
    ) -> None:
        self.world, self.network, self.fabric, self.lives = world, network, fabric, lives
        self.names = frozenset(names)
        self.told: Counter[Place] = Counter()
        self._liars: list[Liar] = []
        self._targets: dict[HandoffId, WorkerId] = {}  # of tickets that the liar was shown, whom they are for
        self._seen: dict[tuple[WorkerId, int, str, object], float] = {}
        self._opened: set[tuple[PeerId, WorkerId]] = set()  # honest members, and to whom they have lent anything
        self._witness: ByteInvariants | None = None
        self._looked_at: dict[int, EngineLayout] = {}

    # --- the world's side

    def life(self, character: Character) -> Life:
        life = Life(self.world, character, self.network, self.fabric)
        if not self.names:
            return life
        life.node.ledger.desk.identity.role_of = role_in
        if character.name in self.names:
            self._liars.append(Liar(self.world, life, self.lives, self.told))
            Mischief(self._liars[-1])
        else:
            life.node.control = CountedControl(life, self.names)
            life.after_node.append(partial(self._check, life))
            Listener(life)
        self._spare(life)
        return life

    def attend(self, witness: ByteInvariants) -> None:
        """Stand between the data planes and the witness, who knows nothing of liars."""
        if not self.names:
            return
        self._witness = witness
        self.fabric.on_landing, self.fabric.on_leaving = self._landing, self._leaving
        self.fabric.on_lending, self.fabric.on_astray = self._lending, self._astray

    def content(self, source: Life, content: int) -> int:
        return content + LIED_ABOUT * (source.peer.worker in self.names)

    def overhear(self, ticket: str, digest: bytes, target: WorkerId) -> None:
        """A ticket for an honest pair passes by."""
        found = opened(ticket)
        if not self._liars or found is None or {found.source, target} & self.names:
            return
        self._targets[found.handoff] = target
        self._liars[-1].overhear(ticket, digest)

    def rest(self) -> None:
        """It says nothing of its own accord; what its node says it still lies about."""
        for liar in self._liars:
            liar.quiet = True

    def wake(self, for_s: float) -> None:
        for liar in self._liars:
            liar.quiet = False
            self.world.after(for_s, self.rest)

    # --- what bytes may do

    def _landing(self, transport: SimTransport, driver: SimTransport, copy: Copy, offset: int, size: int) -> None:
        assert self._witness is not None
        owner, author = self._witness.owner[transport.address], self._witness.owner[driver.address]
        if self._lies(author):
            self._check_liars_copy(author, owner, copy, offset, size)
        elif self._lies(owner):  # an honest P writes to a lying D
            self._check_sent(author, owner, copy, offset, size)
        else:
            self._witness.landing(transport, driver, copy, offset, size)

    def _leaving(self, transport: SimTransport, offset: int) -> None:
        assert self._witness is not None
        if not self._lies(self._witness.owner[transport.address]):
            self._witness.leaving(transport, offset)

    def _lending(self, transport: SimTransport, loan: Loan) -> None:
        assert self._witness is not None
        owner = self._witness.owner[transport.address]
        if not self._lies(owner):
            self._witness.lending(transport, loan)
            if loan.direction is Direction.READ:
                self._opened.add((owner.peer, loan.peer.worker))
            if loan.direction is Direction.WRITE and WorkerId(loan.peer.worker) in self.names:
                _mark(owner, self._witness.rank[transport.address], loan)

    def _astray(self, driver: SimTransport, remote: SimTransport) -> None:
        """Where a card is a lie, all that is planned by it is: data planes refuse it where the memory is."""
        assert self._witness is not None
        whose, theirs = (self._witness.owner[each.address] for each in (driver, remote))
        if not self._lies(whose) and theirs.node.ledger.desk.identity.layout in _believed(whose, theirs):
            astray(driver, remote)

    def _check_liars_copy(self, liar: Life, owner: Life, copy: Copy, offset: int, size: int) -> None:
        """The liar reads, or writes: of an honest member only what is lent to it."""
        if copy.direction is Direction.READ:
            name = WorkerId(copy.peer.worker.partition("#")[0])
            there = self.lives.get(name)
            if there is None or self._lies(there) or not there.alive or there.peer.incarnation != copy.peer.incarnation:
                return
            spans = copy.spans
            remote = next(spans[n + 1] for n in range(0, len(spans), 3) if spans[n] == offset)
            if there.character.transports[0] == "shm" and liar.character.transports[0] == "shm":
                if (there.peer, liar.peer.worker) not in self._opened:
                    raise Broken(STRANGER, f"{liar.peer.worker} reads {there.peer.worker}, which has lent it nothing")
                return  # mapped as a whole from the first loan on: what is lent there is not enforced by anybody
            allowed = _granted(there, liar)
            self._demand(there, liar, remote, size, allowed, "reads")
        elif not self._lies(owner):
            self._demand(owner, liar, offset, size, _offered(owner, liar), "writes")

    def _demand(self, owner: Life, liar: Life, offset: int, size: int, allowed: set[int], does: str) -> None:
        shape = owner.character.shape
        touched = {shape.block_at(offset), shape.block_at(offset + size - 1)}
        if not touched <= allowed:
            raise Broken(
                STRANGER, f"{liar.peer.worker} {does} blocks {sorted(touched - allowed)} of {owner.peer.worker}"
            )

    def _check_sent(self, author: Life, target: Life, copy: Copy, offset: int, size: int) -> None:
        """An honest P writes to the liar: what the liar sits at, and nothing else."""
        parts = author.node.ledger.desk.owners.get(copy.job)
        if parts is None or not isinstance(parts.owner, Outlet):
            raise Broken(STRANGER, f"{author.peer.worker}: bytes of a copy move that its ledger has forgotten")
        spans, allowed = copy.spans, _granted(author, target)
        local = next(spans[n] for n in range(0, len(spans), 3) if spans[n + 1] == offset)
        self._demand(author, target, local, size, allowed, "is sent")

    # --- what an honest member does at every step

    def _check(self, life: Life) -> None:
        self._check_parked(life)
        self._check_ages(life)
        self._check_shares(life)
        self._check_cards(life)
        if len(life.node.ledger.desk.counts) > COUNTERS_MAX:
            raise Broken(LEAK, f"{life.peer.worker}: {len(life.node.ledger.desk.counts)} counters")

    def _check_parked(self, life: Life) -> None:
        """A claim that has come to wait has a ticket that is of today, for this P, and for who claims."""
        for reader, waiting in life.node.ledger.producer.parked.items():
            key = life.peer.worker, life.peer.incarnation, "parked", reader
            if key in self._seen:
                continue
            ticket, wall = opened(waiting.claim.ticket), self.world.now + life.character.wall_skew_s
            if not _is_signed(waiting.claim.ticket) or ticket is None:
                raise Broken(STRANGER, f"{life.peer.worker}: a claim waits with a ticket that nobody has signed")
            if ticket.lease or not waiting.claim.deferred:
                raise Broken(HANG, f"{life.peer.worker}: a claim waits for what was computed: {ticket}")
            slack_s = 0.1 + abs(life.character.drift) * self.world.now  # a wall clock that is as wrong as the other one
            if not wall - slack_s <= ticket.expires_unix_s <= wall + TICKET_LIFE_S_MAX + slack_s:
                raise Broken(STRANGER, f"{life.peer.worker}: a claim waits with a ticket that is not good: {ticket}")
            mine = ticket.source == life.peer.worker and ticket.handoff == waiting.claim.handoff
            if not mine or ticket.target not in ("", reader.peer.worker):
                raise Broken(STRANGER, f"{life.peer.worker}: a claim waits with a ticket of others: {ticket}")

    def _check_ages(self, life: Life) -> None:
        settings, ledger, now = life.character.settings, life.node.ledger, self.world.now
        limits: list[tuple[str, object, float]] = []
        waits_s = 2 * max(settings.defer_timeout, settings.claim_timeout) + settings.revoke_timeout
        for handoff, intake in ledger.consumer.by_handoff.items():
            if intake.wanted.source in self.names:
                limits.append(("intake", handoff, waits_s + settings.max_hold_s))
        limits += [("lease", lease, settings.max_hold_s) for lease in ledger.producer.leases]
        limits += [("parked", reader, 2 * settings.defer_timeout) for reader in ledger.producer.parked]
        me = (life.peer.worker, life.peer.incarnation)
        there = {(*me, kind, name) for kind, name, _ in limits}
        for gone in [each for each in self._seen if each[:2] == me and each not in there]:
            del self._seen[gone]  # a liar may use its number again, and waits anew
        for kind, name, limit_s in limits:
            since = self._seen.setdefault((*me, kind, name), now)
            if now - since > limit_s * 1.1 + GRACE_S:
                raise Broken(HANG, f"{life.peer.worker}: {kind} {name} for {now - since:.1f} s, at most {limit_s:.1f}")

    def _check_shares(self, life: Life) -> None:
        settings, ledger = life.character.settings, life.node.ledger
        leases = ledger.producer.leases.values()
        seats = [
            (lease, reader.peer.worker)
            for lease in leases
            for reader, seat in lease.seats.items()
            if seat.state is ReaderState.LIVE
        ]
        for lease, worker in seats:
            meant = self._targets.get(lease.handoff, worker)
            if worker in self.names and worker != meant:
                raise Broken(STRANGER, f"{life.peer.worker}: {worker} reads a lease that is for {meant}")
        for session in ledger.sessions.by_number.values():
            if not may(role_in(session.peer.worker), Act.HELLO):
                raise Broken(STRANGER, f"{life.peer.worker}: {session.peer.worker} may not greet, and has a session")
        for name in self.names:
            sessions = [s for s in ledger.sessions.by_number.values() if s.peer.worker == name and not s.joined]
            parked = [reader for reader in ledger.producer.parked if reader.peer.worker == name]
            for what, count, limit in (
                ("seats", sum(worker == name for _, worker in seats), settings.seats_per_peer_max),
                ("parked claims", len(parked), settings.parked_per_peer_max),
                ("unconfirmed sessions", len(sessions), settings.unconfirmed_per_peer_max),
            ):
                if count > limit:
                    raise Broken(LEAK, f"{life.peer.worker}: {count} {what} of {name}, at most {limit}")

    def _check_cards(self, life: Life) -> None:
        """What a liar says of its memory is believed only if it can be."""
        for name in self.names:
            for layout in _believed(life, self.lives[name]) if name in self.lives else ():
                if id(layout) not in self._looked_at:
                    self._looked_at[id(layout)] = layout  # kept: its number is not another's
                    if what := absurdity(layout):
                        raise Broken(RULE, f"{life.peer.worker} believes {name}: {what}")

    def _spare(self, life: Life) -> None:
        """Compare nothing that a liar computed, and nothing in its own memory."""
        inner, lies = life.engine.device.check, self._lies(life)

        def check(content: int, *rest: Any) -> None:
            if not lies:
                (inner if content < LIED_ABOUT else partial(_check_came, life))(content, *rest)

        life.engine.device.check = check  # type: ignore[method-assign,assignment]

    def _lies(self, life: Life) -> bool:
        return life.peer.worker in self.names


def _mark(life: Life, rank: int, loan: Loan) -> None:
    """What lies in blocks that are offered to a liar."""
    shape, memory = life.character.shape, life.engine.device.memory[rank]
    for layer in shape.own_layers[rank]:
        group = shape.group_of[layer]
        for block in loan.blocks[group] if group < len(loan.blocks) else ():
            if block >= 0:
                offset = shape.page(layer, block)
                memory[offset : offset + shape.page_bytes] = LAY_THERE * shape.page_bytes


def _check_came(
    life: Life, content: int, blocks: Any, tokens: int, ranks: Sequence[int], layers: Sequence[int], who: str
) -> None:
    """Of what the next token reads, nothing is what lay there before a liar was to write it."""
    shape, size = life.character.shape, life.character.shape.block_tokens
    for layer, rank in product(layers, ranks):
        group, ids = shape.group_of[layer], blocks[shape.group_of[layer]]
        if layer not in shape.own_layers[rank] or group in shape.states:
            continue
        first = shape.needed_from(group, tokens)
        for index in range(first // size, -(-tokens // size)):
            offset, lo, hi = shape.page(layer, ids[index]), max(first - index * size, 0), tokens - index * size
            page = life.engine.device.memory[rank][offset : offset + shape.page_bytes]
            if any(CELL in page[cells] for cells in shape.cells[lo, min(hi, size)] if lo < hi):
                raise Broken(WRONG, f"{life.peer.worker}: {who} what a liar never wrote: block {index}, layer {layer}")


def _granted(owner: Life, reader: Life) -> set[int]:
    """Blocks of leases at which that worker has a seat, or had one and is still being cut off."""
    return {
        block
        for lease in owner.node.ledger.producer.leases.values()
        for each, seat in lease.seats.items()
        if each.peer.worker == reader.peer.worker
        for ids, count in zip(lease.blocks, _listed(seat.lent, lease.blocks), strict=True)
        for block in ids[:count]
    }


def _listed(lent: tuple[int, ...], blocks: tuple[list[int], ...]) -> tuple[int, ...]:
    """How many leading blocks of each group have been lent; a writer is lent none and writes what is ready."""
    return lent or tuple(len(ids) for ids in blocks)


def _offered(owner: Life, writer: Life) -> set[int]:
    """Blocks that an honest D has offered to that worker, and not had back."""
    return {
        block
        for intake in owner.node.ledger.consumer.by_reservation.values()
        if intake.link.worker == writer.peer.worker and intake.target is not None
        for ids in intake.target.blocks
        for block in ids
    }


def _is_signed(ticket: str) -> bool:
    """By this cluster's key; said here again, since it is what `unseal` is checked by."""
    raw = base64.urlsafe_b64decode(ticket + "=" * (-len(ticket) % 4))
    return raw[:16] == hmac.digest(TICKET_KEY, b"kvbaton-ticket\0" + raw[16:], "sha256")[:16]


def _believed(whose: Life, theirs: Life) -> list[EngineLayout]:
    """What memory somebody takes another to have, by the cards that it was shown."""
    ledger = whose.node.ledger
    link = ledger.consumer.links.by_worker.get(theirs.peer.worker)
    plans = [session.plan.target for session in ledger.sessions.by_number.values() if session.peer == theirs.peer]
    return plans + ([link.plan.source] if link is not None and link.plan is not None else [])
