"""Who was turned away at a data port, and what admitted peers asked for and did not get: counts by cause.

Laws: a closed list of causes, so that nobody makes this grow. Each connection of a stranger, and each bad request, is
counted once. Counted on the loops' threads, read from any. A count is no log line: strangers can fill no disk.
"""

from __future__ import annotations

import enum
import threading
from collections.abc import Iterator, Mapping

from kvbaton.protocol.errors import ProtocolError, Reason


class Cause(enum.StrEnum):
    """Strangers first, then peers that have proven themselves. What each means to an operator: docs/metrics.md."""

    LEFT = "left"  # went without a word: a probe, a scanner, a peer that died. Nothing to alarm about
    NO_PROOF = "no_proof"  # proved nothing: silent until the deadline, or went in the middle, as old secrets have it
    BAD_GREETING = "bad_greeting"
    BAD_PROOF = "bad_proof"  # never by mistake: our own side sends none to a server that cannot prove itself
    CROWDED_OUT = "crowded_out"  # by newer strangers
    OTHER_USER = "other_user"  # of this host, at a UNIX socket
    PLAIN = "plain"  # would not encrypt where that is wanted
    FULL = "full"  # as many are served as can be
    BAD_SPAN = "bad_span"  # asked for memory outside of what is registered
    NOT_LENT = "not_lent"  # asked for blocks that are not lent to it: a reader that came late, or one that lies
    BAD_MESSAGE = "bad_message"  # a request that cannot be read, or a record that was altered
    OTHER = "other"  # of a data plane that counts what is not on this list


class Refused(ProtocolError):
    """A connection that is refused, with the cause to count it under."""

    def __init__(self, cause: Cause, detail: str) -> None:
        super().__init__(Reason.BAD_MESSAGE, detail)
        self.cause = cause


class Refusals(Mapping[str, int]):
    """The counts of one data plane: every cause, from zero on."""

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
    """Of what ended a connection."""
    if isinstance(error, Refused):
        return error.cause
    return Cause.BAD_MESSAGE if isinstance(error, ProtocolError) else Cause.LEFT


def refusals_of(*transports: object) -> dict[str, int]:
    """What these data planes have counted together. One that counts nothing (it is optional) adds nothing."""
    found: dict[str, int] = {}
    for transport in transports:
        told = getattr(transport, "refusals", None)
        for key, count in told.items() if isinstance(told, Mapping) else ():
            cause = key if key in _CAUSES else Cause.OTHER.value
            found[cause] = found.get(cause, 0) + max(int(count), 0)
    return found


_CAUSES = frozenset(cause.value for cause in Cause)
