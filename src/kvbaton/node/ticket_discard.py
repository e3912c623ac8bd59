"""Tickets that a router discarded, as events for the node that leased their blocks.

Law: only a ticket signed by this cluster for this incarnation of this worker has an effect.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator

from kvbaton.node.doorway import Doorway
from kvbaton.protocol.errors import ProtocolError
from kvbaton.protocol.events import Discarded


def discarded(doorway: Doorway, tickets: Iterable[str]) -> Iterator[Discarded]:
    """The event for the node. A forged ticket has no effect, nor has an expired one: its lease has expired too."""
    me = doorway.config.me
    for ticket in tickets:
        with contextlib.suppress(ProtocolError):
            opened = doorway.open_ticket(ticket)
            if opened.source == me.worker and opened.incarnation in (0, me.incarnation):
                yield Discarded(opened.handoff)
