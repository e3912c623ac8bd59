"""The routers that read a registry from outside: who they are, and what is still to be sent to each.

Laws: a router gets one roster at a time, the newest, and the next one only after it has said which one it has; reports
likewise, so many ahead of what has arrived. So what waits for a router that does not read is bounded. Of each worker
the newest report is kept, once for all routers, while one of them has not had it; a router that falls behind misses the
ones in between. One that says nothing for `evict_s` is forgotten.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from kvbaton.control.registry import registry_messages as m
from kvbaton.control.registry.registry_roster import RegistryRoster
from kvbaton.protocol.ids import Incarnation, WorkerId

WATCHERS_MAX = 64
REPORTS_AHEAD_MAX = 64
REPORT_BYTES_KEPT_MAX = 64 << 20
"""Of all workers together; what comes beyond it is not relayed."""
ROSTER_S = 0.02
"""Rosters to one router are at least this far apart."""


@dataclass(slots=True)
class _Watcher:
    heard_at: float
    seen: m.SeenWorkers  # which roster it has
    is_due: bool = True  # it has said which since the last one was sent
    sent_at: float = -math.inf
    reports_sent: int = 0
    reports_heard: int = 0
    unsent: dict[WorkerId, None] = field(default_factory=dict)  # workers whose newest report it has not been sent


class RosterWatchers:
    """One registry's, on its thread."""

    def __init__(
        self, roster: RegistryRoster, counters: Counter[str], vouch: Callable[[m.Roster], m.Roster] = lambda each: each
    ) -> None:
        self._roster = roster
        self._vouch = vouch
        self._counters = counters
        self._watchers: dict[WorkerId, _Watcher] = {}
        self._reports: dict[WorkerId, tuple[Incarnation, bytes]] = {}
        self._bytes = 0

    def __len__(self) -> int:
        return len(self._watchers)

    def watch(self, router: WorkerId, message: m.Watch, now: float) -> m.ToRouter | None:
        """A router reads, or goes on reading; the answer, unless a roster follows."""
        watcher = self._watchers.get(router)
        if watcher is None:
            if len(self._watchers) >= WATCHERS_MAX:
                return m.RegistryRefused(f"watch: {WATCHERS_MAX} routers read here, the most there can be")
            watcher = self._watchers[router] = _Watcher(now, message.seen)
        if message.reports < watcher.reports_heard or not message.seen.registry:  # the router was started again
            watcher.reports_sent = watcher.reports_heard = message.reports
        watcher.heard_at, watcher.seen, watcher.is_due = now, message.seen, True
        watcher.reports_heard = min(message.reports, watcher.reports_sent)
        return m.Watching(message.seen) if message.seen == self._roster.watched else None

    def keep(self, may_read: Callable[[WorkerId], bool]) -> None:
        """The keys changed: forget routers that may not read any more."""
        self._watchers = {router: each for router, each in self._watchers.items() if may_read(router)}

    def take_report(self, worker: WorkerId, incarnation: Incarnation, data: bytes) -> None:
        if not self._watchers:
            return
        self._drop(worker)
        if self._bytes + len(data) > REPORT_BYTES_KEPT_MAX:
            self._counters["reports_not_relayed"] += 1
            return
        self._reports[worker] = incarnation, data
        self._bytes += len(data)
        for watcher in self._watchers.values():
            watcher.unsent[worker] = None

    def due(self, now: float) -> Iterator[tuple[WorkerId, m.ToRouter]]:
        """What is to be sent now."""
        silent_s = self._roster.settings.evict_s
        for router in [name for name, each in self._watchers.items() if now - each.heard_at >= silent_s]:
            del self._watchers[router]
        newest = self._roster.watched
        roster: m.Roster | None = None
        for router, watcher in self._watchers.items():
            if watcher.is_due and watcher.seen != newest and now >= watcher.sent_at + ROSTER_S:
                roster = roster or self._vouch(self._roster.roster())
                watcher.is_due, watcher.sent_at = False, now
                yield router, roster
            yield from self._reports_for(router, watcher)
        wanted: set[WorkerId] = set().union(*(watcher.unsent for watcher in self._watchers.values()))
        for worker in self._reports.keys() - wanted:
            self._drop(worker)

    def next_deadline(self, now: float) -> float:
        """When a roster that had to wait may be sent."""
        waiting = [each.sent_at + ROSTER_S for each in self._watchers.values() if each.is_due]
        return min((at for at in waiting if at > now), default=now + self._roster.settings.ping_s)

    def _reports_for(self, router: WorkerId, watcher: _Watcher) -> Iterator[tuple[WorkerId, m.ToRouter]]:
        while watcher.unsent and watcher.reports_sent - watcher.reports_heard < REPORTS_AHEAD_MAX:
            worker = next(iter(watcher.unsent))
            del watcher.unsent[worker]
            found = self._reports.get(worker)
            if found is not None and self._roster.lists(worker, found[0]):
                watcher.reports_sent += 1
                yield router, m.RelayedReport(worker, *found)

    def _drop(self, worker: WorkerId) -> None:
        dropped = self._reports.pop(worker, None)
        if dropped is not None:
            self._bytes -= len(dropped[1])
