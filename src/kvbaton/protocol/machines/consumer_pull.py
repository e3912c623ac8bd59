"""Pull: D copies behind what P has ready, and asks for a verdict on what it read.

Laws: D copies nothing before P's grant (rule 12) and nothing after its Commit was sent (rule 5): the verdict covers
every byte, or none. Of P's messages about its progress only the newest counts, whatever the order of arrival.
"""

from __future__ import annotations

from kvbaton.protocol.errors import ProtocolError, Reason, reason_of
from kvbaton.protocol.geometry.layout import GroupKind
from kvbaton.protocol.geometry.progress import covers, nothing
from kvbaton.protocol.geometry.spans import SpanSide
from kvbaton.protocol.machines.consumer_book import ConsumerBook, Fail
from kvbaton.protocol.machines.inbound import Intake, IntakeEvent, IntakeState, Source
from kvbaton.protocol.machines.movement import Cargo, Route, moves, start
from kvbaton.protocol.machines.pairing_state import Link
from kvbaton.protocol.marks import Step
from kvbaton.protocol.wire.codec import unpack_blocks
from kvbaton.protocol.wire.messages import Commit, Committed, Ready, Stale

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
