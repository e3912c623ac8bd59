"""What counts of the lists that registries bring: the workers' own signed statements, checked against keys known here.

Laws: a registry can leave a worker out, and no more. Name, key, role, life and addresses are those of the newest valid
statement that any registry has shown, whatever an entry says beside it; a life is over when its worker has signed that,
and drains when its worker or an operator has. A statement is never followed by an older one of the same name. Of two
keys that joined under one name the one that was given it first keeps it, for as long as a registry that answers lists
it: so a name does not go to and fro. Members that sign nothing (`Keyring.signing`) are taken at the registry's word, by
a key and in a role that this process knows. Where renewals are due (`renewal_s`), a life that has not signed anew for
that long is not listed by whoever lists it: a registry cannot keep the dead, whose address another process may have by
now. Each statement is checked once; what is remembered is bounded. Used by one thread at a time.
"""

from __future__ import annotations

import logging
import math
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Generic, NamedTuple, Protocol, Self, TypeVar

from kvbaton.control.joining.join_token import CertificateFault, Membership
from kvbaton.control.joining.join_token import verified as certified
from kvbaton.control.keyring import Keyring
from kvbaton.control.registry import statements
from kvbaton.control.registry.registry_messages import Registration, RegistryFault
from kvbaton.control.registry.registry_union import RegistryView, UnionEntry
from kvbaton.control.registry.statements import FRESH_S, Statement
from kvbaton.control.signing import Signed
from kvbaton.observe.codes.entry import worth_saying
from kvbaton.protocol.bounded import Remembered
from kvbaton.protocol.ids import PeerId, WorkerId
from kvbaton.protocol.legality import Role

log = logging.getLogger(__name__)

KNOWN_MAX = 8192
REFUSED_MAX = 8192
_STRANGE = "key: of no member that is known here; copy public/ from where it was minted"
AWAKE_S = 15.0
"""The longest that passes between two looks of a reader that is awake."""
REMEMBER_S = 2 * FRESH_S
"""For which the newest statement of a worker that is no longer listed is remembered: no older one is fresh then."""


class ListedEntry(UnionEntry, Protocol):
    """A worker as a registry lists it, with what it has signed."""

    @property
    def role(self) -> str: ...
    @property
    def public_key(self) -> str: ...
    @property
    def certificate(self) -> bytes: ...
    @property
    def signed(self) -> Signed | None: ...
    @property
    def order(self) -> Signed | None: ...
    @property
    def told(self) -> Registration | None: ...
    def stated(self, told: Registration, key: str, signed: Signed, draining: bool) -> Self: ...


E = TypeVar("E", bound=ListedEntry)
Allows = Callable[[Registration], str]
"""Why a worker may not be where it says that it is; "" if it may."""


class _Credentials(NamedTuple):
    role: Role
    signing: bytes  # b"": it signs nothing


@dataclass(slots=True)
class _Newest:
    """The newest valid statement of one name."""

    said: Statement
    signed: Signed
    membership: Membership | None  # of one that is not in the key directory: by which certificate it was let in
    sequence: int  # of the last renewal, which may say the same
    renewed_at: float  # by `StatementReader._awake_s`
    unlisted_at: float | None = None

    @property
    def rank(self) -> tuple[float, int, int]:
        return _rank(self.said)


class StatementReader(Generic[E]):
    """One process's. `views` is asked with what each registry said last, whenever that or the keys have changed."""

    def __init__(
        self,
        keyring: Keyring,
        *,
        allows: Allows = lambda _: "",
        renewal_s: float = math.inf,
        wall: Callable[[], float] = time.time,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.counters: Counter[str] = Counter()
        self.keyring = keyring
        self.allows = allows
        self._wall, self._clock = wall, clock
        self._renewal_s = renewal_s
        self._looked_at, self._awake_s = clock(), 0.0  # how long this reader was awake while a registry answered
        self._newest: dict[WorkerId, _Newest] = {}
        self._refused: Remembered[Signed, str] = Remembered(REFUSED_MAX)
        self._unsigned: Remembered[WorkerId, None] = Remembered(KNOWN_MAX)

    def take_keys(self, keyring: Keyring) -> None:
        """From now on these; what they do not bear out is forgotten. `allows` may have changed too."""
        self.keyring = keyring
        self._refused = Remembered(REFUSED_MAX)
        self._newest = {name: each for name, each in self._newest.items() if self._is_borne_out(each)}

    def views(self, views: Sequence[RegistryView[E]]) -> list[RegistryView[E]]:
        """The same, with what counts of them."""
        answering = [view for view in views if view.answers]
        self._pass_time(is_answered=bool(answering))
        here = {entry.peer for view in answering for entry in view.entries}
        for view in answering:
            for entry in view.entries:
                if entry.signed is not None:
                    self._learn(entry.signed, entry.certificate, here)
        for view in views:
            for signed in view.ended:
                self._learn(signed, b"", here)
        found = [
            replace(
                view,
                entries=self._entries(view.entries),
                left=self._left(view.left),
                gone=view.gone | {entry.peer for entry in view.entries if self._is_stale(entry.peer)},
            )
            for view in views
        ]
        self._forget({entry.worker for view in found for entry in view.entries if view.answers})
        return found

    def keeps(self, entry: E) -> bool:
        """Whether a life that no registry lists is not known to be over, and still of a member."""
        newest = self._newest.get(entry.worker)
        if newest is not None:
            return newest.said.peer == entry.peer and not newest.said.left
        return self._credentials(entry.worker, entry.public_key, self._membership(entry)) is not None

    def members(self, entries: Sequence[E]) -> dict[WorkerId, Membership]:
        """Who of these is a member by a certificate. It is judged when it is first seen: one that was good then stays
        good for as long as registries list its member, so that no clock and no absent registry parts a pair."""
        found = {}
        for entry in entries:
            known = self._newest.get(entry.worker)
            member = known.membership if known is not None else self._membership(entry)
            if member is not None:
                found[entry.worker] = member
        return found

    # ---

    def _pass_time(self, *, is_answered: bool) -> None:
        """What this process slept through, and what passed while no registry answered, makes nobody stale."""
        looked_at, self._looked_at = self._looked_at, self._clock()
        if is_answered:
            self._awake_s += min(self._looked_at - looked_at, AWAKE_S)

    def _is_stale(self, peer: PeerId) -> bool:
        newest = self._newest.get(peer.worker)
        known = newest is not None and newest.said.peer == peer
        return known and newest is not None and self._awake_s - newest.renewed_at > self._renewal_s

    def _renew(self, known: _Newest, said: Statement, signed: Signed) -> None:
        """The same words, signed later: of a worker that is alive, unless a registry has kept them back."""
        if said.sequence <= known.sequence or math.isinf(self._renewal_s):
            return
        member = self._credentials(said.registration.worker, said.key, known.membership)
        if member is not None and member.signing:
            statements.verified(signed, member.signing)
            statements.check_fresh(said, self._wall())
            known.sequence, known.renewed_at = said.sequence, self._awake_s

    def _learn(self, signed: Signed, certificate: bytes, here: set[PeerId]) -> None:
        """Take a statement if it is valid and newer than what is known."""
        if signed in self._refused:
            return
        try:
            said = statements.read(signed)
            known = self._newest.get(said.registration.worker)
            if known is not None and not _is_news(known.said, said):
                if _says_same(known.said, said):
                    self._renew(known, said, signed)
                self.counters["older"] += known.said.peer != said.peer
                return
            membership = self._certified(said, certificate)
            if known is not None and self._is_taken(known, membership, here):
                self.counters["taken"] += 1
                return  # it may be free later
            member = self._credentials(said.registration.worker, said.key, membership)
            if member is None and said.left:
                return  # of a life that was never known here
            if member is not None and not member.signing:
                return  # taken at the registry's word
            newest = _Newest(said, signed, membership, said.sequence, self._awake_s)
            self._check(newest, member, is_known=known is not None and known.said.peer == said.peer)
        except RegistryFault as fault:
            self._refused.put(signed, str(fault))
            self._complain(signed, str(fault))
            return
        if known is None or _supersedes(newest, known):
            self._newest[said.registration.worker] = newest

    def _check(self, new: _Newest, member: _Credentials | None, *, is_known: bool) -> None:
        """RegistryFault if this statement proves nothing here."""
        told = new.said.registration
        if member is None:
            raise RegistryFault(_STRANGE)
        if not statements.may_serve(member.role, told.role):
            raise RegistryFault(f"role: {told.role}, and its key is for {member.role}")
        statements.verified(new.signed, member.signing)
        if why := self.allows(told):
            raise RegistryFault(why)
        if not is_known:
            statements.check_fresh(new.said, self._wall())

    def _credentials(self, name: WorkerId, key: str, membership: Membership | None) -> _Credentials | None:
        """What is known of the member by that name and key: of the key directory, or by a certificate."""
        ring = self.keyring
        if name in ring.peers:
            is_its = key in (ring.peers[name], *ring.also.get(name, ()))
            return _Credentials(ring.role_of(name), ring.signing.get(key, b"")) if is_its else None
        if membership is None or membership.public != key or key in ring.removed:
            return None
        return _Credentials(membership.role, membership.signing)

    def _certified(self, said: Statement, certificate: bytes) -> Membership | None:
        """Who this is by its certificate, if the key directory does not know the name."""
        name = said.registration.worker
        if name in self.keyring.peers or not certificate or not self.keyring.admission:
            known = self._newest.get(name)
            return known.membership if known is not None and known.said.key == said.key else None
        return self._judged(name, said.key, certificate)

    def _judged(self, name: WorkerId, key: str, certificate: bytes) -> Membership | None:
        try:
            member = certified(certificate, self.keyring.admission)
        except CertificateFault as fault:
            raise RegistryFault(str(fault)) from None
        if (member.name, member.public) != (name, key):
            raise RegistryFault("certificate: of another name or key")
        known = self._newest.get(name)
        is_known = known is not None and known.membership is not None and known.membership.public == key
        if not is_known and member.is_over(self._wall()):
            raise RegistryFault("certificate: expired")
        return member

    def _membership(self, entry: E) -> Membership | None:
        if not entry.certificate or not self.keyring.admission:
            return None
        try:
            return self._judged(entry.worker, entry.public_key, entry.certificate)
        except RegistryFault as fault:
            self.counters["refused"] += 1
            if worth_saying(self.counters["refused"]):
                log.warning("[certificate-refused] %s is not let in: %s", entry.worker, fault)
            return None

    def _is_taken(self, known: _Newest, membership: Membership | None, here: set[PeerId]) -> bool:
        """Whether another key was given this name before, and is here."""
        if membership is None or known.membership is None or known.membership.public == membership.public:
            return False
        first = (known.membership.since, known.membership.public) <= (membership.since, membership.public)
        return first and known.said.peer in here and not known.said.left

    def _entries(self, entries: Sequence[E]) -> tuple[E, ...]:
        found = (self._stated(entry) if entry.signed is not None else self._believed(entry) for entry in entries)
        return tuple(entry for entry in found if entry is not None)

    def _stated(self, entry: E) -> E | None:
        """The entry with the newest words of its worker, if that is the life which it lists."""
        assert entry.signed is not None
        try:
            said = statements.read(entry.signed)
        except RegistryFault:
            return None
        newest = self._newest.get(said.registration.worker)
        if newest is None:
            return self._believed(entry)
        if newest.said.left or newest.said.peer != said.peer or self._is_stale(said.peer):
            return None
        told = newest.said.registration
        draining = told.draining or statements.is_ordered(self.keyring, entry.order, told.worker, told.incarnation)
        return entry.stated(told, newest.said.key, newest.signed, draining)

    def _believed(self, entry: E) -> E | None:
        """The entry of a member that signs nothing, by a key and in a role that are known here."""
        name = entry.worker
        member = self._credentials(name, entry.public_key, self._membership(entry))
        if member is None or member.signing or name in self._newest:
            if entry.signed is None:  # of others it was said why
                self._complain(entry.peer, "signed: missing, and its key signs" if member else _STRANGE)
            return None
        if not statements.may_serve(member.role, entry.role):
            self._complain(entry.peer, f"role: {entry.role}, and its key is for {member.role}")
            return None
        if (told := entry.told) is not None and (why := self.allows(told)):
            self._complain(entry.peer, why)
            return None
        if name not in self._unsigned:
            self._unsigned.put(name, None)
            log.warning(
                "[worker-unsigned] %s signs nothing, and is taken at the registry's word; run this release there, and "
                "copy public/%s.signing to this host", name, name,
            )  # fmt: skip
        return entry

    def _left(self, left: frozenset[PeerId]) -> frozenset[PeerId]:
        """A registry's bare word that a life is over: of members that sign nothing."""
        return frozenset(peer for peer in left if peer.worker not in self._newest)

    def _is_borne_out(self, newest: _Newest) -> bool:
        told = newest.said.registration
        member = self._credentials(told.worker, newest.said.key, newest.membership)
        serves = member is not None and bool(member.signing) and statements.may_serve(member.role, told.role)
        return serves and not self.allows(told)

    def _forget(self, listed: set[WorkerId]) -> None:
        now = self._clock()
        for name, newest in list(self._newest.items()):
            if name in listed:
                newest.unlisted_at = None
            elif newest.unlisted_at is None:
                newest.unlisted_at = now
            elif now - newest.unlisted_at > REMEMBER_S:
                del self._newest[name]
        while len(self._newest) > KNOWN_MAX:
            del self._newest[next(iter(self._newest))]

    def _complain(self, what: object, why: str) -> None:
        self.counters["refused"] += 1
        if worth_saying(self.counters["refused"]):
            name = what
            if isinstance(what, Signed):
                try:
                    name = statements.read(what).registration.worker
                except RegistryFault:
                    name = "an entry that cannot be read"
            log.warning("[statement-refused] %s, as a registry lists it, is not taken: %s", name, why)


def _rank(said: Statement) -> tuple[float, int, int]:
    return said.registration.born, said.registration.incarnation, said.sequence


def _is_news(known: Statement, said: Statement) -> bool:
    """Whether a statement may be newer than the known one. Of the same life, one that says the same is not."""
    if known.peer == said.peer:
        return said.sequence > known.sequence and not _says_same(known, said)
    return known.key != said.key or _rank(said) > _rank(known)


def _says_same(known: Statement, said: Statement) -> bool:
    return (known.registration, known.key, known.left) == (said.registration, said.key, said.left)


def _supersedes(newer: _Newest, known: _Newest) -> bool:
    """A later life, or word; of two keys that joined, whichever is not `_is_taken`."""
    mine, theirs = newer.membership, known.membership
    if mine is not None and theirs is not None and mine.public != theirs.public:
        return True
    return newer.rank > known.rank
