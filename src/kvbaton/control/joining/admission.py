"""Who is let in: a registry's judgement of tokens and certificates, and the certificates that it gives.

Laws: a use is on disk before its certificate is told, so a crash can waste a use but never give one away. The same key
asking again under the same name and token, while its certificate lives, is the same use: its answer was lost. Who
cannot prove a token learns nothing about it: unknown and unproven get one answer, after the same work. A name that is
minted, or of a rank of one that is, tombstoned, or alive under another key is not given. Renewal needs no token: who
was let in stays until it is removed, or its certificate expires because no registry heard of it. A name goes from one
key to another only by a token, and only when the first is gone: a certificate never takes a name back, so that two keys
do not have it by turns.
"""

from __future__ import annotations

import contextlib
import hmac
import secrets
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec

from kvbaton.control import key_files as files
from kvbaton.control.addressing import ControlError
from kvbaton.control.joining import admission_files as book
from kvbaton.control.joining import join_messages as m
from kvbaton.control.joining.join_messages import signed_card
from kvbaton.control.joining.join_token import (
    LIFE_S,
    SKEW_S,
    CertificateFault,
    Membership,
    admission_public,
    proof,
    sign,
    verified,
)
from kvbaton.control.keyring import Keyring, are_related
from kvbaton.protocol.bounded import Remembered
from kvbaton.protocol.ids import WorkerId
from kvbaton.protocol.legality import Role, role_by_name

IsLiving = Callable[[str, str], bool]
"""Whether a member of this name is listed under this key."""
ISSUED_MAX = 8192
HERE_S = 60.0
"""After which a member that has not shown its certificate, which it does every 20 s, is gone."""
_CARRIED = frozenset({Role.ROUTER, Role.REGISTRY, Role.STORE, Role.OPERATOR})
"""Whom a member without a key directory dials, or whose signature it checks."""
_WORKERS = frozenset({Role.PREFILL, Role.DECODE, Role.BOTH})


class JoinDenied(Exception):
    """Not let in."""

    def __init__(self, kind: m.RefusalKind, detail: str = "") -> None:
        super().__init__(f"{kind.value}: {detail}")
        self.answer = m.JoinRefused(kind, detail[: m.DETAIL_CHARS_MAX])


class Admission:
    """One registry's. `judge`, `save` and `sweep` are the door's thread's; `vouch` and `card` are for any."""

    def __init__(self, keyring: Keyring, *, life_s: float = LIFE_S, wall: Callable[[], float] = time.time) -> None:
        """`keyring` is a registry's whose key directory holds the admission key; ControlError if it does not."""
        self._base = Path(keyring.directory)
        secret = book.admission_secret(self._base)
        if not keyring.directory or secret is None:
            raise ControlError(f"{self._base}: nobody can join: {_NO_KEY}")
        self._seed = bytes.fromhex(secret.seed)
        if keyring.admission != self.public:
            raise ControlError(f"{self._base}: public-admission.json does not belong to admission.json; restore both")
        self.door_secret = secret.door
        self.door_public = files.public_of(secret.door, self._base / "admission.json")
        self.keyring = keyring  # replaced by the registry as it follows its directory
        self.counters: Counter[str] = Counter()
        self._life_s, self._wall = life_s, wall
        self._lock = threading.Lock()
        self._card = m.ClusterCard((), ())
        self._issued: dict[WorkerId, Membership] = {}  # the latest of each name
        self._unsaved: set[WorkerId] = set()
        self._heard: Remembered[str, float] = Remembered(ISSUED_MAX)  # by key: when it was last at this door
        self.has_served: Callable[[str], bool] = lambda _: False  # whether the registry has listed a worker by that key

    @property
    def public(self) -> bytes:
        """What everybody checks certificates and the card with."""
        return admission_public(self._seed)

    # --- the door's thread

    def judge(self, question: m.Question, key: str, is_living: IsLiving) -> m.Answer:
        """The answer to whoever holds `key`; what it changes is on disk by then."""
        try:
            member = self._join(question, key, is_living) if isinstance(question, m.Join) else (
                self._present(question, key, is_living)
            )  # fmt: skip
        except JoinDenied as refused:
            self.counters[f"refused.{refused.answer.kind.value}"] += 1
            return refused.answer
        self._heard.put(key, self._wall())
        self.counters["joined" if isinstance(question, m.Join) else "presented"] += 1
        brief = msgspec.structs.replace(self.card(), removed=(), removed_keys=())
        return m.JoinAdmitted(sign(member, self._seed), self.public, brief)

    def save(self) -> None:
        """Write down what was renewed. One that was removed meanwhile stays removed."""
        with self._lock:
            unsaved, self._unsaved = self._unsaved, set()
        if not unsaved:
            return
        try:
            with files.locked(self._base):
                for name in unsaved:
                    with contextlib.suppress(ControlError):
                        known, member = book.joined_file(self._base, name), self._issued.get(name)
                        if member and known and not known.removed and known.public == member.public:
                            book.put_joined(self._base, member, sign(member, self._seed))
        except ControlError:  # later
            with self._lock:
                self._unsaved |= unsaved
            raise

    def sweep(self) -> int:
        return book.sweep(self._base, self._wall())

    # --- any thread; no files

    def vouch(self, name: WorkerId, key: str, role: Role) -> bytes:
        """The certificate of a member that the registry lists, minted or joined; renewed when half of it is over."""
        joined = self.keyring.joined.get(name)
        with self._lock:
            if joined is None or (joined.public, joined.role) != (key, role):
                token, signing = joined.token if joined else "", self.keyring.signing.get(key, b"")
                joined = Membership(name, key, role, token, 0, signing)
            return sign(self._fresh(joined), self._seed)

    def card(self) -> m.ClusterCard:
        keyring = self.keyring
        found = [
            m.MemberCard(name, public, role, also := keyring.also.get(name, ()), _signing(keyring, public, *also))
            for name, public in sorted(keyring.peers.items())
            if (role := keyring.role_of(name)) in _CARRIED and name not in keyring.joined
        ]
        members = tuple(found[: m.CARDS_MAX])
        gone, keys = (tuple(sorted(each))[: m.REMOVED_TOLD_MAX] for each in (keyring.removed_names, keyring.removed))
        with self._lock:
            fresh = m.ClusterCard(keyring.ticket_keys, members, self._card.at, gone, keys)
            if fresh != self._card:
                at = max(int(self._wall() * 1000), self._card.at + 1)
                self._card = msgspec.structs.replace(fresh, at=at)
            return self._card

    def signed_card(self) -> bytes:
        """The same, for members that a registry tells."""
        return signed_card(self.card(), self._seed)

    # ---

    def _join(self, said: m.Join, key: str, is_living: IsLiving) -> Membership:
        token = self._proven(said, key)
        with _writing(self._base):
            token = book.token_file(self._base, token.id) or token
            if token.revoked:
                raise JoinDenied(m.RefusalKind.REVOKED, f"token {token.id} was revoked; ask for another")
            if said.role is not token.role and not (token.role is Role.BOTH and said.role in _WORKERS):
                raise JoinDenied(m.RefusalKind.ROLE, f"token {token.id} is for {token.role}, not for {said.role}")
            known = self._may_have(said.name, key, said.role, is_living, by_token=True)
            again = known is not None and (known.public, known.token, known.role) == (key, token.id, said.role)
            if not again or known is None or self._wall() > known.until:
                self._use(token)
            before = _held(known, self.public) if again else None
            since = before.since if before else int(self._wall())
            name, signing = WorkerId(said.name), said.signing or b""
            return self._admit(Membership(name, key, said.role, token.id, self._until(), signing, since))

    def _present(self, said: m.Present, key: str, is_living: IsLiving) -> Membership:
        try:
            member = verified(said.certificate, self.public)
        except CertificateFault as fault:
            raise JoinDenied(m.RefusalKind.CERTIFICATE, str(fault)) from None
        if member.public != key or member.is_over(self._wall()):
            raise JoinDenied(m.RefusalKind.CERTIFICATE, "certificate: of another key, or expired")
        if not member.token:
            raise JoinDenied(m.RefusalKind.NAME, f"name: {member.name} is minted; it needs no certificate here")
        with _writing(self._base):
            token = book.token_file(self._base, member.token)
            if token is not None and token.members_out:
                raise JoinDenied(m.RefusalKind.REMOVED, f"token {token.id} was revoked with its members")
            known = self._may_have(member.name, key, member.role, is_living, by_token=False)
            with self._lock:
                fresh = self._fresh(_signing_by(said.signing, member, int(self._wall())))
            if known is None or _held(known, self.public) != fresh:
                self._admit(fresh)
            return fresh

    def _proven(self, said: m.Join, key: str) -> book.TokenFile:
        """The token that was proven; unknown and unproven look the same from outside."""
        token = None
        if said.token.isalnum():
            with contextlib.suppress(ControlError):
                token = book.token_file(self._base, said.token)
        expected = proof(bytes.fromhex(token.key) if token else _NOBODYS, key, said.name, said.role)
        if not hmac.compare_digest(expected, said.proof) or token is None:
            raise JoinDenied(m.RefusalKind.TOKEN, "the token is not one of this cluster's, or its proof is wrong")
        return token

    def _may_have(
        self, name: str, key: str, role: Role, is_living: IsLiving, *, by_token: bool
    ) -> book.JoinedFile | None:
        """Who is known by that name, if this key may have it."""
        kept = role_by_name(name)
        if (self._base / "public" / f"{name}.json").exists() or (kept is not Role.BOTH and kept is not role):
            raise JoinDenied(m.RefusalKind.NAME, f"name: {name} is kept for another; choose another, or auto")
        if any(key == public and each != name for each, public in self.keyring.peers.items()):
            raise JoinDenied(m.RefusalKind.NAME, f"name: the key of {name} has another name; make one for each process")
        ring = self.keyring
        if any(each != name and each not in ring.joined and are_related(each, name) for each in ring.peers):
            raise JoinDenied(m.RefusalKind.NAME, f"name: {name} is a part of a minted engine; choose another, or auto")
        known = book.joined_file(self._base, name)
        if known is None:
            if book.is_full(self._base):
                raise JoinDenied(m.RefusalKind.FULL, f"{book.JOINED_MAX} members have joined, the most there can be")
            return None
        if known.removed:
            raise JoinDenied(m.RefusalKind.REMOVED, f"name: {name} was removed; its name is free again later")
        if known.public == key:
            return known
        if is_living(name, known.public) or self._was_here(known.public):
            raise JoinDenied(m.RefusalKind.TAKEN, f"name: {name} is alive under another key; choose another, or auto")
        if not by_token and self._wall() <= known.until + SKEW_S:
            raise JoinDenied(m.RefusalKind.TAKEN, f"name: {name} was given to another key since; restart this member")
        return known

    def _was_here(self, key: str) -> bool:
        """Whether a member that no registry lists, as a rank that only uses a store, lives: it comes every so often."""
        heard_at = self._heard.get(key)
        return heard_at is not None and not self.has_served(key) and 0 <= self._wall() - heard_at < HERE_S

    def _use(self, token: book.TokenFile) -> None:
        if self._wall() > token.expires:
            raise JoinDenied(m.RefusalKind.EXPIRED, f"token {token.id} has expired; ask for another")
        if token.uses_max and token.uses >= token.uses_max:
            raise JoinDenied(
                m.RefusalKind.USED_UP, f"token {token.id} was used {token.uses} times, as often as it may be"
            )
        book.put_token(self._base, msgspec.structs.replace(token, uses=token.uses + 1))

    def _admit(self, member: Membership) -> Membership:
        book.put_joined(self._base, member, sign(member, self._seed))
        with self._lock:
            self._note(member)
        return member

    def _fresh(self, held: Membership) -> Membership:
        """The membership to certify now: the latest known, while half of its life is left, or the next."""
        issued = self._issued.get(held.name)
        latest = issued if issued and issued.until > held.until and _is_for(issued, held) else held
        if latest.until - self._wall() > self._life_s / 2:
            return latest
        fresh = msgspec.structs.replace(latest, until=self._until())
        self._note(fresh)
        if fresh.token:
            self._unsaved.add(fresh.name)
        return fresh

    def _note(self, member: Membership) -> None:
        if len(self._issued) >= ISSUED_MAX:
            self._issued.clear()
        self._issued[member.name] = member

    def _until(self) -> int:
        return int(self._wall() + self._life_s)


def _is_for(member: Membership, wanted: Membership) -> bool:
    return msgspec.structs.replace(member, until=wanted.until) == wanted


def _held(known: book.JoinedFile | None, admission: bytes) -> Membership | None:
    """The membership of a joined file; None if its certificate proves nothing."""
    with contextlib.suppress(CertificateFault):
        return None if known is None else verified(known.certificate, admission)
    return None


def _signing_by(signing: bytes | None, member: Membership, now: int) -> Membership:
    """A member that was let in by a release that took no signing keys gets its own with the next certificate."""
    if member.signing or not signing:
        return member
    return msgspec.structs.replace(member, signing=signing, since=now)


def _signing(keyring: Keyring, *keys: str) -> dict[str, bytes]:
    return {key: keyring.signing[key] for key in keys if key in keyring.signing}


@contextlib.contextmanager
def _writing(base: Path) -> Iterator[None]:
    """The directory, for one writer; where it cannot be written nobody is let in, and is told to come again."""
    try:
        with files.locked(base):
            yield
    except ControlError as error:
        raise JoinDenied(m.RefusalKind.BUSY, "the registry cannot write its key directory now") from error


_NO_KEY = "make a join token where the registry runs: kvbaton keys token new DIR --role ROLE"
_NOBODYS = secrets.token_bytes(32)
