"""Claims: which reader claims a handoff, with which ticket, and whether it gets a seat.

Laws: a claim is answered as soon as possible: granted, refused with a reason, or parked while P has not started the
handoff, bounded and with a deadline (rule 12). A reader that comes with its ticket and another prompt has used its
turn: the lease does not wait for it. Nor for one that left while its claim was parked: that is remembered as long as
the claim would have waited, and one that came to its deadline as long again.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from kvbaton.protocol.bounded import Held, PerPeer, Remembered, block_bytes, promised_bytes
from kvbaton.protocol.effects import Side as Seen
from kvbaton.protocol.effects import Step
from kvbaton.protocol.errors import ProtocolError, Reason, reason_of
from kvbaton.protocol.ids import HandoffId, Reader, WorkerId
from kvbaton.protocol.machines.context import LedgerContext, Parts
from kvbaton.protocol.machines.lease import Lease, ReaderState, Seat
from kvbaton.protocol.machines.pairing_state import Session
from kvbaton.protocol.wire.codec import pack_blocks
from kvbaton.protocol.wire.messages import DETAIL_CHARS_MAX, Claim, ClaimRefused, Feature, Granted, GrantedFrom
from kvbaton.protocol.wire.ticket import TICKET_LIFE_S_MAX, Ticket, unseal

_OVER = "the lease of this handoff is over"


class Claimed(Protocol):
    """The producer, as seen by claims."""

    by_handoff: dict[HandoffId, Lease]
    ended: Remembered[HandoffId, Reason]
    held: Held
    draining: bool

    def extend(self, lease: Lease, now: float) -> float: ...
    def lend(self, lease: Lease, reader: Reader, seat: Seat) -> None: ...
    def close(self, lease: Lease, reason: Reason, now: float) -> None: ...


@dataclass(slots=True)
class Parked:
    """A claim that arrived before P had the request."""

    session: Session
    claim: Claim
    since: float
    left: str | None = None  # why the reader has left; its session may be over


class Claims:
    """All claims on this node's leases, and those that wait for one."""

    def __init__(self, desk: LedgerContext, leases: Claimed) -> None:
        self.desk = desk
        self.parked: PerPeer[Parked] = PerPeer()
        self._leases = leases
        self._block_bytes = block_bytes(desk.identity.layout)

    def on_claim(self, session: Session, claim: Claim, now: float) -> None:
        reader = Reader(session.peer, claim.attempt)
        try:
            # The ticket is checked before the handoff, so that a claim without a valid one learns nothing: not even
            # whether P has that handoff.
            ticket = self._check_ticket(session, claim, now)
            lease = self._leases.by_handoff.get(claim.handoff)
            if lease is None:
                self._park(reader, session, claim, ticket, now)
            else:
                self._seat(lease, reader, session, claim, now)
        except ProtocolError as error:
            self._refuse(session, claim, error)
            self._spend(session, claim, error, now)

    # --- waiting

    def on_begun(self, lease: Lease, now: float) -> None:
        """Answer the parked claims."""
        for reader in self._waiting_for(lease.handoff):
            self._answer_parked(reader, lease, now)

    def on_never_begun(self, handoff: HandoffId, error: ProtocolError) -> None:
        """Nothing will be leased under this handoff: who waits for it need not."""
        for reader in self._waiting_for(handoff):
            waiting = self.parked[reader]
            self._drop(reader)
            if waiting.left is None:
                self._refuse(waiting.session, waiting.claim, error)

    def on_parked_too_long(self, reader: Reader, now: float) -> None:
        waiting = self.parked[reader]
        if waiting.left is not None:
            del self.parked[reader]
            return
        detail = "the prefiller has not begun this request within defer_timeout"
        self._refuse(waiting.session, waiting.claim, ProtocolError(Reason.DEFER_TIMEOUT, detail))
        # A prefiller that is so far behind may begin it yet: for a reader that has been refused.
        waiting.left = Reason.DEFER_TIMEOUT
        self.desk.timers.set(("parked", reader), now + self.desk.settings.defer_timeout)

    def leave(self, reader: Reader, reason: str) -> None:
        """It will not read. P may begin the handoff all the same: it must not hold blocks for this reader then."""
        waiting = self.parked.get(reader)
        if waiting is not None and waiting.left is None:
            waiting.left = reason or Reason.ABORTED

    def drop_session(self, session: Session) -> None:
        """Its readers may come back in another; those that have left will not."""
        for reader in [r for r, each in self.parked.items() if each.session is session and each.left is None]:
            self._drop(reader)

    def drop_left(self) -> None:
        for reader in [reader for reader, waiting in self.parked.items() if waiting.left is not None]:
            self._drop(reader)

    @property
    def waiting(self) -> int:
        """Claims that are owed an answer."""
        return sum(each.left is None for each in list(self.parked.values()))  # statistics read it on another thread

    def waits_in(self, session: Session) -> bool:
        return any(waiting.session is session and waiting.left is None for waiting in self.parked.values())

    def _drop(self, reader: Reader) -> None:
        del self.parked[reader]
        self.desk.timers.clear(("parked", reader))

    def _waiting_for(self, handoff: HandoffId) -> list[Reader]:
        return [reader for reader, waiting in self.parked.items() if waiting.claim.handoff == handoff]

    def _park(self, reader: Reader, session: Session, claim: Claim, ticket: Ticket, now: float) -> None:
        # D may get the request before P, and its claim may arrive before the engine's event: refusing it would cost a
        # prefill, waiting without a bound would be a leak that any member can cause. A ticket that names a lease
        # belongs to one that has started, so there is nothing to wait for (rule 12).
        ended = self._leases.ended.get(claim.handoff)
        if ended is not None:
            raise ProtocolError(ended, _OVER)
        if ticket.lease or not claim.deferred:
            raise ProtocolError(Reason.UNKNOWN_LEASE, "the lease of this ticket is not remembered")
        waiting = self.parked.get(reader)
        if waiting is not None:
            if waiting.left is not None:
                raise ProtocolError(reason_of(waiting.left), "this reader has left, or its claim waited too long")
            return
        if self._leases.draining:
            raise ProtocolError(Reason.DRAINING, "the prefiller is draining")
        self._make_room(session.peer.worker)
        self.parked[reader] = Parked(session, claim, now)
        self.desk.timers.set(("parked", reader), now + self.desk.settings.defer_timeout)

    def _make_room(self, worker: WorkerId) -> None:
        """One that waits comes before one that has left: at a bound the oldest of these is forgotten."""
        settings = self.desk.settings
        of_peer, count = self.parked.of(worker), len(self.parked)
        if of_peer < settings.parked_per_peer_max and count < settings.parked_max:
            return
        own = of_peer >= settings.parked_per_peer_max
        left = (r for r, each in self.parked.items() if each.left is not None and (not own or r.peer.worker == worker))
        oldest = next(left, None)
        if oldest is not None:
            self.desk.count("parked_forgotten")
            self._drop(oldest)
        elif own:
            raise ProtocolError(Reason.BUSY, f"parked_per_peer_max: {of_peer} claims of {worker} wait")
        else:
            raise ProtocolError(Reason.BUSY, f"parked_max: {count} claims wait already")

    def _answer_parked(self, reader: Reader, lease: Lease, now: float) -> None:
        waiting = self.parked[reader]
        self._drop(reader)
        if waiting.left is not None:
            self._leave_seat(lease, reader, waiting, waiting.left, now)
            return
        if self._leases.by_handoff.get(lease.handoff) is not lease:  # another parked claim took the last seat
            reason = self._leases.ended.get(lease.handoff) or Reason.TICKET_SPENT
            self._refuse(waiting.session, waiting.claim, ProtocolError(reason, _OVER))
            return
        self.desk.mark(Seen.PREFILL, lease.id, Step.PARKED, waiting.since, detail=str(reader.peer.worker))
        try:
            self._seat(lease, reader, waiting.session, waiting.claim, now)
        except ProtocolError as error:
            self._refuse(waiting.session, waiting.claim, error)
            self._spend(waiting.session, waiting.claim, error, now)

    def _leave_seat(self, lease: Lease, reader: Reader, waiting: Parked, why: str, now: float) -> None:
        """The seat of a reader that left before there was one: taken, and free."""
        try:
            _check_claim(lease, waiting.session, waiting.claim)
        except ProtocolError as error:
            self._spend(waiting.session, waiting.claim, error, now)
            return
        if lease.has_room() and reader not in lease.seats:
            version = waiting.session.version
            lease.seats[reader] = Seat(waiting.session.number, ReaderState.GONE, why=why, version=version)
            self.desk.count(f"abandoned.{reason_of(why)}")
            if lease.used_up:
                self._leases.close(lease, Reason.TICKET_SPENT, now)

    # --- tickets and seats

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

    def _seat(self, lease: Lease, reader: Reader, session: Session, claim: Claim, now: float) -> None:
        _check_claim(lease, session, claim)
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
            self._leases.lend(lease, reader, lease.seats[reader])
            lease.traffic.transport = session.transport.name
            self.desk.mark(Seen.PREFILL, lease.id, Step.SEATED, now, detail=str(reader.peer.worker))
        # A repeated claim is answered again, because the first answer may be lost; but a reader that has had its
        # verdict, or has left, is no longer a reader (rule 5).
        elif lease.seats[reader].state is not ReaderState.LIVE:
            self.desk.count("late.claim")
            return
        ttl_s = self._leases.extend(lease, now)
        blocks = tuple(pack_blocks(ids) for ids in lease.blocks)
        said = lease.handoff, reader.attempt, lease.id, ttl_s, lease.tokens, blocks, lease.progress, lease.final
        # Whatever this prompt was computed on was in the cache, and so among the origins, before its lease began.
        names = self.desk.origins.names
        if names and session.features & Feature.ORIGINS:
            session.send(self.desk, GrantedFrom(*said, names))
        else:
            session.send(self.desk, Granted(*said))

    def _take_share(self, lease: Lease, reader: Reader) -> None:
        """A peer that has reached its quota is refused, so that memory is left for the others."""
        settings, worker = self.desk.settings, reader.peer.worker
        size = promised_bytes(self.desk.identity.layout, self._block_bytes, lease.tokens)
        seats, held = self._leases.held.seats(worker), self._leases.held.bytes(worker)
        if seats >= settings.seats_per_peer_max:
            raise ProtocolError(Reason.BUSY, f"seats_per_peer_max: {worker} reads {seats} leases already")
        if seats and held + size > settings.bytes_per_peer_max:  # one alone may be as large as it is
            raise ProtocolError(Reason.BUSY, f"bytes_per_peer_max: {worker} holds {held} bytes, asks for {size} more")
        self._leases.held.take(lease.id, reader, size)

    def _spend(self, session: Session, claim: Claim, error: ProtocolError, now: float) -> None:
        """The seat of a ticket that came with another prompt is spent: its engine will not use it.

        This is the last check of a claim, so everything else about the ticket is right.
        """
        # Otherwise P would pin the blocks for the rest of the term, for a reader that has been refused for good.
        lease, reader = self._leases.by_handoff.get(claim.handoff), Reader(session.peer, claim.attempt)
        if error.reason is not Reason.CONTENT_MISMATCH or lease is None:
            return
        try:
            ticket = unseal(claim.ticket, self.desk.identity.ticket_keys, 0.0)  # it may have expired while it waited
        except ProtocolError:  # or its key is no longer good
            return
        if ticket.digest not in (b"", lease.digest):  # a ticket of another prompt: it is not this lease's to spend
            return
        if lease.target in ("", reader.peer.worker) and reader not in lease.seats and lease.has_room():
            lease.seats[reader] = Seat(session.number, ReaderState.STALE, version=session.version)
            if lease.used_up:
                self._leases.close(lease, Reason.CONTENT_MISMATCH, now)

    def _refuse(self, session: Session, claim: Claim, error: ProtocolError) -> None:
        self.desk.count(f"claim_refused.{error.reason}")
        detail = error.detail[:DETAIL_CHARS_MAX]
        session.send(self.desk, ClaimRefused(claim.handoff, claim.attempt, error.reason, detail))


def _check_claim(lease: Lease, session: Session, claim: Claim) -> None:
    """The lease is for this D, and of the prompt that it claims."""
    if lease.target not in ("", session.peer.worker):
        raise ProtocolError(Reason.TICKET_FORGED, f"target: this handoff is for {lease.target}")
    if lease.digest != claim.digest:
        raise ProtocolError(Reason.CONTENT_MISMATCH, "digest: the prefiller computed another prompt than the claim's")
