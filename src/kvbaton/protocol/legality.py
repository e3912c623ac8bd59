"""What is legal: every (state, event) pair as a table, and every message by the role of its sender.

Of a table each pair is decided as a transition, as LATE or as ILLEGAL. LATE is what a healthy network produces
(duplicates, crossings): ignored and counted. ILLEGAL is a peer's fault: refused and counted against the sender. A pair
in neither list cannot be constructed into a table, so a new state or event asks all its questions at import.

Privileges by role: the one table of what a member's key allows. Law: a member without the privilege is refused,
whatever its key proves. A role only says which part a member plays: what a D may read, and a P may write, is decided
handoff by handoff (`effects.Loan`). The page docs/security.md prints this table, and a test walks it cell by cell.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Mapping
from typing import Generic, TypeVar

from kvbaton.protocol.wire import messages as m

S = TypeVar("S", bound=enum.Enum)
E = TypeVar("E", bound=enum.Enum)


class Verdict(enum.Enum):
    """The verdict on a pair that is not a transition."""

    LATE = "late"
    ILLEGAL = "illegal"


class Table(Generic[S, E]):
    """A complete transition table over two enumerations."""

    __slots__ = ("events", "late", "name", "next", "states")

    def __init__(
        self,
        name: str,
        states: type[S],
        events: type[E],
        next: Mapping[tuple[S, E], S],
        late: Iterable[tuple[S, E]],
        illegal: Iterable[tuple[S, E]] = (),
    ) -> None:
        self.name = name
        self.states = states
        self.events = events
        self.next = dict(next)
        self.late = frozenset(late)
        bad = frozenset(illegal)
        for state in states:
            for event in events:
                pair = (state, event)
                decided = (pair in self.next) + (pair in self.late) + (pair in bad)
                if decided != 1:
                    raise ValueError(f"{name}: ({state.name}, {event.name}) is decided {decided} times")

    def step(self, state: S, event: E) -> S | Verdict:
        """The next state, or why there is none."""
        pair = (state, event)
        if pair in self.next:
            return self.next[pair]
        return Verdict.LATE if pair in self.late else Verdict.ILLEGAL


def pairs(states: Iterable[S], events: Iterable[E]) -> set[tuple[S, E]]:
    """Every combination of the two; for writing whole rows of a table."""
    listed = list(events)
    return {(state, event) for state in states for event in listed}


class Role(enum.StrEnum):
    """The part that a key's holder plays."""

    PREFILL = "prefill"
    DECODE = "decode"
    BOTH = "both"
    ROUTER = "router"
    OPERATOR = "operator"
    STORE = "store"
    REGISTRY = "registry"


class Act(enum.StrEnum):
    """Anything that a member can do to another."""

    REGISTER = "register"  # be listed by the registry, and get the list
    HELLO = "hello"  # say hello to a P, and get the addresses and secrets of its transports
    CLAIM = "claim"  # ask a P for a prompt's KV
    OFFER = "offer"  # let a P write into its own blocks
    READ = "read"  # blocks of a P that are lent to it
    GRANT = "grant"  # answer a D's hellos and claims: be a P
    WRITE = "write"  # blocks of a D that are lent to it
    KEEP = "keep"  # ask the shared store, and put there
    REPORT = "report"  # tell the router how it fares
    DRAIN = "drain"  # have a worker finish and go
    WATCH = "watch"  # read a registry's whole list and the workers' reports; have tickets discarded


_READS = frozenset({Act.HELLO, Act.CLAIM, Act.OFFER, Act.READ})
_WRITES = frozenset({Act.GRANT, Act.WRITE})
_WORKS = frozenset({Act.REGISTER, Act.KEEP, Act.REPORT})

MAY: Mapping[Role, frozenset[Act]] = {
    Role.PREFILL: _WORKS | _WRITES,
    Role.DECODE: _WORKS | _READS,
    Role.BOTH: _WORKS | _WRITES | _READS,
    Role.ROUTER: frozenset({Act.WATCH}),  # else others come to it; it asks workers over HTTP
    Role.OPERATOR: frozenset({Act.DRAIN}),
    Role.STORE: frozenset(),  # others come to it
    Role.REGISTRY: frozenset(),  # others come to it
}

SAYS: Mapping[type, frozenset[Act]] = {
    m.Hello: frozenset({Act.HELLO}),
    m.Joined: frozenset({Act.HELLO}),
    m.Claim: frozenset({Act.CLAIM}),
    m.Renew: frozenset({Act.CLAIM}),
    m.Commit: frozenset({Act.CLAIM}),
    m.Abandon: frozenset({Act.CLAIM}),
    m.Offer: frozenset({Act.OFFER}),
    m.Ack: frozenset({Act.OFFER}),
    m.Revoke: frozenset({Act.OFFER}),
    m.Welcome: frozenset({Act.GRANT}),
    m.HelloRefused: frozenset({Act.GRANT}),
    m.Linked: frozenset({Act.GRANT}),
    m.Granted: frozenset({Act.GRANT}),
    m.GrantedFrom: frozenset({Act.GRANT}),
    m.ClaimRefused: frozenset({Act.GRANT}),
    m.Renewed: frozenset({Act.GRANT}),
    m.RenewRefused: frozenset({Act.GRANT}),
    m.Ready: frozenset({Act.GRANT}),
    m.Committed: frozenset({Act.GRANT}),
    m.Stale: frozenset({Act.GRANT}),
    m.SourceLost: frozenset({Act.GRANT}),
    m.Accepted: frozenset({Act.WRITE}),
    m.Written: frozenset({Act.WRITE}),
    m.Quiesced: frozenset({Act.WRITE}),
    m.Reset: frozenset({Act.HELLO, Act.GRANT}),
    m.Goodbye: frozenset({Act.HELLO, Act.GRANT}),
}
"""A message is heard if its sender may do one of these."""


def may(role: Role, act: Act) -> bool:
    return act in MAY[role]


def may_say(role: Role, kind: type) -> bool:
    return not MAY[role].isdisjoint(SAYS[kind])


def role_by_name(name: str) -> Role:
    """Of a key whose file says none: operators, routers, stores and registries by their names, all others work."""
    for role in (Role.OPERATOR, Role.ROUTER, Role.STORE, Role.REGISTRY):
        if name == role or name.startswith(f"{role}-"):
            return role
    return Role.BOTH
