"""Circuit breaking, as pure code: outcomes and time go in, a worker's standing comes out.

    standing   asked                                left by
    well       always                               a failure
    suspect    only when nobody else is there       `suspect_s` of time, or a success
    broken     never                                a probe that is answered: then suspect, one failure from broken

Laws: only failures that a worker cannot have meant count (it is away, hangs, answers 5xx or nonsense): one that says it
is full is alive, and a client's mistake is nobody's failure. A worker breaks after `breaker_failures` in a row. Probes
to one that stays away come ever more rarely, up to `probe_max_s`. What is known is of one life of a worker: a restart
begins anew, and forgets. The data-parallel ranks behind one address have one standing, and are probed once for all.
"""

from __future__ import annotations

import enum
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from kvbaton.protocol.ids import PeerId

NOBODY_ELSE: Mapping[PeerId, PeerId] = {}


class WorkerStanding(enum.Enum):
    WELL = "well"
    SUSPECT = "suspect"
    BROKEN = "broken"


@dataclass(slots=True)
class HealthRecord:
    failures: int = 0  # in a row
    suspect_until: float = 0.0
    probe_at: float | None = None  # set: broken
    wait_s: float = 0.0  # before the next probe


class Health:
    """Standings of workers that gave cause. Those it does not know are well."""

    def __init__(self, suspect_s: float, breaker_failures: int, probe_min_s: float, probe_max_s: float) -> None:
        self.revision = 0  # rises whenever a standing may have changed other than by time
        self.opened = 0
        self._suspect_s = suspect_s
        self._breaker_failures = breaker_failures
        self._probe_min_s = probe_min_s
        self._probe_max_s = probe_max_s
        self._records: dict[PeerId, HealthRecord] = {}
        self._stands_for: Mapping[PeerId, PeerId] = {}

    def __bool__(self) -> bool:
        """Whether anybody is less than well."""
        return bool(self._records)

    def standing(self, peer: PeerId, now: float) -> WorkerStanding:
        record = self._records.get(self._stands_for.get(peer, peer)) if self._records else None
        if record is None:
            return WorkerStanding.WELL
        if record.probe_at is not None:
            return WorkerStanding.BROKEN
        return WorkerStanding.SUSPECT if record.suspect_until > now else WorkerStanding.WELL

    def failed(self, peer: PeerId, now: float) -> WorkerStanding | None:
        """Note a failure; returns the standing if it is news."""
        before = self.standing(peer, now)
        record = self._records.setdefault(self._stands_for.get(peer, peer), HealthRecord())
        record.failures += 1
        record.suspect_until = max(record.suspect_until, now + self._suspect_s)
        # Requests that were under way when it broke fail one after the other. They neither open the breaker again nor
        # put off the probe: else a burst of late failures could keep a worker out for as long as it lasts.
        if record.probe_at is None and record.failures >= self._breaker_failures:
            record.wait_s = max(record.wait_s, self._probe_min_s)
            record.probe_at = now + record.wait_s
            self.opened += 1
        self.revision += 1
        after = self.standing(peer, now)
        return after if after is not before else None

    def ok(self, peer: PeerId) -> None:
        """A worker did its part: whatever was held against it is over."""
        if self._records and self._records.pop(self._stands_for.get(peer, peer), None) is not None:
            self.revision += 1

    @property
    def records(self) -> Mapping[PeerId, HealthRecord]:
        return self._records

    def replace(self, records: Mapping[PeerId, HealthRecord]) -> None:
        """Take another's word for every worker."""
        self._records = dict(records)
        self.revision += 1

    def due(self, now: float) -> list[PeerId]:
        """Whom to probe now; each is due again only after its answer, or the next interval."""
        found = []
        for peer, record in self._records.items():
            # The next probe is set before this one is answered: an answer that never comes needs no clearing up.
            if record.probe_at is not None and record.probe_at <= now:
                record.wait_s = min(2 * record.wait_s, self._probe_max_s)
                record.probe_at = now + record.wait_s
                found.append(peer)
        return found

    def probed(self, peer: PeerId, answered: bool, now: float) -> None:
        """A probe's outcome. One that was answered lets requests in again, one failure from breaking anew."""
        record = self._records.get(peer)
        if record is None or record.probe_at is None or not answered:
            return
        # A probe is a cheap question, and no proof that requests succeed: half open is suspect, one failure from
        # broken. `wait_s` is kept, so that a worker which answers probes and fails requests is probed ever more rarely.
        record.probe_at = None
        record.failures = self._breaker_failures - 1
        record.suspect_until = now + self._suspect_s  # not for ever: while others are well a suspect is never asked
        self.revision += 1

    def keep(self, known: Collection[PeerId], stands_for: Mapping[PeerId, PeerId] = NOBODY_ELSE) -> None:
        """Forget all others: they are gone. `stands_for`: under whom the standing of a rank is kept."""
        self._stands_for = stands_for
        if not self._records.keys() <= set(known):
            self._records = {peer: record for peer, record in self._records.items() if peer in known}
            self.revision += 1
