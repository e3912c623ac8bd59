"""What workers and operators sign: a worker that it is here, in this life, at these addresses, or that this life is
over; an operator that a life is to drain.

Laws: the signed bytes travel as they were signed, through any registry, and every reader takes what it needs from them
alone. Of one worker the newest statement counts: of the life that was born last, the one with the highest sequence. A
worker signs anew every `RESIGN_S`, and a reader takes no statement that it sees first when it is `FRESH_S` old by its
own clock: so nothing that was once true can be played back for long. A worker whose clock was set back learns of its
newer statement from a registry that has it, and numbers itself above. An order to drain is for one life.
"""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable

import msgspec

from kvbaton.control.keyring import Keyring
from kvbaton.control.registry.registry_messages import (
    DrainWorker,
    Incarnation,
    Name,
    Registration,
    RegistryFault,
    Worker,
    validate,
)
from kvbaton.control.signing import Signed, verify
from kvbaton.protocol.ids import PeerId, WorkerId
from kvbaton.protocol.legality import Act, Role, may
from kvbaton.protocol.numbers import Number, UnixSeconds

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
