"""A member's side of joining: makes its key, proves its token at a door, and stays a member while it lives.

Laws: the secret key is made here and stays in this process's memory. Joining is bounded by a deadline and says what it
waits for; a refusal that no wait can change ends it at once. Afterwards the certificate is shown at every registry's
door from time to time, so that one which was started anew, or never heard of this member, takes it in; where it has
expired because no registry was there for too long, the token is proven again, under the same key and name; not by one
that was told that it is removed. An answer is believed only from the door that the token names, and only if its
certificate is for this key.
"""

from __future__ import annotations

import contextlib
import logging
import secrets
import threading
import time
from collections.abc import Callable, Sequence

import msgspec
import zmq

from kvbaton.control.address_book import split_endpoint
from kvbaton.control.addressing import ControlError, ControlLimits, check_endpoint
from kvbaton.control.joining import join_messages as m
from kvbaton.control.joining.certificate import CertificateFault, verified
from kvbaton.control.joining.join_messages import opened_card
from kvbaton.control.joining.join_token import JoinToken, proof
from kvbaton.control.keyring import Keyring
from kvbaton.control.sockets import SocketPlane, is_ipv6
from kvbaton.protocol.ids import WorkerId
from kvbaton.protocol.legality import Role

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
