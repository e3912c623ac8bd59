"""Wrong ideas about D: what it waits for, when it is at rest, and what it tells its engine."""

from __future__ import annotations

from typing import Any

import msgspec

from kvbaton.protocol import effects as fx
from kvbaton.protocol.errors import Reason
from kvbaton.protocol.geometry.progress import nothing
from kvbaton.protocol.ids import LeaseId
from kvbaton.protocol.machines import consumer, consumer_filling
from kvbaton.protocol.machines import inbound as intake
from kvbaton.protocol.machines.context import Parts
from kvbaton.protocol.machines.inbound import IntakeEvent, IntakeState
from kvbaton.protocol.machines.ledger import Ledger
from kvbaton_proof.sim.mutants.mutation import Mutant, swap


def _rest_at_first_failure(original: Any) -> Any:
    return property(lambda self: getattr(self.owner, "end", None) is not None or original.fget(self))


def _ended_means_rested(original: Any) -> Any:
    return lambda self, event: original(self, msgspec.structs.replace(event, at_rest=True))


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


def _report_without_load(original: Any) -> Any:
    def tell_end(self: Any, intake: Any, now: float) -> None:
        original(self, intake, now)
        if intake.target is None:
            self.desk.emit(fx.Report(intake.wanted.request, intake.end))

    return tell_end


def _handshake_failure_unreported(original: Any) -> Any:
    def on_link_down(self: Any, link: Any, reason: Reason, detail: str, now: float) -> None:
        if reason in (Reason.HANDSHAKE_TIMEOUT, Reason.WRONG_VERSION, Reason.INCOMPATIBLE):
            for waiting in [i for i in self.by_handoff.values() if i.link is link]:
                self.desk.timers.clear(("intake", waiting.wanted.handoff))
                del self.by_handoff[waiting.wanted.handoff], self.by_attempt[waiting.attempt]
        else:
            original(self, link, reason, detail, now)

    return on_link_down


def _abort_unreported(original: Any) -> Any:
    def on_not_needed(self: Any, event: Any, now: float) -> None:
        loading = self.by_request.get(event.request)
        if loading is not None and loading.target is not None and loading.end is None:
            del self.by_request[event.request]
            self.desk.timers.clear(("intake", loading.wanted.handoff))
            self.desk.timers.clear(("pulse", loading.wanted.handoff))
            loading.end = fx.End(Reason.ABORTED)
            return
        original(self, event, now)

    return on_not_needed


def _commit_before_copied(original: Any) -> Any:
    def commit(self: Any, intake: Any, now: float) -> None:
        moving, intake.parts.moving = intake.parts.moving, {}
        try:
            original(self, intake, now)
        finally:
            intake.parts.moving = moving

    return commit


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


def _restart_unnoticed(original: Any) -> Any:
    return lambda self, sender, session, message, now: None


def _deadline_forgotten(original: Any) -> Any:
    def wait(self: Any, intake: Any, seconds: float, now: float) -> None:
        if intake.state is not IntakeState.OFFERED:
            original(self, intake, seconds, now)
        else:
            self.desk.timers.clear(("intake", intake.wanted.handoff))
            intake.deadline = 0.0

    return wait


_OFFERED_FAILED = (IntakeState.OFFERED, IntakeEvent.FAILED)

TARGET_MUTANTS: tuple[Mutant, ...] = (
    Mutant("release_under_own_id", "1", "seed 004: released under D's id",
           swap(consumer_filling.Pulls, "send_commit", _releases_under_own_id)),
    Mutant("handshake_failure_unreported", "17", "seed 002: a failed handshake is not reported",
           swap(consumer.Consumer, "on_link_down", _handshake_failure_unreported)),
    Mutant("rest_at_first_failed_rank", "17", "seed 002, left open there: siblings still move",
           swap(Parts, "at_rest", _rest_at_first_failure)),
    Mutant("report_without_load", "20", "seed 000: a read reported that the engine did not wait for",
           swap(intake.ConsumerBook, "tell_end", _report_without_load)),
    Mutant("restart_taken_for_predecessor", "3", "a restarted peer, same address, same session",
           swap(Ledger, "_on_reset", _restart_unnoticed)),
    Mutant("revoked_without_quiet", "13, 14", "D frees what P may still write to",
           swap(intake.INTAKE.next, _OFFERED_FAILED, lambda original: IntakeState.SETTLING)),
    Mutant("timed_out_means_rested", "18", "NIXL, Mooncake: late data into reused blocks",
           swap(Parts, "ended", _ended_means_rested)),
    Mutant("hold_dropped_at_end", "18", "D's blocks freed while not at rest",
           swap(intake.ConsumerBook, "tell_end", _hold_dropped_at_end)),
    Mutant("copies_again_after_commit", "5", "the second copy gets the first one's yes",
           swap(consumer.Consumer, "on_pulse", _copies_again_after_commit)),
    Mutant("commit_before_copied", "6", "a commit while bytes are on the way",
           swap(consumer_filling.Pulls, "commit_if_copied", _commit_before_copied)),
    Mutant("abort_unreported", "17, 20", "vLLM: an aborted load is never reported",
           swap(consumer.Consumer, "on_not_needed", _abort_unreported)),
    Mutant("reported_twice", "20", "vLLM: a second report kills the engine",
           swap(intake.ConsumerBook, "rest", _reported_twice)),
    Mutant("push_without_deadline", "17", "MoRI-IO: D waits for write_done for ever",
           swap(intake.ConsumerBook, "wait", _deadline_forgotten)),
)  # fmt: skip
