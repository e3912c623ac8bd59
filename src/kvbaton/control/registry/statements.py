"""What workers and operators sign: a worker that it is here, in this life, at these addresses, or that this life is
over; an operator that a life is to drain.

Laws: the signed bytes travel as they were signed, through any registry, and every reader takes what it needs from them
alone. Of one worker the newest statement counts: of the life that was born last, the one with the highest sequence. A
worker signs anew every `RESIGN_S`, and a reader takes no statement that it sees first when it is `FRESH_S` old by its
own clock: so nothing that was once true can be played back for long. A worker whose clock was set back learns of its
newer statement from a registry that has it, and numbers itself above. An order to drain is for one life.

A worker's standing with one registry, as pure code: answers and time go in; what to say comes out.

Laws: until the registry says otherwise, registering is repeated; a worker that drains is listed once the registry says
that of it. Who is listed registers again from time to time: what it signed grows old (`statements`). The registry's
last list survives it; what it means beside those of other registries is `registry_union`'s.
"""

from __future__ import annotations

import enum
import functools
import threading
import time
from collections.abc import Callable

import msgspec

from kvbaton.control.keyring import Keyring
from kvbaton.control.registry import registry_messages as m
from kvbaton.control.registry.registry_messages import (
    NOTHING,
    DrainWorker,
    Incarnation,
    Name,
    Registration,
    RegistryFault,
    Worker,
    validate,
)
from kvbaton.control.registry.registry_roster import RegistrySettings
from kvbaton.control.registry.registry_union import RegistryView
from kvbaton.control.signing import Signed, verify
from kvbaton.protocol.ids import PeerId, WorkerId
from kvbaton.protocol.legality import Act, Role, may
from kvbaton.protocol.numbers import Number, UnixSeconds


class MemberState(enum.StrEnum):
    JOINING = "joining"  # not listed yet, or no longer
    LISTED = "listed"
    SUPERSEDED = "superseded"  # another process took the name; listed again when that one is gone
    REFUSED = "refused"  # the registry said why; tried again all the same


class Member:
    """One worker's side of discovery."""

    def __init__(
        self,
        registration: m.Registration,
        settings: RegistrySettings,
        now: float,
        own_statements: OwnStatements | None = None,
    ) -> None:
        self.registration = m.validate(registration)
        self._own_statements = own_statements
        self._sign_at = now
        self.state = MemberState.JOINING
        self.detail = ""  # why, when refused
        self.has_spoken = False  # the registry may list it, even if no answer has come
        self.held = ""  # what it still waits for while it drains
        self._takes_reports = False
        self._is_answered = False  # what was said last
        self._ping_s = settings.ping_s
        self._speak_at = now
        self._seen = m.SeenWorkers()
        self.view: RegistryView[m.DirectoryEntry] | None = None  # the registry's last list

    def on_time(self, now: float) -> m.FromWorker | None:
        """What to say now, if anything is due."""
        if now < self._speak_at:
            return None
        self._speak_at = now + self._ping_s
        self.has_spoken = True
        self._is_answered = False
        unlisted = self.state in (MemberState.JOINING, MemberState.REFUSED)
        if unlisted or (self._own_statements and now >= self._sign_at and self.state is MemberState.LISTED):
            self._sign_at = now + RESIGN_S
            return self._register()
        return m.Ping(self.registration.incarnation, self._seen, self.held)

    def _register(self) -> m.Register:
        return m.Register(self.registration) if self._own_statements is None else m.Register(
            *self._own_statements.of(self.registration)
        )  # fmt: skip

    def goodbye(self) -> m.Deregister:
        """That this life is over."""
        signed = self._own_statements.of(self.registration, left=True)[1] if self._own_statements is not None else None
        return m.Deregister(self.registration.incarnation, signed)

    def next_deadline(self) -> float:
        return self._speak_at

    @property
    def is_known_to_drain(self) -> bool:
        """Whether the registry has said that nobody new is sent here."""
        return self.registration.draining and self.state is MemberState.LISTED

    @property
    def may_report(self) -> bool:
        """Whether the registry lists this worker, knows what a report is, and is there: what it misses is lost."""
        return self.state is MemberState.LISTED and self._takes_reports and self._is_answered

    def present(self, registration: m.Registration, now: float) -> None:
        """Register anew: the worker began another life, or can be reached otherwise."""
        self.state = MemberState.JOINING  # first: another thread may look whether the registry knows
        self.registration = m.validate(registration)
        self._speak_at = now

    def on_message(self, message: m.FromRegistry, now: float) -> None:
        """Take an answer."""
        if isinstance(message, m.Directory):
            self._on_directory(message)
        elif isinstance(message, m.RegistryRefused):
            self.state, self.detail = MemberState.REFUSED, message.detail
        elif message.incarnation == self.registration.incarnation:
            if isinstance(message, m.RegisteredReply):
                self._on_registered(message)
            elif isinstance(message, m.Superseded):
                self.state = MemberState.SUPERSEDED
            elif isinstance(message, m.Unknown) or (
                isinstance(message, m.Outdated) and self._own_statements and self._own_statements.above(message.signed)
            ):
                self.state = MemberState.JOINING
                self._speak_at = now

    def _on_registered(self, message: m.RegisteredReply) -> None:
        self._takes_reports, self._is_answered = message.reports, True
        if self.registration.draining and not message.draining:
            return  # the answer to what was said before
        self.state, self.detail = MemberState.LISTED, ""

    def _on_directory(self, message: m.Directory) -> None:
        if message.seen.registry == self._seen.registry and message.seen.version <= self._seen.version:
            return
        self._seen = message.seen
        others = tuple(entry for entry in message.entries if entry.worker != self.registration.worker)
        gone, left = frozenset(message.gone), frozenset(message.left)
        self.view = RegistryView(others, message.complete, gone, left, ended=message.ended)


class HeldReport(msgspec.Struct, frozen=True):
    """What a worker still does or keeps for others."""

    requests: int = 0
    leases: int = 0
    intakes: int = 0
    claims: int = 0  # that wait for a prompt to begin

    @property
    def nothing(self) -> bool:
        return not any(msgspec.structs.astuple(self))

    def __str__(self) -> str:
        counts = msgspec.structs.asdict(self).items()
        return ", ".join(f"{n} {name if n > 1 else name[:-1]}" for name, n in counts if n) or NOTHING


RESIGN_S = 30.0
FRESH_S = 300.0
"""Also by how much the clocks of a cluster may differ."""
_STATEMENT = "registration 1"
_ORDER = "drain order 1"
_STEP_S = 0.001


class Statement(msgspec.Struct, frozen=True):
    """A worker's own word of itself."""

    registration: Registration
    key: Name  # the CURVE key that it is known by
    sequence: Number
    at: UnixSeconds
    left: bool = False  # this life is over

    @property
    def peer(self) -> PeerId:
        return self.registration.peer


class DrainOrder(msgspec.Struct, frozen=True):
    """An operator's word that a life is to finish and go."""

    operator: Worker
    key: Name
    worker: Worker
    incarnation: Incarnation


class OwnStatements:
    """A worker's own statements, each above those before. From any thread."""

    def __init__(self, keyring: Keyring, wall: Callable[[], float] = time.time) -> None:
        self._signer, self._key, self._name = keyring.signer, keyring.public, keyring.name
        self._wall = wall
        self._lock = threading.Lock()
        self._sequence = 0
        self._born = 0.0  # no life of this process is older

    def of(self, registration: Registration, *, left: bool = False) -> tuple[Registration, Signed]:
        """The registration as it is signed, and that."""
        with self._lock:
            now = self._wall()
            self._sequence = max(int(now * 1000), self._sequence + 1)
            told = msgspec.structs.replace(registration, born=max(registration.born, self._born))
            said = _encoder.encode(Statement(told, self._key, self._sequence, now, left))
        return told, Signed(said, self._signer.sign(_STATEMENT, said))

    def above(self, newer: Signed) -> bool:
        """Number what follows above a statement, if it is one of this worker's own."""
        try:
            said = verified(newer, self._signer.public)
        except RegistryFault:
            return False
        if said.registration.worker != self._name:
            return False
        with self._lock:
            self._sequence = max(self._sequence, said.sequence)
            self._born = max(self._born, said.registration.born + _STEP_S)
        return True


def registered(keyring: Keyring, key: str, told: Registration, signed: Signed | None, wall: float) -> Registration:
    """What a worker that has proven this key registers; RegistryFault names what is wrong. A worker of a release that
    does not sign is taken at its word as long as no key is known by which it would."""
    signing = keyring.signing.get(key)
    if signing is None:
        return told
    if signed is None:
        raise RegistryFault(
            f"signed: missing, and public/{told.worker}.signing is here; run this release there, or remove that file"
        )
    said = verified(signed, signing)
    if (said.registration.worker, said.key) != (told.worker, key) or said.left:
        raise RegistryFault("signed: of another worker or key, or of a life that is over")
    check_fresh(said, wall)
    return said.registration


def check_fresh(said: Statement, wall: float) -> None:
    """RegistryFault if it is too old, or from a clock that is ahead."""
    if abs(wall - said.at) > FRESH_S:
        ago = f"{wall - said.at:.0f} s ago by this host's clock"
        raise RegistryFault(f"signed: {ago}, expected within {FRESH_S:g}; set the clocks (NTP)")


@functools.lru_cache(maxsize=8192)
def read(signed: Signed) -> Statement:
    """What a statement says, whoever signed it."""
    try:
        said = _statements.decode(signed.said)
    except _BAD as error:
        raise RegistryFault(f"signed: {error}") from None
    validate(said.registration)
    return said


def verified(signed: Signed, signing: bytes) -> Statement:
    """The same, if the holder of this signing key has signed it."""
    said = read(signed)
    if not verify(_STATEMENT, signing, signed.said, signed.signature):
        raise RegistryFault(f"signed: not by the key of {said.registration.worker}")
    return said


def may_serve(key: Role, registered_as: str) -> bool:
    """Whether a worker whose key has this role may be listed as `registered_as`."""
    return key is Role.BOTH or (may(key, Act.REGISTER) and registered_as == key)


# --- orders


def drain_order(keyring: Keyring, worker: WorkerId, incarnation: Incarnation) -> Signed:
    said = _encoder.encode(DrainOrder(keyring.name, keyring.public, worker, incarnation))
    return Signed(said, keyring.signer.sign(_ORDER, said))


def is_ordered(keyring: Keyring, order: Signed | None, worker: WorkerId, incarnation: int) -> bool:
    """Whether an operator of this cluster has signed that this life is to drain."""
    if order is None:
        return False
    try:
        said = _orders.decode(order.said)
    except _BAD:
        return False
    current = (keyring.peers.get(said.operator), *keyring.also.get(said.operator, ()))
    signing = keyring.signing.get(said.key)
    if said.key not in current or signing is None or not may(keyring.role_of(said.operator), Act.DRAIN):
        return False
    return (said.worker, said.incarnation) == (worker, incarnation) and verify(
        _ORDER, signing, order.said, order.signature
    )


def must_obey(keyring: Keyring, message: DrainWorker) -> bool:
    """Whether a worker follows an order that a registry brings. A bare one counts where no operator could sign it."""
    operators = (name for name in keyring.peers if may(keyring.role_of(name), Act.DRAIN))
    if message.order is None and not any(keyring.signing_keys(name) for name in operators):
        return True
    return is_ordered(keyring, message.order, message.worker, message.incarnation)


_BAD = (msgspec.DecodeError, UnicodeDecodeError, RecursionError, OverflowError)
_encoder = msgspec.msgpack.Encoder()
_statements = msgspec.msgpack.Decoder(Statement)
_orders = msgspec.msgpack.Decoder(DrainOrder)
