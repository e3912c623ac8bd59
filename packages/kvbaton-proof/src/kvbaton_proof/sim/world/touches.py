"""What befalls the handoffs of a world: each fault is noted where it strikes, with whom it strikes and for how long.

A fault touches a handoff itself, a pair of workers, or a worker; `checks/causes.py` judges failures by it. Noting
draws no chance, so a world is the same whether or not somebody reads its touches.
"""

from __future__ import annotations

import functools
from collections import defaultdict

from kvbaton.protocol.errors import ProtocolError
from kvbaton.protocol.ids import HandoffId, WorkerId
from kvbaton.protocol.wire.ticket import Ticket, unseal

TICKET_KEY = b"simulated cluster key 0123456789"
ALWAYS = float("inf")


class Touches:
    """Of one world: by whom they strike, since when, until when and what."""

    def __init__(self) -> None:
        self._of: defaultdict[str, list[tuple[float, float, str]]] = defaultdict(list)

    def add(self, kind: str, since: float, until: float, whom: tuple[str, ...]) -> None:
        for each in whom:
            if each:
                self._of[each].append((since, until, kind))

    def between(self, whom: str, since: float, until: float) -> set[str]:
        return {kind for begun, ended, kind in self._of.get(whom, ()) if begun <= until and ended >= since}


def pair(one: WorkerId, other: WorkerId) -> str:
    """The name of two workers together, whichever is P."""
    return "|".join(sorted((one, other)))


@functools.lru_cache(maxsize=4096)
def opened(ticket: str) -> Ticket | None:
    """What a ticket says, if anybody of this cluster signed it."""
    try:
        return unseal(ticket, (TICKET_KEY,), 0.0)
    except ProtocolError:
        return None


def handoff_of(ticket: str) -> HandoffId:
    found = opened(ticket)
    return found.handoff if found is not None else HandoffId("")
