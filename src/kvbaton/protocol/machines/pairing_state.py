"""Pairings of this node: links that it opened (as D) and sessions that it granted (as P).

Laws: all messages of a pair belong to one session, which belongs to one incarnation of each side. A session counts only
once D has confirmed it, so a delayed Hello of a dead D replaces none. When a session of a worker is confirmed, every
earlier one of that worker ends: P's writes under it are told to stop before the new connections are opened, and its
hold on the old ones is dropped after, so that a repeated hello of the same incarnation revokes nothing that it needs.

P's book of sessions: answers hellos, confirms sessions, ends the ones that they replace.

Bound: `sessions_max` in all; unconfirmed ones are evicted first, then idle ones (their D says hello again when it needs
to), and when all are in use a new D is told BUSY.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache

from kvbaton.protocol.bounded import Remembered
from kvbaton.protocol.content import difference, validate_key
from kvbaton.protocol.effects import Capabilities, Connect, Disconnect, Holder, Invitation, Send
from kvbaton.protocol.errors import ProtocolError, Reason
from kvbaton.protocol.geometry.layout import EngineLayout, validate_groups, validate_ranks
from kvbaton.protocol.geometry.plan import Plan, compare, plan
from kvbaton.protocol.ids import Incarnation, PeerId, WorkerId
from kvbaton.protocol.legality import Table, pairs
from kvbaton.protocol.machines.context import Identity, LedgerContext, Parts
from kvbaton.protocol.wire.messages import (
    DETAIL_CHARS_MAX,
    OLDEST,
    RANK_PAIRS_MAX,
    Card,
    Goodbye,
    Hello,
    HelloRefused,
    Joined,
    Linked,
    Message,
    Welcome,
    feature_names,
    settle,
)

SHUNNED_MAX = 4096

PLANS_KEPT = 32
"""Of pairs of layouts: engines of one deployment have few, and greet each other again after every restart."""


class LinkState(enum.Enum):
    GREETING = "greeting"  # Hello sent, repeated
    JOINING = "joining"  # Welcome seen, Joined sent, repeated
    UP = "up"
    DOWN = "down"


class LinkEvent(enum.Enum):
    WELCOMED = "welcomed"
    LINKED = "linked"
    REFUSED = "refused"
    LOST = "lost"


_S, _E = LinkState, LinkEvent
LINK = Table(
    "link",
    LinkState,
    LinkEvent,
    next={
        (_S.GREETING, _E.WELCOMED): _S.JOINING,
        (_S.GREETING, _E.REFUSED): _S.DOWN,
        (_S.GREETING, _E.LOST): _S.DOWN,
        (_S.JOINING, _E.LINKED): _S.UP,
        (_S.JOINING, _E.LOST): _S.DOWN,
        (_S.UP, _E.LOST): _S.DOWN,
    },
    late=pairs({_S.JOINING, _S.UP}, {_E.WELCOMED, _E.REFUSED})
    | pairs({_S.DOWN}, LinkEvent)
    | {(_S.UP, _E.LINKED), (_S.GREETING, _E.LINKED)},
)


@dataclass(slots=True)
class Greeting:
    """A Hello that waits for its Welcome."""

    nonce: int
    deadline: float  # of the whole handshake
    confirmed: int  # sessions that others had confirmed to us at our hello


@dataclass(slots=True)
class PlaneChoice:
    """The state of the transports that both sides have (rule 23)."""

    fallback: bool = False  # there is another one in common, which has not failed
    left_out: tuple[str, ...] = ()  # best first: common ones that had failed at the hello
    worn: bool = False  # the one in use was found closed; dropped when the last commit is answered


@dataclass(slots=True)
class Link:
    """D's side of a pairing with a source worker."""

    worker: WorkerId
    greeting: Greeting
    state: LinkState = LinkState.GREETING
    peer: PeerId | None = None
    session: int = 0
    version: int = OLDEST  # protocol version of the pair
    plan: Plan | None = None
    transport: Capabilities | None = None
    endpoints: tuple[bytes, ...] = ()  # of its ranks, as announced
    features: int = 0  # what the source can do
    choice: PlaneChoice = field(default_factory=PlaneChoice)
    probes: Parts | None = None  # empty copies, which end when the transport is open
    probed_until: float = 0.0
    fencing: set[tuple[int, PeerId]] = field(default_factory=set)  # ranks whose fence has not ended


@dataclass(slots=True)
class Session:
    """P's side of a pairing with a target worker."""

    number: int
    peer: PeerId
    nonce: int
    plan: Plan
    transport: Capabilities
    version: int  # protocol version of the pair
    features: int = 0  # what the target can do
    joined: bool = False
    confirmed: int = 0  # its ordinal among all, in this incarnation

    def send(self, desk: LedgerContext, message: Message) -> None:
        desk.send(self.peer.worker, self.peer.incarnation, self.number, message, self.version)


class Shunned:
    """Transports that could not be opened to a worker: omitted from the next hellos, and tried again after a while.

    Law: nothing is omitted for longer than `seconds` after its last failure.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._until: Remembered[tuple[WorkerId, str], float] = Remembered(SHUNNED_MAX)

    def add(self, worker: WorkerId, transport: str, now: float) -> None:
        self._until.put((worker, transport), now + self._seconds)

    def without(self, worker: WorkerId, transports: Sequence[str], now: float) -> tuple[str, ...]:
        """The names that are worth a try, in their order."""
        return tuple(name for name in transports if (self._until.get((worker, name)) or now) <= now)


def check_card(identity: Identity, card: Card) -> None:
    """Refuse a peer, naming what differs: features, then the compatibility key. Layouts are checked by pairing."""
    missing = card.required & ~identity.offered
    if missing:
        raise ProtocolError(Reason.WRONG_VERSION, f"features: the peer requires {feature_names(missing)}")
    lacking = identity.required & ~card.optional
    if lacking:
        raise ProtocolError(Reason.WRONG_VERSION, f"features: the peer lacks {feature_names(lacking)}")
    found = difference(identity.compat, validate_key(card.compat))
    if found:
        raise ProtocolError(Reason.INCOMPATIBLE, f"compat.{found}")


def check_ranks(identity: Identity, card: Card) -> None:
    """Every rank may have to reach every rank of the other side, and all their endpoints must fit one message."""
    ours, theirs = len(identity.layout.ranks), len(card.layout.ranks)
    if ours * theirs > RANK_PAIRS_MAX:
        raise ProtocolError(Reason.INCOMPATIBLE, f"ranks: {ours} here, {theirs} there; at most {RANK_PAIRS_MAX} pairs")


def _mapping(identity: Identity, card: Card, source: EngineLayout, target: EngineLayout) -> Plan:
    """The plan between the two layouts, one of which is the card's; the cheapest checks come first."""
    check_ranks(identity, card)
    return _planned(source, target, card.layout)


@lru_cache(maxsize=PLANS_KEPT)
def _planned(source: EngineLayout, target: EngineLayout, theirs: EngineLayout) -> Plan:
    validate_groups(theirs)
    compare(source, target)
    validate_ranks(theirs)
    return plan(source, target)


def pair_as_source(identity: Identity, card: Card, preferred: Sequence[str] = ()) -> tuple[Plan, Capabilities]:
    """P's view of a pairing: the plan towards that D and the best transport that both have."""
    check_card(identity, card)
    mapping = _mapping(identity, card, identity.layout, card.layout)
    usable = [t for t in identity.transports if t.name in card.transports and reaches(t, identity, card)]
    if usable:  # all have failed: better than none
        return mapping, next((t for t in usable if t.name in preferred), usable[0])
    ours = ", ".join(transport.name for transport in identity.transports)
    raise ProtocolError(Reason.NO_TRANSPORT, f"transports: ours are {ours}; theirs are {', '.join(card.transports)}")


def reaches(transport: Capabilities, identity: Identity, card: Card) -> bool:
    return not transport.same_host or identity.host == card.host


def has_fallback(identity: Identity, card: Card, offered: Sequence[str], chosen: str) -> bool:
    """Whether the pair could also have taken another transport."""
    return any(
        each.name in card.transports and each.name in offered and each.name != chosen and reaches(each, identity, card)
        for each in identity.transports
    )


def pair_as_target(identity: Identity, card: Card, transport: str) -> tuple[Plan, Capabilities]:
    """D's view of the same pairing, with the transport that P chose."""
    check_card(identity, card)
    mapping = _mapping(identity, card, card.layout, identity.layout)
    chosen = identity.capabilities(transport)
    if chosen is None:
        raise ProtocolError(Reason.NO_TRANSPORT, f"transport: the peer chose {transport!r}, which this node lacks")
    return mapping, chosen


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
