"""Transports that could not be opened to a worker: omitted from the next hellos, and tried again after a while.

Law: nothing is omitted for longer than `seconds` after its last failure.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvbaton.protocol.bounded import Remembered
from kvbaton.protocol.ids import WorkerId

SHUNNED_MAX = 4096


class Shunned:
    """Pairs of a worker and a transport, each until a time."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._until: Remembered[tuple[WorkerId, str], float] = Remembered(SHUNNED_MAX)

    def add(self, worker: WorkerId, transport: str, now: float) -> None:
        self._until.put((worker, transport), now + self._seconds)

    def without(self, worker: WorkerId, transports: Sequence[str], now: float) -> tuple[str, ...]:
        """The names that are worth a try, in their order."""
        return tuple(name for name in transports if (self._until.get((worker, name)) or now) <= now)
