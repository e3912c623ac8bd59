"""How D's blocks are filled: by pull or by push.

Pull: D copies behind what P has ready, and asks for a verdict on what it read.

Laws: D copies nothing before P's grant (rule 12) and nothing after its Commit was sent (rule 5): the verdict covers
every byte, or none. Of P's messages about its progress only the newest counts, whatever the order of arrival.

Push: D offers its blocks, and P writes into them until it sends Written, or Quiesced.

Laws: a reservation's number is never reused (rule 13). Offered blocks are released only after Written, Quiesced or a
fence of every rank (rule 14): a source that is unresponsive, or dead, may still be writing. Written is P's word: D
takes its loans back, and a handoff is delivered only if every rank says that all bytes due were written (rule 35).
"""

from __future__ import annotations

from kvbaton.protocol.effects import Direction, Step
from kvbaton.protocol.errors import ProtocolError, Reason, reason_of
from kvbaton.protocol.events import CopyEnded
from kvbaton.protocol.geometry.layout import GroupKind
from kvbaton.protocol.geometry.progress import covers, nothing
from kvbaton.protocol.geometry.spans import SpanSide
from kvbaton.protocol.ids import ReservationId
from kvbaton.protocol.legality import Act, may
from kvbaton.protocol.machines.context import Cargo, Route, due, moves, start
from kvbaton.protocol.machines.inbound import ConsumerBook, Fail, Intake, IntakeEvent, IntakeState, Source
from kvbaton.protocol.machines.pairing_state import Link, LinkState
from kvbaton.protocol.numbers import DURATION_S_MIN
from kvbaton.protocol.wire.codec import pack_blocks, unpack_blocks
from kvbaton.protocol.wire.messages import (
    Accepted,
    Ack,
    Commit,
    Committed,
    Feature,
    Offer,
    Quiesced,
    Ready,
    Revoke,
    Stale,
    Written,
)

_S, _E = IntakeState, IntakeEvent


class Pulls:
    """Handoffs that this node copies itself."""

    def __init__(self, book: ConsumerBook, fail: Fail) -> None:
        self.book = book
        self.desk = book.desk
        self._fail = fail

    def begin(self, intake: Intake, now: float) -> None:
        if self.book.step(intake, _E.PULL_BEGUN):
            assert intake.source is not None
            intake.source.copied = nothing(len(intake.source.blocks))
            self.book.wait(intake, self.desk.settings.transfer_timeout, now)
            try:
                self.read_on(intake, now)
            except ProtocolError as error:
                self._fail(intake, error.reason, error.detail, now)

    def read_on(self, intake: Intake, now: float) -> None:
        """Read what has become ready since the last time."""
        source, target, link = intake.source, intake.target, intake.link
        assert source is not None and target is not None
        assert link.plan is not None and link.peer is not None and link.transport is not None
        route = Route(link.plan, SpanSide.TARGET, link.peer, link.transport.name, link.transport.weaves)
        cargo = Cargo(source.blocks, target.blocks, source.tokens, target.first_token)
        listed = moves(route, cargo, source.copied, source.progress)
        source.copied = source.progress
        start(self.desk, intake.parts, route, listed)
        self.commit_if_copied(intake, now)

    def on_ready(self, link: Link, message: Ready, now: float) -> None:
        intake = self.book.reading(link, message.attempt)
        if intake is None or intake.source is None or message.lease != intake.source.lease:
            self.desk.count("late.ready")
            return
        try:
            if self._learn(link, intake.source, message):
                self.book.progressed(intake, now)
                if intake.state is _S.COPYING:
                    self.read_on(intake, now)
        except ProtocolError as error:
            self._fail(intake, error.reason, error.detail, now)

    def _learn(self, link: Link, source: Source, message: Ready) -> bool:
        """Apply what a Ready adds; False when it adds nothing or comes after one that was lost."""
        if not len(message.start) == len(message.blocks) == len(message.progress) == len(source.blocks):
            raise ProtocolError(Reason.BAD_MESSAGE, "ready: not one entry per group of the source")
        # All groups are checked before any is extended: a message with a gap in one group must leave no trace in the
        # others, or the next Renew would claim what was only half applied.
        fresh = []
        for mine, begin, packed in zip(source.blocks, message.start, message.blocks, strict=True):
            ids = unpack_blocks(packed)
            if begin > len(mine):
                return False  # a gap: the next Renew says how much we have
            fresh.append(ids[len(mine) - begin :])
        # Frames arrive in any order, and twice. What is ready stays ready (rule 10), so a smaller progress is an older
        # message that was overtaken, and not a failure.
        if not covers(message.progress, source.progress):
            return False
        changed = (message.final and not source.final) or message.progress != source.progress or any(fresh)
        for mine, ids in zip(source.blocks, fresh, strict=True):
            mine.extend(ids)
        source.progress, source.final = message.progress, source.final or message.final
        assert link.plan is not None
        source.check(link.plan.source.groups)
        return changed

    def commit_if_copied(self, intake: Intake, now: float) -> None:
        source = intake.source
        assert source is not None
        # An epoch that P reads after our last copy proves that copy (rules 6 and 8); read before, it would prove
        # nothing. So the Commit waits until every rank is at rest, not until every copy was started.
        if source.final and source.copied == source.progress and intake.parts.at_rest:
            self.book.step(intake, _E.COPIED)
            self.book.mark(intake.attempt, Step.COPIED, now)
            self.book.wait(intake, self.desk.settings.claim_timeout, now)
            self.send_commit(intake, now)

    def send_commit(self, intake: Intake, now: float) -> None:
        assert intake.source is not None
        self.book.links.send(intake.link, Commit(intake.source.lease, intake.attempt))
        self.book.pulse(intake, self.desk.settings.retry_s, now)

    def on_committed(self, link: Link, message: Committed, now: float) -> None:
        intake = self.book.of(link, message.attempt)
        if intake is None or not self.book.step(intake, _E.COMMITTED):
            self.desk.count("late.committed")
            return
        self.book.finish(intake, now)

    def on_stale(self, link: Link, message: Stale, now: float) -> None:
        intake = self.book.of(link, message.attempt)
        if intake is None or intake.state is not _S.COMMITTING:
            self.desk.count("late.stale")
            return
        assert link.plan is not None
        # The good prefix saves the engine a part of the prefill only where every token's KV is in the leading blocks
        # of one list. With several groups, or a window, what is good of one is no whole prefix of the prompt.
        good, group = 0, link.plan.source.groups[0]
        if len(message.good) == 1 and group.kind in (GroupKind.FULL, GroupKind.LATENT):
            good = min(message.good[0] * group.block_tokens, intake.wanted.tokens)
        why = f" ({reason_of(message.reason)})" if message.reason else ""
        self._fail(intake, Reason.STALE, f"the source's blocks were reused before the commit{why}", now, good)


class Pushes:
    """Handoffs whose blocks the source writes."""

    def __init__(self, book: ConsumerBook, fail: Fail) -> None:
        self.book = book
        self.desk = book.desk
        self._fail = fail
        self._last_reservation = 0

    def is_possible(self, link: Link) -> bool:
        """Otherwise the receiver copies (rule 16): P cannot or may not write, or D would not know what P wrote."""
        assert link.transport is not None
        writes = may(self.desk.identity.role_of(link.worker), Act.WRITE)
        return link.transport.takes_pushes and writes and bool(link.features & Feature.PUSH)

    def begin(self, intake: Intake, now: float) -> None:
        if self.book.step(intake, _E.PUSH_BEGUN):
            self._last_reservation += 1
            intake.reservation = ReservationId(self._last_reservation)
            self.book.by_reservation[intake.reservation] = intake
            self.book.wait(intake, self.desk.settings.transfer_timeout, now)
            self.book.mark(intake.attempt, Step.OFFERED, now)
            try:
                self._lend(intake)
            except ProtocolError as error:  # these blocks cannot hold this prompt; P would find the same
                self._fail(intake, error.reason, error.detail, now)
                return
            self.send_offer(intake)
            # It may be lost, and is made again with the next renewal, which nothing puts off: the lease runs on.
            assert intake.source is not None
            soon_s = max(min(self.desk.settings.retry_s, intake.source.ttl_s / 3), DURATION_S_MIN)
            self.desk.timers.hasten(("pulse", intake.wanted.handoff), now + soon_s)

    def _lend(self, intake: Intake) -> None:
        """Before the source is told of these blocks; revoked when the handoff ends, whatever the source says."""
        link, target = intake.link, intake.target
        assert link.transport is not None and link.peer is not None and target is not None
        assert link.plan is not None
        owed = due(link.plan, target.blocks, intake.wanted.tokens, target.first_token)
        self.desk.lend(intake.parts, link.transport, link.peer, Direction.WRITE, target.blocks, owed)

    def send_offer(self, intake: Intake) -> None:
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
        self.book.links.send(intake.link, offer)

    def on_accepted(self, link: Link, message: Accepted, now: float) -> None:
        intake = self.book.by_reservation.get(message.reservation)
        if intake is not None and intake.link is link:
            intake.accepted = True

    def on_written(self, link: Link, message: Written, now: float) -> None:
        # Acknowledged whatever we make of it: P repeats a Written until it is, and keeps its blocks pinned meanwhile.
        self.book.links.send(link, Ack(message.lease, message.attempt, message.reservation))
        intake = self.book.by_reservation.get(message.reservation)
        if intake is None or intake.link is not link or intake.attempt != message.attempt:
            self.desk.count("late.written")
            return
        if intake.end is None and message.digest != intake.wanted.digest:
            self._fail(intake, Reason.CONTENT_MISMATCH, "digest: the source wrote another prompt", now)
        if not self.book.step(intake, _E.WRITTEN):
            return
        if intake.end is None:
            # No new write is served from here on, and what is under way ends within a bounded time: what our ranks say
            # then is what there will ever be. Asked before, a late write could fall between answer and report.
            self.desk.timers.clear(("pulse", intake.wanted.handoff))
            self.book.wait(intake, self.desk.settings.transfer_timeout, now)
            self.desk.cancel(intake.parts)
            self._judge(intake, now)
        else:  # it crossed our Revoke, or wrote another prompt: only our own ranks are waited for now
            self.book.clear_timers(intake)
            self.book.rest(intake, now)

    def on_loan_ended(self, intake: Intake, event: CopyEnded, now: float) -> None:
        """While judging: a rank says how much of what was due has not been written."""
        if event.job in intake.parts.unproven:
            missing = "an unknown number" if event.unwritten is None else event.unwritten
            told = f"{intake.link.worker} said that it had written everything; {missing} of the bytes due never came"
            self._fail(intake, Reason.NOT_WRITTEN, told, now)
        else:
            self._judge(intake, now)

    def _judge(self, intake: Intake, now: float) -> None:
        if intake.parts.at_rest and self.book.step(intake, _E.JUDGED):
            self.book.mark(intake.attempt, Step.COPIED, now)
            self.book.finish(intake, now)

    def on_quiesced(self, link: Link, message: Quiesced, now: float) -> None:
        intake = self.book.by_reservation.get(message.reservation)
        if intake is None or intake.link is not link or intake.state is IntakeState.JUDGING:
            self.desk.count("late.quiesced")  # P answers an Offer that it has done with by Quiesced, also after Written
            return
        reason = Reason.SOURCE_ABORTED if message.reason is None else reason_of(message.reason)
        if intake.end is None:
            self._fail(intake, reason, "the source stopped writing", now)
        self.quiesced(intake, now)
        self.book.heal(link, reason, now)

    def quiesced(self, intake: Intake, now: float) -> None:
        """The source says that it has stopped, or was fenced."""
        self.book.step(intake, _E.QUIESCED)
        self.book.clear_timers(intake)  # only our own ranks are waited for now
        self.book.rest(intake, now)

    def revoke(self, intake: Intake, now: float) -> None:
        """Make the source stop. If it cannot be told, or does not answer in time, it is fenced."""
        if intake.link.state is LinkState.UP:
            self.send_revoke(intake, now)
            self.book.wait(intake, self.desk.settings.revoke_timeout, now)
        else:
            self.book.links.fence(intake.link, now)

    def send_revoke(self, intake: Intake, now: float) -> None:
        if intake.link.state is LinkState.UP:
            assert intake.source is not None and intake.end is not None and intake.end.reason is not None
            revoke = Revoke(intake.source.lease, intake.attempt, intake.reservation, intake.end.reason)
            self.book.links.send(intake.link, revoke)
            self.book.pulse(intake, self.desk.settings.retry_s, now)
