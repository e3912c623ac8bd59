"""P's book of sessions: answers greetings, confirms sessions, ends the ones that they replace.

Bound: `sessions_max` in all; unconfirmed ones give way first, and when all are confirmed a new D is told BUSY.
"""

from __future__ import annotations

from collections.abc import Callable

from kvbaton.protocol.desk import Desk
from kvbaton.protocol.effects import Connect, Disconnect, Invitation, Send
from kvbaton.protocol.errors import ProtocolError, Reason
from kvbaton.protocol.ids import Incarnation, PeerId, WorkerId
from kvbaton.protocol.messages import DETAIL_CHARS_MAX, Goodbye, Hello, HelloRefused, Joined, Linked, Welcome
from kvbaton.protocol.peer import Session, pair_as_source


class Sessions:
    """Sessions granted by this node, by number; at most one per worker is confirmed."""

    def __init__(self, desk: Desk, on_ended: Callable[[Session, float], None]) -> None:
        self.desk = desk
        self.by_number: dict[int, Session] = {}
        self._last = 0
        self._on_ended = on_ended

    def joined(self, number: int, sender: PeerId) -> Session | None:
        """The confirmed session of that number, if it is the sender's."""
        session = self.by_number.get(number)
        return session if session is not None and session.joined and session.peer == sender else None

    def on_hello(self, sender: PeerId, hello: Hello, now: float) -> None:
        known = next((s for s in self.by_number.values() if s.peer == sender and s.nonce == hello.nonce), None)
        try:
            session = known or self._open(sender, hello)
        except ProtocolError as error:
            self.desk.count(f"hello_refused.{error.reason}")
            refusal = HelloRefused(hello.nonce, error.reason, error.detail[:DETAIL_CHARS_MAX])
            self.desk.send(sender.worker, sender.incarnation, 0, refusal)
            return
        card = self.desk.identity.card()
        welcome = Welcome(hello.nonce, card, session.transport.name, ())
        ranks = len(session.plan.target.ranks)
        invitation = Invitation(sender, session.transport.name, ranks)
        self.desk.emit(Send(sender.worker, sender.incarnation, session.number, welcome, invitation))

    def on_joined(self, session: Session, message: Joined, now: float) -> None:
        if not session.joined:
            ranks = len(session.plan.target.ranks)
            if len(message.endpoints) != ranks * len(self.desk.identity.layout.ranks):
                self.desk.count("illegal.joined")
                return
            self._end_earlier(session, now)
            session.joined = True
            self.desk.emit(Connect(session.peer, session.transport.name, ranks, message.endpoints))
        self.desk.send(session.peer.worker, session.peer.incarnation, session.number, Linked())

    def end(self, session: Session, now: float) -> None:
        """Everything held for that peer in that session ends; its data connections are closed."""
        if self.by_number.pop(session.number, None) is not None and session.joined:
            self._on_ended(session, now)
            ranks = len(session.plan.target.ranks)
            self.desk.emit(Disconnect(session.peer, session.transport.name, ranks))

    def end_worker(self, worker: WorkerId, incarnation: Incarnation, now: float) -> None:
        for session in list(self.by_number.values()):
            if session.peer.worker == worker and incarnation in (0, session.peer.incarnation):
                self.end(session, now)

    def say_goodbye(self, now: float) -> None:
        for session in list(self.by_number.values()):
            self.desk.send(session.peer.worker, session.peer.incarnation, session.number, Goodbye())
            self.end(session, now)

    def _end_earlier(self, session: Session, now: float) -> None:
        """Whatever that worker had before, in this or an earlier life, is over."""
        for other in [s for s in self.by_number.values() if s.joined and s.peer.worker == session.peer.worker]:
            self.end(other, now)

    def _open(self, sender: PeerId, hello: Hello) -> Session:
        if len(self.by_number) >= self.desk.settings.sessions_max:
            oldest = next((s for s in self.by_number.values() if not s.joined), None)
            if oldest is None:
                raise ProtocolError(Reason.BUSY, f"sessions_max: {len(self.by_number)} sessions are open")
            del self.by_number[oldest.number]
        mapping, transport = pair_as_source(self.desk.identity, hello.card)
        self._last += 1
        session = Session(self._last, sender, hello.nonce, mapping, transport)
        self.by_number[session.number] = session
        return session
