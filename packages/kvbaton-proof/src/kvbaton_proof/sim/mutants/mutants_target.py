"""Wrong ideas about D: what it waits for, when it is at rest, what it tells its engine; KV of members that are gone.

Those about who answers whom, and when, cost time and words alone, since other messages compensate, so that every
handoff still ends well; `dialogue.py` hears them.
"""

from __future__ import annotations

from typing import Any

from kvbaton.protocol import effects as fx
from kvbaton.protocol.geometry.progress import nothing
from kvbaton.protocol.ids import LeaseId
from kvbaton.protocol.machines import consumer, consumer_filling, inbound, producer
from kvbaton.protocol.machines import inbound as intake
from kvbaton.protocol.machines.context import Origins, Parts
from kvbaton.protocol.machines.inbound import IntakeEvent, IntakeState
from kvbaton_proof.sim.mutants.mutation import Mutant, swap


def _slowly(original: Any) -> Any:
    def pulse(self: Any, intake: Any, seconds: float, now: float) -> None:
        original(self, intake, seconds * 2, now)

    return pulse


def _hastily(original: Any) -> Any:
    def pulse(self: Any, intake: Any, seconds: float, now: float) -> None:
        original(self, intake, seconds / 2, now)

    return pulse


def _once(original: Any) -> Any:
    def on_commit(self: Any, session: Any, message: Any, now: float) -> None:
        lease = self.leases.get(message.lease)
        if lease is not None:
            original(self, session, message, now)

    return on_commit


DIALOGUE_MUTANTS: tuple[Mutant, ...] = (
    Mutant("asks_again_late", "9", "what was lost is asked for again after twice the time",
           swap(inbound.ConsumerBook, "pulse", _slowly)),
    Mutant("asks_again_soon", "9", "what is on its way is asked for again after half the time",
           swap(inbound.ConsumerBook, "pulse", _hastily)),
    Mutant("commit_answered_once", "6", "who asks again whether its copy was good hears nothing",
           swap(producer.Producer, "on_commit", _once)),
)  # fmt: skip


def _untold(original: Any) -> Any:
    return property(lambda self: ())


ORIGIN_MUTANTS: tuple[Mutant, ...] = (
    Mutant("grants_without_origins", "36", "a grant does not name the members from whom its source took",
           swap(Origins, "names", _untold)),
)  # fmt: skip


def _rest_at_first_failure(original: Any) -> Any:
    return property(lambda self: getattr(self.owner, "end", None) is not None or original.fget(self))


def _hold_dropped_at_end(original: Any) -> Any:
    def tell_end(self: Any, intake: Any, now: float) -> None:
        original(self, intake, now)
        if intake.target is not None:
            self.desk.emit(fx.DropHold(intake.wanted.request, intake.wanted.handoff))

    return tell_end


def _reported_twice(original: Any) -> Any:
    def rest(self: Any, intake: Any, now: float) -> None:
        was = intake.state
        original(self, intake, now)
        if was is IntakeState.SETTLING and intake.state is IntakeState.DONE and intake.target is not None:
            self.desk.emit(fx.Report(intake.wanted.request, intake.end))

    return rest


def _copies_again_after_commit(original: Any) -> Any:
    def on_pulse(self: Any, handoff: Any, now: float) -> None:
        waiting = self.by_handoff[handoff]
        if waiting.state is IntakeState.COMMITTING:
            waiting.state = IntakeState.COPYING
            waiting.source.copied = nothing(len(waiting.source.blocks))
            self.pulls.read_on(waiting, now)
        else:
            original(self, handoff, now)

    return on_pulse


def _releases_under_own_id(original: Any) -> Any:
    def send_commit(self: Any, intake: Any, now: float) -> None:
        theirs = intake.source.lease
        intake.source.lease = LeaseId(intake.attempt + 1000)
        try:
            original(self, intake, now)
        finally:
            intake.source.lease = theirs

    return send_commit


_OFFERED_FAILED = (IntakeState.OFFERED, IntakeEvent.FAILED)


def _deadline_forgotten(original: Any) -> Any:
    def wait(self: Any, intake: Any, seconds: float, now: float) -> None:
        if intake.state is not IntakeState.OFFERED:
            original(self, intake, seconds, now)
        else:
            self.desk.timers.clear(("intake", intake.wanted.handoff))
            intake.deadline = 0.0

    return wait


TARGET_MUTANTS: tuple[Mutant, ...] = (
    Mutant("push_without_deadline", "17", "MoRI-IO: D waits for write_done for ever",
           swap(inbound.ConsumerBook, "wait", _deadline_forgotten)),
    Mutant("release_under_own_id", "1", "seed 004: released under D's id",
           swap(consumer_filling.Pulls, "send_commit", _releases_under_own_id)),
    Mutant("rest_at_first_failed_rank", "17", "seed 002, left open there: siblings still move",
           swap(Parts, "at_rest", _rest_at_first_failure)),
    Mutant("revoked_without_quiet", "13, 14", "D frees what P may still write to",
           swap(intake.INTAKE.next, _OFFERED_FAILED, lambda original: IntakeState.SETTLING)),
    Mutant("hold_dropped_at_end", "18", "D's blocks freed while not at rest",
           swap(inbound.ConsumerBook, "tell_end", _hold_dropped_at_end)),
    Mutant("copies_again_after_commit", "5", "the second copy gets the first one's yes",
           swap(consumer.Consumer, "on_pulse", _copies_again_after_commit)),
    Mutant("reported_twice", "20", "vLLM: a second report kills the engine",
           swap(inbound.ConsumerBook, "rest", _reported_twice)),
)  # fmt: skip
