"""D's book of inbound handoffs: how each is found, how long it is waited for, and how its blocks are released.

Laws: a handoff is in the book from its `Wanted` until it is at rest; a request until its engine knows how it ended.
Deadlines are set only here, so none goes past the hold limit (rule 9). `DropHold` is emitted only here, once nothing
can land in D's blocks any more (rule 18).
"""

from __future__ import annotations

from typing import Protocol

from kvbaton.protocol.effects import DropHold, End, MatchFailed, Report
from kvbaton.protocol.errors import Reason
from kvbaton.protocol.ids import HandoffId, RequestId, ReservationId
from kvbaton.protocol.machines.context import LedgerContext
from kvbaton.protocol.machines.inbound import INTAKE, Intake, IntakeEvent, IntakeState
from kvbaton.protocol.machines.pairing_state import Link
from kvbaton.protocol.machines.pairing_target import Links
from kvbaton.protocol.marks import Begun, Ended, Step
from kvbaton.protocol.marks import Side as Seen
from kvbaton.protocol.numbers import DURATION_S_MIN
from kvbaton.protocol.table import Verdict

_S, _E = IntakeState, IntakeEvent
RENEWING = (_S.GRANTED, _S.COPYING, _S.OFFERED)


class Fail(Protocol):
    """The one failure function (rule 17), as seen by pull and push."""

    def __call__(self, intake: Intake, reason: Reason, detail: str, now: float, good_tokens: int = 0) -> None: ...


class ConsumerBook:
    """Shared by all of D's role; pull and push differ in what they do between a grant and the end."""

    def __init__(self, desk: LedgerContext, links: Links) -> None:
        self.desk = desk
        self.links = links
        self.by_handoff: dict[HandoffId, Intake] = {}
        self.by_request: dict[RequestId, Intake] = {}
        self.by_attempt: dict[int, Intake] = {}
        self.by_reservation: dict[ReservationId, Intake] = {}

    def add(self, intake: Intake) -> None:
        wanted = intake.wanted
        self.by_handoff[wanted.handoff] = self.by_request[wanted.request] = self.by_attempt[intake.attempt] = intake

    def of(self, link: Link, attempt: int) -> Intake | None:
        intake = self.by_attempt.get(attempt)
        return intake if intake is not None and intake.link is link else None

    def reading(self, link: Link, attempt: int) -> Intake | None:
        intake = self.of(link, attempt)
        return intake if intake is not None and intake.state in RENEWING else None

    def mark(self, attempt: int, step: Step, now: float, what: Begun | Ended | None = None) -> None:
        self.desk.mark(Seen.DECODE, attempt, step, now, what)

    def step(self, intake: Intake, event: IntakeEvent) -> bool:
        state = INTAKE.step(intake.state, event)
        if isinstance(state, Verdict):
            self.desk.count(f"{state.value}.intake")
            return False
        intake.state = state
        return True

    # --- time

    def wait(self, intake: Intake, seconds: float, now: float) -> None:
        intake.deadline = now + seconds
        if intake.hard_deadline and intake.end is None:
            intake.deadline = min(intake.deadline, intake.hard_deadline)
        self.desk.timers.set(("intake", intake.wanted.handoff), intake.deadline)

    def pulse(self, intake: Intake, seconds: float, now: float) -> None:
        self.desk.timers.set(("pulse", intake.wanted.handoff), now + max(seconds, DURATION_S_MIN))

    def progressed(self, intake: Intake, now: float) -> None:
        if intake.state in (_S.COPYING, _S.OFFERED):
            self.wait(intake, self.desk.settings.transfer_timeout, now)

    def clear_timers(self, intake: Intake) -> None:
        self.desk.timers.clear(("intake", intake.wanted.handoff))
        self.desk.timers.clear(("pulse", intake.wanted.handoff))

    # --- the end, and rest

    def finish(self, intake: Intake, now: float) -> None:
        """Delivered."""
        intake.end = End()
        self.tell_end(intake, now)
        self.desk.cancel(intake.parts)  # what was lent; nothing of our own moves any more
        self.rest(intake, now)

    def tell_end(self, intake: Intake, now: float) -> None:
        end = intake.end
        assert end is not None
        self.desk.count(f"ends.{end.reason or 'delivered'}")
        self.mark(intake.attempt, Step.ENDED, now, intake.ended(end))
        self.clear_timers(intake)
        if intake.target is not None:
            self.desk.emit(Report(intake.wanted.request, end))
            self.by_request.pop(intake.wanted.request, None)
        else:
            # Its engine may be allocating blocks this very moment: the request stays known, so that an `Allocated` that
            # crosses this still gets the one report that every load is owed (rule 20).
            self.desk.emit(MatchFailed(intake.wanted.request, end))

    def rest(self, intake: Intake, now: float) -> None:
        """Release everything once nothing can touch D's blocks any more."""
        # Asked after every ending of anything, rather than remembered by whom it waits for: a failed copy of one rank
        # says nothing of its siblings, and a block that is given back under one of them is written to in its next
        # owner's hands (rules 17 and 18). REVOKING is not asked: there a peer writes, of whose copies we know nothing.
        if intake.state is not _S.SETTLING or not intake.parts.at_rest or not self.step(intake, _E.RESTED):
            return
        self.mark(intake.attempt, Step.RESTED, now)
        handoff = intake.wanted.handoff
        del self.by_handoff[handoff], self.by_attempt[intake.attempt]
        self.by_reservation.pop(intake.reservation, None)
        self.clear_timers(intake)
        if intake.target is not None:
            self.desk.emit(DropHold(intake.wanted.request, handoff))
        self._let_go(intake.link, now)

    # --- transports that fail under a handoff

    def heal(self, link: Link, reason: Reason, now: float) -> None:
        """The transports no longer know each other (one side was fenced or closed): pair again at the next need."""
        if reason is Reason.PEER_UNKNOWN:
            self.links.lose(link, Reason.PEER_GONE, "the data planes no longer know each other", now)
        elif reason is Reason.UNREACHABLE and link.choice.fallback:
            link.choice.worn = True
            self._let_go(link, now)

    def _let_go(self, link: Link, now: float) -> None:
        """A handoff with all its bytes needs only the answer to its commit; nothing else can use a closed transport."""
        if link.choice.worn and not any(i.link is link and i.state is _S.COMMITTING for i in self.by_handoff.values()):
            self.links.avoid(link, "a copy found the data plane shut", now)
