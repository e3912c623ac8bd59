"""Members of whom a registry tells: who is let in on the strength of a certificate.

Laws: the certificate says name, key and role; an entry that says otherwise counts for nothing. A certificate is judged
when it is first seen: one that was good then stays good for as long as registries list its member, so that no clock and
no absent registry parts a pair. Used by one thread.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Protocol

from kvbaton.control.joining.certificate import CertificateFault, Membership, verified
from kvbaton.observe.codes.saying import worth_saying
from kvbaton.protocol.ids import WorkerId

log = logging.getLogger(__name__)


class Entry(Protocol):
    """What a registry says of one member."""

    @property
    def worker(self) -> WorkerId: ...
    @property
    def public_key(self) -> str: ...
    @property
    def certificate(self) -> bytes: ...


class Acquaintances:
    """One process's."""

    def __init__(self, wall: Callable[[], float] = time.time) -> None:
        self._wall = wall
        self._known: dict[WorkerId, Membership] = {}
        self._counts: Counter[str] = Counter()

    def told(self, entries: Iterable[Entry], admission: bytes) -> dict[WorkerId, Membership]:
        """Who of these has proven to be a member; whoever is not among them any more is forgotten."""
        found: dict[WorkerId, Membership] = {}
        for entry in entries:
            if entry.certificate and admission:
                try:
                    found[entry.worker] = self._judged(entry, admission)
                except CertificateFault as fault:
                    self._counts["refused"] += 1
                    if worth_saying(self._counts["refused"]):
                        log.warning("[certificate-refused] %s is not let in: %s", entry.worker, fault)
        self._known = found
        return found

    def _judged(self, entry: Entry, admission: bytes) -> Membership:
        member = verified(entry.certificate, admission)
        if (member.name, member.public) != (entry.worker, entry.public_key):
            raise CertificateFault("certificate: of another name or key")
        known = self._known.get(entry.worker)
        is_known = known is not None and (known.public, known.role) == (member.public, member.role)
        if not is_known and member.is_over(self._wall()):
            raise CertificateFault("certificate: expired")
        return known if is_known and known is not None else member
