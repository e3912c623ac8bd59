"""A member's side of joining: makes its key, proves its token at a door, and stays a member while it lives.

Laws: the secret key is made here and stays in this process's memory. Joining is bounded by a deadline and says what it
waits for; a refusal that no wait can change ends it at once. Afterwards the certificate is shown at every registry's
door from time to time, so that one which was started anew, or never heard of this member, takes it in; where it has
expired because no registry was there for too long, the token is proven again, under the same key and name; not by one
that was told that it is removed. An answer is believed only from the door that the token names, and only if its
certificate is for this key.

How an engine comes by its keys: those that were minted for it, or those that it joins with.

Law: a key directory and a token are not mixed. `auto` is a name only for those who join: minted keys have theirs. It
says where a member runs, and no other process has it:

    pod, replica or host name [.dpI] - random tail

What is made is a valid `WorkerId`, never two times the same, and never of a kind that is kept for a role (`router…`,
`operator…`, `store…`). A restart is another name: the one before may still be listed.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import secrets
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence

import msgspec
import zmq

from kvbaton.control.addressing import ControlError, ControlLimits, check_endpoint, split_endpoint
from kvbaton.control.joining import join_messages as m
from kvbaton.control.joining.join_messages import opened_card
from kvbaton.control.joining.join_token import TOKEN_ENV, CertificateFault, JoinToken, proof, token_from, verified
from kvbaton.control.keyring import Keyring, load
from kvbaton.control.sockets import SocketPlane, is_ipv6
from kvbaton.protocol.ids import WORKER_ID_CHARS_MAX, WorkerId
from kvbaton.protocol.legality import Role, role_by_name

log = logging.getLogger(__name__)

JOIN_S = 120.0
ANSWER_S = 3.0
PAUSE_S_MIN, PAUSE_S_MAX = 0.2, 5.0
PRESENT_S = 20.0
"""How often a certificate is shown at each door."""
HURRY_S = 2.0
"""The same, while no registry lists this member."""
LIMITS = ControlLimits(frame_bytes_max=m.ANSWER_BYTES_MAX, frames_queued_max=4, linger_s=0.0)
_PASSING = frozenset({m.RefusalKind.TAKEN, m.RefusalKind.FULL, m.RefusalKind.BUSY})


class JoinWish(msgspec.Struct, frozen=True):
    """Who wants to be a member, and where it asks."""

    name: str
    role: Role
    token: JoinToken
    doors: tuple[str, ...]  # endpoints, of each registry one


def doors_of(registry: str, join_at: str = "") -> tuple[str, ...]:
    """Where to join: what was given, or beside each registry (`tcp://a:7700,NAME@tcp://b:7700`) the next port."""
    doors = [each.strip().rpartition("@")[2] for each in (join_at or registry).split(",") if each.strip()]
    if not doors:
        raise ControlError("registry: a join token needs one, to join there; give tcp://host:port")
    try:
        checked = [check_endpoint(door, names=True) for door in doors]
    except ValueError as error:
        raise ControlError(f"{'join_at' if join_at else 'registry'}: {error}") from None
    return tuple(checked if join_at else map(_next_port, checked))


class JoinedMember:
    """A process that joined. Its keyring is replaced as registries tell of new ticket keys and certificates."""

    def __init__(self, wish: JoinWish, clock: Callable[[], float] = time.monotonic) -> None:
        self.wish = wish
        self.on_keyring: Callable[[Keyring], None] = lambda _: None  # from any thread, one at a time
        public, secret = (key.decode() for key in zmq.curve_keypair())
        self.keyring = Keyring(WorkerId(wish.name), public, secret, {WorkerId(wish.name): public}, ())
        self._clock = clock
        self._closing = threading.Event()
        self._lock = threading.Lock()
        self._cluster = m.ClusterCard((), ())
        self._said = ""
        self._is_removed = False
        self._thread: threading.Thread | None = None

    @classmethod
    def join(cls, wish: JoinWish, deadline_s: float = JOIN_S) -> JoinedMember:
        """Become a member; ControlError says why not."""
        member = cls(wish)
        until, pause_s = time.monotonic() + deadline_s, PAUSE_S_MIN
        while (why := member._join_somewhere()) is not None:
            if time.monotonic() + pause_s >= until:
                doors = ", ".join(wish.doors)
                raise ControlError(f"{wish.name} could not join at {doors} within {deadline_s:g} s: {why}")
            if pause_s <= PAUSE_S_MIN or pause_s >= PAUSE_S_MAX:
                log.warning("[join-waiting] %s waits to join at %s: %s", wish.name, ", ".join(wish.doors), why)
            time.sleep(_spread(pause_s))
            pause_s = min(2 * pause_s, PAUSE_S_MAX)
        log.info("%s joined as %s, by token %s", wish.name, wish.role, wish.token.id)
        return member

    def take(self, certificate: bytes, card: bytes) -> None:
        """What a registry told of this member, and the card that it passed on. From any thread.

        Counts only as the admission key signed it, and not if it is older than what is known: only a door, which has
        that key, may take anything back.
        """
        with self._lock:
            cluster = self._cluster
            if card:
                with contextlib.suppress(m.JoinFault):
                    told = opened_card(card, self.keyring.admission)
                    cluster = told if told.at > cluster.at else cluster
            self._renew(self.keyring.admission, certificate, cluster)

    def start(self, is_listed: Callable[[], bool] = lambda: True) -> None:
        """Stay a member from now on. `is_listed`: whether some registry lists it."""
        self._thread = threading.Thread(target=self._keep, args=(is_listed,), name="kvbaton-member", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop; idempotent and bounded. The membership runs out by itself."""
        self._closing.set()
        if self._thread is not None:
            self._thread.join(ANSWER_S)

    def _join_somewhere(self) -> str | None:
        """None when it is a member; otherwise why not yet. ControlError if it never will be."""
        said: list[m.RefusalKind] = []
        why = "no answer"
        for door in self.wish.doors:
            answer = self._ask(door, self._proof())
            if isinstance(answer, m.JoinAdmitted) and self._believe(answer):
                return None
            if isinstance(answer, m.JoinRefused):
                said.append(answer.kind)
                why = answer.detail
        if said and len(said) == len(self.wish.doors) and not _PASSING.intersection(said):
            raise ControlError(f"{self.wish.name} may not join: {why}")
        return why

    def _keep(self, is_listed: Callable[[], bool]) -> None:
        """One turn at once: other registries do not know this member yet."""
        while True:
            for door in self.wish.doors:
                if self._closing.is_set():
                    return
                self._show(door)
            wait_s = PRESENT_S if is_listed() else HURRY_S
            if self._closing.wait(_spread(wait_s)):
                return

    def _show(self, door: str) -> None:
        answer = self._ask(door, m.Present(self.keyring.certificate, self.keyring.signer.public))
        kind = answer.kind if isinstance(answer, m.JoinRefused) else None
        self._is_removed |= kind is m.RefusalKind.REMOVED
        if kind is m.RefusalKind.CERTIFICATE and not self._is_removed:
            answer = self._ask(door, self._proof())
        if isinstance(answer, m.JoinAdmitted):
            self._believe(answer)
        elif isinstance(answer, m.JoinRefused) and answer.detail != self._said:
            self._said = answer.detail
            log.error("[join-lost] %s is no member at %s any more: %s", self.wish.name, door, answer.detail)

    def _proof(self) -> m.Join:
        wish = self.wish
        said = proof(wish.token.key, self.keyring.public, wish.name, wish.role)
        return m.Join(wish.token.id, wish.name, wish.role, said, self.keyring.signer.public)

    def _believe(self, answer: m.JoinAdmitted) -> bool:
        with self._lock:
            return self._renew(answer.admission, answer.certificate, answer.cluster)

    def _renew(self, admission: bytes, certificate: bytes, cluster: m.ClusterCard) -> bool:
        fresh = _keyring(self.keyring, admission, certificate, cluster, self.wish.role)
        if fresh is None:
            return False
        self._cluster = cluster
        if fresh != self.keyring:
            self.keyring = fresh
            self.on_keyring(fresh)
        return True

    def _ask(self, door: str, question: m.Question) -> m.Answer | None:
        """One question, one answer; None when none came in time."""
        plane = SocketPlane(self.keyring, LIMITS)
        try:
            socket = plane.client(self.wish.token.door, ipv6=is_ipv6(door))
            try:
                socket.connect(door)
                socket.send(m.encode(question), zmq.NOBLOCK)
                if socket.poll(int(ANSWER_S * 1000)):
                    return m.decode_answer(socket.recv(zmq.NOBLOCK))
            finally:
                socket.close(linger=0)
        except (zmq.ZMQError, m.JoinFault) as error:
            log.debug("join door %s: %s", door, error)
        finally:
            plane.context.term()
        return None


def _keyring(
    before: Keyring, admission: bytes, certificate: bytes, cluster: m.ClusterCard, role: Role
) -> Keyring | None:
    """The keyring that an answer gives; None if it is not for this key."""
    with contextlib.suppress(CertificateFault, m.JoinFault):
        m.check_card(cluster)
        told = verified(certificate, admission)
        own = (before.name, before.public, role)
        if (told.name, told.public, told.role) == own and told.signing in (b"", before.signer.public):
            cards: Sequence[m.MemberCard] = [card for card in cluster.members if card.name != before.name]
            return msgspec.structs.replace(
                before,
                peers={before.name: before.public, **{WorkerId(card.name): card.public for card in cards}},
                also={WorkerId(card.name): card.also for card in cards if card.also},
                roles={before.name: role, **{WorkerId(card.name): card.role for card in cards}},
                ticket_keys=cluster.ticket_keys,
                admission=admission,
                certificate=certificate,
                signing={
                    before.public: before.signer.public,
                    **{key: signing for card in cards for key, signing in card.signing.items()},
                },
            )
    log.warning("[join-refused] an answer of a registry is not for %s, and is not used", before.name)
    return None


def _spread(wait_s: float) -> float:
    """A wait of about that long: members that were started together do not ask together."""
    return wait_s * (0.8 + secrets.randbelow(401) / 1000)


def _next_port(endpoint: str) -> str:
    host, port = split_endpoint(endpoint)
    if port >= 65535:
        raise ControlError(f"registry: {endpoint} has no next port; say where to join (join_at)")
    return f"tcp://{f'[{host}]' if ':' in host else host}:{port + 1}"


NEEDED = f"a key directory, or a join token: join_token_file, or {TOKEN_ENV} in the environment"


class Credentials(msgspec.Struct, frozen=True, kw_only=True):
    """Where an engine's keys come from, as its operator says; the token's text is in none of its errors."""

    name: str
    role: Role
    keys: str = ""
    registry: str = ""
    join_at: str = ""
    join_token_file: str = ""
    join_token: str = ""

    def __repr__(self) -> str:
        return f"Credentials({self.name!r}, {self.role.value})"


class Enrolment(msgspec.Struct, frozen=True):
    """Keys to begin with, and of an engine that joined what renews them."""

    keyring: Keyring
    member: JoinedMember | None = None


def is_auto(name: str) -> bool:
    """`auto`, or `auto.PART` of one of several processes of an engine."""
    return name == AUTO or name.startswith(f"{AUTO}.")


def enrolled(asked: Credentials, deadline_s: float = JOIN_S) -> Enrolment:
    """The keys of an engine; joins, and so may wait for a registry. ControlError says what the operator must do."""
    if asked.keys:
        if asked.join_token_file or asked.join_token:
            raise ControlError("join_token_file: there is a key directory too (keys); give one of the two")
        if is_auto(asked.name):
            raise ControlError(f"name: {AUTO} is for members that join; name the identity that was minted in keys")
        return Enrolment(load(asked.keys, asked.name))
    token = token_from(asked.join_token_file, asked.join_token)
    if token is None:
        raise ControlError(f"keys: this engine has none; give {NEEDED}")
    name = auto_name(asked.name.removeprefix(AUTO).lstrip(".")) if is_auto(asked.name) else asked.name
    member = JoinedMember.join(JoinWish(name, asked.role, token, doors_of(asked.registry, asked.join_at)), deadline_s)
    return Enrolment(member.keyring, member)


AUTO = "auto"
BASE_ENV = ("KVBATON_NAME_BASE", "POD_NAME", "HOSTNAME")
"""Where a platform says what this replica is called; the first that is there."""
TAIL_CHARS = 6
_TAIL = "bcdfghjklmnpqrstvwxz"  # no digits, which would read as a rank; no vowels, and so no words
_ODD = re.compile(r"[^A-Za-z0-9._-]+")


def auto_name(
    part: str = "",
    environ: Mapping[str, str] = os.environ,
    host: Callable[[], str] = socket.gethostname,
) -> WorkerId:
    """`part` tells processes of one engine apart, such as `dp1`."""
    base = next((environ[name] for name in BASE_ENV if environ.get(name)), "") or host() or "member"
    clean = _ODD.sub("-", base).strip("-._") or "member"
    if role_by_name(clean) is not Role.BOTH:
        clean = f"w-{clean}"
    end = (f".{part}" if part else "") + "-" + "".join(secrets.choice(_TAIL) for _ in range(TAIL_CHARS))
    return WorkerId(clean[: WORKER_ID_CHARS_MAX - len(end)].rstrip("-._") + end)
