"""What a world allows must happen in it: each capability has a condition of success, judged by handoff.

Laws: a push is written by P wherever the pair can push, and nowhere else. D reads what it knows to be ready, also while
P computes. A turn that may be kept is kept, and one that is offered is asked for (`sim_turns.py`); that it is then
taken is `causes.py`'s to see, as of every handoff. What lies in a store and may be believed is found and brought
(`sim_rank_store.py`). A peer that said goodbye, was reset or is said to have gone is paired with anew. A worker that
drains hands over what it has granted, and keeps nothing for anybody else.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from kvbaton.protocol.events import Departed, DrainStarted
from kvbaton.protocol.ids import Incarnation, PeerId, WorkerId
from kvbaton.protocol.machines.inbound import Intake, IntakeState
from kvbaton.protocol.machines.ledger import Ledger
from kvbaton.protocol.wire.messages import Claim, Feature, Reset
from kvbaton_proof.sim.promises import NEEDLESS, RULE, Broken
from kvbaton_proof.sim.world.life import Life

Handle = Callable[..., None]


def check_pushed(life: Life, lives: Mapping[WorkerId, Life], intake: Intake) -> None:
    """Of a handoff that was delivered."""
    plane, source = intake.link.transport, lives.get(intake.wanted.source)
    if plane is None or source is None:
        return
    writes = source.character.features & Feature.PUSH  # what D can is D's own affair: it asks
    able = bool(intake.wanted.push and writes and plane.can_write and plane.can_fence)
    if able is not bool(intake.reservation):
        does = "is pushed" if intake.reservation else "is not pushed"
        raise Broken(RULE, f"{life.character.name}: {intake.wanted.request} {does} over {plane.name}")


def check_streamed(life: Life) -> None:
    """After a step."""
    for intake in life.node.ledger.consumer.by_handoff.values():
        source = intake.source
        if intake.state is IntakeState.COPYING and source is not None and source.copied != source.progress:
            raise Broken(NEEDLESS, f"{life.character.name}: {intake.wanted.request} does not read what is ready")


def watch(life: Life) -> None:
    """Stand at the doors of a ledger through which it hears of peers that go, and of its own draining."""
    name, ledger = life.character.name, life.node.ledger
    events, of_target = ledger._on_event, ledger._of_target
    events[Departed] = _departed(name, ledger, events[Departed])
    events[DrainStarted] = _drains(name, ledger, events[DrainStarted])
    of_target[Claim] = _claimed(name, ledger, of_target[Claim])
    setattr(ledger, "_on_goodbye", _left(name, ledger, ledger._on_goodbye))  # noqa: B010
    setattr(ledger, "_on_reset", _reset(name, ledger, ledger._on_reset))  # noqa: B010


def _departed(name: str, ledger: Ledger, handle: Handle) -> Handle:
    def departed(event: Departed, now: float) -> None:
        handle(event, now)
        paired = [each.peer for each in ledger.sessions.by_number.values()]
        paired += [each.peer for each in ledger.consumer.links.by_worker.values() if each.peer is not None]
        for peer in paired:
            if peer.worker == event.worker and event.incarnation in (0, peer.incarnation):
                raise Broken(RULE, f"{name}: is paired with {peer}, which is said to have gone")

    return departed


def _left(name: str, ledger: Ledger, handle: Handle) -> Handle:
    def left(sender: PeerId, session: int, now: float) -> None:
        links, reads = ledger.consumer.links, ledger.sessions.joined(session, sender) is not None
        handle(sender, session, now)
        if ledger.sessions.joined(session, sender) or not (reads or links.current(sender, session) is None):
            raise Broken(RULE, f"{name}: is paired with {sender}, which said goodbye")

    return left


def _reset(name: str, ledger: Ledger, handle: Handle) -> Handle:
    def reset(sender: PeerId, session: int, message: Reset, now: float) -> None:
        handle(sender, session, message, now)
        spoken_to = PeerId(sender.worker, Incarnation(message.incarnation))
        if ledger.consumer.links.current(spoken_to, session):
            raise Broken(RULE, f"{name}: is linked to {spoken_to}, which does not know the session")

    return reset


def _drains(name: str, ledger: Ledger, handle: Handle) -> Handle:
    def drains(event: DrainStarted, now: float) -> None:
        leases = dict(ledger.producer.by_handoff)
        handle(event, now)
        for handoff, lease in leases.items():
            if lease.term.is_turn and not lease.seats and handoff in ledger.producer.by_handoff:
                raise Broken(RULE, f"{name}: drains, and keeps a turn")
            if not lease.term.is_turn and handoff not in ledger.producer.by_handoff:
                raise Broken(NEEDLESS, f"{name}: drains, and gives up lease {lease.id}")

    return drains


def _claimed(name: str, ledger: Ledger, handle: Handle) -> Handle:
    counts, leases = ledger.desk.counts, ledger.producer.by_handoff

    def claimed(session: Any, claim: Claim, now: float) -> None:
        refused, known = counts["claim_refused.draining"], claim.handoff in leases
        handle(session, claim, now)
        if known and counts["claim_refused.draining"] > refused:
            raise Broken(NEEDLESS, f"{name}: drains, and refuses a claim on what it has granted")

    return claimed
