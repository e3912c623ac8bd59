"""P's role: leases start, grow, are renewed and end; commits are judged. Claims: `claims.py`; push: `push_writer.py`.

Laws: a lease is found by its handoff id only while it is held; once released it is a tombstone that judges commits and
refuses everything else. A discarded handoff is never leased; one that is being read ends with its reader.
"""

from __future__ import annotations

from kvbaton.protocol.bounded import Held, PerPeer, Remembered
from kvbaton.protocol.effects import Begun, Direction, End, Ended, Step, Unpin
from kvbaton.protocol.effects import Side as Seen
from kvbaton.protocol.errors import ProtocolError, Reason, reason_of
from kvbaton.protocol.events import (
    Discarded,
    LeaseBegun,
    LeaseCompleted,
    LeaseExtended,
    LeaseProgressed,
    SourceEnded,
)
from kvbaton.protocol.geometry.progress import covers
from kvbaton.protocol.ids import HandoffId, LeaseId, PeerId, Reader, WorkerId
from kvbaton.protocol.legality import Verdict
from kvbaton.protocol.machines.claims import Claims, Parked
from kvbaton.protocol.machines.context import LedgerContext
from kvbaton.protocol.machines.lease import (
    LEASE,
    READER,
    Lease,
    LeaseEvent,
    LeaseState,
    ReaderEvent,
    ReaderState,
    Seat,
    Term,
    judge,
    new_lease,
)
from kvbaton.protocol.machines.pairing_state import Session
from kvbaton.protocol.machines.push_writer import Writer
from kvbaton.protocol.numbers import TERM_S_MIN
from kvbaton.protocol.wire.codec import pack_blocks
from kvbaton.protocol.wire.messages import (
    Abandon,
    Commit,
    Committed,
    Message,
    Ready,
    Renew,
    Renewed,
    RenewRefused,
    SourceLost,
    Stale,
)

_SEEN = {ReaderEvent.PROVEN: Step.COMMITTED, ReaderEvent.DISPROVEN: Step.STALE, ReaderEvent.LEFT: Step.LEFT}


class Producer:
    """All leases of this node."""

    def __init__(self, desk: LedgerContext) -> None:
        self.desk = desk
        self.leases: dict[LeaseId, Lease] = {}
        self.by_handoff: dict[HandoffId, Lease] = {}
        self.tombstones: Remembered[LeaseId, Lease] = Remembered(desk.settings.tombstones_max)
        self.ended: Remembered[HandoffId, Reason] = Remembered(desk.settings.tombstones_max)
        self.held = Held()
        self.claims = Claims(desk, self)
        self.writer = Writer(desk, self)
        self.draining = False
        self.leaving = False

    @property
    def parked(self) -> PerPeer[Parked]:
        """Claims that came before their lease."""
        return self.claims.parked

    # --- the engine

    def on_begun(self, event: LeaseBegun, now: float) -> None:
        settings = self.desk.settings
        full = len(self.leases) >= settings.leases_max
        begun = Begun(
            event.handoff, event.request, event.target, event.tokens, deferred=event.deferred, trace=event.trace
        )
        self._mark(event.lease, Step.BEGUN, now, begun, "kept for the next turn" if event.keep_s else "")
        if full or event.handoff in self.by_handoff or event.lease in self.leases:
            self._refuse_lease(event, Reason.BUSY if full else Reason.DUPLICATE, now)
            return
        if self.ended.get(event.handoff) is Reason.DISCARDED:
            self._refuse_lease(event, Reason.DISCARDED, now)
            return
        if event.keep_s and self.draining:
            self._refuse_lease(event, Reason.DRAINING, now)
            return
        hold_until = now + settings.max_hold_s
        first_s = settings.defer_timeout if event.deferred else settings.lease_s
        term = Term(hold_until, min(now + first_s, hold_until))
        if event.keep_s:
            term = Term(hold_until + event.keep_s, now + event.keep_s, is_turn=True)
            self.desk.count("turns.kept")
        lease = new_lease(event, len(self.desk.identity.layout.ranks), term)
        self.leases[lease.id] = self.by_handoff[lease.handoff] = lease
        self.desk.timers.set(("lease", lease.id), term.claimable_until)
        self.desk.count("leases")
        self.claims.on_begun(lease, now)

    def on_extended(self, event: LeaseExtended, now: float) -> None:
        lease = self.leases.get(event.lease)
        if lease is None or self._step(lease, LeaseEvent.EXTENDED) is None:
            return
        for mine, ids in zip((*lease.blocks, *lease.epochs), (*event.blocks, *event.epochs), strict=True):
            mine.extend(ids)

    def on_progressed(self, event: LeaseProgressed, now: float) -> None:
        lease = self.leases.get(event.lease)
        if lease is None or not covers(event.progress, lease.ranks[event.rank]):
            # A rank's own progress of a layer may arrive after the engine's of the whole chunk. Announced progress
            # stays: D may be reading by it (rule 30).
            return
        before = lease.progress, lease.final
        lease.ranks[event.rank] = event.progress
        if (lease.progress, lease.final) != before:
            if lease.final:
                self._mark(lease.id, Step.COMPLETE, now)
            self._tell_ready(lease, now)

    def on_completed(self, event: LeaseCompleted, now: float) -> None:
        lease = self.leases.get(event.lease)
        if lease is None or self._step(lease, LeaseEvent.COMPLETED) is None:
            return
        lease.completed = True
        if lease.final:
            self._mark(lease.id, Step.COMPLETE, now)
            self._tell_ready(lease, now)

    def on_source_ended(self, event: SourceEnded, now: float) -> None:
        lease = self.leases.get(event.lease)
        if lease is None or lease.final or lease.state is LeaseState.CLOSING:
            return
        for reader, seat in lease.seats.items():
            if seat.state is ReaderState.LIVE:
                self.tell(reader.peer, seat, SourceLost(lease.id, reader.attempt, event.reason))
        self.close(lease, event.reason, now)

    # --- readers

    def on_renew(self, session: Session, message: Renew, now: float) -> None:
        reader = Reader(session.peer, message.attempt)
        lease = self.leases.get(message.lease)
        seat = lease.seats.get(reader) if lease is not None else None
        if lease is None or seat is None or seat.state is not ReaderState.LIVE or lease.state is LeaseState.CLOSING:
            session.send(self.desk, RenewRefused(message.lease, message.attempt, self.why_over(message.lease, reader)))
            return
        # D says how much it knows, so a lost Ready is sent again from there: renewals are the retry of the stream, and
        # P need not remember which of its messages arrived.
        ttl_s = self.extend(lease, now)
        session.send(self.desk, Renewed(lease.id, message.attempt, ttl_s, seat.work))
        if not message.final and len(message.have) == len(lease.blocks):
            session.send(self.desk, self._ready(lease, reader, message.have))

    def on_commit(self, session: Session, message: Commit, now: float) -> None:
        reader = Reader(session.peer, message.attempt)
        lease = self.leases.get(message.lease) or self.tombstones.get(message.lease)
        seat = lease.seats.get(reader) if lease is not None else None
        if lease is None or seat is None:
            # Forgotten, or never ours. What P cannot prove is stale: that costs a prefill, and no wrong answer.
            self.desk.count("commits.unknown")
            session.send(self.desk, Stale(message.lease, message.attempt, (), Reason.UNKNOWN_LEASE))
            return
        # Judged once, by the epochs as they are now and not by the lease's state (rule 6): D's copy ended before it
        # asked, so an epoch that has not changed by now proves it, even after the lease has expired (GONE). The verdict
        # is final, because a reader never copies after its Commit (rule 5); asked again, the lost answer is repeated.
        if seat.state in (ReaderState.LIVE, ReaderState.GONE):
            proven, seat.good = self._judge(lease)
            self.leave(lease, reader, ReaderEvent.PROVEN if proven else ReaderEvent.DISPROVEN, now)
            self.desk.count("commits.good" if proven else "commits.stale")
        if seat.state is ReaderState.COMMITTED:
            session.send(self.desk, Committed(message.lease, message.attempt))
        else:
            why = self.ended.get(lease.handoff) or Reason.STALE
            session.send(self.desk, Stale(message.lease, message.attempt, seat.good, why))

    def on_abandon(self, session: Session, message: Abandon, now: float) -> None:
        reader = Reader(session.peer, message.attempt)
        self.claims.leave(reader, message.reason)
        lease = self.by_handoff.get(message.handoff)
        if lease is not None and reader in lease.seats:
            self.given_up(lease, reader, message.reason)
            self.leave(lease, reader, ReaderEvent.LEFT, now)

    def why_over(self, id: LeaseId, reader: Reader) -> Reason:
        """Why a lease is no longer that reader's: the message that said so may be lost, or come later than this."""
        lease = self.leases.get(id) or self.tombstones.get(id)
        if lease is None or reader not in lease.seats or self.by_handoff.get(lease.handoff) is lease:
            return Reason.UNKNOWN_LEASE
        return lease.traffic.why_over or Reason.LEASE_EXPIRED

    def given_up(self, lease: Lease, reader: Reader, reason: str) -> None:
        """A reader leaves, and says why: counted for operators."""
        seat = lease.seats[reader]
        if seat.state is ReaderState.LIVE:
            seat.why = reason
            self.desk.count(f"abandoned.{reason_of(reason) if reason else 'unsaid'}")

    def on_session_ended(self, session: Session, now: float) -> None:
        self.claims.drop_session(session)
        for lease in list(self.leases.values()):
            for reader, seat in list(lease.seats.items()):
                if seat.session == session.number:
                    self.leave(lease, reader, ReaderEvent.LEFT, now)
        self.writer.on_session_ended(session, now)

    def is_idle(self, session: Session) -> bool:
        """No reader of that session reads, waits or is written to."""
        return not self.claims.waits_in(session) and not any(
            seat.session == session.number and seat.state is ReaderState.LIVE
            for lease in self.leases.values()
            for seat in lease.seats.values()
        )

    @property
    def restless_blocks(self) -> int:
        """Blocks of leases that are over, but that a write may still read from."""
        over = (lease for lease in self.leases.values() if lease.state is LeaseState.CLOSING)
        return sum(len(ids) for lease in over if not self.writer.at_rest(lease) for ids in lease.blocks)

    def on_departed(self, worker: WorkerId, now: float) -> None:
        """Leases for that worker only that are not being read will not be read."""
        for lease in list(self.leases.values()):
            live = any(seat.state is ReaderState.LIVE for seat in lease.seats.values())
            if lease.target == worker and not live:
                self.close(lease, Reason.PEER_GONE, now)

    def on_discarded(self, event: Discarded, now: float) -> None:
        """The router discarded the ticket (rule 22). Its message may overtake the engine's: then there is no lease."""
        lease = self.by_handoff.get(event.handoff)
        if lease is None:
            self.ended.put(event.handoff, Reason.DISCARDED)
            taken_back = ProtocolError(Reason.DISCARDED, "the router took the ticket of this handoff back")
            self.claims.on_never_begun(event.handoff, taken_back)
        elif any(seat.state is ReaderState.LIVE for seat in lease.seats.values()):
            self.desk.count("late.discard")
            lease.max_readers = len(lease.seats)  # no more will come: it ends with those who read it now
        else:
            self.desk.count("leases_discarded")
            self.close(lease, Reason.DISCARDED, now)

    def leave(self, lease: Lease, reader: Reader, event: ReaderEvent, now: float) -> None:
        """A reader's seat changes; when every seat was taken and is left, the lease is over (rule 4)."""
        seat = lease.seats[reader]
        state = READER.step(seat.state, event)
        if isinstance(state, Verdict):
            self.desk.count(f"{state.value}.reader")
            return
        seat.state = state
        self.desk.cancel(seat.loans)
        self.held.give(lease.id, reader)
        if lease.state is not LeaseState.RELEASED:  # of which nothing more is said
            why = f": {reason_of(seat.why)}" if seat.why else ""
            self._mark(lease.id, _SEEN[event], now, who=f"{reader.peer.worker}{why}")
        # Also after a commit: a D that commits what it has offered blocks for lies, and would be written to for ever.
        self.writer.stop(lease, reader, None, now)
        if lease.used_up:
            self.close(lease, Reason.TICKET_SPENT, now)

    # --- endings

    def close(self, lease: Lease, reason: Reason, now: float) -> None:
        """The lease is no longer needed: stop P's own writes from it, and release it when they are at rest."""
        # Two steps, because an end is not rest: from here no reader finds the lease and no renewal keeps it, but its
        # blocks stay pinned while our own writes, or reads by a loan, may still touch them (rules 28 and 32).
        if self._step(lease, LeaseEvent.CLOSED) is None:
            return
        self.by_handoff.pop(lease.handoff, None)
        self.ended.put(lease.handoff, reason)
        lease.traffic.why_over = reason
        self.desk.timers.clear(("lease", lease.id))
        blocks = sum(map(len, lease.blocks))
        ended = Ended(_how(lease, reason), lease.traffic.moved, blocks, lease.traffic.transport)
        self._mark(lease.id, Step.CLOSED, now, ended)
        if lease.term.is_turn:
            self.desk.count(f"turns.{'taken' if ended.end.delivered else reason}")
        for reader, seat in lease.seats.items():
            if seat.state is ReaderState.LIVE:
                seat.state = ReaderState.GONE
                self.desk.cancel(seat.loans)
                self.held.give(lease.id, reader)
            self.writer.stop(lease, reader, reason, now)
        self.release_if_at_rest(lease, now)

    def release_if_at_rest(self, lease: Lease, now: float) -> None:
        """Unpin once nothing moves from these blocks: neither by our own writes nor under a reader's loan."""
        if lease.state is LeaseState.CLOSING and self.writer.at_rest(lease) and self._lent_to_nobody(lease):
            self._step(lease, LeaseEvent.RESTED)
            del self.leases[lease.id]
            self.tombstones.put(lease.id, lease)
            self._mark(lease.id, Step.RESTED, now)
            self.desk.emit(Unpin(lease.id))

    def let_turns_go(self, now: float) -> None:
        """This engine is about to leave: what it keeps for next turns goes first, but for what is being read."""
        for lease in list(self.leases.values()):
            if lease.term.is_turn:
                self.on_discarded(Discarded(lease.handoff), now)

    def on_expired(self, lease: LeaseId, now: float) -> None:
        if not self.leases[lease].term.is_turn:  # a conversation that did not go on is nobody's failure
            self.desk.count("leases_expired")
        self.close(self.leases[lease], Reason.LEASE_EXPIRED, now)

    def void(self, now: float, leaving: bool = False) -> None:
        """The cache was replaced: no lease, and no tombstone, can be trusted any more.

        That they are over is remembered: otherwise a claim for one of them would wait for it to start. With `leaving`,
        loans are not waited for: the transports end with this incarnation.
        """
        self.leaving = leaving
        if leaving:
            self.claims.drop_left()
        for lease in list(self.leases.values()):
            self.close(lease, Reason.UNKNOWN_LEASE, now)
        self.tombstones = Remembered(self.desk.settings.tombstones_max)

    # --- helpers

    def tell(self, peer: PeerId, seat: Seat, message: Message) -> None:
        self.desk.send(peer.worker, peer.incarnation, seat.session, message, seat.version)

    def _refuse_lease(self, event: LeaseBegun, why: Reason, now: float) -> None:
        self.desk.count(f"lease_refused.{why}")
        self._mark(event.lease, Step.CLOSED, now, Ended(End(why)))
        self._mark(event.lease, Step.RESTED, now)
        self.desk.emit(Unpin(event.lease))
        if why is Reason.BUSY:  # of a duplicate there is a lease, and the claim has found it
            self.ended.put(event.handoff, why)
            full = f"leases_max: {len(self.leases)} leases are held already"
            self.claims.on_never_begun(event.handoff, ProtocolError(why, full))

    def _mark(self, lease: LeaseId, step: Step, now: float, what: Begun | Ended | None = None, who: str = "") -> None:
        self.desk.mark(Seen.PREFILL, lease, step, now, what, who)

    def _judge(self, lease: Lease) -> tuple[bool, tuple[int, ...]]:
        """By the epochs; without a watcher that raises them (rule 7), nothing is known once the pins are gone."""
        if lease.state is LeaseState.RELEASED and not self.desk.identity.exact_epochs:
            return False, ()
        return judge(lease, self.desk.epochs_of)

    def _step(self, lease: Lease, event: LeaseEvent) -> LeaseState | None:
        state = LEASE.step(lease.state, event)
        if isinstance(state, Verdict):
            self.desk.count(f"{state.value}.lease")
            return None
        lease.state = state
        return state

    def lend(self, lease: Lease, reader: Reader, seat: Seat) -> None:
        """Blocks that have become ready, before the reader is told; none that is only pinned, where an earlier prompt's
        KV could still be seen. A block that streams layer by layer exposes it in the layers to come."""
        before = seat.lent or tuple(0 for _ in lease.blocks)
        reach = tuple(group.blocks_ahead if group.layers_ahead else group.blocks_done for group in lease.progress)
        fresh = tuple(tuple(ids[had:has]) for ids, had, has in zip(lease.blocks, before, reach, strict=True))
        seat.lent = reach
        self.desk.lend(seat.loans, seat.plane, reader.peer, Direction.READ, fresh)

    def _lent_to_nobody(self, lease: Lease) -> bool:
        return self.leaving or all(seat.loans.at_rest for seat in lease.seats.values())

    def extend(self, lease: Lease, now: float) -> float:
        # A term is short so that a dead D costs P its blocks for seconds only, and is renewed so that a slow copy costs
        # nothing. There are two further limits. While seats are free, an early reader must not shorten what later ones
        # were promised with their tickets. And no renewal passes the hold limit (rule 9): a D that claims to be alive
        # and never ends would otherwise hold P's memory as long as it likes.
        expires_at = now + self.desk.settings.lease_s
        if lease.has_room():
            expires_at = max(expires_at, lease.term.claimable_until)
        expires_at = min(expires_at, lease.term.hold_until)
        self.desk.timers.set(("lease", lease.id), expires_at)
        return max(expires_at - now, TERM_S_MIN)  # at the end of its hold nothing is left of it

    def _tell_ready(self, lease: Lease, now: float) -> None:
        for reader, seat in list(lease.seats.items()):
            if seat.state is not ReaderState.LIVE:
                continue
            seat.work += 1
            self.lend(lease, reader, seat)
            if not self.writer.pump(lease, reader, now):
                self.tell(reader.peer, seat, self._ready(lease, reader, seat.told))
                seat.told = tuple(len(ids) for ids in lease.blocks)

    def _ready(self, lease: Lease, reader: Reader, start: tuple[int, ...]) -> Ready:
        begin = start or tuple(0 for _ in lease.blocks)
        blocks = tuple(pack_blocks(ids[n:]) for n, ids in zip(begin, lease.blocks, strict=True))
        return Ready(lease.id, reader.attempt, begin, blocks, lease.progress, lease.final)


def _how(lease: Lease, reason: Reason) -> End:
    """How a lease that closes for `reason` ended, in terms of a handoff."""
    if lease.term.is_turn and not lease.seats:
        return End(Reason.DISCARDED, str(reason))  # nobody came for it, and nobody had to: no handoff has failed
    if reason is not Reason.TICKET_SPENT:
        return End(reason)
    states = {seat.state for seat in lease.seats.values()}
    if ReaderState.COMMITTED in states:
        return End()
    if ReaderState.STALE in states:
        return End(Reason.STALE)
    said = next((seat.why for seat in lease.seats.values() if seat.why), "")
    return End(reason_of(said) if said else Reason.PEER_GONE, "the reader left without a commit")
