"""D's side of one handoff: from wanting a prompt's KV to one end, and on to rest.

Laws: it ends once, by its deadline, on the first failure or the last success. D's blocks are released on entering DONE
and nowhere else, and DONE is entered only when no copy into them, ours or the peer's, can touch them any more.

D's book of inbound handoffs: how each is found, how long it is waited for, and how its blocks are released.

Laws: a handoff is in the book from its `Wanted` until it is at rest; a request until its engine knows how it ended.
Deadlines are set only here, so none goes past the hold limit (rule 9). `DropHold` is emitted only here, once nothing
can land in D's blocks any more (rule 18).
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from kvbaton.protocol.effects import Begun, DropHold, End, Ended, MatchFailed, Report, Step
from kvbaton.protocol.effects import Side as Seen
from kvbaton.protocol.errors import ProtocolError, Reason
from kvbaton.protocol.events import Allocated, Wanted
from kvbaton.protocol.geometry.layout import Group
from kvbaton.protocol.geometry.progress import Progress
from kvbaton.protocol.ids import HandoffId, LeaseId, RequestId, ReservationId
from kvbaton.protocol.legality import Table, Verdict, pairs
from kvbaton.protocol.machines.context import LedgerContext, Parts
from kvbaton.protocol.machines.pairing_state import Link
from kvbaton.protocol.machines.pairing_target import Links
from kvbaton.protocol.numbers import DURATION_S_MIN


class IntakeState(enum.Enum):
    GREETING = "greeting"  # waiting for the link to the source
    CLAIMING = "claiming"  # Claim sent, repeated
    GRANTED = "granted"  # the lease is ours, renewed; waiting for the engine to find blocks
    COPYING = "copying"  # reading behind what is ready
    COMMITTING = "committing"  # all bytes are here; Commit sent, repeated; nothing is read again
    OFFERED = "offered"  # the source writes into our blocks
    JUDGING = "judging"  # the source says that it has written everything; our ranks say what they have
    REVOKING = "revoking"  # ended; the source must confirm that it has stopped writing, or be fenced
    SETTLING = "settling"  # ended; our own copies come to rest
    DONE = "done"


class IntakeEvent(enum.Enum):
    LINKED = "linked"
    UNLINKED = "unlinked"
    GRANTED = "granted"
    PULL_BEGUN = "pull_begun"
    PUSH_BEGUN = "push_begun"
    COPIED = "copied"
    COMMITTED = "committed"
    WRITTEN = "written"
    JUDGED = "judged"
    FAILED = "failed"
    QUIESCED = "quiesced"
    RESTED = "rested"


_S, _E = IntakeState, IntakeEvent
_LIVE = {_S.GREETING, _S.CLAIMING, _S.GRANTED, _S.COPYING, _S.COMMITTING, _S.OFFERED, _S.JUDGING}
_OVER = {_S.REVOKING, _S.SETTLING, _S.DONE}
_NEXT = {
    (_S.GREETING, _E.LINKED): _S.CLAIMING,
    (_S.CLAIMING, _E.UNLINKED): _S.GREETING,
    (_S.CLAIMING, _E.GRANTED): _S.GRANTED,
    (_S.GRANTED, _E.PULL_BEGUN): _S.COPYING,
    (_S.GRANTED, _E.PUSH_BEGUN): _S.OFFERED,
    (_S.COPYING, _E.COPIED): _S.COMMITTING,
    (_S.COMMITTING, _E.COMMITTED): _S.SETTLING,
    (_S.OFFERED, _E.WRITTEN): _S.JUDGING,
    (_S.JUDGING, _E.JUDGED): _S.SETTLING,
    (_S.GREETING, _E.FAILED): _S.SETTLING,
    (_S.CLAIMING, _E.FAILED): _S.SETTLING,
    (_S.GRANTED, _E.FAILED): _S.SETTLING,
    (_S.COPYING, _E.FAILED): _S.SETTLING,
    (_S.COMMITTING, _E.FAILED): _S.SETTLING,
    (_S.OFFERED, _E.FAILED): _S.REVOKING,
    (_S.JUDGING, _E.FAILED): _S.SETTLING,  # its loans were taken back, so it can write no more
    (_S.REVOKING, _E.QUIESCED): _S.SETTLING,
    (_S.REVOKING, _E.WRITTEN): _S.SETTLING,  # a Written that crosses a Revoke counts as Quiesced
    (_S.SETTLING, _E.RESTED): _S.DONE,
}
_ILLEGAL = (
    pairs(_LIVE - {_S.GRANTED}, {_E.PULL_BEGUN, _E.PUSH_BEGUN})
    | pairs(_LIVE - {_S.COPYING}, {_E.COPIED})
    | pairs(_LIVE - {_S.COMMITTING}, {_E.COMMITTED})
    | pairs(_LIVE - {_S.OFFERED, _S.JUDGING}, {_E.WRITTEN})
    | pairs(_LIVE - {_S.JUDGING}, {_E.JUDGED, _E.QUIESCED})  # one that stops of its own accord fails the handoff first
)
INTAKE = Table(
    "intake",
    IntakeState,
    IntakeEvent,
    next=_NEXT,
    late=(
        pairs(_LIVE, {_E.LINKED, _E.UNLINKED, _E.GRANTED, _E.RESTED})
        | pairs({_S.JUDGING}, {_E.WRITTEN, _E.QUIESCED})  # it repeats a Written until that is acknowledged
        | pairs(_OVER, IntakeEvent)
    )
    - set(_NEXT),
    illegal=_ILLEGAL,
)


@dataclass(slots=True)
class Source:
    """P's blocks, as far as D knows them."""

    lease: LeaseId
    tokens: int
    blocks: tuple[list[int], ...]
    progress: Progress
    final: bool
    work: int = 0
    ttl_s: float = 0.0
    copied: Progress = ()  # what of it has been handed to the ranks to read

    def check(self, groups: Sequence[Group]) -> None:
        """Refuse what cannot be this prompt: too many blocks, more ready than listed, or less than all when final."""
        if not len(groups) == len(self.blocks) == len(self.progress):
            raise ProtocolError(Reason.BAD_MESSAGE, "blocks: not one list and one progress per group of the source")
        for group, ids, ready in zip(groups, self.blocks, self.progress, strict=True):
            _, needed = group.needed(self.tokens)
            if len(ids) > needed:
                raise ProtocolError(
                    Reason.BAD_MESSAGE, f"blocks: {len(ids)} of {group.name!r}, {needed} make the prompt"
                )
            if max(ready.blocks_done, ready.blocks_ahead) > len(ids):
                raise ProtocolError(Reason.BAD_MESSAGE, f"progress: more of {group.name!r} is ready than is listed")
            if self.final and ready.blocks_done < needed:
                raise ProtocolError(
                    Reason.BAD_MESSAGE, f"final: {ready.blocks_done} of {needed} blocks of {group.name!r}"
                )


@dataclass(slots=True)
class Repeats:
    """How often D had to repeat messages that need an answer."""

    greetings: int = 0  # repeated for it, after the first
    claims: int = 0  # sent


@dataclass(slots=True)
class Intake:
    """One handoff on its way in."""

    wanted: Wanted
    attempt: int
    link: Link
    parts: Parts
    state: IntakeState = IntakeState.GREETING
    source: Source | None = None
    target: Allocated | None = None
    reservation: ReservationId = ReservationId(0)
    accepted: bool = False  # the source has confirmed the offer
    end: End | None = None
    repeats: Repeats = field(default_factory=Repeats)
    deadline: float = 0.0
    hard_deadline: float = 0.0
    has_bytes: bool = False  # at least one copy has ended well

    @property
    def waited_for(self) -> Reason:
        """It names what did not come, so that an operator reads from it which side, or which link, to look at."""
        reason = WAITED_FOR[self.state]
        return Reason.DEFER_TIMEOUT if reason is Reason.CLAIM_TIMEOUT and self.wanted.deferred else reason

    def ended(self, end: End) -> Ended:
        plane, target = self.link.transport, self.target
        return Ended(
            end,
            self.parts.moved,
            sum(map(len, target.blocks)) if target is not None else 0,
            plane.name if plane is not None else "",
            self.repeats.greetings + max(self.repeats.claims - 1, 0),
        )


WAITED_FOR: dict[IntakeState, Reason] = {
    IntakeState.GREETING: Reason.HANDSHAKE_TIMEOUT,
    IntakeState.CLAIMING: Reason.CLAIM_TIMEOUT,
    IntakeState.GRANTED: Reason.DEFER_TIMEOUT,
    IntakeState.COPYING: Reason.TRANSFER_TIMEOUT,
    IntakeState.COMMITTING: Reason.TRANSFER_TIMEOUT,
    IntakeState.OFFERED: Reason.TRANSFER_TIMEOUT,
    IntakeState.JUDGING: Reason.TRANSFER_TIMEOUT,
}
"""The reason of a handoff that ran out of time: what it was waiting for."""

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
