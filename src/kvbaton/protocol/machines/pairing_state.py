"""Pairings of this node: links that it opened (as D) and sessions that it granted (as P).

Laws: all messages of a pair belong to one session, which belongs to one incarnation of each side. A session counts only
once D has confirmed it, so a delayed Hello of a dead D replaces none. When a session of a worker is confirmed, every
earlier one of that worker ends: P's writes under it are told to stop before the new connections are opened, and its
hold on the old ones is dropped after, so that a repeated hello of the same incarnation revokes nothing that it needs.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache

from kvbaton.protocol.bounded import Remembered
from kvbaton.protocol.compat import difference, validate_key
from kvbaton.protocol.effects import Capabilities
from kvbaton.protocol.errors import ProtocolError, Reason
from kvbaton.protocol.geometry.layout import EngineLayout, validate_groups, validate_ranks
from kvbaton.protocol.geometry.plan import Plan, compare, plan
from kvbaton.protocol.ids import PeerId, WorkerId
from kvbaton.protocol.machines.context import Identity, LedgerContext, Parts
from kvbaton.protocol.table import Table, pairs
from kvbaton.protocol.wire.messages import RANK_PAIRS_MAX, Card, Message, feature_names
from kvbaton.protocol.wire.versions import OLDEST

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
