"""Invariants of one incarnation after every step of its node and of its engine, and the state they need.

Laws: a limit is measured here, by the world's clock, from when it was first seen to count; never read from the state
that is being judged. What a bound refuses is judged by a sum of our own, taken just before.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from kvbaton.node.pin_budget import WAITING_MAX
from kvbaton.protocol.effects import Ended, Mark, Side, Step
from kvbaton.protocol.errors import Reason
from kvbaton.protocol.events import CacheReplaced, Discarded, DrainStarted, PutWanted, Wanted
from kvbaton.protocol.ids import HandoffId, Incarnation, LeaseId, PutId, Reader
from kvbaton.protocol.machines.consumer import Consumer
from kvbaton.protocol.machines.lease import Lease, LeaseState, ReaderState
from kvbaton.protocol.machines.producer import Producer
from kvbaton.protocol.machines.puts import PutState
from kvbaton.protocol.wire.messages import Abandon, Offer
from kvbaton_proof.sim.checks.rank_checks import check_gone, check_step
from kvbaton_proof.sim.promises import HANG, LEAK, NEEDLESS, RULE, WRONG, Broken
from kvbaton_proof.sim.world.life import Life

Handle = Callable[[Any, float], None]

TURN_S_MAX = 4.0
"""As long as any D of these worlds keeps a turn."""
LATE_S = 0.1
"""A loop may be this busy when something is due."""


_MORE_THAN_ONCE = {Step.CLAIMED, Step.PARKED, Step.SEATED, Step.WRITTEN, Step.COMMITTED, Step.STALE, Step.LEFT}
_OF_READERS = {Step.OFFERED, *_MORE_THAN_ONCE}
_DELIVERED = {
    Side.PREFILL: {Step.BEGUN, Step.COMMITTED},
    Side.DECODE: {Step.ASKED, Step.CLAIMED, Step.GRANTED, Step.ALLOCATED, Step.COPIED},
}
"""What a handoff has gone through that is told as delivered."""

Take = Callable[[Sequence[Mark], Sequence[tuple[Any, float]], float, float, Any], None]


class Record:
    """Of one life."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.open: dict[tuple[Side, int], dict[Step, float]] = {}

    def watching(self, take: Take) -> Take:
        """The recorder's own, and this."""

        def watched(
            marks: Sequence[Mark], taken: Sequence[tuple[Any, float]], now: float, wall_offset_s: float, before: Any
        ) -> None:
            for mark in marks:
                self._note(mark)
            take(marks, taken, now, wall_offset_s, before)

        return watched

    def check_at_rest(self) -> None:
        if self.open:
            raise Broken(HANG, f"{self.name}: on record, and never at rest: {list(self.open)[:3]}")

    def _note(self, mark: Mark) -> None:
        key = (mark.side, mark.key)
        steps = self.open.get(key)
        if steps is None:
            if mark.step not in (Step.ASKED, Step.BEGUN):
                raise Broken(RULE, f"{self.name}: {mark.step.value} is said of {key}, which has not begun, or is over")
            steps = self.open[key] = {}
        if mark.step in steps and mark.step not in (_OF_READERS if mark.side is Side.PREFILL else _MORE_THAN_ONCE):
            raise Broken(RULE, f"{self.name}: {mark.step.value} is said twice of {key}")
        steps[mark.step] = mark.at
        if isinstance(mark.what, Ended) and mark.what.end.delivered and not steps.keys() >= _DELIVERED[mark.side]:
            raise Broken(RULE, f"{self.name}: {key} is told as delivered, after no more than {', '.join(steps)}")
        if mark.step is Step.RESTED:
            if Step.ENDED not in steps and Step.CLOSED not in steps:
                raise Broken(RULE, f"{self.name}: {key} rests before it has ended")
            del self.open[key]


class StepInvariants:
    """Over one life."""

    def __init__(self, life: Life) -> None:
        self._life = life
        self._ledger = life.node.ledger
        self._name = life.character.name
        settings, pace = life.character.settings, 1 + life.character.drift
        self._settings = settings
        self._hold_s = settings.max_hold_s / pace + LATE_S
        self._first_s = min(settings.lease_s, settings.defer_timeout, settings.max_hold_s) / pace - LATE_S
        self._put_s = settings.transfer_timeout / pace + LATE_S
        self._wait_s = max(settings.transfer_timeout, settings.defer_timeout, settings.claim_timeout) / pace + 0.5
        self._turn_s = TURN_S_MAX / pace
        self._leased: dict[LeaseId, float] = {}  # since when each has been seen held
        self._loading: dict[int, float] = {}  # by attempt
        self._putting: dict[PutId, float] = {}
        self._signs: dict[int, tuple[object, float]] = {}  # by attempt: what was last seen of it, and since when
        self._parked: set[Reader] = set()
        self._drains = False
        self._left: dict[HandoffId, dict[Reader, float]] = {}  # who gave up a parked claim; until when P knows
        self.farewell: set[Incarnation] = set()  # who had to do with us when we left
        self.record = Record(str(self._name))
        if life.node.recorder is not None:
            setattr(life.node.recorder, "take", self.record.watching(life.node.recorder.take))  # noqa: B010
        self._listen()
        life.after_node.append(self._after_node)
        life.after_engine.append(self._after_engine)
        life.on_leaving, life.on_left = self._on_leaving, self._on_left

    def _after_node(self) -> None:
        """Queues are within their bounds, nothing is overdue, nothing is held past its limit."""
        self._check_turn()
        self._check_bounds()
        ledger, now = self._ledger, self._life.world.now
        if ledger.producer.leases or self._leased:
            self._check_leases(now)
        if ledger.consumer.by_handoff or self._signs:
            self._check_intakes(now)
        if ledger.puts.states or self._putting:
            self._check_puts(now)
        if self._life.taken_back:
            self._check_taken_back()
        if self._drains:
            self._check_drained()
        if self._life.ranks is not None:
            check_step(self._life.ranks)

    def _on_leaving(self) -> None:
        ledger = self._ledger
        self.farewell = {each.peer.incarnation for each in ledger.sessions.by_number.values() if each.joined}
        self.farewell |= {each.peer.incarnation for each in ledger.consumer.links.by_worker.values() if each.peer}

    def _after_engine(self) -> None:
        """Every reference to a block is the engine's own or has an owner at the door; what a store reads is pinned."""
        engine, doorway = self._life.engine, self._life.doorway
        owned = engine.held_refs + doorway.pinned_blocks
        if engine.pool.total != owned:
            raise Broken(LEAK, f"{self._name}: {engine.pool.total} references to blocks, {owned} with an owner")
        pinned = doorway.pinned_blocks - doorway.turn_blocks  # for which alone no engine has to stay awake
        if pinned and not (doorway.holding and doorway.busy):
            raise Broken(RULE, f"{self._name}: {doorway.pinned_blocks} blocks are held, and the door says none is")
        for put in self._life.store.open:
            if ("put", put) not in doorway._pins:
                raise Broken(WRONG, f"{self._name}: a store reads put {put}, and its blocks are not pinned")
        check_pins(self._life)

    def _on_left(self) -> None:
        self._after_engine()
        if self._life.ranks is not None:
            check_gone(self._life.ranks)

    # --- bounds

    def _check_bounds(self) -> None:
        ledger, settings = self._ledger, self._settings
        producer = ledger.producer
        if len(producer.parked) > settings.parked_max:
            self._over("parked claims", len(producer.parked), settings.parked_max)
        if len(producer.tombstones) > settings.tombstones_max:
            self._over("tombstones", len(producer.tombstones), settings.tombstones_max)
        if len(producer.ended) > settings.tombstones_max:
            self._over("ended handoffs", len(producer.ended), settings.tombstones_max)
        if len(producer.leases) > settings.leases_max:
            self._over("leases", len(producer.leases), settings.leases_max)
        if len(ledger.sessions.by_number) > settings.sessions_max:
            self._over("sessions", len(ledger.sessions.by_number), settings.sessions_max)
        if len(ledger.consumer.by_handoff) > settings.intakes_max:
            self._over("intakes", len(ledger.consumer.by_handoff), settings.intakes_max)
        if len(ledger.puts.states) > settings.puts_max:
            self._over("puts", len(ledger.puts.states), settings.puts_max)

    def _over(self, name: str, count: int, limit: int) -> None:
        raise Broken(LEAK, f"{self._name}: {count} {name}, at most {limit}")

    def _listen(self) -> None:
        """Stand at the doors of the ledger through which handoffs, offers, puts and the word to drain come in."""
        handlers, of_target = self._ledger._on_event, self._ledger._of_target
        handlers[Wanted] = self._taking_in(handlers[Wanted])
        handlers[PutWanted] = self._putting_away(handlers[PutWanted])
        handlers[DrainStarted] = self._draining(handlers[DrainStarted])
        handlers[CacheReplaced] = self._voiding(handlers[CacheReplaced])
        handlers[Discarded] = self._discarding(handlers[Discarded])
        of_target[Offer] = self._writing(of_target[Offer])
        of_target[Abandon] = self._leaving(of_target[Abandon])

    def _taking_in(self, handle: Handle) -> Handle:
        """A handoff is taken in where there is room for what may not come to rest, and only then (rule 18)."""
        consumer, limit = self._ledger.consumer, self._settings.quarantine_blocks_max

        def wanted(event: Any, now: float) -> None:
            blocks, refused = quarantined(consumer), consumer.desk.counts["ends.quarantine_full"]
            handle(event, now)
            intake = consumer.by_handoff.get(event.handoff)
            if blocks >= limit and intake is not None and intake.wanted is event:
                raise Broken(LEAK, f"{self._name}: takes in a handoff with {blocks} blocks not at rest")
            if blocks < limit and consumer.desk.counts["ends.quarantine_full"] > refused:
                raise Broken(NEEDLESS, f"{self._name}: refuses a handoff with {blocks} blocks not at rest")

        return wanted

    def _writing(self, handle: Callable[[Any, Any, float], None]) -> Callable[[Any, Any, float], None]:
        """P begins to write where there is room, likewise."""
        producer, limit = self._ledger.producer, self._settings.quarantine_blocks_max

        def offered(session: Any, offer: Offer, now: float) -> None:
            key = (session.number, offer.reservation)
            full = key not in producer.writer.outlets and restless(producer) >= limit
            handle(session, offer, now)
            if full and key in producer.writer.outlets:
                raise Broken(LEAK, f"{self._name}: begins to write with {restless(producer)} blocks not at rest")

        return offered

    def _leaving(self, handle: Callable[[Any, Any, float], None]) -> Callable[[Any, Any, float], None]:
        """A reader whose claim waits gives it up: P knows that, and will hold nothing for it (rule 12)."""
        producer, timers, life = self._ledger.producer, self._ledger.desk.timers, self._life

        def abandoned(session: Any, message: Abandon, now: float) -> None:
            reader = Reader(session.peer, message.attempt)
            due = timers._at.get(("parked", reader))
            if due is not None and producer.parked[reader].claim.handoff == message.handoff:
                until = life.world.now + (due - life.clock()) / (1 + life.character.drift)
                self._left.setdefault(message.handoff, {})[reader] = until - LATE_S
            handle(session, message, now)

        return abandoned

    def _discarding(self, handle: Handle) -> Handle:
        """The word of the router replaces that of readers: it is remembered among the ended ones (rule 22)."""

        def discarded(event: Any, now: float) -> None:
            self._left.pop(event.handoff, None)
            handle(event, now)

        return discarded

    def _check_left(self, lease: Lease, since: float) -> None:
        """All seats of this lease are of readers that gave up before it began: it is held for nobody."""
        known = self._left[lease.handoff].items()
        left = [each for each, until in known if since < until and lease.target in ("", each.peer.worker)]
        forgot = self._ledger.desk.counts["parked_forgotten"]
        if len(left) >= lease.max_readers and not forgot:
            raise Broken(LEAK, f"{self._name}: lease {lease.id} is held, and its readers had given up before it began")

    def _putting_away(self, handle: Handle) -> Handle:
        """A put is taken unless there are as many as there may be."""
        puts, limit = self._ledger.puts, self._settings.puts_max

        def put_wanted(event: Any, now: float) -> None:
            full = len(puts.states) >= limit
            handle(event, now)
            if full is (event.put in puts.states):
                raise Broken(NEEDLESS, f"{self._name}: put {event.put} is {'taken' if full else 'refused'}, of {limit}")

        return put_wanted

    def _draining(self, handle: Handle) -> Handle:
        def drains(event: Any, now: float) -> None:
            handle(event, now)
            self._drains, self._parked = True, set(self._ledger.producer.parked)

        return drains

    def _voiding(self, handle: Handle) -> Handle:
        """Nothing that is under way outlives the cache that it is for (rule 3), also what only waits for a verdict."""
        consumer, producer = self._ledger.consumer, self._ledger.producer

        def replaced(event: Any, now: float) -> None:
            handle(event, now)
            live = [intake for intake in consumer.by_handoff.values() if intake.end is None]
            if event.forgotten:  # what is not granted yet is for the cache as it is now
                live = [intake for intake in live if intake.source is not None]
            goes_on = [intake.wanted.request for intake in live]
            held = [id for id, lease in producer.leases.items() if lease.state is not LeaseState.CLOSING]
            if goes_on or held:
                raise Broken(RULE, f"{self._name}: its cache was replaced, and {goes_on or held} goes on")

        return replaced

    def _check_drained(self) -> None:
        """Who is about to stop lets nobody wait for what it will not begin."""
        parked = set(self._ledger.producer.parked)
        if not parked <= self._parked:
            raise Broken(RULE, f"{self._name}: a claim waits, and it drains")
        self._parked = parked

    def _check_turn(self) -> None:
        """A turn leaves nothing undone: all news are handled and told, all that was due has happened, who sleeps until
        `next_deadline` misses nothing."""
        node, timers = self._life.node, self._ledger.desk.timers
        untold = node.recorder is not None and self._ledger.desk.marks
        if node._next_events or untold or self._ledger.desk.effects:
            raise Broken(HANG, f"{self._name}: a step ends with something left to do")
        if not timers._at:
            return
        due, said = min(timers._at.values()), node.next_deadline()
        if due <= self._life.clock():
            raise Broken(
                HANG, f"{self._name}: {min(timers._at, key=lambda key: timers._at[key])} was due, and waits on"
            )
        if said is None or said > due or self._ledger.next_deadline() != due:
            raise Broken(HANG, f"{self._name}: sleeps until {said}, and something is due at {due}")

    # --- limits of time

    def _check_leases(self, now: float) -> None:
        leases, leased, pins = self._ledger.producer.leases, self._leased, self._life.doorway._pins
        for id, lease in leases.items():
            since = leased.setdefault(id, now) + (self._turn_s if lease.term.is_turn else 0.0)
            if now - since > self._hold_s and lease.state is not LeaseState.CLOSING:
                raise Broken(LEAK, f"{self._name}: lease {id} is held past max_hold_s")
            if lease.handoff in self._left and lease.state is not LeaseState.CLOSING:
                self._check_left(lease, leased[id])
            if id not in pins:
                raise Broken(LEAK, f"{self._name}: lease {id} is held, and its blocks are not pinned")
            if id in self._life.doorway.sourceless and lease.state is not LeaseState.CLOSING and not lease.final:
                raise Broken(HANG, f"{self._name}: lease {id} goes on, and its request has ended")
        if len(leased) > len(leases):
            for id in leased.keys() - leases.keys():
                self._check_expiry(id, now - leased[id])
            self._leased = {id: leased[id] for id in leases}

    def _check_expiry(self, id: LeaseId, held_s: float) -> None:
        """No lease runs out before its first term is over."""
        producer = self._ledger.producer
        lease = producer.tombstones.get(id)
        expired = lease is not None and producer.ended.get(lease.handoff) is Reason.LEASE_EXPIRED
        if expired and lease is not None and not lease.term.is_turn and held_s < self._first_s:
            raise Broken(NEEDLESS, f"{self._name}: lease {id} expired after {held_s:.2f} s")

    def _check_intakes(self, now: float) -> None:
        """No handoff of D's waits for ever, whether or not something happens to it meanwhile."""
        living: dict[int, tuple[object, float]] = {}
        loading: dict[int, float] = {}
        for intake in self._ledger.consumer.by_handoff.values():
            if intake.end is not None:
                continue
            attempt, source = intake.attempt, intake.source  # a ticket that is replayed is another attempt
            heard = (source.work, source.progress, source.final) if source is not None else None
            sign = (intake.state, heard, len(intake.parts.moving))
            seen, since = self._signs.get(attempt, (sign, now))
            living[attempt] = (sign, since if seen == sign else now)
            if now - living[attempt][1] > self._wait_s:
                raise Broken(HANG, f"{self._name}: {intake.wanted.request} waits, {intake.state.value}, for ever")
            if intake.target is not None:
                loading[attempt] = self._loading.get(attempt, now)
                if now - loading[attempt] > self._hold_s:
                    who = f"{self._name}: {intake.wanted.request}"
                    raise Broken(HANG, f"{who} is {intake.state.value}, with blocks, past max_hold_s")
        self._signs, self._loading = living, loading

    def _check_puts(self, now: float) -> None:
        """A store that does not answer is told to stop in time."""
        states = self._ledger.puts.states
        self._putting = {put: self._putting.get(put, now) for put in states}
        for put, state in states.items():
            if state is PutState.PUTTING and now - self._putting[put] > self._put_s:
                raise Broken(HANG, f"{self._name}: put {put} waits for a store past transfer_timeout")
            if state is PutState.CANCELLING and now - self._putting[put] < self._put_s - 2 * LATE_S:
                raise Broken(NEEDLESS, f"{self._name}: put {put} is broken off before transfer_timeout")

    def _check_taken_back(self) -> None:
        """What the router took back is held by nobody but its readers, and no claim waits for it."""
        producer, taken = self._ledger.producer, self._life.taken_back
        if len(taken) + producer.desk.counts["leases"] > self._settings.tombstones_max:
            return  # it may have been forgotten, as the bound allows
        for handoff, lease in producer.by_handoff.items():
            if handoff in taken and not any(seat.state is ReaderState.LIVE for seat in lease.seats.values()):
                raise Broken(LEAK, f"{self._name}: lease {lease.id} is held, and its ticket was taken back")
        for parked in producer.parked.values():
            if parked.claim.handoff in taken:
                raise Broken(HANG, f"{self._name}: a claim waits, and its ticket was taken back")


def quarantined(consumer: Consumer) -> int:
    """D's blocks that something may still write to, though their handoffs have ended."""
    ended = (intake for intake in consumer.by_handoff.values() if intake.end is not None)
    return sum(len(ids) for intake in ended if intake.target is not None for ids in intake.target.blocks)


def restless(producer: Producer) -> int:
    """P's blocks that it may still be writing from, though their leases are over."""
    outlets = producer.writer.outlets.values()
    moving = {outlet.lease for outlet in outlets if outlet.parts.moving or outlet.parts.restless}
    over = (lease for lease in producer.leases.values() if lease.state is LeaseState.CLOSING and lease.id in moving)
    return sum(len(ids) for lease in over for ids in lease.blocks)


OVERDUE_S = 5.0
"""An engine may be stopped, or busy, for so long."""


def check_pins(life: Life) -> None:
    """Blocks that leases pin are never more than the limit, but for one lease that has it to itself; the budget counts
    what the door holds; nobody waits for room past its deadline."""
    name, doorway = life.character.name, life.doorway
    leases = [
        blocks
        for key, blocks in doorway._pins.items()
        if blocks and not isinstance(key, tuple) and key not in doorway._turns
    ]
    pinned = len(set().union(*leases))
    if pinned > life.pins_max and len(leases) > 1:
        raise Broken(LEAK, f"{name}: {len(leases)} leases pin {pinned} blocks, at most {life.pins_max}")
    budget = doorway.budget
    if budget.pinned_blocks != pinned:
        raise Broken(LEAK, f"{name}: leases pin {pinned} blocks, and {budget.pinned_blocks} are counted")
    if len(budget._waiting) > WAITING_MAX:
        raise Broken(LEAK, f"{name}: {len(budget._waiting)} wait for room to pin, at most {WAITING_MAX}")
    overdue = [request for request, (_, until) in budget._waiting.items() if life.world.now > until + OVERDUE_S]
    if overdue and not (life.engine.replacing or life.engine.device.stopped):
        raise Broken(HANG, f"{name}: {overdue[:3]} wait for room to pin past their deadline")
    known = life.engine.requests
    left = [each for each in (*budget._promised, *budget._waiting, *budget._refused) if each not in known]
    if left:
        raise Broken(LEAK, f"{name}: room to pin is kept for requests that are over: {left[:3]}")
    over = [lease for lease in budget._of if lease not in doorway._pins]
    if over:
        raise Broken(LEAK, f"{name}: room to pin is remembered of leases that are over: {over[:3]}")
