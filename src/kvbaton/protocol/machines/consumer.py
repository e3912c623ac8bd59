"""D's role: wants, claims, copies, commits; or offers, and is written to. All failures enter by `fail`.

Laws: every `Wanted` is followed by `MatchFound` or `MatchFailed`, unless its `Allocated` comes first; every `Allocated`
by exactly one `Report` and, when nothing can land in its blocks any more, exactly one `DropHold`. D copies nothing
before P's grant (rule 12) and nothing after its Commit was sent.
"""

from __future__ import annotations

from kvbaton.protocol.effects import Direction, DropHold, End, MatchFailed, MatchFound, Report
from kvbaton.protocol.errors import ProtocolError, Reason, reason_of
from kvbaton.protocol.events import Allocated, CopyEnded, Disowned, GaveUp, NotNeeded, TurnedAway, Wanted
from kvbaton.protocol.geometry.layout import Kind
from kvbaton.protocol.geometry.progress import nothing
from kvbaton.protocol.geometry.spans import Side
from kvbaton.protocol.ids import HandoffId, RequestId, ReservationId, WorkerId
from kvbaton.protocol.machines.context import Desk, Parts
from kvbaton.protocol.machines.disowned import DisownedTickets
from kvbaton.protocol.machines.inbound import INTAKE, WAITED_FOR, Intake, IntakeEvent, IntakeState, Source
from kvbaton.protocol.machines.movement import Cargo, Route, moves, start
from kvbaton.protocol.machines.pairing_state import Link, LinkState
from kvbaton.protocol.machines.pairing_target import Links
from kvbaton.protocol.machines.readiness import covers
from kvbaton.protocol.marks import Begun, Ended, Step
from kvbaton.protocol.marks import Side as Seen
from kvbaton.protocol.numbers import DURATION_S_MIN
from kvbaton.protocol.privileges import Act, may
from kvbaton.protocol.table import Verdict
from kvbaton.protocol.wire.codec import pack_blocks, unpack_blocks
from kvbaton.protocol.wire.messages import (
    Abandon,
    Accepted,
    Ack,
    Claim,
    ClaimRefused,
    Commit,
    Committed,
    Feature,
    Granted,
    Offer,
    Quiesced,
    Ready,
    Renew,
    Renewed,
    RenewRefused,
    Revoke,
    SourceLost,
    Stale,
    Written,
)

_S, _E = IntakeState, IntakeEvent
GREETINGS_MAX = 8
"""Of one handoff: more than there are data planes, and a source may have begun a new life meanwhile."""

CLAIMS_IN_VERSION = 4
"""So many claims, and the last of them in the oldest version that we speak; a Claim is the same in all of them."""

_RENEWING = (_S.GRANTED, _S.COPYING, _S.OFFERED)


class Consumer:
    """All handoffs on their way into this node."""

    def __init__(self, desk: Desk) -> None:
        self.desk = desk
        self.by_handoff: dict[HandoffId, Intake] = {}
        self.by_request: dict[RequestId, Intake] = {}
        self.by_attempt: dict[int, Intake] = {}
        self.by_reservation: dict[ReservationId, Intake] = {}
        self.links = Links(desk, self)
        self.disowned = DisownedTickets(desk, self.links, self._next_attempt, self.by_handoff.__contains__)
        self._last_attempt = 0
        self._last_reservation = 0

    # --- the engine

    def on_wanted(self, event: Wanted, now: float) -> None:
        self._next_attempt()
        begun = Begun(event.handoff, event.request, event.source, event.tokens, event.push, event.deferred, event.trace)
        self._mark(self._last_attempt, Step.ASKED, now, begun)
        try:
            self._check_room(event)
            link = self.links.need(event.source, now)
        except ProtocolError as error:
            self.desk.count(f"ends.{error.reason}")
            end = End(error.reason, error.detail)
            self.desk.emit(MatchFailed(event.request, end))
            self._mark(self._last_attempt, Step.ENDED, now, Ended(end))
            self._mark(self._last_attempt, Step.RESTED, now)
            self._disown(event, error.reason, now)
            return
        parts = Parts(None)
        intake = Intake(event, self._last_attempt, link, parts)
        parts.owner = intake
        self.by_handoff[event.handoff] = self.by_request[event.request] = self.by_attempt[intake.attempt] = intake
        settings = self.desk.settings
        self._wait(intake, settings.defer_timeout if event.deferred else settings.claim_timeout, now)
        if link.state is LinkState.UP:
            self._claim(intake, now)

    def on_turned_away(self, event: TurnedAway, now: float) -> None:
        """Refused at the door, so there is nothing to end; told all the same."""
        self._next_attempt()
        self.desk.count(f"turned_away.{event.reason}")
        begun = Begun(event.handoff, event.request, WorkerId(""), 0, trace=event.trace)
        self._mark(self._last_attempt, Step.ASKED, now, begun)
        self._mark(self._last_attempt, Step.ENDED, now, Ended(End(event.reason, event.detail)))
        self._mark(self._last_attempt, Step.RESTED, now)

    def on_allocated(self, event: Allocated, now: float) -> None:
        intake = self.by_request.get(event.request)
        if intake is None or intake.end is not None:
            # The handoff ended while the engine was finding blocks: its load still needs its one report.
            end = intake.end if intake is not None and intake.end is not None else End(Reason.ABORTED, "not wanted")
            self.by_request.pop(event.request, None)
            self.desk.emit(Report(event.request, end))
            self.desk.emit(DropHold(event.request, intake.wanted.handoff if intake else HandoffId("")))
            return
        intake.target = event
        intake.hard_deadline = now + self.desk.settings.max_hold_s
        if intake.state in (_S.GREETING, _S.CLAIMING):
            self._wait(intake, intake.deadline - now, now)  # P's answer, which is on its way, begins it
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
        for intake in [i for i in self.by_handoff.values() if i.link is link]:
            again = _greets_again(link, reason) and intake.greetings < GREETINGS_MAX
            if again and intake.state in (_S.GREETING, _S.CLAIMING):
                intake.greetings += 1
                # Nothing was granted yet: greet whoever is there now; the ticket decides whether it will do.
                self._step(intake, _E.UNLINKED)
                intake.link = self.links.need(link.worker, now)
            elif intake.end is None:
                self.fail(intake, reason, detail, now)
            elif intake.state is _S.REVOKING:
                self.links.fence(link, now)

    def on_link_fenced(self, link: Link, now: float) -> None:
        for intake in [i for i in self.by_handoff.values() if i.link is link and i.state is _S.REVOKING]:
            self._quiesced(intake, now)

    def is_idle(self, link: Link) -> bool:
        """Nothing is being taken over this link."""
        return not any(intake.link is link for intake in self.by_handoff.values())

    # --- messages

    def on_granted(self, link: Link, message: Granted, now: float) -> None:
        intake = self._of(link, message.attempt)
        if intake is None or intake.wanted.handoff != message.handoff or not self._step(intake, _E.GRANTED):
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
        except ProtocolError as error:
            self.fail(intake, error.reason, error.detail, now)
            return
        intake.source = source
        self._mark(intake.attempt, Step.GRANTED, now)
        self._remember_ttl(source, message.ttl_s)
        self._wait(intake, self.desk.settings.defer_timeout, now)
        self._pulse_renewal(intake, source, now)
        if intake.target is not None:
            self._begin(intake, now)
        else:
            self.desk.emit(MatchFound(intake.wanted.request))

    def on_claim_refused(self, link: Link, message: ClaimRefused, now: float) -> None:
        intake = self._of(link, message.attempt)
        if intake is None or intake.state is not _S.CLAIMING:
            self.desk.count("late.claim_refused")
            return
        self.fail(intake, reason_of(message.reason), message.detail, now)

    def on_ready(self, link: Link, message: Ready, now: float) -> None:
        intake = self._reading(link, message.attempt)
        if intake is None or intake.source is None or message.lease != intake.source.lease:
            self.desk.count("late.ready")
            return
        try:
            if self._learn(link, intake.source, message):
                self._progressed(intake, now)
                if intake.state is _S.COPYING:
                    self._read_on(intake, now)
        except ProtocolError as error:
            self.fail(intake, error.reason, error.detail, now)

    def on_renewed(self, link: Link, message: Renewed, now: float) -> None:
        intake = self._reading(link, message.attempt)
        if intake is None or intake.source is None:
            return
        self._remember_ttl(intake.source, message.ttl_s)
        if message.work > intake.source.work:
            intake.source.work = message.work
            self._progressed(intake, now)

    def on_renew_refused(self, link: Link, message: RenewRefused, now: float) -> None:
        intake = self._reading(link, message.attempt)
        if intake is None or intake.source is None:
            return
        # A copy of what is all there goes on: its commit will be judged by the epochs, not by the lease.
        if intake.state is not _S.COPYING or not intake.source.final:
            self.fail(intake, reason_of(message.reason), f"the lease ended while {intake.state.value}", now)

    def on_committed(self, link: Link, message: Committed, now: float) -> None:
        intake = self._of(link, message.attempt)
        if intake is None or not self._step(intake, _E.COMMITTED):
            self.desk.count("late.committed")
            return
        self._finish(intake, End(), now)

    def on_stale(self, link: Link, message: Stale, now: float) -> None:
        intake = self._of(link, message.attempt)
        if intake is None or intake.state is not _S.COMMITTING:
            self.desk.count("late.stale")
            return
        assert link.plan is not None
        good, group = 0, link.plan.source.groups[0]
        if len(message.good) == 1 and group.kind in (
            Kind.FULL,
            Kind.LATENT,
        ):  # with several, or a window, none is whole
            good = min(message.good[0] * group.block_tokens, intake.wanted.tokens)
        why = f" ({reason_of(message.reason)})" if message.reason else ""
        self.fail(intake, Reason.STALE, f"the source's blocks were reused before the commit{why}", now, good)

    def on_source_lost(self, link: Link, message: SourceLost, now: float) -> None:
        intake = self._reading(link, message.attempt)
        if intake is not None:
            self.fail(intake, reason_of(message.reason), "the source's request ended early", now)

    def on_accepted(self, link: Link, message: Accepted, now: float) -> None:
        intake = self.by_reservation.get(message.reservation)
        if intake is not None and intake.link is link:
            intake.accepted = True

    def on_written(self, link: Link, message: Written, now: float) -> None:
        self.links.send(link, Ack(message.lease, message.attempt, message.reservation))
        intake = self.by_reservation.get(message.reservation)
        if intake is None or intake.link is not link or intake.attempt != message.attempt:
            self.desk.count("late.written")
            return
        if intake.end is None and message.digest != intake.wanted.digest:
            self.fail(intake, Reason.CONTENT_MISMATCH, "digest: the source wrote another prompt", now)
        self._step(intake, _E.WRITTEN)
        if intake.end is None:
            self._mark(intake.attempt, Step.COPIED, now)
            self._finish(intake, End(), now)
        else:  # it crossed our Revoke, or wrote another prompt: only our own ranks are waited for now
            self._clear_timers(intake)
        self._rest(intake, now)

    def on_quiesced(self, link: Link, message: Quiesced, now: float) -> None:
        intake = self.by_reservation.get(message.reservation)
        if intake is None or intake.link is not link:
            self.desk.count("late.quiesced")
            return
        reason = Reason.SOURCE_ABORTED if message.reason is None else reason_of(message.reason)
        if intake.end is None:
            self.fail(intake, reason, "the source stopped writing", now)
        self._quiesced(intake, now)
        self._heal(link, reason, now)

    # --- copies

    def on_copy_ended(self, intake: Intake, event: CopyEnded, now: float) -> None:
        if intake.end is None and event.reason is not None:
            self.fail(intake, event.reason, event.detail, now)
        elif intake.end is None:
            if not intake.has_bytes:
                intake.has_bytes = True
                self._mark(intake.attempt, Step.FIRST_BYTE, now)
            self._progressed(intake, now)
            self._commit_if_copied(intake, now)
        self._rest(intake, now)
        if event.reason is not None:
            self._heal(intake.link, event.reason, now)

    def _heal(self, link: Link, reason: Reason, now: float) -> None:
        """The data planes no longer know each other (one side was fenced or closed): pair anew at the next need."""
        if reason is Reason.PEER_UNKNOWN:
            self.links.lose(link, Reason.PEER_GONE, "the data planes no longer know each other", now)
        elif reason is Reason.UNREACHABLE and link.fallback:
            link.worn = True
            self._let_go(link, now)

    def _let_go(self, link: Link, now: float) -> None:
        """What has all its bytes needs only the answer to its commit; nothing else has a use for a shut plane."""
        if link.worn and not any(i.link is link and i.state is _S.COMMITTING for i in self.by_handoff.values()):
            self.links.avoid(link, "a copy found the data plane shut", now)

    def on_rest(self, intake: Intake, now: float) -> None:
        self._rest(intake, now)

    # --- time

    def on_deadline(self, handoff: HandoffId, now: float) -> None:
        intake = self.by_handoff[handoff]
        if intake.state is _S.REVOKING:
            self.links.fence(intake.link, now)
            return
        reason = WAITED_FOR[intake.state]
        if reason is Reason.CLAIM_TIMEOUT and intake.wanted.deferred:
            reason = Reason.DEFER_TIMEOUT
        self.fail(intake, reason, f"waited too long while {intake.state.value}", now)

    def on_pulse(self, handoff: HandoffId, now: float) -> None:
        intake = self.by_handoff[handoff]
        if intake.state is _S.CLAIMING:
            self._send_claim(intake, now)
        elif intake.state in _RENEWING:
            self._renew(intake, now)
        elif intake.state is _S.COMMITTING:
            self._send_commit(intake, now)
        elif intake.state is _S.REVOKING:
            self._send_revoke(intake, now)

    # --- the one failure function

    def fail(self, intake: Intake, reason: Reason, detail: str, now: float, good_tokens: int = 0) -> None:
        """End a handoff as failed: tell the engine and the source, stop what moves, wait for rest."""
        was = intake.state
        if intake.end is not None or not self._step(intake, _E.FAILED):
            self.desk.count("late.failure")
            return
        intake.end = End(reason, detail, good_tokens)
        self._tell_end(intake, now)
        self.desk.cancel(intake.parts)
        up = intake.link.state is LinkState.UP
        if was is _S.OFFERED:
            if up:
                self._send_revoke(intake, now)
                self._wait(intake, self.desk.settings.revoke_timeout, now)
            else:
                self.links.fence(intake.link, now)
        elif up and reason is not Reason.STALE and was is not _S.GREETING:
            self.links.send(intake.link, Abandon(intake.wanted.handoff, intake.attempt, reason))
        self._rest(intake, now)
        if was is _S.GREETING and intake.link.state is not LinkState.DOWN:
            self._disown(intake.wanted, reason, now)

    @property
    def quarantined_blocks(self) -> int:
        """Blocks of ended handoffs that something may still write to."""
        return sum(
            sum(map(len, intake.target.blocks))
            for intake in list(self.by_handoff.values())  # also read by whoever shows statistics, on another thread
            if intake.end is not None and intake.target is not None
        )

    def void(self, now: float) -> None:
        """The engine's cache was replaced, or this node is leaving: nothing that is on its way is wanted."""
        for intake in list(self.by_handoff.values()):
            if intake.end is None:
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

    def _mark(self, attempt: int, step: Step, now: float, what: Begun | Ended | None = None) -> None:
        self.desk.mark(Seen.DECODE, attempt, step, now, what)

    def _step(self, intake: Intake, event: IntakeEvent) -> bool:
        state = INTAKE.step(intake.state, event)
        if isinstance(state, Verdict):
            self.desk.count(f"{state.value}.intake")
            return False
        intake.state = state
        return True

    def _of(self, link: Link, attempt: int) -> Intake | None:
        intake = self.by_attempt.get(attempt)
        return intake if intake is not None and intake.link is link else None

    def _reading(self, link: Link, attempt: int) -> Intake | None:
        intake = self._of(link, attempt)
        return intake if intake is not None and intake.state in _RENEWING else None

    def _may_be_written_to(self, link: Link) -> bool:
        """Where the sender cannot be fenced, or cannot push, the receiver copies (rule 16)."""
        assert link.transport is not None
        return link.transport.can_write and link.transport.can_fence and bool(link.features & Feature.PUSH)

    def _wait(self, intake: Intake, seconds: float, now: float) -> None:
        intake.deadline = now + seconds
        if intake.hard_deadline and intake.end is None:
            intake.deadline = min(intake.deadline, intake.hard_deadline)
        self.desk.timers.set(("intake", intake.wanted.handoff), intake.deadline)

    def _pulse(self, intake: Intake, seconds: float, now: float) -> None:
        self.desk.timers.set(("pulse", intake.wanted.handoff), now + max(seconds, DURATION_S_MIN))

    def _progressed(self, intake: Intake, now: float) -> None:
        if intake.state in (_S.COPYING, _S.OFFERED):
            self._wait(intake, self.desk.settings.transfer_timeout, now)

    def _claim(self, intake: Intake, now: float) -> None:
        # The ticket may be of another life of the source than the link: only the source can tell which is the newer.
        self._step(intake, _E.LINKED)
        self._mark(intake.attempt, Step.CLAIMED, now)
        self._send_claim(intake, now)

    def _send_claim(self, intake: Intake, now: float) -> None:
        wanted = intake.wanted
        claim = Claim(wanted.handoff, intake.attempt, wanted.ticket, wanted.digest, wanted.deferred)
        # A source that came back with an older release passes over the session's version; this it answers by Reset.
        unheard = intake.claims % CLAIMS_IN_VERSION == CLAIMS_IN_VERSION - 1
        intake.claims += 1
        self.links.send(intake.link, claim, self.desk.identity.versions.oldest if unheard else intake.link.version)
        self._pulse(intake, self.desk.settings.retry_s, now)

    def _renew(self, intake: Intake, now: float) -> None:
        source = intake.source
        assert source is not None
        if intake.state is _S.OFFERED and not intake.accepted:
            self._send_offer(intake)
        have = tuple(len(ids) for ids in source.blocks)
        final = source.final or intake.state is _S.OFFERED
        self.links.send(intake.link, Renew(source.lease, intake.attempt, have, final))
        self._pulse_renewal(intake, source, now)

    def _pulse_renewal(self, intake: Intake, source: Source, now: float) -> None:
        """Well before the lease ends; sooner while there is something to hear that may have been lost."""
        eager = not source.final or (intake.state is _S.OFFERED and not intake.accepted)
        third_s = source.ttl_s / 3
        self._pulse(intake, min(self.desk.settings.retry_s, third_s) if eager else third_s, now)

    def _begin(self, intake: Intake, now: float) -> None:
        """P keeps its blocks and the engine has found its own: have them filled."""
        self._mark(intake.attempt, Step.ALLOCATED, now)
        if intake.wanted.push and self._may_be_written_to(intake.link):
            self._offer(intake, now)
        else:
            self._pull(intake, now)

    def _pull(self, intake: Intake, now: float) -> None:
        if self._step(intake, _E.PULL_BEGUN):
            assert intake.source is not None
            intake.copied = nothing(len(intake.source.blocks))
            self._wait(intake, self.desk.settings.transfer_timeout, now)
            try:
                self._read_on(intake, now)
            except ProtocolError as error:
                self.fail(intake, error.reason, error.detail, now)

    def _read_on(self, intake: Intake, now: float) -> None:
        """Read what has become ready since the last time."""
        source, target, link = intake.source, intake.target, intake.link
        assert source is not None and target is not None
        assert link.plan is not None and link.peer is not None and link.transport is not None
        route = Route(link.plan, Side.TARGET, link.peer, link.transport.name, link.transport.weaves)
        cargo = Cargo(source.blocks, target.blocks, source.tokens, target.first_token)
        listed = moves(route, cargo, intake.copied, source.progress)
        intake.copied = source.progress
        start(self.desk, intake.parts, route, listed)
        self._commit_if_copied(intake, now)

    def _commit_if_copied(self, intake: Intake, now: float) -> None:
        source = intake.source
        assert source is not None
        if source.final and intake.copied == source.progress and intake.parts.at_rest:
            self._step(intake, _E.COPIED)
            self._mark(intake.attempt, Step.COPIED, now)
            self._wait(intake, self.desk.settings.claim_timeout, now)
            self._send_commit(intake, now)

    def _send_commit(self, intake: Intake, now: float) -> None:
        assert intake.source is not None
        self.links.send(intake.link, Commit(intake.source.lease, intake.attempt))
        self._pulse(intake, self.desk.settings.retry_s, now)

    def _remember_ttl(self, source: Source, ttl_s: float) -> None:
        """How long P keeps the lease without a sign of us; P's settings may differ from ours."""
        source.ttl_s = min(ttl_s, self.desk.settings.lease_s)

    def _learn(self, link: Link, source: Source, message: Ready) -> bool:
        """Take over what a Ready adds; False when it adds nothing or comes after one that was lost."""
        if not len(message.start) == len(message.blocks) == len(message.progress) == len(source.blocks):
            raise ProtocolError(Reason.BAD_MESSAGE, "ready: not one entry per group of the source")
        fresh = []
        for mine, begin, packed in zip(source.blocks, message.start, message.blocks, strict=True):
            ids = unpack_blocks(packed)
            if begin > len(mine):
                return False  # a gap: the next Renew says how much we have
            fresh.append(ids[len(mine) - begin :])
        if not covers(message.progress, source.progress):
            return False  # overtaken by a later one
        changed = (message.final and not source.final) or message.progress != source.progress or any(fresh)
        for mine, ids in zip(source.blocks, fresh, strict=True):
            mine.extend(ids)
        source.progress, source.final = message.progress, source.final or message.final
        assert link.plan is not None
        source.check(link.plan.source.groups)
        return changed

    def _offer(self, intake: Intake, now: float) -> None:
        if self._step(intake, _E.PUSH_BEGUN):
            self._last_reservation += 1
            intake.reservation = ReservationId(self._last_reservation)
            self.by_reservation[intake.reservation] = intake
            self._wait(intake, self.desk.settings.transfer_timeout, now)
            self._mark(intake.attempt, Step.OFFERED, now)
            self._lend(intake)
            self._send_offer(intake)
            # It may be lost, and is made again with the next renewal, which nobody puts off: the lease runs on.
            assert intake.source is not None
            soon_s = max(min(self.desk.settings.retry_s, intake.source.ttl_s / 3), DURATION_S_MIN)
            self.desk.timers.hasten(("pulse", intake.wanted.handoff), now + soon_s)

    def _lend(self, intake: Intake) -> None:
        """Before the source is told of these blocks; taken back when the handoff ends, whatever the source says."""
        link, target = intake.link, intake.target
        assert link.transport is not None and link.peer is not None and target is not None
        self.desk.lend(intake.parts, link.transport, link.peer, Direction.WRITE, target.blocks)

    def _send_offer(self, intake: Intake) -> None:
        assert intake.source is not None and intake.target is not None
        blocks = tuple(pack_blocks(ids) for ids in intake.target.blocks)
        offer = Offer(
            intake.source.lease,
            intake.attempt,
            intake.reservation,
            intake.target.first_token,
            blocks,
            intake.wanted.digest,
        )
        self.links.send(intake.link, offer)

    def _send_revoke(self, intake: Intake, now: float) -> None:
        if intake.link.state is LinkState.UP:
            assert intake.source is not None and intake.end is not None and intake.end.reason is not None
            revoke = Revoke(intake.source.lease, intake.attempt, intake.reservation, intake.end.reason)
            self.links.send(intake.link, revoke)
            self._pulse(intake, self.desk.settings.retry_s, now)

    def _quiesced(self, intake: Intake, now: float) -> None:
        self._step(intake, _E.QUIESCED)
        self._clear_timers(intake)  # only our own ranks are waited for now
        self._rest(intake, now)

    def _clear_timers(self, intake: Intake) -> None:
        self.desk.timers.clear(("intake", intake.wanted.handoff))
        self.desk.timers.clear(("pulse", intake.wanted.handoff))

    def _finish(self, intake: Intake, end: End, now: float) -> None:
        intake.end = end
        self._tell_end(intake, now)
        self.desk.cancel(intake.parts)  # what was lent; nothing of our own moves any more
        self._rest(intake, now)

    def _tell_end(self, intake: Intake, now: float) -> None:
        end = intake.end
        assert end is not None
        self.desk.count(f"ends.{end.reason or 'delivered'}")
        self._mark(intake.attempt, Step.ENDED, now, intake.ended(end))
        self._clear_timers(intake)
        if intake.target is not None:
            self.desk.emit(Report(intake.wanted.request, end))
            self.by_request.pop(intake.wanted.request, None)
        else:
            self.desk.emit(MatchFailed(intake.wanted.request, end))

    def _rest(self, intake: Intake, now: float) -> None:
        """Let go of everything once nothing can touch D's blocks any more."""
        if intake.state is not _S.SETTLING or not intake.parts.at_rest or not self._step(intake, _E.RESTED):
            return
        self._mark(intake.attempt, Step.RESTED, now)
        handoff = intake.wanted.handoff
        del self.by_handoff[handoff], self.by_attempt[intake.attempt]
        self.by_reservation.pop(intake.reservation, None)
        self._clear_timers(intake)
        if intake.target is not None:
            self.desk.emit(DropHold(intake.wanted.request, handoff))
        self._let_go(intake.link, now)


def _greets_again(link: Link, reason: Reason) -> bool:
    """Whether the loss of a link leaves somebody worth greeting: another life, or another data plane."""
    return reason is Reason.WRONG_INCARNATION or (reason is Reason.UNREACHABLE and link.fallback)
