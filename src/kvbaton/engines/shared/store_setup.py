"""Who an engine is, and who each of its ranks is towards the shared store.

Laws: a key that is missing is refused at start, by name. Each rank has an identity of its own towards a kvbaton store,
since an answer goes to whoever spoke last under that name.
"""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Iterator

import zmq

from kvbaton.control.addressing import ControlError
from kvbaton.control.joining.join_client import Enrolment, enrolled
from kvbaton.control.keyring import TICKET_KEY_BYTES, Keyring, data_parallel_name, engine_and_rank, load
from kvbaton.engines.shared.connector_settings import ConnectorSettings
from kvbaton.protocol.ids import WorkerId
from kvbaton.protocol.legality import Role


def enrolment_of(settings: ConnectorSettings, role: Role) -> Enrolment:
    """Who the engine is. One that is alone gets keys that nobody else knows."""
    if settings.is_alone:
        return Enrolment(alone(settings))
    with _naming_ranks(settings):
        return enrolled(settings.credentials(role))


def keyring_of(settings: ConnectorSettings, rank: int = 0, role: Role = Role.BOTH) -> Keyring:
    """Who a rank is, towards a store. A rank of an engine that joins is a member of its own, and so a use of the
    token: its process has no part in the engine's key."""
    if settings.is_alone:
        return alone(settings)
    if not settings.joins:
        with _naming_ranks(settings):
            return load(settings.keys, rank_identity(settings.name, rank))
    enrolment = enrolled(settings.credentials(role, f"r{rank}"))
    if enrolment.member is not None:
        enrolment.member.start()  # for as long as this process lives
    return enrolment.keyring


def alone(settings: ConnectorSettings) -> Keyring:
    """Keys that nobody else knows."""
    public, secret = (key.decode() for key in zmq.curve_keypair())
    name = WorkerId(settings.name)
    return Keyring(name, public, secret, {name: public}, (secrets.token_bytes(TICKET_KEY_BYTES),))


@contextlib.contextmanager
def _naming_ranks(settings: ConnectorSettings) -> Iterator[None]:
    """A missing key of a data-parallel rank is answered with the command that mints those of all ranks."""
    try:
        yield
    except ControlError as error:
        of = engine_and_rank(settings.name)
        if of is None or "is missing" not in str(error):
            raise
        ranks = " ".join(f"{data_parallel_name(of[0], rank)}:ROLE" for rank in range(max(2, of[1] + 1)))
        raise ControlError(
            f"{error}. Each data-parallel rank of {of[0]} is a member with a key of its own; mint them with: "
            f"kvbaton keys add {settings.keys} {ranks} … (ROLE: prefill, decode or both)"
        ) from None


def rank_identity(name: str, rank: int) -> str:
    """In the key directory: the engine's own name for its first rank, and one each for the others."""
    return f"{name}.{rank}" if rank else name
