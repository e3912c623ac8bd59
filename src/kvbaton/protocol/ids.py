"""Names of things. Passing one kind of id where another is due is a type error, not a leak in production.

A `RequestId` belongs to one engine and never leaves it; a `HandoffId` is the only name that crosses the wire.
All ids are minted by the caller (from the operating system's randomness, or from the simulator's seed):
this package has no randomness of its own.
"""

from __future__ import annotations

import re
from typing import Annotated, NewType

import msgspec

from kvbaton.protocol.numbers import ID

RequestId = NewType("RequestId", str)
"""One engine's own name for a request; never on the wire."""

TransferId = NewType("TransferId", str)
"""128 random bits as 32 hex digits; names one client request's handoffs."""

HandoffId = NewType("HandoffId", str)
"""`<transfer id>.<prompt index>`: one prompt's KV going from P to D."""

WorkerId = NewType("WorkerId", str)
"""The configured name of an engine; survives its restarts."""

Incarnation = NewType("Incarnation", int)
"""63 random bits drawn when an engine starts (or resets its cache, or reloads weights)."""

LeaseId = NewType("LeaseId", int)
"""Rises per incarnation of P."""

ReservationId = NewType("ReservationId", int)
"""Rises per incarnation of D, so that a floor can stand for forgotten ones."""

JobId = NewType("JobId", int)
"""One copy operation handed to one rank's transport; rises per node."""

PutId = NewType("PutId", int)
"""One put of blocks into a store; rises per node."""

WORKER_ID_CHARS_MAX = 64
PROMPTS_PER_TRANSFER_MAX = 4096

_WORKER = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_HANDOFF = re.compile(r"([0-9a-f]{32})\.(0|[1-9][0-9]{0,3})")


class PeerId(msgspec.Struct, frozen=True, array_like=True, order=True):
    """A worker in one incarnation; a restart at the same address is a different peer."""

    worker: WorkerId
    incarnation: Annotated[Incarnation, ID]

    def __str__(self) -> str:
        return f"{self.worker}@{self.incarnation:016x}"


def rank_peer(peer: PeerId, rank: int) -> PeerId:
    """One rank of a peer, as transports know it: each rank has its own memory, sockets and secrets."""
    return PeerId(WorkerId(f"{peer.worker}#{rank}"), peer.incarnation)


def owner_of(peer: PeerId) -> PeerId:
    """The peer that `peer` is one rank of; for any other peer, itself."""
    return PeerId(WorkerId(peer.worker.partition("#")[0]), peer.incarnation)


class Reader(msgspec.Struct, frozen=True, array_like=True, order=True):
    """One copy attempt of one peer. Every claim mints a new one; after its commit it never copies again."""

    peer: PeerId
    attempt: int


def handoff_id(transfer: TransferId, index: int = 0) -> HandoffId:
    """The handoff of prompt `index` within a client request."""
    if not 0 <= index < PROMPTS_PER_TRANSFER_MAX:
        raise ValueError(f"prompt index {index} is outside 0..{PROMPTS_PER_TRANSFER_MAX - 1}")
    return HandoffId(f"{transfer}.{index}")


def is_handoff_id(text: str) -> bool:
    match = _HANDOFF.fullmatch(text)
    return match is not None and int(match[2]) < PROMPTS_PER_TRANSFER_MAX


def is_worker_id(text: str) -> bool:
    return _WORKER.fullmatch(text) is not None
