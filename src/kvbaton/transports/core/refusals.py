"""Refusals at a data port: unauthenticated connections and bad requests of authenticated peers, counted by cause.

Laws: a closed list of causes, so that no peer can make this grow. Each unauthenticated connection, and each bad
request, is counted once. Counted on the loops' threads, read from any. A count is not a log line: unauthenticated peers
cannot fill a disk.
"""

from __future__ import annotations

import enum
import threading
from collections.abc import Iterator, Mapping

from kvbaton.protocol.errors import ProtocolError, Reason


class Cause(enum.StrEnum):
    """Unauthenticated peers first, then authenticated ones. Their meaning for operators: docs/metrics.md."""

    LEFT = "left"  # closed without sending anything: a probe, a scanner, a peer that died. Harmless
    NO_PROOF = "no_proof"  # no proof by the deadline, or closed midway, as with old secrets
    BAD_GREETING = "bad_greeting"
    BAD_PROOF = "bad_proof"  # never by mistake: our side sends none to a server without proof
    CROWDED_OUT = "crowded_out"  # by newer unauthenticated peers
    OTHER_USER = "other_user"  # of this host, at a UNIX socket
    PLAIN = "plain"  # did not encrypt where that is required
    FULL = "full"  # the limit of connections is reached
    BAD_SPAN = "bad_span"  # named memory that is not registered
    NOT_LENT = "not_lent"  # named blocks not lent to it: a late reader, or a malicious one
    BAD_MESSAGE = "bad_message"  # an undecodable request, or an altered record
    OTHER = "other"  # a transport's cause that is not on this list


class Refused(ProtocolError):
    """A connection that is refused, with the cause to count it under."""

    def __init__(self, cause: Cause, detail: str) -> None:
        super().__init__(Reason.BAD_MESSAGE, detail)
        self.cause = cause


class Refusals(Mapping[str, int]):
    """The counts of one transport: every cause, from zero on."""

    def __init__(self) -> None:
        self._counts = {cause.value: 0 for cause in Cause if cause is not Cause.OTHER}
        self._lock = threading.Lock()  # tcp serves on several loops

    def add(self, cause: Cause) -> None:
        with self._lock:
            self._counts[cause] += 1

    def __getitem__(self, cause: str) -> int:
        return self._counts[cause]

    def __iter__(self) -> Iterator[str]:
        return iter(self._counts)

    def __len__(self) -> int:
        return len(self._counts)


def cause_of(error: Exception) -> Cause:
    """By the exception that ended a connection."""
    if isinstance(error, Refused):
        return error.cause
    return Cause.BAD_MESSAGE if isinstance(error, ProtocolError) else Cause.LEFT


def refusals_of(*transports: object) -> dict[str, int]:
    """The counts of these transports together. One that counts nothing (it is optional) adds nothing."""
    found: dict[str, int] = {}
    for transport in transports:
        told = getattr(transport, "refusals", None)
        for key, count in told.items() if isinstance(told, Mapping) else ():
            cause = key if key in _CAUSES else Cause.OTHER.value
            found[cause] = found.get(cause, 0) + max(int(count), 0)
    return found


_CAUSES = frozenset(cause.value for cause in Cause)
