"""A whole cluster in one world: workers that live and die, a router, clients, and the faults of one plan."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import msgspec

from kvbaton.protocol.effects import Copy
from kvbaton.protocol.ids import HandoffId, TransferId, WorkerId, handoff_id
from kvbaton.protocol.wire.ticket import Ticket, seal
from kvbaton_proof.sim.checks import backoff_checks
from kvbaton_proof.sim.checks.byte_invariants import ByteInvariants
from kvbaton_proof.sim.checks.causes import Causes, can_talk, note_strangers
from kvbaton_proof.sim.checks.step_invariants import StepInvariants
from kvbaton_proof.sim.checks.version_checks import VersionChecks
from kvbaton_proof.sim.hardship.hardships import LOSS
from kvbaton_proof.sim.hardship.mishaps import Mishaps
from kvbaton_proof.sim.hardship.rank_faults import RankTroubles
from kvbaton_proof.sim.hardship.worker_faults import WorkerFaults
from kvbaton_proof.sim.hardship.world_plan import FAULTY_S, Plan
from kvbaton_proof.sim.liars.liar_watch import Company
from kvbaton_proof.sim.member_removals import Members
from kvbaton_proof.sim.promises import WRONG, Broken
from kvbaton_proof.sim.world.life import Character, Life, request_name
from kvbaton_proof.sim.world.sim_generation import Generation
from kvbaton_proof.sim.world.sim_memory import Words
from kvbaton_proof.sim.world.sim_network import Network, NetworkFaults
from kvbaton_proof.sim.world.sim_request import SimRequest, digest_for
from kvbaton_proof.sim.world.sim_router import Errand, Router
from kvbaton_proof.sim.world.sim_transport import Fabric, SimTransport, TransportFaults, astray
from kvbaton_proof.sim.world.sim_turns import Conversations
from kvbaton_proof.sim.world.touches import TICKET_KEY, handoff_of
from kvbaton_proof.sim.world.world import World

BURST_S = 1.2
PROBES_S = 16.0
PROBE_APART_S = 2.0
"""Of one pair: where quotas are tight the handoff before must be over."""
PROBE_LIES_S = 8.0
STRANGERS = 0.3
"""Of pulls, those that are asked for without a ticket of this cluster."""

if TYPE_CHECKING:
    from kvbaton_proof.sim.world.sim_streams import StreamRouter

Told = Callable[[str, str], None]
"""How a leg ended, and the detail; `left` comes before that, when the client goes."""


@dataclass(slots=True)
class Leg:
    """One client request's part on one engine."""

    index: int
    life: Life
    then: Told
    ends: int = 0


class Cluster:
    """The plan, come alive."""

    def __init__(self, world: World, plan: Plan) -> None:
        self.world = world
        self.plan = self.drawn = plan  # the former heals
        self.network = Network(world, plan.network)
        self.fabric = Fabric(world, plan.copies)
        self.fabric.on_astray = astray
        self.network.deliver = self._deliver
        self.byte_invariants = ByteInvariants(self.fabric)
        self.version_checks = VersionChecks(self.network, plan.liars)
        self.mishaps = Mishaps(self)
        self.lives: dict[WorkerId, Life] = {}
        self.step_invariants: dict[Life, StepInvariants] = {}
        self.liars = Company(world, plan.liars, self.network, self.fabric, self.lives)
        self.liars.attend(self.byte_invariants)
        self.causes = Causes(world, self.lives, plan.liars)
        self.network.on_fate = self.causes.frame_fate
        self.fabric.on_fate = self._copy_fate
        note_strangers(world, (*plan.prefill, *plan.decode))
        self.router = Router(world, self.network, self.lives)
        self.router.late = plan.stray
        self.talk = Conversations(self) if plan.talks else None
        self.members = Members(self) if plan.removals else None
        self.streams: list[StreamRouter] = []  # where answers are generated
        self.draining: set[WorkerId] = set()
        self.healed = False
        self.every_life: list[Life] = []
        self.legs: list[Leg] = []
        self.outcomes: Counter[str] = Counter()
        self.asked_at: dict[tuple[WorkerId, WorkerId], float] = {}  # (P, D): when the last probe of the pair began
        for character in {each.name: each for each in (*plan.prefill, *plan.decode)}.values():
            self.network.names.add(character.name)
            self.start(character)
        for index in range(plan.requests):
            at_s = world.rng.uniform(0, FAULTY_S * 0.8)
            if plan.bursts:
                at_s = at_s // BURST_S * BURST_S + world.rng.uniform(0, 0.05)
            world.after(plan.apart_s * index if plan.apart_s else at_s, partial(self._new_request, index))
        self.worker_faults = WorkerFaults(self)
        if plan.hardships.opens_s:
            world.after(plan.hardships.opens_s, self.mishaps.open_planes)
        self.rank_faults = RankTroubles(self)

    # --- workers

    def start(self, character: Character) -> None:
        life = self.liars.life(character)
        self.step_invariants[life] = StepInvariants(life)
        backoff_checks.watch(life, self.lives, self.liars.names)
        if self.healed:
            life.engine.preempt = life.engine.skips = life.engine.overwrites = 0.0
            life.lift_pins()
            if life.ranks is not None:
                life.ranks.heal()
        else:
            life.store.throws = self.plan.hardships.throws
        if self.talk is not None:
            self.talk.equip(life)
        if self.members is not None:
            self.members.join(life)
        self.draining.discard(character.name)
        if self.plan.hardships.ghosts and character.name in self.lives and not self.healed:
            self.network.haunt(character.name, random.Random(f"{self.world.seed} ghosts {life.peer}"))
        self.lives[character.name] = life
        self.every_life.append(life)
        self.byte_invariants.watch(life)
        self.version_checks.watch(life)
        self.causes.watch(life)
        self.mishaps.watch(life)
        life.doorway.on_released = partial(self.mishaps.nibble, life)
        self.world.tell(f"{life.peer} starts")

    def heal(self) -> None:
        """No more faults: what is left must now come to rest by itself."""
        self.healed = True
        self.plan = msgspec.structs.replace(self.plan, abort=0.0, bad_ticket=0.0, late_ticket=0.0, leave=0.0, stray=0.0)
        self.router.late = 0.0
        self.network.faults = NetworkFaults(loss=self.plan.hardships.lossy * LOSS)
        self.fabric.faults = TransportFaults()
        self.network.cut.clear()
        self.rank_faults.heal()
        self.liars.rest()
        if self.members is not None:
            self.members.settle()
        for life in list(self.lives.values()):
            if not life.alive:
                self.start(life.character)
            elif life.paused:
                self.worker_faults.resume(life)
        for life in self.lives.values():
            life.engine.preempt = life.engine.skips = life.engine.overwrites = life.store.throws = 0.0
            life.lift_pins()

    def delivered(self) -> int:
        return sum(life.node.ledger.desk.counts["ends.delivered"] for life in self.every_life)

    # --- requests

    def probe(self) -> int:
        """After everything has healed: one request for every pair and mode. Returns how many handoffs must follow."""
        self.liars.wake(PROBE_LIES_S)
        turns = range(len(self.plan.decode))  # everybody else has a turn before one has the next
        sides = [(s, self.plan.decode[(n + k) % len(turns)]) for k in turns for n, s in enumerate(self.plan.prefill)]
        honest = [(s, t) for s, t in sides if not {s.name, t.name} & self.liars.names]
        pairs = [(s.name, t.name) for s, t in honest if s.name != t.name and can_talk(s, t)]
        modes = [(*pair, mode) for mode in ("pull", "stream", "push") for pair in pairs]
        apart_s = min(PROBE_APART_S, PROBES_S / max(1, len(modes)))
        for count, (source, target, mode) in enumerate(modes, 1):
            self.world.after(count * apart_s, partial(self._probe, count, source, target, mode))
        return len(modes)

    def _probe(self, index: int, source: WorkerId, target: WorkerId, mode: str) -> None:
        life, other = self.lives[source], self.lives[target]
        self.asked_at[source, target] = self.world.now
        content, tokens = 900_000 + index, 1 + index % 8
        if mode == "pull":
            self._pull(index, life, other, content, tokens, alone=True)
        else:
            self._both_at_once(index, life, other, content, tokens, mode)

    def _new_request(self, index: int) -> None:
        rng = self.world.rng
        source = self._chosen([character.name for character in self.plan.prefill])
        target = self._chosen(self.others(source.peer.worker))
        mode = "push" if rng.random() < self.plan.push else rng.choice(("pull", "pull", "stream"))
        content, tokens = index + 1, rng.randint(1, 12)
        if rng.random() < 0.15:
            content = rng.randint(1, index + 1)
        if self.plan.ranks.prompts:
            content = content % self.plan.ranks.prompts + 1
        content = self.liars.content(source, content)
        if mode == "pull":
            self._pull(index, source, target, content, tokens)
        else:
            self._both_at_once(index, source, target, content, tokens, mode)

    def others(self, source: WorkerId) -> list[WorkerId]:
        """D's that a P may hand to."""
        names = [character.name for character in self.plan.decode]
        if self.members is not None:
            return [self.members.next_of(names, source)]
        return [name for name in names if name != source]

    def _chosen(self, names: list[WorkerId]) -> Life:
        """Any of them; one that drains where there is no other, or before the router has heard of it."""
        able = [name for name in names if name not in self.draining]
        if able != names and (not able or self.world.chance(0.3)):
            able = names
        return self.lives[self.world.rng.choice(able)]

    def _pull(self, index: int, source: Life, target: Life, content: int, tokens: int, alone: bool = False) -> None:
        targets = [target]
        if len(self.plan.decode) > 1 and not alone and self.world.rng.random() < 0.3:
            targets = [self.lives[name] for name in self.others(source.peer.worker)]

        def prefilled(how: str, ticket: str) -> None:
            if how != "prefilled":
                return
            errand = Errand(source.peer.worker, ticket, len(targets))
            if self.world.chance(self.plan.leave):
                self.router.leave(errand)
                return
            self._stray(source, ticket)
            late = self.world.chance(self.plan.late_ticket)
            for reader in targets:
                soon_s = 0.01 if alone else 0.2
                if len(targets) > 1 and self.plan.profile != "healthy":
                    soon_s = 1.0  # one may be done before the other comes
                delay = self.world.rng.uniform(0.2, 4.0) if late else self.world.rng.uniform(0.001, soon_s)
                if delay > source.character.settings.lease_s / 2:
                    self.world.touch("late_ticket", handoff_of(ticket), lasts_s=delay)
                self.world.after(delay, partial(self._decode, index, reader, content, tokens, "pull", errand))

        asked_with = "" if self.world.chance(STRANGERS) else self._minted(source, target)
        self.add(
            index, source, content, tokens, "prefill", prefilled, ticket=asked_with, max_readers=len(targets)
        )  # fmt: skip

    def _minted(self, source: Life, target: Life) -> str:
        """A router's own ticket for a pair, with which P is asked."""
        handoff = handoff_id(TransferId(f"{self.world.rng.getrandbits(128):032x}"))
        ticket = Ticket(handoff, source.peer.worker, self.world.now + 5.0, target=target.peer.worker)
        return seal(ticket, TICKET_KEY)

    def _both_at_once(self, index: int, source: Life, target: Life, content: int, tokens: int, mode: str) -> None:
        rng = self.world.rng
        ticket = self._minted(source, target)
        self.liars.overhear(ticket, digest_for(content, tokens), target.peer.worker)
        errand = Errand(source.peer.worker, ticket)
        prefill = partial(
            self.add,
            index,
            source,
            content,
            tokens,
            "prefill",
            lambda how, detail: self.router.on_source(errand, how),
            mode,
            ticket,
            errand=errand,
        )
        decode = partial(self._decode, index, target, content, tokens, mode, errand)
        self.world.after(rng.choice((0.001, 0.005, 0.5)) * rng.random(), prefill)
        self.world.after(rng.choice((0.001, 0.005, 0.5)) * rng.random(), decode)
        self._stray(source, ticket)

    def _stray(self, source: Life, ticket: str) -> None:
        if self.world.chance(self.plan.stray):
            self.router.stray(source.peer.worker, ticket, self.plan.profile == "healthy")

    def _decode(self, index: int, target: Life, content: int, tokens: int, mode: str, errand: Errand) -> None:
        ticket, trusted = errand.ticket, True
        if self.world.chance(self.plan.bad_ticket):
            kind = self.world.rng.choice(("forged", "other_prompt", "replayed", "twice"))
            self.world.strike(f"ticket_{kind}", handoff_of(ticket))
            if kind == "forged":
                flip = self.world.rng.randrange(len(ticket))
                ticket = ticket[:flip] + ("A" if ticket[flip] != "A" else "B") + ticket[flip + 1 :]
                trusted = False
            elif kind == "other_prompt":
                content += 100_000
            else:
                delay = 0.0 if kind == "twice" else self.world.rng.uniform(0, 3)
                again = partial(
                    self.add, index, self.lives[target.peer.worker], content, tokens, "decode", _ignore, mode, ticket
                )
                self.world.after(delay, again)
        current = self.lives[target.peer.worker]
        if self.plan.hardships.nobody and not self.healed and self.world.chance(self.plan.hardships.nobody):
            self.world.strike("ticket_of_nobody", handoff_of(errand.ticket))
            opened = current.doorway.open_ticket(errand.ticket)
            ticket = seal(msgspec.structs.replace(opened, source=WorkerId("nobody")), TICKET_KEY)

        talk = self.talk
        handoff, keep = talk.ticket(current) if talk is not None else (HandoffId(""), "")

        def answered(how: str, detail: str) -> None:
            self.router.on_target(errand, how)
            if talk is not None and how == "answered":
                talk.answered(index, current, content, tokens, handoff)

        cancelled = errand if mode != "pull" else None
        self.add(
            index, current, content, tokens, "decode", answered, mode, ticket, trusted=trusted, errand=cancelled,
            keep=keep,
        )  # fmt: skip

    def add(
        self,
        index: int,
        life: Life,
        content: Words,
        tokens: int,
        role: str,
        then: Told,
        mode: str = "pull",
        ticket: str = "",
        max_readers: int = 1,
        trusted: bool = True,
        errand: Errand | None = None,
        prefers: tuple[int, ...] = (),
        keep: str = "",
        offer: tuple[str, int] | None = None,
        generation: Generation | None = None,
    ) -> None:
        leg = Leg(index, life, then)
        self.legs.append(leg)
        if not life.alive:
            self.world.touch("crashed", handoff_of(ticket) if ticket else "")
            self.end_leg(leg, "error", "the worker is dead")
            return

        name = request_name(life, len(self.legs), role[0])
        request = SimRequest(
            name,
            content,
            tokens,
            role,
            partial(self.end_leg, leg),
            mode,
            ticket,
            max_readers,
            trusted=trusted,
            prefers=prefers,
            keep=keep,
            offer=offer,
            generation=generation,
        )
        self.causes.begun(request.handoffs)
        self.world.tell(f"{life.peer.worker} {name} {role} {mode} content {content} tokens {tokens}")
        life.engine.add(request)
        life.wake_engine()
        if errand is not None:
            errand.cancels.append(partial(self._abort, leg, request))
        if self.world.chance(self.plan.abort):
            self.world.faults["aborted"] += 1
            delay = self.world.rng.choice((0.05, 0.2, 1.0)) * self.world.rng.random()
            self.world.after(delay, partial(self._client_leaves, leg, request))

    def _client_leaves(self, leg: Leg, request: SimRequest) -> None:
        if not leg.ends:
            leg.then("left", "")
        self._abort(leg, request)

    def _abort(self, leg: Leg, request: SimRequest) -> None:
        life = leg.life
        if life.alive and not life.paused:
            life.engine.abort(request.id)
            life.wake_engine()

    def end_leg(self, leg: Leg, how: str, detail: str) -> None:
        leg.ends += 1
        if leg.ends > 1:
            raise Broken(WRONG, f"request {leg.index} ended twice")
        self.outcomes[f"{how}.{detail}" if how == "failed" else how] += 1
        leg.then(how, detail)

    # --- wires

    def _copy_fate(self, driver: SimTransport, copy: Copy, what: str, lasts_s: float) -> None:
        self.causes.copy_fate(self.byte_invariants.owner[driver.address], copy, what, lasts_s)

    def _deliver(self, source: WorkerId, target: WorkerId, frame: bytes) -> None:
        life = self.lives[target]
        if life.alive:
            life.receive(source, frame)


def _ignore(how: str, detail: str) -> None:
    """The router has nothing left to do for this leg."""
