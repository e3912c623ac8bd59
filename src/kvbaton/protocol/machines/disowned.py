"""Tickets that D will not use: P is told, so that it does not hold blocks in vain.

Law: a ticket is returned the way any reader takes and leaves it, by a Claim with it and, if that is granted, an
Abandon: P trusts a ticket, not a name. It is sent once for each handoff, to peers that D can reach, and never waited
for: a lost message costs P the rest of the lease's term.
"""

from __future__ import annotations

from collections.abc import Callable

from kvbaton.protocol.bounded import Remembered
from kvbaton.protocol.errors import ProtocolError, Reason
from kvbaton.protocol.events import Disowned
from kvbaton.protocol.ids import HandoffId
from kvbaton.protocol.machines.context import LedgerContext
from kvbaton.protocol.machines.pairing_state import Link, LinkState
from kvbaton.protocol.machines.pairing_target import Links
from kvbaton.protocol.wire.messages import Abandon, Claim, Granted

WAITING_MAX = 1024
"""For their source to be greeted; what comes beyond is left to its lease's end."""


class DisownedTickets:
    """Disowned tickets of one node, as D."""

    def __init__(
        self, desk: LedgerContext, links: Links, next_attempt: Callable[[], int], is_wanted: Callable[[HandoffId], bool]
    ) -> None:
        self._desk = desk
        self._links = links
        self._next_attempt = next_attempt
        self._is_wanted = is_wanted
        self._why: Remembered[HandoffId, Reason] = Remembered(desk.settings.tombstones_max)
        self._waiting: list[tuple[Link, Disowned]] = []

    def on_disowned(self, event: Disowned, now: float) -> None:
        """Tell its source now, or once it is paired. Not if another request of ours may be reading with it."""
        if event.handoff in self._why or self._is_wanted(event.handoff):
            return
        if len(self._waiting) >= WAITING_MAX:
            self._desk.count("disowned_dropped")
            return
        try:
            link = self._links.need(event.source, now)
        except ProtocolError:  # no room for one more source
            self._desk.count("disowned_dropped")
            return
        self._why.put(event.handoff, event.reason)
        if link.state is LinkState.UP:
            self._claim(link, event)
        else:
            self._waiting.append((link, event))

    def on_link_up(self, link: Link) -> None:
        for event in self._take(link):
            self._claim(link, event)

    def on_link_down(self, link: Link) -> None:
        """Its source is gone, and with it the blocks; or it refuses us, and its leases expire."""
        self._take(link)

    def on_granted(self, link: Link, message: Granted) -> None:
        """Granted to no attempt that we know: it was disowned, or has ended."""
        why = self._why.get(message.handoff) or Reason.ABORTED
        self._links.send(link, Abandon(message.handoff, message.attempt, why))

    def _take(self, link: Link) -> list[Disowned]:
        taken = [event for each, event in self._waiting if each is link]
        self._waiting = [(each, event) for each, event in self._waiting if each is not link]
        return taken

    def _claim(self, link: Link, event: Disowned) -> None:
        self._desk.count("disowned")
        claim = Claim(event.handoff, self._next_attempt(), event.ticket, event.digest, event.deferred)
        self._links.send(link, claim)
