"""Tickets that a router took back, as events for the node that leased what they promise.

Law: only a ticket that this cluster signed, for this worker in this life, says anything here.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator

from kvbaton.node.doorway import Doorway
from kvbaton.protocol.errors import ProtocolError
from kvbaton.protocol.events import Discarded


def discarded(doorway: Doorway, tickets: Iterable[str]) -> Iterator[Discarded]:
    """What to tell the node. A ticket that is forged says nothing, nor does one that has expired: its lease has too."""
    me = doorway.config.me
    for ticket in tickets:
        with contextlib.suppress(ProtocolError):
            opened = doorway.open_ticket(ticket)
            if opened.source == me.worker and opened.incarnation in (0, me.incarnation):
                yield Discarded(opened.handoff)
