"""The routers that read a registry from outside: who they are, and what is still to be sent to each.

Laws: a router gets one roster at a time, the newest, and the next one only after it has said which one it has; reports
likewise, so many ahead of what has arrived. So what waits for a router that does not read is bounded. Of each worker
the newest report is kept, once for all routers, while one of them has not had it; a router that falls behind misses the
ones in between. One that says nothing for `evict_s` is forgotten.

Reports that workers send through the registry, and questions that go back to them; nothing here knows their content.

Laws: a report never changes how a worker stands. Only one of a listed life is passed on, and of each worker only so
many a second; the rest is counted and dropped. Nobody is asked who has not reported: it may not know the question.
"""

from __future__ import annotations

import logging
import math
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from kvbaton.control.registry import registry_messages as m
from kvbaton.control.registry.registry_roster import RegistryRoster
from kvbaton.observe.codes.entry import worth_saying
from kvbaton.protocol.ids import Incarnation, PeerId, WorkerId

log = logging.getLogger(__name__)

REPORTS_PER_S_MAX = 8.0
REPORTS_BURST_MAX = 16.0
QUESTIONS_MAX = 4096
"""That wait for the registry's next turn; beyond it they are not asked."""

OnReport = Callable[[WorkerId, Incarnation, bytes], None]
"""A report of a worker that is listed in that life; on the registry's thread, and must not block."""


@dataclass(slots=True)
class _Reporter:
    incarnation: Incarnation
    left: float  # reports that it may send at once
    at: float


class Reports:
    """One registry's. `ask` may be called from any thread, all else on the registry's."""

    def __init__(
        self,
        roster: RegistryRoster,
        on_report: OnReport | None,
        counters: Counter[str],
        watchers: RosterWatchers | None = None,
    ) -> None:
        self._watchers = RosterWatchers(roster, counters) if watchers is None else watchers
        self._on_report = on_report
        self._roster = roster
        self._counters = counters
        self._reporters: dict[WorkerId, _Reporter] = {}  # of those that are listed, and for a turn or so of others
        self._questions: deque[tuple[PeerId, tuple[str, ...]]] = deque()

    @property
    def taken(self) -> bool:
        """Whether anyone wants them."""
        return self._on_report is not None or len(self._watchers) > 0

    def take(self, worker: WorkerId, message: m.WorkerReport, now: float) -> None:
        if not self.taken or not self._roster.lists(worker, message.incarnation):
            self._counters["reports_late"] += 1
            return
        if not self._allows(worker, message.incarnation, now):
            self._counters["reports_over_rate"] += 1
            if worth_saying(self._counters["reports_over_rate"]):
                said = "[peer-flooding] %s reports over %g times a second; more is dropped"
                log.warning(said, worker, REPORTS_PER_S_MAX)
            return
        self._counters["reports"] += 1
        self._watchers.take_report(worker, message.incarnation, message.data)
        if self._on_report is None:
            return
        try:
            self._on_report(worker, message.incarnation, message.data)
        except Exception:
            self._counters["callback_faults"] += 1
            if worth_saying(self._counters["callback_faults"]):
                log.exception("[callback-failed] a report from %s could not be processed; continuing", worker)

    def ask(self, peer: PeerId, ids: Sequence[str]) -> bool:
        reporter = self._reporters.get(peer.worker)
        if reporter is None or reporter.incarnation != peer.incarnation or len(self._questions) >= QUESTIONS_MAX:
            return False
        self._questions.append((peer, tuple(each[: m.FIELD_CHARS_MAX] for each in ids[: m.SHOWN_MAX])))
        return True

    def questions(self) -> Iterator[tuple[WorkerId, m.Show]]:
        """What was asked since the last turn, of whoever is still listed."""
        for _ in range(len(self._questions)):
            peer, ids = self._questions.popleft()
            if self._roster.lists(peer.worker, peer.incarnation):
                yield peer.worker, m.Show(peer.incarnation, ids)

    def _allows(self, worker: WorkerId, incarnation: Incarnation, now: float) -> bool:
        reporter = self._reporters.get(worker)
        if reporter is None or reporter.incarnation != incarnation:
            self._reporters = {name: each for name, each in self._reporters.items() if self._roster.is_listed(name)}
            reporter = self._reporters[worker] = _Reporter(incarnation, REPORTS_BURST_MAX, now)
        earned = (now - reporter.at) * REPORTS_PER_S_MAX
        reporter.left, reporter.at = min(REPORTS_BURST_MAX, reporter.left + earned), now
        if reporter.left < 1.0:
            return False
        reporter.left -= 1.0
        return True


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
