"""P's side of push: takes offers, writes what is ready, sends Written or Quiesced, remembers revocations.

Laws: one outlet per reader, ever. A reservation that was revoked or closed is never written again: it is remembered,
and when memory is full a floor stands for everything older (numbers rise per D), so a Revoke may overtake its Offer.

P's write into one reservation of D's (push). One writer, one attempt, and an end that D can rely on.

Laws: after Written or Quiesced has been sent, P never touches the spans again. Neither is sent while a write of
any rank is moving. The blocks written from stay pinned until then.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from kvbaton.protocol.bounded import Remembered
from kvbaton.protocol.effects import Side as Seen
from kvbaton.protocol.effects import Step
from kvbaton.protocol.errors import ProtocolError, Reason
from kvbaton.protocol.events import CopyEnded
from kvbaton.protocol.geometry.progress import Progress, nothing
from kvbaton.protocol.geometry.spans import SpanSide
from kvbaton.protocol.ids import LeaseId, Reader, ReservationId
from kvbaton.protocol.legality import Table, Verdict, pairs
from kvbaton.protocol.machines.context import Cargo, LedgerContext, Parts, Route, moves, start
from kvbaton.protocol.machines.lease import Lease, LeaseState, ReaderEvent, ReaderState, judge
from kvbaton.protocol.machines.pairing_state import Session
from kvbaton.protocol.wire.codec import unpack_blocks
from kvbaton.protocol.wire.messages import Accepted, Ack, Message, Offer, Quiesced, Revoke, Written


class OutletState(enum.Enum):
    WRITING = "writing"
    STOPPING = "stopping"  # no new writes; waiting for those in flight
    FLUSHED = "flushed"  # Written sent, repeated until acknowledged
    CLOSED = "closed"


class OutletEvent(enum.Enum):
    FLUSHED = "flushed"
    STOPPED = "stopped"
    RESTED = "rested"
    ACKED = "acked"


_S, _E = OutletState, OutletEvent
OUTLET = Table(
    "outlet",
    OutletState,
    OutletEvent,
    next={
        (_S.WRITING, _E.FLUSHED): _S.FLUSHED,
        (_S.WRITING, _E.STOPPED): _S.STOPPING,
        (_S.STOPPING, _E.RESTED): _S.CLOSED,
        (_S.FLUSHED, _E.ACKED): _S.CLOSED,
        (_S.FLUSHED, _E.STOPPED): _S.CLOSED,
    },
    late=pairs({_S.CLOSED}, OutletEvent)
    | {(_S.STOPPING, _E.STOPPED), (_S.STOPPING, _E.FLUSHED), (_S.STOPPING, _E.ACKED)}
    | {(_S.FLUSHED, _E.RESTED), (_S.WRITING, _E.RESTED)},
    illegal={(_S.WRITING, _E.ACKED), (_S.FLUSHED, _E.FLUSHED)},
)


@dataclass(slots=True)
class Outlet:
    """P's state of one reservation."""

    lease: LeaseId
    reader: Reader
    reservation: ReservationId
    digest: bytes
    first_token: int
    blocks: tuple[tuple[int, ...], ...]  # D's
    sent: Progress  # what has been handed to the ranks to write
    parts: Parts
    state: OutletState = OutletState.WRITING
    reason: Reason | None = None  # why P stopped, if of its own accord
    deadline: float = 0.0


Key = tuple[int, ReservationId]
"""(session number, reservation)"""


class Leases(Protocol):
    """The producer, as seen by the writer."""

    leases: dict[LeaseId, Lease]

    @property
    def restless_blocks(self) -> int: ...

    def leave(self, lease: Lease, reader: Reader, event: ReaderEvent, now: float) -> None: ...
    def why_over(self, id: LeaseId, reader: Reader) -> Reason: ...
    def given_up(self, lease: Lease, reader: Reader, reason: str) -> None: ...
    def release_if_at_rest(self, lease: Lease, now: float) -> None: ...


class Revocations:
    """Reservations of one session that must not be written (again)."""

    __slots__ = ("_floor", "_seen")

    def __init__(self, limit: int) -> None:
        self._floor = 0
        self._seen: Remembered[ReservationId, None] = Remembered(limit)

    def add(self, reservation: ReservationId) -> None:
        forgotten = self._seen.put(reservation, None)
        if forgotten is not None:
            self._floor = max(self._floor, forgotten[0])

    def cover(self, reservation: ReservationId) -> bool:
        return reservation <= self._floor or reservation in self._seen


class Writer:
    """All outlets of this node."""

    def __init__(self, desk: LedgerContext, leases: Leases) -> None:
        self.desk = desk
        self.outlets: dict[Key, Outlet] = {}
        self.by_reader: dict[tuple[LeaseId, Reader], Key] = {}
        self.sessions: dict[int, Session] = {}
        self.revoked: dict[int, Revocations] = {}
        self._over: set[int] = set()  # ended sessions that still have outlets coming to rest
        self._leases = leases
        self.on_stuck: Callable[[Session, float], None] = lambda session, now: None

    # --- messages

    def on_offer(self, session: Session, offer: Offer, now: float) -> None:
        self.sessions[session.number] = session
        key = (session.number, offer.reservation)
        if key in self.outlets:
            self._repeat(key, self.outlets[key])  # silent while stopping: Quiesced follows when it is at rest
        elif self._revocations(session.number).cover(offer.reservation):
            self._send(key, Quiesced(offer.reservation, None))
        else:
            try:
                self._open(session, offer, now)
            except ProtocolError as error:
                self.desk.count(f"offer_refused.{error.reason}")
                self._revocations(session.number).add(offer.reservation)
                self._send(key, Quiesced(offer.reservation, error.reason))

    def on_revoke(self, session: Session, message: Revoke, now: float) -> None:
        self.sessions[session.number] = session
        key = (session.number, message.reservation)
        # Remembered before anything is looked up: the Offer may still be on its way, and must find it there (rule 13).
        self._revocations(session.number).add(message.reservation)
        outlet = self.outlets.get(key)
        lease = self._leases.leases.get(message.lease)
        reader = Reader(session.peer, message.attempt)
        if lease is not None and reader in lease.seats:
            self._leases.given_up(lease, reader, message.reason)
        if outlet is not None and outlet.state is OutletState.WRITING:
            self._stop(key, outlet, None, now)
        elif outlet is None or outlet.state is not OutletState.STOPPING:
            self._send(key, Quiesced(message.reservation, None))
        if lease is not None and reader in lease.seats:
            self._leases.leave(lease, reader, ReaderEvent.LEFT, now)

    def on_ack(self, session: Session, message: Ack, now: float) -> None:
        key = (session.number, message.reservation)
        outlet = self.outlets.get(key)
        if outlet is None or not self._step(outlet, OutletEvent.ACKED):
            self.desk.count("late.ack")
            return
        self._close(key, outlet, now)
        self._leases.leave(self._leases.leases[outlet.lease], outlet.reader, ReaderEvent.PROVEN, now)

    # --- progress

    def pump(self, lease: Lease, reader: Reader, now: float) -> bool:
        """Write what has become ready for this reader; False when it is not a reader to be written to."""
        key = self.by_reader.get((lease.id, reader))
        if key is None:
            return False
        outlet = self.outlets[key]
        # Only what is ready on every rank is written, and each rectangle once: `sent` is what was handed to the ranks,
        # not what has arrived, so a second Ready while copies move starts none of them again. A plan that does not fit
        # the offered blocks ends this outlet alone: D chose them, and the lease is still good for other readers.
        if outlet.state is OutletState.WRITING:
            session = self.sessions[key[0]]
            route = Route(session.plan, SpanSide.SOURCE, session.peer, session.transport.name, session.transport.weaves)
            cargo = Cargo(lease.blocks, outlet.blocks, lease.tokens, outlet.first_token)
            try:
                listed = moves(route, cargo, outlet.sent, lease.progress)
            except ProtocolError as error:
                self._stop(key, outlet, error.reason, now)
                return True
            outlet.sent = lease.progress
            outlet.deadline = now + self.desk.settings.transfer_timeout
            start(self.desk, outlet.parts, route, listed)
            self._flush_if_done(key, outlet, lease, now)
        return True

    def on_copy_ended(self, outlet: Outlet, event: CopyEnded, size: int, now: float) -> None:
        key = self.by_reader.get((outlet.lease, outlet.reader))
        lease = self._leases.leases.get(outlet.lease)
        if key is None or lease is None:
            self.desk.count("late.copy")
            return
        if event.reason is None:
            lease.seats[outlet.reader].work += 1
            if not lease.traffic.moved:
                self.desk.mark(Seen.PREFILL, lease.id, Step.FIRST_BYTE, now)
            lease.traffic.moved += size
            if outlet.state is OutletState.WRITING:  # what is being stopped ends by when it was to, whatever arrives
                outlet.deadline = now + self.desk.settings.transfer_timeout
            self._flush_if_done(key, outlet, lease, now)
        elif outlet.state is OutletState.WRITING:
            self._stop(key, outlet, event.reason, now)
        self.on_rest(outlet, now)

    def on_rest(self, outlet: Outlet, now: float) -> None:
        """Called whenever a part of the outlet came to rest."""
        key = self.by_reader.get((outlet.lease, outlet.reader))
        if key is not None and outlet.parts.at_rest and self._step(outlet, OutletEvent.RESTED):
            self._revocations(key[0]).add(outlet.reservation)
            if key[0] not in self._over:  # else D hears Reset and fences; a plane that forgot D vouches for nothing
                self._send(key, Quiesced(outlet.reservation, outlet.reason))
            self._close(key, outlet, now)
            self._reader_left(outlet, now)

    def on_timer(self, key: Key, now: float) -> None:
        outlet = self.outlets[key]
        if now < outlet.deadline:
            if outlet.state is OutletState.FLUSHED:
                self._repeat(key, outlet)
            self.desk.timers.set(("outlet", key), min(now + self.desk.settings.retry_s, outlet.deadline))
        elif outlet.state is OutletState.WRITING:
            self._stop(key, outlet, Reason.TRANSFER_TIMEOUT, now)
        elif outlet.state is OutletState.STOPPING:  # its rest was not proven: D hears Reset, and fences
            if key[0] not in self._over:
                self.on_stuck(self.sessions[key[0]], now)
        else:  # flushed, and D never acknowledged; its own deadline ends its side
            self._step(outlet, OutletEvent.STOPPED)
            self._close(key, outlet, now)
            self._reader_left(outlet, now)

    # --- endings

    def stop(self, lease: Lease, reader: Reader, reason: Reason | None, now: float) -> None:
        """The reader left or the lease is over: write no more for it."""
        key = self.by_reader.get((lease.id, reader))
        if key is None:
            return
        outlet = self.outlets[key]
        if outlet.state is OutletState.WRITING:
            self._stop(key, outlet, reason, now)
        elif self._step(outlet, OutletEvent.STOPPED):
            self._close(key, outlet, now)

    def at_rest(self, lease: Lease) -> bool:
        """No write from this lease's blocks is in flight."""
        keys = (self.by_reader.get((lease.id, reader)) for reader in lease.seats)
        return all(key is None or self.outlets[key].parts.at_rest for key in keys)

    def on_session_ended(self, session: Session, now: float) -> None:
        for key, outlet in list(self.outlets.items()):
            if key[0] == session.number and outlet.state is OutletState.WRITING:
                self._stop(key, outlet, None, now)
        self._over.add(session.number)
        self._forget_if_over(session.number)

    # --- helpers

    def _open(self, session: Session, offer: Offer, now: float) -> None:
        reader = Reader(session.peer, offer.attempt)
        lease = self._leases.leases.get(offer.lease)
        seat = lease.seats.get(reader) if lease is not None else None
        if lease is None or seat is None or seat.state is not ReaderState.LIVE or lease.state is LeaseState.CLOSING:
            why = self._leases.why_over(offer.lease, reader)
            raise ProtocolError(why, "lease: over, or not claimed by this reader")
        if lease.digest != offer.digest:
            raise ProtocolError(Reason.CONTENT_MISMATCH, "digest: the offer is for another prompt")
        if (lease.id, reader) in self.by_reader:
            raise ProtocolError(Reason.DUPLICATE, "reservation: this reader has offered another one")
        if len(offer.blocks) != len(session.plan.target.groups):
            raise ProtocolError(Reason.BAD_SPAN, "blocks: not one list per group of the target")
        if self._leases.restless_blocks >= self.desk.settings.quarantine_blocks_max:
            raise ProtocolError(Reason.QUARANTINE_FULL, "quarantine_blocks_max: too many writes are not at rest")
        if not (session.transport.can_write and session.transport.can_fence):
            raise ProtocolError(Reason.NO_TRANSPORT, f"transport: {session.transport.name} does not take writes")
        parts = Parts(None)
        blocks = tuple(unpack_blocks(ids) for ids in offer.blocks)
        outlet = Outlet(
            lease.id,
            reader,
            offer.reservation,
            offer.digest,
            offer.first_token,
            blocks,
            nothing(len(lease.blocks)),
            parts,
        )
        parts.owner = outlet
        key = (session.number, offer.reservation)
        self.outlets[key] = outlet
        self.by_reader[lease.id, reader] = key
        outlet.deadline = now + self.desk.settings.transfer_timeout
        self.desk.timers.set(("outlet", key), now + self.desk.settings.retry_s)
        self.desk.mark(Seen.PREFILL, lease.id, Step.OFFERED, now, detail=str(reader.peer.worker))
        self._send(key, Accepted(offer.reservation))
        self.pump(lease, reader, now)

    def _flush_if_done(self, key: Key, outlet: Outlet, lease: Lease, now: float) -> None:
        if outlet.state is not OutletState.WRITING or not outlet.parts.at_rest:
            return
        if not lease.final or outlet.sent != lease.progress:
            return
        # In push no Commit asks P for a verdict, so P asks itself, after the last write has ended and before it says
        # so. Written is both in one: the bytes are visible, and they are this prompt's (rules 6 and 15).
        proven, _ = judge(lease, self.desk.epochs_of)
        if not proven:
            self._stop(key, outlet, Reason.STALE, now)
        else:
            self._step(outlet, OutletEvent.FLUSHED)
            self.desk.mark(Seen.PREFILL, lease.id, Step.WRITTEN, now, detail=str(outlet.reader.peer.worker))
            self._repeat(key, outlet)

    def _repeat(self, key: Key, outlet: Outlet) -> None:
        if outlet.state is OutletState.FLUSHED:
            self._send(key, Written(outlet.lease, outlet.reader.attempt, outlet.reservation, outlet.digest))
        elif outlet.state is OutletState.WRITING:
            self._send(key, Accepted(outlet.reservation))

    def _stop(self, key: Key, outlet: Outlet, reason: Reason | None, now: float) -> None:
        self._step(outlet, OutletEvent.STOPPED)
        outlet.reason = reason
        # Copies that were cancelled may land until they are at rest, and a plane may never say that they are. By this
        # deadline D has fenced us, or soon will; if not, its session is ended, which makes it.
        outlet.deadline = now + self.desk.settings.transfer_timeout + self.desk.settings.revoke_timeout
        self.desk.timers.set(("outlet", key), outlet.deadline)
        self.desk.cancel(outlet.parts)
        self.on_rest(outlet, now)

    def _close(self, key: Key, outlet: Outlet, now: float) -> None:
        self._revocations(key[0]).add(outlet.reservation)
        self.desk.timers.clear(("outlet", key))
        del self.outlets[key]
        del self.by_reader[outlet.lease, outlet.reader]
        self._forget_if_over(key[0])

    def _reader_left(self, outlet: Outlet, now: float) -> None:
        lease = self._leases.leases.get(outlet.lease)
        if lease is not None:
            self._leases.leave(lease, outlet.reader, ReaderEvent.LEFT, now)
            self._leases.release_if_at_rest(lease, now)

    def _step(self, outlet: Outlet, event: OutletEvent) -> bool:
        state = OUTLET.step(outlet.state, event)
        if isinstance(state, Verdict):
            if event is not OutletEvent.RESTED:
                self.desk.count(f"{state.value}.outlet")
            return False
        outlet.state = state
        return True

    def _revocations(self, session: int) -> Revocations:
        return self.revoked.setdefault(session, Revocations(self.desk.settings.revoked_max))

    def _forget_if_over(self, session: int) -> None:
        if session in self._over and not any(key[0] == session for key in self.outlets):
            self._over.discard(session)
            self.revoked.pop(session, None)
            self.sessions.pop(session, None)

    def _send(self, key: Key, message: Message) -> None:
        self.sessions[key[0]].send(self.desk, message)
