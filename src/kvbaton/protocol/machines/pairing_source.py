"""P's book of sessions: answers hellos, confirms sessions, ends the ones that they replace.

Bound: `sessions_max` in all; unconfirmed ones are evicted first, then idle ones (their D says hello again when it needs
to), and when all are in use a new D is told BUSY.
"""

from __future__ import annotations

from collections.abc import Callable

from kvbaton.protocol.effects import Connect, Disconnect, Holder, Invitation, Send
from kvbaton.protocol.errors import ProtocolError, Reason
from kvbaton.protocol.ids import Incarnation, PeerId, WorkerId
from kvbaton.protocol.machines.context import LedgerContext
from kvbaton.protocol.machines.pairing_state import Session, Shunned, pair_as_source
from kvbaton.protocol.wire.messages import DETAIL_CHARS_MAX, Goodbye, Hello, HelloRefused, Joined, Linked, Welcome
from kvbaton.protocol.wire.versions import settle


class Sessions:
    """Sessions granted by this node, by number; at most one per worker is confirmed."""

    def __init__(
        self,
        desk: LedgerContext,
        on_ended: Callable[[Session, float], None],
        is_idle: Callable[[Session], bool],
        link_session: Callable[[PeerId], int],
        on_connected: Callable[[Connect, float], None],
    ) -> None:
        self.desk = desk
        self.by_number: dict[int, Session] = {}
        self._last = 0
        self._shunned = Shunned(desk.settings.shun_s)
        self._on_ended = on_ended
        self._is_idle = is_idle
        self._link_session = link_session
        self._on_connected = on_connected

    def joined(self, number: int, sender: PeerId) -> Session | None:
        """The confirmed session of that number, if it is the sender's."""
        session = self.by_number.get(number)
        return session if session is not None and session.joined and session.peer == sender else None

    def on_hello(self, sender: PeerId, hello: Hello, version: int, now: float) -> None:
        """A hello in `version`, which need not be one of ours. A refusal is sent in it: the sender can read that."""
        known = next((s for s in self.by_number.values() if s.peer == sender and s.nonce == hello.nonce), None)
        try:
            session = known or self._open(sender, hello, version, now)
        except ProtocolError as error:
            self.refuse(sender, hello.nonce, error, version)
            return
        card = self.desk.identity.card()
        welcome = Welcome(hello.nonce, card, session.transport.name, (), self._link_session(sender))
        invitation = Invitation(sender, session.transport.name, *_held(session))
        self.desk.emit(Send(sender.worker, sender.incarnation, session.number, welcome, invitation, session.version))

    def refuse(self, sender: PeerId, nonce: int, error: ProtocolError, version: int) -> None:
        self.desk.count(f"hello_refused.{error.reason}")
        refusal = HelloRefused(nonce, error.reason, error.detail[:DETAIL_CHARS_MAX])
        self.desk.send(sender.worker, sender.incarnation, 0, refusal, version)

    def on_joined(self, session: Session, message: Joined, now: float) -> None:
        if not session.joined:
            ranks, holder = _held(session)
            if len(message.endpoints) != ranks * len(self.desk.identity.layout.ranks):
                self.desk.count("illegal.joined")
                return
            self.desk.confirmed += 1
            session.joined, session.confirmed = True, self.desk.confirmed
            # Only now do earlier sessions of that worker end, and not with its Hello: a Hello may be delayed, or be
            # from a D that has died since, and would end what its next incarnation is reading (rule 3). Their writes
            # are told to stop before the new one is connected; their hold on connections is dropped after, since a
            # repeated hello of the same incarnation needs those very connections.
            earlier = self._end_earlier(session, now)
            connect = Connect(session.peer, session.transport.name, ranks, message.endpoints, holder)
            self.desk.emit(connect)
            for other in earlier:
                self._disconnect(other)
            self._on_connected(connect, now)
        session.send(self.desk, Linked())

    def end(self, session: Session, now: float) -> None:
        """Everything held for that peer in that session ends; its data connections are closed."""
        self._end(session, now)
        self._disconnect(session)

    def avoid(self, number: int, now: float) -> None:
        """Its transport cannot be opened here: its D says hello again, and gets another."""
        session = self.by_number.get(number)
        if session is not None:
            self._shunned.add(session.peer.worker, session.transport.name, now)
            self.desk.count(f"planes_given_up.{session.transport.name}")
            self.end(session, now)

    def end_unknown(self, peer: PeerId, session: int, now: float) -> None:
        """The peer says in which session it is linked to us: whatever we still do for it in others must stop.

        Without this a writer that was fenced, and has not noticed, would get back in by the admission that it is about
        to get in its other role.
        """
        for other in list(self.by_number.values()):
            if other.joined and other.peer.worker == peer.worker and other.number != session:
                self.end(other, now)

    def joined_since(self, peer: PeerId, session: int, since: int) -> bool:
        """Whether that worker has confirmed another session since: its statement about its link may be older."""
        return any(
            other.joined and other.peer.worker == peer.worker and other.number != session and other.confirmed > since
            for other in self.by_number.values()
        )

    def end_worker(self, worker: WorkerId, incarnation: Incarnation, now: float) -> None:
        for session in list(self.by_number.values()):
            if session.peer.worker == worker and incarnation in (0, session.peer.incarnation):
                self.end(session, now)

    def say_goodbye(self, now: float) -> None:
        for session in list(self.by_number.values()):
            session.send(self.desk, Goodbye())
            self.end(session, now)

    def _end(self, session: Session, now: float) -> None:
        if self.by_number.pop(session.number, None) is not None and session.joined:
            self._on_ended(session, now)

    def _disconnect(self, session: Session) -> None:
        self.desk.emit(Disconnect(session.peer, session.transport.name, *_held(session)))

    def _end_earlier(self, session: Session, now: float) -> list[Session]:
        """Everything that worker had before, in this or an earlier incarnation, is over; also what it never confirmed.

        So a delayed Joined that comes after a later session was confirmed finds no session.
        """
        worker, number = session.peer.worker, session.number
        earlier = [s for s in self.by_number.values() if s.peer.worker == worker and s.number < number]
        for other in earlier:
            self._end(other, now)
        return earlier

    def _open(self, sender: PeerId, hello: Hello, greeted_in: int, now: float) -> Session:
        version = settle(self.desk.identity.versions, greeted_in, hello.card.optional)
        left = self._shunned.without(sender.worker, hello.card.transports, now)
        mapping, transport = pair_as_source(self.desk.identity, hello.card, left)
        # Unconfirmed ones go first: a member that says hello and then nothing must not evict one that reads. Then an
        # idle one, whose D says hello again when it needs to; a session in use is never evicted (rule 27).
        if len(self.by_number) >= self.desk.settings.sessions_max:
            oldest = next((s for s in self.by_number.values() if not s.joined), None)
            oldest = oldest or next((s for s in self.by_number.values() if self._is_idle(s)), None)
            if oldest is None:
                raise ProtocolError(Reason.BUSY, f"sessions_max: {len(self.by_number)} sessions are open")
            self.end(oldest, now)
        number, features = self._next_number(sender), hello.card.optional
        session = Session(number, sender, hello.nonce, mapping, transport, version, features)
        self.by_number[session.number] = session
        self.desk.count(f"sessions.{version}")
        return session

    def _next_number(self, peer: PeerId) -> int:
        """Odd for one side of a pair and even for the other: a Goodbye names a session, but not the role in which it is
        sent.

        Two nodes that decode from each other would otherwise use the same numbers, and end both roles with one message.
        """
        self._last += 1
        if self._last % 2 == (self.desk.identity.me < peer):
            self._last += 1
        return self._last


def _held(session: Session) -> tuple[int, Holder]:
    """How many ranks the peer has, and the holder of its data connections."""
    return len(session.plan.target.ranks), ("session", session.number)
