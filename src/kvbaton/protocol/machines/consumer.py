"""D's role: wants, claims, begins by pull or by push, and ends. All failures enter by `fail`.

Laws: every `Wanted` is followed by `MatchFound` or `MatchFailed`, unless its `Allocated` comes first; every `Allocated`
by exactly one `Report` and, when nothing can land in its blocks any more, exactly one `DropHold`. How blocks are filled
is in `consumer_filling.py`; pull and push share the book of `inbound.py`, and nothing else.
"""

from __future__ import annotations

from collections.abc import Callable

from kvbaton.protocol.bounded import Remembered
from kvbaton.protocol.effects import Begun, DropHold, End, Ended, MatchFailed, MatchFound, Report, Step
from kvbaton.protocol.errors import ProtocolError, Reason, reason_of
from kvbaton.protocol.events import Allocated, CopyEnded, Disowned, GaveUp, NotNeeded, TurnedAway, Wanted
from kvbaton.protocol.ids import HandoffId, WorkerId
from kvbaton.protocol.legality import Act, may
from kvbaton.protocol.machines.consumer_filling import Pulls, Pushes
from kvbaton.protocol.machines.context import LedgerContext, Parts
from kvbaton.protocol.machines.inbound import RENEWING, ConsumerBook, Intake, IntakeEvent, IntakeState, Source
from kvbaton.protocol.machines.pairing_state import Link, LinkState
from kvbaton.protocol.machines.pairing_target import Links
from kvbaton.protocol.wire.codec import unpack_blocks
from kvbaton.protocol.wire.messages import (
    Abandon,
    Claim,
    ClaimRefused,
    Granted,
    GrantedFrom,
    Renew,
    Renewed,
    RenewRefused,
    SourceLost,
)

_S, _E = IntakeState, IntakeEvent
GREETINGS_MAX = 8
"""Of one handoff: more than there are data planes, and a source may have begun a new life meanwhile."""

DISOWNED_WAITING_MAX = 1024
"""Disowned tickets whose source is yet to be greeted; what comes beyond is left to its lease's end."""

CLAIMS_IN_VERSION = 4
"""So many claims, and the last of them in the oldest version that we speak; a Claim is the same in all of them."""


class DisownedTickets:
    """Tickets that D will not use: P is told, so that it does not hold blocks in vain.

    Law: a ticket is returned as any reader takes and leaves it, by a Claim with it and, if granted, an Abandon: P
    trusts a ticket, not a name. It is sent once, to peers in reach: a lost message costs P the rest of the term.
    """

    def __init__(
        self, desk: LedgerContext, links: Links, next_attempt: Callable[[], int], is_wanted: Callable[[HandoffId], bool]
    ) -> None:
        self._desk = desk
        self._links = links
        self._next_attempt = next_attempt
        self._is_wanted = is_wanted
        self._why: Remembered[HandoffId, Reason] = Remembered(desk.settings.tombstones_max)
        self._waiting: list[tuple[Link, Disowned]] = []

    def on_disowned(self, event: Disowned, now: float) -> None:
        """Tell its source now, or once it is paired. Not if another request of ours may be reading with it."""
        if event.handoff in self._why or self._is_wanted(event.handoff):
            return
        if len(self._waiting) >= DISOWNED_WAITING_MAX:
            self._desk.count("disowned_dropped")
            return
        try:
            link = self._links.need(event.source, now)
        except ProtocolError:  # no room for one more source
            self._desk.count("disowned_dropped")
            return
        self._why.put(event.handoff, event.reason)
        if link.state is LinkState.UP:
            self._claim(link, event)
        else:
            self._waiting.append((link, event))

    def on_link_up(self, link: Link) -> None:
        for event in self._take(link):
            self._claim(link, event)

    def on_link_down(self, link: Link) -> None:
        """Its source is gone, and with it the blocks; or it refuses us, and its leases expire."""
        self._take(link)

    def on_granted(self, link: Link, message: Granted) -> None:
        """Granted to no attempt that we know: it was disowned, or has ended."""
        why = self._why.get(message.handoff) or Reason.ABORTED
        self._links.send(link, Abandon(message.handoff, message.attempt, why))

    def _take(self, link: Link) -> list[Disowned]:
        taken = [event for each, event in self._waiting if each is link]
        self._waiting = [(each, event) for each, event in self._waiting if each is not link]
        return taken

    def _claim(self, link: Link, event: Disowned) -> None:
        self._desk.count("disowned")
        claim = Claim(event.handoff, self._next_attempt(), event.ticket, event.digest, event.deferred)
        self._links.send(link, claim)


class Consumer:
    """All handoffs into this node."""

    def __init__(self, desk: LedgerContext) -> None:
        self.desk = desk
        self.links = Links(desk, self)
        book = self.book = ConsumerBook(desk, self.links)
        self.by_handoff, self.by_request = book.by_handoff, book.by_request
        self.by_attempt, self.by_reservation = book.by_attempt, book.by_reservation
        self.pulls = Pulls(book, self.fail)
        self.pushes = Pushes(book, self.fail)
        self.disowned = DisownedTickets(desk, self.links, self._next_attempt, self.by_handoff.__contains__)
        self._last_attempt = 0

    # --- the engine

    def on_wanted(self, event: Wanted, now: float) -> None:
        self._next_attempt()
        begun = Begun(event.handoff, event.request, event.source, event.tokens, event.push, event.deferred, event.trace)
        self.book.mark(self._last_attempt, Step.ASKED, now, begun)
        try:
            self._check_room(event)
            link = self.links.need(event.source, now)
        except ProtocolError as error:
            self.desk.count(f"ends.{error.reason}")
            end = End(error.reason, error.detail)
            self.desk.emit(MatchFailed(event.request, end))
            self.book.mark(self._last_attempt, Step.ENDED, now, Ended(end))
            self.book.mark(self._last_attempt, Step.RESTED, now)
            self._disown(event, error.reason, now)
            return
        parts = Parts(None)
        intake = Intake(event, self._last_attempt, link, parts)
        parts.owner = intake
        self.book.add(intake)
        settings = self.desk.settings
        self.book.wait(intake, settings.defer_timeout if event.deferred else settings.claim_timeout, now)
        if link.state is LinkState.UP:
            self._claim(intake, now)

    def on_turned_away(self, event: TurnedAway, now: float) -> None:
        """Refused by the doorway, so there is nothing to end; recorded all the same."""
        self._next_attempt()
        self.desk.count(f"turned_away.{event.reason}")
        begun = Begun(event.handoff, event.request, WorkerId(""), 0, trace=event.trace)
        self.book.mark(self._last_attempt, Step.ASKED, now, begun)
        self.book.mark(self._last_attempt, Step.ENDED, now, Ended(End(event.reason, event.detail)))
        self.book.mark(self._last_attempt, Step.RESTED, now)

    def on_allocated(self, event: Allocated, now: float) -> None:
        intake = self.by_request.get(event.request)
        if intake is None or intake.end is not None:
            # The handoff ended while the engine was finding blocks: its load still needs its one report (rule 20). No
            # copy ever knew of these blocks, so their hold goes with it.
            end = intake.end if intake is not None and intake.end is not None else End(Reason.ABORTED, "not wanted")
            self.by_request.pop(event.request, None)
            self.desk.emit(Report(event.request, end))
            self.desk.emit(DropHold(event.request, intake.wanted.handoff if intake else HandoffId("")))
            return
        intake.target = event
        intake.hard_deadline = now + self.desk.settings.max_hold_s
        if intake.state in (_S.GREETING, _S.CLAIMING):
            self.book.wait(intake, intake.deadline - now, now)  # P's answer, which is on its way, begins it
        else:
            self._begin(intake, now)

    def on_not_needed(self, event: NotNeeded | GaveUp, now: float) -> None:
        intake = self.by_request.get(event.request)
        if intake is None:
            return
        if intake.end is None:
            self.fail(intake, Reason.ABORTED, "the engine no longer wants it", now)
        if intake.target is None:
            self.by_request.pop(event.request, None)

    # --- links

    def on_link_up(self, link: Link, now: float) -> None:
        self.disowned.on_link_up(link)
        for intake in [i for i in self.by_handoff.values() if i.link is link and i.state is _S.GREETING]:
            self._claim(intake, now)

    def on_link_down(self, link: Link, reason: Reason, detail: str, now: float) -> None:
        self.disowned.on_link_down(link)
        # Three kinds of handoff depend on a link, and each loses something different with it. Before a grant nothing
        # was promised: it is retried with another incarnation of the source, or over another transport (rules 3 and
        # 23), a bounded number of times. After it P's promise is gone, and with it every way to a verdict: it fails.
        # One that has already ended was waiting for Quiesced, which cannot come any more: only a fence proves the
        # writer's rest (rule 14).
        for intake in [i for i in self.by_handoff.values() if i.link is link]:
            again = _greets_again(link, reason) and intake.repeats.greetings < GREETINGS_MAX
            if again and intake.state in (_S.GREETING, _S.CLAIMING):
                intake.repeats.greetings += 1
                self.book.step(intake, _E.UNLINKED)
                intake.link = self.links.need(link.worker, now)
            elif intake.state is _S.JUDGING:
                pass  # its source has had its say; only our own ranks are waited for
            elif intake.end is None:
                self.fail(intake, reason, detail, now)
            elif intake.state is _S.REVOKING:
                self.links.fence(link, now)

    def on_link_fenced(self, link: Link, now: float) -> None:
        for intake in [i for i in self.by_handoff.values() if i.link is link and i.state is _S.REVOKING]:
            self.pushes.quiesced(intake, now)

    def is_idle(self, link: Link) -> bool:
        """Nothing is being taken over this link."""
        return not any(intake.link is link for intake in self.by_handoff.values())

    # --- messages

    def on_granted(self, link: Link, message: Granted, now: float) -> None:
        intake = self.book.of(link, message.attempt)
        if intake is None or intake.wanted.handoff != message.handoff or not self.book.step(intake, _E.GRANTED):
            self.desk.count("late.granted")
            if intake is None:
                self.disowned.on_granted(link, message)
            return
        assert link.plan is not None
        try:
            blocks = tuple(list(unpack_blocks(ids)) for ids in message.blocks)
            if message.tokens != intake.wanted.tokens:
                raise ProtocolError(Reason.CONTENT_MISMATCH, f"tokens: {message.tokens} at the source")
            source = Source(message.lease, message.tokens, blocks, message.progress, message.final)
            source.check(link.plan.source.groups)
            self._note_origins(link, message)
        except ProtocolError as error:
            self.fail(intake, error.reason, error.detail, now)
            return
        intake.source = source
        self.book.mark(intake.attempt, Step.GRANTED, now)
        self._remember_ttl(source, message.ttl_s)
        self.book.wait(intake, self.desk.settings.defer_timeout, now)
        self._pulse_renewal(intake, source, now)
        # Only now may the engine allocate blocks: if it did so for a P that has not started, two full engines could
        # wait for each other's (rule 12).
        if intake.target is not None:
            self._begin(intake, now)
        else:
            self.desk.emit(MatchFound(intake.wanted.request))

    def on_claim_refused(self, link: Link, message: ClaimRefused, now: float) -> None:
        intake = self.book.of(link, message.attempt)
        if intake is None or intake.state is not _S.CLAIMING:
            self.desk.count("late.claim_refused")
            return
        self.fail(intake, reason_of(message.reason), message.detail, now)

    def on_renewed(self, link: Link, message: Renewed, now: float) -> None:
        intake = self.book.reading(link, message.attempt)
        if intake is None or intake.source is None:
            return
        self._remember_ttl(intake.source, message.ttl_s)
        # P counts whatever it does for us, also where no Ready comes of it (a push in which bytes flow). A peer that
        # only answers has shown that it is alive, not that it makes progress: the transfer's deadline stays (rule 9).
        if message.work > intake.source.work:
            intake.source.work = message.work
            self.book.progressed(intake, now)

    def on_renew_refused(self, link: Link, message: RenewRefused, now: float) -> None:
        intake = self.book.reading(link, message.attempt)
        if intake is None or intake.source is None:
            return
        # A copy of what is all there goes on: its commit will be judged by the epochs, not by the lease.
        if intake.state is not _S.COPYING or not intake.source.final:
            self.fail(intake, reason_of(message.reason), f"the lease ended while {intake.state.value}", now)

    def on_source_lost(self, link: Link, message: SourceLost, now: float) -> None:
        intake = self.book.reading(link, message.attempt)
        if intake is not None:
            self.fail(intake, reason_of(message.reason), "the source's request ended early", now)

    # --- copies

    def on_copy_ended(self, intake: Intake, event: CopyEnded, now: float) -> None:
        if intake.state is _S.JUDGING:
            self.pushes.on_loan_ended(intake, event, now)
        elif intake.end is None and event.reason is not None:
            self.fail(intake, event.reason, event.detail, now)
        elif intake.end is None:
            if not intake.has_bytes:
                intake.has_bytes = True
                self.book.mark(intake.attempt, Step.FIRST_BYTE, now)
            self.book.progressed(intake, now)
            self.pulls.commit_if_copied(intake, now)
        self.book.rest(intake, now)
        if event.reason is not None:
            self.book.heal(intake.link, event.reason, now)

    def on_rest(self, intake: Intake, now: float) -> None:
        self.book.rest(intake, now)

    # --- time

    def on_deadline(self, handoff: HandoffId, now: float) -> None:
        intake = self.by_handoff[handoff]
        if intake.state is _S.REVOKING:
            self.links.fence(intake.link, now)
            return
        self.fail(intake, intake.waited_for, f"waited too long while {intake.state.value}", now)

    def on_pulse(self, handoff: HandoffId, now: float) -> None:
        intake = self.by_handoff[handoff]
        if intake.state is _S.CLAIMING:
            self._send_claim(intake, now)
        elif intake.state in RENEWING:
            self._renew(intake, now)
        elif intake.state is _S.COMMITTING:
            self.pulls.send_commit(intake, now)
        elif intake.state is _S.REVOKING:
            self.pushes.send_revoke(intake, now)

    # --- the one failure function

    def fail(self, intake: Intake, reason: Reason, detail: str, now: float, good_tokens: int = 0) -> None:
        """End a handoff as failed: tell the engine and the source, stop all copies, wait for rest."""
        # One entry point, because each failure owes the same to four parties: a reason to the engine, a message to the
        # source, an end to the copies, and patience until they have ended (rule 17). A second failure is ignored: the
        # first was reported.
        was = intake.state
        if intake.end is not None or not self.book.step(intake, _E.FAILED):
            self.desk.count("late.failure")
            return
        intake.end = End(reason, detail, good_tokens)
        self.book.tell_end(intake, now)
        self.desk.cancel(intake.parts)
        up = intake.link.state is LinkState.UP
        if was is _S.OFFERED:
            self.pushes.revoke(intake, now)
        elif up and reason is not Reason.STALE and was is not _S.GREETING:
            # Whatever P has heard of our claim, its seat is free from now on and not only when the lease runs out.
            # After Stale there is no seat any more: the verdict took it.
            self.links.send(intake.link, Abandon(intake.wanted.handoff, intake.attempt, reason))
        self.book.rest(intake, now)
        # What was never claimed is unknown to P, so there is nothing to abandon; but the ticket may be of a lease that
        # P holds, and would hold for its whole term (rule 22).
        if was is _S.GREETING and intake.link.state is not LinkState.DOWN:
            self._disown(intake.wanted, reason, now)

    @property
    def quarantined_blocks(self) -> int:
        """Blocks of ended handoffs that a transfer may still write to."""
        return sum(
            sum(map(len, intake.target.blocks))
            for intake in list(self.by_handoff.values())  # statistics read it too, on another thread
            if intake.end is not None and intake.target is not None
        )

    def void(self, now: float, granted_only: bool = False) -> None:
        """The engine's cache was replaced, or this node is leaving: no transfer is wanted any more."""
        for intake in list(self.by_handoff.values()):
            if intake.end is None and not (granted_only and intake.source is None):
                self.fail(intake, Reason.ABORTED, "this engine's cache was replaced or is closing", now)

    # --- helpers

    def _next_attempt(self) -> int:
        self._last_attempt += 1
        return self._last_attempt

    def _disown(self, wanted: Wanted, reason: Reason, now: float) -> None:
        """Never claimed, and never will be."""
        event = Disowned(wanted.handoff, wanted.source, wanted.ticket, wanted.digest, wanted.deferred, reason)
        self.disowned.on_disowned(event, now)

    def _check_room(self, event: Wanted) -> None:
        settings = self.desk.settings
        role = self.desk.identity.role_of(event.source)
        if not may(role, Act.GRANT):
            raise ProtocolError(Reason.FORBIDDEN, f"source: the key of {event.source} is for {role}")
        if event.handoff in self.by_handoff or event.request in self.by_request:
            raise ProtocolError(Reason.DUPLICATE, "transfer id: in use by another request of this engine")
        if len(self.by_handoff) >= settings.intakes_max:
            raise ProtocolError(Reason.BUSY, f"intakes_max: {len(self.by_handoff)} handoffs are on their way")
        if self.quarantined_blocks >= settings.quarantine_blocks_max:
            raise ProtocolError(Reason.QUARANTINE_FULL, f"quarantine_blocks_max: {self.quarantined_blocks} blocks")

    def _note_origins(self, link: Link, granted: Granted) -> None:
        """Before the engine may have a block of it: with the first that is cached, these are origins of our cache."""
        identity = self.desk.identity
        names = (identity.origin_of(link.worker), *(granted.origins if isinstance(granted, GrantedFrom) else ()))
        gone = next(filter(identity.is_gone, names), None)
        if gone is not None:
            name = gone.partition(" ")[0]
            raise ProtocolError(Reason.ORIGIN_GONE, f"origins: {name} is no longer a member that grants")
        me = identity.origin_of(identity.me.worker)
        self.desk.origins.note(name for name in names if name != me)

    def _claim(self, intake: Intake, now: float) -> None:
        # The ticket may be of another incarnation of the source than the link: only the source can tell which is newer.
        self.book.step(intake, _E.LINKED)
        self.book.mark(intake.attempt, Step.CLAIMED, now)
        self._send_claim(intake, now)

    def _send_claim(self, intake: Intake, now: float) -> None:
        wanted = intake.wanted
        claim = Claim(wanted.handoff, intake.attempt, wanted.ticket, wanted.digest, wanted.deferred)
        # A source that came back with an older release passes over the session's version; this it answers by Reset.
        unheard = intake.repeats.claims % CLAIMS_IN_VERSION == CLAIMS_IN_VERSION - 1
        intake.repeats.claims += 1
        self.links.send(intake.link, claim, self.desk.identity.versions.oldest if unheard else intake.link.version)
        self.book.pulse(intake, self.desk.settings.retry_s, now)

    def _renew(self, intake: Intake, now: float) -> None:
        source = intake.source
        assert source is not None
        if intake.state is _S.OFFERED and not intake.accepted:
            self.pushes.send_offer(intake)
        have = tuple(len(ids) for ids in source.blocks)
        final = source.final or intake.state is _S.OFFERED
        self.links.send(intake.link, Renew(source.lease, intake.attempt, have, final))
        self._pulse_renewal(intake, source, now)

    def _pulse_renewal(self, intake: Intake, source: Source, now: float) -> None:
        """Well before the lease ends; sooner while there is something to hear that may have been lost."""
        # A third of the term leaves room for two renewals to be lost. While the prompt grows, or our offer is
        # unconfirmed, a renewal also carries what we have, and so repairs a Ready, or an Offer, that was lost.
        eager = not source.final or (intake.state is _S.OFFERED and not intake.accepted)
        third_s = source.ttl_s / 3
        self.book.pulse(intake, min(self.desk.settings.retry_s, third_s) if eager else third_s, now)

    def _begin(self, intake: Intake, now: float) -> None:
        """P keeps its blocks and the engine has found its own: have them filled."""
        self.book.mark(intake.attempt, Step.ALLOCATED, now)
        if intake.wanted.push and self.pushes.is_possible(intake.link):
            self.pushes.begin(intake, now)
        else:
            self.pulls.begin(intake, now)

    def _remember_ttl(self, source: Source, ttl_s: float) -> None:
        """How long P holds the lease without a message from us; P's settings may differ from ours."""
        source.ttl_s = min(ttl_s, self.desk.settings.lease_s)


def _greets_again(link: Link, reason: Reason) -> bool:
    """Whether a peer is left to pair with after the loss of a link: another incarnation, or another transport."""
    return reason is Reason.WRONG_INCARNATION or (reason is Reason.UNREACHABLE and link.choice.fallback)
