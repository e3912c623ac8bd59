"""Every request is answered, and an answered one is not repeated: workers' messages checked against those received.

Laws, for honest workers with honest peers, in every world:
- What D says to P in a session that P knows is answered in the same step; in one that P does not know, by a Reset. Only
  a claim that waits for its lease, and an offer or a Revoke of what is being stopped, may wait for their answer.
- D says nothing again that was answered, and nothing of an attempt that it has abandoned. What has not been answered
  it says again when `retry_s` is over, neither earlier nor later; a lease it renews well before its term is over.
- What P answers D takes at its word in the same step: the handoff goes on, or ends for the reason that P gave.
- A reader knows what is ready as soon as P does, and P never takes back that a copy was stale, nor why a lease ended.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import msgspec

from kvbaton.protocol.errors import Reason, reason_of
from kvbaton.protocol.ids import PeerId, Reader, WorkerId
from kvbaton.protocol.machines.inbound import Intake, IntakeState
from kvbaton.protocol.machines.lease import LeaseState, ReaderState
from kvbaton.protocol.machines.pairing_state import LinkState
from kvbaton.protocol.wire import messages as m
from kvbaton_proof.sim.promises import HANG, RULE, WRONG, Broken
from kvbaton_proof.sim.world.life import Life

Key = tuple[type, int, int, int]
"""What is said, to which life, in which session, of which attempt or reservation."""

_ENVELOPE = msgspec.msgpack.Decoder(tuple[int, str, int, int, int, msgspec.Raw])
_KINDS = {kind.__struct_config__.tag: kind for kind in m.Message.__args__}
_UNREAD = (m.Hello, m.Welcome, m.HelloRefused, m.Goodbye)
_BODIES = {kind: msgspec.msgpack.Decoder(kind) for kind in _KINDS.values() if kind not in _UNREAD}

_ANSWERS: dict[type, tuple[type, ...]] = {
    m.Joined: (m.Linked,),
    m.Claim: (m.Granted, m.GrantedFrom, m.ClaimRefused),
    m.Renew: (m.Renewed, m.RenewRefused),
    m.Commit: (m.Committed, m.Stale),
    m.Offer: (m.Accepted, m.Quiesced, m.Written),
    m.Revoke: (m.Quiesced,),
    m.Written: (m.Ack,),
}
_ASKED = {
    answer: tuple(ask for ask, by in _ANSWERS.items() if answer in by) for by in _ANSWERS.values() for answer in by
}
_ASKS_ON = (m.Renew, m.Joined)
"""Said again although they were answered: a lease goes on, and a confirmation may be repeated."""
_OF_RESERVATIONS = (m.Offer, m.Accepted, m.Quiesced, m.Revoke, m.Written, m.Ack)
_AFTER_ABANDON = (m.Claim, m.Renew, m.Commit, m.Offer)
_STATES = {IntakeState.CLAIMING: m.Claim, IntakeState.COMMITTING: m.Commit, IntakeState.REVOKING: m.Revoke}
_RENEWING = (IntakeState.GRANTED, IntakeState.COPYING, IntakeState.OFFERED)
_MOVES: dict[type, tuple[IntakeState, ...]] = {
    m.Granted: (IntakeState.CLAIMING,),
    m.GrantedFrom: (IntakeState.CLAIMING,),
    m.ClaimRefused: (IntakeState.CLAIMING,),
    m.Committed: (IntakeState.COMMITTING,),
    m.Stale: (IntakeState.COMMITTING,),
    m.SourceLost: _RENEWING,
    m.Written: (IntakeState.OFFERED, IntakeState.REVOKING),
    m.Quiesced: (IntakeState.OFFERED, IntakeState.REVOKING),
}
"""In which states of D's a word of P's takes it to another."""
SLACK = 0.9
LATE_S = 0.1


def _number(kind: type, message: Any) -> int:
    if kind in _OF_RESERVATIONS:
        return int(message.reservation)
    return int(getattr(message, "attempt", 0))


class Dialogues:
    """Of all honest lives of a cluster."""

    def __init__(self, liars: Collection[WorkerId]) -> None:
        self._liars = liars
        self._by_life: dict[int, Dialogue] = {}

    def watch(self, life: Life) -> None:
        if life.character.name not in self._liars:
            self._by_life[life.peer.incarnation] = Dialogue(life, self._liars)

    def said(self, speaker: int, listener: int, session: int, body: bytes) -> None:
        dialogue = self._by_life.get(speaker)
        if dialogue is not None and listener in self._by_life:
            dialogue.said(listener, session, body)


class Dialogue:
    """What one life says and hears."""

    def __init__(self, life: Life, liars: Collection[WorkerId]) -> None:
        self._life = life
        self._liars = liars
        self._ledger = life.node.ledger
        self._retry_s = life.character.settings.retry_s / (1 + life.character.drift)
        self._answered: set[Key] = set()
        self._abandoned: set[tuple[int, int]] = set()  # (P's life, attempt)
        self._last: dict[Key, float] = {}
        self._stale: set[Key] = set()
        self._judged: set[tuple[int, int, int]] = set()  # (D's life, session, attempt): its verdict was said
        self._told: dict[tuple[int, int, int], tuple[Any, bool]] = {}  # (D's life, lease, attempt): what is ready
        self._lost: dict[tuple[int, int, int], str] = {}  # likewise: why its source ended early
        self._owed: list[tuple[Key, PeerId]] = []
        self._said: set[Key] = set()  # in this step
        self._left: set[int] = set()  # attempts that were heard to be abandoned in this step
        self._terms: dict[int, float] = {}  # by attempt: the lease's term when it was last renewed
        self._word: tuple[Intake, IntakeState, type, str | None] | None = None  # that moves something, and why
        self._sees_ready: list[tuple[int, int, int, int]] = []
        handle = life.node.ledger.on_frame

        def on_frame(worker: WorkerId, frame: bytes, now: float) -> None:
            self._heard(worker, frame)
            handle(worker, frame, now)
            if self._word is not None:
                self._check_word(*self._word)

        setattr(life.node.ledger, "on_frame", on_frame)  # noqa: B010
        life.after_node.append(self._after_step)

    # --- speaking

    def said(self, listener: int, session: int, body: bytes) -> None:
        kind = _KINDS[body[1]]
        if kind in _UNREAD:
            return
        message = _BODIES[kind].decode(body)
        key = (kind, listener, session, _number(kind, message))
        self._said.add(key)
        if kind in _ANSWERS[m.Commit]:
            self._judged.add(key[1:])
        if kind in _ANSWERS:
            self._check_asking(key, message)
            self._last[key] = self._life.world.now
            if kind is m.Renew:
                self._terms.pop(key[3], None)
        elif kind is m.Abandon:
            self._abandoned.add((listener, message.attempt))
        elif kind in (m.Granted, m.GrantedFrom, m.Ready):
            self._told[listener, message.lease, message.attempt] = (message.progress, message.final)
        elif kind in (m.SourceLost, m.RenewRefused):
            self._check_reason(kind, listener, message)
        elif kind is m.Stale:
            self._stale.add(key)
        elif kind is m.Committed and (m.Stale, *key[1:]) in self._stale:
            raise Broken(WRONG, f"{self._name}: says Committed of attempt {key[3]}, of which it said Stale")

    def _has_forgotten(self, lease: Any) -> bool:
        """P remembers as many leases as it may, and none from before its cache was replaced."""
        tombstones, world = self._ledger.producer.tombstones, self._life.world
        was_replaced = "cache_replaced" in world.touches.between(self._name, 0.0, world.now)
        return lease not in tombstones and (was_replaced or len(tombstones) >= tombstones.limit)

    def _check_reason(self, kind: type, listener: int, message: Any) -> None:
        """A reader that did not hear why its lease is over hears the same when it asks."""
        reader = listener, message.lease, message.attempt
        if kind is m.SourceLost:
            self._lost[reader] = message.reason
        elif message.reason != self._lost.get(reader, message.reason) and not self._has_forgotten(message.lease):
            what = f"lease {message.lease} ended for {self._lost[reader]}, and is refused as {message.reason}"
            raise Broken(RULE, f"{self._name}: {what}")

    def _check_asking(self, key: Key, message: Any) -> None:
        kind, listener = key[:2]
        if key in self._answered and key in self._last:  # who hears Quiesced unasked says once that it is revoked
            raise Broken(RULE, f"{self._name}: says {kind.__name__} again, and was answered")
        if kind in _AFTER_ABANDON and (listener, message.attempt) in self._abandoned:
            raise Broken(RULE, f"{self._name}: says {kind.__name__} of what it has abandoned")
        if kind in (m.Claim, m.Commit, m.Revoke):
            apart_s = self._life.world.now - self._last.get(key, float("-inf"))
            if apart_s < SLACK * self._retry_s:
                raise Broken(RULE, f"{self._name}: says {kind.__name__} again after {apart_s:.3f} s")

    # --- hearing

    def _heard(self, source: WorkerId, frame: bytes) -> None:
        """A frame that the node is about to handle, if it is one that it must understand."""
        try:
            version, worker, speaker, to, session, raw = _ENVELOPE.decode(frame)
            body = bytes(raw)
            kind = _KINDS[body[1]]
            if kind in _UNREAD or worker != source or source in self._liars:
                return
            message = _BODIES[kind].decode(body)
        except (msgspec.MsgspecError, LookupError, UnicodeDecodeError):
            return  # garbled
        if version not in self._life.character.versions or to != self._life.peer.incarnation:
            return
        number = _number(kind, message)
        peer = PeerId(source, speaker)  # type: ignore[arg-type]
        link = self._ledger.consumer.links.current(peer, session)
        if link is not None:
            if kind in _MOVES:
                self._note_word(kind, number, message)
            for asked in _ASKED.get(kind, ()):
                if asked not in _ASKS_ON:
                    self._answered.add((asked, speaker, session, number))
        granted = self._ledger.sessions.joined(session, peer)
        if kind in _ANSWERS and (link if kind is m.Written else granted) is not None:
            self._owed.append(((kind, speaker, session, number), peer))
            if kind is m.Renew and not message.final:
                self._sees_ready.append((speaker, session, message.lease, message.attempt))
        elif kind is m.Abandon:
            self._left.add(number)
        elif kind is m.Ack and granted is not None:
            self._answered.add((m.Written, speaker, session, number))

    def _note_word(self, kind: type, number: int, message: Any) -> None:
        consumer = self._ledger.consumer
        by: Mapping[Any, Intake] = consumer.by_reservation if kind in _OF_RESERVATIONS else consumer.by_attempt
        intake = by.get(number)
        if intake is not None and intake.state in _MOVES[kind]:
            reason = Reason.STALE if kind is m.Stale else getattr(message, "reason", None)
            self._word = (intake, intake.state, kind, reason if intake.end is None else None)

    # --- after a step

    def _after_step(self) -> None:
        if self._owed:
            self._check_answers()
        self._said.clear()
        self._left.clear()
        if self._ledger.consumer.by_handoff:
            self._check_asked_again()
        if self._ledger.producer.leases:
            self._check_told()

    def _check_answers(self) -> None:
        said = self._said
        for (kind, speaker, session, number), peer in self._owed:
            if any((by, speaker, session, number) in said for by in _ANSWERS[kind]):
                continue
            if (m.Reset, speaker, session, 0) in said or self._may_wait(kind, session, number, peer):
                continue
            raise Broken(HANG, f"{self._name}: does not answer {kind.__name__} of {peer.worker}")
        for speaker, session, lease, attempt in self._sees_ready:
            renewed = (m.Renewed, speaker, session, attempt) in said
            if (m.RenewRefused, speaker, session, attempt) in said:
                continue  # of several in one step this one may have been refused
            if renewed and (m.Ready, speaker, session, attempt) not in said:
                raise Broken(HANG, f"{self._name}: does not say what of lease {lease} is ready")
        self._owed.clear()
        self._sees_ready.clear()

    def _may_wait(self, kind: type, session: int, number: int, peer: PeerId) -> bool:
        producer = self._ledger.producer
        if kind in (m.Claim, m.Offer, m.Revoke) and self._ledger.sessions.joined(session, peer) is None:
            return True  # it waited, and who asked said goodbye in the same step
        if kind is m.Claim:
            if number in self._left or (int(peer.incarnation), session, number) in self._judged:
                return True  # it waited, and was taken back in the same step; or comes again, after its verdict
            reader = Reader(peer, number)
            seats = (lease.seats.get(reader) for lease in producer.leases.values())
            return reader in producer.parked or any(seat and seat.state is not ReaderState.LIVE for seat in seats)
        if kind in (m.Offer, m.Revoke):
            return (session, number) in producer.writer.outlets
        return False

    def _check_word(self, intake: Intake, state: IntakeState, kind: type, reason: str | None) -> None:
        """A word has moved what it was about; what it ended, ended for its reason."""
        self._word = None
        if intake.state is state:
            raise Broken(HANG, f"{self._name}: heard {kind.__name__}, and is {state.value} as before")
        if reason and intake.end is not None and intake.end.reason != reason_of(reason):
            raise Broken(RULE, f"{self._name}: heard {reason}, and ends for {intake.end.reason}")

    def _check_asked_again(self) -> None:
        """What D waits to hear it has asked for, not too long ago."""
        now = self._life.world.now
        for intake in self._ledger.consumer.by_handoff.values():
            link, kind = intake.link, _STATES.get(intake.state)
            if link.state is not LinkState.UP or link.peer is None or link.worker in self._liars:
                continue
            patience_s = self._retry_s
            if intake.state in _RENEWING and intake.source is not None:
                kind = m.Renew
                patience_s = self._terms.setdefault(intake.attempt, intake.source.ttl_s) / 2
            if kind is None:
                continue
            number = intake.reservation if kind is m.Revoke else intake.attempt
            key = (kind, int(link.peer.incarnation), link.session, int(number))
            since = self._last.setdefault(key, now)
            if now - since > patience_s + LATE_S:
                raise Broken(HANG, f"{self._name}: waits, {intake.state.value}, and does not say {kind.__name__}")

    def _check_told(self) -> None:
        """Whoever reads a lease has been told what is ready of it; whom P writes to need not know."""
        producer = self._ledger.producer
        for lease in producer.leases.values():
            if lease.state is LeaseState.CLOSING:
                continue
            for reader, seat in lease.seats.items():
                if seat.state is not ReaderState.LIVE or (lease.id, reader) in producer.writer.by_reader:
                    continue
                told = self._told.get((int(reader.peer.incarnation), int(lease.id), reader.attempt))
                if told is not None and told != (lease.progress, lease.final):
                    raise Broken(HANG, f"{self._name}: more of lease {lease.id} is ready than {reader} was told")

    @property
    def _name(self) -> str:
        return str(self._life.character.name)
