"""The one place where a node's handoffs are decided: events, messages and time go in, effects come out.

A ledger belongs to an engine, not to a rank. It does no I/O, reads no clock, starts no thread and never raises because
of a peer, a client or the network. The production node and the simulator run this same class.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kvbaton.protocol import events as ev
from kvbaton.protocol.bounded import Buckets
from kvbaton.protocol.effects import Effect, ForgetCache, Mark
from kvbaton.protocol.errors import ProtocolError, Reason
from kvbaton.protocol.ids import Incarnation, PeerId, WorkerId
from kvbaton.protocol.legality import may_say
from kvbaton.protocol.machines.consumer import Consumer
from kvbaton.protocol.machines.context import EpochsOf, Identity, LedgerContext
from kvbaton.protocol.machines.inbound import Intake
from kvbaton.protocol.machines.lease import Lease
from kvbaton.protocol.machines.pairing_state import Link, Sessions
from kvbaton.protocol.machines.producer import Producer
from kvbaton.protocol.machines.push_writer import Outlet
from kvbaton.protocol.machines.puts import Puts
from kvbaton.protocol.settings import Settings
from kvbaton.protocol.wire import messages as m
from kvbaton.protocol.wire.codec import Envelope, Folded, FoldedHello, FoldedWelcome, read, unfolded

Handler = Callable[[Any, Any, float], None]
_UNFOLDED: dict[type, type] = {FoldedHello: m.Hello, FoldedWelcome: m.Welcome}

GREETING_BYTES = 1024
"""A card counts as one greeting more for each of these: what it costs to read, check and map grows with its size."""


class Ledger:
    """All handoffs of one engine, in both roles."""

    def __init__(self, identity: Identity, settings: Settings, epochs_of: EpochsOf) -> None:
        self.desk = LedgerContext(identity, settings, epochs_of)
        self.producer = Producer(self.desk)
        self.consumer = Consumer(self.desk)
        links = self.consumer.links
        self.sessions = Sessions(
            self.desk, self.producer.on_session_ended, self.producer.is_idle, links.session_with, links.on_connected
        )
        links.on_pairing, links.joined_since = self.sessions.end_unknown, self.sessions.joined_since
        self.producer.writer.on_stuck = self.sessions.end
        # A fence shuts a peer out of our memory in both roles: if it reads from us as well, it must pair again.
        links.on_fence = lambda peer, now: self.sessions.end_worker(peer.worker, peer.incarnation, now)
        self.puts = Puts(self.desk)
        self._greetings: Buckets[WorkerId] = Buckets(settings.greetings_per_s_max, settings.greetings_burst_max)
        self._on_event = self._event_handlers()
        self._of_target = self._target_messages()
        self._of_source = self._source_messages()

    # --- inputs

    def on_event(self, event: ev.Event, now: float) -> None:
        """Something happened in the engine, on a rank, in the store or around us."""
        self._on_event[type(event)](event, now)

    def on_frame(self, worker: WorkerId, frame: bytes, now: float) -> None:
        """Bytes came from the authenticated worker `worker`."""
        try:
            # The transport has authenticated `worker`; the envelope is only its own claim (rule 29). Past this point no
            # code looks at a frame's bytes again, and nothing that a peer sends raises.
            envelope, message = read(frame, self.desk.identity.versions)
            if envelope.worker != worker:
                raise ProtocolError(Reason.BAD_MESSAGE, f"worker: {worker} speaks as {envelope.worker}")
        except ProtocolError as error:
            self.desk.count(f"frames_refused.{error.reason}")
            return
        self.desk.count("frames")
        kind: type = _UNFOLDED.get(type(message), type(message))
        if not may_say(self.desk.identity.role_of(worker), kind):
            self._forbid(envelope, kind, message.nonce if isinstance(message, Folded) else 0, now)
        elif isinstance(message, Folded):
            self._on_greeting(envelope, message, now)
        else:
            self._on_message(envelope, message, now)

    def on_time(self, now: float) -> None:
        """Handle everything that is due by `now`, once: what is due again at once waits for the next call."""
        # A handler that arms itself for now is not due again before the clock is looked at anew (rule 26): otherwise
        # one handoff with a tiny interval would keep this loop, and with it every other handoff of the node.
        timers = self.desk.timers
        while (key := timers.pop_due(now)) is not None:
            kind, name = key
            self._timer(kind, name, now)

    def next_deadline(self) -> float | None:
        return self.desk.timers.next_at()

    def take_effects(self) -> list[Effect]:
        """The effects to carry out now, in order; each is returned once."""
        effects, self.desk.effects = self.desk.effects, []
        return effects

    def take_marks(self) -> list[Mark]:
        """Steps of handoffs since the last call, in order."""
        if not self.desk.marks:
            return []
        marks = list(self.desk.marks)
        self.desk.marks.clear()
        return marks

    def leave(self, now: float) -> None:
        """This incarnation is over (shutdown, or the cache was replaced): release everything, say goodbye to all
        peers."""
        self.consumer.void(now)
        self.producer.void(now, leaving=True)
        self.consumer.links.say_goodbye(now)
        self.sessions.say_goodbye(now)

    def is_idle(self) -> bool:
        """Nothing is held, moving or owed."""
        held = self.producer.leases or self.consumer.by_handoff or self.puts.states
        return not held and not self.consumer.links.fencing and not self.producer.claims.waiting

    # --- messages

    def _on_greeting(self, envelope: Envelope, folded: Folded, now: float) -> None:
        """Decode the card only of a hello that is within its sender's quota, or that we wait for."""
        sender = envelope.sender
        if isinstance(folded, FoldedHello):
            if not self._may_greet(sender, folded, now):
                return
        elif envelope.to != self.desk.identity.me.incarnation:
            self.desk.count("late.incarnation")
            return
        elif not self.consumer.links.awaits(sender, folded.nonce):
            self.desk.count("late.welcome")
            return
        try:
            message = unfolded(folded)
        except ProtocolError as error:
            self.desk.count(f"frames_refused.{error.reason}")
            if isinstance(folded, FoldedHello):
                self.sessions.refuse(sender, folded.nonce, error, envelope.version)
            else:
                self.consumer.links.lose(self.consumer.links.by_worker[sender.worker], error.reason, error.detail, now)
        else:
            self._on_message(envelope, message, now)

    def _on_message(self, envelope: Envelope, message: m.Message, now: float) -> None:
        sender, kind = envelope.sender, type(message)
        if isinstance(message, m.Hello):
            self.sessions.on_hello(sender, message, envelope.version, now)
        elif kind in self._of_target:
            self._from_target(envelope, sender, message, now)
        elif envelope.to != self.desk.identity.me.incarnation:
            self.desk.count("late.incarnation")
        elif isinstance(message, m.Welcome):
            self.consumer.links.on_welcome(sender, envelope.session, message, envelope.version, now)
        elif isinstance(message, m.HelloRefused):
            self.consumer.links.on_refused(sender, message, now)
        elif isinstance(message, m.Reset):
            self._on_reset(sender, envelope.session, message, now)
        elif isinstance(message, m.Goodbye):
            self._on_goodbye(sender, envelope.session, now)
        else:
            link = self.consumer.links.current(sender, envelope.session)
            if link is None:
                self.desk.count("late.session")
            else:
                self._of_source[kind](link, message, now)

    def _forbid(self, envelope: Envelope, kind: type, nonce: int, now: float) -> None:
        """The member's key does not allow this. A peer that says hello may be misconfigured, and is told."""
        self.desk.count(f"forbidden.{kind.__name__.lower()}")
        sender = envelope.sender
        if kind is m.Hello and self._greetings.take(sender.worker, now):
            role = self.desk.identity.role_of(sender.worker)
            refusal = m.HelloRefused(nonce, Reason.FORBIDDEN, f"role: the key of {sender.worker} is for {role}")
            self.desk.send(sender.worker, sender.incarnation, 0, refusal, envelope.version)

    def _may_greet(self, sender: PeerId, hello: FoldedHello, now: float) -> bool:
        """A worker that keeps sending hellos gets a few answers a second, and evicts no session but its own."""
        settings = self.desk.settings
        if not self._greetings.take(sender.worker, now, 1.0 + len(hello.card) // GREETING_BYTES):
            self.desk.count("over_quota.greetings")
            return False
        waiting = [
            s for s in self.sessions.by_number.values()
            if not s.joined and s.peer.worker == sender.worker and (s.peer, s.nonce) != (sender, hello.nonce)
        ]  # fmt: skip
        if len(waiting) >= settings.unconfirmed_per_peer_max:
            self.desk.count("over_quota.sessions")
            self.sessions.end(waiting[0], now)
        return True

    def _from_target(self, envelope: Envelope, sender: PeerId, message: m.Message, now: float) -> None:
        """A message of a D to us as P: only in a session of this incarnation that it has confirmed."""
        ours = envelope.to == self.desk.identity.me.incarnation
        session = self.sessions.by_number.get(envelope.session) if ours else None
        # Unknown here, because it is of an earlier incarnation of ours or was evicted: D is told, since it would
        # otherwise wait for its deadline. Not confirmed yet: Joined is on its way, and D repeats its message.
        if session is None or session.peer != sender:
            self.desk.count("late.session")
            reset = m.Reset(envelope.to)
            self.desk.send(sender.worker, sender.incarnation, envelope.session, reset, envelope.version)
        elif isinstance(message, m.Joined):
            self.sessions.on_joined(session, message, now)
        elif session.joined:
            self._of_target[type(message)](session, message, now)
        else:
            self.desk.count("late.session")

    def _on_reset(self, sender: PeerId, session: int, message: m.Reset, now: float) -> None:
        link = self.consumer.links.by_worker.get(sender.worker)
        spoken_to = PeerId(sender.worker, Incarnation(message.incarnation))
        if link is not None and link.peer == spoken_to and link.session == session:
            detail = "the source no longer knows this session"
            self.consumer.links.lose(link, Reason.WRONG_INCARNATION, detail, now)

    def _on_goodbye(self, sender: PeerId, session: int, now: float) -> None:
        granted = self.sessions.joined(session, sender)
        link = self.consumer.links.current(sender, session)
        if granted is not None:  # ours and theirs are counted apart: a link of the same number is another session
            self.sessions.end(granted, now)
        elif link is not None:
            self.consumer.links.lose(link, Reason.PEER_GONE, "the source said goodbye", now)

    # --- events and timers

    def _on_copy_ended(self, event: ev.CopyEnded, now: float) -> None:
        parts = self.desk.owners.get(event.job)
        if parts is None or event.job not in parts.moving:
            self.desk.count("late.copy")
            return
        moved = parts.ended(event)
        if event.reason is None:
            self.desk.counts["copies"] += 1
            self.desk.counts["bytes_moved"] += moved.bytes
            parts.moved += moved.bytes
        if event.at_rest:
            del self.desk.owners[event.job]
        if isinstance(parts.owner, Intake):
            self.consumer.on_copy_ended(parts.owner, event, now)
        elif isinstance(parts.owner, Link):
            self.consumer.links.on_probe_ended(parts.owner, event, now)
        elif isinstance(parts.owner, Lease):
            self.producer.release_if_at_rest(parts.owner, now)
        else:
            assert isinstance(parts.owner, Outlet)
            self.producer.writer.on_copy_ended(parts.owner, event, moved.bytes, now)

    def _on_copy_rested(self, event: ev.CopyRested, now: float) -> None:
        parts = self.desk.owners.pop(event.job, None)
        if parts is None:
            self.desk.count("late.copy")
            return
        parts.rested(event.job)
        if isinstance(parts.owner, Intake):
            self.consumer.on_rest(parts.owner, now)
        elif isinstance(parts.owner, Lease):
            self.producer.release_if_at_rest(parts.owner, now)
        elif not isinstance(parts.owner, Link):  # a probe has nothing that could land
            assert isinstance(parts.owner, Outlet)
            self.producer.writer.on_rest(parts.owner, now)

    def _on_departed(self, event: ev.Departed, now: float) -> None:
        self.sessions.end_worker(event.worker, event.incarnation, now)
        lives = any(s.joined and s.peer.worker == event.worker for s in self.sessions.by_number.values())
        if event.reason is Reason.PEER_GONE and not lives:
            self.producer.on_departed(event.worker, now)
        self.consumer.links.lose_worker(event, now)

    def _on_line_refused(self, event: ev.LineRefused, now: float) -> None:
        """Concerns the life that answered there, and a greeting that none has answered; not one that is listed since
        at another address."""
        link = self.consumer.links.by_worker.get(event.worker)
        if link is None:
            return
        if link.peer is None:
            detail = f"nothing listens at the address of worker {event.worker}"
            self.consumer.links.lose(link, Reason.PEER_GONE, detail, now)
        else:
            self._on_departed(ev.Departed(event.worker, link.peer.incarnation), now)

    def _on_plane_failed(self, event: ev.PlaneFailed, now: float) -> None:
        role, number = event.holder
        if role == "session":
            self.sessions.avoid(number, now)
            return
        link = self.consumer.links.by_worker.get(event.peer.worker)
        if link is not None and link.greeting.nonce == number:
            self.consumer.links.avoid(link, event.detail or "it could not be opened here", now)

    def _on_drain(self, event: ev.DrainStarted, now: float) -> None:
        self.producer.draining = True
        self.producer.let_turns_go(now)

    def _on_cache_replaced(self, event: ev.CacheReplaced, now: float) -> None:
        # An engine that slept forgets its cache when the next request comes: what that one has only asked for is of no
        # member that is gone, since its grant will be looked at (rule 36).
        self.consumer.void(now, granted_only=event.forgotten)
        self.producer.void(now)
        if event.forgotten:
            self.desk.origins.forgotten()
            self.desk.counts["cache_reset_blocks"] += event.blocks

    def _on_members_gone(self, event: ev.MembersGone, now: float) -> None:
        gone = self.desk.origins.gone(self.desk.identity.is_gone)
        if gone:
            self.desk.count("cache_resets")
            self.desk.emit(ForgetCache(gone))

    def _timer(self, kind: str, name: Any, now: float) -> None:
        match kind:
            case "lease":
                self.producer.on_expired(name, now)
            case "parked":
                self.producer.claims.on_parked_too_long(name, now)
            case "outlet":
                self.producer.writer.on_timer(name, now)
            case "intake":
                self.consumer.on_deadline(name, now)
            case "pulse":
                self.consumer.on_pulse(name, now)
            case "link":
                self.consumer.links.on_timer(name, now)
            case _:
                self.puts.on_timer(name, now)

    def _event_handlers(self) -> dict[type, Callable[[Any, float], None]]:
        producer, consumer = self.producer, self.consumer
        return {
            ev.LeaseBegun: producer.on_begun,
            ev.LeaseExtended: producer.on_extended,
            ev.LeaseProgressed: producer.on_progressed,
            ev.LeaseCompleted: producer.on_completed,
            ev.SourceEnded: producer.on_source_ended,
            ev.Wanted: consumer.on_wanted,
            ev.TurnedAway: consumer.on_turned_away,
            ev.Disowned: consumer.disowned.on_disowned,
            ev.Allocated: consumer.on_allocated,
            ev.NotNeeded: consumer.on_not_needed,
            ev.GaveUp: consumer.on_not_needed,
            ev.CopyEnded: self._on_copy_ended,
            ev.CopyRested: self._on_copy_rested,
            ev.RankFenced: lambda event, now: consumer.links.on_fenced(event.rank, event.peer, now),
            ev.PutWanted: self.puts.on_wanted,
            ev.StoreEnded: self.puts.on_ended,
            ev.Departed: self._on_departed,
            ev.LineRefused: self._on_line_refused,
            ev.PlaneFailed: self._on_plane_failed,
            ev.Discarded: producer.on_discarded,
            ev.DrainStarted: self._on_drain,
            ev.CacheReplaced: self._on_cache_replaced,
            ev.MembersGone: self._on_members_gone,
        }

    def _target_messages(self) -> dict[type, Handler]:
        producer = self.producer
        return {
            m.Joined: self.sessions.on_joined,
            m.Claim: producer.claims.on_claim,
            m.Renew: producer.on_renew,
            m.Commit: producer.on_commit,
            m.Abandon: producer.on_abandon,
            m.Offer: producer.writer.on_offer,
            m.Ack: producer.writer.on_ack,
            m.Revoke: producer.writer.on_revoke,
        }

    def _source_messages(self) -> dict[type, Handler]:
        consumer = self.consumer
        return {
            m.Linked: lambda link, message, now: consumer.links.on_linked(link, now),
            m.Granted: consumer.on_granted,
            m.GrantedFrom: consumer.on_granted,
            m.ClaimRefused: consumer.on_claim_refused,
            m.Renewed: consumer.on_renewed,
            m.RenewRefused: consumer.on_renew_refused,
            m.Ready: consumer.pulls.on_ready,
            m.Committed: consumer.pulls.on_committed,
            m.Stale: consumer.pulls.on_stale,
            m.SourceLost: consumer.on_source_lost,
            m.Accepted: consumer.pushes.on_accepted,
            m.Written: consumer.pushes.on_written,
            m.Quiesced: consumer.pushes.on_quiesced,
        }
