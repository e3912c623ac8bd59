"""The books of one ledger, held against each other after every step: what is in one is in the others, and in no more.

Laws: an index has what the state says, neither more nor less. A timer waits for exactly what can run out: each lease
that is not over, each claim and greeting without an answer, each handoff without an end, each write and each put. What
moves has an owner that knows of it. Who is over holds only what is not at rest. Quotas are what can be counted.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

from kvbaton.protocol.ids import WorkerId
from kvbaton.protocol.machines.consumer import Consumer
from kvbaton.protocol.machines.context import Parts
from kvbaton.protocol.machines.inbound import Intake, IntakeState
from kvbaton.protocol.machines.lease import Lease, LeaseState, ReaderState
from kvbaton.protocol.machines.pairing_state import LinkState
from kvbaton.protocol.machines.producer import Producer
from kvbaton.protocol.machines.push_writer import OutletState
from kvbaton.protocol.machines.puts import PutState
from kvbaton_proof.sim.promises import HANG, LEAK, RULE, Broken
from kvbaton_proof.sim.world.life import Life

_S = IntakeState
_ASKS = (_S.CLAIMING, _S.GRANTED, _S.COPYING, _S.OFFERED, _S.COMMITTING)
"""In which D has something to say again."""
Key = tuple[str, Any]
EVERY = 2
"""Steps: what is wrong on the books stays wrong, and to look costs as much as a step."""
_SOURCED = (_S.GRANTED, _S.COPYING, _S.OFFERED, _S.COMMITTING)


class LedgerConsistency:
    """Of one life."""

    def __init__(self, life: Life) -> None:
        self._life = life
        self._ledger = life.node.ledger
        self._name = life.character.name
        self._settings = life.character.settings
        self._page_bytes = _block_bytes(life)
        self._steps = 0
        life.after_node.append(self._after_step)

    def _after_step(self) -> None:
        self._steps += 1
        if self._steps % EVERY:
            return
        consumer, producer = self._ledger.consumer, self._ledger.producer
        if consumer.by_handoff or consumer.by_attempt or consumer.by_request or consumer.by_reservation:
            self._check_intakes(consumer)
        if producer.leases or producer.by_handoff or producer.parked or producer.writer.outlets:
            self._check_leases(producer)
        self._check_peers()
        self._check_timers()
        if self._ledger.desk.owners:
            self._check_owners()

    # --- D

    def _check_intakes(self, consumer: Consumer) -> None:
        intakes = consumer.by_handoff
        for handoff, intake in intakes.items():
            self._check_intake(consumer, intake)
            if intake.wanted.handoff != handoff or consumer.by_attempt.get(intake.attempt) is not intake:
                self._wrong(f"{handoff[:6]} is not on the books as it is")
        offered = {each.reservation for each in intakes.values() if each.reservation}
        if len(consumer.by_attempt) != len(intakes) or offered != set(consumer.by_reservation):
            self._wrong(f"{len(intakes)} handoffs, {len(consumer.by_attempt)} attempts, {len(offered)} were offered")
        known = {each.wanted.request for each in intakes.values() if each.end is None}
        if not known <= set(consumer.by_request):
            self._wrong("a request is not known of whose handoff is on its way")

    def _check_intake(self, consumer: Consumer, intake: Intake) -> None:
        state, who = intake.state, f"{intake.wanted.request} is {intake.state.value}"
        over = state in (_S.REVOKING, _S.SETTLING, _S.DONE)
        if over is (intake.end is None) or state is _S.DONE:
            self._wrong(f"{who}, and its end is {intake.end}")
        if state in _SOURCED and intake.source is None:
            self._wrong(f"{who}, and was granted nothing")
        if state in (_S.COPYING, _S.OFFERED, _S.COMMITTING) and intake.target is None:
            self._wrong(f"{who}, and has no blocks")
        if state is _S.GRANTED and intake.target is not None:
            raise Broken(HANG, f"{self._name}: {who}, has blocks, and does not fill them")
        if (state in (_S.OFFERED, _S.REVOKING)) > bool(intake.reservation):
            self._wrong(f"{who}, and has no reservation")
        if not over and state is not _S.JUDGING:  # then only our own ranks are waited for
            self._check_linked(consumer, intake, who)
        if state is _S.COMMITTING and not (intake.source and intake.source.final and intake.parts.at_rest):
            self._wrong(f"{who}, and does not have all")
        if state is _S.SETTLING and intake.parts.at_rest:
            raise Broken(LEAK, f"{self._name}: {who}, and nothing moves any more")

    def _check_linked(self, consumer: Consumer, intake: Intake, who: str) -> None:
        link = intake.link
        if consumer.links.by_worker.get(intake.wanted.source) is not link:
            raise Broken(HANG, f"{self._name}: {who}, and its link is down")
        if (link.state is LinkState.UP) is (intake.state is _S.GREETING):
            raise Broken(HANG, f"{self._name}: {who}, and its link is {link.state.value}")

    # --- P

    def _check_leases(self, producer: Producer) -> None:
        live: Counter[WorkerId] = Counter()
        held: Counter[WorkerId] = Counter()
        named = {}
        for id, lease in producer.leases.items():
            if lease.id != id or id in producer.tombstones:
                self._wrong(f"lease {id} is on the books as {lease.id}, or as released")
            if lease.state is not LeaseState.CLOSING:
                named[lease.handoff] = lease
            self._check_lease(producer, lease)
            size = sum(bytes_ * n for bytes_, n in zip(self._page_bytes, self._needed(lease), strict=True))
            for reader, seat in lease.seats.items():
                if seat.state is ReaderState.LIVE:
                    live[reader.peer.worker] += 1
                    held[reader.peer.worker] += size
        if named != producer.by_handoff:
            self._wrong("handoffs and the leases that are open for them are not the same")
        waiting = Counter(reader.peer.worker for reader in producer.parked)
        for worker in live.keys() | waiting.keys() | producer.held._seats.keys() | producer.parked._counts.keys():
            if producer.held.seats(worker) != live[worker] or producer.held.bytes(worker) != held[worker]:
                self._wrong(
                    f"{worker} reads {live[worker]} leases of {held[worker]} bytes, and not as many are counted"
                )
            if producer.parked.of(worker) != waiting[worker]:
                self._wrong(f"{waiting[worker]} claims of {worker} wait, and not as many are counted")
        for parked in producer.parked.values():
            if parked.claim.handoff in producer.by_handoff:
                raise Broken(HANG, f"{self._name}: a claim waits, or is remembered, for a lease that there is")
        self._check_outlets(producer)

    def _needed(self, lease: Lease) -> list[int]:
        shape = self._life.character.shape
        whole = -(-lease.tokens // shape.block_tokens)
        return [
            1 if n in shape.states else whole - shape.needed_from(n, lease.tokens) // shape.block_tokens
            for n in range(len(self._page_bytes))
        ]

    def _check_lease(self, producer: Producer, lease: Lease) -> None:
        sessions = self._ledger.sessions
        sits = [(reader, seat) for reader, seat in lease.seats.items() if seat.state is ReaderState.LIVE]
        if lease.state is LeaseState.CLOSING:
            loans = any(not seat.loans.at_rest for seat in lease.seats.values())
            if sits or (not loans and producer.writer.at_rest(lease)):
                raise Broken(LEAK, f"{self._name}: lease {lease.id} is over, and nothing of it moves")
            return
        if lease.completed is not (lease.state is LeaseState.COMPLETE):
            self._wrong(f"lease {lease.id} is {lease.state.value}, completed: {lease.completed}")
        if not sits and len(lease.seats) >= lease.max_readers:
            raise Broken(LEAK, f"{self._name}: lease {lease.id} is held, and nobody will read it")
        if len(lease.seats) > lease.max_readers:
            self._wrong(f"lease {lease.id} has {len(lease.seats)} readers of {lease.max_readers}")
        for reader, seat in sits:
            if sessions.joined(seat.session, reader.peer) is None:
                raise Broken(LEAK, f"{self._name}: {reader} reads lease {lease.id} in a session that is over")

    def _check_outlets(self, producer: Producer) -> None:
        writer = producer.writer
        if {key: (each.lease, each.reader) for key, each in writer.outlets.items()} != {
            key: reader for reader, key in writer.by_reader.items()
        }:
            self._wrong("what is written and who is written to are not the same")
        for outlet in writer.outlets.values():
            lease = producer.leases.get(outlet.lease)
            seat = lease.seats.get(outlet.reader) if lease is not None else None
            if lease is None or seat is None:
                raise Broken(LEAK, f"{self._name}: writes for {outlet.reader}, who has no seat")
            sits = seat.state is ReaderState.LIVE and lease.state is not LeaseState.CLOSING
            if outlet.state is not OutletState.STOPPING and not sits:
                self._wrong(f"{outlet.reader} has left, and its outlet is {outlet.state.value}")
            if outlet.parts.at_rest is (outlet.state is OutletState.STOPPING) and outlet.state is not _WRITING:
                self._wrong(f"an outlet is {outlet.state.value}, at rest: {outlet.parts.at_rest}")
            done = outlet.parts.at_rest and outlet.sent == lease.progress and lease.final
            if outlet.state is _WRITING and done:
                raise Broken(HANG, f"{self._name}: all is written for {outlet.reader}, and it does not say so")

    # --- both

    def _check_peers(self) -> None:
        ledger = self._ledger
        joined = [each.peer.worker for each in ledger.sessions.by_number.values() if each.joined]
        if len(joined) != len(set(joined)):
            self._wrong(f"more than one session with the same worker: {sorted(joined)}")
        for worker, link in ledger.consumer.links.by_worker.items():
            greets = link.state is LinkState.GREETING
            if link.worker != worker or link.state is LinkState.DOWN or greets is not (link.peer is None):
                self._wrong(f"the link to {worker} is {link.state.value}, with {link.peer}")
        stray = set(ledger.producer.writer.revoked) - set(ledger.sessions.by_number)
        if stray - {key[0] for key in ledger.producer.writer.outlets}:
            raise Broken(LEAK, f"{self._name}: remembers what sessions revoked that are over")

    def _check_timers(self) -> None:
        """Exactly what can run out has a timer."""
        due = self._ledger.desk.timers._at
        if len(due) == 0 and not self._ledger.consumer.by_handoff and not self._ledger.producer.leases:
            return
        needed, may = self._waited_for()
        for key in (due.keys() ^ needed) - may:
            text = "waits, and nothing ends it" if key not in due else "is over, and a timer waits for it"
            raise Broken(HANG, f"{self._name}: {key} {text}")

    def _waited_for(self) -> tuple[set[Key], set[Key]]:
        """What must have a timer, and what may have one that does nothing."""
        ledger, may = self._ledger, set()
        producer, consumer = ledger.producer, ledger.consumer
        keys: set[Key] = {("parked", reader) for reader in producer.parked}
        keys |= {("lease", id) for id, lease in producer.leases.items() if lease.state is not LeaseState.CLOSING}
        keys |= {("put", put) for put, state in ledger.puts.states.items() if state is PutState.PUTTING}
        keys |= {("link", name) for name, link in consumer.links.by_worker.items() if link.state is not LinkState.UP}
        for key, outlet in producer.writer.outlets.items():
            spent = outlet.state is OutletState.STOPPING and self._life.clock() >= outlet.deadline
            if not spent:
                keys.add(("outlet", key))
        for handoff, intake in consumer.by_handoff.items():
            up = intake.link.state is LinkState.UP
            if intake.end is None or (intake.state is _S.REVOKING and up):
                keys.add(("intake", handoff))
            if intake.state in _ASKS or (intake.state is _S.REVOKING and up):
                keys.add(("pulse", handoff))
            if intake.state is _S.REVOKING and not up:  # it is being fenced
                may |= {("intake", handoff), ("pulse", handoff)}
            elif intake.state is _S.GREETING:  # it had claimed, and greets again
                may.add(("pulse", handoff))
        return keys, may

    def _check_owners(self) -> None:
        for job, parts in self._ledger.desk.owners.items():
            if job not in parts.moving and job not in parts.restless:
                self._wrong(f"copy {job} is over, and owned")
        for parts in self._parts():
            for job in (*parts.moving, *parts.restless):
                if self._ledger.desk.owners.get(job) is not parts:
                    raise Broken(HANG, f"{self._name}: copy {job} moves, and its end would be nobody's")

    def _parts(self) -> list[Parts]:
        ledger = self._ledger
        found = [intake.parts for intake in ledger.consumer.by_handoff.values()]
        found += [outlet.parts for outlet in ledger.producer.writer.outlets.values()]
        found += [seat.loans for lease in ledger.producer.leases.values() for seat in lease.seats.values()]
        return found

    def _wrong(self, what: str) -> None:
        raise Broken(RULE, f"{self._name}: {what}")


_WRITING = OutletState.WRITING


def _block_bytes(life: Life) -> list[int]:
    """What one block of each group holds on all ranks, by the shape's own arithmetic."""
    shape = life.character.shape
    own = [
        sum(shape.group_of[layer] == group for layers in shape.own_layers for layer in layers)
        for group in range(len(shape.group_layers))
    ]
    return [count * shape.page_bytes for count in own]
