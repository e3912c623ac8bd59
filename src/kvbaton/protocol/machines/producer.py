"""P's role: leases out, claims in, commits judged. Writing for push is in `writer.py`.

Laws: a lease is found by its handoff id only while it is held; once released it is a tombstone that judges commits
and refuses everything else. A claim for a handoff that P has not begun is parked, bounded, with a deadline. A handoff
that was discarded is never leased; one that is being read ends as its reader ends it. Who comes with a ticket and
another prompt has had its turn: the lease does not wait for it.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvbaton.protocol.bounded import Remembered
from kvbaton.protocol.effects import Direction, End, Unpin
from kvbaton.protocol.errors import ProtocolError, Reason, reason_of
from kvbaton.protocol.events import (
    Discarded,
    LeaseBegun,
    LeaseCompleted,
    LeaseExtended,
    LeaseProgressed,
    SourceEnded,
)
from kvbaton.protocol.ids import HandoffId, LeaseId, PeerId, Reader, WorkerId
from kvbaton.protocol.machines.context import Desk, Parts
from kvbaton.protocol.machines.lease import (
    LEASE,
    READER,
    Lease,
    LeaseEvent,
    LeaseState,
    ReaderEvent,
    ReaderState,
    Seat,
    judge,
    new_lease,
)
from kvbaton.protocol.machines.pairing_state import Session
from kvbaton.protocol.machines.push_writer import Writer
from kvbaton.protocol.machines.quotas import Held, PerPeer, block_bytes, promised_bytes
from kvbaton.protocol.machines.readiness import covers
from kvbaton.protocol.marks import Begun, Ended, Step
from kvbaton.protocol.marks import Side as Seen
from kvbaton.protocol.numbers import TERM_S_MIN
from kvbaton.protocol.table import Verdict
from kvbaton.protocol.wire.codec import pack_blocks
from kvbaton.protocol.wire.messages import (
    DETAIL_CHARS_MAX,
    Abandon,
    Claim,
    ClaimRefused,
    Commit,
    Committed,
    Granted,
    Message,
    Ready,
    Renew,
    Renewed,
    RenewRefused,
    SourceLost,
    Stale,
)
from kvbaton.protocol.wire.ticket import TICKET_LIFE_S_MAX, Ticket, unseal


@dataclass(slots=True)
class Parked:
    """A claim that came before P knew the request."""

    session: Session
    claim: Claim
    since: float


_OVER = "the lease of this handoff is over"
_SEEN = {ReaderEvent.PROVEN: Step.COMMITTED, ReaderEvent.DISPROVEN: Step.STALE, ReaderEvent.LEFT: Step.LEFT}


class Producer:
    """All leases of this node."""

    def __init__(self, desk: Desk) -> None:
        self.desk = desk
        self.leases: dict[LeaseId, Lease] = {}
        self.by_handoff: dict[HandoffId, Lease] = {}
        self.tombstones: Remembered[LeaseId, Lease] = Remembered(desk.settings.tombstones_max)
        self.ended: Remembered[HandoffId, Reason] = Remembered(desk.settings.tombstones_max)
        self.parked: PerPeer[Parked] = PerPeer()
        self.held = Held()
        self._block_bytes = block_bytes(desk.identity.layout)
        self.writer = Writer(desk, self)
        self.draining = False
        self.leaving = False

    # --- the engine

    def on_begun(self, event: LeaseBegun, now: float) -> None:
        settings = self.desk.settings
        full = len(self.leases) >= settings.leases_max
        begun = Begun(
            event.handoff, event.request, event.target, event.tokens, deferred=event.deferred, trace=event.trace
        )
        self._mark(event.lease, Step.BEGUN, now, begun)
        if full or event.handoff in self.by_handoff or event.lease in self.leases:
            self._refuse_lease(event, Reason.BUSY if full else Reason.DUPLICATE, now)
            return
        if self.ended.get(event.handoff) is Reason.DISCARDED:
            self._refuse_lease(event, Reason.DISCARDED, now)
            return
        lease = new_lease(
            event.lease,
            event.handoff,
            event.digest,
            event.tokens,
            event.groups,
            len(self.desk.identity.layout.ranks),
            event.max_readers,
            event.target,
            now + settings.max_hold_s,
        )
        self.leases[lease.id] = self.by_handoff[lease.handoff] = lease
        first_s = settings.defer_timeout if event.deferred else settings.lease_s
        lease.claimable_until = min(now + first_s, lease.hold_until)
        self.desk.timers.set(("lease", lease.id), lease.claimable_until)
        self.desk.count("leases")
        for reader in [reader for reader, waiting in self.parked.items() if waiting.claim.handoff == lease.handoff]:
            self._answer_parked(reader, lease, now)

    def on_extended(self, event: LeaseExtended, now: float) -> None:
        lease = self.leases.get(event.lease)
        if lease is None or self._step(lease, LeaseEvent.EXTENDED) is None:
            return
        for mine, ids in zip((*lease.blocks, *lease.epochs), (*event.blocks, *event.epochs), strict=True):
            mine.extend(ids)

    def on_progressed(self, event: LeaseProgressed, now: float) -> None:
        lease = self.leases.get(event.lease)
        if lease is None or not covers(event.progress, lease.ranks[event.rank]):
            return  # a rank's own word on a layer may come after the engine's on the whole chunk
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

    def on_claim(self, session: Session, claim: Claim, now: float) -> None:
        reader = Reader(session.peer, claim.attempt)
        try:
            ticket = self._check_ticket(session, claim, now)
            lease = self.by_handoff.get(claim.handoff)
            if lease is None:
                self._park(reader, session, claim, ticket, now)
            else:
                self._seat(lease, reader, session, claim, now)
        except ProtocolError as error:
            self._refuse(session, claim, error)
            self._spend(session, claim, error, now)

    def on_renew(self, session: Session, message: Renew, now: float) -> None:
        reader = Reader(session.peer, message.attempt)
        lease = self.leases.get(message.lease)
        seat = lease.seats.get(reader) if lease is not None else None
        if lease is None or seat is None or seat.state is not ReaderState.LIVE or lease.state is LeaseState.CLOSING:
            reason = Reason.LEASE_EXPIRED if message.lease in self.tombstones else Reason.UNKNOWN_LEASE
            self._send(session, RenewRefused(message.lease, message.attempt, reason))
            return
        ttl_s = self._extend(lease, now)
        self._send(session, Renewed(lease.id, message.attempt, ttl_s, seat.work))
        if not message.final and len(message.have) == len(lease.blocks):
            self._send(session, self._ready(lease, reader, message.have))

    def on_commit(self, session: Session, message: Commit, now: float) -> None:
        reader = Reader(session.peer, message.attempt)
        lease = self.leases.get(message.lease) or self.tombstones.get(message.lease)
        seat = lease.seats.get(reader) if lease is not None else None
        if lease is None or seat is None:
            self.desk.count("commits.unknown")
            self._send(session, Stale(message.lease, message.attempt, (), Reason.UNKNOWN_LEASE))
            return
        if seat.state in (ReaderState.LIVE, ReaderState.GONE):
            proven, seat.good = self._judge(lease)
            self.leave(lease, reader, ReaderEvent.PROVEN if proven else ReaderEvent.DISPROVEN, now)
            self.desk.count("commits.good" if proven else "commits.stale")
        if seat.state is ReaderState.COMMITTED:
            self._send(session, Committed(message.lease, message.attempt))
        else:
            why = self.ended.get(lease.handoff) or Reason.STALE
            self._send(session, Stale(message.lease, message.attempt, seat.good, why))

    def on_abandon(self, session: Session, message: Abandon, now: float) -> None:
        reader = Reader(session.peer, message.attempt)
        if self.parked.take(reader) is not None:
            self.desk.timers.clear(("parked", reader))
        lease = self.by_handoff.get(message.handoff)
        if lease is not None and reader in lease.seats:
            self.given_up(lease, reader, message.reason)
            self.leave(lease, reader, ReaderEvent.LEFT, now)

    def given_up(self, lease: Lease, reader: Reader, reason: str) -> None:
        """A reader says that it leaves, and why: for whoever looks after this node."""
        seat = lease.seats[reader]
        if seat.state is ReaderState.LIVE:
            seat.why = reason
            self.desk.count(f"abandoned.{reason_of(reason) if reason else 'unsaid'}")

    def on_session_ended(self, session: Session, now: float) -> None:
        for reader in [r for r, waiting in self.parked.items() if waiting.session is session]:
            del self.parked[reader]
            self.desk.timers.clear(("parked", reader))
        for lease in list(self.leases.values()):
            for reader, seat in list(lease.seats.items()):
                if seat.session == session.number:
                    self.leave(lease, reader, ReaderEvent.LEFT, now)
        self.writer.on_session_ended(session, now)

    def is_idle(self, session: Session) -> bool:
        """Nobody reads, waits or is written to in that session."""
        if any(waiting.session is session for waiting in self.parked.values()):
            return False
        return not any(
            seat.session == session.number and seat.state is ReaderState.LIVE
            for lease in self.leases.values()
            for seat in lease.seats.values()
        )

    @property
    def restless_blocks(self) -> int:
        """Blocks of leases that are over, but that something may still be sent from."""
        over = (lease for lease in self.leases.values() if lease.state is LeaseState.CLOSING)
        return sum(len(ids) for lease in over if not self.writer.at_rest(lease) for ids in lease.blocks)

    def on_departed(self, worker: WorkerId, now: float) -> None:
        """What was meant for that worker alone, and is not being read, will not be read."""
        for lease in list(self.leases.values()):
            live = any(seat.state is ReaderState.LIVE for seat in lease.seats.values())
            if lease.target == worker and not live:
                self.close(lease, Reason.PEER_GONE, now)

    def on_discarded(self, event: Discarded, now: float) -> None:
        """Nobody will come for this handoff any more. It may have come before its lease; then there will be none."""
        lease = self.by_handoff.get(event.handoff)
        if lease is None:
            self.ended.put(event.handoff, Reason.DISCARDED)
            self._refuse_parked(event.handoff)
        elif any(seat.state is ReaderState.LIVE for seat in lease.seats.values()):
            self.desk.count("late.discard")
            lease.max_readers = len(lease.seats)  # nobody else will come: it ends with those who read it now
        else:
            self.desk.count("leases_discarded")
            self.close(lease, Reason.DISCARDED, now)

    def leave(self, lease: Lease, reader: Reader, event: ReaderEvent, now: float) -> None:
        """A reader's seat changes; when nobody is left to come or to sit, the lease is over."""
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
        self.writer.stop(lease, reader, None, now)  # also for who commits what it had offered blocks for, and lies
        if lease.used_up:
            self.close(lease, Reason.TICKET_SPENT, now)

    # --- endings

    def close(self, lease: Lease, reason: Reason, now: float) -> None:
        """No more use for the lease: stop P's own writes from it, and release it when they are at rest."""
        if self._step(lease, LeaseEvent.CLOSED) is None:
            return
        self.by_handoff.pop(lease.handoff, None)
        self.ended.put(lease.handoff, reason)
        self.desk.timers.clear(("lease", lease.id))
        blocks = sum(map(len, lease.blocks))
        ended = Ended(_how(lease, reason), lease.moved, blocks, lease.transport)
        self._mark(lease.id, Step.CLOSED, now, ended)
        for reader, seat in lease.seats.items():
            if seat.state is ReaderState.LIVE:
                seat.state = ReaderState.GONE
                self.desk.cancel(seat.loans)
                self.held.give(lease.id, reader)
            self.writer.stop(lease, reader, reason, now)
        self.release_if_at_rest(lease, now)

    def release_if_at_rest(self, lease: Lease, now: float) -> None:
        """Unpin once nothing moves from these blocks: neither by our own writes nor by what was lent to readers."""
        if lease.state is LeaseState.CLOSING and self.writer.at_rest(lease) and self._lent_to_nobody(lease):
            self._step(lease, LeaseEvent.RESTED)
            del self.leases[lease.id]
            self.tombstones.put(lease.id, lease)
            self._mark(lease.id, Step.RESTED, now)
            self.desk.emit(Unpin(lease.id))

    def on_expired(self, lease: LeaseId, now: float) -> None:
        self.desk.count("leases_expired")
        self.close(self.leases[lease], Reason.LEASE_EXPIRED, now)

    def on_parked_too_long(self, reader: Reader, now: float) -> None:
        waiting = self.parked[reader]
        del self.parked[reader]
        detail = "the prefiller has not begun this request within defer_timeout"
        self._refuse(waiting.session, waiting.claim, ProtocolError(Reason.DEFER_TIMEOUT, detail))

    def void(self, now: float, leaving: bool = False) -> None:
        """The cache was replaced: no lease, and no tombstone, can be vouched for any more.

        That they are over is remembered: else a claim for one of them would wait for it to begin. With `leaving` what
        is lent is not waited for: the data planes go with this life.
        """
        self.leaving = leaving
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

    def _check_ticket(self, session: Session, claim: Claim, now: float) -> Ticket:
        identity = self.desk.identity
        wall = now + identity.wall_offset_s
        ticket = unseal(claim.ticket, identity.ticket_keys, wall)
        if not ticket.expires_unix_s - wall <= TICKET_LIFE_S_MAX:  # false for NaN as well
            until = f"{ticket.expires_unix_s:.0f}, {TICKET_LIFE_S_MAX:.0f} s at most"
            raise ProtocolError(Reason.TICKET_FORGED, f"ticket: good until {until} from now")
        if ticket.source != identity.me.worker or ticket.handoff != claim.handoff:
            raise ProtocolError(Reason.TICKET_FORGED, "ticket: it is for another prefiller or handoff")
        if ticket.incarnation not in (0, identity.me.incarnation):
            raise ProtocolError(Reason.WRONG_INCARNATION, "ticket: the prefiller has restarted since; ask it again")
        if ticket.target not in ("", session.peer.worker):
            raise ProtocolError(Reason.TICKET_FORGED, f"ticket: it is for {ticket.target}, not {session.peer.worker}")
        if ticket.digest not in (b"", claim.digest):
            raise ProtocolError(Reason.CONTENT_MISMATCH, "digest: the ticket is for another prompt than the claim's")
        return ticket

    def _park(self, reader: Reader, session: Session, claim: Claim, ticket: Ticket, now: float) -> None:
        ended = self.ended.get(claim.handoff)
        if ended is not None:
            raise ProtocolError(ended, _OVER)
        if ticket.lease or not claim.deferred:
            raise ProtocolError(Reason.UNKNOWN_LEASE, "the lease of this ticket is not remembered")
        if reader in self.parked:
            return
        if self.draining:
            raise ProtocolError(Reason.DRAINING, "the prefiller is draining")
        if len(self.parked) >= self.desk.settings.parked_max:
            raise ProtocolError(Reason.BUSY, f"parked_max: {len(self.parked)} claims wait already")
        of_peer = self.parked.of(session.peer.worker)
        if of_peer >= self.desk.settings.parked_per_peer_max:
            raise ProtocolError(Reason.BUSY, f"parked_per_peer_max: {of_peer} claims of {session.peer.worker} wait")
        self.parked[reader] = Parked(session, claim, now)
        self.desk.timers.set(("parked", reader), now + self.desk.settings.defer_timeout)

    def _answer_parked(self, reader: Reader, lease: Lease, now: float) -> None:
        waiting = self.parked[reader]
        del self.parked[reader]
        self.desk.timers.clear(("parked", reader))
        if self.by_handoff.get(lease.handoff) is not lease:  # one who waited too has spent the last place of it
            reason = self.ended.get(lease.handoff) or Reason.TICKET_SPENT
            self._refuse(waiting.session, waiting.claim, ProtocolError(reason, _OVER))
            return
        self._mark(lease.id, Step.PARKED, waiting.since, who=str(reader.peer.worker))
        try:
            self._seat(lease, reader, waiting.session, waiting.claim, now)
        except ProtocolError as error:
            self._refuse(waiting.session, waiting.claim, error)
            self._spend(waiting.session, waiting.claim, error, now)

    def _refuse_parked(self, handoff: HandoffId) -> None:
        error = ProtocolError(Reason.DISCARDED, "the router took the ticket of this handoff back")
        for reader in [reader for reader, waiting in self.parked.items() if waiting.claim.handoff == handoff]:
            waiting = self.parked[reader]
            del self.parked[reader]
            self.desk.timers.clear(("parked", reader))
            self._refuse(waiting.session, waiting.claim, error)

    def _seat(self, lease: Lease, reader: Reader, session: Session, claim: Claim, now: float) -> None:
        if lease.target not in ("", session.peer.worker):
            raise ProtocolError(Reason.TICKET_FORGED, f"target: this handoff is for {lease.target}")
        if lease.digest != claim.digest:
            raise ProtocolError(
                Reason.CONTENT_MISMATCH, "digest: the prefiller computed another prompt than the claim's"
            )
        if reader not in lease.seats:
            if not lease.has_room():
                raise ProtocolError(Reason.TICKET_SPENT, f"max_readers: all {lease.max_readers} have claimed it")
            self._take_share(lease, reader)
            lease.seats[reader] = Seat(
                session.number,
                told=tuple(len(ids) for ids in lease.blocks),
                version=session.version,
                plane=session.transport,
                loans=Parts(lease),
            )
            self._lend(lease, reader, lease.seats[reader])
            lease.transport = session.transport.name
            self._mark(lease.id, Step.SEATED, now, who=str(reader.peer.worker))
        elif lease.seats[reader].state is not ReaderState.LIVE:
            self.desk.count("late.claim")
            return
        ttl_s = self._extend(lease, now)
        blocks = tuple(pack_blocks(ids) for ids in lease.blocks)
        self._send(
            session,
            Granted(lease.handoff, reader.attempt, lease.id, ttl_s, lease.tokens, blocks, lease.progress, lease.final),
        )

    def _lend(self, lease: Lease, reader: Reader, seat: Seat) -> None:
        """What has become ready, before the reader is told so; not what is only pinned: there an earlier prompt's KV is
        still to be seen. Of a block that streams layer by layer it is, in the layers that are to come."""
        before = seat.lent or tuple(0 for _ in lease.blocks)
        reach = tuple(group.blocks_ahead if group.layers_ahead else group.blocks_done for group in lease.progress)
        fresh = tuple(tuple(ids[had:has]) for ids, had, has in zip(lease.blocks, before, reach, strict=True))
        seat.lent = reach
        self.desk.lend(seat.loans, seat.plane, reader.peer, Direction.READ, fresh)

    def _lent_to_nobody(self, lease: Lease) -> bool:
        return self.leaving or all(seat.loans.at_rest for seat in lease.seats.values())

    def _take_share(self, lease: Lease, reader: Reader) -> None:
        """Whoever holds as much as one peer may is refused more, so that the others find some."""
        settings, worker = self.desk.settings, reader.peer.worker
        size = promised_bytes(self.desk.identity.layout, self._block_bytes, lease.tokens)
        seats, held = self.held.seats(worker), self.held.bytes(worker)
        if seats >= settings.seats_per_peer_max:
            raise ProtocolError(Reason.BUSY, f"seats_per_peer_max: {worker} reads {seats} leases already")
        if seats and held + size > settings.bytes_per_peer_max:  # one alone may be as large as it is
            raise ProtocolError(Reason.BUSY, f"bytes_per_peer_max: {worker} holds {held} bytes, asks for {size} more")
        self.held.take(lease.id, reader, size)

    def _extend(self, lease: Lease, now: float) -> float:
        expires_at = now + self.desk.settings.lease_s
        if lease.has_room():  # others may still come, for as long as was promised at first
            expires_at = max(expires_at, lease.claimable_until)
        expires_at = min(expires_at, lease.hold_until)
        self.desk.timers.set(("lease", lease.id), expires_at)
        return max(expires_at - now, TERM_S_MIN)  # at the end of its hold nothing is left of it

    def _tell_ready(self, lease: Lease, now: float) -> None:
        for reader, seat in list(lease.seats.items()):
            if seat.state is not ReaderState.LIVE:
                continue
            seat.work += 1
            self._lend(lease, reader, seat)
            if not self.writer.pump(lease, reader, now):
                self.tell(reader.peer, seat, self._ready(lease, reader, seat.told))
                seat.told = tuple(len(ids) for ids in lease.blocks)

    def _ready(self, lease: Lease, reader: Reader, start: tuple[int, ...]) -> Ready:
        begin = start or tuple(0 for _ in lease.blocks)
        blocks = tuple(pack_blocks(ids[n:]) for n, ids in zip(begin, lease.blocks, strict=True))
        return Ready(lease.id, reader.attempt, begin, blocks, lease.progress, lease.final)

    def _refuse(self, session: Session, claim: Claim, error: ProtocolError) -> None:
        self.desk.count(f"claim_refused.{error.reason}")
        self._send(session, ClaimRefused(claim.handoff, claim.attempt, error.reason, error.detail[:DETAIL_CHARS_MAX]))

    def _spend(self, session: Session, claim: Claim, error: ProtocolError, now: float) -> None:
        """A place goes to nobody else whose ticket came with another prompt: its engine will not read by it.

        That is the last thing a claim is refused for, so all else of the ticket is right.
        """
        lease, reader = self.by_handoff.get(claim.handoff), Reader(session.peer, claim.attempt)
        if error.reason is not Reason.CONTENT_MISMATCH or lease is None:
            return
        ticket = unseal(claim.ticket, self.desk.identity.ticket_keys, now + self.desk.identity.wall_offset_s)
        if ticket.digest not in (b"", lease.digest):  # a ticket of another prompt: it is not this lease's to spend
            return
        if lease.target in ("", reader.peer.worker) and reader not in lease.seats and lease.has_room():
            lease.seats[reader] = Seat(session.number, ReaderState.STALE, version=session.version)
            if lease.used_up:
                self.close(lease, Reason.CONTENT_MISMATCH, now)

    def _send(self, session: Session, message: Message) -> None:
        self.desk.send(session.peer.worker, session.peer.incarnation, session.number, message, session.version)


def _how(lease: Lease, reason: Reason) -> End:
    """How a lease that closes for `reason` ended, in the words of a handoff."""
    if reason is not Reason.TICKET_SPENT:
        return End(reason)
    states = {seat.state for seat in lease.seats.values()}
    if ReaderState.COMMITTED in states:
        return End()
    if ReaderState.STALE in states:
        return End(Reason.STALE)
    said = next((seat.why for seat in lease.seats.values() if seat.why), "")
    return End(reason_of(said) if said else Reason.PEER_GONE, "the reader left without a commit")
